"""Random probes, drawn so that neither block width nor device nor world size changes them."""

import hashlib
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_count

Probe = Literal["rademacher", "gaussian"]


def resolve_generator(generator: torch.Generator | None) -> torch.Generator:
    """The generator given, or a fresh one on the CPU with seed 0; never the global one."""
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
    r"""Return a block ``(n, k)`` of iid entries of mean 0 and variance 1.

    Probes are drawn one column after another on the generator's device and then moved, so the
    first column of a wide block is the column a narrow block would have had.
    """
    n, k = shape
    block = torch.empty(k, n, dtype=dtype, device=device)
    for row in block:
        row.copy_(_draw(n, kind=kind, generator=generator, dtype=dtype))
    return block.T.contiguous()


def _draw(n: int, *, kind: Probe, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if kind == "gaussian":
        return torch.randn(n, generator=generator, dtype=dtype, device=generator.device)
    if kind != "rademacher":
        raise ValueError(f"probe must be 'rademacher' or 'gaussian', got {kind!r}")
    signs = torch.randint(
        0, 2, (n,), generator=generator, dtype=torch.int8, device=generator.device
    )
    return signs.to(dtype).mul_(2).sub_(1)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator for one epoch of a run, so that any epoch can be had without the others.

    Args:
        seed: Of the run.
        epoch: Its number.

    Example:
        >>> first, again = (epoch_generator(7, 3) for _ in range(2))
        >>> bool((torch.randperm(5, generator=first) == torch.randperm(5, generator=again)).all())
        True
    """
    check_count("epoch", epoch, low=0)
    digest = hashlib.sha256(f"{int(seed)} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
