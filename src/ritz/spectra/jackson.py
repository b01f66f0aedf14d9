"""Densities made of Chebyshev moments: the kernel polynomial method."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.storage import storable
from ritz.spectra.polynomials import Moments
from ritz.spectra.protocol import SampledDensity, as_points


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
    def support(self) -> tuple[float, float]:
        """The interval of the moments."""
        return self.moments.interval

    @property
    def width(self) -> float:
        """Standard deviation of Jackson's kernel in the middle of the interval."""
        low, high = self.support
        return math.pi / len(self.moments.mean) * (high - low) / 2

    def moment(self, degree: int) -> float:
        """Mean of that power, by a Gauss-Chebyshev rule that is exact for it."""
        count = len(self.moments.mean) + degree
        angles = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
        low, high = self.support
        points = (low + high) / 2 + (high - low) / 2 * torch.cos(angles)
        return float((self._series(angles).mean(0) * points**degree).mean())

    def __str__(self) -> str:
        name = f"PolynomialDensity of order {self.dimension:,}"
        return f"{name} from {self.moments}, width {self.width:.3g}"

    def _series(self, angles: Tensor) -> Tensor:
        """The bracket of the formula at ``t = cos(angle)``, one row a probe."""
        degrees = torch.arange(len(self.moments.mean), dtype=torch.float64)
        factors = torch.where(degrees > 0, 2.0, 1.0) * _jackson(len(degrees))
        return (self.moments.samples * factors) @ torch.cos(
            degrees[:, None] * angles.reshape(1, -1)
        )

    def _angles(self, x: Tensor) -> Tensor:
        low, high = self.support
        t = (2 * x - low - high) / (high - low)
        return torch.acos(t.clamp(-1.0, 1.0))

    def _pdf_samples(self, x: Tensor) -> Tensor:
        x = as_points(x)
        low, high = self.support
        angles = self._angles(x)
        jacobian = 2 / ((high - low) * math.pi * torch.sin(angles))
        values = self._series(angles).reshape(-1, *x.shape) * jacobian
        return torch.where((x > low) & (x < high), values, 0.0)

    def _cdf_samples(self, x: Tensor) -> Tensor:
        # The integral of cos(j angle) d(angle) from the lower end, where the angle is pi.
        x = as_points(x)
        angles = self._angles(x).reshape(1, -1)
        degrees = torch.arange(1, len(self.moments.mean), dtype=torch.float64)
        factors = _jackson(len(degrees) + 1)[1:] * 2 / degrees
        samples = self.moments.samples
        waves = (samples[:, 1:] * factors) @ torch.sin(degrees[:, None] * angles)
        below = samples[:, :1] * (math.pi - angles) - waves
        return (below / math.pi).reshape(-1, *x.shape)


def _jackson(count: int) -> Tensor:
    j = torch.arange(count, dtype=torch.float64)
    step = math.pi / (count + 1)
    return ((count - j + 1) * torch.cos(step * j) + torch.sin(step * j) / math.tan(step)) / (
        count + 1
    )
