"""The ``Density`` protocol (pdf, cdf, moments, support, atoms), and points as float64 tensors."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


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


def as_points(x: float | Sequence[float] | Tensor, name: str = "points") -> Tensor:
    """Return points as a float64 tensor on the CPU, where densities are evaluated."""
    try:
        return torch.as_tensor(x, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers or a tensor, got {x!r}") from error


def interval_ends(low: float, high: float) -> Tensor:
    """Return the ends of an interval as float64 points, ``(2,)``; raise if they are reversed."""
    ends = as_points([low, high], "low and high")
    if not bool(ends[0] <= ends[1]):  # or not a number
        raise ValueError(f"low must be at most high, got {float(low):g} and {float(high):g}")
    return ends


def broadcast(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors expanded to a common shape; an error names the arguments and their shapes."""
    try:
        return tuple(torch.broadcast_tensors(*tensors.values()))
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors.values())
        raise ValueError(f"{', '.join(tensors)} must broadcast, got shapes {shapes}") from None
