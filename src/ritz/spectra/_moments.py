"""``moments`` of a spectral density in the Chebyshev, Legendre or power basis."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.polynomial import chebyshev, legendre
from torch import Tensor

from ritz._core.blocks import column_dots
from ritz._core.checks import check_choice, check_count, check_interval, is_below
from ritz._core.progress import Progress
from ritz._core.random import Probe, resolve_generator
from ritz._core.results import Estimate, HasStatus, Status
from ritz._core.sampling import ROUNDOFF, Samples, Sampling
from ritz._core.storage import storable
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.spectra._lanczos import Bounds, bounds

MomentBasis = Literal["chebyshev", "legendre", "power"]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Moments(HasStatus):
    r"""Moments :math:`\mu_j = \frac1n \operatorname{tr} \phi_j(\tilde A)` with standard errors.

    Attributes:
        mean: Moments of degree ``0, ..., m``, ``(m + 1,)``; the first is 1.
        stderr: Standard errors, ``(m + 1,)``.
        samples: One row per probe, ``(num_probes, m + 1)``.
        basis: The polynomials :math:`\phi_j`: ``chebyshev``, ``legendre`` or ``power``.
        interval: ``(a, b)``, mapped to ``[-1, 1]`` by :math:`\tilde A = (2 A - (a + b))/(b - a)`.
        num_products: Number of matrix-vector products, including those for bounds.
        status: Whether the tolerance was reached.
        seed: Seed of the generator.
        matrix: Which matrix of a network or graph it is; ``None`` if unknown.
        batch_norm: Batch-norm mode of the network; ``None`` without batch norm.
    """

    mean: Tensor
    stderr: Tensor
    samples: Tensor
    basis: str
    interval: tuple[float, float]
    num_products: int
    status: Status
    seed: int
    matrix: str | None = None
    batch_norm: str | None = None

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{len(self.mean) - 1} {self.basis} moments on [{low:.4g}, {high:.4g}] from "
            f"{len(self.samples)} probes, largest stderr {float(self.stderr.max()):.2g}; "
            f"{self.status}"
        )


def moments(
    op: OperatorLike,
    *,
    num_moments: int,
    basis: MomentBasis = "chebyshev",
    interval: tuple[float, float] | None = None,
    num_probes: int = 16,
    rtol: float | None = None,
    max_probes: int = 1000,
    block_size: int | None = None,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Moments:
    r"""Estimate the moments of degree ``0`` to ``num_moments`` of the spectral density.

    .. math:: \mu_j = \frac1n \mathbb{E}\, z^\top T_j(\tilde A) z, \qquad
        \mu_{2j} = 2 \langle t_j, t_j\rangle - \mu_0, \quad
        \mu_{2j+1} = 2 \langle t_j, t_{j+1}\rangle - \mu_1, \quad t_j = T_j(\tilde A) z

    Each product gives two moments, in any basis. Legendre moments are sums of Chebyshev moments
    with non-negative coefficients of sum one, so the conversion loses no accuracy. Memory: 4
    vectors per probe of a block.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_moments: Highest degree ``m``.
        basis: ``chebyshev``, ``legendre`` or ``power``.
        interval: ``(a, b)`` that contains the spectrum, mapped to ``[-1, 1]``. Defaults to
            :func:`ritz.bounds`. With ``power`` and no interval the matrix is not rescaled.
        num_probes: Number of probes. If ``rtol`` is given, the minimum number.
        rtol: Add probes until the 95 % interval is within this fraction of the moments, both in the
            Euclidean norm.
        max_probes: Maximum number of probes with ``rtol``.
        block_size: Number of probes that are multiplied together. Defaults to the block size of the
            operator.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        ValueError: The interval does not contain the spectrum, or the operator is not symmetric.

    Reference: Algorithms 2 and 6 of *Spectral Machine Learning*.
    """
    op = as_operator(op)
    num_moments = check_count("num_moments", num_moments)
    check_choice("basis", basis, get_args(MomentBasis))
    generator = resolve_generator(generator)
    spent = 0
    if interval is None and basis != "power":
        ends = bounds(op, generator=generator)
        interval, spent = _widened(ends, torch.finfo(op.dtype).eps), ends.num_products
    interval = (-1.0, 1.0) if interval is None else interval
    check_interval("interval", interval)
    low, high = interval
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)

    def measure(block: Tensor) -> Tensor:
        columns = _rows(op, block, num_moments, interval, basis)
        return torch.stack(list(columns), 1) / column_dots(block, block)[:, None]

    samples = torch.empty(0)

    def finish(drawn: Samples) -> Estimate:
        nonlocal samples
        samples = drawn.values
        if basis == "legendre":
            samples = samples @ chebyshev_from_legendre(num_moments).T
        # |T_j| <= 1 on [-1, 1], so the roundoff is relative to 1; that of powers to their size.
        roundoff = moment_roundoff(op, interval) * samples.abs().amax(0).clamp_min(1.0)
        estimate = replace(drawn, values=samples).estimate(
            method="moments",
            num_products=spent + len(samples) * ((num_moments + 1) // 2),
            truncation=roundoff,
            seed=generator.initial_seed(),
        )
        estimate.truncation[0] = 0.0  # every sample of the moment of degree 0 is 1
        return estimate

    label = "moments"
    estimate = plan.run(op, measure, finish, generator=generator, progress=progress, label=label)
    return Moments(
        mean=estimate.mean,
        stderr=estimate.stderr,
        samples=samples,
        basis=basis,
        interval=(float(low), float(high)),
        num_products=estimate.num_products,
        status=estimate.status,
        seed=generator.initial_seed(),
        matrix=op.origin.get("matrix"),
        batch_norm=op.origin.get("batch_norm"),
    )


def moment_roundoff(op: LinearOperator, interval: tuple[float, float]) -> float:
    """Return the roundoff of Chebyshev moments on an interval."""
    low, high = interval
    # (2 A - (a + b)) / (b - a) cancels where the interval is short and far from zero.
    cancellation = max(1.0, (abs(low) + abs(high)) / (high - low))
    return ROUNDOFF * torch.finfo(op.dtype).eps * cancellation


def _rows(
    op: LinearOperator,
    block: Tensor,
    num_moments: int,
    interval: tuple[float, float],
    basis: MomentBasis,
) -> Iterator[Tensor]:
    """Yield z'T_j(A)z, or z'A^j z for powers, for all columns; two degrees per product."""
    chebyshev, (low, high) = basis != "power", interval
    before, current = block, block
    zeroth = first = column_dots(block, block)
    yield zeroth
    for degree in range(1, num_moments + 1):
        doubled = chebyshev and degree > 1
        if degree % 2:
            # t_{j+1} = 2 A t_j - t_{j-1} and t_1 = A t_0; for powers t_{j+1} = A t_j. Here A is
            # (2 A - (a + b)) / (b - a), in place: new memory per step costs more than the sums.
            following, k = op.matmat(current), 2.0 if doubled else 1.0
            if (scale := 2 * k / (high - low)) != 1.0:
                following.mul_(scale)
            if shift := k * (low + high) / (high - low):
                following.sub_(current, alpha=shift)
            before, current = current, following.sub_(before) if doubled else following
            moment = column_dots(before, current)
            first = moment if degree == 1 else first
        else:
            moment = column_dots(current, current)
        if doubled:
            # T_{2j} = 2 T_j^2 - T_0 and T_{2j+1} = 2 T_j T_{j+1} - T_1
            moment = 2 * moment - (first if degree % 2 else zeroth)
        if chebyshev:
            _check_inside(moment, zeroth, degree, interval)
        elif not bool(torch.isfinite(moment).all()):
            raise ValueError(
                f"op must give finite products; the power moment of degree {degree} is NaN or Inf: "
                "pass interval= to rescale the matrix"
            )
        if doubled and degree == 3:
            # <t_0, t_2> = 2 <t_1, t_1> - <t_0, t_0> only if A is symmetric.
            _check_symmetric(op, block, current, 2 * column_dots(before, before) - zeroth)
        yield moment


def _check_symmetric(op: LinearOperator, block: Tensor, second: Tensor, doubled: Tensor) -> None:
    scale = column_dots(block, block)
    gap = (column_dots(block, second) - doubled).abs() / scale
    if not is_below(gap, torch.finfo(op.dtype).eps ** 0.5):
        raise ValueError(
            f"op must be symmetric and deterministic, but two computations of its second moment "
            f"differ by {float(gap.max()):.2g}"
        )


def _check_inside(
    moment: Tensor, zeroth: Tensor, degree: int, interval: tuple[float, float]
) -> None:
    # |T_j| <= 1 on [-1, 1], and grows exponentially outside.
    worst = float((moment.abs() / zeroth).max())
    if math.isnan(worst):
        raise ValueError(f"op must give finite products; the moment of degree {degree} is NaN")
    if worst > 1.001:
        raise ValueError(
            f"interval must contain the spectrum, got {interval}: the Chebyshev moment of degree "
            f"{degree} is {worst:.4g}, above 1"
        )


def _widened(ends: Bounds, eps: float) -> tuple[float, float]:
    # The spectrum of a multiple of the identity is a point. Mapping an interval as short as
    # roundoff to [-1, 1] would magnify roundoff.
    size = max(abs(ends.low), abs(ends.high))
    if ends.high - ends.low > eps**0.5 * size:
        return ends.low, ends.high
    return ends.low - (size or 1.0), ends.high + (size or 1.0)


def chebyshev_from_legendre(degree: int) -> Tensor:
    """Return the coefficients of Legendre polynomials (rows) in Chebyshev polynomials (columns)."""
    nodes, _ = legendre.leggauss(degree + 1)
    chebyshev_values = chebyshev.chebvander(nodes, degree)
    legendre_values = legendre.legvander(nodes, degree)
    return torch.from_numpy(np.linalg.solve(chebyshev_values, legendre_values).T.copy())
