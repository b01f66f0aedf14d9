"""How a batch meets a model: its inputs, its outputs, and the labels they are compared with."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz.curvature._risk.losses import LossFunction, is_kept, recognised

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
        if isinstance(batch, Mapping):
            return self._mapping(batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise TypeError(f"a batch must be (inputs, target) or a dictionary, got a "
                            f"{type(batch).__name__}: pass forward= to use it")  # fmt: skip
        if self.loss_fn.call is None:
            raise TypeError("loss_fn must be given for batches of (inputs, target), got None")
        return _logits(self.model(*batch[:-1])), batch[-1]

    def _mapping(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        if self.loss_fn.call is None:
            return _field(self.model(**batch), "loss"), None
        if "labels" not in batch:
            raise KeyError(f"a batch must have 'labels' for loss_fn, got {sorted(batch)}: pass "
                           "forward= to say how it is used")  # fmt: skip
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return _logits(self.model(**inputs)), batch["labels"]

    def target(self, batch: Any) -> Any:
        """The target of a batch where it can be seen without calling the model, else ``None``."""
        if self.custom is not None or self.loss_fn.call is None:
            return None
        return batch.get("labels") if isinstance(batch, Mapping) else batch[-1]

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
