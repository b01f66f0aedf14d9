"""Samples of traces of functions, from quadratic forms or from moments, and their estimate."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.results import Estimate, Status, stderr
from ritz.operators import LinearOperator
from ritz.spectra._functions.forms import Budget, Forms, Sampler
from ritz.spectra._functions.gauss import Function
from ritz.spectra._lanczos import Bounds, bounds
from ritz.spectra._maxent import EntropicDensity, Grid, in_interval, maxent
from ritz.spectra._moments import Moments, moments

PROBES = 32
MOST_STEPS = 200  # for bounds of the spectrum
MAXENT_MOMENTS = 60  # beyond which the noise of the moments is all that is fitted


@dataclass(frozen=True, slots=True)
class Expansion:
    """Samples ``(d,)`` of a trace, what more of them would not cure, and what it took."""

    samples: Tensor
    truncation: Tensor
    num_products: int
    how: str


def estimated(found: Expansion, budget: Budget) -> Estimate:
    """The mean of the samples, with both error bars, and whether they are as small as asked."""
    sampled = len(found.samples) > 1
    mean = found.samples.mean()
    error = stderr(found.samples) if sampled else torch.zeros_like(mean)
    return Estimate(
        mean=mean,
        stderr=error,
        truncation=found.truncation,
        samples=found.samples if sampled else None,
        num_products=found.num_products,
        method=found.how,
        status=_status(float(mean), float(error), float(found.truncation), budget.rtol),
        seed=budget.generator.initial_seed(),
    )


def by_quadrature(sampler: Sampler, *, num_products: int, num_probes: int | None) -> Expansion:
    """Sample quadratic forms, as many probes as given or as pay, and scale them to the trace."""
    if num_probes is None:
        forms = sampler.split(num_products)
    else:
        forms = sampler.fixed(num_probes, max(1, num_products // num_probes))
    return of_forms(sampler, forms)


def of_forms(sampler: Sampler, forms: Forms) -> Expansion:
    """Quadratic forms scaled to the trace, their truncation, and how they were found."""
    samples, how = forms.samples(sampler.known)
    how = f"{len(samples)} probes x {forms.num_steps} steps{how}"
    n = sampler.dimension
    return Expansion(n * samples, n * forms.brackets.truncation, forms.num_products, how)


def by_chebyshev(op: LinearOperator, budget: Budget, function: Function) -> Expansion:
    r"""Interpolate :math:`f` between the floor and the norm: :math:`\sum_j c_j \mu_j`."""
    found = _moments(op, budget, budget.num_products, function)
    n, degree = op.shape[0], len(found.mean) - 1
    series, gap = _interpolated(function, found.interval, degree)
    samples = n * (found.samples @ series)
    how = f"Chebyshev series of degree {degree}, {len(samples)} probes"
    return Expansion(samples, n * gap, found.num_products, how)


def by_maxent(op: LinearOperator, budget: Budget, function: Function) -> Expansion:
    r"""Take :math:`n \int q f` of the density of maximum entropy.

    To first order :math:`\int q f` changes with the moments by the coefficients of the
    regression of :math:`f` on the polynomials under :math:`q`: whence a sample for each probe.
    """
    most = (budget.num_probes or PROBES) * MAXENT_MOMENTS // 2
    found = _moments(op, budget, min(budget.num_products, most), function)
    n, degree = op.shape[0], len(found.mean) - 1
    density: EntropicDensity = maxent(found)
    density.raise_if_failed()
    value = density.expectation(function)
    slopes = _regression(density, function)
    samples = n * (value + (found.samples[:, 1:] - found.mean[1:]) @ slopes)
    # Two densities with the same moments agree on a polynomial, and differ on what is left of f.
    truncation = 2 * n * _interpolated(function, found.interval, degree)[1]
    how = f"maximum entropy, {degree} moments, {len(samples)} probes"
    return Expansion(samples, truncation, found.num_products, how)


def _interpolated(
    function: Function, interval: tuple[float, float], degree: int
) -> tuple[Tensor, Tensor]:
    """The Chebyshev series that interpolates a function, and how far it is from it at most."""
    # At the nodes of the grid Chebyshev polynomials are orthogonal.
    grid = Grid.make(degree + 1, degree)
    values = function(in_interval(grid.nodes, interval))
    series = (2 / (degree + 1)) * grid.polynomials.T @ values
    series[0] /= 2
    fine = Grid.make(20 * degree + 200, degree)
    gap = fine.polynomials @ series - function(in_interval(fine.nodes, interval))
    return series, gap.abs().max()


def _moments(op: LinearOperator, budget: Budget, num_products: int, function: Function) -> Moments:
    steps = min(MOST_STEPS, max(2, num_products // 3))
    found = bounds(op, max_steps=steps, generator=budget.generator)
    left = num_products - found.num_products
    num_probes = budget.num_probes or max(2, min(PROBES, left))
    measured = moments(
        op,
        num_moments=max(2, 2 * (left // num_probes)),
        interval=_interval(found, budget.floor, function, torch.finfo(op.dtype).eps),
        num_probes=num_probes,
        generator=budget.generator,
        progress=budget.progress,
    )
    return replace(measured, num_products=measured.num_products + found.num_products)


def _interval(
    found: Bounds, floor: float | None, function: Function, eps: float
) -> tuple[float, float]:
    """Where to expand the function: from the floor, or from a bound where it has a value."""
    smallest, largest = found.ritz or tuple(found)
    function(torch.tensor([smallest, largest], dtype=torch.float64))  # which may refuse a value
    size = max(abs(smallest), abs(largest))
    if floor is not None and smallest < floor - 100 * eps * size:
        raise ValueError(
            f"floor must be below the spectrum, got {floor:.6g} where a Ritz value is "
            f"{smallest:.6g}"
        )
    # A spectrum of one point has no interval of its own.
    margin = 0.01 * (size or 1.0) if found.high - found.low <= eps**0.5 * size else 0.0
    low = found.low - margin if floor is None else floor
    try:
        function(torch.tensor([low], dtype=torch.float64))
    except ValueError as error:
        raise ValueError(
            f"floor must be given where bounds of the spectrum reach beyond the domain of the "
            f"function, got [{found.low:.3g}, {found.high:.3g}] and no floor"
        ) from error
    return low, found.high + margin


def _regression(density: EntropicDensity, function: Function) -> Tensor:
    """Coefficients of the function on the polynomials, under the density, ridge included."""
    grid = Grid.make(density.grid_size, len(density.alphas))
    points = in_interval(grid.nodes, density.interval)
    shares = grid.weights * density.pdf(points)
    shares = shares / shares.sum()
    polynomials, values = grid.polynomials[:, 1:], function(points)
    centred = polynomials - shares @ polynomials
    covariance = centred.T @ (shares[:, None] * centred) + torch.diag(density.ridge)
    slopes: Tensor = torch.linalg.solve(covariance, centred.T @ (shares * values))
    return slopes


def _status(mean: float, error: float, truncation: float, rtol: float | None) -> Status:
    both = math.hypot(error, truncation)
    if rtol is None:
        return Status(outcome="completed", message=f"error bars {error:.2g} and {truncation:.2g}")
    if both <= rtol * abs(mean):
        return Status(outcome="converged", message=f"relative error below {rtol:.2g}")
    advice = "more probes" if error > truncation else "more products, or a floor of the spectrum"
    return Status(
        outcome="max_steps",
        message=f"relative error {both / abs(mean):.2g} where {rtol:.2g} was asked for",
        advice=f"{advice} would lower the larger error bar",
    )
