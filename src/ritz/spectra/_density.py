"""``density`` by Lanczos quadrature or the kernel polynomial method, and the results of both."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_positive
from ritz._core.density import NO_ATOMS, Atoms, as_points, interval_ends
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, draw_probes, resolve_generator
from ritz._core.results import Estimate
from ritz._core.storage import storable
from ritz.operators import OperatorLike, as_operator
from ritz.spectra._functions import ritz_rules
from ritz.spectra._lanczos import TUNING as LANCZOS
from ritz.spectra._lanczos import Reorthogonalization
from ritz.spectra._moments import Moments, moments

# ------------------------------------------------------------------------------------------
# Densities averaged over probes.


class SampledDensity(ABC):
    """Density with one curve per probe, averaged, with intervals from the spread of the curves."""

    __slots__ = ()

    @property
    @abstractmethod
    def _is_sampled(self) -> bool:
        """Whether the curves are of random probes. Otherwise their mean has no error."""

    @abstractmethod
    def pdf_samples(self, x: Tensor) -> Tensor:
        """Return the density at the points, one row per probe."""

    @abstractmethod
    def cdf_samples(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below the points, one row per probe."""

    def pdf(self, x: Tensor) -> Tensor:
        """Return the density at the points."""
        return self.pdf_samples(x).mean(0)

    def pdf_interval(self, x: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of an interval for each point that contains the density there.

        They contain it with probability ``level``, point by point, like
        :meth:`ritz.Estimate.interval`. The density is that of infinitely many probes, with the same
        smoothing and number of steps. The ends are NaN for a single probe.
        """
        return self._interval(self.pdf_samples(x), level)

    def cdf(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below each point."""
        return self.cdf_samples(x).mean(0)

    def cdf_interval(self, x: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of an interval for each point, as ``pdf_interval`` does, for ``cdf``."""
        return self._interval(self.cdf_samples(x), level)

    def mass(self, low: float, high: float) -> float:
        """Return the fraction of eigenvalues in ``(low, high]``."""
        # mass of (low, high] = cdf(high) - cdf(low)
        ends = self.cdf(interval_ends(low, high))
        return float(ends[1] - ends[0])

    def _interval(self, samples: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the interval of the mean over the first axis."""
        about: Any = {"method": "mean over probes", "num_products": 0}
        if not self._is_sampled:
            return Estimate.exact(samples.mean(0), **about).interval(level)
        return Estimate.of(samples, **about).interval(level)


# ------------------------------------------------------------------------------------------
# Weighted points and their Gaussian smoothing.


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteDensity(SampledDensity):
    r"""Spectral density as a sum of weighted points: the mean over probes of Gauss rules.

    .. math:: p(\lambda) = \frac1d \sum_l \sum_k \tau_k^{(l)} \delta(\lambda - \theta_k^{(l)})

    Attributes:
        nodes: Ritz values, one row per probe, ``(num_probes, m)``, float64.
        weights: Gauss weights of the same shape; each row has sum 1.
        roundoff: Roundoff of the nodes. A node of smaller magnitude may be zero.
        dimension: Order ``n`` of the operator.
        num_products: Number of products.
        seed: Seed of the probes.
        matrix: Which matrix of a network or graph it is; ``None`` if unknown.
        batch_norm: Batch-norm mode of the network; ``None`` without batch norm.
    """

    nodes: Tensor
    weights: Tensor
    roundoff: float
    dimension: int
    num_products: int
    seed: int
    matrix: str | None = None
    batch_norm: str | None = None

    @property
    def support(self) -> tuple[float, float]:
        """Smallest and largest node."""
        used = self.nodes[self.weights > 0]
        return float(used.min()), float(used.max())

    @property
    def atoms(self) -> Atoms:
        """All nodes, with their weights averaged over probes."""
        points, order = self.nodes.reshape(-1).sort()
        return Atoms(points, self.weights.reshape(-1)[order] / len(self.nodes))

    def moment(self, degree: int) -> float:
        """Return the mean of a power; unbiased for degrees below twice the number of steps."""
        return float((self.weights * self.nodes**degree).sum(1).mean())

    def smoothed(self, width: float | None = None) -> "SmoothedDensity":
        """Return the density with points replaced by Gaussians of standard deviation ``width``.

        The width defaults to the length of the support divided by the number of steps, which is
        about the distance between neighbouring Ritz values.
        """
        if width is None:
            low, high = self.support
            width = (high - low) / self.nodes.shape[1] or max(abs(high), 1.0) * 1e-3
        check_positive("width", width)
        return SmoothedDensity(discrete=self, width=float(width))

    def __str__(self) -> str:
        low, high = self.support
        count, steps = self.nodes.shape
        negative = (self.weights * (self.nodes < -self.roundoff)).sum(1).mean()
        return (
            f"DiscreteDensity of order {self.dimension:,} on [{low:.4g}, {high:.4g}] "
            f"from {count} probes x {steps} steps; mean {self.moment(1):.4g}, "
            f"mean square {self.moment(2):.4g}, "
            f"negative mass {float(negative):.3g}"
        )

    @property
    def _is_sampled(self) -> bool:
        return True

    def pdf_samples(self, x: Tensor) -> Tensor:
        raise TypeError("a discrete density has no pdf: use .smoothed(width) first")

    def cdf_samples(self, x: Tensor) -> Tensor:
        # Step functions: the sum of the weights of the nodes at or below x, one row per probe.
        x = as_points(x)
        order = self.nodes.argsort(1)
        nodes, weights = self.nodes.gather(1, order), self.weights.gather(1, order)
        steps = torch.cat([torch.zeros(len(nodes), 1, dtype=torch.float64), weights.cumsum(1)], 1)
        below = torch.searchsorted(
            nodes, x.reshape(1, -1).expand(len(nodes), -1).contiguous(), right=True
        )
        return steps.gather(1, below).reshape(len(nodes), *x.shape)


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedDensity(SampledDensity):
    r"""A discrete density convolved with a Gaussian of standard deviation ``width``.

    Smoothing biases moments: the mean square grows by ``width`` squared.

    Attributes:
        discrete: The density before smoothing.
        width: Standard deviation of the Gaussian.
    """

    discrete: DiscreteDensity
    width: float

    @property
    def matrix(self) -> str | None:
        """Which matrix of a network or graph it is; ``None`` if unknown."""
        return self.discrete.matrix

    @property
    def batch_norm(self) -> str | None:
        """Batch-norm mode of the network; ``None`` without batch norm."""
        return self.discrete.batch_norm

    @property
    def support(self) -> tuple[float, float]:
        """From five widths below the smallest node to five above the largest."""
        low, high = self.discrete.support
        return low - 5 * self.width, high + 5 * self.width

    @property
    def atoms(self) -> Atoms:
        """No atoms: the points were replaced by Gaussians."""
        return NO_ATOMS

    def moment(self, degree: int) -> float:
        r"""Return the mean of a power.

        .. math:: \sum_j \binom{m}{2j} \sigma^{2j} (2j-1)!! \mu_{m-2j}
        """
        terms = (
            math.comb(degree, 2 * j)
            * self.width ** (2 * j)
            * math.prod(range(1, 2 * j, 2))
            * self.discrete.moment(degree - 2 * j)
            for j in range(degree // 2 + 1)
        )
        return float(sum(terms))

    def __str__(self) -> str:
        return f"{self.discrete}, smoothed by a Gaussian of width {self.width:.3g}"

    @property
    def _is_sampled(self) -> bool:
        return True

    def pdf_samples(self, x: Tensor) -> Tensor:
        def bell(z: Tensor) -> Tensor:
            return torch.exp(-0.5 * z * z) / (self.width * math.sqrt(2 * math.pi))

        return self._mixture(x, bell)

    def cdf_samples(self, x: Tensor) -> Tensor:
        return self._mixture(x, torch.special.ndtr)

    def _mixture(self, x: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of the kernel over the nodes, one row per probe."""
        x = as_points(x)
        nodes, weights = self.discrete.nodes, self.discrete.weights
        scaled = x.reshape(-1, 1) / self.width
        rows = [  # one at a time: all would need memory of size (probes, points, nodes)
            kernel(scaled - node / self.width) @ weight
            for node, weight in zip(nodes, weights, strict=True)
        ]
        return torch.stack(rows).reshape(len(nodes), *x.shape)


# ------------------------------------------------------------------------------------------
# The kernel polynomial method.


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialDensity(SampledDensity):
    r"""The kernel polynomial density: Chebyshev moments damped by Jackson's kernel.

    .. math:: p(t) = \frac{1}{\pi \sqrt{1 - t^2}} \Big[\mu_0 + 2 \sum_{j=1}^m g_j \mu_j T_j(t)\Big]

    Attributes:
        moments: Chebyshev moments with their interval.
        dimension: Order ``n`` of the operator.
    """

    moments: Moments
    dimension: int

    @property
    def matrix(self) -> str | None:
        """Which matrix of a network or graph it is; ``None`` if unknown."""
        return self.moments.matrix

    @property
    def batch_norm(self) -> str | None:
        """Batch-norm mode of the network; ``None`` without batch norm."""
        return self.moments.batch_norm

    @property
    def support(self) -> tuple[float, float]:
        """The interval of the moments."""
        return self.moments.interval

    @property
    def atoms(self) -> Atoms:
        """No atoms: the series is continuous."""
        return NO_ATOMS

    @property
    def width(self) -> float:
        """Standard deviation of Jackson's kernel in the middle of the interval."""
        low, high = self.support
        return math.pi / len(self.moments.mean) * (high - low) / 2

    def moment(self, degree: int) -> float:
        """Return the mean of a power, by a Gauss-Chebyshev rule that is exact for it."""
        # int g(t) dt / (pi sqrt(1 - t^2)) = mean of g(cos angle) at the Chebyshev angles
        count = len(self.moments.mean) + degree
        angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
        low, high = self.support
        points = (low + high) / 2 + (high - low) / 2 * torch.cos(angles)
        return float((self._series(angles).mean(0) * points**degree).mean())

    def __str__(self) -> str:
        name = f"PolynomialDensity of order {self.dimension:,}, width {self.width:.3g}"
        return f"{name}, from {self.moments}"

    @property
    def _is_sampled(self) -> bool:
        return bool(self.moments.stderr.any())

    def _series(self, angles: Tensor) -> Tensor:
        """Return the bracket of the formula at ``t = cos(angle)``, one row per probe."""
        degrees = torch.arange(len(self.moments.mean), dtype=torch.float64)
        factors = torch.where(degrees > 0, 2.0, 1.0) * _jackson(len(degrees))
        return (self.moments.samples * factors) @ torch.cos(
            degrees[:, None] * angles.reshape(1, -1)
        )

    def _angles(self, x: Tensor) -> Tensor:
        low, high = self.support
        t = (2 * x - low - high) / (high - low)
        return torch.acos(t.clamp(-1.0, 1.0))

    def pdf_samples(self, x: Tensor) -> Tensor:
        x = as_points(x)
        low, high = self.support
        angles = self._angles(x)
        jacobian = 2 / ((high - low) * math.pi * torch.sin(angles))
        values = self._series(angles).reshape(-1, *x.shape) * jacobian
        return torch.where((x > low) & (x < high), values, 0.0)

    def cdf_samples(self, x: Tensor) -> Tensor:
        # T_j(cos a) = cos(j a) and dt / sqrt(1 - t^2) = -da: integrate cos(j a) from a = pi down.
        x = as_points(x)
        angles = self._angles(x).reshape(1, -1)
        degrees = torch.arange(1, len(self.moments.mean), dtype=torch.float64)
        factors = _jackson(len(degrees) + 1)[1:] * 2 / degrees
        samples = self.moments.samples
        waves = (samples[:, 1:] * factors) @ torch.sin(degrees[:, None] * angles)
        below = samples[:, :1] * (math.pi - angles) - waves
        return (below / math.pi).reshape(-1, *x.shape)


def _jackson(count: int) -> Tensor:
    # g_j = [(N - j + 1) cos(pi j / (N + 1)) + sin(pi j / (N + 1)) cot(pi / (N + 1))] / (N + 1),
    # Weisse et al. (2006), equation 71
    j = torch.arange(count, dtype=torch.float64)
    step = math.pi / (count + 1)
    return ((count - j + 1) * torch.cos(step * j) + torch.sin(step * j) / math.tan(step)) / (
        count + 1
    )


# ------------------------------------------------------------------------------------------
# Spectral densities from products.

DensityMethod = Literal["lanczos", "kpm"]


def density(
    op: OperatorLike,
    *,
    num_probes: int = 8,
    num_steps: int | None = None,
    width: float | None = None,
    method: DensityMethod = "lanczos",
    reorthogonalize: Reorthogonalization = "full",
    block_size: int | None = None,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> DiscreteDensity | SmoothedDensity | PolynomialDensity:
    r"""Estimate the density of eigenvalues :math:`\frac1n \sum_i \delta(\lambda - \lambda_i)`.

    ``lanczos`` averages the Gauss rules of ``num_probes`` Lanczos runs. If ``width`` is ``None``
    the density is discrete; otherwise it is smoothed with a Gaussian of this standard deviation.
    ``kpm`` computes ``2 num_steps`` Chebyshev moments and applies Jackson's kernel. Both cost
    ``num_steps`` products per probe. Memory: about ``(num_steps + 5) block_size`` vectors of length
    ``n`` for ``lanczos`` with re-orthogonalisation, ``5 block_size`` without it and for ``kpm``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_probes: Number of probes ``d``. The methods ``pdf_interval`` and ``cdf_interval`` of the
            result return error bars from the differences between probes.
        num_steps: Number of steps ``m`` per probe, at most ``n``. Defaults to ``min(80, n)``.
        width: Standard deviation of the Gaussian; ``None`` for a discrete density.
        method: ``lanczos`` or ``kpm``.
        reorthogonalize: ``full``, ``partial`` or ``none``; see :func:`ritz.lanczos`.
        block_size: Number of probes multiplied together. Defaults to that of the operator.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: *Spectral Machine Learning*, section 4.4; Lin, Saad and Yang (2016).

    Example:
        >>> import torch, ritz
        >>> spectrum = ritz.density(torch.eye(50), num_probes=2, num_steps=3)
        >>> spectrum.mass(0.9, 1.1)
        1.0
    """
    op = as_operator(op)
    check_choice("method", method, get_args(DensityMethod))
    num_probes = check_count("num_probes", num_probes, low=2 if method == "kpm" else 1)
    if block_size is not None:
        block_size = check_count("block_size", block_size)
    generator = resolve_generator(generator)
    num_steps = min(80, op.shape[0]) if num_steps is None else num_steps
    if method == "kpm":
        if width is not None:
            raise ValueError(
                f"width needs method='lanczos', got {width}: num_steps sets the width of 'kpm'"
            )
        num_steps = check_count("num_steps", num_steps)
        measured = moments(
            op,
            num_moments=2 * num_steps,
            num_probes=num_probes,
            block_size=block_size,
            probe=probe,
            generator=generator,
            progress=progress,
        )
        return PolynomialDensity(moments=measured, dimension=op.shape[0])
    num_steps = check_count("num_steps", num_steps, high=op.shape[0])
    check_choice("reorthogonalize", reorthogonalize, get_args(Reorthogonalization))
    nodes, weights, spent = [], [], 0
    block_size = block_size or op.block_size
    with tracking(progress, "density", num_probes) as bar:
        for start in range(0, num_probes, block_size):
            count = min(block_size, num_probes - start)
            block = draw_probes(op, count, kind=probe, generator=generator)
            rules = ritz_rules(op, block, num_steps=num_steps, reorthogonalize=reorthogonalize)
            nodes.append(rules.nodes)
            weights.append(rules.weights)
            spent += rules.num_products
            bar.update(start + count)
    largest = max(float(part.abs().max()) for part in nodes)
    discrete = DiscreteDensity(
        nodes=torch.cat(nodes),
        roundoff=LANCZOS.residual * torch.finfo(op.dtype).eps * largest,
        weights=torch.cat(weights),
        dimension=op.shape[0],
        num_products=spent,
        seed=generator.initial_seed(),
        matrix=op.origin.get("matrix"),
        batch_norm=op.origin.get("batch_norm"),
    )
    return discrete if width is None else discrete.smoothed(width)
