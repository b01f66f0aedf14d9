r"""Transforms of laws and of spectra: Stieltjes, blue, R and S.

R is additive for free sums, and S is multiplicative for free products. Both follow from the
Stieltjes transform :math:`G(z) = \int dp(x) / (z - x)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from numpy.polynomial.legendre import leggauss
from scipy.fft import dct
from torch import Tensor

from ritz._core.checks import check_finite, short
from ritz._core.density import NO_ATOMS, Atoms, Density, as_points
from ritz._core.storage import storable
from ritz.rmt._laws import as_upper, reflected


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the transforms."""

    # First and largest number of nodes of the cosine series of a density whose transform has no
    # closed form. The number is doubled until the last quarter of the series is below `tail` of the
    # largest coefficient. Tracy-Widom laws need 256 nodes.
    first_nodes: int = 64
    last_nodes: int = 2048
    tail: float = 1e-11
    # Number of Gauss-Legendre nodes that replace a density whose series does not converge. They
    # agree with closed forms to 1e-10 at a distance of 0.01 widths from the real line.
    nodes: int = 2000
    # Number of entries in a block of 1/(z - x): 32 MB of complex numbers.
    block: int = 2_000_000
    # Number of bisections for the inverse of G, which reduce the bracket to roundoff.
    bisections: int = 80
    # Largest distance from the support in the bracket, in units of its width. G is below 1e-12
    # there.
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
@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    r"""A density on one interval, as a cosine series in :math:`x = c - R \cos f`.

    .. math:: p(x) R \sin f = \sum_k c_k \cos k f

    Attributes:
        low: Lower edge.
        high: Upper edge.
        waves: Coefficients :math:`c_k`, ``(m,)``.
    """

    low: float
    high: float
    waves: Tensor

    @property
    def mass(self) -> float:
        """Mass of the band."""
        return math.pi * float(self.waves[0])

    def moment(self, degree: int) -> float:
        """Return the mean of a power, by a Gauss-Chebyshev rule that is exact for the series."""
        f, x = chebyshev_nodes(len(self.waves) + degree, self.low, self.high)
        orders = torch.arange(len(self.waves), dtype=torch.float64)
        values = torch.cos(f[:, None] * orders) @ self.waves
        return math.pi * float((values * x**degree).mean())

    def stieltjes(self, w: Tensor) -> Tensor:
        """Return the Stieltjes transform at points of the closed upper half-plane."""
        radius = 0.5 * (self.high - self.low)
        y = (w - 0.5 * (self.low + self.high)) / radius
        root = torch.sqrt(y - 1) * torch.sqrt(y + 1)
        # int_0^pi cos(k f) / (y + cos f) df = pi (-u)^k / root with u = y - root = 1/(y + root)
        u, value = -1 / (y + root), torch.zeros_like(w)
        for wave in self.waves.flip(0).tolist():
            value = value * u + wave
        return math.pi / radius * value / root


def chebyshev_nodes(count: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the ``count`` Chebyshev nodes of an interval: their angles, and the points."""
    f = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    return f, 0.5 * (low + high) - 0.5 * (high - low) * torch.cos(f)


def fit_band(
    pdf: Callable[[Tensor], Tensor], low: float, high: float, *, last_nodes: int, tail: float
) -> tuple[Band, float]:
    """Return the cosine series of a density on an interval, and the relative size of its tail.

    Args:
        pdf: The density at points ``(n,)``.
        low: Lower edge.
        high: Upper edge.
        last_nodes: Maximum number of nodes.
        tail: Relative size of the tail at which to stop doubling the nodes.
    """
    count = TUNING.first_nodes
    while True:
        f, x = chebyshev_nodes(count, low, high)
        values = pdf(x) * (0.5 * (high - low)) * torch.sin(f)
        waves = torch.from_numpy(dct(values.numpy(), type=2)) / count
        waves[0] /= 2
        end = float(waves[-count // 4 :].abs().max() / waves.abs().max())
        if end <= tail or count >= last_nodes:
            # Cut off coefficients at roundoff.
            length = int((waves.abs() > 1e-16 * waves.abs().max()).nonzero()[-1]) + 1
            return Band(low=low, high=high, waves=waves[:length].clone()), end
        count *= 2


@storable
@dataclass(frozen=True, slots=True)
class Points:
    """A discrete measure: points ``(k,)``, ascending, with masses that sum to 1."""

    points: Tensor
    masses: Tensor
    # True if the points are atoms; False if they are the nodes of a rule for a continuous density.
    exact: bool = True

    @property
    def support(self) -> tuple[float, float]:
        """Smallest and largest point."""
        return float(self.points[0]), float(self.points[-1])

    @property
    def atoms(self) -> Atoms:
        """The points, with the masses of equal points added."""
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
        # Compute in blocks of z, because all pairs of z and points may not fit in memory.
        parts = [(1 / (part[:, None] - self.points)) @ masses for part in flat.split(rows)]
        return torch.cat(parts).reshape(z.shape)


class Banded:
    """Base class of measures that consist of ``bands`` and of atoms (``points``, ``masses``)."""

    __slots__ = ()
    bands: tuple[Band, ...]
    points: Tensor
    masses: Tensor

    @property
    def support(self) -> tuple[float, float]:
        """Smallest and largest edge of a band, or atom."""
        points = self.points.tolist()
        lows, highs = ([getattr(band, end) for band in self.bands] for end in ("low", "high"))
        return min(lows + points), max(highs + points)

    @property
    def atoms(self) -> Atoms:
        """Points of positive mass."""
        return Atoms(self.points, self.masses)

    def stieltjes(self, z: Tensor) -> Tensor:
        """Return the Stieltjes transform; on the real line, the limit from above."""
        w = as_upper(z)
        total = ((1 / (w[..., None] - self.points)) * self.masses).sum(-1)
        for band in self.bands:
            total = total + band.stieltjes(w)
        return reflected(z, total)

    def _moment(self, degree: int) -> float:
        """Return the mean of a power, exactly for the series."""
        total = float(self.masses @ self.points**degree)
        return total + math.fsum(band.moment(degree) for band in self.bands)


@storable
@dataclass(frozen=True, slots=True)
class Smooth(Banded):
    """A measure that consists of bands and atoms."""

    bands: tuple[Band, ...]
    points: Tensor
    masses: Tensor

    def moment(self, degree: int) -> float:
        """Return the mean of a power."""
        return self._moment(degree)


def as_measure(measure: Measure, name: str = "measure") -> Transformable:
    """Return eigenvalues, a spectrum or a density as an object with a Stieltjes transform."""
    if isinstance(measure, Transformable):
        return measure
    if isinstance(measure, Tensor):
        values = measure.detach().double().cpu().reshape(-1)
        check_finite(name, values)
        if not len(values):
            raise ValueError(f"{name} must have at least one eigenvalue, got none")
        return Points(values.sort().values, torch.full_like(values, 1 / len(values)))
    if isinstance(measure, Weighted):
        values, order = measure.values.detach().double().cpu().sort()
        weights = measure.weights.detach().double().cpu()[order]
        return Points(values, weights / weights.sum())
    if isinstance(measure, Density):
        return _by_rule(measure)
    raise TypeError(
        f"{name} must be a tensor of eigenvalues, a Spectrum, a law or a density, got "
        f"{type(measure).__name__}"
    )


def check_nonnegative(name: str, measure: Transformable) -> None:
    """Raise unless a measure has positive eigenvalues and no negative ones."""
    low, high = measure.support
    if low < 0 or not high > 0:
        raise ValueError(
            f"{name} must have positive and no negative eigenvalues, got the support "
            f"[{low:.6g}, {high:.6g}]"
        )


def _by_rule(density: Density) -> Transformable:
    atoms = density.atoms
    if float(atoms.masses.sum()) > 1 - 1e-12:
        return Points(atoms.points, atoms.masses)
    low, high = density.support
    # A smooth density has a short series, whose transform is accurate on the real line as well.
    band, end = fit_band(density.pdf, low, high, last_nodes=TUNING.last_nodes, tail=TUNING.tail)
    if end <= TUNING.tail and band.mass > 0:
        scale = (1 - float(atoms.masses.sum())) / band.mass
        return Smooth((replace(band, waves=scale * band.waves),), atoms.points, atoms.masses)
    nodes, weights = (torch.from_numpy(array) for array in leggauss(TUNING.nodes))
    x = 0.5 * (low + high) + 0.5 * (high - low) * nodes
    # Normalise the weights to the mass that the atoms leave.
    shares = weights * density.pdf(x)
    shares = shares * (1 - atoms.masses.sum()) / shares.sum()
    # Sort, because `Points` must be ascending.
    points, order = torch.cat([x, atoms.points]).sort()
    return Points(points, torch.cat([shares, atoms.masses])[order], exact=False)


def stieltjes(measure: Measure, z: complex | Tensor) -> Tensor:
    r"""Return the Stieltjes transform :math:`G(z) = \int dp(x) / (z - x)`, with the shape of ``z``.

    On the support of a continuous law, the value is the limit from above, for which
    :math:`p(x) = -\operatorname{Im} G(x) / \pi`. The result is complex128.

    Args:
        measure: A law, another density, a ``Spectrum``, or eigenvalues ``(n,)``. A density whose
            transform has no closed form, such as a Tracy-Widom law, is replaced by a cosine series
            with an error of 1e-11. A density that is not smooth is replaced by 2,000 points, which
            are accurate if ``z`` is farther from the support than 0.01 of its width.
        z: Real or complex points. At an eigenvalue or another atom, :math:`G` has a pole, and the
            value is NaN.
    """
    known = as_measure(measure)
    try:
        # Convert to complex128 at once, because torch would convert a Python number to complex64.
        points = torch.as_tensor(z, dtype=torch.complex128)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"z must be numbers or a tensor, got {short(z)}") from error
    return known.stieltjes(points)


def blue(measure: Measure, g: float | Tensor) -> Tensor:
    r"""Return the inverse of the Stieltjes transform, :math:`B(G(z)) = z`, at real points.

    The result :math:`z` lies outside of the support: above it for positive ``g``, below it for
    negative ``g``.

    Args:
        measure: As in :func:`stieltjes`.
        g: Points between the values of :math:`G` at the lower and the upper edge, not 0.
    """
    known = as_measure(measure)
    target = as_points(g, "g")
    side = torch.where(target < 0, -1.0, 1.0).double()

    # On either side, |G| decreases with the distance from the support.
    def gap(z: Tensor) -> Tensor:
        return side * known.stieltjes(z.to(torch.complex128)).real - target.abs()

    return _outside(known, gap, side, "g", target)


def r_transform(measure: Measure, g: float | Tensor) -> Tensor:
    r"""Return the R-transform :math:`R(g) = B(g) - 1/g`, which is additive for free sums.

    .. math:: R(g) = \sum_k \kappa_k g^{k - 1} = \mu + v g \text{ for the semicircle}, \quad
        s / (1 - s q g) \text{ for Marchenko-Pastur}

    Args:
        measure: As in :func:`stieltjes`.
        g: As in :func:`blue`. If ``g`` is close to 0, R is close to the mean and loses digits.
    """
    target = as_points(g, "g")
    return blue(measure, target) - 1 / target


def s_transform(measure: Measure, y: float | Tensor) -> Tensor:
    r"""Return Voiculescu's S-transform, which is multiplicative for free products.

    .. math:: S(y) = \frac{1 + y}{y\, T^{-1}(y)}, \qquad T(z) = z G(z) - 1 = \int \frac{x}{z - x},
        \qquad S(y) = \frac{1}{s (1 + q y)} \text{ for Marchenko-Pastur}

    Args:
        measure: As in :func:`stieltjes`, with positive and without negative eigenvalues.
        y: Points between minus the mass of positive eigenvalues and :math:`T` at the upper edge,
            not 0.
    """
    known = as_measure(measure)
    check_nonnegative("measure", known)
    target = as_points(y, "y")
    side = torch.where(target < 0, -1.0, 1.0).double()

    # |z G - 1| decreases with the distance as well. For negative y, take z to the left of 0, where
    # the sign of x / (z - x) does not change.
    def gap(z: Tensor) -> Tensor:
        value = (z * known.stieltjes(z.to(torch.complex128)) - 1).real
        return side * value - target.abs()

    return (1 + target) / (target * _outside(known, gap, side, "y", target, negative=True))


def _outside(
    known: Transformable,
    gap: Callable[[Tensor], Tensor],
    side: Tensor,
    name: str,
    target: Tensor,
    *,
    negative: bool = False,
) -> Tensor:
    """Return roots of ``gap`` outside of the support, by bisection in the log of the distance.

    ``gap`` must decrease with the distance from the support. The roots lie to the right of the
    support for ``side`` 1 and to the left for ``side`` -1; with ``negative`` also to the left of 0.
    """
    low, high = known.support
    left = min(low, 0.0) if negative else low
    width = max(high - low, abs(high), abs(low))
    start = torch.where(side > 0, torch.full_like(side, high), torch.full_like(side, left))
    # At the smallest distance, roundoff must not move the point onto the edge.
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
