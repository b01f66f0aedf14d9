"""`Adapter`: how a batch is passed to the model and to the loss; models that return a loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ritz._core.batches import split_labels, tensors
from ritz._core.checks import check_callable, is_below
from ritz._core.cross_entropy import TUNING as ENTROPY
from ritz._core.cross_entropy import chunked_entropy, is_large
from ritz.curvature._losses import (
    FORWARD,
    LossFunction,
    accurate_loss,
    check_one_tensor,
    known_loss,
)

# ------------------------------------------------------------------------------------------
# Losses that models compute themselves.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoss:
    """How a model computes its loss from its ``logits`` and the ``labels`` of a batch.

    Attributes:
        tokens: Logits are ``(batch, tokens, classes)`` and labels ``(batch, tokens)``.
        shift: The logits of a token predict the label of the next token, as in a decoder.
        labelled: The model needs the labels to compute its logits. Otherwise it is called without
            labels. It then does not compute its loss, which would take several copies of the
            logits.
    """

    tokens: bool
    shift: bool
    labelled: bool = True

    def outputs(self, logits: Tensor) -> Tensor:
        """Return the logits with the classes along axis 1, aligned with :meth:`target`."""
        return logits.movedim(-1, 1) if self.tokens else logits

    def target(self, labels: Tensor) -> Tensor:
        """Return the labels that the outputs predict."""
        # The last token has no next token, so its label is ignored. Slicing the logits instead
        # would add a tensor of their size to each derivative.
        return functional.pad(labels[:, 1:], (0, 1), value=-100) if self.shift else labels

    def num_terms(self, labels: Tensor) -> int:
        """Return the number of labels that are not ignored: the weight of a batch in the mean."""
        return int((self.target(labels) != -100).sum())

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments that the model is called with."""
        return {key: batch[key] for key in batch if self.labelled or key != "labels"}


def recognized_loss(call: Callable[[Mapping[str, Any]], Any], batch: Any) -> ModelLoss | None:
    """Return how a model computes its own loss on a batch, or ``None`` if it is not known.

    Args:
        call: Calls the model with these keyword arguments. Returns ``None`` if that fails.
        batch: The batch.
    """
    outputs = call(batch)
    form = _form_of_loss(outputs, split_labels(batch)[2])
    if form is None:
        return None
    plain = replace(form, labelled=False)
    again = call(plain.inputs(batch))
    first, second = (_value(each, "logits") for each in (outputs, again))
    same = isinstance(second, Tensor) and torch.equal(first, second)
    return plain if same else form


def _value(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _form_of_loss(outputs: Any, labels: Any) -> ModelLoss | None:
    """Return how a model computes its loss from ``logits`` and ``labels``, or ``None``.

    The form is known if the cross-entropy of logits and labels, with or without a shift by one
    token, equals the ``loss`` that the model returns for this batch.
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
        form = ModelLoss(tokens=tokens, shift=shift)
        if logits.shape[-1] > 1 and form.num_terms(labels):
            pair = form.outputs(logits).float(), form.target(labels)
            # As in torch: `mean_entropy` has more digits than the loss of the model.
            large = is_large(*pair)
            value = chunked_entropy(*pair, -100, 0.0) if large else functional.cross_entropy(*pair)
            # Many models compute their loss in float32 even if their weights have another dtype.
            if is_below(abs(float(value) - float(loss)), 1e-5 * abs(float(loss))):
                return form
    return None


# ------------------------------------------------------------------------------------------
# A model with a loss, called on batches.

Forward = Callable[[nn.Module, Any], Any]


@final
class Adapter(nn.Module):
    """A model with a loss, called on whole batches.

    The adapter is a module that contains the model. One ``torch.func.functional_call`` on it
    replaces all parameters, also if a user-defined ``forward`` calls other methods of the model
    than its ``forward``. The model itself is not modified.

    Args:
        model: The user's model.
        loss_fn: Takes outputs and target, returns the mean loss of the batch. ``None`` if the
            model returns the loss itself.
        forward: Takes the model and a batch. Returns ``(outputs, target)``, or the loss if
            ``loss_fn`` is ``None``.
        model_loss: How the model computes its own loss. ``loss_fn`` then computes this loss from
            the logits.
        accurate: Compute known losses in forms whose derivatives keep their digits near a minimum.
            Training does without, so that its steps are those of a plain loop.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        forward: Forward | None,
        model_loss: ModelLoss | None = None,
        *,
        accurate: bool = False,
    ) -> None:
        super().__init__()
        check_callable("loss_fn", loss_fn)
        check_callable("forward", forward)
        self.model, self.custom, self.model_loss = model, forward, model_loss
        # Wrapped: if the loss is a module, its parameters must not count as those of the model.
        self.loss_fn = SimpleNamespace(call=loss_fn)
        known = known_loss(loss_fn)
        self.elementwise = known is not None and known.kind != "cross_entropy"
        self.accurate = accurate

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Return ``(outputs, target)`` of a batch, or ``(loss, None)`` without ``loss_fn``."""
        without_loss, named = self.loss_fn.call is None, isinstance(batch, Mapping)
        if self.custom is not None:
            result = self.custom(self.model, batch)
            if without_loss:
                return result, None
            if not isinstance(result, tuple) or len(result) != 2:
                kind = type(result).__name__
                raise TypeError(f"forward must return (outputs, target), got {kind}")
            return result
        if self.model_loss is not None:
            logits = _field(self.model(**self.model_loss.inputs(batch)), "logits")
            return self.model_loss.outputs(logits), self.model_loss.target(batch["labels"])
        if without_loss and named:
            return _field(self.model(**batch), "loss"), None
        if without_loss:
            raise TypeError("loss_fn must be passed for batches of (inputs, target), got None")
        pair = isinstance(batch, tuple | list) and len(batch) > 1
        if not (pair or (named and "labels" in batch)):
            kind = "inputs alone" if isinstance(batch, tuple | list) else type(batch).__name__
            got = f"the keys {sorted(batch)}" if named else kind
            if isinstance(batch, Tensor):
                got += " (a list holds batches, a tuple all samples)"
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
        """Whether a batch is weighted by its number of labels that are not ignored."""
        return self.model_loss is not None and self.model_loss.tokens

    def target(self, batch: Any) -> Any:
        """Return the target of a batch, or ``None`` if only a call of the model can tell it."""
        if self.custom is not None or self.loss_fn.call is None:
            return None
        labels = split_labels(batch)[2]
        return labels if self.model_loss is None else self.model_loss.target(labels)

    def loss(self, outputs: Any, target: Any) -> Any:
        """Return the mean loss of a batch."""
        if self.loss_fn.call is None:
            return outputs  # the loss itself
        if self.elementwise:
            check_one_tensor(outputs)
            if outputs.shape != target.shape:
                shapes = f"{tuple(outputs.shape)}, got {tuple(target.shape)}"
                raise ValueError(f"target must be of the shape of the outputs, {shapes}")
        loss_fn: Any = self.loss_fn.call
        plain = not (isinstance(outputs, Tensor) and isinstance(target, Tensor))
        # Cross-entropy of a large vocabulary needs less memory in chunks.
        if not plain and (
            self.accurate or (outputs.numel() > ENTROPY.alone and not self.elementwise)
        ):
            loss_fn = accurate_loss(loss_fn)
        return loss_fn(outputs, target)


def inputs_error(index: int, batch: Any, dtype: torch.dtype, error: Exception) -> str:
    """Return the message of an error that a model raised when it was called on a batch."""
    leaves, name = tensors(batch), str(dtype)[6:]
    shapes = [f"{str(x.dtype)[6:]} {tuple(x.shape)}" for x in leaves]
    advice = ""
    if any(x.is_floating_point() and x.dtype != dtype for x in leaves):
        # The arrays of NumPy are float64 by default. Nothing is converted unless asked for.
        advice = f". Pass precision='{name}' to convert the data"
        advice += ", or 'float64' for data and model" * (dtype != torch.float64)
    elif "dtype" in str(error) and not any(x.is_floating_point() for x in leaves):
        advice = f". Convert the inputs to {name}"
    return (
        f"model cannot be called on batch {index} with tensors {', '.join(shapes)}, for parameters "
        f"of {name}: {str(error).strip()}{advice}"
    )


def _field(outputs: Any, name: str) -> Any:
    value = _value(outputs, name)
    if value is None:
        kind = type(outputs).__name__
        raise ValueError(f"the model must return an output with {name!r}, got {kind}: {FORWARD}")
    return value
