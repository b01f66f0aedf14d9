"""What is known of a loss, and how a batch meets a model and a loss."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional

from ritz._core.batches import split_labels
from ritz._core.checks import check_choice

# ------------------------------------------------------------------------------------------
# What is known of a loss as a function of the network's outputs.

LossFunction = Callable[[Any, Any], Tensor]
Kind = Literal["cross_entropy", "binary_cross_entropy", "squared_error"]

_MODULES: dict[type[nn.Module], Kind] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy",
    nn.MSELoss: "squared_error",
}
_FUNCTIONS: dict[Any, Kind] = {
    functional.cross_entropy: "cross_entropy",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy",
    functional.mse_loss: "squared_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLoss:
    """A loss of torch with its Hessian in closed form.

    Attributes:
        kind: Which of the three.
        ignore_index: Target whose term is left out, for ``cross_entropy``.
        smoothing: Share of the labels that is spread over all classes, likewise.
    """

    kind: Kind
    ignore_index: int = -100
    smoothing: float = 0.0

    @property
    def sampled(self) -> bool:
        """Whether labels can be drawn: not for a loss that is smoothed, which is no likelihood."""
        return not self.smoothing

    def hessian(self, outputs: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
        """The Hessian at ``outputs`` times ``tangent``, of the same shape."""
        if self.kind == "squared_error":
            return tangent * (2 / outputs.numel())
        if self.kind == "binary_cross_entropy":
            chance = outputs.sigmoid()
            return tangent * (chance * (1 - chance) / outputs.numel())
        chances = outputs.softmax(1)
        mixed = chances * tangent
        product = mixed - chances * mixed.sum(1, keepdim=True)
        return product * self.weights(target, outputs).unsqueeze(1)

    def root(self, outputs: Tensor, target: Tensor) -> Tensor:
        r"""Columns of a root, ``(c, *outputs.shape)``: :math:`\nabla^2 \ell = \sum_c s_c s_c^\top`
        on each sample by itself; ``c`` is the number of its outputs, all positions together.
        """  # noqa: D205
        size = outputs[0].numel()
        units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
        units = units.view(size, 1, *outputs.shape[1:])
        if self.kind == "squared_error":
            return units.expand(size, *outputs.shape) * math.sqrt(2 / outputs.numel())
        if self.kind == "binary_cross_entropy":
            chance = outputs.sigmoid()
            return units * (chance * (1 - chance) / outputs.numel()).sqrt()
        # sqrt(p_c) (e_c - p) at the position of c: the outer products sum to diag(p) - p p'.
        chances = outputs.softmax(1)
        own = (units * chances).sum(2, keepdim=True).sqrt()  # zero at all other positions
        weights = self.weights(target, outputs).sqrt().unsqueeze(1)
        return own * (units - chances) * weights

    def sampled_hessian(
        self, outputs: Tensor, target: Tensor, drawn: Tensor, tangent: Tensor
    ) -> Tensor:
        r"""The mean over terms of :math:`s s^\top`, ``s`` the gradient at drawn labels.

        Its expectation is the Hessian.
        """
        if self.kind == "squared_error":
            slope = (outputs - drawn) * (2 / outputs[0].numel())
            along = (slope * tangent).flatten(1).sum(1) / len(outputs)
            return slope * along.view(-1, *(1,) * (outputs.ndim - 1))
        if self.kind == "binary_cross_entropy":
            return tangent * ((outputs.sigmoid() - drawn).square() / outputs.numel())
        ignored = drawn < 0 if target.is_floating_point() else target == self.ignore_index
        hot = functional.one_hot(torch.where(ignored, 0, drawn), outputs.shape[1])
        slope = outputs.softmax(1) - hot.movedim(-1, 1).to(outputs.dtype)
        along = (slope * tangent).sum(1) * self.weights(target, outputs)
        return slope * along.unsqueeze(1)

    def sample_losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Of ``cross_entropy``: as many times as there are samples, their shares in the mean."""
        terms = functional.cross_entropy(
            outputs,
            target,
            reduction="none",
            ignore_index=self.ignore_index,
            label_smoothing=self.smoothing,
        )
        shares = terms * self.weights(target, outputs)
        return shares.flatten(1).sum(1) * len(outputs) if shares.ndim > 1 else shares * len(outputs)

    def draw(self, outputs: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        """Labels drawn from the model of which this is the negative log likelihood."""
        outputs = outputs.detach()
        if self.kind == "squared_error":
            # The mean of d squares is the negative log likelihood of variance d / 2.
            noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
            spread = math.sqrt(outputs.shape[1:].numel() / 2)
            return outputs + noise.to(outputs) * spread
        terms = (len(outputs), *outputs.shape[2:])  # one class each
        shape = outputs.shape if self.kind == "binary_cross_entropy" else terms
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(outputs.device)
        if self.kind == "binary_cross_entropy":
            return (uniform < outputs.sigmoid()).to(outputs.dtype)
        below = outputs.double().softmax(1).cumsum(1) < uniform.unsqueeze(1)
        drawn = below.sum(1).clamp_max(outputs.shape[1] - 1)  # the last sum may fall short of one
        if target.is_floating_point():
            return drawn
        return torch.where(target == self.ignore_index, target, drawn)

    def weights(self, target: Tensor, outputs: Tensor) -> Tensor:
        """The weight of every term in the mean, of the shape of class indices."""
        if target.is_floating_point():
            # Chances of all classes, which torch does not ask to sum to one.
            mass = (1 - self.smoothing) * target.sum(1) + self.smoothing
            return mass.to(outputs.dtype) * (outputs.shape[1] / outputs.numel())
        kept = (target != self.ignore_index).to(outputs.dtype)
        return kept / kept.sum()


def recognised(loss_fn: Any) -> KnownLoss | None:
    """What is known of ``loss_fn``: a loss of torch, as module, function or partial of one."""
    kind, options = _described(loss_fn)
    weighted = options.get("weight") is not None or options.get("pos_weight") is not None
    if kind is None or weighted or options.get("reduction", "mean") != "mean":
        return None
    return KnownLoss(
        kind=kind,
        ignore_index=options.get("ignore_index", -100),
        smoothing=options.get("label_smoothing", 0.0),
    )


def check_reduction(loss_fn: Any) -> None:
    """Raise for a loss that is a sum: it would be taken for the mean of a batch."""
    options = _described(loss_fn)[1]
    if old := [name for name in ("size_average", "reduce") if options.get(name) is not None]:
        raise ValueError(f"loss_fn must say by reduction='mean' what it returns, got {old}")
    if options.get("reduction") == "sum":
        raise ValueError("loss_fn must return the mean over a batch, got one with reduction='sum'")


def _described(loss_fn: Any) -> tuple[Kind | None, dict[str, Any]]:
    """Which loss of torch it is, if one, and its options."""
    options: dict[str, Any] = {}
    if isinstance(loss_fn, nn.Module):
        kind = _MODULES.get(type(loss_fn))
        names = ("reduction", "weight", "pos_weight", "ignore_index", "label_smoothing")
        options = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    else:
        while isinstance(loss_fn, partial):
            if loss_fn.args:
                return None, options
            options = loss_fn.keywords | options
            loss_fn = loss_fn.func
        kind = _FUNCTIONS.get(loss_fn) if callable(loss_fn) and loss_fn.__hash__ else None
    return kind, options


def output_hessian(
    loss_fn: Any, outputs: Any, target: Any, tangent: Any, *, reverse: bool = False
) -> Any:
    """The Hessian of a loss in the outputs times a tangent: in closed form where it is known.

    With ``reverse`` by reverse rules alone, for losses without a forward rule over their backward.
    """
    known = recognised(loss_fn)
    if known is not None:
        return known.hessian(outputs, target, tangent)
    gradient = grad(lambda point: loss_fn(point, target))
    if reverse:
        return vjp(gradient, outputs)[1](tangent)[0]
    return jvp(gradient, (outputs,), (tangent,))[1]


def sample_losses(loss_fn: Any, outputs: Tensor, target: Any) -> Tensor:
    """The loss of every sample, ``(batch,)``, from a loss that returns the mean of a batch.

    Their mean is the loss of the batch, also where terms are left out of it.
    """
    known = recognised(loss_fn)
    if known is not None and known.kind == "cross_entropy" and not target.is_floating_point():
        return known.sample_losses(outputs, target)

    def one(output: Tensor, label: Any) -> Tensor:
        loss: Tensor = loss_fn(output.unsqueeze(0), label.unsqueeze(0))
        return loss

    losses: Tensor = vmap(one)(outputs, target)
    return losses


def is_kept(loss_fn: Any, labels: Tensor) -> Tensor:
    """Which labels a loss does not ignore."""
    ignored: int = _described(loss_fn)[1].get("ignore_index", -100)
    return labels != ignored


def term_mass(loss_fn: Any, target: Any) -> Tensor | None:
    """What a mean over class labels divides by: labels that are not ignored, or their weights.

    ``None`` where the mean is over all elements of the target, or not known.
    """
    kind, options = _described(loss_fn)
    if kind != "cross_entropy" or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    kept = is_kept(loss_fn, target)
    weight: Tensor | None = options.get("weight")
    if weight is None:
        return kept.sum()
    return (weight.to(target.device)[torch.where(kept, target, 0)] * kept).sum()


def check_labels(loss_fn: Any, outputs: Any, target: Any, where: str, *, some: bool = True) -> None:
    """Raise unless class labels are among the outputs: on a GPU torch would end the process.

    With ``some`` one of them at least must not be ignored.
    """
    known = recognised(loss_fn)
    if known is None and not isinstance(loss_fn, nn.CrossEntropyLoss):
        return
    kind: str = "cross_entropy" if known is None else known.kind
    check_choice("kind", kind, set(_MODULES.values()))
    if kind != "cross_entropy" or not isinstance(target, Tensor) or target.is_floating_point():
        return
    labels = target[is_kept(loss_fn, target)]
    if not len(labels):
        if not some:
            return
        raise ValueError(f"labels of {where} must not all be ignored")
    low, high, classes = int(labels.min()), int(labels.max()), outputs.shape[1]
    if low < 0 or high >= classes:
        raise ValueError(f"labels of {where} must be between 0 and {classes - 1}, as the outputs "
                         f"have {classes} classes; got {low if low < 0 else high}")  # fmt: skip


# ------------------------------------------------------------------------------------------
# How a batch meets a model: what goes in, what comes out, what it is compared with.

Forward = Callable[[nn.Module, Any], Any]


@final
class Adapter(nn.Module):
    """A model with a loss, called on whole batches.

    A module around the model, so that one call may replace all of its parameters, whichever of its
    methods a user's ``forward`` calls; the model itself is left as it is.

    Args:
        model: The user's.
        loss_fn: Takes outputs and target and returns the mean loss of the batch; ``None`` where
            the model returns the loss itself.
        forward: Takes the model and a batch and returns ``(outputs, target)``, or the loss where
            there is no ``loss_fn``.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None, forward: Forward | None
    ) -> None:
        super().__init__()
        # The model's own mode is not to follow that of this module.
        self.model, self.loss_fn, self.custom = model, _Callable(loss_fn), forward
        known = recognised(loss_fn)
        self.squared = known is not None and known.kind == "squared_error"

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Outputs and target of a batch; loss and ``None`` where the model returns the loss."""
        if self.custom is not None:
            found = self.custom(self.model, batch)
            if self.loss_fn.call is None:
                return found, None
            if not isinstance(found, tuple) or len(found) != 2:
                raise TypeError(
                    f"forward must return (outputs, target), got {type(found).__name__}"
                )
            return found
        named = isinstance(batch, Mapping)
        if self.loss_fn.call is None:
            if not named:
                raise TypeError("loss_fn must be given for batches of (inputs, target), got None")
            return _field(self.model(**batch), "loss"), None
        if named and "labels" not in batch:
            raise KeyError(f"a batch must have 'labels' for loss_fn, got {sorted(batch)}: pass "
                           "forward= to say how it is used")  # fmt: skip
        if not named and (not isinstance(batch, tuple | list) or len(batch) < 2):
            raise TypeError(f"a batch must be (inputs, target) or a dictionary, got a "
                            f"{type(batch).__name__}: pass forward= to use it")  # fmt: skip
        args, kwargs, target = split_labels(batch)
        return _logits(self.model(*args, **kwargs)), target

    def target(self, batch: Any) -> Any:
        """The target of a batch where it can be seen without calling the model, else ``None``."""
        if self.custom is not None or self.loss_fn.call is None:
            return None
        return split_labels(batch)[2]

    def loss(self, outputs: Any, target: Any) -> Any:
        """The mean loss of a batch."""
        if self.loss_fn.call is None:
            return outputs  # the loss itself
        if self.squared:
            if outputs.shape != target.shape:
                raise ValueError(f"target must be of the shape of the outputs, "
                                 f"{tuple(outputs.shape)}, got {tuple(target.shape)}")  # fmt: skip
            # torch's own has no forward rule over its backward.
            return (outputs - target).square().mean()
        return self.loss_fn.call(outputs, target)


class _Callable:
    """Hides a loss that is a module: its parameters, if any, are not the model's."""

    def __init__(self, call: LossFunction | None) -> None:
        self.call = call


def _logits(found: Any) -> Any:
    """The tensor of outputs of models that return several things by name, or that tensor."""
    if isinstance(found, Tensor):
        return found
    if isinstance(found, Mapping) or hasattr(found, "logits"):
        return _field(found, "logits")
    return found


def _field(found: Any, name: str) -> Any:
    value = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    if value is None:
        raise ValueError(f"the model must return its {name!r}, got {type(found).__name__}; "
                         "pass forward= to say where it is")  # fmt: skip
    return value


# ------------------------------------------------------------------------------------------
# Outputs beside the classes they should have named.


def labelled(loss_fn: Any, outputs: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """Outputs ``(n, classes)`` and labels ``(n,)`` of the terms of a batch that are not ignored.

    ``None`` where targets are not class labels: integers, one for each vector of outputs along
    axis 1, as cross-entropy has them; and two classes or more.
    """
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or target.dtype == torch.bool or outputs.ndim < 2:
        return None
    if outputs.shape[1] < 2 or outputs.shape[:1] + outputs.shape[2:] != target.shape:
        return None
    rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
    labels = target.reshape(-1)
    kept = is_kept(loss_fn, labels)
    return rows[kept], labels[kept]


def num_correct(loss_fn: Any, outputs: Any, target: Any) -> tuple[int, int]:
    """Labels met by the largest output, and labels; none where the target does not hold labels."""
    found = labelled(loss_fn, outputs, target)
    if found is None:
        return 0, 0
    return int((found[0].argmax(1) == found[1]).sum()), len(found[1])
