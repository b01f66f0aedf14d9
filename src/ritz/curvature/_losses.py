"""Losses with derivatives in closed form, losses of single samples, checks of labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional

from ritz._core.attempts import UNSUITABLE, attempt
from ritz._core.checks import check_range
from ritz._core.cross_entropy import (
    accurate_entropy,
    binary_terms,
    chunked_entropy,
    chunked_hessian,
    entropy_terms,
    is_large,
    output_parts,
    places_of,
    softmax_product,
)

# ------------------------------------------------------------------------------------------
# Losses of torch as functions of the outputs f, with derivatives in closed form.

FORWARD = "pass forward=lambda model, batch: (outputs, target)"
LossFunction = Callable[[Any, Any], Tensor]
Kind = Literal["cross_entropy", "binary_cross_entropy", "squared_error"]

_KINDS: dict[Any, Kind] = {
    nn.CrossEntropyLoss: "cross_entropy",
    # Log-probabilities f = log softmax(z) satisfy softmax(f) = softmax(z) and logsumexp(f) = 0, so
    # the cross-entropy of f equals -f_y. It is used here because -f_y is linear in f, so that its
    # Gauss-Newton matrix would be zero. Cross-entropy of f has the same matrix as that of z.
    nn.NLLLoss: "cross_entropy",
    functional.nll_loss: "cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy",
    nn.MSELoss: "squared_error",
    functional.cross_entropy: "cross_entropy",
    functional.binary_cross_entropy_with_logits: "binary_cross_entropy",
    functional.mse_loss: "squared_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLoss:
    r"""A loss of torch, the mean over terms, with its derivatives in the outputs.

    A term is a sample (squared error), an output (binary cross-entropy) or a label
    (cross-entropy; several per sample for outputs with positions, such as tokens).

    Attributes:
        kind: ``cross_entropy``, ``binary_cross_entropy`` or ``squared_error``.
        ignore_index: Label whose terms are left out, for ``cross_entropy``.
        smoothing: The ``label_smoothing`` of ``cross_entropy``.
    """

    kind: Kind
    ignore_index: int = -100
    smoothing: float = 0.0

    def mean(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch, whose derivatives keep their digits near a minimum."""
        if self.kind == "squared_error":
            # Not mse_loss: its backward pass has no forward-mode derivative in torch.
            return (outputs - target).square().mean()
        if self.kind == "binary_cross_entropy":
            return binary_terms(outputs, target).mean()
        return mean_entropy(outputs, target, self)

    def hessian(self, outputs: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
        """Return the Hessian in the outputs times ``tangent``, of the same shape."""
        if self.kind != "cross_entropy":
            return tangent * self._second_derivative(outputs)
        if is_large(outputs, target):
            return chunked_hessian(outputs, target, tangent, self.ignore_index, self.smoothing)
        product = softmax_product(outputs.softmax(1), tangent)
        return product * self.weights(target, outputs).unsqueeze(1)

    def root(self, outputs: Tensor, target: Tensor) -> Tensor:
        r"""Return columns of a root of the Hessian of each sample, ``(c, *outputs.shape)``.

        :math:`\nabla^2 \ell = \sum_c s_c s_c^\top`, with as many columns as a sample has outputs.
        """
        size = outputs[0].numel()
        units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
        units = units.view(size, 1, *outputs.shape[1:])
        if self.kind != "cross_entropy":
            return units * self._second_derivative(outputs).sqrt()
        p = outputs.softmax(1)
        # s_c = sqrt(p_c) (e_c - p): sum_c s_c s_c' = diag(p) - p p'. At other positions s_c = 0.
        root_p = (units * p).sum(2, keepdim=True).sqrt()
        weights = self.weights(target, outputs).sqrt().unsqueeze(1)
        return root_p * (units - p) * weights

    def _second_derivative(self, outputs: Tensor) -> Tensor:
        """Return the diagonal of the Hessian of a loss that is a sum over outputs."""
        if self.kind == "squared_error":
            # d^2/df^2 (f - y)^2 = 2
            return torch.full_like(outputs, 2 / outputs.numel())
        # p (1 - p), with p = sigmoid(f)
        p = outputs.sigmoid()
        return p * outputs.neg().sigmoid() / outputs.numel()  # 1 - p, without cancellation

    def score(self, outputs: Tensor, target: Any, drawn: Tensor) -> Tensor:
        r"""Return the gradient :math:`s` in the outputs at drawn labels, scaled for each term.

        If the labels are drawn by :meth:`draw`, :math:`\mathbb{E}[s s^\top]` is the Hessian.
        """
        if self.kind == "squared_error":
            return (outputs - drawn) * (2 / outputs[0].numel() / math.sqrt(len(outputs)))
        if self.kind == "binary_cross_entropy":
            return (outputs.sigmoid() - drawn) / math.sqrt(outputs.numel())
        # p - e_y. An ignored label has weight zero, so it can be replaced by any class.
        if not target.is_floating_point():
            drawn = torch.where(target == self.ignore_index, 0, drawn)
        one_hot = functional.one_hot(drawn, outputs.shape[1]).movedim(-1, 1)
        weights = self.weights(target, outputs).sqrt().unsqueeze(1)
        return (outputs.softmax(1) - one_hot.to(outputs.dtype)) * weights

    def by_term(self, score: Tensor) -> Tensor:
        """Split a score into one column per term of a sample, ``(c, *outputs.shape)``.

        The labels of different terms are independent, so their outer products are summed, and not
        the scores themselves.
        """
        inner = score[0].shape
        places = inner.numel() if self.kind == "binary_cross_entropy" else inner[1:].numel()
        if self.kind == "squared_error" or places == 1:
            return score.unsqueeze(0)
        units = torch.eye(places, dtype=score.dtype, device=score.device)
        shape = inner if self.kind == "binary_cross_entropy" else (1, *inner[1:])
        return score * units.view(places, 1, *shape)

    def sampled_hessian(
        self, outputs: Tensor, target: Any, drawn: Tensor, tangent: Tensor
    ) -> Tensor:
        r"""Return :math:`s (s^\top t)` at drawn labels, computed separately for each term."""
        score = self.score(outputs, target, drawn)
        along = score * tangent
        if self.kind == "squared_error" and along.ndim > 1:
            along = along.sum(tuple(range(1, along.ndim)), keepdim=True)
        elif self.kind == "cross_entropy":
            along = along.sum(1, keepdim=True)
        return score * along

    def draw(self, outputs: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        """Draw labels from the model whose negative log likelihood is the loss."""
        outputs, device = outputs.detach(), generator.device
        options: Any = {"generator": generator, "device": device, "dtype": torch.float64}
        if self.kind == "squared_error":
            # The mean of d squares is the negative log likelihood of a Gaussian of variance d / 2.
            noise = torch.randn(outputs.shape, **options)
            return outputs + noise.to(outputs) * math.sqrt(outputs.shape[1:].numel() / 2)
        binary = self.kind == "binary_cross_entropy"
        shape = outputs.shape if binary else (len(outputs), *outputs.shape[2:])
        uniform = torch.rand(shape, **options).to(outputs.device)
        if binary:
            return (uniform < outputs.sigmoid()).to(outputs.dtype)
        drawn = torch.empty(shape, dtype=torch.int64, device=outputs.device)
        for part in output_parts(outputs):
            # Inverse transform sampling: the first class whose cumulative probability exceeds the
            # uniform number.
            sums = outputs[part].double().softmax(1).cumsum_(1)
            below = sums < places_of(uniform, part).unsqueeze(1)
            # Roundoff: the last sum may be below 1.
            places_of(drawn, part).copy_(below.sum(1).clamp_max(outputs.shape[1] - 1))
        if target.is_floating_point():
            return drawn
        return torch.where(target == self.ignore_index, target, drawn)

    def weights(self, target: Tensor, outputs: Tensor) -> Tensor:
        """Return the weight of each label in the mean, of the shape of class labels."""
        if target.is_floating_point():
            # Probabilities of all classes. torch does not require that they sum to one.
            mass = (1 - self.smoothing) * target.sum(1) + self.smoothing
            return mass.to(outputs.dtype) * (outputs.shape[1] / outputs.numel())
        counted = (target != self.ignore_index).to(outputs.dtype)
        return counted / counted.sum().clamp_min(1)  # zero if all labels are ignored


def known_loss(loss_fn: Any) -> KnownLoss | None:
    """Return the closed forms of a loss of torch: a module, a function or a partial of one.

    ``None`` if they are not known: for other losses, class weights, and sums instead of means.
    """
    kind, options = _describe(loss_fn)
    weighted = any(options.get(name) is not None for name in ("weight", "pos_weight"))
    if kind is None or weighted or options.get("reduction", "mean") != "mean":
        return None
    ignored, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
    return KnownLoss(kind=kind, ignore_index=ignored, smoothing=smoothing)


def accurate_loss(loss_fn: Any) -> Any:
    """Return the loss, in a form whose derivatives keep their digits if one is known."""
    known = known_loss(loss_fn)
    return loss_fn if known is None or _takes_log_probabilities(loss_fn) else known.mean


def as_likelihood(loss_fn: Any) -> KnownLoss:
    """Return the closed forms of a loss, or raise if it is not a negative log likelihood."""
    known = known_loss(loss_fn)
    # With label smoothing the loss is not the negative log likelihood of a label.
    if known is None or known.smoothing:
        raise ValueError(
            "loss_fn must be a likelihood to draw labels from: cross_entropy, "
            "binary_cross_entropy_with_logits or mse_loss, neither weighted nor smoothed, got "
            f"{loss_fn}{layout_advice(loss_fn)}"
        )
    return known


def layout_advice(loss_fn: Any) -> str:
    """Return how a user-defined loss becomes a known one, if it only changes the layout."""
    if _describe(loss_fn)[0] is not None or isinstance(loss_fn, nn.Module):
        return ""
    return (
        "; if it changes the layout of one of these, let forward return outputs "
        "(samples, classes, ...) and target (samples, ...)"
    )


def check_reduction(loss_fn: Any) -> None:
    """Raise if a loss of torch is the sum over the batch."""
    options = _describe(loss_fn)[1]
    if old := [name for name in ("size_average", "reduce") if options.get(name) is not None]:
        raise ValueError(f"loss_fn must use reduction='mean', got the deprecated {old[0]}")
    if options.get("reduction") == "sum":
        raise ValueError("loss_fn must return the mean over a batch, got one with reduction='sum'")


def _describe(loss_fn: Any) -> tuple[Kind | None, dict[str, Any]]:
    """Return the kind of a loss of torch, or ``None``, and its options."""
    options: dict[str, Any] = {}
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", "weight", "pos_weight", "ignore_index", "label_smoothing")
        options = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
        return _KINDS.get(type(loss_fn)), options
    while isinstance(loss_fn, partial):
        if loss_fn.args:
            return None, options
        options = loss_fn.keywords | options
        loss_fn = loss_fn.func
    return _KINDS.get(loss_fn) if callable(loss_fn) and loss_fn.__hash__ else None, options


def _takes_log_probabilities(loss_fn: Any) -> bool:
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    return isinstance(loss_fn, nn.NLLLoss) or loss_fn is functional.nll_loss


def check_log_probabilities(loss_fn: Any, outputs: Any) -> None:
    """Raise if the loss needs log-probabilities and the outputs are not."""
    if _takes_log_probabilities(loss_fn) and isinstance(outputs, Tensor) and outputs.ndim > 1:
        total = float(outputs.detach().double().exp().sum(1).sub(1).abs().max())
        # Half of the digits, so that log(p + 1e-8) instead of log(p) passes.
        if not total <= torch.finfo(outputs.dtype).eps ** 0.5:
            raise ValueError(
                "model must return log-probabilities for NLLLoss, got outputs whose exponentials "
                f"sum to 1 with an error of {total:.2g}: add nn.LogSoftmax(1), or use "
                "nn.CrossEntropyLoss"
            )


def mean_entropy(outputs: Tensor, target: Tensor, loss: KnownLoss) -> Tensor:
    """Return the mean cross-entropy, in chunks if the outputs are large, without cancellation."""
    if is_large(outputs, target):
        return chunked_entropy(outputs, target, loss.ignore_index, loss.smoothing)
    labels = outputs.ndim > 1 and not target.is_floating_point()
    if labels and not loss.smoothing and outputs.shape[:1] + outputs.shape[2:] == target.shape:
        return accurate_entropy(outputs, target, loss.ignore_index)
    options: Any = {"ignore_index": loss.ignore_index, "label_smoothing": loss.smoothing}
    return functional.cross_entropy(outputs, target, **options)


def output_hessian(
    loss_fn: Any, outputs: Any, target: Any, tangent: Any, reverse: bool = False
) -> Any:
    """Return the Hessian of a loss in the outputs times a tangent, in closed form if it is known.

    Other losses are differentiated twice. ``reverse`` uses reverse mode alone, for losses whose
    backward pass has no forward-mode derivative in torch.
    """
    known = known_loss(loss_fn)
    if known is not None:
        return known.hessian(outputs, target, tangent)
    if _takes_log_probabilities(loss_fn):
        loss_fn = partial(functional.cross_entropy, **_describe(loss_fn)[1])
    gradient = grad(lambda point: loss_fn(point, target))
    if reverse:
        return vjp(gradient, outputs)[1](tangent)[0]
    return jvp(gradient, (outputs,), (tangent,))[1]


def sample_losses(loss_fn: Any, outputs: Tensor, target: Any) -> Tensor:
    """Return the loss of each sample, ``(batch,)``, from a loss that returns the mean of a batch.

    The losses of cross-entropy are weighted by the number of labels of a sample that are not
    ignored, so that their mean is the loss of the batch. Other losses are called on batches of one
    sample.
    """
    known = known_loss(loss_fn)
    if known is None or known.kind != "cross_entropy" or target.is_floating_point():
        return losses_alone(loss_fn, outputs, target)
    if known.smoothing or _takes_log_probabilities(loss_fn):
        entropy = partial(functional.cross_entropy, label_smoothing=known.smoothing)
        call = functional.nll_loss if _takes_log_probabilities(loss_fn) else entropy
        terms = call(outputs, target, reduction="none", ignore_index=known.ignore_index)
    else:
        terms = entropy_terms(outputs, target, known.ignore_index)
    shares = terms * known.weights(target, outputs)
    return shares.reshape(len(outputs), -1).sum(1) * len(outputs)


def losses_alone(loss_fn: Any, outputs: Tensor, target: Any) -> Tensor:
    """Return the loss of each sample, ``(batch,)``, called on batches of one sample."""
    call = accurate_loss(loss_fn)

    def alone(output: Tensor, label: Tensor) -> Tensor:
        loss: Tensor = call(output.unsqueeze(0), label.unsqueeze(0))
        return loss

    losses, problem = attempt(lambda: vmap(alone)(outputs, target), *UNSUITABLE)
    if not problem:
        side_by_side: Tensor = losses
        return side_by_side
    # Some losses check their arguments by value, which vmap does not allow.
    parts, problem = attempt(lambda: list(map(alone, outputs, target)), *UNSUITABLE)
    if problem:
        raise ValueError(
            f"loss_fn must be defined for a batch of one sample, but it fails: {problem}"
        )
    return torch.stack(parts)


# ------------------------------------------------------------------------------------------
# Class labels.


def is_kept(loss_fn: Any, labels: Tensor) -> Tensor:
    """Return which labels a loss does not ignore."""
    ignored: int = _describe(loss_fn)[1].get("ignore_index", -100)
    return labels != ignored


def term_mass(loss_fn: Any, target: Any) -> Tensor | None:
    """Return the divisor of cross-entropy: the number of its labels, or the sum of their weights.

    ``None`` for other losses and for targets that are probabilities.
    """
    kind, options = _describe(loss_fn)
    if kind != "cross_entropy" or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = is_kept(loss_fn, target)
    weight: Tensor | None = options.get("weight")
    if weight is None:
        return counted.sum()
    # Labels in uint8 would be a mask.
    return (weight.to(target.device)[torch.where(counted, target, 0).long()] * counted).sum()


def check_loss(loss: Any, index: int) -> None:
    """Raise unless a loss is a finite scalar."""
    check_shape(loss, f"batch {index}")
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss of batch {index} must be finite, got {float(loss)}")


def check_shape(loss: Any, where: str) -> None:
    """Raise unless a loss is a scalar."""
    if not isinstance(loss, Tensor) or loss.ndim:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return one number, the mean over the batch, got {got} in {where}: use "
            "reduction='mean'"
        )


def _has_class_labels(loss_fn: Any, target: Any) -> bool:
    # Also for a subclass of CrossEntropyLoss, whose derivatives are not known.
    entropy = _describe(loss_fn)[0] == "cross_entropy" or isinstance(loss_fn, nn.CrossEntropyLoss)
    return entropy and isinstance(target, Tensor)


def check_labels(loss_fn: Any, outputs: Any, target: Any, where: str, *, some: bool = True) -> None:
    """Raise if class labels of cross-entropy are out of range.

    On a GPU, torch would abort the process. With ``some``, raise also if all labels are ignored.
    """
    if not _has_class_labels(loss_fn, target) or target.is_floating_point():
        return
    labels, classes = target[is_kept(loss_fn, target)], outputs.shape[1]
    if some and not len(labels):
        raise ValueError(f"labels of {where} must not all be ignored")
    for label in labels.aminmax() if len(labels) else ():
        check_range(f"labels of {where}", int(label), low=0, high=classes - 1)


def check_outputs(loss_fn: Any, outputs: Any, target: Any, where: str) -> None:
    """Raise unless outputs and labels are those that a known loss needs."""
    if known_loss(loss_fn) is not None:
        check_one_tensor(outputs)
        if not isinstance(target, Tensor):
            kind = type(target).__name__
            raise TypeError(f"labels of {where} must be a tensor for this loss, got {kind}")
    check_scores(loss_fn, outputs, target, where)
    check_labels(loss_fn, outputs, target, where)
    check_log_probabilities(loss_fn, outputs)


def check_scores(loss_fn: Any, outputs: Any, target: Any, where: str) -> None:
    """Raise unless the shapes of outputs and labels fit cross-entropy."""
    if not _has_class_labels(loss_fn, target):
        return
    check_one_tensor(outputs)
    shape, expected = tuple(outputs.shape), outputs.shape[:1] + outputs.shape[2:]
    if outputs.ndim < 2:
        raise ValueError(
            f"outputs of the model must be (samples, classes) for cross-entropy, got {shape} (a "
            "list of data holds batches; a dataset or a tuple holds samples)"
        )
    if target.is_floating_point() and target.shape == outputs.shape:
        return  # probabilities of all classes
    if target.dtype not in (torch.int64, torch.uint8):
        kind = "integers" if target.is_floating_point() else "int64"
        raise TypeError(
            f"labels of {where} must be {kind} for cross-entropy, got {str(target.dtype)[6:]}: "
            "convert them by .long()"
        )
    if target.shape != expected:
        advice = ": remove the last dimension by .squeeze(-1)" if target.shape[-1:] == (1,) else ""
        raise ValueError(
            f"labels of {where} must be of shape {tuple(expected)} for outputs of shape {shape}, "
            f"got {tuple(target.shape)}{advice}"
        )


def check_one_tensor(outputs: Any) -> None:
    """Raise unless the outputs of the model are a single tensor."""
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise TypeError(
            f"the model must return one tensor for this loss, got {kind}: {FORWARD}, or give a "
            "loss_fn (--loss module:function) that takes them all"
        )


def outputs_and_labels(loss_fn: Any, outputs: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """Return outputs ``(n, classes)`` and labels ``(n,)`` of a batch, without ignored labels.

    ``None`` unless the target holds class labels as in cross-entropy: integers, one for each vector
    of at least two outputs along axis 1.
    """
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or target.dtype == torch.bool or outputs.ndim < 2:
        return None
    if outputs.shape[1] < 2 or outputs.shape[:1] + outputs.shape[2:] != target.shape:
        return None
    rows, labels = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]), target.reshape(-1)
    counted = is_kept(loss_fn, labels)
    return rows[counted], labels[counted]


def num_correct(loss_fn: Any, outputs: Any, target: Any) -> tuple[int, int]:
    """Return how many labels have the largest output, and how many labels there are.

    Both are zero if the target does not hold class labels.
    """
    pair = outputs_and_labels(loss_fn, outputs, target)
    if pair is None:
        return 0, 0
    return int((pair[0].argmax(1) == pair[1]).sum()), len(pair[1])


def check_not_doubled(once: float, twice: float, index: int) -> None:
    """Raise if a loss doubles when all samples of a batch are repeated, as a sum does."""
    if once and abs(twice / once - 2) < 0.01:
        raise ValueError(
            "loss_fn must return the mean over a batch, but it seems to be a sum: it doubles, from "
            f"{once:.6g} to {twice:.6g}, if samples of batch {index} are repeated; use "
            "reduction='mean'"
        )
