"""The convex dual of maximum entropy, and the priors against which entropy is measured."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg.lapack import dposv
from torch import Tensor

from ritz._core.checks import check_choice, check_finite
from ritz._core.density import Density
from ritz.rmt import MarchenkoPastur, Semicircle

# ------------------------------------------------------------------------------------------
# The convex dual of maximum entropy, for many moment vectors at once.
#
# With :math:`q(x) = q_0(x)\, e^{-\sum_{i \ge 1} \alpha_i T_i(x)} / Z(\alpha)` on ``[-1, 1]``,
#
# .. math:: F(\alpha) = \log Z(\alpha) + \sum_i \alpha_i \mu_i + \tfrac12 \sum_i r_i \alpha_i^2,
#     \quad \partial_i F = \mu_i - \langle T_i \rangle_q + r_i \alpha_i,
#     \quad \partial_i \partial_j F = \operatorname{cov}_q(T_i, T_j) + r_i \delta_{ij}.
#
# As :math:`2 T_i T_j = T_{i+j} + T_{|i-j|}`, the Hessian follows from :math:`2m` moments.

Array = npt.NDArray[Any]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the dual, of its relaxation and of integrals of the density."""

    # First damping of Levenberg-Marquardt, and its factors after a good and a bad step.
    damping: float = 0.1
    shrink: float = 0.1
    grow: float = 10.0
    # A moment vector is given up at this damping, because no step lowers the dual.
    largest_damping: float = 1e15
    # A vector is given up after `patience` steps unless its gradient is below this.
    near: float = 1e-4
    # A step lowers the dual if it decreases by more than this fraction: a few hundred eps.
    level: float = 1e-13
    # Variances that are tried if the exact moments have no density, or one with too narrow peaks.
    # On kernel, cluster and four-atom spectra (tests/spectra/test_maxent_hard.py) one of them
    # succeeds.
    ladder: tuple[float, ...] = (1e-18, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
    # If there is a density for a variance, the solver needs 12 to 22 steps.
    patience: int = 25
    # First damping after the variance was reduced, in units of the new variance.
    relaxed_damping: float = 100.0
    # A vector is given up at this total variation of the shares of the nodes: most of the mass then
    # lies in peaks as narrow as the grid. It is 2 if all of it does.
    blurred: float = 1.6
    # Largest variance of a moment. Moments are at most 1, so such a moment carries no information;
    # a larger variance could overflow.
    largest: float = 1e12
    # Nodes of the grid: at least 512 and 16 per moment, doubled up to 16,384 to resolve a prior.
    grid_size: int = 512
    nodes_per_moment: int = 16
    largest_grid: int = 16_384
    # Largest change of the logarithm of the integral of a density on a grid twice as fine. For the
    # prior it is a hundredth of this.
    resolved: float = 1e-3
    # Points of the Gauss-Legendre rule between neighbouring nodes: the exponent is a polynomial of
    # degree m on at least 16 m panels, so each panel has a sixteenth of an oscillation.
    panel: int = 5
    # Below this log density, density times weight may underflow: exp(-745) is the smallest double,
    # and weights and interval lengths take up to 1e-41.
    underflow: float = -650.0
    # Numbers in a block of densities at their nodes: 512 KiB, which stays in the cache.
    block: int = 65_536
    # Multiplications in a product of matrices below which OpenBLAS uses one thread. More threads
    # cost more than they save here: 4 ms for 30 moments with one, benchmarks/maxent.py.
    one_thread: int = 250_000


TUNING = Tuning()


@dataclass(frozen=True, slots=True)
class Grid:
    """Fejér's quadrature on ``[-1, 1]``: positive weights, exact for degrees below its size.

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
        r"""Return the rule with nodes :math:`-\cos((g + 1/2) \pi / G)`, denser towards the ends."""
        angles = (torch.arange(size, dtype=torch.float64) + 0.5) * (math.pi / size)
        nodes = -torch.cos(angles)
        return cls(nodes, _fejer(size), _doubled(nodes, degree))


class Solution(NamedTuple):
    r"""The minimum of the dual, for ``N`` moment vectors.

    Attributes:
        alphas: ``(N, m)``.
        log_partition: :math:`\log Z`, ``(N,)``.
        fitted: Moments of the density, ``(N, m)``.
        gradient: Largest entry of the gradient, ``(N,)``.
        iterations: Number of steps, ``(N,)``.
    """

    alphas: Tensor
    log_partition: Tensor
    fitted: Tensor
    gradient: Tensor
    iterations: Tensor


def chebyshev(x: Tensor, degree: int) -> Tensor:
    """Return Chebyshev polynomials of degree ``0, ..., degree`` at points, along the last axis."""
    # T_j(x) = cos(j arccos x)
    angles = torch.arccos(x.clamp(-1.0, 1.0))
    return torch.cos(angles[..., None] * torch.arange(degree + 1, dtype=torch.float64))


def in_interval(x: Tensor, interval: Interval) -> Tensor:
    """Map points of ``[-1, 1]`` to an interval."""
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
    damping: float = TUNING.damping,
    blurred: float = math.inf,
    patience: int | None = None,
) -> Solution:
    r"""Minimise the dual by Levenberg-Marquardt, with one damping per vector.

    Args:
        targets: Chebyshev moments of degree 1 to ``m``, ``(N, m)``.
        ridge: :math:`r`, ``(N, m)``.
        log_prior: :math:`\log q_0` at the nodes, ``(G,)``.
        grid: With polynomials up to degree ``2 m``.
        atol: Largest entry of the gradient to stop at.
        max_steps: Maximum number of steps.
        start: First multipliers, ``(N, m)``. Defaults to zeros, which give the prior.
        damping: Damping of the first step.
        blurred: Total variation of the shares of the nodes at which to give up a vector, because
            the quadrature does not resolve its peaks. It is 2 if each peak has a single node.
        patience: Number of steps after which to give up a vector whose gradient is above 1e-4.
    """
    dual = _Dual(targets.numpy(), ridge.numpy(), log_prior.numpy(), grid)
    alphas = np.zeros(targets.shape) if start is None else start.numpy().copy()
    with np.errstate(all="ignore"):  # a step that overflows is not finite, and so is rejected
        every = here = dual.at(alphas)
        live, steps = np.arange(len(alphas)), np.zeros(len(alphas), dtype=np.int64)
        dampings = np.full(len(alphas), damping)
        for count in range(max_steps):
            going = (
                ~(here.error <= atol)  # NaN counts as not converged, and is given up below
                & (dampings < TUNING.largest_damping)
                & (here.variation < blurred)
            )
            if count == patience:
                going &= here.error < TUNING.near
            if not going.all():
                every.put(live, here)
                live, dampings = live[going], dampings[going]
                dual, here = dual.only(going), here.only(going)
            if not live.size:
                break
            trial, sound = dual.step(here, dampings)
            better = trial.better_than(here) & sound
            dampings = dampings * np.where(better, TUNING.shrink, TUNING.grow)
            steps[live] += 1
            if better.all():
                here = trial
            elif better.any():
                here.put(better, trial.only(better))
        every.put(live, here)
    fitted = every.moments[:, 1 : alphas.shape[1] + 1]
    arrays = (every.alphas, every.log_partition, fitted, every.error, steps)
    return Solution(*(torch.from_numpy(array) for array in arrays))


def log_mass(solution: Solution, log_prior: Tensor, grid: Grid) -> Tensor:
    """Return the log integrals ``(N,)`` of the densities on another grid; 0 if both resolve them.

    Args:
        solution: The minimum of the dual.
        log_prior: Logarithm of the prior at the nodes of the other grid.
        grid: The other grid, with polynomials up to degree ``m``.
    """
    m = solution.alphas.shape[1]
    exponents = log_prior + grid.weights.log() - solution.alphas @ grid.polynomials[:, 1 : m + 1].T
    return exponents.logsumexp(1) - solution.log_partition


def _fejer(size: int) -> Tensor:
    r"""Return :math:`\frac{2}{G} (1 - 2 \sum_k \cos(2 k \theta_g) / (4 k^2 - 1))`, by one FFT."""
    orders = torch.arange(size, dtype=torch.float64)
    waves = torch.where(orders % 2 == 0, 2 / (1 - orders**2), 0.0)
    waves[0] = 1.0
    phases = torch.polar(waves, -orders * (math.pi / (2 * size)))
    weights: Tensor = 2 / size * torch.fft.fft(phases, n=2 * size)[:size].real
    return weights


def _doubled(nodes: Tensor, degree: int) -> Tensor:
    r"""Return Chebyshev polynomials by :math:`T_{n+k} = 2 T_n T_k - T_{n-k}`, in blocks.

    This takes a tenth of the time of the cosines, with an error of ``degree ** 1.6`` roundoffs.
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


class _Points(NamedTuple):
    """Values of the dual and its derivatives: arrays with one row, or number, per vector."""

    alphas: Array
    value: Array
    gradient: Array
    moments: Array
    log_partition: Array
    variation: Array
    error: Array
    length: Array

    def only(self, which: Array) -> "_Points":
        return _Points(*(array[which] for array in self))

    def put(self, which: Array, other: "_Points") -> None:
        for array, new in zip(self, other, strict=True):
            array[which] = new

    def better_than(self, old: "_Points") -> Array:
        """Return whether the dual fell, or the gradient if the change of the dual is roundoff."""
        level = TUNING.level * (1 + np.abs(old.value))
        fell = self.value < old.value - level
        flat = (self.value <= old.value + level) & (self.length < old.length)
        better: Array = np.isfinite(self.value) & (fell | flat)
        return better


class _Dual:
    """The dual of some moment vectors, in NumPy, whose small operations are faster than torch's.

    Attributes:
        targets: ``(N, m)``.
        ridge: ``(N, m)``.
        base: Logarithm of prior times weights, ``(G,)``.
        rows: Polynomials of degree 1 to ``m`` at the nodes, ``(m, G)``.
        columns: Polynomials of degree 0 to ``2 m``, ``(G, 2 m + 1)``.
        sums: Degrees :math:`i + j`, ``(m, m)``.
        gaps: Degrees :math:`|i - j|`, ``(m, m)``.
    """

    def __init__(self, targets: Array, ridge: Array, log_prior: Array, grid: Grid) -> None:
        self.targets, self.ridge = targets, ridge
        self.base = log_prior + grid.weights.log().numpy()
        index = np.arange(1, targets.shape[1] + 1)
        self.columns = grid.polynomials.numpy()
        self.rows = self.columns[:, 1 : len(index) + 1].T  # contiguous in the layout of a grid
        self.sums, self.gaps = index[:, None] + index, np.abs(index[:, None] - index)

    def only(self, which: Array) -> "_Dual":
        part = copy(self)
        part.targets, part.ridge = self.targets[which], self.ridge[which]
        return part

    def at(self, alphas: Array) -> _Points:
        # log(q_0 w) - sum_i alpha_i T_i at the nodes; shares are q w, and log Z their log-sum-exp.
        exponents = self.base - _product(alphas, self.rows)
        top = exponents.max(1, keepdims=True)
        shares = np.exp(exponents - top)
        total = shares.sum(1, keepdims=True)
        shares /= total
        log_partition = (top + np.log(total))[:, 0]
        # F = log Z + alpha'mu + alpha'(r alpha)/2, with gradient mu - <T> + r alpha
        moments = _product(shares, self.columns)
        pull = self.ridge * alphas
        value = log_partition + (alphas * (self.targets + 0.5 * pull)).sum(1)
        gradient = self.targets - moments[:, 1 : alphas.shape[1] + 1] + pull
        variation = np.abs(shares[:, 1:] - shares[:, :-1]).sum(1) + shares[:, 0] + shares[:, -1]
        sizes = np.abs(gradient)
        error, length = sizes.max(1), (sizes * sizes).sum(1)
        return _Points(alphas, value, gradient, moments, log_partition, variation, error, length)

    def step(self, here: _Points, dampings: Array) -> tuple[_Points, Array]:
        """Return the point of a damped Newton step, and whether the Hessian was definite."""
        moments = here.moments
        first = moments[:, 1 : here.alphas.shape[1] + 1]
        # <T_i T_j> - <T_i><T_j> = (<T_{i+j}> + <T_{|i-j|}>)/2 - <T_i><T_j>
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
    """Return ``left @ right``, in blocks of rows so small that BLAS uses one thread."""
    count = max(1, TUNING.one_thread // right.size)
    out = np.empty((len(left), right.shape[1]))
    for begin in range(0, len(left), count):
        np.matmul(left[begin : begin + count], right, out=out[begin : begin + count])
    return out


# ------------------------------------------------------------------------------------------
# Priors on an interval, and quadratures for them.

PriorName = Literal["flat", "semicircle", "marchenko_pastur"]
Prior = PriorName | Density | Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    r"""A quadrature on an interval, and a prior at its nodes.

    Attributes:
        grid: Nodes, weights and polynomials on ``[-1, 1]``.
        points: The nodes mapped to the interval, ``(G,)``.
        log_prior: :math:`\log q_0` at the points, ``(G,)``.
    """

    grid: Grid
    points: Tensor
    log_prior: Tensor

    @property
    def log_mass(self) -> Tensor:
        r"""Logarithm of the integral of :math:`q_0` over ``[-1, 1]``."""
        return (self.log_prior + self.grid.weights.log()).logsumexp(0)


def quadrature(prior: Prior, interval: Interval, size: int, degree: int) -> Rule:
    """Return a rule of ``size`` nodes for a prior, with polynomials up to a degree."""
    grid = Grid.make(size, degree)
    points = in_interval(grid.nodes, interval)
    values = log_prior(prior, points, interval)
    check_finite("logarithm of the prior", values)
    return Rule(grid, points, values)


def log_prior(prior: Prior, x: Tensor, interval: Interval) -> Tensor:
    r"""Return the logarithm of a prior at points inside an interval, up to a constant.

    Args:
        prior: ``flat``; the law ``semicircle`` or ``marchenko_pastur`` with the interval as its
            support; a law or another density; or a function, positive inside the interval.
        x: Points, any shape.
        interval: ``(a, b)``; ``marchenko_pastur`` needs a positive ``a``.
    """
    if isinstance(prior, Density):
        values = prior.pdf(x)
    elif callable(prior):
        values = prior(x)
    else:
        check_choice("prior", prior, get_args(PriorName))
        if prior == "flat":
            return torch.zeros_like(x)
        values = _law(prior, interval).pdf(x)
    same_shape = isinstance(values, Tensor) and values.shape == x.shape
    if not (same_shape and bool((values > 0).all())):
        raise ValueError("prior must be positive inside the interval, and keep the shape of x")
    return values.double().log()


def _law(name: str, interval: Interval) -> Density:
    """Return the semicircle or the Marchenko-Pastur law whose edges are the interval."""
    low, high = interval
    if name == "semicircle":
        return Semicircle(mean=0.5 * (low + high), variance=((high - low) / 4) ** 2)
    if low <= 0:
        raise ValueError(f"prior {name!r} needs an interval of positive numbers, got {interval}")
    # The roots of the edges are sqrt(s) (1 -+ sqrt(q)).
    half, difference = (
        (math.sqrt(high) + math.sqrt(low)) / 2,
        (math.sqrt(high) - math.sqrt(low)) / 2,
    )
    return MarchenkoPastur(ratio=(difference / half) ** 2, scale=half**2)
