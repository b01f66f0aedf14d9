"""Batches of one row, which batch norm in train mode cannot take: seen before they are met."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ritz._core.batchnorm import batch_norms
from ritz._core.distributed import world_size
from ritz.curvature.adapters import Adapter
from ritz.training.assembling import Parts
from ritz.training.settings import Settings

TORCH = "Expected more than 1 value per channel"  # what torch says of it


def check_last_batch(parts: Parts, settings: Settings) -> None:
    """Raise where the last batch of an epoch leaves a process one row, and the model takes none.

    Maps of several pixels have several values in a row, so the model itself is asked, with its
    buffers and the generators put back; one with lazy layers is not, for it would take their shape.
    """
    rows = parts.feed.last_rows
    if rows is None or rows // world_size() > 1 or not batch_norms(parts.model):
        return
    if _is_unfinished(parts.model):
        return
    parts.model.train()
    kept = [(buffer, buffer.clone()) for buffer in parts.model.buffers()]
    step = parts.step.adapter
    adapter = Adapter(parts.model, step.loss_fn.call, step.custom)  # neither wrapped nor compiled
    cuda = [parts.device] if parts.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            adapter(parts.feed.row())
    except ValueError as error:
        raise explained(error, rows, settings) from error
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


def _is_unfinished(model: nn.Module) -> bool:
    return any(is_lazy(x) for x in (*model.parameters(), *model.buffers()))


def explained(error: ValueError, rows: int, settings: Settings) -> ValueError:
    """An error of a step in words that say what to do, where it is of this kind."""
    if TORCH not in str(error):
        return error
    size, own = settings.batch_size, "give drop_last=True to the loader, or another batch size"
    here = f"give drop_last=True (--drop-last), or another batch_size (--batch-size) than {size}"
    return ValueError(f"batch norm needs two rows or more to train on, got a batch of {rows} in "
                      f"{world_size()} process{'es' * (world_size() > 1)}: "
                      f"{own if size is None else here}")  # fmt: skip
