"""Random probes that do not depend on block size, device or number of processes."""

import hashlib
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count

Probe = Literal["rademacher", "gaussian"]


def resolve_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return the generator, or a new one with seed 0 on the CPU. The global one is never used."""
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
    return generator


def probes(
    shape: tuple[int, int],
    *,
    kind: Probe = "rademacher",
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a block ``(n, k)`` of independent entries with mean 0 and variance 1."""
    check_choice("probe", kind, get_args(Probe))
    n, k = shape
    block = torch.empty(k, n, dtype=dtype, device=device)
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    # One probe after another, on the device of the generator, so that the probes do not depend on
    # the width of the block.
    for row in block:
        if kind == "gaussian":
            row.copy_(torch.randn(n, dtype=dtype, **where))
        else:
            # 0 or 1 to -1 or 1
            signs = torch.randint(0, 2, (n,), dtype=torch.int8, **where)
            row.copy_(signs.to(dtype).mul_(2).sub_(1))
    return block.T.contiguous()


class Probed(Protocol):
    """The part of the interface of an operator that is needed to draw probes."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def block_size(self) -> int: ...


def draw_probes(
    op: Probed, count: int, *, generator: torch.Generator, kind: Probe = "rademacher"
) -> Tensor:
    """Return random vectors ``(n, count)`` of the dtype and on the device of an operator."""
    shape = (op.shape[0], count)
    return probes(shape, kind=kind, generator=generator, dtype=op.dtype, device=op.device)


def epoch_generator(seed: int, epoch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of one epoch of a run, so that a run can resume at any epoch.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch.
        device: Device of the generator.

    Example:
        >>> first, again = (epoch_generator(7, 3) for _ in range(2))
        >>> bool((torch.randperm(5, generator=first) == torch.randperm(5, generator=again)).all())
        True
    """
    return torch.Generator(device).manual_seed(epoch_seed(seed, epoch))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of :func:`epoch_generator`."""
    epoch = check_count("epoch", epoch, low=0)
    # A hash instead of seed + epoch, so that runs with neighbouring seeds do not share epochs.
    digest = hashlib.sha256(f"{int(seed)} {epoch}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
