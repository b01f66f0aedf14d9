"""The convex dual of maximum entropy, and the priors against which entropy is measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg.lapack import dposv
from torch import Tensor

from ritz._core.checks import check_choice, check_finite

# ------------------------------------------------------------------------------------------
# The convex dual of maximum entropy, for many moment vectors at once.
#
# With :math:`q(x) = q_0(x)\, e^{-\sum_{i \ge 1} \alpha_i T_i(x)} / Z(\alpha)` on ``[-1, 1]``,
#
# .. math:: F(\alpha) = \log Z(\alpha) + \sum_i \alpha_i \mu_i + \tfrac12 \sum_i r_i \alpha_i^2,
#     \quad \partial_i F = \mu_i - \langle T_i \rangle_q + r_i \alpha_i,
#     \quad \partial_i \partial_j F = \operatorname{cov}_q(T_i, T_j) + r_i \delta_{ij}.
#
# Products of Chebyshev polynomials are sums of two, so the Hessian is made of :math:`2m`
# moments.

Array = npt.NDArray[Any]
ALONE = 250_000  # multiplications in a product of matrices that OpenBLAS gives to one thread
NEAR = 1e-4  # error of moments that are matched slowly, but surely


@dataclass(frozen=True, slots=True)
class Grid:
    """Fejér's quadrature on ``[-1, 1]``: positive weights, exact below the degree of its size.

    Its logarithmic form has them in another variable, and is for what varies with that.

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
        return cls(nodes, _fejer(size), _doubled(nodes, degree))

    @classmethod
    def logarithmic(cls, size: int, degree: int, ratio: float) -> "Grid":
        r"""The same in the logarithm of :math:`\lambda` in ``[1, ratio]``, which ``x`` maps to."""
        plain, span = cls.make(size, 0), math.log(ratio)
        exponents = 0.5 * span * (plain.nodes + 1)
        nodes = 2 * torch.expm1(exponents) / math.expm1(span) - 1
        weights = plain.weights * exponents.exp() * (span / math.expm1(span))
        return cls(nodes, weights, _doubled(nodes, degree))


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
    targets: Tensor,
    ridge: Tensor,
    log_prior: Tensor,
    grid: Grid,
    *,
    atol: float,
    max_steps: int,
    start: Tensor | None = None,
    damping: float = 0.1,
    blurred: float = math.inf,
    patience: int | None = None,
) -> Solution:
    r"""Levenberg-Marquardt, each vector with its own damping.

    Args:
        targets: Chebyshev moments of degree 1 to ``m``, ``(N, m)``.
        ridge: :math:`r`, ``(N, m)``.
        log_prior: :math:`\log q_0` at the nodes, ``(G,)``.
        grid: With polynomials up to degree ``2 m``.
        atol: Largest entry of the gradient to stop at.
        max_steps: Most steps to try.
        start: Multipliers to begin with, ``(N, m)``; zeros, that is the prior, by default.
        damping: Of the first step.
        blurred: Total variation of the shares of the nodes, 2 where every peak has one node to
            itself, at which to give a vector up: the quadrature does not see its density any more.
        patience: Steps after which to give up a vector whose gradient is above 1e-4 still.
    """
    dual = _Dual.make(targets.numpy(), ridge.numpy(), log_prior.numpy(), grid)
    alphas = np.zeros(targets.shape) if start is None else start.numpy().copy()
    with np.errstate(all="ignore"):  # what overflows is not finite, and hence not better
        every = here = dual.at(alphas)
        live, steps = np.arange(len(alphas)), np.zeros(len(alphas), dtype=np.int64)
        dampings = np.full(len(alphas), damping)
        for count in range(max_steps):
            going = (here.error > atol) & (dampings < 1e15) & (here.variation < blurred)
            if count == patience:
                going &= here.error < NEAR
            if not going.all():
                every.put(live, here)
                live, dampings = live[going], dampings[going]
                dual, here = dual.only(going), here.only(going)
            if not live.size:
                break
            trial, sound = dual.step(here, dampings)
            better = trial.better_than(here) & sound
            dampings = dampings * np.where(better, 0.1, 10.0)
            steps[live] += 1
            if better.all():
                here = trial
            elif better.any():
                here.put(better, trial.only(better))
        every.put(live, here)
    fitted = every.moments[:, 1 : alphas.shape[1] + 1]
    found = (every.alphas, every.log_partition, fitted, every.error, steps)
    return Solution(*(torch.from_numpy(array) for array in found))


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


def _doubled(nodes: Tensor, degree: int) -> Tensor:
    r"""Chebyshev polynomials by :math:`T_{n+k} = 2 T_n T_k - T_{n-k}`, a block of them at a time.

    A tenth of the time of as many cosines, to an error of ``degree ** 1.6`` roundoffs.
    """
    rows = torch.ones(degree + 1, len(nodes), dtype=torch.float64)
    if degree:
        rows[1] = nodes
    n = 1
    while n < degree:
        k = min(n, degree - n)
        torch.mul(rows[1 : k + 1], 2 * rows[n], out=rows[n + 1 : n + k + 1])
        rows[n + 1 : n + k + 1] -= rows[n - k : n].flip(0)
        n += k
    return rows.T


@dataclass(slots=True)
class _Points:
    """Where the dual was evaluated: arrays with a row, or a number, for each vector."""

    alphas: Array
    value: Array
    gradient: Array
    moments: Array
    log_partition: Array
    variation: Array
    error: Array
    length: Array

    def only(self, which: Array) -> "_Points":
        return _Points(*(array[which] for array in self._arrays()))

    def put(self, which: Array, other: "_Points") -> None:
        for mine, new in zip(self._arrays(), other._arrays(), strict=True):
            mine[which] = new

    def better_than(self, old: "_Points") -> Array:
        """Whether the dual fell, or, where that is below roundoff, the gradient did."""
        level = 1e-13 * (1 + np.abs(old.value))
        fell = self.value < old.value - level
        flat = (self.value <= old.value + level) & (self.length < old.length)
        better: Array = np.isfinite(self.value) & (fell | flat)
        return better

    def _arrays(self) -> tuple[Array, ...]:
        return (
            self.alphas,
            self.value,
            self.gradient,
            self.moments,
            self.log_partition,
            self.variation,
            self.error,
            self.length,
        )


@dataclass(frozen=True, slots=True)
class _Dual:
    """The dual of some vectors, in NumPy: a step is many small operations, which cost less there.

    Attributes:
        targets: ``(N, m)``.
        ridge: ``(N, m)``.
        base: Logarithm of prior times weights, ``(G,)``.
        rows: Polynomials of degree 1 to ``m`` at the nodes, ``(m, G)``.
        columns: Those of degree 0 to ``2 m``, ``(G, 2 m + 1)``.
        sums: Degrees :math:`i + j` of the Hessian, ``(m, m)``.
        gaps: Degrees :math:`|i - j|`, likewise.
    """

    targets: Array
    ridge: Array
    base: Array
    rows: Array
    columns: Array
    sums: Array
    gaps: Array

    @classmethod
    def make(cls, targets: Array, ridge: Array, log_prior: Array, grid: Grid) -> "_Dual":
        m = targets.shape[1]
        columns = grid.polynomials.numpy()
        rows = columns[:, 1 : m + 1].T  # contiguous, as a grid lays them out
        index = np.arange(1, m + 1)
        sums, gaps = index[:, None] + index, np.abs(index[:, None] - index)
        base = log_prior + grid.weights.log().numpy()
        return cls(targets, ridge, base, rows, columns, sums, gaps)

    def only(self, which: Array) -> "_Dual":
        return replace(self, targets=self.targets[which], ridge=self.ridge[which])

    def at(self, alphas: Array) -> _Points:
        exponents = self.base - _product(alphas, self.rows)
        top = exponents.max(1, keepdims=True)
        shares = np.exp(exponents - top)
        total = shares.sum(1, keepdims=True)
        shares /= total
        log_partition = (top + np.log(total))[:, 0]
        moments = _product(shares, self.columns)
        pull = self.ridge * alphas
        value = log_partition + (alphas * (self.targets + 0.5 * pull)).sum(1)
        gradient = self.targets - moments[:, 1 : alphas.shape[1] + 1] + pull
        variation = np.abs(shares[:, 1:] - shares[:, :-1]).sum(1) + shares[:, 0] + shares[:, -1]
        sizes = np.abs(gradient)
        error, length = sizes.max(1), (sizes * sizes).sum(1)
        return _Points(alphas, value, gradient, moments, log_partition, variation, error, length)

    def step(self, here: _Points, dampings: Array) -> tuple[_Points, Array]:
        """Where a damped Newton step leads, and whether the Hessian was positive definite."""
        moments = here.moments
        first = moments[:, 1 : here.alphas.shape[1] + 1]
        hessian = 0.5 * (moments.take(self.sums, axis=1) + moments.take(self.gaps, axis=1))
        hessian -= first[:, :, None] * first[:, None, :]
        diagonal = hessian.reshape(len(hessian), -1)[:, :: hessian.shape[1] + 1]  # a view
        diagonal += self.ridge + dampings[:, None]
        steps, sound = np.empty_like(here.alphas), np.empty(len(hessian), dtype=bool)
        for i, (matrix, gradient) in enumerate(zip(hessian, here.gradient, strict=True)):
            _, steps[i], failed = dposv(matrix, gradient)
            sound[i] = failed == 0
        return self.at(here.alphas - steps), sound


def _product(left: Array, right: Array) -> Array:
    """Some rows at a time, too few to wake other threads, which cost more than they help here."""
    count = max(1, ALONE // right.size)
    if len(left) <= count:
        found: Array = left @ right
        return found
    out = np.empty((len(left), right.shape[1]))
    for begin in range(0, len(left), count):
        np.matmul(left[begin : begin + count], right, out=out[begin : begin + count])
    return out


# ------------------------------------------------------------------------------------------
# Base measures on an interval, against which entropy is measured, and quadratures for them.

PriorName = Literal["flat", "semicircle", "marchenko_pastur", "log_uniform"]
Prior = PriorName | Callable[[Tensor], Tensor]
PRIORS = ("flat", "semicircle", "marchenko_pastur", "log_uniform")
RECIPROCAL = ("marchenko_pastur", "log_uniform")  # with a factor 1/x


@dataclass(frozen=True, slots=True)
class Rule:
    r"""A quadrature on an interval, and a base measure at its nodes.

    Attributes:
        grid: Nodes, weights and polynomials on ``[-1, 1]``.
        points: The nodes in the interval, ``(G,)``.
        log_prior: :math:`\log q_0` at them, ``(G,)``.
    """

    grid: Grid
    points: Tensor
    log_prior: Tensor

    @property
    def log_mass(self) -> Tensor:
        r"""Logarithm of the integral of :math:`q_0` over ``[-1, 1]``."""
        return (self.log_prior + self.grid.weights.log()).logsumexp(0)


def quadrature(prior: Prior, interval: tuple[float, float], size: int, degree: int) -> Rule:
    """Return a rule of that size that suits a base measure.

    Where it has a factor :math:`1/x`, nodes are spread over the logarithm, so that it does not
    matter how many orders of magnitude the interval spans.

    Args:
        prior: As for :func:`log_prior`.
        interval: ``(a, b)``.
        size: Nodes.
        degree: Of the polynomials to tabulate.
    """
    low, high = interval
    if isinstance(prior, str) and prior in RECIPROCAL and low > 0:
        grid = Grid.logarithmic(size, degree, high / low)
        # From the logarithm again: the smallest of them have no digits left in [-1, 1].
        points = low * (0.5 * math.log(high / low) * (Grid.make(size, 0).nodes + 1)).exp()
    else:
        grid = Grid.make(size, degree)
        points = in_interval(grid.nodes, interval)
    found = log_prior(prior, points, interval)
    check_finite("logarithm of the prior", found)
    return Rule(grid, points, found)


def log_prior(prior: Prior, x: Tensor, interval: tuple[float, float]) -> Tensor:
    """The logarithm of a base measure at points inside an interval, up to a constant.

    Args:
        prior: ``flat``; ``semicircle`` on the interval; ``marchenko_pastur`` with the interval's
            ends as its edges; ``log_uniform``, :math:`1/x`; or a user-defined density, positive
            inside the interval.
        x: Points, any shape.
        interval: ``(a, b)``; ``a`` must be positive for the last two named ones.
    """
    low, high = interval
    if callable(prior):
        values = prior(x)
        kept = isinstance(values, Tensor) and values.shape == x.shape
        if not (kept and bool((values > 0).all())):
            raise ValueError("prior must be positive inside the interval, and keep the shape of x")
        return values.double().log()
    check_choice("prior", prior, PRIORS)
    if prior in RECIPROCAL and low <= 0:
        raise ValueError(f"prior {prior!r} needs an interval of positive numbers, got {interval}")
    edges = 0.5 * ((x - low) * (high - x)).log()
    if prior == "semicircle":
        return edges
    if prior == "marchenko_pastur":
        return edges - x.log()
    return -x.log() if prior == "log_uniform" else torch.zeros_like(x)
