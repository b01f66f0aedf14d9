"""What must hold of a model, a loss and data before, and after, they are differentiated."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ritz.curvature.batches import rows
from ritz.curvature.losses import check_labels, recognised
from ritz.curvature.points import Context

if TYPE_CHECKING:
    from ritz.curvature.risk import Risk


def inspect_first_batch(risk: "Risk") -> Any:
    """Evaluate one batch twice, and raise unless its loss is a number, and the same number.

    Returns:
        The outputs of one sample, where outputs are a tensor.
    """
    _check_parameters(risk)
    before = risk.theta.clone()
    for index, context, _ in risk.contexts():
        with torch.no_grad(), risk.settings():
            outputs, target = risk.evaluate(risk.params, context)
            if not torch.equal(risk.theta, before):
                raise ValueError(
                    "model must leave its parameters as they are when it is called, got others "
                    "after it: has it an embedding with max_norm?"
                )
            _check_outputs(risk.loss_fn, outputs)
            check_labels(risk.loss_fn, outputs, target, f"batch {index}")
            first, again = (risk.batch_loss(risk.params, context) for _ in range(2))
        _check_loss(first, index)
        if recognised(risk.loss_fn) is None:
            _check_mean(risk, context, risk.batch_sizes[index], index)
        gap = abs(float(first) - float(again))
        if not gap <= 100 * torch.finfo(risk.theta.dtype).eps * abs(float(first)):
            raise ValueError(
                f"model must give the same loss in two calls, got {float(first):.9g} and "
                f"{float(again):.9g}: has it dropout or noise that eval mode does not turn off?"
            )
        return outputs[:1] if isinstance(outputs, Tensor) and outputs.ndim > 1 else None
    return None


def diagnose(risk: "Risk") -> None:
    """Raise an error that names the first batch whose labels, loss or gradient are bad."""
    with risk.settings():
        for index, context, _ in risk.contexts():
            with torch.no_grad():
                outputs, target = risk.evaluate(risk.params, context)
            check_labels(risk.loss_fn, outputs, target, f"batch {index}")
            gradient, loss = risk.batch_gradient(context)
            _check_loss(loss, index)
            if not bool(torch.isfinite(gradient).all()):
                raise ValueError(f"the gradient of batch {index} must be finite, got NaN or "
                                 f"Inf at a loss of {float(loss):.6g}")  # fmt: skip


def require_finite(risk: "Risk", total: Tensor) -> None:
    """Raise where a loss or gradient of all batches is not finite, naming the batch if it can."""
    if not bool(torch.isfinite(total.sum())):
        diagnose(risk)
        raise ValueError(f"loss and gradient must be finite in all processes, got {total.sum()} in "
                         "sum, and no fault in the batches of this one")  # fmt: skip


def _check_parameters(risk: "Risk") -> None:
    if bool(torch.isfinite(risk.theta).all()):
        return
    for name, tensor in risk.params.items():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ValueError(f"parameter {name!r} must be finite, got NaN or Inf in {bad} of its "
                             f"{tensor.numel()} values")  # fmt: skip


def _check_outputs(loss_fn: Any, outputs: Any) -> None:
    if recognised(loss_fn) is not None and not isinstance(outputs, Tensor):
        raise TypeError("model must return a tensor for this loss_fn, got "
                        f"{type(outputs).__name__}: pass forward= to choose from it")  # fmt: skip


def _check_mean(risk: "Risk", context: Context, size: int, index: int) -> None:
    """Raise where some samples, each of them twice, have twice the loss: that is a sum."""
    if not risk.separable or context.masks is not None:
        return
    few = torch.arange(min(4, size), device=risk.theta.device)
    batches = (rows(context.batch, few.repeat(times), size) for times in (1, 2))
    try:
        with torch.no_grad(), risk.settings():
            once, twice = (
                float(risk.batch_loss(risk.params, replace(context, batch=batch)))
                for batch in batches
            )
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # a model that takes batches of one size alone
    if once and abs(twice / once - 2) < 0.01:
        raise ValueError(
            f"loss_fn must return the mean over a batch, got what seems to be a sum: {once:.6g} "
            f"for {len(few)} samples of batch {index}, and {twice:.6g} for each of them twice"
        )


def _check_loss(loss: Any, index: int) -> None:
    if not isinstance(loss, Tensor) or loss.ndim:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return one number, the mean over the batch, got {got} in "
                         f"batch {index}: use reduction='mean'")  # fmt: skip
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss of batch {index} must be finite, got {float(loss)}")
