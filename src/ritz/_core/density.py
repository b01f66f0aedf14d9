"""The ``Density`` protocol: what every spectral density can do, whatever it is made of."""

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ritz._core.results import stderr

Band = tuple[Tensor, Tensor]


@runtime_checkable
class Density(Protocol):
    """A probability density of eigenvalues. Points are float64 tensors of any shape."""

    @property
    def support(self) -> tuple[float, float]:
        """An interval outside which the density is zero or negligible."""

    def pdf(self, x: Tensor) -> Tensor:
        """Density at the points."""

    def cdf(self, x: Tensor) -> Tensor:
        """Share of the eigenvalues at or below the points."""

    def mass(self, low: float, high: float) -> float:
        """Share of the eigenvalues in ``(low, high]``."""

    def moment(self, degree: int) -> float:
        """Mean of that power of an eigenvalue."""


class SampledDensity(ABC):
    """A density that has one curve a probe, from which means and bands follow."""

    __slots__ = ()

    @abstractmethod
    def _pdf_samples(self, x: Tensor) -> Tensor:
        """Density at the points, one row a probe."""

    @abstractmethod
    def _cdf_samples(self, x: Tensor) -> Tensor:
        """Share of the eigenvalues at or below the points, one row a probe."""

    def pdf(self, x: Tensor) -> Tensor:
        """Density at the points."""
        return self._pdf_samples(x).mean(0)

    def pdf_band(self, x: Tensor, *, sigmas: float = 2.0) -> Band:
        """Lower and upper end of the pdf, that many standard errors over probes away."""
        return band(self._pdf_samples(x), sigmas)

    def cdf(self, x: Tensor) -> Tensor:
        """Share of the eigenvalues at or below the points."""
        return self._cdf_samples(x).mean(0)

    def cdf_band(self, x: Tensor, *, sigmas: float = 2.0) -> Band:
        """Lower and upper end of the cdf, that many standard errors over probes away."""
        return band(self._cdf_samples(x), sigmas)

    def mass(self, low: float, high: float) -> float:
        """Share of the eigenvalues in ``(low, high]``."""
        ends = self.cdf(torch.tensor([low, high], dtype=torch.float64))
        return float(ends[1] - ends[0])


def as_points(x: Tensor) -> Tensor:
    """Points as a float64 tensor on the CPU, where densities live."""
    return torch.as_tensor(x, dtype=torch.float64, device="cpu")


def band(samples: Tensor, sigmas: float) -> Band:
    """Mean over the first axis, that many standard errors less and more."""
    mean, error = samples.mean(0), stderr(samples)
    return mean - sigmas * error, mean + sigmas * error
