r"""Transforms of laws and of spectra: Stieltjes, blue, R and S.

R adds over sums of free matrices, and S multiplies over their products. Both follow from the
transform of Stieltjes, :math:`G(z) = \int dp(x) / (z - x)`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from ritz._core.checks import check_finite
from ritz._core.density import NO_ATOMS, Atoms, Density
from ritz._core.storage import storable


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the transforms."""

    # Gauss-Legendre nodes that stand for a density without a transform of its own: they agree with
    # closed forms to 1e-10 at a hundredth of the width from the real line.
    nodes: int = 2000
    # Numbers in a block of 1/(z - x): 32 MB in complex numbers.
    block: int = 2_000_000
    # Bisections of the inverse of G: from the widest bracket, 1e6 widths, to roundoff.
    bisections: int = 80
    # Distance of the bracket from the support, in widths: G of the widest is below 1e-12.
    reach: float = 1e12


TUNING = Tuning()


@runtime_checkable
class Transformable(Protocol):
    """A law whose Stieltjes transform is known."""

    @property
    def support(self) -> tuple[float, float]: ...
    @property
    def atoms(self) -> Atoms: ...
    def stieltjes(self, z: Tensor) -> Tensor: ...
    def moment(self, degree: int) -> float: ...


@runtime_checkable
class Weighted(Protocol):
    """Ritz values with weights, such as a ``Spectrum``."""

    values: Tensor
    weights: Tensor


Measure = Tensor | Density | Transformable | Weighted


@storable
@dataclass(frozen=True, slots=True)
class Points:
    """A measure of finitely many points ``(k,)`` with masses that sum to 1."""

    points: Tensor
    masses: Tensor
    # Whether the points are atoms, or nodes of a rule that stands for a continuous density.
    exact: bool = True

    @property
    def support(self) -> tuple[float, float]:
        """Smallest and largest point."""
        return float(self.points[0]), float(self.points[-1])

    @property
    def atoms(self) -> Atoms:
        """The points, with equal ones united."""
        if not self.exact:
            return NO_ATOMS
        points, index = self.points.unique(return_inverse=True)
        return Atoms(points, torch.zeros_like(points).index_add_(0, index, self.masses))

    def moment(self, degree: int) -> float:
        """Return the mean of a power."""
        return float(self.masses @ self.points**degree)

    def stieltjes(self, z: Tensor) -> Tensor:
        """Return the sum of ``mass / (z - point)``."""
        flat = z.reshape(-1).to(torch.complex128)
        masses = self.masses.to(torch.complex128)
        rows = max(1, TUNING.block // len(masses))
        # In blocks of points z: all pairs with a spectrum of thousands would fill the memory.
        parts = [(1 / (part[:, None] - self.points)) @ masses for part in flat.split(rows)]
        return torch.cat(parts).reshape(z.shape)


def as_measure(measure: Measure) -> Transformable:
    """Return eigenvalues, a spectrum or a density as something with a Stieltjes transform."""
    if isinstance(measure, Transformable):
        return measure
    if isinstance(measure, Tensor):
        values = measure.detach().double().cpu().reshape(-1)
        check_finite("eigenvalues", values)
        if not len(values):
            raise ValueError("eigenvalues must not be empty")
        return Points(values.sort().values, torch.full_like(values, 1 / len(values)))
    if isinstance(measure, Weighted):
        values, order = measure.values.detach().double().cpu().sort()
        weights = measure.weights.detach().double().cpu()[order]
        return Points(values, weights / weights.sum())
    if isinstance(measure, Density):
        return _by_rule(measure)
    raise TypeError(
        "measure must be a tensor of eigenvalues, a Spectrum, a law or a density, got "
        f"{type(measure).__name__}"
    )


def _by_rule(density: Density) -> Points:
    atoms = density.atoms
    if float(atoms.masses.sum()) > 1 - 1e-12:
        return Points(atoms.points, atoms.masses)
    low, high = density.support
    nodes, weights = (torch.from_numpy(array) for array in leggauss(TUNING.nodes))
    x = 0.5 * (low + high) + 0.5 * (high - low) * nodes
    # Gauss-Legendre, made to sum to the mass that the atoms leave
    shares = weights * density.pdf(x)
    shares = shares * (1 - atoms.masses.sum()) / shares.sum()
    # Ascending, so that the support is the first and the last point
    points, order = torch.cat([x, atoms.points]).sort()
    return Points(points, torch.cat([shares, atoms.masses])[order], exact=False)


def stieltjes(measure: Measure, z: complex | Tensor) -> Tensor:
    r"""Return :math:`G(z) = \int dp(x) / (z - x)`, complex128, of the shape of ``z``.

    On the support of a continuous law the value is that of the upper side, where
    :math:`p(x) = -\operatorname{Im} G(x) / \pi`.

    Args:
        measure: A law, another density, a ``Spectrum``, or eigenvalues ``(n,)``. A density of
            another package is replaced by 2,000 points, good at 0.01 of its width from the support.
        z: Real or complex points. At an eigenvalue or another atom, where :math:`G` has a pole, the
            value is not a number.
    """
    # Straight to complex128: by way of complex64, a Python number would keep seven digits.
    return as_measure(measure).stieltjes(torch.as_tensor(z, dtype=torch.complex128))


def blue(measure: Measure, g: float | Tensor) -> Tensor:
    r"""Return the inverse of the Stieltjes transform, :math:`B(G(z)) = z`, at real points.

    It is found outside the support: above it for positive ``g``, below it for negative ``g``.

    Args:
        measure: As in :func:`stieltjes`.
        g: Points between the values of :math:`G` at the lower and the upper edge, not 0.
    """
    known = as_measure(measure)
    target = torch.as_tensor(g, dtype=torch.float64)
    side = torch.where(target < 0, -1.0, 1.0).double()

    # |G| falls monotonically from the edge outwards, on either side.
    def gap(z: Tensor) -> Tensor:
        return side * known.stieltjes(z.to(torch.complex128)).real - target.abs()

    return _outside(known, gap, side, "g", target)


def r_transform(measure: Measure, g: float | Tensor) -> Tensor:
    r"""Return :math:`R(g) = B(g) - 1/g`, which adds over free sums.

    .. math:: R(g) = \sum_k \kappa_k g^{k - 1} = \mu + v g \text{ for the semicircle}, \quad
        s / (1 - s q g) \text{ for Marchenko-Pastur}

    Args:
        measure: As in :func:`stieltjes`.
        g: As in :func:`blue`; where ``g`` is nearly 0, R is nearly the mean and loses digits.
    """
    target = torch.as_tensor(g, dtype=torch.float64)
    return blue(measure, target) - 1 / target


def s_transform(measure: Measure, y: float | Tensor) -> Tensor:
    r"""Return Voiculescu's S, which multiplies over free products.

    .. math:: S(y) = \frac{1 + y}{y\, T^{-1}(y)}, \qquad T(z) = z G(z) - 1 = \int \frac{x}{z - x},
        \qquad S(y) = \frac{1}{s (1 + q y)} \text{ for Marchenko-Pastur}

    Args:
        measure: As in :func:`stieltjes`, of positive mean and without negative eigenvalues.
        y: Points between minus the mass of positive eigenvalues and :math:`T` at the upper edge,
            not 0.
    """
    known = as_measure(measure)
    if known.support[0] < 0 or not known.moment(1) > 0:
        raise ValueError(f"measure must have no negative eigenvalues, and not 0 alone, got the "
                         f"support {known.support}")  # fmt: skip
    target = torch.as_tensor(y, dtype=torch.float64)
    side = torch.where(target < 0, -1.0, 1.0).double()

    # So does |z G - 1|; for negative y to the left of 0, where the sign of x / (z - x) is constant.
    def gap(z: Tensor) -> Tensor:
        value = (z * known.stieltjes(z.to(torch.complex128)) - 1).real
        return side * value - target.abs()

    return (1 + target) / (target * _outside(known, gap, side, "y", target, negative=True))


def _outside(
    known: Transformable,
    gap: "Gap",
    side: Tensor,
    name: str,
    target: Tensor,
    *,
    negative: bool = False,
) -> Tensor:
    """Return roots right of the support (side 1) or left of it, or of 0, by bisection.

    ``gap`` falls with the distance. In logarithms of the distance, for edges and for infinity.
    """
    low, high = known.support
    left = min(low, 0.0) if negative else low
    width = max(high - low, abs(high), abs(low))
    start = torch.where(side > 0, torch.full_like(side, high), torch.full_like(side, left))
    # So near that roundoff does not move it onto the edge
    near = (1e-15 * start.abs().clamp(min=width)).log()
    far = torch.full_like(start, TUNING.reach * width).log()
    inside = (gap(start + side * near.exp()) >= 0) & (gap(start + side * far.exp()) <= 0)
    if not bool(inside.all()):
        wrong = target.expand_as(inside)[~inside].reshape(-1)[0]
        raise ValueError(
            f"{name} must be a value that the transform takes outside of the support "
            f"[{known.support[0]:.6g}, {known.support[1]:.6g}], and not 0, got {float(wrong):.6g}"
        )
    for _ in range(TUNING.bisections):
        middle = 0.5 * (near + far)
        above = gap(start + side * middle.exp()) > 0
        near, far = torch.where(above, middle, near), torch.where(above, far, middle)
    return start + side * (0.5 * (near + far)).exp()


class Gap(Protocol):
    """A function of real points whose root is wanted."""

    def __call__(self, z: Tensor, /) -> Tensor: ...
