"""A model, a loss and data at one point in weight space, checked before and after derivatives."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from ritz._core.batches import Batch, join_rows, take_rows
from ritz._core.checks import check_choice, check_count, check_range, check_tensor
from ritz._core.distributed import Group, all_sum
from ritz._core.modes import (
    BATCH_NORM_MODES,
    BatchNormMode,
    Precision,
    arithmetic,
    batch_norms,
    dropout_shapes,
    evaluating,
    masked_dropout,
    recomputed_statistics,
)
from ritz._core.params import ParamSpace
from ritz.curvature._risk.batches import Batches
from ritz.curvature._risk.losses import (
    Adapter,
    Forward,
    LossFunction,
    check_labels,
    check_reduction,
    recognised,
)
from ritz.curvature._risk.modes import (
    Context,
    Params,
    Selection,
    copied,
    differentiable,
    outside_inference,
    product_modes,
    selected,
)

# ------------------------------------------------------------------------------------------
# What must hold of a model, a loss and data before, and after, they are differentiated.


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
            first = risk.adapter.loss(outputs, target)
            again = risk.batch_loss(risk.params, context)
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
    batches = (take_rows(context.batch, few.repeat(times), size) for times in (1, 2))
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


# ------------------------------------------------------------------------------------------
# A model, a loss and data at one point in weight space.

Sharing = Literal["split", "own", "none"]
PREFIX = "model."


@final
class Risk:
    r"""The mean loss :math:`L(\theta) = \frac{1}{N} \sum_i \ell_i(\theta) + \frac{\mu}{2}
    \|\theta\|^2` of a model on fixed data, at the point where the model is now.

    Parameters and buffers are copied, the model is never changed: neither its weights nor its
    running statistics nor its mode, whatever is computed. Memory: one vector, the constants, and
    the data up to 4 GiB (more is loaded again in every pass, and compared with the first).

    Args:
        model: Any module.
        loss_fn: Takes outputs and target of a batch, returns the *mean* loss over its samples; any
            callable, such as ``torch.nn.functional.cross_entropy``. ``None`` where the model
            returns its own loss (as Hugging Face models do).
        data: A ``DataLoader`` or list of batches, each ``(*inputs, target)`` or a dictionary of
            keyword arguments (with ``labels`` as target); or all samples as a tuple or dictionary
            of tensors. The order must be the same in every pass: a loader that shuffles or
            augments is refused unless ``freeze``.
        batch_norm: ``eval`` (running statistics), ``train`` (those of each batch) or
            ``recomputed`` (running statistics recomputed over these data at this point).
        params: Which parameters: a regular expression that the name must begin with (``layer3``,
            ``.*bias``), a list of names, or a function of the name. All that require a gradient by
            default; frozen ones never.
        forward: Takes the model and a batch, returns ``(outputs, target)``; for other batches.
        l2: The coefficient :math:`\mu`; it enters loss, gradient, Hessian and Gauss-Newton matrix.
        dropout: ``off``, or ``fixed``: dropout layers use one mask for each batch (what attention
            and recurrent layers drop inside themselves stays off).
        batch_size: Samples a batch where all came at once: 512 by default, but a part of the
            definition and so to be given where ``batch_norm="train"``.
        freeze: Hold the batches of the first pass, so that shuffling or augmentation is taken as
            it came.
        count: Number of samples in a batch, by which it is weighed; the length of its first tensor
            by default. A mean over tokens that are not ignored is exact with the number of these.
        precision: Of the arithmetic: ``float32``, ``tf32`` or ``float64``. By default that of the
            parameters, and ``float32`` for half-precision ones, whose values it holds exactly.
        sharing: With several processes: ``split`` (each was given all data and takes every k-th
            batch), ``own`` (each was given its own part) or ``none`` (each for itself).
        group: The processes; all by default.
        seed: Of the dropout masks.

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
        check_reduction(loss_fn)
        self.model, self.loss_fn = model, loss_fn
        self.batch_norm, self.dropout, self.l2, self.seed = batch_norm, dropout, float(l2), seed
        self.sharing, self.group, self.precision = sharing, group, precision
        self.adapter = Adapter(model, loss_fn, forward)
        self.space, self.theta, self._constants, cast = copied(model, params, precision)
        self._batches = Batches(
            data,
            batch_size=batch_size,
            freeze=freeze,
            count=count,
            device=self.space.device,
            dtype=cast,
            group=group,
            shared=sharing == "split",
        )
        self.num_samples = self._total(sum(self._batches.sizes))
        self._check_batch_norm(batch_norm)
        self._shapes: dict[Any, list[tuple[tuple[int, ...], float]]] = {}
        self._first = 0  # number of the first batch, by which masks are drawn
        self._statistics: Params | None = None
        self._outputs: Any = None
        self._outputs = inspect_first_batch(self)
        if self._batches.held:
            for index, batch in self._batches:
                self._check_labels(index, batch)

    # What is computed

    def loss(self) -> float:
        """The risk, with its L2 term: one forward pass."""
        with torch.no_grad(), self.settings():
            total = sum(
                weight * self.batch_loss(self.params, context).double()
                for _, context, weight in self.contexts()
            )
        total = self.reduced(torch.as_tensor(total, device=self.theta.device).double())
        require_finite(self, total)
        return float(total) + 0.5 * self.l2 * float(self.theta.double().square().sum())

    def gradient(self) -> Tensor:
        """The gradient ``(P,)``, with that of the L2 term: one forward and backward pass."""
        total = torch.zeros_like(self.theta)
        with self.settings():
            for _, context, weight in self.contexts():
                total.add_(self.batch_gradient(context)[0], alpha=weight)
        require_finite(self, self.reduced(total))
        return total.add_(self.theta, alpha=self.l2)

    def batch_gradient(self, context: Context) -> tuple[Tensor, Tensor]:
        """Gradient ``(P,)`` and loss of one batch, without the L2 term; inside ``settings``."""
        by_params = grad_and_value(lambda params: self.batch_loss(params, context))
        gradient, value = by_params(self.params)
        return self.space.flatten(gradient).detach(), value.detach()

    def evaluate(self, params: Params, context: Context) -> tuple[Any, Any]:
        """Outputs and target of a batch at other values of the chosen parameters."""
        state = {PREFIX + name: value for name, value in (params | context.constants).items()}
        with masked_dropout(self.model, context.masks):
            found: tuple[Any, Any] = functional_call(self.adapter, state, (context.batch,))
        return found

    def batch_loss(self, params: Params, context: Context) -> Tensor:
        """The mean loss of a batch, without the L2 term; inside ``settings``."""
        found: Tensor = self.adapter.loss(*self.evaluate(params, context))
        return found

    # Other risks

    def at(self, theta: Tensor) -> "Risk":
        """The same at another point ``(P,)``; statistics that were recomputed are so again."""
        check_tensor(
            "theta", theta, dtype=self.theta.dtype, device=self.theta.device, rows=len(self.theta)
        )
        if theta.ndim != 1:
            raise ValueError(f"theta must be one vector, got {tuple(theta.shape)}")
        with outside_inference():
            return self._changed(theta=theta.detach().clone())

    def with_batch_norm(self, mode: BatchNormMode) -> "Risk":
        """The same with batch norm in another mode."""
        check_choice("batch_norm", mode, BATCH_NORM_MODES)
        self._check_batch_norm(mode)
        return self._changed(batch_norm=mode)

    def on(self, params: Selection) -> "Risk":
        """The same as a function of some of its parameters, the others constant."""
        other = self._changed()
        names = selected(list(self.space.shapes), params)
        values = self.params
        other._constants = self._constants | {
            name: values[name] for name in values if name not in names
        }
        other.space = ParamSpace({name: values[name] for name in names})
        with outside_inference():
            other.theta = other.space.flatten({name: values[name] for name in names})
        return other

    def batch(self, index: int) -> "Risk":
        """The risk of one batch of this process's alone, as this process alone sees it."""
        for number, batch in self._batches:
            if number == index:
                other = self._on_batches([batch], [self._batches.sizes[number]])
                other._first = self._first + number
                return other
        raise IndexError(f"index must be that of one of {self.num_batches} batches, got {index}")

    def samples(self, indices: Tensor, *, batch_size: int = 512) -> "Risk":
        """The risk of some samples alone, by their position in the order of the data.

        Needs data that are held in memory; not for batch statistics or dropout masks, which
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
        batch, size = self.joined()
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= size:
            raise ValueError(f"indices must be between 0 and {size - 1}, got {low} to {high}")
        chosen = [take_rows(batch, part, size) for part in indices.split(batch_size)]
        return self._on_batches(chosen, [len(part) for part in indices.split(batch_size)])

    # What operators need

    @property
    def params(self) -> Params:
        """The chosen parameters by name, as views of ``theta``."""
        return self.space.unflatten(self.theta)

    @property
    def num_batches(self) -> int:
        """Batches that this process was given."""
        return len(self._batches)

    @property
    def batch_sizes(self) -> list[int]:
        """Samples in each of them."""
        return list(self._batches.sizes)

    @property
    def separable(self) -> bool:
        """Whether the loss of a sample does not depend on the others of its batch."""
        layers = batch_norms(self.model).values()
        # Without running statistics a layer uses those of the batch in every mode.
        return all(self.batch_norm != "train" and n.running_mean is not None for n in layers)

    def require_separable(self, what: str) -> None:
        """Raise where samples are not independent of each other."""
        if not self.separable:
            raise ValueError(f"{what} needs samples that do not depend on each other, got "
                             "batch_norm='train': use 'eval' or 'recomputed'")  # fmt: skip

    def joined(self) -> tuple[Batch, int]:
        """All samples of this process as one batch, with their number."""
        if not self._batches.held:
            raise ValueError("data must be held in memory for this: pass freeze=True")
        pairs = [(batch, self._batches.sizes[index]) for index, batch in self._batches]
        if not pairs:
            raise ValueError("data must hold at least one batch for each process, got none for one")
        batches, sizes = zip(*pairs, strict=True)
        return join_rows(batches, sizes), sum(sizes)

    def contexts(self) -> Iterator[tuple[int, Context, float]]:
        """Number, context and weight of each of this process's batches, in their fixed order.

        Weights sum to one over all processes.
        """
        constants = self.constants()
        for index, batch in self._batches:
            weight = self._batches.sizes[index] / self.num_samples
            if not self._batches.held:
                self._check_labels(index, batch)
            yield index, Context(constants, batch, self._masks(index, batch)), weight

    def reduced(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes that share the data, in place."""
        return tensor if self.sharing == "none" else all_sum(tensor, self.group)

    def constants(self) -> Params:
        """What the model needs beside the chosen parameters."""
        if self.batch_norm != "recomputed":
            return self._constants
        if self._statistics is None:
            self._statistics = self._recomputed()
        return self._constants | self._statistics

    def settings(self) -> AbstractContextManager[None]:
        """The modes in which products are taken, for a block, and then back as they were."""
        return product_modes(
            self.adapter,
            batch_statistics=self.batch_norm == "train",
            precision=self.precision,
            device=self.theta.device,
        )

    def arithmetic(self) -> AbstractContextManager[None]:
        """The precision of products alone, for a block."""
        return arithmetic(self.precision)

    def __repr__(self) -> str:
        parts = [f"{self.space.size:,} parameters", f"{self.num_samples:,} samples"]
        if batch_norms(self.model):
            parts.append(f"batch norm {self.batch_norm}")
        if self.l2:
            parts.append(f"l2 {self.l2:g}")
        if self.dropout == "fixed":
            parts.append("dropout fixed")
        if self.precision is not None:
            parts.append(self.precision)
        return f"Risk({type(self.model).__name__}, {', '.join(parts)})"

    def diagnose(self) -> None:
        """Raise an error that names the first batch whose labels, loss or gradient are bad."""
        diagnose(self)

    # Inside

    def _masks(self, index: int, batch: Batch) -> list[Tensor] | None:
        if self.dropout == "off":
            return None
        index += self._first
        if index not in self._shapes:
            context = Context(self._constants, batch, None)
            with torch.no_grad(), self.settings():
                self._shapes[index] = dropout_shapes(
                    self.model, lambda: self.evaluate(self.params, context)
                )
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        masks = []
        for shape, chance in self._shapes[index]:
            # Of a dtype that is said, lest the default one choose the mask.
            kept = torch.rand(shape, generator=generator, dtype=torch.float32) >= chance
            scale = max(1 - chance, torch.finfo(torch.float32).tiny)
            masks.append(differentiable(kept.to(self.theta) / scale))
        return masks

    def _recomputed(self) -> Params:
        weighted = [
            (Context(self._constants, batch, self._masks(index, batch)),
             self._batches.sizes[index] / self.num_samples)
            for index, batch in self._batches
        ]  # fmt: skip
        # Within those of the mode, which has all but the statistics of batches.
        with outside_inference(), self.settings(), evaluating(self.adapter, batch_statistics=True):
            return recomputed_statistics(
                self.model,
                lambda context: self.evaluate(self.params, context),  # type: ignore[arg-type]
                weighted,
                reduce=self.reduced,
            )

    def _check_labels(self, index: int, batch: Batch) -> None:
        """On a GPU a label out of range would end the process."""
        if self._outputs is not None:
            target = self.adapter.target(batch)
            check_labels(self.loss_fn, self._outputs, target, f"batch {index}")

    def _check_batch_norm(self, mode: BatchNormMode) -> None:
        if mode == "train" and self._batches.defaulted and batch_norms(self.model):
            raise ValueError("batch_size must be given where batch_norm='train', got None: it is "
                             "part of what the loss is")  # fmt: skip

    def _on_batches(self, batches: list[Batch], sizes: list[int]) -> "Risk":
        other = self._changed(sharing="none")
        other._batches = Batches.fixed(batches, sizes)
        other.num_samples = sum(sizes)
        if self.batch_norm == "recomputed":
            # Statistics belong to the whole, of which these are samples.
            other.batch_norm, other._constants = "eval", self.constants()
        return other

    def _changed(self, **changes: Any) -> "Risk":
        other = copy.copy(self)
        other._statistics = None
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def _total(self, own: int) -> int:
        if self.sharing != "own":
            return own
        return int(all_sum(torch.tensor(own, device=self.space.device), self.group))
