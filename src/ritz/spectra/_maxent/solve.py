"""Densities of maximum entropy from moments."""

from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_interval, check_range
from ritz._core.results import Status
from ritz.spectra._maxent.dual import Prior, Rule, Solution, log_mass, minimise, quadrature
from ritz.spectra._maxent.entropic import EntropicDensity
from ritz.spectra._moments import BASES, MomentBasis, Moments, chebyshev_from_legendre

# ------------------------------------------------------------------------------------------
# Moments that no density has, or none that can be computed: the least variance that has one.

# Variances tried where exact moments have no density, or one too peaked to be computed.
LADDER = (1e-18, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
RESOLVED = 1e-3  # most that the integral of a density may change on a grid twice as fine
LARGEST_GRID = 16_384  # nodes that are chosen by themselves
PATIENCE = 25  # steps in which a variance that has a density shows it
BLURRED = 1.6  # total variation of shares of which most lie in peaks as narrow as the grid


@dataclass(frozen=True, slots=True)
class Solver:
    """A quadrature, one twice as fine to tell whether it resolves a density, and when to stop.

    Attributes:
        rule: With polynomials up to degree ``2 m``.
        fine: With polynomials up to degree ``m``.
        blur: By how much the logarithms of their integrals of the prior itself differ.
        atol: Largest entry of the gradient to stop at.
        max_steps: Most steps with one variance.
    """

    rule: Rule
    fine: Rule
    blur: float
    atol: float
    max_steps: int

    @classmethod
    def make(
        cls,
        prior: Prior,
        interval: tuple[float, float],
        m: int,
        grid_size: int | None,
        atol: float,
        max_steps: int,
    ) -> "Solver":
        """With a grid of that size, or, by default, of one that resolves the prior."""
        size = max(512, 16 * m) if grid_size is None else grid_size
        check_count("grid_size", size, low=2 * m + 1)
        while True:
            rule = quadrature(prior, interval, size, 2 * m)
            fine = quadrature(prior, interval, 2 * size, m)
            blur = abs(float(fine.log_mass - rule.log_mass))
            if grid_size is not None or blur <= RESOLVED / 100 or 2 * size > LARGEST_GRID:
                return cls(rule, fine, blur, atol, max_steps)
            size *= 2

    def solved(self, targets: Tensor, levels: list[Tensor]) -> tuple[Solution, Tensor]:
        """The solution at the least variance that has one, and that variance, for each vector.

        At first the least alone is tried. Where it fails, all are tried from the largest down,
        each from the solution of the one before, until one fails.

        Args:
            targets: ``(N, m)``.
            levels: Variances of the moments, each ``(N, m)``, ascending as :data:`LADDER` does; or
                one alone, to be used whatever comes of it.
        """
        if len(levels) == 1:
            return self._minimise(targets, levels[0], self.max_steps), levels[0]
        found = self._minimise(
            targets, levels[0], self.max_steps, blurred=BLURRED, patience=PATIENCE
        )
        ridge, left = levels[0].clone(), (~self._good(found)).nonzero()[:, 0]
        if not len(left):
            return found, ridge
        again = self._minimise(targets[left], levels[-1][left], self.max_steps)
        # Nothing lies above the largest variance: what it gives is kept, good or not.
        kept = torch.ones_like(left, dtype=torch.bool)
        for below in range(len(levels) - 2, -2, -1):
            _put(found, ridge, left, again, levels[below + 1], kept)
            good = self._good(again)
            left, start = left[good], again.alphas[good]
            if not len(left) or below < 0:
                break
            options = {"start": start, "damping": 100 * LADDER[below], "blurred": BLURRED}
            steps = min(PATIENCE, self.max_steps)
            again = self._minimise(targets[left], levels[below][left], steps, **options)
            kept = self._good(again)
        return found, ridge

    def resolved(self, found: Solution) -> Tensor:
        """Whether the integrals of densities are those by the finer grid, ``(N,)``."""
        # A prior that is itself resolved badly is not cured by relaxing the moments.
        gap = log_mass(found, self.fine.log_prior, self.fine.grid).abs()
        near: Tensor = gap <= RESOLVED + 10 * self.blur
        return near

    def _good(self, found: Solution) -> Tensor:
        return (found.gradient <= self.atol) & self.resolved(found)

    def _minimise(self, targets: Tensor, ridge: Tensor, steps: int, **options: Any) -> Solution:
        prior, grid = self.rule.log_prior, self.rule.grid
        return minimise(targets, ridge, prior, grid, atol=self.atol, max_steps=steps, **options)


def _put(
    found: Solution, ridge: Tensor, rows: Tensor, again: Solution, level: Tensor, kept: Tensor
) -> None:
    """Take over what was kept of a new solution for some rows, and count the steps of all."""
    chosen = rows[kept]
    for name in ("alphas", "log_partition", "fitted", "gradient"):
        getattr(found, name)[chosen] = getattr(again, name)[kept]
    ridge[chosen] = level[chosen]
    found.iterations[rows] += again.iterations


# ------------------------------------------------------------------------------------------
# Densities of maximum entropy from moments.

LARGEST = 1e12  # variance of a moment that says nothing
BLOCK = 65_536  # numbers of a block of densities at their nodes, to stay in the cache


class MaxentOptions(TypedDict, total=False):
    """The keywords of :func:`maxent`."""

    basis: MomentBasis
    interval: tuple[float, float] | None
    stderr: Tensor | None
    prior: Prior
    relax: float | None
    atol: float
    max_steps: int
    grid_size: int | None


@overload
def maxent(moments: Moments, **options: Unpack[MaxentOptions]) -> EntropicDensity: ...
@overload
# One density for a vector of moments, a tuple of them for a matrix: types do not tell.
def maxent(moments: Tensor, **options: Unpack[MaxentOptions]) -> Any: ...
def maxent(
    moments: Moments | Tensor,
    *,
    basis: MomentBasis = "chebyshev",
    interval: tuple[float, float] | None = None,
    stderr: Tensor | None = None,
    prior: Prior = "flat",
    relax: float | None = None,
    atol: float = 1e-9,
    max_steps: int = 300,
    grid_size: int | None = None,
) -> Any:
    r"""Return the density of largest entropy with given moments.

    .. math:: \max_q -\int q \log \frac{q}{q_0} \quad \text{with} \quad
        \int q\, \phi_i = \mu_i, \quad i = 0, \dots, m

    by Levenberg-Marquardt on the convex dual, in Chebyshev polynomials whatever the basis of the
    moments: the density does not depend on it, the conditioning does. Where the moments have
    errors, they are matched to within them: the dual gets the ridge
    :math:`\frac12 \sum_i r_i \alpha_i^2`, :math:`r_i` the squared standard errors. Exact moments
    are matched exactly if that converges to a density that the quadrature resolves; if it does not
    (no density has them, or only one with atoms), with the smallest variance :math:`r` of some that
    does: ``relaxation`` has it, and ``status`` says so. Nor are standard errors too small for that
    taken at their word. The largest error of a moment is ``moment_error``. A solve takes 10 to 150
    steps of :math:`O(G m + m^3)`, ``G`` the size of the grid.

    Args:
        moments: What :func:`ritz.moments` returned, or moments of degree ``0, ..., m`` as a tensor
            ``(m + 1,)``, the first 1; or many vectors at once, ``(N, m + 1)``, each to get a
            density of its own.
        basis: Of a tensor: ``chebyshev`` or ``legendre`` polynomials of the variable mapped to
            ``[-1, 1]``, or ``power``, of the variable itself.
        interval: ``(a, b)``, the support: of a tensor, ``(-1, 1)`` by default; of :class:`Moments`
            their own, unless they are power moments that were not mapped.
        stderr: Standard errors like a tensor; by default none, or those of :class:`Moments`.
        prior: ``flat``, ``semicircle``, ``marchenko_pastur``, ``log_uniform``, or a function of
            the variable, positive inside the interval.
        relax: Variance :math:`r` of every moment, instead of what is said above.
        atol: Largest error of a (relaxed) moment to stop at.
        max_steps: Most steps with one variance; no more than 25 where others are left to try.
        grid_size: Nodes of the quadrature: 512 by default, or 16 times the moments, or as many as
            resolve the prior.

    Returns:
        An :class:`EntropicDensity`, or a tuple of them for many vectors.

    Reference: Algorithm 1 and sections 2.3 and 2.4 of *Spectral Machine Learning*.

    Example:
        >>> import torch, ritz
        >>> uniform = torch.tensor([1.0, 0.0, -1 / 3, 0.0, -1 / 15], dtype=torch.float64)
        >>> density = ritz.maxent(uniform)
        >>> round(float(density.pdf(torch.tensor(0.3))), 6)
        0.5
    """
    given = _Given.make(moments, basis, interval, stderr)
    check_choice("basis", given.basis, BASES)
    _check(given, relax)
    check_range("atol", atol, low=0.0)
    check_count("max_steps", max_steps)
    many = given.raw.reshape(-1, given.raw.shape[-1])
    m = many.shape[1] - 1
    change = _to_chebyshev(given.basis, m, given.variable)
    targets = (many @ change.T)[:, 1:]
    solver = Solver.make(prior, given.interval, m, grid_size, atol, max_steps)
    # What the change of basis makes of the last digits of the moments.
    roundoff = (1e-16 * many.abs() @ change.abs().T).square()[:, 1:] * (given.basis == "power")
    levels = _levels(given, many, change, relax)
    densities: list[EntropicDensity] = []
    for rows in torch.arange(len(many)).split(max(1, BLOCK // len(solver.rule.points))):
        asked = [level.expand_as(targets)[rows] + roundoff[rows] for level in levels]
        found, ridge = solver.solved(targets[rows], asked)
        part = _Part(solver, found, ridge, asked[0], targets[rows], roundoff[rows])
        densities += part.densities(given.interval, prior)
    if isinstance(moments, Moments):
        return replace(densities[0], matrix=moments.matrix, batch_norm=moments.batch_norm)
    return tuple(densities) if given.raw.ndim == 2 else densities[0]


@dataclass(frozen=True, slots=True)
class _Part:
    """What was found for some of the vectors, with what was asked of them: a row for each."""

    solver: Solver
    found: Solution
    ridge: Tensor
    asked: Tensor
    targets: Tensor
    roundoff: Tensor

    def densities(self, interval: tuple[float, float], prior: Prior) -> list[EntropicDensity]:
        found, resolved = self.found, self.solver.resolved(self.found).tolist()
        return [
            EntropicDensity(
                alphas=found.alphas[i],
                log_partition=float(found.log_partition[i]),
                interval=interval,
                prior=prior,
                targets=self.targets[i],
                fitted=found.fitted[i],
                ridge=self.ridge[i],
                relaxation=self._relaxation(i),
                grid_size=len(self.solver.rule.points),
                num_steps=int(found.iterations[i]),
                status=self._status(i, resolved[i]),
            )
            for i in range(len(self.targets))
        ]

    def _relaxation(self, i: int) -> float:
        return float((self.ridge[i] - self.asked[i]).max())

    def _status(self, i: int, resolved: bool) -> Status:
        return _status(
            gradient=float(self.found.gradient[i]),
            steps=int(self.found.iterations[i]),
            error=float((self.found.fitted[i] - self.targets[i]).abs().max()),
            atol=self.solver.atol,
            resolved=resolved,
            roundoff=float(self.roundoff[i].max()),
            relaxation=self._relaxation(i),
            blur=self.solver.blur,
        )


@dataclass(frozen=True, slots=True)
class _Given:
    """Moments as they came.

    Attributes:
        raw: ``(m + 1,)`` or ``(N, m + 1)``.
        stderr: Like them, or ``None``.
        basis: What they are moments of.
        interval: The support.
        variable: The interval that was mapped to ``[-1, 1]`` for powers to be taken.
    """

    raw: Tensor
    stderr: Tensor | None
    basis: str
    interval: tuple[float, float]
    variable: tuple[float, float]

    @classmethod
    def make(
        cls,
        moments: Moments | Tensor,
        basis: str,
        interval: tuple[float, float] | None,
        stderr: Tensor | None,
    ) -> "_Given":
        if not isinstance(moments, Moments):
            support = _ends((-1.0, 1.0) if interval is None else interval)
            return cls(_double(moments), _double(stderr), basis, support, support)
        support = _ends(moments.interval if interval is None else interval)
        variable = (-1.0, 1.0)
        if moments.basis == "power" and moments.interval == variable:
            _check_reach(moments.samples, support)
            variable = support
        elif support != moments.interval:
            raise ValueError(
                f"interval must be that of the moments, {moments.interval}, got {support}"
            )
        errors = moments.stderr if stderr is None else stderr
        return cls(_double(moments.mean), _double(errors), moments.basis, support, variable)


def _levels(given: _Given, many: Tensor, change: Tensor, relax: float | None) -> list[Tensor]:
    if relax is not None:
        return [torch.full((1, 1), relax, dtype=torch.float64)]
    errors = torch.zeros_like(many) if given.stderr is None else given.stderr.reshape(many.shape)
    # Squares may overflow, and zero times infinity is not a number.
    squares = errors.clamp_max(LARGEST**0.5).square()
    variances = (squares @ change.square().T)[:, 1:].clamp_max(LARGEST)
    return [variances.clamp_min(level) for level in LADDER]


def _status(
    *,
    gradient: float,
    steps: int,
    error: float,
    atol: float,
    resolved: bool,
    roundoff: float,
    relaxation: float,
    blur: float,
) -> Status:
    if not resolved:
        return Status(
            outcome="max_steps",
            message="the density has peaks narrower than the quadrature resolves",
            advice="give relax=, a larger variance of the moments, or a larger grid_size",
        )
    if not gradient <= atol:
        return Status(
            outcome="max_steps",
            message=f"gradient {gradient:.1g} after {steps} steps where {atol:.1g} was asked for",
            advice="give standard errors, or relax=, a larger variance of the moments",
        )
    how, advice = f"{steps} steps", ""
    if roundoff > LADDER[1]:
        how += f"; power moments matched to a variance of {roundoff:.0g}, their roundoff"
    if relaxation > LADDER[0]:
        how += f"; moments relaxed to a variance of {relaxation:.0g}: no density was found with"
        how += f" them, this one misses them by {error:.0g}"
        advice = "narrower peaks need a larger grid_size"
    if blur > RESOLVED:
        how += f"; the quadrature misses {blur:.0g} of the mass of the prior"
        advice = "the prior needs a larger grid_size"
    return Status(outcome="converged", message=how, advice=advice)


def _to_chebyshev(basis: str, m: int, interval: tuple[float, float]) -> Tensor:
    """The matrix that takes moments in a basis to those of Chebyshev polynomials."""
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


def _double(numbers: Any) -> Any:
    if numbers is None:
        return None
    return torch.as_tensor(numbers, dtype=torch.float64, device="cpu").detach()


def _ends(interval: tuple[float, float]) -> tuple[float, float]:
    check_interval("interval", interval)
    return float(interval[0]), float(interval[1])


def _check(given: _Given, relax: float | None) -> None:
    raw, stderr = given.raw, given.stderr
    if raw.ndim not in (1, 2) or raw.shape[-1] < 2:
        raise ValueError(f"moments must be (m + 1,) or (N, m + 1), m >= 1, got {tuple(raw.shape)}")
    check_finite("moments", raw)
    if not bool(((raw[..., 0] - 1).abs() < 1e-6).all()):
        first = float(raw.reshape(-1, raw.shape[-1])[0, 0])
        raise ValueError(f"moments must begin with that of degree 0, which is 1, got {first:.6g}")
    if stderr is not None:
        if stderr.shape != raw.shape:
            raise ValueError(
                f"stderr must be {tuple(raw.shape)}, as the moments, got {tuple(stderr.shape)}"
            )
        check_finite("stderr", stderr)
        check_range("stderr", float(stderr.min()), low=0.0)
    if relax is not None:
        check_range("relax", relax, low=0.0, high=LARGEST)


def _check_reach(samples: Tensor, interval: tuple[float, float]) -> None:
    """Raise if a probe has a power moment that no spectrum in the interval can give it."""
    reach = max(abs(end) for end in interval) * (1 + 1e-6)
    for degree, column in enumerate(samples.double().T[1:], start=1):
        worst = float(column.abs().max())
        if worst > 1.001 * reach**degree:
            raise ValueError(
                f"interval {interval} must hold the spectrum: a power moment of degree {degree} is "
                f"{worst:.4g}, beyond {reach**degree:.4g}; give its interval here or to moments"
            )
