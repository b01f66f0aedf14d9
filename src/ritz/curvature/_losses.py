"""Losses: closed forms of known ones, losses of samples, labels; and the model with its loss."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional

from ritz._core.batches import split_labels
from ritz._core.checks import check_range, is_below
from ritz._core.entropy import (
    chunked_entropy,
    chunked_hessian,
    is_large,
    output_parts,
    places_of,
)

# ------------------------------------------------------------------------------------------
# Losses of torch as functions of the outputs f, with derivatives in closed form.

FORWARD = "pass forward=lambda model, batch: (outputs, target)"
LossFunction = Callable[[Any, Any], Tensor]
Kind = Literal["cross_entropy", "binary_cross_entropy", "squared_error"]

_KINDS: dict[Any, Kind] = {
    nn.CrossEntropyLoss: "cross_entropy",
    # Log-probabilities f = log softmax(z) satisfy softmax(f) = softmax(z) and logsumexp(f) = 0.
    # Cross-entropy of f is then their negative log likelihood, with the same Gauss-Newton matrix
    # as cross-entropy of z, while -f_y alone is linear and has none.
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
        ignore_index: Label whose term is left out, for ``cross_entropy``.
        smoothing: Probability spread over all classes, for ``cross_entropy``.
    """

    kind: Kind
    ignore_index: int = -100
    smoothing: float = 0.0

    def hessian(self, outputs: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
        """Return the Hessian in the outputs times ``tangent``, of the same shape."""
        if self.kind != "cross_entropy":
            return tangent * self._second_derivative(outputs)
        if is_large(outputs, target):
            return chunked_hessian(outputs, target, tangent, self.ignore_index, self.smoothing)
        # (diag(p) - p p') t, with p = softmax(f). A multiple of the ones changes nothing; with a
        # zero at the likeliest class nothing cancels if that is nearly certain.
        p = outputs.softmax(1)
        mixed = p * (tangent - tangent.gather(1, p.argmax(1, keepdim=True)))
        product = mixed - p * mixed.sum(1, keepdim=True)
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
        """Return the diagonal Hessian of a loss that is a sum over outputs."""
        if self.kind == "squared_error":
            # d^2/df^2 (f - y)^2 = 2
            return torch.full_like(outputs, 2 / outputs.numel())
        # p (1 - p), with p = sigmoid(f)
        p = outputs.sigmoid()
        return p * outputs.neg().sigmoid() / outputs.numel()  # 1 - p, without cancellation

    def score(self, outputs: Tensor, target: Any, drawn: Tensor) -> Tensor:
        r"""Return :math:`s`, the gradient in the outputs at drawn labels, scaled by term.

        :math:`\mathbb{E}[s s^\top]` is the Hessian, if the labels are drawn by :meth:`draw`.
        """
        if self.kind == "squared_error":
            return (outputs - drawn) * (2 / outputs[0].numel() / math.sqrt(len(outputs)))
        if self.kind == "binary_cross_entropy":
            return (outputs.sigmoid() - drawn) / math.sqrt(outputs.numel())
        # p - e_y. An ignored label has weight zero, so any class may stand in for it.
        if not target.is_floating_point():
            drawn = torch.where(target == self.ignore_index, 0, drawn)
        one_hot = functional.one_hot(drawn, outputs.shape[1]).movedim(-1, 1)
        weights = self.weights(target, outputs).sqrt().unsqueeze(1)
        return (outputs.softmax(1) - one_hot.to(outputs.dtype)) * weights

    def by_term(self, score: Tensor) -> Tensor:
        """Return a score as one column per term of a sample, ``(c, *outputs.shape)``.

        Labels of different terms are independent, so the squares of terms add up, not their sums.
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
        r"""Return :math:`s (s^\top t)`, with a product for each term, at drawn labels."""
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
            # The class whose interval of the cumulative distribution holds the uniform number.
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
        return counted / counted.sum()


def known_loss(loss_fn: Any) -> KnownLoss | None:
    """Return the closed forms of a loss of torch: a module, a function or a partial of one."""
    kind, options = _described(loss_fn)
    weighted = any(options.get(name) is not None for name in ("weight", "pos_weight"))
    if kind is None or weighted or options.get("reduction", "mean") != "mean":
        return None
    ignored, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
    return KnownLoss(kind=kind, ignore_index=ignored, smoothing=smoothing)


def as_likelihood(loss_fn: Any) -> KnownLoss:
    """Return a loss as a negative log likelihood, or raise if it is none."""
    known = known_loss(loss_fn)
    # A smoothed loss is not the negative log likelihood of a label.
    if known is None or known.smoothing:
        raise ValueError(
            "loss_fn must be a likelihood to draw labels from: cross_entropy, "
            "binary_cross_entropy_with_logits or mse_loss, neither weighted nor smoothed, got "
            f"{loss_fn}"
        )
    return known


def check_reduction(loss_fn: Any) -> None:
    """Raise for a loss of torch that is a sum over the batch."""
    options = _described(loss_fn)[1]
    if old := [name for name in ("size_average", "reduce") if options.get(name) is not None]:
        raise ValueError(f"loss_fn must use reduction='mean', got the deprecated {old[0]}")
    if options.get("reduction") == "sum":
        raise ValueError("loss_fn must return the mean over a batch, got one with reduction='sum'")


def _described(loss_fn: Any) -> tuple[Kind | None, dict[str, Any]]:
    """Return the kind of a loss of torch, if it is one, and its options."""
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
    """Raise unless the outputs are log-probabilities, if the loss needs them."""
    if _takes_log_probabilities(loss_fn) and isinstance(outputs, Tensor) and outputs.ndim > 1:
        total = float(outputs.detach().double().exp().sum(1).sub(1).abs().max())
        # Half of the digits: log(p + 1e-8) instead of log(p) passes.
        if not total <= torch.finfo(outputs.dtype).eps ** 0.5:
            raise ValueError(
                "model must return log-probabilities for NLLLoss, but probabilities sum to one up "
                f"to {total:.2g}: add nn.LogSoftmax(1), or use nn.CrossEntropyLoss"
            )


def mean_entropy(outputs: Tensor, target: Tensor, loss: KnownLoss | None = None) -> Tensor:
    """Return the cross-entropy of labels, in chunks if the outputs are large."""
    loss = loss or KnownLoss(kind="cross_entropy")
    if is_large(outputs, target):
        return chunked_entropy(outputs, target, loss.ignore_index, loss.smoothing)
    options: Any = {"ignore_index": loss.ignore_index, "label_smoothing": loss.smoothing}
    return functional.cross_entropy(outputs, target, **options)


def output_hessian(
    loss_fn: Any, outputs: Any, target: Any, tangent: Any, reverse: bool = False
) -> Any:
    """Return the Hessian of a loss in the outputs times a tangent, in closed form if known.

    Some losses have no forward rule for their backward pass; ``reverse`` uses reverse rules alone.
    """
    known = known_loss(loss_fn)
    if known is not None:
        return known.hessian(outputs, target, tangent)
    if _takes_log_probabilities(loss_fn):
        loss_fn = partial(functional.cross_entropy, **_described(loss_fn)[1])
    gradient = grad(lambda point: loss_fn(point, target))
    if reverse:
        return vjp(gradient, outputs)[1](tangent)[0]
    return jvp(gradient, (outputs,), (tangent,))[1]


def sample_losses(loss_fn: Any, outputs: Tensor, target: Any) -> Tensor:
    """Return the loss of each sample, ``(batch,)``, from a loss that returns the mean of a batch.

    For cross-entropy the mean over all samples is the loss of the batch even if labels are ignored:
    a sample counts by its labels. Any other loss is called on batches of one sample.
    """
    known = known_loss(loss_fn)
    if known is None or known.kind != "cross_entropy" or target.is_floating_point():
        return losses_alone(loss_fn, outputs, target)
    entropy = partial(functional.cross_entropy, label_smoothing=known.smoothing)
    call = functional.nll_loss if _takes_log_probabilities(loss_fn) else entropy
    terms = call(outputs, target, reduction="none", ignore_index=known.ignore_index)
    shares = terms * known.weights(target, outputs)
    return shares.reshape(len(outputs), -1).sum(1) * len(outputs)


def losses_alone(loss_fn: Any, outputs: Tensor, target: Any) -> Tensor:
    """Return the loss of each sample as a batch of one, ``(batch,)``."""
    losses: Tensor = vmap(lambda output, label: loss_fn(output.unsqueeze(0), label.unsqueeze(0)))(
        outputs, target
    )
    return losses


# ------------------------------------------------------------------------------------------
# Class labels.


def is_kept(loss_fn: Any, labels: Tensor) -> Tensor:
    """Return which labels a loss does not ignore."""
    ignored: int = _described(loss_fn)[1].get("ignore_index", -100)
    return labels != ignored


def term_mass(loss_fn: Any, target: Any) -> Tensor | None:
    """Return what cross-entropy divides by: the number of labels, or the sum of their weights.

    ``None`` if the loss is the mean over all elements of the target, or is not known.
    """
    kind, options = _described(loss_fn)
    if kind != "cross_entropy" or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = is_kept(loss_fn, target)
    weight: Tensor | None = options.get("weight")
    if weight is None:
        return counted.sum()
    return (weight.to(target.device)[torch.where(counted, target, 0)] * counted).sum()


def check_loss(loss: Any, index: int) -> None:
    """Raise unless a loss is one finite number."""
    if not isinstance(loss, Tensor) or loss.ndim:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return one number, the mean over the batch, got {got} in batch "
            f"{index}: use reduction='mean'"
        )
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss of batch {index} must be finite, got {float(loss)}")


def check_labels(loss_fn: Any, outputs: Any, target: Any, where: str, *, some: bool = True) -> None:
    """Raise if class labels of cross-entropy are out of range, which crashes a GPU process.

    With ``some``, raise as well if all labels are ignored.
    """
    kind = _described(loss_fn)[0]
    labelled = kind == "cross_entropy" or isinstance(loss_fn, nn.CrossEntropyLoss)
    if not labelled or not isinstance(target, Tensor) or target.is_floating_point():
        return
    labels, classes = target[is_kept(loss_fn, target)], outputs.shape[1]
    if some and not len(labels):
        raise ValueError(f"labels of {where} must not all be ignored")
    for label in labels.aminmax() if len(labels) else ():
        check_range(f"labels of {where}", int(label), low=0, high=classes - 1)


def check_scores(loss_fn: Any, outputs: Any, target: Any, where: str) -> None:
    """Raise unless outputs are scores of classes that go with the labels of cross-entropy."""
    labelled = _described(loss_fn)[0] == "cross_entropy" or isinstance(loss_fn, nn.CrossEntropyLoss)
    if not labelled or not isinstance(target, Tensor):
        return
    _check_one_tensor(outputs)
    shape, expected = tuple(outputs.shape), outputs.shape[:1] + outputs.shape[2:]
    if outputs.ndim < 2 and target.ndim:
        raise ValueError(
            f"outputs of the model must be (samples, classes) for cross-entropy, got {shape}"
        )
    if target.is_floating_point() and target.shape != outputs.shape:
        raise TypeError(
            f"labels of {where} must be integers for cross-entropy, got {str(target.dtype)[6:]}: "
            "convert them by .long()"
        )
    if not target.is_floating_point() and target.shape != expected:
        advice = ": remove the last dimension by .squeeze(-1)" if target.shape[-1:] == (1,) else ""
        raise ValueError(
            f"labels of {where} must be of shape {tuple(expected)} for outputs of shape {shape}, "
            f"got {tuple(target.shape)}{advice}"
        )


def _check_one_tensor(outputs: Any) -> None:
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise TypeError(f"the model must return one tensor for this loss, got {kind}: return the "
                        "outputs alone, or give a loss_fn (--loss module:function) that takes them "
                        "all")  # fmt: skip


def outputs_and_labels(loss_fn: Any, outputs: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """Return outputs ``(n, classes)`` and labels ``(n,)`` of a batch, without ignored labels.

    ``None`` if the target does not hold class labels as in cross-entropy: integers, one for each
    vector of at least two outputs along axis 1.
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
    """Return the number of labels with the largest output, and of all; zeros without labels."""
    pair = outputs_and_labels(loss_fn, outputs, target)
    if pair is None:
        return 0, 0
    return int((pair[0].argmax(1) == pair[1]).sum()), len(pair[1])


def mean_slope(
    loss_fn: LossFunction | None, outputs: Tensor, target: Any, *, alone: bool
) -> Tensor:
    """Return the derivative in the outputs of the mean of the losses of the samples."""
    by_sample = losses_alone if alone else sample_losses
    slope: Tensor = grad(lambda point: by_sample(loss_fn, point, target).mean())(outputs)
    return slope


def check_not_doubled(once: float, twice: float, index: int) -> None:
    """Raise if a loss doubles when the samples of a batch are repeated: it is a sum."""
    if once and abs(twice / once - 2) < 0.01:
        raise ValueError(
            "loss_fn must return the mean over a batch, but it seems to be a sum: it doubles, from "
            f"{once:.6g} to {twice:.6g}, if samples of batch {index} are repeated; use "
            "reduction='mean'"
        )


# ------------------------------------------------------------------------------------------
# Losses that models compute themselves.


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoss:
    """How a model computes its loss from its ``logits`` and the ``labels`` of a batch.

    Attributes:
        tokens: Logits are ``(batch, tokens, classes)`` and labels ``(batch, tokens)``.
        shift: The logits of a token predict the label of the next one, as in a decoder.
        labelled: The model needs the labels for its logits. Otherwise it is called without, so
            that it does not compute its own loss, which takes several copies of the logits.
    """

    tokens: bool
    shift: bool
    labelled: bool = True

    def outputs(self, logits: Tensor) -> Tensor:
        """Return the logits with the classes along axis 1, one for each label of :meth:`target`."""
        return logits.movedim(-1, 1) if self.tokens else logits

    def target(self, labels: Tensor) -> Tensor:
        """Return the labels that the outputs predict."""
        # The last token predicts nothing. Its label is ignored, as a slice of the logits would be
        # one more tensor of their size in each derivative.
        return functional.pad(labels[:, 1:], (0, 1), value=-100) if self.shift else labels

    def num_terms(self, labels: Tensor) -> int:
        """Return the number of labels that are not ignored: the weight of a batch in the mean."""
        return int((self.target(labels) != -100).sum())

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that the model is called with."""
        return {key: batch[key] for key in batch if self.labelled or key != "labels"}


def recognized_loss(call: Callable[[Mapping[str, Any]], Any], batch: Any) -> OwnLoss | None:
    """Return how a model computes its own loss on a batch, or ``None`` if it is not known.

    Args:
        call: Calls the model with keywords, and returns ``None`` if that fails.
        batch: The batch.
    """
    outputs = call(batch)
    own = _form_of_loss(outputs, split_labels(batch)[2])
    if own is None:
        return None
    plain = replace(own, labelled=False)
    again = call(plain.inputs(batch))
    first, second = (_value(each, "logits") for each in (outputs, again))
    same = isinstance(second, Tensor) and torch.equal(first, second)
    return plain if same else own


def _value(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _form_of_loss(outputs: Any, labels: Any) -> OwnLoss | None:
    """Return how a model computes its loss, if it returns ``loss`` and ``logits`` and it is known.

    It is known if cross-entropy of the logits and labels, shifted by a token or not, has the same
    value on this batch.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    logits, loss = (_value(outputs, name) for name in ("logits", "loss"))
    if not isinstance(logits, Tensor) or not isinstance(loss, Tensor) or loss.ndim:
        return None
    tokens = logits.ndim == 3 and logits.shape[:2] == labels.shape
    if not tokens and not (logits.ndim == 2 and logits.shape[:1] == labels.shape):
        return None
    for shift in (True, False) if tokens else (False,):
        own = OwnLoss(tokens=tokens, shift=shift)
        if logits.shape[-1] > 1 and own.num_terms(labels):
            value = mean_entropy(own.outputs(logits).float(), own.target(labels))
            # Many models compute their loss in float32, whatever the dtype of their weights.
            if is_below(abs(float(value) - float(loss)), 1e-5 * abs(float(loss))):
                return own
    return None


# ------------------------------------------------------------------------------------------
# The model with its loss, called on batches.

Forward = Callable[[nn.Module, Any], Any]


@final
class Adapter(nn.Module):
    """A model with a loss, called on whole batches.

    It is a module around the model, so that one functional call replaces all parameters, whichever
    method of the model a user-defined ``forward`` calls. The model itself is not modified.

    Args:
        model: The user's model.
        loss_fn: Takes outputs and target, returns the mean loss of the batch. ``None`` if the
            model returns the loss itself.
        forward: Takes the model and a batch, returns ``(outputs, target)``; without ``loss_fn`` it
            returns the loss.
        own: How the model computes its own loss, which ``loss_fn`` then computes instead.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        forward: Forward | None,
        own: OwnLoss | None = None,
    ) -> None:
        super().__init__()
        self.model, self.custom, self.own = model, forward, own
        # Not an attribute of its own: the parameters of a loss are not those of the model.
        self.loss_fn = SimpleNamespace(call=loss_fn)
        known = known_loss(loss_fn)
        self.squared = known is not None and known.kind == "squared_error"
        # Cross-entropy of scores, whose derivatives need not keep copies of large outputs.
        scores = known is not None and known.kind == "cross_entropy"
        self.entropy = known if scores and not _takes_log_probabilities(loss_fn) else None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Return outputs and target of a batch; loss and ``None`` if the model returns the loss."""
        without_loss, named = self.loss_fn.call is None, isinstance(batch, Mapping)
        if self.custom is not None:
            result = self.custom(self.model, batch)
            if without_loss:
                return result, None
            if not isinstance(result, tuple) or len(result) != 2:
                kind = type(result).__name__
                raise TypeError(f"forward must return (outputs, target), got {kind}")
            return result
        if self.own is not None:
            logits = _field(self.model(**self.own.inputs(batch)), "logits")
            return self.own.outputs(logits), self.own.target(batch["labels"])
        if without_loss and named:
            return _field(self.model(**batch), "loss"), None
        if without_loss:
            raise TypeError("loss_fn must be passed for batches of (inputs, target), got None")
        pair = isinstance(batch, tuple | list) and len(batch) > 1
        if not (pair or (named and "labels" in batch)):
            kind = "inputs alone" if isinstance(batch, tuple | list) else type(batch).__name__
            got = f"the keys {sorted(batch)}" if named else kind
            raise TypeError(
                "a batch must be (inputs, target) or a dictionary with 'labels', "
                f"got {got}: {FORWARD}"
            )
        args, kwargs, target = split_labels(batch)
        outputs = self.model(*args, **kwargs)
        if isinstance(outputs, Mapping) or hasattr(outputs, "logits"):
            outputs = _field(outputs, "logits")
        return outputs, target

    @property
    def by_label(self) -> bool:
        """Whether batches are weighted by their labels that are not ignored."""
        return self.own is not None and self.own.tokens

    def target(self, batch: Any) -> Any:
        """Return the target of a batch if it is known without a call of the model, or ``None``."""
        if self.custom is not None or self.loss_fn.call is None:
            return None
        labels = split_labels(batch)[2]
        return labels if self.own is None else self.own.target(labels)

    def loss(self, outputs: Any, target: Any) -> Any:
        """Return the mean loss of a batch."""
        if self.loss_fn.call is None:
            return outputs  # the loss itself
        if self.entropy is not None and isinstance(outputs, Tensor) and is_large(outputs, target):
            return mean_entropy(outputs, target, self.entropy)
        if not self.squared:
            return self.loss_fn.call(outputs, target)
        _check_one_tensor(outputs)
        if outputs.shape != target.shape:
            shapes = f"{tuple(outputs.shape)}, got {tuple(target.shape)}"
            raise ValueError(f"target must be of the shape of the outputs, {shapes}")
        # The mse_loss of torch has no forward rule for its backward pass.
        return (outputs - target).square().mean()


def _field(outputs: Any, name: str) -> Any:
    value = _value(outputs, name)
    if value is None:
        kind = type(outputs).__name__
        raise ValueError(f"the model must return an output with {name!r}, got {kind}: {FORWARD}")
    return value
