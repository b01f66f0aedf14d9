"""Densities of maximum entropy from moments."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz._core.checks import (
    check_choice,
    check_count,
    check_finite,
    check_interval,
    check_range,
)
from ritz._core.results import Status
from ritz.spectra.dual import Grid, Solution, in_interval, log_mass, minimise
from ritz.spectra.entropic import EntropicDensity
from ritz.spectra.polynomials import BASES, MomentBasis, Moments, chebyshev_from_legendre
from ritz.spectra.priors import Prior, log_prior

# Variances tried in turn where exact moments have no density, or one too peaked to be computed.
LADDER = (1e-18, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
RESOLVED = 1e-3  # most that the integral of a density may change on a grid twice as fine


def maxent(
    moments: Moments | Tensor,
    *,
    basis: MomentBasis = "chebyshev",
    interval: tuple[float, float] = (-1.0, 1.0),
    stderr: Tensor | None = None,
    prior: Prior = "flat",
    relax: float | None = None,
    tol: float = 1e-9,
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
    does, and ``status`` says which. Nor are standard errors too small for that taken at their word.

    Args:
        moments: What :func:`ritz.moments` returned, or moments of degree ``0, ..., m`` as a tensor
            ``(m + 1,)``, the first 1; or many vectors at once, ``(N, m + 1)``, each to get a
            density of its own.
        basis: Of a tensor: ``chebyshev`` or ``legendre`` polynomials of the variable mapped to
            ``[-1, 1]``, or ``power``, of the variable itself.
        interval: Of a tensor: ``(a, b)``, the support.
        stderr: Of a tensor: standard errors like it; none by default.
        prior: ``flat``, ``semicircle``, ``marchenko_pastur``, ``log_uniform``, or a function of
            the variable, positive inside the interval.
        relax: Variance :math:`r` of every moment, instead of what is said above.
        tol: Largest error of a (relaxed) moment to stop at.
        max_steps: Most steps.
        grid_size: Nodes of the quadrature: 512 by default, or 16 times the moments.

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
    if isinstance(moments, Moments):
        basis, interval, stderr = cast(MomentBasis, moments.basis), moments.interval, moments.stderr
        raw, unit = moments.mean, True
    else:
        raw, unit = torch.as_tensor(moments, dtype=torch.float64, device="cpu").detach(), False
    if stderr is not None:
        stderr = torch.as_tensor(stderr, dtype=torch.float64, device="cpu").detach()
    check_choice("basis", basis, BASES)
    _check(raw, stderr, interval, relax)
    check_range("tol", tol, low=0.0)
    check_count("max_steps", max_steps)
    many = raw.reshape(-1, raw.shape[-1])
    m = many.shape[1] - 1
    change = _to_chebyshev(basis, m, (-1.0, 1.0) if unit else interval)
    targets = many @ change.T
    # What the change of basis makes of the last digit of a moment.
    roundoff = (1e-16 * change.abs().sum(1)).square()[1:] * (basis == "power")
    size = max(512, 16 * m) if grid_size is None else grid_size
    check_count("grid_size", size, low=2 * m + 1)
    rule = _Rule.make(size, m, prior, interval)
    levels = _levels(many, stderr, change, relax)
    found, ridge = _solved(targets[:, 1:], levels, roundoff, rule, tol, max_steps)
    resolved, low, high = rule.resolved(found), *interval
    densities = tuple(
        EntropicDensity(
            alphas=found.alphas[i],
            log_partition=float(found.log_partition[i]),
            interval=(float(low), float(high)),
            prior=prior,
            targets=targets[i, 1:],
            fitted=found.fitted[i],
            ridge=ridge[i],
            grid_size=size,
            num_steps=int(found.iterations[i]),
            status=_status(
                gradient=float(found.gradient[i]),
                steps=int(found.iterations[i]),
                error=float((found.fitted[i] - targets[i, 1:]).abs().max()),
                tol=tol,
                resolved=bool(resolved[i]),
                roundoff=float(roundoff.max()),
                relaxed=float((ridge[i] - (levels[0] + roundoff).expand_as(ridge)[i]).max()),
            ),
        )
        for i in range(len(many))
    )
    return densities if raw.ndim == 2 else densities[0]


@dataclass(frozen=True, slots=True)
class _Rule:
    """A quadrature with a prior, and one twice as fine to tell whether it resolves a density."""

    grid: Grid
    base: Tensor
    fine: Grid
    fine_base: Tensor

    @classmethod
    def make(cls, size: int, m: int, prior: Prior, interval: tuple[float, float]) -> "_Rule":
        grids = Grid.make(size, 2 * m), Grid.make(2 * size, m)
        bases = [log_prior(prior, in_interval(grid.nodes, interval), interval) for grid in grids]
        for base in bases:
            check_finite("logarithm of the prior", base)
        return cls(grids[0], bases[0], grids[1], bases[1])

    def resolved(self, found: Solution) -> Tensor:
        prior = (self.base + self.grid.weights.log()).logsumexp(0)
        own = ((self.fine_base + self.fine.weights.log()).logsumexp(0) - prior).abs()
        # A prior that is itself resolved badly is not cured by relaxing the moments.
        near: Tensor = log_mass(found, self.fine_base, self.fine).abs() <= RESOLVED + 10 * own
        return near


def _solved(
    targets: Tensor,
    levels: list[Tensor],
    roundoff: Tensor,
    rule: _Rule,
    tol: float,
    max_steps: int,
) -> tuple[Solution, Tensor]:
    """The solution at the first level of relaxation that has one, for each vector."""
    ridge = levels[0].expand_as(targets) + roundoff
    solve = partial(minimise, log_prior=rule.base, grid=rule.grid, tol=tol, max_steps=max_steps)
    found = solve(targets, ridge)
    unsolved = ~((found.gradient <= tol) & rule.resolved(found))
    for level in levels[1:]:
        larger = level.expand_as(targets) + roundoff
        left = (unsolved & (larger > ridge).any(1)).nonzero()[:, 0]
        if not len(left):
            continue
        again = solve(targets[left], larger[left])
        ridge = ridge.index_copy(0, left, larger[left])
        for name in ("alphas", "log_partition", "fitted", "gradient"):
            getattr(found, name)[left] = getattr(again, name)
        found.iterations[left] += again.iterations
        unsolved[left] = ~((again.gradient <= tol) & rule.resolved(again))
    return found, ridge


def _levels(
    many: Tensor, stderr: Tensor | None, change: Tensor, relax: float | None
) -> list[Tensor]:
    if relax is not None:
        return [torch.full((1, 1), relax, dtype=torch.float64)]
    errors = torch.zeros_like(many) if stderr is None else stderr.reshape(many.shape)
    variances = (errors.square() @ change.square().T)[:, 1:]
    return [variances.clamp_min(level) for level in LADDER]


def _status(
    *,
    gradient: float,
    steps: int,
    error: float,
    tol: float,
    resolved: bool,
    roundoff: float,
    relaxed: float,
) -> Status:
    if not gradient <= tol:
        return Status(
            outcome="max_steps",
            message=f"gradient {gradient:.1g} after {steps} steps where {tol:.1g} was asked for",
            advice="give standard errors, or relax=, a larger variance of the moments",
        )
    if not resolved:
        return Status(
            outcome="max_steps",
            message="the density has peaks narrower than the quadrature resolves",
            advice="give relax=, a larger variance of the moments, or a larger grid_size",
        )
    how, advice = f"{steps} steps", ""
    if roundoff > LADDER[1]:
        how += f"; power moments matched to a variance of {roundoff:.0g}, their roundoff"
    if relaxed > LADDER[0]:
        how += f"; moments relaxed to a variance of {relaxed:.0g}: no density was found with them"
        how += f", this one misses them by {error:.0g}"
        advice = "narrower peaks need a larger grid_size"
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


def _check(
    raw: Tensor, stderr: Tensor | None, interval: tuple[float, float], relax: float | None
) -> None:
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
        check_range("relax", relax, low=0.0, high=1e12)
    check_interval("interval", interval)
