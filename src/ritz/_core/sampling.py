"""Averages over random probes: a fixed number of probes, or until the error is below ``rtol``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from ritz._core.blocks import euclidean_norm
from ritz._core.checks import check_choice, check_count, check_rtol, is_below, plain_fields
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, Probed, draw_probes
from ritz._core.results import Estimate

# Error of a sum of products, in units of machine precision. In the table of docs/intervals.md the
# errors of exact values are at most 2, except for the star graph, whose long row of ones gives 6.
ROUNDOFF = 8.0

# Few samples may agree by chance, and then their spread says nothing about the error. See
# `doubt_equal_samples`:
# With fewer samples than FEWEST, a spread below the truncation may be chance: six random signs are
# equal with probability 2^(1-6) < 0.05.
FEWEST = 6
# With fewer samples than ALIKE, a relative spread below SAME may be chance: 0.75^11 < 0.05.
ALIKE, SAME = 11, 1e-6

Finish = Callable[["Samples"], Estimate]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a quantity whose mean over random probes is estimated.

    Attributes:
        values: One sample per probe, ``(d, *s)``.
        complete: Whether the probes were an orthogonal basis, so that the mean is exact.
    """

    values: Tensor
    complete: bool = False

    def estimate(
        self, *, method: str, num_products: int, truncation: float | Tensor, seed: int
    ) -> Estimate:
        """Return the mean, with its standard error unless it is exact."""
        if not self.complete:
            estimate = Estimate.of(
                self.values,
                method=method,
                num_products=num_products,
                truncation=truncation,
                seed=seed,
            )
            return doubt_equal_samples(estimate)
        mean, how = self.values.mean(0), f"{method}, with a whole basis in place of random probes"
        return Estimate.exact(mean, method=how, num_products=num_products, truncation=truncation)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Number and distribution of probes, and when to stop.

    Attributes:
        num_probes: Number of probes. With ``rtol``, the smallest number.
        rtol: Add probes until the 95 % interval is within this fraction of the mean.
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
        plain_fields(self)
        check_count("num_probes", self.num_probes, low=2)
        check_choice("probe", self.probe, get_args(Probe))
        if self.block_size is not None:
            check_count("block_size", self.block_size)
        if self.rtol is not None:
            check_rtol(self.rtol)
            check_count("max_probes", self.max_probes, low=self.num_probes)

    def run(
        self,
        op: Probed,
        measure: Callable[[Tensor], Tensor],
        finish: Finish,
        *,
        generator: torch.Generator,
        progress: bool | Progress,
        label: str,
    ) -> Estimate:
        """Draw probes until the tolerance is reached. Return the estimate with its status.

        Args:
            op: The operator that the probes are for.
            measure: Maps probes ``(n, k)`` to samples ``(k, *s)``.
            finish: Maps all samples to an estimate.
            generator: Source of the probes.
            progress: ``True`` shows a progress bar; a :class:`Progress` object receives it.
            label: Name of the bar.
        """
        n, looks = op.shape[0], self.looks(op.shape[0])
        parts: list[Tensor] = []
        taken = 0
        with tracking(progress, label, looks[-1]) as bar:
            for goal in looks:
                if goal == n:
                    return self._complete(op, measure, finish)
                while taken < goal:
                    width = min(self.width(op), goal - taken)
                    block = draw_probes(op, width, generator=generator, kind=self.probe)
                    parts.append(measure(block).double().cpu())
                    check_samples(parts[-1], taken)
                    taken += width
                    bar.update(taken)
                estimate = finish(Samples(torch.cat(parts))).with_status(self.rtol)
                if is_settled(estimate, self.rtol):
                    break
        return estimate

    def looks(self, n: int, *, products: int = 1) -> list[int]:
        """Return the numbers of probes at which the error is compared with the tolerance.

        The number ``n`` means an orthogonal basis instead of random probes, which gives the exact
        mean. Random probes therefore never take more products than a basis. ``products`` is the
        number of products per probe.
        """
        counts = doubling(
            self.num_probes, self.num_probes if self.rtol is None else self.max_probes
        )
        few = [count for count in counts if products * count < n]
        return few + [n] * (len(few) < len(counts))

    def _complete(
        self, op: Probed, measure: Callable[[Tensor], Tensor], finish: Finish
    ) -> Estimate:
        # With z_i = sqrt(n) e_i the mean of z_i' B z_i over i is tr B: no random probe is needed.
        n = op.shape[0]
        basis = math.sqrt(n) * torch.eye(n, dtype=op.dtype, device=op.device)
        values = torch.cat(
            [measure(block).double().cpu() for block in basis.split(self.width(op), 1)]
        )
        check_samples(values, 0)
        return finish(Samples(values, complete=True)).with_status(self.rtol)

    def width(self, op: Probed) -> int:
        """Return the number of probes per block product."""
        return op.block_size if self.block_size is None else self.block_size


def doubt_equal_samples(estimate: Estimate, *, alike: int = ALIKE) -> Estimate:
    """Set the truncation to infinity if few samples are equal, which may be by chance.

    Args:
        estimate: The mean of samples.
        alike: Number of samples from which on equal samples count as exact.
    """
    count = estimate.degrees + 1
    if count >= alike:
        return estimate
    blind = estimate.stderr <= estimate.truncation
    if count >= FEWEST:
        # A polynomial of degree 2 in random signs, such as z'Az, is constant, or it differs from
        # any constant with probability at least 1/4 (Schwartz-Zippel). For example, the value of
        # (z_1 + z_2 + z_3)^2 is 1 in three of four cases.
        blind &= count**0.5 * estimate.stderr <= SAME * estimate.mean.abs()
    return replace(estimate, truncation=torch.where(blind, torch.inf, estimate.truncation))


def doubling(first: int, limit: int) -> list[int]:
    """Return ``first``, twice ``first``, and so on up to ``limit``.

    If the error were compared with a tolerance after every block, runs would stop too early too
    often.
    """
    counts = [min(first, limit)]
    while counts[-1] < limit:
        counts.append(min(2 * counts[-1], limit))
    return counts


def is_settled(estimate: Estimate, rtol: float | None) -> bool:
    """Return whether to stop, because the tolerance is reached or cannot be reached."""
    goal = (rtol or 0.0) * euclidean_norm(estimate.mean)
    known = bool(estimate.truncation.isfinite().all())
    # With fewer samples the truncation may be infinite because the samples agree by chance.
    enough = estimate.degrees + 1 >= (FEWEST if known else ALIKE)
    hopeless = enough and not is_below(euclidean_norm(estimate.truncation), goal)
    return estimate.status.ok or hopeless


def check_samples(samples: Tensor, taken: int) -> None:
    """Raise if a sample ``(k, *s)`` is not finite. ``taken`` is the number of earlier probes."""
    bad = (~torch.isfinite(samples)).reshape(len(samples), -1).any(1)
    if bool(bad.any()):
        raise ValueError(
            "op must give finite products; the product with probe "
            f"{taken + int(bad.nonzero()[0]) + 1} has NaN or Inf, or overflows"
        )
