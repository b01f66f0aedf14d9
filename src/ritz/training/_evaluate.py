"""``evaluate``: mean loss and accuracy of a model on data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz._core.batch_norm import evaluating
from ritz._core.batches import as_one_batch, split_rows, tensors
from ritz._core.checks import check_count
from ritz.curvature._shared import (
    Adapter,
    Forward,
    check_labels,
    check_reduction,
    check_scores,
    check_shape,
)
from ritz.training._data import own_rows
from ritz.training._recurrent import call_model, carried_state, overwrite
from ritz.training._step import Totals, autocast


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Any,
    *,
    loss_fn: Callable[..., Any] | None = cross_entropy,
    forward: Forward | None = None,
    precision: str = "float32",
    carry_state: bool | None = None,
    top_k: int | None = None,
) -> dict[str, float]:
    """Return the mean ``loss`` of a model in eval mode and, for classes, its ``accuracy``.

    The mean is over targets that the loss does not ignore, so batches of different sizes count
    correctly. The mode of the model is restored. With several processes, pass all batches to every
    process; each computes its share, and all return the same result.

    Args:
        model: Any module.
        batches: Batches on the device of the model, each ``(*inputs, target)`` or a dictionary; or
            all samples as a tuple or dictionary of tensors or arrays.
        loss_fn: Mean loss of outputs and target; ``None`` if the model returns its loss.
        forward: Takes the model and a batch and returns ``(outputs, target)``, for other batches.
        precision: ``float32``, ``tf32``, ``bfloat16`` or ``float16``; the last two use autocast.
        carry_state: Pass the state of a recurrent model from batch to batch; see ``CarriedState``.
            Defaults to ``batches.consecutive``, which is true for text. Each call starts with the
            initial state. Not possible with ``forward``.
        top_k: Also return the fraction of targets among the k largest scores, as ``top5_accuracy``
            for 5.
    """
    if top_k is not None:
        top_k = check_count("top_k", top_k)
    check_reduction(loss_fn)
    adapter = Adapter(model, loss_fn, forward)
    whole = as_one_batch(batches)
    if whole is not None:
        batches = split_rows(whole, 512)
    wanted = getattr(batches, "consecutive", False) if carry_state is None else carry_state
    carried, totals = carried_state(adapter, wanted=wanted), None
    with evaluating(model, batch_statistics=False):
        for batch in batches:
            rows, count, real = own_rows(batch)
            totals = totals or Totals(device_of(model, rows), top_k)
            if not real:
                continue
            state = None if carried is None else carried.of(count)
            with autocast(precision, totals.sums.device):
                outputs, target, after = call_model(adapter, rows, state)
                check_scores(adapter.loss_fn.call, outputs, target, "batches")
                check_labels(adapter.loss_fn.call, outputs, target, "batches", some=False)
                loss = adapter.loss(outputs, target)
                check_shape(loss, "a batch")
            overwrite(state, after)
            totals.add(adapter, rows, loss, outputs, target)
    if totals is None:
        raise ValueError("batches must contain at least one batch, got none")
    return totals.means()


def device_of(model: nn.Module, batch: Any = ()) -> torch.device:
    """Return the device of a model, or of a batch if the model has no parameters."""
    first = next(model.parameters(), next(iter(tensors(batch)), None))
    return torch.device("cpu") if first is None else first.device
