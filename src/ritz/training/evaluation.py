"""Loss and accuracy of a model on data, as it is or with averaged weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz._core.batchnorm import evaluating
from ritz.curvature.adapters import Adapter, Forward
from ritz.curvature.losses import check_labels
from ritz.training.feeds import own_rows
from ritz.training.states import carried_state, keep, meet
from ritz.training.steps import HALF, Totals, autocast


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss_fn: Callable[..., Any] | None = cross_entropy,
    forward: Forward | None = None,
    precision: str = "float32",
    carry_state: bool | None = None,
) -> dict[str, float]:
    """Return the mean ``loss`` of a model in eval mode and, for classes as targets, ``accuracy``.

    The mean is over targets that the loss does not ignore, so that batches of different lengths
    count as they should. The model
    keeps its mode. With several processes each is given all batches, computes its rows of them, and
    returns the same numbers.

    Args:
        model: Any module.
        batches: Batches on the model's device, each ``(*inputs, target)`` or a dictionary.
        loss_fn: Mean loss of outputs and target; ``None`` where the model returns its own.
        forward: Takes the model and a batch, returns ``(outputs, target)``; for other batches.
        precision: ``bfloat16`` or ``float16`` computes in it where that is safe.
        carry_state: Whether a model that has a state hands it on from batch to batch, see
            :class:`ritz.training.states.CarriedState`; by default where ``batches.consecutive``,
            as those of a text are. It begins anew with every call, without ``forward`` alone.
    """
    adapter = Adapter(model, loss_fn, forward)
    wanted = getattr(batches, "consecutive", False) if carry_state is None else carry_state
    carried, totals = carried_state(adapter, wanted=wanted), None
    with evaluating(model, batch_statistics=False):
        for batch in batches:
            own, count, real = own_rows(batch)
            totals = totals or Totals(_device_of(model, own))
            if real:
                state = None if carried is None else carried.of(count)
                _add(adapter, own, totals, precision, state)
    if totals is None:
        raise ValueError("batches must hold at least one batch, got none")
    return totals.means()


def _add(adapter: Adapter, batch: Any, totals: Totals, precision: str, state: Any) -> None:
    with autocast(HALF.get(precision), totals.sums.device):
        outputs, target, after = meet(adapter, batch, state)
        check_labels(adapter.loss_fn.call, outputs, target, "batches", some=False)
        loss = adapter.loss(outputs, target)
    keep(state, after)
    totals.add(adapter, batch, loss, outputs, target)


def _device_of(model: nn.Module, batch: Any) -> torch.device:
    first = next(model.parameters(), None)
    if first is not None:
        return first.device
    return next((x.device for x in batch if isinstance(x, torch.Tensor)), torch.device("cpu"))
