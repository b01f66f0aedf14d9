"""Averages over random probes: a fixed number of them, or until the error is small enough."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes
from ritz._core.results import Status, stderr

# ------------------------------------------------------------------------------------------
# Inner products of the columns of two blocks.

CHUNK = 2**17  # entries: small enough that the elementwise product stays in cache


def column_dots(left: Tensor, right: Tensor) -> Tensor:
    r"""Return :math:`\sum_i x_{il} y_{il}`, ``(k,)``, summed in float64."""
    rows = max(1, CHUNK // max(1, left.shape[1]))
    total = torch.zeros(left.shape[1], dtype=torch.float64, device=left.device)
    for x, y in zip(left.split(rows), right.split(rows), strict=True):
        total += (x.double() * y).sum(0)
    return total


# ------------------------------------------------------------------------------------------
# Averages over random probes: a fixed number of them, or until the error is small enough.


class Probed(Protocol):
    """What has to be known of an operator to draw probes for it."""

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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many probes to take, and how.

    Attributes:
        num_probes: Probes to take; with ``rtol``, the least number.
        rtol: Go on until the standard error is below this share of the mean.
        max_probes: Most probes to take in doing so.
        block_size: Probes multiplied at once; the operator's own choice by default.
        probe: Distribution of the entries.
    """

    num_probes: int
    rtol: float | None = None
    max_probes: int = 1000
    block_size: int | None = None
    probe: Probe = "rademacher"

    def __post_init__(self) -> None:
        check_count("num_probes", self.num_probes, low=2)
        if self.block_size is not None:
            check_count("block_size", self.block_size)
        if self.rtol is not None:
            check_range("rtol", self.rtol, low=0.0, high=1.0)
            check_count("max_probes", self.max_probes, low=self.num_probes)

    def run(
        self,
        op: Probed,
        measure: Callable[[Tensor], Tensor],
        *,
        generator: torch.Generator,
        progress: bool | Progress,
        label: str,
    ) -> tuple[Tensor, Status]:
        """Return samples ``(d, *s)`` of ``measure``, from probes ``(n, k)`` to ``(k, *s)``."""
        limit = self.num_probes if self.rtol is None else self.max_probes
        samples: list[Tensor] = []
        taken = 0
        with tracking(progress, label, limit) as bar:
            while taken < limit and not self._settled(samples, taken):
                goal = self.num_probes if taken < self.num_probes else limit
                width = min(self.width(op), goal - taken)
                block = draw_probes(op, width, kind=self.probe, generator=generator)
                samples.append(measure(block).double().cpu())
                check_samples(samples[-1], taken)
                taken += width
                bar.update(taken)
        found = torch.cat(samples)
        return found, self.status(found)

    def width(self, op: Probed) -> int:
        """Probes to multiply at once."""
        return op.block_size if self.block_size is None else self.block_size

    def status(self, samples: Tensor) -> Status:
        """Whether the samples ``(d, *s)`` are as accurate as asked for."""
        return self.judge(samples.mean(0), stderr(samples), len(samples))

    def judge(self, mean: Tensor, error: Tensor, count: int) -> Status:
        """Whether a mean over that many probes is as accurate as asked for."""
        if self.rtol is None:
            return Status(outcome="completed", message=f"{count} probes")
        return accuracy(float(mean.abs().max()), float(error.max()), self.rtol)

    def _settled(self, samples: list[Tensor], taken: int) -> bool:
        if self.rtol is None or taken < self.num_probes:
            return False
        return self.status(torch.cat(samples)).ok


def check_samples(samples: Tensor, taken: int) -> None:
    """Raise if a sample ``(k, *s)`` is not finite, naming its probe; ``taken`` came before."""
    bad = (~torch.isfinite(samples)).reshape(len(samples), -1).any(1)
    if bool(bad.any()):
        raise ValueError(
            "op must give finite products; "
            f"that with probe {taken + int(bad.nonzero()[0]) + 1} holds NaN or Inf, or overflows"
        )


def accuracy(mean: float, error: float, rtol: float) -> Status:
    """Whether an error is below ``rtol`` of the mean, and what to do if not."""
    if error <= rtol * abs(mean):
        return Status(outcome="converged", message=f"relative error below {rtol:.2g}")
    reached = error / abs(mean) if mean else float("inf")
    factor = (reached / rtol) ** 2 if rtol else float("inf")
    return Status(
        outcome="max_steps",
        message=f"relative error {reached:.2g} where {rtol:.2g} was asked for",
        advice=f"about {factor:.2g} times as many probes would do",
    )
