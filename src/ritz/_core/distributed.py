"""Sums and gathers over processes, no-ops in a single one; models without the wrapper of DDP."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Group = dist.ProcessGroup


def world_size(group: Group | None = None) -> int:
    """Return the number of processes in the group, or 1 without torch.distributed."""
    return dist.get_world_size(group) if _active() else 1


def rank(group: Group | None = None) -> int:
    """Return the rank of this process in the group."""
    return dist.get_rank(group) if _active() else 0


def shard(n: int, group: Group | None = None) -> slice:
    """Return this process's part of ``range(n)``. Lengths differ by at most one."""
    # Part i of p begins at floor(i n / p).
    size, index = world_size(group), rank(group)
    return slice(n * index // size, n * (index + 1) // size)


def all_sum(tensor: Tensor, group: Group | None = None) -> Tensor:
    """Sum ``tensor`` over the processes, in place, and return it."""
    if world_size(group) > 1:
        _guard(lambda: dist.all_reduce(tensor, group=group))
    return tensor


def broadcast(tensor: Tensor, source: int, group: Group | None = None) -> Tensor:
    """Overwrite ``tensor`` with that of the process of rank ``source``, and return it."""
    if world_size(group) > 1:
        _guard(lambda: dist.broadcast(tensor, group=group, group_src=source))
    return tensor


def all_max(value: int, group: Group | None = None) -> int:
    """Return the largest of the processes' values."""
    if world_size(group) == 1:
        return value
    # NCCL reduces tensors on the GPU only.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(value, device=device)
    _guard(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group))
    return int(tensor)


def all_min(value: int, group: Group | None = None) -> int:
    """Return the smallest of the processes' values."""
    # min(x) = -max(-x)
    return -all_max(-value, group)


def all_gather_rows(part: Tensor, n: int, group: Group | None = None) -> Tensor:
    """Return the whole vector ``(n,)``. ``part`` is the :func:`shard` of this process."""
    size = world_size(group)
    if size == 1:
        return part
    # all_gather needs equal lengths: pad each part to ceil(n / size), then cut.
    padded = part.new_zeros(-(-n // size))
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in range(size)]
    _guard(lambda: dist.all_gather(gathered, padded, group=group))
    lengths = [n * (i + 1) // size - n * i // size for i in range(size)]
    return torch.cat([piece[:length] for piece, length in zip(gathered, lengths, strict=True)])


def gather_by_process(values: Tensor) -> Tensor:
    """Return vectors of equal length of all processes, one row each, on the CPU."""
    count = world_size()
    return all_gather_rows(values, count * len(values)).reshape(count, -1).cpu().clone()


def _active() -> bool:
    return dist.is_available() and dist.is_initialized()


def _guard(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        # gloo and NCCL report a lost process by a socket error, which says nothing to a user.
        raise RuntimeError(
            f"process {rank()} could not exchange data with the others; one of them has probably "
            f"failed: {error}"
        ) from error


# ------------------------------------------------------------------------------------------
# Wrapped and sharded models.


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of DDP and ``torch.compile``."""
    name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = getattr(model, name, None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def reshard(model: nn.Module) -> None:
    """Discard the gathered weights of a sharded model, which become stale if shards change."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def is_sharded(module: nn.Module) -> bool:
    # FSDP2 adds these methods to the class of the module.
    return hasattr(module, "reshard") and hasattr(module, "unshard")
