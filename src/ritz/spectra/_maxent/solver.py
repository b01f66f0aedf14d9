"""``maxent``: the density of maximum entropy with given moments."""

from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, get_args, overload

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz._core.checks import (
    check_choice,
    check_count,
    check_finite,
    check_interval,
    check_positive,
    check_range,
    is_below,
)
from ritz._core.density import as_points
from ritz._core.results import Status
from ritz.spectra._maxent.dual import (
    TUNING,
    Interval,
    Prior,
    Rule,
    Solution,
    log_mass,
    minimise,
    quadrature,
)
from ritz.spectra._maxent.entropic import EntropicDensity
from ritz.spectra._moments import MomentBasis, Moments, chebyshev_from_legendre

# ------------------------------------------------------------------------------------------
# The solver, which finds the smallest variance of the moments for which there is a density.


@dataclass(frozen=True, slots=True)
class Solver:
    """A quadrature, a finer one to check that it resolves a density, and stopping rules.

    Attributes:
        rule: Quadrature with polynomials up to degree ``2 m``.
        fine: Quadrature of twice the size with polynomials up to degree ``m``.
        blur: Difference of the logarithms of their integrals of the prior.
        atol: Largest entry of the gradient to stop at.
        max_steps: Maximum number of steps with one variance.
    """

    rule: Rule
    fine: Rule
    blur: float
    atol: float
    max_steps: int

    def solve(self, targets: Tensor, levels: list[Tensor]) -> tuple[Solution, Tensor]:
        """Return, for each vector, the solution with the smallest possible variance, and that.

        The smallest variance is tried first. If it fails, the others are tried from the largest
        down, each from the solution of the one before, until one fails.

        Args:
            targets: Moments, ``(N, m)``.
            levels: Variances of the moments, each ``(N, m)``, ascending as ``TUNING.ladder``.
        """
        best = self._minimise(
            targets, levels[0], self.max_steps, blurred=TUNING.blurred, patience=TUNING.patience
        )
        ridge, left = levels[0].clone(), (~self._succeeded(best)).nonzero()[:, 0]
        if not len(left):
            return best, ridge
        trial = self._minimise(targets[left], levels[-1][left], self.max_steps)
        # The result of the largest variance is used even if it has not converged.
        accepted = torch.ones_like(left, dtype=torch.bool)
        for below in range(len(levels) - 2, -2, -1):
            chosen = left[accepted]
            for array, new in zip(best[:-1], trial[:-1], strict=True):
                array[chosen] = new[accepted]
            ridge[chosen] = levels[below + 1][chosen]
            best.iterations[left] += trial.iterations
            good = self._succeeded(trial)
            left, start = left[good], trial.alphas[good]
            if not len(left) or below < 0:
                break
            trial = self._minimise(
                targets[left],
                levels[below][left],
                min(TUNING.patience, self.max_steps),
                start=start,
                damping=TUNING.relaxed_damping * TUNING.ladder[below],
                blurred=TUNING.blurred,
            )
            accepted = self._succeeded(trial)
        return best, ridge

    def resolves(self, solution: Solution) -> Tensor:
        """Return whether the densities have the same integrals on the finer grid, ``(N,)``."""
        # Allow the error of the prior, which relaxed moments do not reduce.
        gap = log_mass(solution, self.fine.log_prior, self.fine.grid).abs()
        near: Tensor = gap <= TUNING.resolved + 10 * self.blur
        return near

    def _succeeded(self, solution: Solution) -> Tensor:
        return (solution.gradient <= self.atol) & self.resolves(solution)

    def _minimise(self, targets: Tensor, ridge: Tensor, steps: int, **options: Any) -> Solution:
        prior, grid = self.rule.log_prior, self.rule.grid
        return minimise(targets, ridge, prior, grid, atol=self.atol, max_steps=steps, **options)


# ------------------------------------------------------------------------------------------
# The public function.


class MaxentOptions(TypedDict, total=False):
    """The keywords of :func:`maxent`."""

    basis: MomentBasis
    interval: Interval | None
    stderr: Tensor | None
    prior: Prior
    atol: float
    max_steps: int
    grid_size: int | None


@overload
def maxent(moments: Moments, **options: Unpack[MaxentOptions]) -> EntropicDensity: ...
@overload
# One density for a vector of moments, a tuple for a matrix: the types cannot tell.
def maxent(moments: Tensor, **options: Unpack[MaxentOptions]) -> Any: ...
def maxent(
    moments: Moments | Tensor,
    *,
    basis: MomentBasis = "chebyshev",
    interval: Interval | None = None,
    stderr: Tensor | None = None,
    prior: Prior = "flat",
    atol: float = 1e-9,
    max_steps: int = 300,
    grid_size: int | None = None,
) -> Any:
    r"""Return the density of maximum entropy with given moments.

    .. math:: \max_q -\int q \log \frac{q}{q_0} \quad \text{with} \quad
        \int q\, \phi_i = \mu_i, \quad i = 0, \dots, m

    by Levenberg-Marquardt on the convex dual. The dual always uses Chebyshev polynomials. The
    density does not depend on the basis, but the conditioning of the dual does. Moments with
    standard errors are matched within these errors: the dual gets the ridge
    :math:`\frac12 \sum_i r_i \alpha_i^2` with :math:`r_i` the squared standard errors.

    If no smooth density has these moments, they are matched approximately. The variance :math:`r`
    is then the smallest of seven values between 1e-18 and 1e-2 for which the solver converges to a
    density that the quadrature resolves. ``relaxation`` is the increase of the variance, ``status``
    reports it, and ``moment_error`` is the largest error of a moment.

    A solution takes 10 to 150 steps of :math:`O(G m + m^3)` operations for a grid of ``G`` nodes.

    Args:
        moments: The result of :func:`ritz.moments`, or a tensor ``(m + 1,)`` of moments of degree
            ``0, ..., m``, the first of which is 1; or several vectors ``(N, m + 1)``, each of which
            gets a density.
        basis: Basis of a tensor: ``chebyshev`` or ``legendre`` polynomials of the variable mapped
            to ``[-1, 1]``, or ``power``, powers of the variable itself.
        interval: ``(a, b)``, the support. Defaults to that of :class:`Moments`, and to ``(-1, 1)``
            for a tensor. Required for power moments of a matrix that was not rescaled.
        stderr: Standard errors, of the shape of a tensor. Defaults to those of :class:`Moments`,
            and to zeros for a tensor.
        prior: ``flat``, ``semicircle``, ``marchenko_pastur``, a law such as those of ``ritz.rmt``,
            another density, or a function of the variable; positive inside the interval.
        atol: Stop when no entry of the gradient of the dual exceeds this. The gradient is the error
            of each moment, apart from the relaxation by its variance.
        max_steps: Maximum number of Newton steps for each variance that is tried.
        grid_size: Nodes of the quadrature. Defaults to ``max(512, 16 m)``, or more if the prior
            needs it.

    Returns:
        An :class:`EntropicDensity`, or a tuple of them for several vectors.

    Reference: *Spectral Machine Learning*, Algorithm 1 and sections 2.3 and 2.4.

    Example:
        >>> import torch, ritz
        >>> uniform = torch.tensor([1.0, 0.0, -1 / 3, 0.0, -1 / 15], dtype=torch.float64)
        >>> density = ritz.maxent(uniform)
        >>> round(float(density.pdf(torch.tensor(0.3))), 6)
        0.5
    """
    vectors, deviations, support, change = _read(moments, basis, interval, stderr)
    check_positive("atol", atol, zero=True)
    max_steps = check_count("max_steps", max_steps)
    raw = torch.atleast_2d(vectors)
    m = raw.shape[1] - 1
    targets = (raw @ change.T)[:, 1:]
    size = max(TUNING.grid_size, TUNING.nodes_per_moment * m) if grid_size is None else grid_size
    check_count("grid_size", size, low=2 * m + 1)
    while True:
        rule = quadrature(prior, support, size, 2 * m)
        fine = quadrature(prior, support, 2 * size, m)
        blur = abs(float(fine.log_mass - rule.log_mass))
        size *= 2
        if grid_size or blur <= TUNING.resolved / 100 or size > TUNING.largest_grid:
            break
    solver = Solver(rule, fine, blur, atol, max_steps)
    # The change of basis magnifies the roundoff of power moments. For the other two bases this is
    # at most 1e-32 m^2, below the smallest variance.
    roundoff = (1e-16 * raw.abs() @ change.abs().T).square()[:, 1:]
    # Var(C mu) = C^2 Var(mu) for independent errors. Clamped before squaring: squares may
    # overflow, and zero times infinity is NaN.
    squares = torch.atleast_2d(deviations).clamp_max(TUNING.largest**0.5).square()
    errors = (squares @ change.square().T)[:, 1:].clamp_max(TUNING.largest)
    densities = _densities(solver, targets, errors, roundoff, support, prior)
    if isinstance(moments, Moments):
        return replace(densities[0], matrix=moments.matrix, batch_norm=moments.batch_norm)
    return tuple(densities) if vectors.ndim == 2 else densities[0]


def _densities(
    solver: Solver,
    targets: Tensor,
    errors: Tensor,
    roundoff: Tensor,
    support: Interval,
    prior: Prior,
) -> list[EntropicDensity]:
    """Return one density per row of moments ``(N, m)``, with variances of these shapes."""
    levels = [errors.clamp_min(level) for level in TUNING.ladder]
    densities, size = [], len(solver.rule.points)
    for rows in torch.arange(len(targets)).split(max(1, TUNING.block // size)):
        variances = [level[rows] + roundoff[rows] for level in levels]
        solution, ridge = solver.solve(targets[rows], variances)
        resolves = solver.resolves(solution).tolist()
        for i, row in enumerate(rows.tolist()):
            relaxation = float((ridge[i] - variances[0][i]).max())
            error = float((solution.fitted[i] - targets[row]).abs().max())
            steps, gradient = int(solution.iterations[i]), float(solution.gradient[i])
            rounded = float(roundoff[row].max())
            status = _status(solver, steps, gradient, error, rounded, relaxation)
            density = EntropicDensity(
                alphas=solution.alphas[i],
                log_partition=float(solution.log_partition[i]),
                interval=support,
                prior=prior,
                targets=targets[row],
                fitted=solution.fitted[i],
                ridge=ridge[i],
                relaxation=relaxation,
                grid_size=size,
                num_steps=steps,
                status=status if resolves[i] else UNRESOLVED,
            )
            densities.append(density)
    return densities


def _read(
    moments: Moments | Tensor, basis: str, interval: Interval | None, stderr: Tensor | None
) -> tuple[Tensor, Tensor, Interval, Tensor]:
    """Return moments, their standard errors, the support, and the map to Chebyshev moments."""
    default = moments.interval if isinstance(moments, Moments) else (-1.0, 1.0)
    support = default if interval is None else interval
    check_interval("interval", support)
    # The variable is the interval that was mapped to [-1, 1] before powers were taken.
    support = variable = (float(support[0]), float(support[1]))
    if isinstance(moments, Moments):
        variable, basis = (-1.0, 1.0), moments.basis
        if basis == "power" and moments.interval == variable:
            _check_reach(moments.samples, support)
            variable = support
        elif support != moments.interval:
            raise ValueError(
                f"interval must be that of the moments, {moments.interval}, got {support}"
            )
        stderr = moments.stderr if stderr is None else stderr
        moments = moments.mean
    check_choice("basis", basis, get_args(MomentBasis))
    raw = as_points(moments, "moments").detach()
    errors = torch.zeros_like(raw) if stderr is None else as_points(stderr, "stderr").detach()
    if raw.ndim not in (1, 2) or raw.shape[-1] < 2:
        shape = tuple(raw.shape)
        raise ValueError(f"moments must be (m + 1,) or (N, m + 1), m >= 1, got {shape}")
    check_finite("moments", raw)
    if not bool(((raw[..., 0] - 1).abs() < 1e-6).all()):
        raise ValueError(f"moments[0] must be 1, got {float(raw.flatten()[0]):.6g}")
    if errors.shape != raw.shape:
        raise ValueError(
            f"stderr must have the shape of moments, {tuple(raw.shape)}, got {tuple(errors.shape)}"
        )
    check_finite("stderr", errors)
    if errors.numel():
        check_range("stderr", float(errors.min()), low=0.0)
    return raw, errors, support, _to_chebyshev(basis, raw.shape[-1] - 1, variable)


UNRESOLVED = Status(
    outcome="max_steps",
    message="the density has peaks narrower than the quadrature resolves",
    advice="pass a larger stderr= or grid_size=",
)


def _status(
    solver: Solver, steps: int, gradient: float, error: float, roundoff: float, relaxation: float
) -> Status:
    """Return the status of a density that the quadrature resolves."""
    how, advice = f"{steps} steps", ""
    if not is_below(gradient, solver.atol):
        return Status(
            outcome="max_steps",
            message=f"gradient {gradient:.1g} after {how}, above atol {solver.atol:.1g}",
            advice="increase max_steps, or pass a larger stderr=",
        )
    if roundoff > TUNING.ladder[1]:
        how += f"; power moments matched with a variance of {roundoff:.0g}, their rounding error"
    if relaxation > TUNING.ladder[0]:
        how += (
            f"; moments relaxed to a variance of {relaxation:.0g} (largest error {error:.0g}), "
            f"because no density was found with exactly these moments"
        )
        advice = "narrower peaks need a larger grid_size"
    if solver.blur > TUNING.resolved:
        how += f"; the quadrature has a relative error of {solver.blur:.0g} for the prior"
        advice = "the prior needs a larger grid_size"
    return Status(outcome="converged", message=how, advice=advice)


def _to_chebyshev(basis: str, m: int, interval: Interval) -> Tensor:
    """Return the matrix that maps moments in a basis to Chebyshev moments."""
    if basis == "chebyshev":
        return torch.eye(m + 1, dtype=torch.float64)
    if basis == "legendre":
        inverse: Tensor = torch.linalg.inv(chebyshev_from_legendre(m))
        return inverse
    rows = np.zeros((m + 1, m + 1))
    for degree in range(m + 1):
        polynomial = Chebyshev.basis(degree, domain=list(interval))
        coefficients = polynomial.convert(kind=Polynomial, domain=[-1, 1], window=[-1, 1]).coef
        rows[degree, : len(coefficients)] = coefficients
    return torch.from_numpy(rows)


def _check_reach(samples: Tensor, interval: Interval) -> None:
    """Raise if a probe has a power moment that no spectrum in the interval can have."""
    # |mu_j| <= max(|a|, |b|)^j
    reach = max(abs(end) for end in interval) * (1 + 1e-6)
    for degree, column in enumerate(samples.double().T[1:], start=1):
        worst = float(column.abs().max())
        if worst > 1.001 * reach**degree:
            raise ValueError(
                f"the spectrum is not inside interval {interval}: a power moment of degree "
                f"{degree} is {worst:.4g}, above {reach**degree:.4g}; use a larger interval"
            )
