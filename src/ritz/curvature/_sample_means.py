"""Whether the loss of a batch is the mean over its samples, and depends on the outputs alone.

``risk`` is a :class:`Risk`, whose module imports this one.
"""

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_map_only

from ritz._core import modes
from ritz._core.attempts import UNSUITABLE, attempt
from ritz._core.batches import is_rows, take_rows, tensors
from ritz._core.checks import is_below
from ritz.curvature import _losses as losses
from ritz.curvature._parameters import Context

NOT_A_MEAN = "the loss of a batch must be the mean of the losses of its samples, but it is not"
CAUSES = "class weights, masks and ignored labels have this effect: use a loss without them"


# ------------------------------------------------------------------------------------------
# Checks of the first batch.


def check_not_sum(risk: Any, context: Context, index: int) -> None:
    """Raise if the loss of a few samples doubles when each sample is repeated, as a sum does."""
    if not risk.separable or context.masks is not None:
        return
    few = torch.arange(min(4, context.size), device=risk.theta.device)

    def loss(repeats: int) -> float:
        batch = take_rows(context.batch, few.repeat(repeats), context.size)
        return float(risk.batch_loss(risk.params, replace(context, batch=batch)))

    with torch.no_grad(), risk.settings():
        # The calls fail for a model that accepts a single batch size only.
        values, _ = attempt(lambda: (loss(1), loss(2)), *UNSUITABLE)
    once, twice = values or (0.0, 0.0)
    losses.check_not_doubled(once, twice, index)


def check_outputs_suffice(risk: Any, outputs: Any, target: Any) -> None:
    """Raise if the loss depends on parameters of the model in another way than by its outputs.

    Such a penalty would be computed at the weights of the model, and its derivatives would be zero.
    """
    weights = [p for p in risk.model.parameters() if p.requires_grad]
    with modes.recording():
        loss = risk.adapter.loss(outputs, target)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        # A loss may have parameters that do not belong to the model. They are constants.
        slopes = torch.autograd.grad(loss.sum(), weights, allow_unused=True)
    if any(slope is not None for slope in slopes):
        raise ValueError(
            "loss_fn must depend on the parameters of the model through its outputs alone: pass "
            "l2= for an L2 term, or let forward return other penalties with the outputs"
        )


def warn_if_batches_matter(risk: Any, outputs: Any, target: Any, size: int) -> None:
    """Warn if the loss of a batch is not the mean over its two halves, as masks make it.

    Derivatives in the outputs are compared, see :func:`sample_gap`.
    """
    mass = losses.term_mass(risk.loss_fn, target)
    # Most losses of torch need no gradients of the outputs, which may be large.
    plain = risk.adapter.elementwise or (mass is not None and float(mass) == target.numel())
    rows = all(is_rows(leaf, size) for leaf in tensors((outputs, target)))
    if size < 2 or plain or not rows:
        return

    def slope(part: slice) -> Tensor:
        """Return the derivatives of the loss of some samples, as one vector."""
        some, labels = take_rows((point, target), part, size)
        parts = torch.autograd.grad(
            risk.adapter.loss(some, labels), leaves, materialize_grads=True, allow_unused=True
        )
        share = len(range(size)[part]) / size
        return share * torch.cat([p.reshape(-1).to(risk.theta.dtype) for p in parts])

    with modes.recording():
        point = tree_map_only(
            Tensor,
            lambda x: x.detach().requires_grad_() if x.is_floating_point() else x,
            outputs,
        )
        leaves = [leaf for leaf in tensors(point) if leaf.requires_grad]
        half = size // 2
        # A loss that cannot be computed for half a batch cannot be compared.
        slopes, problem = attempt(
            lambda: [slope(slice(0, size)), slope(slice(0, half)), slope(slice(half, size))],
            *UNSUITABLE,
        )
    if problem or not leaves:
        return
    whole, first, second = slopes
    gap, scale = float((whole - first - second).norm()), float(whole.norm())
    # The tolerance is that of sample_gap. Gradients that are not finite raise in products.
    if math.isfinite(gap) and not is_below(
        gap, 10 * math.sqrt(torch.finfo(risk.theta.dtype).eps) * scale
    ):
        warnings.warn(
            "the loss of a batch is not the mean over its samples (does loss_fn leave out, weight "
            "or compare samples?), so the risk depends on how the samples are batched: pass "
            "count=, a function that returns how many terms the loss of a batch is the mean of",
            stacklevel=4,  # the call of Risk
        )


# ------------------------------------------------------------------------------------------
# All batches.


def sample_gap(risk: Any, alone: bool) -> str:
    """Return why the loss of a batch is not the mean over its samples, or ``""`` if it is.

    Derivatives are compared instead of losses, because class weights and ignored labels may change
    the loss very little.
    """
    if alone and not risk.separable:
        return "the samples of a batch depend on each other through batch norm in train mode"
    for index, context, _ in risk.contexts():
        size = context.size
        with torch.no_grad(), risk.settings():
            outputs, target = risk.evaluate(risk.params, context)
            by_row = risk.loss_fn is not None and is_rows(outputs, size)
            if not by_row and not alone:
                shape = getattr(outputs, "shape", None)
                got = type(outputs).__name__ if shape is None else tuple(shape)
                return f"outputs must have a row for each of {size} samples, got {got}"
            if alone and not any(is_rows(leaf, size) for leaf in tensors(context.batch)):
                return f"data must have one row for each of {size} samples, unlike batch {index}"
            gaps = []
            if alone and by_row and size > 1:
                # The outputs of half a batch must not depend on the other half.
                half = slice(0, size // 2)
                apart = risk.evaluate(risk.params, context.rows(half))[0]
                gaps.append(("outputs", apart - outputs[half], float(outputs.norm())))
            pair = _gap_by_outputs(risk, outputs, target, alone) if by_row else None
            # Without rows, or if the loss fails for single outputs, gradients are compared.
            gaps.append(("derivatives", *(pair or _gap_by_gradients(risk, context))))
        for name, difference, scale in gaps:
            gap = float(difference.norm())
            if not math.isfinite(gap):
                risk.diagnose()
            # The tolerance is 1.5e-7 in float64 and 3e-3 in float32. In the cases that were
            # measured, class weights, masks and ignored labels changed derivatives by 28 % or more.
            if not is_below(gap, 10 * math.sqrt(torch.finfo(risk.theta.dtype).eps) * scale):
                return (
                    f"{NOT_A_MEAN}: {name} of norm {scale:.2g} differ by {gap:.2g} in batch {index}"
                    f" ({CAUSES})"
                )
    return ""


def _gap_by_outputs(
    risk: Any, outputs: Tensor, target: Any, alone: bool
) -> tuple[Tensor, float] | None:
    """Return the difference of the derivatives in the outputs, and their norm, or ``None``."""
    whole = grad(lambda point: risk.adapter.loss(point, target))(outputs)
    by_sample = losses.losses_alone if alone else losses.sample_losses
    slope = grad(lambda point: by_sample(risk.loss_fn, point, target).mean())
    mean, problem = attempt(partial(slope, outputs), *(UNSUITABLE if alone else ()))
    return None if problem else (whole - mean, float(whole.norm()))


def _gap_by_gradients(risk: Any, context: Context) -> tuple[Tensor, float]:
    """Return the batch gradient minus the mean sample gradient, and the size of the latter."""
    whole, mean, square = risk.batch_gradient(context)[0], torch.zeros_like(risk.theta), 0.0
    for row in range(context.size):
        gradient = risk.batch_gradient(context.rows(slice(row, row + 1)))[0]
        mean.add_(gradient, alpha=1 / context.size)
        square += float(gradient.double().square().sum()) / context.size
    return whole - mean, math.sqrt(square)
