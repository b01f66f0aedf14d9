"""Densities made of weighted points, and their Gaussian smoothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_range
from ritz._core.storage import storable
from ritz.spectra.protocol import Band, SampledDensity, as_points, band


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteDensity:
    r"""Weighted points, the mean over probes of their Gauss rules.

    .. math:: p(\lambda) = \frac1d \sum_l \sum_k \tau_k^{(l)} \delta(\lambda - \theta_k^{(l)})

    Attributes:
        nodes: Ritz values, one row a probe, ``(num_probes, m)``, float64.
        weights: Gauss weights likewise; each row sums to 1.
        roundoff: Nodes this close to zero may be zero.
        dimension: Order ``n`` of the operator.
        num_products: Products spent.
        seed: Seed of the probes.
    """

    nodes: Tensor
    weights: Tensor
    roundoff: float
    dimension: int
    num_products: int
    seed: int

    @property
    def support(self) -> tuple[float, float]:
        """Smallest and largest node."""
        used = self.nodes[self.weights > 0]
        return float(used.min()), float(used.max())

    def pdf(self, x: Tensor) -> Tensor:
        """Raise: points have no density; :meth:`smoothed` has."""
        raise TypeError("a discrete density has no pdf: use .smoothed(width) first")

    def cdf(self, x: Tensor) -> Tensor:
        """Share of the eigenvalues at or below the points."""
        return self._samples(x).mean(0)

    def cdf_band(self, x: Tensor, *, sigmas: float = 2.0) -> Band:
        """Lower and upper end of the cdf, that many standard errors over probes away."""
        return band(self._samples(x), sigmas)

    def mass(self, low: float, high: float) -> float:
        """Share of the eigenvalues in ``(low, high]``."""
        inside = (self.nodes > low) & (self.nodes <= high)
        return float((self.weights * inside).sum(1).mean())

    def moment(self, degree: int) -> float:
        """Mean of that power: that of the operator, for degrees below twice the steps."""
        return float((self.weights * self.nodes**degree).sum(1).mean())

    def smoothed(self, width: float | None = None) -> "SmoothedDensity":
        """Return the density with points widened to Gaussians of standard deviation ``width``.

        By default the width is the extent of the support over the number of steps, about the
        distance between neighbouring Ritz values, below which nothing is resolved.
        """
        if width is None:
            low, high = self.support
            width = (high - low) / self.nodes.shape[1] or max(abs(high), 1.0) * 1e-3
        check_range("width", width, low=0.0)
        if width == 0:
            raise ValueError("width must be positive, got 0")
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

    def _samples(self, x: Tensor) -> Tensor:
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
        discrete: What was smoothed.
        width: Standard deviation of the Gaussian.
    """

    discrete: DiscreteDensity
    width: float

    @property
    def support(self) -> tuple[float, float]:
        """The nodes and five widths beyond."""
        low, high = self.discrete.support
        return low - 5 * self.width, high + 5 * self.width

    def moment(self, degree: int) -> float:
        r"""Mean of that power, :math:`\sum_j \binom{m}{2j} \sigma^{2j} (2j-1)!! \mu_{m-2j}`."""
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

    def _pdf_samples(self, x: Tensor) -> Tensor:
        def bell(z: Tensor) -> Tensor:
            return torch.exp(-0.5 * z * z) / (self.width * math.sqrt(2 * math.pi))

        return self._mixture(x, bell)

    def _cdf_samples(self, x: Tensor) -> Tensor:
        return self._mixture(x, torch.special.ndtr)

    def _mixture(self, x: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum of the kernel over the nodes, one row a probe; rows one at a time to spare memory."""
        x = as_points(x)
        nodes, weights = self.discrete.nodes, self.discrete.weights
        scaled = x.reshape(-1, 1) / self.width
        rows = [
            kernel(scaled - node / self.width) @ weight
            for node, weight in zip(nodes, weights, strict=True)
        ]
        return torch.stack(rows).reshape(len(nodes), *x.shape)
