"""The ``Density`` protocol, and the base class of densities averaged over probes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ritz._core.results import stderr

Band = tuple[Tensor, Tensor]


class Atoms(NamedTuple):
    """Points of positive mass, ascending, and their masses: both ``(k,)``, float64."""

    points: Tensor
    masses: Tensor


# The atoms of a continuous density.
NO_ATOMS = Atoms(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))


@runtime_checkable
class Density(Protocol):
    """Probability density of the eigenvalues. Points are float64 tensors of any shape."""

    @property
    def support(self) -> tuple[float, float]:
        """Interval outside which the density is zero or negligible."""

    @property
    def atoms(self) -> Atoms:
        """Points of positive mass, which the ``pdf`` leaves out."""

    def pdf(self, x: Tensor) -> Tensor:
        """Return the density at the points."""

    def cdf(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below each point."""

    def mass(self, low: float, high: float) -> float:
        """Return the fraction of eigenvalues in ``(low, high]``."""

    def moment(self, degree: int) -> float:
        """Return the mean of ``eigenvalue ** degree``."""


class SampledDensity(ABC):
    """Density with one curve per probe, averaged, with error bands."""

    __slots__ = ()

    @abstractmethod
    def _pdf_samples(self, x: Tensor) -> Tensor:
        """Return the density at the points, one row per probe."""

    @abstractmethod
    def _cdf_samples(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below the points, one row per probe."""

    def pdf(self, x: Tensor) -> Tensor:
        """Return the density at the points."""
        return self._pdf_samples(x).mean(0)

    def pdf_band(self, x: Tensor, *, sigmas: float = 2.0) -> Band:
        """Return ``pdf`` minus and plus ``sigmas`` standard errors over probes."""
        return band(self._pdf_samples(x), sigmas)

    def cdf(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below each point."""
        return self._cdf_samples(x).mean(0)

    def cdf_band(self, x: Tensor, *, sigmas: float = 2.0) -> Band:
        """Return ``cdf`` minus and plus ``sigmas`` standard errors over probes."""
        return band(self._cdf_samples(x), sigmas)

    def mass(self, low: float, high: float) -> float:
        """Return the fraction of eigenvalues in ``(low, high]``."""
        # mass of (low, high] = cdf(high) - cdf(low)
        ends = self.cdf(torch.tensor([low, high], dtype=torch.float64))
        return float(ends[1] - ends[0])


def as_points(x: float | Sequence[float] | Tensor, name: str = "points") -> Tensor:
    """Return points as a float64 tensor on the CPU, where densities are evaluated."""
    try:
        return torch.as_tensor(x, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers or a tensor, got {x!r}") from error


def broadcast(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors expanded to a common shape; an error names the arguments and their shapes."""
    try:
        return tuple(torch.broadcast_tensors(*tensors.values()))
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors.values())
        raise ValueError(f"{', '.join(tensors)} must broadcast, got shapes {shapes}") from None


def band(samples: Tensor, sigmas: float) -> Band:
    """Return the mean over the first axis minus and plus ``sigmas`` standard errors."""
    # NaN for a single probe, which has no standard error.
    mean, error = samples.mean(0), stderr(samples)
    return mean - sigmas * error, mean + sigmas * error
