r"""The convex dual of maximum entropy, for many moment vectors at once.

With :math:`q(x) = q_0(x)\, e^{-\sum_{i \ge 1} \alpha_i T_i(x)} / Z(\alpha)` on ``[-1, 1]``,

.. math:: F(\alpha) = \log Z(\alpha) + \sum_i \alpha_i \mu_i + \tfrac12 \sum_i r_i \alpha_i^2,
    \quad \partial_i F = \mu_i - \langle T_i \rangle_q + r_i \alpha_i,
    \quad \partial_i \partial_j F = \operatorname{cov}_q(T_i, T_j) + r_i \delta_{ij}.

Products of Chebyshev polynomials are sums of two, so the Hessian is made of :math:`2m` moments.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Fejér's quadrature on ``[-1, 1]``: positive weights, exact below the degree of its size.

    Attributes:
        nodes: Ascending, ``(G,)``.
        weights: ``(G,)``, summing to 2.
        polynomials: Chebyshev polynomials at the nodes, ``(G, degree + 1)``.
    """

    nodes: Tensor
    weights: Tensor
    polynomials: Tensor

    @classmethod
    def make(cls, size: int, degree: int) -> "Grid":
        r"""Nodes :math:`-\cos((g + 1/2) \pi / G)`, denser towards the ends."""
        angles = (torch.arange(size, dtype=torch.float64) + 0.5) * (math.pi / size)
        nodes = -torch.cos(angles)
        return cls(nodes, _fejer(size), chebyshev(nodes, degree))


@dataclass(frozen=True, slots=True)
class Solution:
    r"""What minimises the dual, for ``N`` moment vectors.

    Attributes:
        alphas: ``(N, m)``.
        log_partition: :math:`\log Z`, ``(N,)``.
        fitted: Moments of the density, ``(N, m)``.
        gradient: Largest entry of the gradient, ``(N,)``.
        iterations: Steps tried, ``(N,)``.
    """

    alphas: Tensor
    log_partition: Tensor
    fitted: Tensor
    gradient: Tensor
    iterations: Tensor


def chebyshev(x: Tensor, degree: int) -> Tensor:
    """Chebyshev polynomials of degree ``0, ..., degree`` at points of ``[-1, 1]``, last axis."""
    angles = torch.arccos(x.clamp(-1.0, 1.0))
    return torch.cos(angles[..., None] * torch.arange(degree + 1, dtype=torch.float64))


def in_interval(x: Tensor, interval: tuple[float, float]) -> Tensor:
    """Points of ``[-1, 1]`` where they lie in an interval."""
    low, high = interval
    return 0.5 * ((high - low) * x + (low + high))


def minimise(
    targets: Tensor, ridge: Tensor, log_prior: Tensor, grid: Grid, *, tol: float, max_steps: int
) -> Solution:
    r"""Levenberg-Marquardt from the prior, each vector with its own damping.

    Args:
        targets: Chebyshev moments of degree 1 to ``m``, ``(N, m)``.
        ridge: :math:`r`, ``(N, m)``.
        log_prior: :math:`\log q_0` at the nodes, ``(G,)``.
        grid: With polynomials up to degree ``2 m``.
        tol: Largest entry of the gradient to stop at.
        max_steps: Most steps to try.
    """
    count, m = targets.shape
    base = log_prior + grid.weights.log()
    index = torch.arange(1, m + 1)
    sums, gaps = index[:, None] + index, (index[:, None] - index).abs()

    def evaluate(alphas: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exponents = base - alphas @ grid.polynomials[:, 1 : m + 1].T
        log_partition = exponents.logsumexp(1)
        moments = (exponents - log_partition[:, None]).exp() @ grid.polynomials
        pull = ridge[which] * alphas
        value = log_partition + (alphas * (targets[which] + 0.5 * pull)).sum(1)
        gradient = targets[which] - moments[:, 1 : m + 1] + pull
        return value, gradient, moments, log_partition

    every = torch.arange(count)
    alphas = torch.zeros_like(targets)
    value, gradient, moments, log_partition = evaluate(alphas, every)
    damping = torch.full((count,), 0.1, dtype=torch.float64)
    steps = torch.zeros(count, dtype=torch.int64)
    for _ in range(max_steps):
        active = every[~(gradient.abs().amax(1) <= tol) & (damping < 1e15)]
        if not len(active):
            break
        c = moments[active]
        first = c[:, 1 : m + 1]
        hessian = 0.5 * (c[:, sums] + c[:, gaps]) - first[:, :, None] * first[:, None, :]
        diagonal = hessian.diagonal(dim1=1, dim2=2)
        diagonal += ridge[active] + damping[active, None]
        factor, failed = torch.linalg.cholesky_ex(hessian)
        step = torch.cholesky_solve(gradient[active, :, None], factor)[:, :, 0]
        trial = alphas[active] - step
        found = evaluate(trial, active)
        better = _better(found, value[active], gradient[active]) & (failed == 0)
        taken = active[better]
        alphas[taken] = trial[better]
        for old, new in zip((value, gradient, moments, log_partition), found, strict=True):
            old[taken] = new[better]
        damping[active] = torch.where(better, damping[active] / 10, damping[active] * 10)
        steps[active] += 1
    return Solution(alphas, log_partition, moments[:, 1 : m + 1], gradient.abs().amax(1), steps)


def log_mass(found: Solution, log_prior: Tensor, grid: Grid) -> Tensor:
    """Logarithm of the integral of the densities by another grid, ``(N,)``: 0 if both resolve it.

    Args:
        found: What was minimised.
        log_prior: At the nodes of the other grid.
        grid: With polynomials up to degree ``m``.
    """
    m = found.alphas.shape[1]
    exponents = log_prior + grid.weights.log() - found.alphas @ grid.polynomials[:, 1 : m + 1].T
    return exponents.logsumexp(1) - found.log_partition


def _fejer(size: int) -> Tensor:
    r"""Weights :math:`\frac{2}{G} (1 - 2 \sum_k \cos(2 k \theta_g) / (4 k^2 - 1))`, by one FFT."""
    orders = torch.arange(size, dtype=torch.float64)
    waves = torch.where(orders % 2 == 0, 2 / (1 - orders**2), 0.0)
    waves[0] = 1.0
    phases = torch.polar(waves, -orders * (math.pi / (2 * size)))
    weights: Tensor = 2 / size * torch.fft.fft(phases, n=2 * size)[:size].real
    return weights


def _better(found: tuple[Tensor, ...], value: Tensor, gradient: Tensor) -> Tensor:
    """Whether the dual fell, or, where that is below roundoff, the gradient did."""
    new_value, new_gradient = found[0], found[1]
    level = 1e-13 * (1 + value.abs())
    fell = new_value < value - level
    flat = (new_value <= value + level) & (new_gradient.norm(dim=1) < gradient.norm(dim=1))
    found_better: Tensor = torch.isfinite(new_value) & (fell | flat)
    return found_better
