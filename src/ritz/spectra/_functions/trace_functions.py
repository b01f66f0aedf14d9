"""``trace_function``: tr f(A) by quadrature, block Krylov, moments or eigenvalues."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_number
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, draw_probes, resolve_generator
from ritz._core.results import Estimate, stderr
from ritz._core.sampling import (
    Sampling,
    check_samples,
    doubling,
    doubt_equal_samples,
    is_settled,
)
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.spectra._functions.block_krylov import by_krylov
from ritz.spectra._functions.floors import certain_floor
from ritz.spectra._functions.quadrature import (
    ADVICE,
    ALTERNATING,
    Budget,
    Function,
    Sampler,
    elementwise,
    finite_function,
    floor_error,
    roundoff_error,
)
from ritz.spectra._lanczos import Bounds, Reorthogonalization, bounds
from ritz.spectra._maxent import EntropicDensity, Grid, in_interval, maxent
from ritz.spectra._moments import Moments, moment_roundoff, moments

TraceFunctionMethod = Literal["auto", "lanczos", "krylov", "chebyshev", "maxent", "eigenvalues"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the choice of a method, and of the methods that use moments."""

    # `auto` diagonalises matrices of up to this many rows if the products suffice: 3 s at 3,000.
    dense: int = 3000
    # With fewer rows probes are Gaussian, because many sign vectors would coincide up to the sign.
    few: int = 10
    # Default number of probes of the methods that use moments; that of `trace`.
    probes: int = 32
    # Maximum number of Lanczos steps for bounds of the spectrum; 20 to 60 are usual.
    bound_steps: int = 200
    # Beyond 60 moments maximum entropy fits the noise of the moments: studies/entropy_moments.py.
    maxent_moments: int = 60


TUNING = Tuning()


def trace_function(
    op: OperatorLike,
    function: Callable[[Tensor], Tensor],
    *,
    num_steps: int,
    num_probes: int = 32,
    method: TraceFunctionMethod = "auto",
    floor: float | None = None,
    rtol: float | None = None,
    max_probes: int = 1000,
    block_size: int | None = None,
    reorthogonalize: Reorthogonalization = "none",
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Estimate :math:`\operatorname{tr} f(A) = \mathbb{E}[z^\top f(A) z]`, with error bars.

    ``lanczos`` is Gauss quadrature,

    .. math:: z^\top f(A) z \approx \|z\|^2 \sum_{k=1}^m \tau_k f(\theta_k)

    at ``num_steps`` products per probe. Memory: 6 vectors for each of the ``block_size`` probes
    that are multiplied together, or ``num_steps + 5`` with re-orthogonalisation. By default the
    runs are not re-orthogonalised. Ritz values then repeat and share their weight, which delays
    convergence, but the quadrature stays accurate (Greenbaum 1989). ``"full"`` converges in fewer
    steps if eigenvalues are far apart.

    ``truncation`` is the error of the quadrature. With a ``floor`` it is a bound for ``torch.log``,
    ``torch.reciprocal``, ``torch.sqrt`` and ``torch.rsqrt``: Gauss and Gauss-Radau rules bracket
    the quadratic form. For these a floor is taken from the entries of a sparse or dense matrix if
    they give one (see :func:`ritz.logdet`). For other functions, and without a floor, it is an
    estimate: twice the largest change by a node at either end of the spectrum or by the last eighth
    of the steps, or the error by jumps, kinks and peaks of the function between the nodes, if that
    is larger. It is infinite, and the outcome ``uncertain``, if there are fewer than four steps or
    if the spectrum may reach a pole of the function, such as zero for the logarithm.

    The other methods use ``num_steps * num_probes`` products in all. ``krylov`` uses 60 % of them
    to build a block Krylov space, stores as many vectors, and computes the trace on this space from
    the projected matrix. The rest goes to quadrature with probes orthogonal to the space. Use it if
    few eigenvalues dominate. ``chebyshev`` interpolates the function between ``floor`` and the
    norm. ``maxent`` takes its mean under the density of maximum entropy with up to 60 moments.
    ``eigenvalues`` forms the matrix by ``n`` products and diagonalises it, which is exact.

    ``auto`` is ``eigenvalues`` if ``n`` is at most 3,000 and at most ``num_steps * num_probes``,
    and ``lanczos`` otherwise. All methods take all eigenvalues if ``n`` is at most ``num_probes``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``. It may be indefinite.
        function: Elementwise :math:`f` on a float64 tensor of points between the ends of the
            spectrum, such as ``torch.reciprocal``, ``torch.exp``, ``torch.special.entr``
            (:math:`-x \log x`), ``lambda x: x**p`` or ``lambda x: x > 1``, which counts
            eigenvalues.
        num_steps: Krylov dimension ``m``. Polynomials of degree ``2 m - 1`` are exact.
        num_probes: Number of probes. If ``rtol`` is given, the minimum number.
        method: See above.
        floor: A lower bound of the eigenvalues.
        rtol: Add probes until the 95 % interval is within this fraction of the mean. The status
            says whether it is. ``krylov`` adds no products.
        max_probes: Maximum number of probes with ``rtol``.
        block_size: Number of probes that are multiplied together. Defaults to the block size of the
            operator.
        reorthogonalize: ``none``, ``partial`` or ``full``.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Golub and Meurant (1994); Ubaru, Chen and Saad (2017); Chen and Hallman (2023) for
    ``krylov``.
    """
    op = as_operator(op)
    check_choice("method", method, get_args(TraceFunctionMethod))
    n = op.shape[0]
    num_steps = check_count("num_steps", num_steps, high=n)
    if floor is not None:
        check_number("floor", floor)
    function = elementwise(function)
    check_choice("reorthogonalize", reorthogonalize, get_args(Reorthogonalization))
    generator = resolve_generator(generator)
    Sampling(num_probes, rtol, max_probes, block_size, probe)  # checks the arguments
    limit = num_probes if rtol is None else max_probes
    budget = Budget(num_steps * num_probes, num_probes, limit, floor, rtol, generator, progress)
    if floor is None and function in ALTERNATING and method != "eigenvalues":
        budget = budget.above(certain_floor(op))
    # A whole basis costs no more than as many random probes, and is exact.
    affordable = n <= (min(budget.num_products, TUNING.dense) if method == "auto" else num_probes)
    if affordable or method == "auto":
        method = "eigenvalues" if affordable else "lanczos"
    if method != "lanczos":
        return with_seed_and_status(_METHODS[method](op, budget, function), budget)
    with tracking(progress, "trace of a function", budget.num_products) as bar:
        sampler = Sampler(
            op=op,
            draw=lambda count: unit_probes(op, count, probe, generator),
            function=function,
            budget=budget,
            dimension=n,
            bar=bar,
            label="Lanczos quadrature, ",
            mode=reorthogonalize,
            block_size=block_size,
        )
        return sampler.extended([], num_steps, doubling(num_probes, limit))


def unit_probes(op: LinearOperator, count: int, kind: Probe, generator: torch.Generator) -> Tensor:
    """Return random vectors ``(n, count)`` of norm one."""
    # With few rows the random signs of several probes coincide, and their spread is zero.
    kind = "gaussian" if op.shape[0] < TUNING.few else kind
    drawn = draw_probes(op, count, kind=kind, generator=generator)
    return drawn.div_(drawn.norm(dim=0))


def with_seed_and_status(estimate: Estimate, budget: Budget) -> Estimate:
    """Return the estimate with the seed of the probes, and with its status."""
    seeded = replace(estimate, seed=budget.generator.initial_seed())
    return seeded.with_status(budget.rtol, ADVICE)


# ------------------------------------------------------------------------------------------
# The methods that use moments or eigenvalues.


def by_chebyshev(op: LinearOperator, budget: Budget, function: Function) -> Estimate:
    r"""Interpolate :math:`f` between the floor and the norm: :math:`\sum_j c_j \mu_j`."""
    n, function = op.shape[0], finite_function(function)

    def finish(measured: Moments) -> Estimate:
        degree = len(measured.mean) - 1
        series, gap = _interpolation(function, measured.interval, degree)
        return Estimate.of(
            n * (measured.samples @ series),
            truncation=n * (gap + moment_roundoff(op, measured.interval) * series.abs().sum()),
            num_products=measured.num_products,
            method=f"Chebyshev series of degree {degree}, {len(measured.samples)} probes",
        )

    return _by_moments(op, budget, budget.num_products, function, finish)


def by_maxent(op: LinearOperator, budget: Budget, function: Function) -> Estimate:
    r"""Take :math:`n \int q f` of the density :math:`q` of maximum entropy.

    To first order :math:`\int q f` changes with the moments by the coefficients of the regression
    of :math:`f` on the polynomials under :math:`q`. That gives one sample per probe.
    """
    n, function = op.shape[0], finite_function(function)

    def finish(measured: Moments) -> Estimate:
        degree = len(measured.mean) - 1
        density: EntropicDensity = maxent(measured)
        density.raise_if_failed()
        slopes, moved = _regression(density, function)
        off = (measured.samples - measured.mean)[:, 1:]
        series, gap = _interpolation(function, measured.interval, degree)
        # Two densities with the same moments agree on the interpolating polynomial p. Their means
        # of f differ by at most 2 max |f - p|. The moments of a relaxed dual differ from those
        # measured, and the means of p by the differences times the series.
        relaxed = (series * (moved - measured.mean)).abs().sum()
        return Estimate.of(
            n * (density.expectation(function) + off @ slopes),
            truncation=n
            * (2 * gap + relaxed + moment_roundoff(op, measured.interval) * series.abs().sum()),
            num_products=measured.num_products,
            method=f"maximum entropy, {degree} moments, {len(measured.samples)} probes",
        )

    most = (budget.num_probes or TUNING.probes) * TUNING.maxent_moments // 2
    return _by_moments(op, budget, min(budget.num_products, most), function, finish)


def _by_eigenvalues(op: LinearOperator, budget: Budget, function: Function) -> Estimate:
    n = op.shape[0]
    matrix = op.dense().double()
    check_samples(matrix.T, 0)
    values = torch.linalg.eigvalsh(matrix).cpu()
    size = float(values.abs().max())
    value = float(finite_function(function)(values).sum())
    # Roundoff in n products and in the reduction to tridiagonal form: eps |A| sqrt(n). On Hadamard
    # matrices of 16 to 512 rows the largest errors are half of that.
    unit = torch.finfo(op.dtype).eps * size * n**0.5
    error = roundoff_error(values, torch.ones_like(values), unit, function)
    method = f"all {n:,} eigenvalues"
    return Estimate.exact(value, method=method, num_products=n, truncation=error)


_METHODS: dict[str, Callable[[LinearOperator, Budget, Function], Estimate]] = {
    "krylov": by_krylov,
    "chebyshev": by_chebyshev,
    "maxent": by_maxent,
    "eigenvalues": _by_eigenvalues,
}


def _interpolation(
    function: Function, interval: tuple[float, float], degree: int
) -> tuple[Tensor, Tensor]:
    """Return the Chebyshev series that interpolates a function, and its largest error."""
    # Discrete orthogonality at the Chebyshev nodes x_g: c_j = 2/(m + 1) sum_g T_j(x_g) f(x_g),
    # and half of that for j = 0.
    grid = Grid.make(degree + 1, degree)
    values = function(in_interval(grid.nodes, interval))
    series = (2 / (degree + 1)) * grid.polynomials.T @ values
    series[0] /= 2
    # The largest error is often at an end, which is not a Chebyshev node: T_j(cos t) = cos(j t).
    angles = torch.linspace(0, torch.pi, 20 * degree + 200, dtype=torch.float64)
    polynomials = torch.cos(angles[:, None] * torch.arange(degree + 1))
    gap = polynomials @ series - function(in_interval(torch.cos(angles), interval))
    return series, gap.abs().max()


def _by_moments(
    op: LinearOperator,
    budget: Budget,
    num_products: int,
    function: Function,
    finish: Callable[[Moments], Estimate],
) -> Estimate:
    """Return the estimate that ``finish`` makes of the moments of enough probes."""
    steps = min(TUNING.bound_steps, max(2, num_products // 3))
    ends = bounds(op, max_steps=steps, generator=budget.generator)
    left = num_products - ends.num_products
    first = budget.num_probes or max(2, min(TUNING.probes, left))
    interval = _interval(ends, budget, function, torch.finfo(op.dtype).eps)
    drawn, spent = torch.empty(0, dtype=torch.float64), ends.num_products
    for goal in doubling(first, max(first, budget.max_probes)):
        measured = moments(
            op,
            num_moments=max(2, 2 * (left // first)),
            interval=interval,
            num_probes=max(2, goal - len(drawn)),
            generator=budget.generator,
            progress=budget.progress,
        )
        drawn = torch.cat([drawn, measured.samples]) if len(drawn) else measured.samples
        spent += measured.num_products
        together = replace(
            measured, samples=drawn, mean=drawn.mean(0), stderr=stderr(drawn), num_products=spent
        )
        estimate = with_seed_and_status(doubt_equal_samples(finish(together)), budget)
        if is_settled(estimate, budget.rtol):
            break
    return estimate


def _interval(ends: Bounds, budget: Budget, function: Function, eps: float) -> tuple[float, float]:
    """Return the interval on which to expand the function, from the floor if there is one."""
    floor, (smallest, largest) = budget.floor, ends.ritz or tuple(ends)
    # Ritz values lie within the spectrum, so the function must be finite there.
    function(torch.tensor([smallest, largest], dtype=torch.float64))
    size = max(abs(smallest), abs(largest))
    if floor is not None and smallest < floor - 100 * eps * size:
        raise floor_error(floor, smallest)
    # The spectrum of a multiple of the identity is a point: give it an interval.
    margin = 0.01 * (size or 1.0) if ends.high - ends.low <= eps**0.5 * size else 0.0
    low = ends.low - margin
    if floor is not None:  # one from the entries may be far below the spectrum
        low = max(low, floor) if budget.source else floor
    high = ends.high + margin
    try:
        # A series has no node at the pole of 1/x, so it would not show that it does not converge.
        function(torch.tensor([low, min(max(low, 0.0), high)], dtype=torch.float64))
    except ValueError as error:
        raise ValueError(
            f"floor must be given: the bounds [{ends.low:.3g}, {ends.high:.3g}] of the spectrum "
            "reach beyond the domain of the function"
        ) from error
    return low, high


def _regression(density: EntropicDensity, function: Function) -> tuple[Tensor, Tensor]:
    """Return the coefficients of the function on the polynomials, and the density's moments."""
    grid = Grid.make(density.grid_size, len(density.alphas))
    points, shares = density.discretized()
    # d E_q[f] / d mu = (cov_q(T) + diag(r))^{-1} cov_q(T, f), with the ridge r of the dual.
    polynomials, values = grid.polynomials[:, 1:], function(points)
    centred = polynomials - shares @ polynomials
    covariance = centred.T @ (shares[:, None] * centred) + torch.diag(density.ridge)
    slopes: Tensor = torch.linalg.solve(covariance, centred.T @ (shares * values))
    return slopes, shares @ grid.polynomials
