"""Averages over random probes: a fixed number of probes, or until the error is below ``rtol``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes
from ritz._core.results import Status, stderr

# Entries per step of column_dots: small enough that the elementwise product stays in cache.
CHUNK = 2**17


def column_dots(left: Tensor, right: Tensor) -> Tensor:
    r"""Return the inner products of columns :math:`\sum_i x_{il} y_{il}`, ``(k,)``, in float64."""
    rows = max(1, CHUNK // max(1, left.shape[1]))
    # In float64: the rounding error of a float32 sum would look like sampling error.
    total = torch.zeros(left.shape[1], dtype=torch.float64, device=left.device)
    for x, y in zip(left.split(rows), right.split(rows), strict=True):
        total += (x.double() * y).sum(0)
    return total


class Probed(Protocol):
    """What drawing probes needs to know about an operator."""

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
    """Number and distribution of probes, and when to stop.

    Attributes:
        num_probes: Number of probes. With ``rtol``, the smallest number.
        rtol: Keep adding probes until the standard error is below this fraction of the mean.
        max_probes: Stop after this many probes even if ``rtol`` is not reached.
        block_size: Probes per block product. Defaults to the ``block_size`` of the operator.
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
        """Return samples ``(d, *s)`` and the status. ``measure`` maps ``(n, k)`` to ``(k, *s)``."""
        limit = self.num_probes if self.rtol is None else self.max_probes
        samples: list[Tensor] = []
        taken = 0
        with tracking(progress, label, limit) as bar:
            while taken < limit and not self._settled(samples, taken):
                # The first blocks end at num_probes, where the error is judged for the first time.
                goal = self.num_probes if taken < self.num_probes else limit
                width = min(self.width(op), goal - taken)
                block = draw_probes(op, width, kind=self.probe, generator=generator)
                samples.append(measure(block).double().cpu())
                check_samples(samples[-1], taken)
                taken += width
                bar.update(taken)
        joined = torch.cat(samples)
        return joined, self.status(joined)

    def width(self, op: Probed) -> int:
        """Return the number of probes per block product."""
        return op.block_size if self.block_size is None else self.block_size

    def status(self, samples: Tensor) -> Status:
        """Return whether samples ``(d, *s)`` are accurate enough."""
        return self.judge(samples.mean(0), stderr(samples), len(samples))

    def judge(self, mean: Tensor, error: Tensor, count: int) -> Status:
        """Return whether a mean over ``count`` probes is accurate enough."""
        if self.rtol is None:
            return Status(outcome="completed", message=f"{count} probes")
        # An array has one status: its largest error against its largest entry.
        return accuracy(float(mean.abs().max()), float(error.max()), self.rtol)

    def _settled(self, samples: list[Tensor], taken: int) -> bool:
        enough = self.rtol is not None and taken >= self.num_probes
        return enough and self.status(torch.cat(samples)).ok


def check_samples(samples: Tensor, taken: int) -> None:
    """Raise if a sample ``(k, *s)`` is not finite. ``taken`` is the number of earlier probes."""
    bad = (~torch.isfinite(samples)).reshape(len(samples), -1).any(1)
    if bool(bad.any()):
        raise ValueError(
            "op must give finite products; the product with probe "
            f"{taken + int(bad.nonzero()[0]) + 1} has NaN or Inf, or overflows"
        )


def accuracy(mean: float, error: float, rtol: float) -> Status:
    """Return whether ``error <= rtol * |mean|``, with advice if not."""
    if error <= rtol * abs(mean):
        return Status(outcome="converged", message=f"relative error below {rtol:.2g}")
    reached = error / abs(mean) if mean else float("inf")
    # The error falls with the root of the number of probes.
    factor = (reached / rtol) ** 2 if rtol else float("inf")
    return Status(
        outcome="max_steps",
        message=f"relative error {reached:.2g}, above rtol {rtol:.2g}",
        advice=f"use about {factor:.2g} times as many probes",
    )
