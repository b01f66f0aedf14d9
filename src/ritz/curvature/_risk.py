"""A model, a loss and data at one point in weight space."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value

from ritz._core import modes
from ritz._core.batches import Batch, is_rows, join_rows, take_rows, tensors
from ritz._core.checks import check_choice, check_count, check_range, check_tensor, is_below
from ritz._core.distributed import Group, all_sum
from ritz._core.modes import BATCH_NORM_MODES, BatchNormMode, Precision, batch_norms
from ritz._core.params import ParamSpace
from ritz.curvature import _losses as losses
from ritz.curvature._batches import Batches
from ritz.curvature._losses import Adapter, Forward, LossFunction, check_labels, known_loss
from ritz.curvature._modes import (
    LIMITS,
    Context,
    Params,
    Selection,
    copy_state,
    product_modes,
    select_names,
)

Sharing = Literal["split", "own", "none"]


@final
class Risk:
    r"""The mean loss :math:`L(\theta) = \frac{1}{N} \sum_i \ell_i(\theta) + \frac{\mu}{2}
    \|\theta\|^2` of a model on fixed data, at the current parameters of the model.

    Parameters and buffers are copied. The model is never changed: not its weights, its running
    statistics or its mode. Memory: one vector, the constants, and the data up to 4 GiB. More data
    are loaded again in every pass and compared with the first one.

    Args:
        model: Any module.
        loss_fn: Takes outputs and target of a batch, returns the *mean* loss over its samples. Any
            callable, such as ``torch.nn.functional.cross_entropy``. ``None`` if the model returns
            its own loss, as Hugging Face models do.
        data: A ``DataLoader`` or list of batches, each ``(*inputs, target)`` or a dictionary of
            keyword arguments with ``labels`` as target; or all samples as a tuple or dictionary of
            tensors. The order must be the same in every pass. A loader that shuffles or augments is
            refused unless ``freeze``.
        batch_norm: ``eval`` (running statistics), ``train`` (statistics of each batch) or
            ``recomputed`` (running statistics recomputed over these data at this point).
        params: The parameters that vary: a regular expression that matches the beginning of a name
            (``layer3``, ``.*bias``), a list of names, or a function of the name. Defaults to all
            that require a gradient. Frozen parameters never vary.
        forward: Takes the model and a batch, returns ``(outputs, target)``. For batches of other
            forms.
        l2: The coefficient :math:`\mu`. It enters loss, gradient, Hessian and Gauss-Newton matrix.
        dropout: ``off``, or ``fixed``: dropout layers use one mask per batch. Dropout inside
            attention and recurrent layers stays off.
        batch_size: Samples per batch if ``data`` holds all samples at once. Defaults to 512, but
            must be given for ``batch_norm="train"``, where it is part of the definition.
        freeze: Hold the batches of the first pass in memory. Accepts loaders that shuffle or
            augment.
        count: Number of samples in a batch, its weight in the mean. Defaults to the length of the
            first tensor. If the loss is a mean over tokens that are not ignored, return their
            number.
        precision: Precision of the arithmetic: ``float32``, ``tf32`` or ``float64``. Defaults to
            the dtype of the parameters, and to ``float32`` for half precision.
        sharing: For several processes: ``split`` (each was given all data and takes every k-th
            batch), ``own`` (each was given its own part) or ``none`` (each works alone).
        group: The processes. Defaults to all.
        seed: Seed of the dropout masks.

    Attributes:
        theta: The chosen parameters as one vector ``(P,)``, in the order of
            ``named_parameters()``.
        space: Their names and shapes.
        num_samples: :math:`N`, over all processes.
    """  # noqa: D205

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        data: Any,
        *,
        batch_norm: BatchNormMode = "eval",
        params: Selection | None = None,
        forward: Forward | None = None,
        l2: float = 0.0,
        dropout: Literal["off", "fixed"] = "off",
        batch_size: int | None = None,
        freeze: bool = False,
        count: Callable[[Batch], int] | None = None,
        precision: Precision | None = None,
        sharing: Sharing = "split",
        group: Group | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable or None, got {type(loss_fn).__name__}")
        check_choice("batch_norm", batch_norm, BATCH_NORM_MODES)
        check_choice("dropout", dropout, ("off", "fixed"))
        check_choice("sharing", sharing, ("split", "own", "none"))
        check_range("l2", l2, low=0.0)
        losses.check_reduction(loss_fn)
        self.model, self.loss_fn = model, loss_fn
        self.batch_norm, self.dropout, self.l2, self.seed = batch_norm, dropout, float(l2), seed
        self.sharing, self.group, self.precision = sharing, group, precision
        self.adapter = Adapter(model, loss_fn, forward)
        self.space, self.theta, self._constants, cast = copy_state(model, params, precision)
        self._batches = Batches(
            data,
            batch_size=batch_size,
            freeze=freeze,
            memory=LIMITS.data,
            count=count,
            device=self.space.device,
            dtype=cast,
            group=group,
            shared=sharing == "split",
        )
        self.num_samples = sum(self._batches.sizes)
        if sharing == "own":
            total = torch.tensor(self.num_samples, device=self.space.device)
            self.num_samples = int(all_sum(total, group))
        self._check_batch_norm(batch_norm)
        self._mask_shapes: dict[Any, list[tuple[tuple[int, ...], float]]] = {}
        self._first = 0  # number of the first batch, which seeds its masks
        self._statistics: Params | None = None
        self._sample_gaps: dict[bool, str] = {}
        self._outputs: Any = None  # outputs of one sample, to check labels against
        self._outputs = _inspect_first_batch(self)
        if self._batches.held:
            for index, batch in self._batches:
                self._check_labels(index, batch)

    # Loss and gradient

    def loss(self) -> float:
        """Return the risk with its L2 term. One forward pass."""
        total = torch.zeros((), dtype=torch.float64, device=self.theta.device)
        with torch.no_grad(), self.settings():
            for _, context, weight in self.contexts():
                total += weight * self.batch_loss(self.params, context).double()
        self._require_finite(self.sum_over_processes(total))
        return float(total) + 0.5 * self.l2 * float(self.theta.double().square().sum())

    def gradient(self) -> Tensor:
        """Return the gradient ``(P,)`` with its L2 term. One forward and backward pass."""
        total = torch.zeros_like(self.theta)
        with self.settings():
            for _, context, weight in self.contexts():
                total.add_(self.batch_gradient(context)[0], alpha=weight)
        self._require_finite(self.sum_over_processes(total))
        return total.add_(self.theta, alpha=self.l2)

    def batch_gradient(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return gradient ``(P,)`` and loss of one batch, without L2. Call inside ``settings``."""
        by_params = grad_and_value(lambda params: self.batch_loss(params, context))
        gradient, value = by_params(self.params)
        return self.space.flatten(gradient).detach(), value.detach()

    def evaluate(self, params: Params, context: Context) -> tuple[Any, Any]:
        """Return outputs and target of a batch at other values of the chosen parameters."""
        state = {f"model.{name}": value for name, value in (params | context.constants).items()}
        with modes.masked_dropout(self.model, context.masks):
            pair: tuple[Any, Any] = functional_call(self.adapter, state, (context.batch,))
        return pair

    def batch_loss(self, params: Params, context: Context) -> Tensor:
        """Return the mean loss of a batch, without L2. Call inside ``settings``."""
        loss: Tensor = self.adapter.loss(*self.evaluate(params, context))
        return loss

    # Other risks

    def at(self, theta: Tensor) -> "Risk":
        """Return the risk at another point ``(P,)``. Recomputed statistics are recomputed there."""
        check_tensor(
            "theta", theta, dtype=self.theta.dtype, device=self.theta.device, rows=len(self.theta)
        )
        if theta.ndim != 1:
            raise ValueError(f"theta must be one vector, got {tuple(theta.shape)}")
        with modes.outside_inference():
            return self._changed(theta=theta.detach().clone())

    def with_batch_norm(self, mode: BatchNormMode) -> "Risk":
        """Return the risk with batch norm in another mode."""
        check_choice("batch_norm", mode, BATCH_NORM_MODES)
        self._check_batch_norm(mode)
        return self._changed(batch_norm=mode)

    def on(self, params: Selection) -> "Risk":
        """Return the risk as a function of some of its parameters, with the others constant."""
        names = select_names(list(self.space.shapes), params)
        constants = self.params
        values = {name: constants.pop(name) for name in names}
        space = ParamSpace(values)
        with modes.outside_inference():
            theta = space.flatten(values)
        return self._changed(space=space, theta=theta, _constants=self._constants | constants)

    def batch(self, index: int) -> "Risk":
        """Return the risk of one batch of this process, for this process alone."""
        for number, batch in self._batches:
            if number == index:
                other = self._on_batches([batch], [self._batches.sizes[number]])
                other._first = self._first + number
                return other
        raise IndexError(f"index must be that of one of {self.num_batches} batches, got {index}")

    def samples(self, indices: Tensor, *, batch_size: int = 512) -> "Risk":
        """Return the risk of some samples, by their position in the order of the data.

        The data must be held in memory. Not available for batch statistics or dropout masks, which
        belong to batches.
        """
        self.require_separable("samples()")
        if self.dropout == "fixed":
            raise ValueError("samples() needs dropout='off', got 'fixed': masks belong to batches")
        check_count("batch_size", batch_size)
        if not isinstance(indices, Tensor) or indices.ndim != 1 or indices.dtype != torch.int64:
            got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"indices must be one vector of int64, got {got}")
        if not len(indices):
            raise ValueError("indices must name at least one sample, got none")
        batch, size = self.join_batches()
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= size:
            raise ValueError(f"indices must be between 0 and {size - 1}, got {low} to {high}")
        parts = indices.split(batch_size)
        return self._on_batches(
            [take_rows(batch, part, size) for part in parts], [len(part) for part in parts]
        )

    # For operators

    @property
    def params(self) -> Params:
        """The chosen parameters by name, as views of ``theta``."""
        return self.space.unflatten(self.theta)

    @property
    def num_batches(self) -> int:
        """Number of batches in the data of this process."""
        return len(self._batches)

    @property
    def batch_sizes(self) -> list[int]:
        """Number of samples in each batch."""
        return self._batches.sizes

    @property
    def separable(self) -> bool:
        """Whether the outputs of a sample do not depend on the other samples of its batch."""
        layers = batch_norms(self.model).values()
        # A layer without running statistics uses those of the batch in every mode.
        return all(self.batch_norm != "train" and n.running_mean is not None for n in layers)

    def require_separable(self, caller: str) -> None:
        """Raise if the samples of a batch depend on each other."""
        if not self.separable:
            raise ValueError(
                f"{caller} needs samples that do not depend on each other, got "
                "batch_norm='train': use 'eval' or 'recomputed'"
            )

    def sample_gap(self, *, alone: bool) -> str:
        """Return why the loss of a batch is not the mean over its samples, or ``""`` if it is.

        All batches of this process are compared once, and the answer is cached: one forward pass,
        or one gradient per sample if outputs or losses of samples cannot be told apart.

        Args:
            alone: The loss of a sample is that of a batch of one, as needed to regroup samples.
                Otherwise a sample of cross-entropy counts by its labels that are not ignored.
        """
        if alone not in self._sample_gaps:
            self._sample_gaps[alone] = _sample_gap(self, alone)
        return self._sample_gaps[alone]

    def require_sample_mean(self, *, alone: bool) -> None:
        """Raise, in all processes, unless the loss of each batch is the mean over its samples."""
        gap = self.sample_gap(alone=alone)
        flag = torch.tensor(float(bool(gap)), device=self.theta.device)
        if float(self.sum_over_processes(flag)):
            raise ValueError(
                gap
                or "the loss of a batch must be the mean of the losses of its "
                "samples, got another one in another process"
            )

    def join_batches(self) -> tuple[Batch, int]:
        """Return all samples of this process as one batch, with their number."""
        if not self._batches.held:
            raise ValueError("data must be held in memory for this: pass freeze=True")
        pairs = [(batch, self._batches.sizes[index]) for index, batch in self._batches]
        if not pairs:
            raise ValueError("data must hold at least one batch for each process, got none for one")
        batches, sizes = zip(*pairs, strict=True)
        return join_rows(batches, sizes), sum(sizes)

    def contexts(self) -> Iterator[tuple[int, Context, float]]:
        """Yield number, context and weight of each batch of this process, in a fixed order.

        Weights sum to one over all processes.
        """
        constants = self.constants()
        for index, batch in self._batches:
            weight = self._batches.sizes[index] / self.num_samples
            if not self._batches.held:
                self._check_labels(index, batch)
            yield index, Context(constants, batch, self._masks(index, batch)), weight

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes that share the data, in place, and return it."""
        return tensor if self.sharing == "none" else all_sum(tensor, self.group)

    def constants(self) -> Params:
        """Return everything the model needs except the chosen parameters."""
        if self.batch_norm != "recomputed":
            return self._constants
        if self._statistics is None:
            weighted = [
                (
                    Context(self._constants, batch, self._masks(index, batch)),
                    self._batches.sizes[index] / self.num_samples,
                )
                for index, batch in self._batches
            ]
            # Inside the modes of products, which differ in the batch statistics alone.
            statistics = modes.evaluating(self.adapter, batch_statistics=True)
            with modes.outside_inference(), self.settings(), statistics:
                self._statistics = modes.recomputed_statistics(
                    self.model,
                    lambda context: self.evaluate(self.params, context),  # type: ignore[arg-type]
                    weighted,
                    reduce=self.sum_over_processes,
                )
        return self._constants | self._statistics

    def settings(self) -> AbstractContextManager[None]:
        """Return a context manager for the modes in which products are computed."""
        return product_modes(
            self.adapter,
            batch_statistics=self.batch_norm == "train",
            precision=self.precision,
            device=self.theta.device,
        )

    def diagnose(self) -> None:
        """Raise an error that names the first batch whose labels, loss or gradient are bad."""
        with self.settings():
            for index, context, _ in self.contexts():
                with torch.no_grad():
                    outputs, target = self.evaluate(self.params, context)
                check_labels(self.loss_fn, outputs, target, f"batch {index}")
                gradient, loss = self.batch_gradient(context)
                _check_loss(loss, index)
                if not bool(torch.isfinite(gradient).all()):
                    raise ValueError(
                        f"the gradient of batch {index} must be finite, got NaN or "
                        f"Inf at a loss of {float(loss):.6g}"
                    )

    def __repr__(self) -> str:
        parts = {
            f"{self.space.size:,} parameters": True,
            f"{self.num_samples:,} samples": True,
            f"batch norm {self.batch_norm}": bool(batch_norms(self.model)),
            f"l2 {self.l2:g}": bool(self.l2),
            "dropout fixed": self.dropout == "fixed",
            str(self.precision): self.precision is not None,
        }
        shown = ", ".join(part for part, wanted in parts.items() if wanted)
        return f"Risk({type(self.model).__name__}, {shown})"

    def _masks(self, index: int, batch: Batch) -> list[Tensor] | None:
        if self.dropout == "off":
            return None
        index += self._first
        if index not in self._mask_shapes:
            context = Context(self._constants, batch, None)
            with torch.no_grad(), self.settings():
                self._mask_shapes[index] = modes.dropout_shapes(
                    self.model, lambda: self.evaluate(self.params, context)
                )
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        masks = []
        for shape, p in self._mask_shapes[index]:
            # With an explicit dtype: the default dtype must not change the mask.
            passed = torch.rand(shape, generator=generator, dtype=torch.float32) >= p
            # Dropout scales by 1 / (1 - p), so that the mean stays the same.
            scale = max(1 - p, torch.finfo(torch.float32).tiny)
            masks.append(modes.differentiable(passed.to(self.theta) / scale))
        return masks

    def _check_labels(self, index: int, batch: Batch) -> None:
        if self._outputs is not None:
            target = self.adapter.target(batch)
            check_labels(self.loss_fn, self._outputs, target, f"batch {index}")

    def _check_batch_norm(self, mode: BatchNormMode) -> None:
        if mode == "train" and self._batches.defaulted and batch_norms(self.model):
            raise ValueError(
                "batch_size must be given if batch_norm='train', got None: it is part "
                "of the definition of the loss"
            )

    def _require_finite(self, total: Tensor) -> None:
        if not bool(torch.isfinite(total.sum())):
            self.diagnose()
            raise ValueError(
                f"loss and gradient must be finite in all processes, got "
                f"{total.sum()} in sum, and no fault in the batches of this process"
            )

    def _on_batches(self, batches: list[Batch], sizes: list[int]) -> "Risk":
        other = self._changed(sharing="none", num_samples=sum(sizes))
        other._batches = Batches.fixed(batches, sizes)
        if self.batch_norm == "recomputed":
            # The statistics are those of all data, of which these are a part.
            other.batch_norm, other._constants = "eval", self.constants()
        return other

    def _changed(self, **changes: Any) -> "Risk":
        other = copy.copy(self)
        other._statistics, other._sample_gaps = None, {}
        for name, value in changes.items():
            setattr(other, name, value)
        return other


# ------------------------------------------------------------------------------------------
# Checks of the model and the loss.


def _inspect_first_batch(risk: Risk) -> Any:
    """Evaluate one batch twice, and raise unless its loss is a number, the same both times.

    Returns:
        The outputs of one sample, or ``None`` if the outputs are not a tensor.
    """
    for name, value in risk.params.items():
        if bad := int((~value.isfinite()).sum()):
            raise ValueError(
                f"parameter {name!r} must be finite, got NaN or Inf in {bad} of its "
                f"{value.numel()} values"
            )
    before = risk.theta.clone()
    for index, context, _ in risk.contexts():
        with torch.no_grad(), risk.settings():
            outputs, target = risk.evaluate(risk.params, context)
            if not torch.equal(risk.theta, before):
                raise ValueError(
                    "model must leave its parameters unchanged when it is called, got others "
                    "after it: has it an embedding with max_norm?"
                )
            known = known_loss(risk.loss_fn)
            if known is not None and not isinstance(outputs, Tensor):
                raise TypeError(
                    "model must return a tensor for this loss_fn, got "
                    f"{type(outputs).__name__}: pass forward= to choose from it"
                )
            check_labels(risk.loss_fn, outputs, target, f"batch {index}")
            first = risk.adapter.loss(outputs, target)
            again = risk.batch_loss(risk.params, context)
        _check_loss(first, index)
        if known is None:
            _check_not_sum(risk, context, index)
        gap = abs(float(first) - float(again))
        if not is_below(gap, 100 * torch.finfo(risk.theta.dtype).eps * abs(float(first))):
            raise ValueError(
                f"model must give the same loss in two calls, got {float(first):.9g} and "
                f"{float(again):.9g}: has it dropout or noise that eval mode does not turn off?"
            )
        return outputs[:1] if isinstance(outputs, Tensor) and outputs.ndim > 1 else None
    return None


def _check_loss(loss: Any, index: int) -> None:
    if not isinstance(loss, Tensor) or loss.ndim:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return one number, the mean over the batch, got {got} in "
            f"batch {index}: use reduction='mean'"
        )
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss of batch {index} must be finite, got {float(loss)}")


def _check_not_sum(risk: Risk, context: Context, index: int) -> None:
    """Raise if the loss of a few samples doubles when each of them comes twice: it is a sum."""
    if not risk.separable or context.masks is not None:
        return
    size = risk.batch_sizes[index]
    few = torch.arange(min(4, size), device=risk.theta.device)
    try:
        with torch.no_grad(), risk.settings():
            once, twice = (
                float(risk.batch_loss(risk.params, replace(context, batch=batch)))
                for batch in (take_rows(context.batch, few.repeat(k), size) for k in (1, 2))
            )
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # a model that takes batches of one size alone
    if once and abs(twice / once - 2) < 0.01:
        raise ValueError(
            f"loss_fn must return the mean over a batch, got what seems to be a sum: {once:.6g} "
            f"for {len(few)} samples of batch {index}, and {twice:.6g} for each of them twice"
        )


def _sample_gap(risk: Risk, alone: bool) -> str:
    """Compare the derivative of the loss of each batch with the mean over its samples.

    The derivative shows class weights and ignored labels that hardly change the loss itself.
    """
    if alone and not risk.separable:
        return "the samples of a batch must not depend on each other, got batch_norm='train'"
    for index, context, _ in risk.contexts():
        size = risk.batch_sizes[index]
        with torch.no_grad(), risk.settings():
            outputs, target = risk.evaluate(risk.params, context)
            by_row = risk.loss_fn is not None and is_rows(outputs, size)
            if not by_row and not alone:
                tensor = isinstance(outputs, Tensor)
                return (
                    f"outputs must be one tensor with a row for each of {size} samples, got "
                    f"{tuple(outputs.shape) if tensor else type(outputs).__name__} in batch "
                    f"{index}"
                )
            if alone and not any(is_rows(leaf, size) for leaf in tensors(context.batch)):
                return (
                    f"data must hold tensors with one row per sample, got none with {size} "
                    f"rows in batch {index}"
                )
            if alone and by_row and size > 1 and (coupled := _coupling(risk, context, outputs)):
                return f"{coupled} in batch {index}"
            pair = _gap_by_outputs(risk, outputs, target, alone) if by_row else None
            # Outputs that are not rows, or a loss that vmap cannot evaluate: by gradients.
            gap, scale = pair or _gap_by_gradients(risk, context, size)
        if not math.isfinite(gap):
            risk.diagnose()
        if not is_below(gap, _rtol(risk) * scale):
            return (
                "the loss of a batch must be the mean of the losses of its samples, got "
                f"derivatives that differ by {gap:.2g} of {scale:.2g} in batch {index}"
            )
    return ""


def _coupling(risk: Risk, context: Context, outputs: Tensor) -> str:
    """Evaluate half of a batch: its outputs must not depend on the other half."""
    size, half = len(outputs), slice(0, len(outputs) // 2)
    alone = risk.evaluate(risk.params, context.rows(half, size))[0]
    gap, scale = float((alone - outputs[half]).norm()), float(outputs.norm())
    if is_below(gap, _rtol(risk) * scale):
        return ""
    return (
        "the loss of a batch must be the mean of the losses of its samples, got outputs that "
        f"differ by {gap:.2g} of {scale:.2g} without the other samples"
    )


def _rtol(risk: Risk) -> float:
    # 1.5e-7 in float64, 3e-3 in float32. Class weights, masks and ignored labels changed the
    # derivative by 28 % and more in the cases that were measured.
    return 10 * math.sqrt(torch.finfo(risk.theta.dtype).eps)


def _gap_by_outputs(
    risk: Risk, outputs: Tensor, target: Any, alone: bool
) -> tuple[float, float] | None:
    """Return the difference of the derivatives in the outputs, and their norm."""
    by_sample = losses.losses_alone if alone else losses.sample_losses
    whole = grad(lambda point: risk.adapter.loss(point, target))(outputs)
    try:
        mean = grad(lambda point: by_sample(risk.loss_fn, point, target).mean())(outputs)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        if not alone:
            raise
        return None
    return float((whole - mean).norm()), float(whole.norm())


def _gap_by_gradients(risk: Risk, context: Context, size: int) -> tuple[float, float]:
    """Return the difference of the gradients, one sample after the other, and their size."""
    whole, mean, square = risk.batch_gradient(context)[0], torch.zeros_like(risk.theta), 0.0
    for row in range(size):
        gradient = risk.batch_gradient(context.rows(slice(row, row + 1), size))[0]
        mean.add_(gradient, alpha=1 / size)
        square += float(gradient.double().square().sum()) / size
    return float((whole - mean).norm()), math.sqrt(square)
