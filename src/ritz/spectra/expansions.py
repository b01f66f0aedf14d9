"""Log determinants from moments: by a Chebyshev series, and by maximum entropy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ritz.operators.base import LinearOperator
from ritz.spectra.budget import Budget
from ritz.spectra.dual import Grid, in_interval
from ritz.spectra.entropic import EntropicDensity
from ritz.spectra.entropy import maxent
from ritz.spectra.extremes import bounds
from ritz.spectra.polynomials import Moments, moments

MAXENT_MOMENTS = 60  # beyond which the noise of the moments is all that is fitted


@dataclass(frozen=True, slots=True)
class Expansion:
    """Samples ``(d,)`` of a log determinant, what more of them would not cure, and what it took."""

    samples: Tensor
    truncation: Tensor
    num_products: int
    how: str


def by_chebyshev(op: LinearOperator, budget: Budget) -> Expansion:
    r"""Interpolate :math:`\log` between the floor and the norm: :math:`\sum_j c_j \mu_j`."""
    found = _moments(op, budget, budget.num_products)
    degree = len(found.mean) - 1

    # Interpolation at the nodes of the grid, where Chebyshev polynomials are orthogonal.
    grid = Grid.make(degree + 1, degree)
    series = (2 / (degree + 1)) * grid.polynomials.T @ in_interval(grid.nodes, found.interval).log()
    series[0] /= 2
    fine = Grid.make(20 * degree + 200, degree)
    gap = (fine.polynomials @ series - in_interval(fine.nodes, found.interval).log()).abs().max()
    n = op.shape[0]
    samples = n * (found.samples @ series)
    how = f"Chebyshev series of degree {degree}, {budget.num_probes} probes"
    return Expansion(samples, n * gap, found.num_products, how)


def by_maxent(op: LinearOperator, budget: Budget) -> Expansion:
    r"""Take :math:`n \int q \log` of the density of maximum entropy.

    To first order :math:`\int q \log` changes with the moments by the coefficients of the
    regression of :math:`\log` on the polynomials under :math:`q`: whence a sample for each probe.
    """
    most = budget.num_probes * MAXENT_MOMENTS // 2
    found = _moments(op, budget, min(budget.num_products, most))
    n, degree = op.shape[0], len(found.mean) - 1
    density: EntropicDensity = maxent(found)
    density.raise_if_failed()
    value = density.expectation(torch.log)
    half = max(1, degree // 2)
    coarse: EntropicDensity = maxent(
        found.mean[: half + 1], interval=found.interval, stderr=found.stderr[: half + 1]
    )
    slopes = _regression(density)
    samples = n * (value + (found.samples[:, 1:] - found.mean[1:]) @ slopes)
    truncation = torch.tensor(n * abs(value - coarse.expectation(torch.log)), dtype=torch.float64)
    how = f"maximum entropy, {degree} moments, {budget.num_probes} probes"
    return Expansion(samples, truncation, found.num_products, how)


def _moments(op: LinearOperator, budget: Budget, num_products: int) -> Moments:
    found = bounds(op, generator=budget.generator)
    low = found.low if budget.floor is None else budget.floor
    if not low > 0:
        raise ValueError(
            f"floor must be given where bounds of the spectrum reach zero, got [{found.low:.3g}, "
            f"{found.high:.3g}] and no floor"
        )
    return moments(
        op,
        num_moments=max(2, 2 * ((num_products - found.num_products) // budget.num_probes)),
        interval=(low, found.high),
        num_probes=budget.num_probes,
        generator=budget.generator,
        progress=budget.progress,
    )


def _regression(density: EntropicDensity) -> Tensor:
    """Coefficients of log on the Chebyshev polynomials, under the density, ridge included."""
    grid = Grid.make(density.grid_size, len(density.alphas))
    points = in_interval(grid.nodes, density.interval)
    shares = grid.weights * density.pdf(points)
    shares = shares / shares.sum()
    polynomials, logs = grid.polynomials[:, 1:], points.log()
    centred = polynomials - shares @ polynomials
    covariance = centred.T @ (shares[:, None] * centred) + torch.diag(density.ridge)
    slopes: Tensor = torch.linalg.solve(covariance, centred.T @ (shares * logs))
    return slopes
