r"""Free sums and products (free convolution): spectra of sums and products of large matrices.

Take :math:`A + Q B Q^\top` or :math:`A^{1/2} Q B Q^\top A^{1/2}` with a uniform random rotation Q.
The spectrum of the result depends on the spectra of A and B alone, by *subordination*: for every
point z of the upper half-plane there are :math:`w_1` and :math:`w_2` with

.. math:: G(z) = G_1(w_1) = G_2(w_2), \quad w_1 + w_2 = z + 1 / G(z) \qquad \text{(sum)},

.. math:: z G(z) = w_1 G_1(w_1) = w_2 G_2(w_2), \quad
    w_1 w_2 = z \frac{z G(z)}{z G(z) - 1} \qquad \text{(product)}.

With :math:`D_i(w) = w - 1 / G_i(w)` these are the fixed points of :math:`w_1 = z - D_2(w_2)`,
:math:`w_2 = z - D_1(w_1)` and of :math:`w_1 = z / D_2(w_2)`, :math:`w_2 = z / D_1(w_1)`.

Reference: Belinschi and Bercovici (2007); Biane (1998).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.density import Atoms
from ritz._core.results import HasStatus, Status
from ritz._core.storage import storable
from ritz.rmt._laws import Law, MarchenkoPastur
from ritz.rmt._transforms import (
    Band,
    Banded,
    Measure,
    Transformable,
    as_measure,
    check_nonnegative,
    fit_band,
)

Kind = Literal["sum", "product"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the solver and of the representation by bands."""

    # Imaginary parts of z, in units of the width of the support. The fixed point at each height is
    # the start for the next one, down to the real line.
    heights: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6, 1e-9, 1e-11, 1e-13)
    # Maximum number of steps at one height. A step is two iterations and an extrapolation. Steps
    # stop at a residual of `loose` times the height, and at the last two heights of `residual`.
    max_steps: int = 60
    loose: float = 1e-3
    residual: float = 1e-15
    # After this many steps without progress, the residual is roundoff. Near edges, a step only
    # halves the residual.
    patience: int = 12
    # Above this residual, in units of the width, the iteration has left the fixed point.
    lost: float = 1e-9
    # Number of points at which the support is searched for bands. From the second-to-last height to
    # the last, the imaginary part of G stays constant inside a band, falls by a factor of 100
    # outside, and grows by a factor of 100 at an atom. `edge` and `atom` are thresholds of this
    # ratio. The bisections locate edges to 1e-13 of the width.
    scan: int = 2001
    edge: float = 0.1
    atom: float = 20.0
    bisections: int = 36
    # Largest number of nodes in a band. It is doubled until the last quarter of the cosine series
    # is below this fraction of its largest coefficient.
    last_nodes: int = 2048
    tail: float = 1e-9
    # Largest mass that may be missing from bands and atoms, and largest error of the fixed points.
    mass: float = 1e-6
    # A band with a smaller mass is roundoff.
    least: float = 1e-13
    # Number of points whose cosines are in memory at once.
    block: int = 8192


TUNING = Tuning()


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class FreeDensity(Banded, Law, HasStatus):
    """The law of a free sum or product, as series over the bands of its support.

    Attributes:
        kind: ``sum`` or ``product``.
        parts: The two laws.
        bands: Bands of the continuous part, ascending.
        points: The atoms, ascending, ``(k,)``.
        masses: Masses of the atoms, ``(k,)``.
        status: Whether the fixed points and the series have converged, and the total mass is 1.
    """

    kind: Kind
    parts: tuple[Transformable, Transformable]
    bands: tuple[Band, ...]
    points: Tensor
    masses: Tensor
    status: Status

    def __str__(self) -> str:
        low, high = self.support
        mass = f", atoms of mass {float(self.masses.sum()):.3g}" if len(self.points) else ""
        bands = f"{len(self.bands)} band{'s' * (len(self.bands) != 1)}"
        return f"Free {self.kind} on [{low:.5g}, {high:.5g}], {bands}{mass}; {self.status}"

    def _pdf(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for band in self.bands:
            inside = (x > band.low) & (x < band.high)
            f = _angle(torch.where(inside, x, 0.5 * (band.low + band.high)), band)
            # The series is p(x) R sin f. Next to an edge, roundoff may make it negative.
            value = _cosines(f, band.waves) / (0.5 * (band.high - band.low) * torch.sin(f))
            total = total + torch.where(inside, value.clamp(min=0.0), 0.0)
        return total

    def _cdf(self, x: Tensor) -> Tensor:
        total = ((self.points <= x[..., None]) * self.masses).sum(-1)
        for band in self.bands:
            f = _angle(x.clamp(band.low, band.high), band)
            # int cos k f = sin(k f) / k
            orders = torch.arange(1, len(band.waves), dtype=torch.float64)
            waves = _sines(f, band.waves[1:] / orders)
            total = total + (band.waves[0] * f + waves).clamp(min=0.0)
        return total.clamp(0.0, 1.0)


def free_sum(first: Measure, second: Measure) -> FreeDensity:
    r"""Return the law of :math:`A + Q B Q^\top` for large matrices and a uniform rotation Q.

    The unnormalised Laplacian of a random graph is nearly the free sum of a semicircle (edges) and
    a normal law (degrees).

    Args:
        first: Law of :math:`A`: a law, another density, a ``Spectrum``, or eigenvalues ``(n,)``.
        second: Law of :math:`B`.

    Returns:
        A :class:`FreeDensity`. Bands are located on a grid of 2,000 points. Much narrower bands or
        gaps are not resolved; the ``status`` reports the missing mass.

    Reference: Voiculescu (1986); *Spectral Machine Learning*, section 3.5.1.

    Example:
        >>> law = free_sum(torch.tensor([-1.0, 1.0]), torch.tensor([-1.0, 1.0]))  # the arcsine law
        >>> round(float(law.cdf(torch.tensor(1.0))), 6)
        0.666667
    """
    return _free("sum", as_measure(first, "first"), as_measure(second, "second"))


def free_product(first: Measure, second: Measure) -> FreeDensity:
    r"""Return the law of :math:`A^{1/2} Q B Q^\top A^{1/2}` for large matrices and a uniform Q.

    A and B must not have negative eigenvalues.

    Args:
        first: Law of :math:`A`, as in :func:`free_sum`.
        second: Law of :math:`B`.
    """
    parts = as_measure(first, "first"), as_measure(second, "second")
    for name, part in zip(("first", "second"), parts, strict=True):
        check_nonnegative(name, part)
    return _free("product", *parts)


def generalized_marchenko_pastur(population: Measure, *, ratio: float) -> FreeDensity:
    r"""Return the law of sample covariances of a population with a given spectrum.

    .. math:: m(z) = \int \frac{dh(t)}{t (1 - q + q z m(z)) - z}, \qquad m = -G

    This law is the free product of the population and the Marchenko-Pastur law. For batches of
    generalised Gauss-Newton matrices, :math:`q = P / B`.

    Args:
        population: Eigenvalues of the covariance: a law, another density, a ``Spectrum``, or
            eigenvalues ``(n,)``.
        ratio: Ratio :math:`q` of the order of the matrix to the number of samples.

    Reference: Marchenko and Pastur (1967); Silverstein (1995); *Spectral Machine Learning*,
    equations 5.25 to 5.32.
    """
    known = as_measure(population, "population")
    check_nonnegative("population", known)
    return free_product(MarchenkoPastur(ratio=ratio), known)


def _free(kind: Kind, first: Transformable, second: Transformable) -> FreeDensity:
    parts = (first, second)
    points, masses = _atoms(kind, first.atoms, second.atoms)
    (a, b), (c, d) = first.support, second.support
    low, high = (a + c, b + d) if kind == "sum" else (a * c, b * d)
    bands, residual, tail = [], 0.0, 0.0
    if high > low:
        for left, right in _edges(kind, parts, low, high):
            band, *errors = _band(kind, parts, left, right)
            # Inside of a wide gap, roundoff looks like a band with a mass near 1e-18.
            if is_below(band.mass, TUNING.least):
                continue
            bands.append(band)
            residual, tail = max(residual, errors[0]), max(tail, errors[1])
    missing = abs(1 - float(masses.sum()) - math.fsum(band.mass for band in bands))
    return FreeDensity(
        kind=kind, parts=parts, bands=tuple(bands), points=points, masses=masses,
        status=_status(residual, tail, missing),
    )  # fmt: skip


def _status(residual: float, tail: float, missing: float) -> Status:
    message = (
        f"missing mass {missing:.1g}, error of the series {tail:.1g}, of the fixed points "
        f"{residual:.1g}"
    )
    if is_below(missing, TUNING.mass) and is_below(residual, TUNING.mass):
        return Status(outcome="converged", message=message)
    advice = "bands narrower than 1/2000 of the support, or singular edges, are not resolved"
    return Status(outcome="uncertain", message=message, advice=advice)


def _atoms(kind: Kind, first: Atoms, second: Atoms) -> Atoms:
    # Two atoms of masses m and m' give an atom of mass m + m' - 1 if m + m' > 1 (Bercovici and
    # Voiculescu 1998).
    both = first.masses[:, None] + second.masses - 1
    i, j = (both > 1e-12).nonzero(as_tuple=True)
    x, y = first.points[i], second.points[j]
    points, masses = (x + y if kind == "sum" else x * y), both[i, j]
    if kind == "product":
        # The kernel of a product is the larger of the two kernels (Belinschi 2003).
        kernels = [float(a.masses[a.points == 0].sum()) for a in (first, second)]
        points, masses = points[points != 0], masses[points != 0]
        if max(kernels) > 0:
            points = torch.cat([points, points.new_zeros(1)])
            masses = torch.cat([masses, masses.new_tensor([max(kernels)])])
    order = points.argsort()
    return Atoms(points[order], masses[order])


def _edges(
    kind: Kind, parts: tuple[Transformable, Transformable], low: float, high: float
) -> list[tuple[float, float]]:
    """Return the intervals on which the density is positive."""
    width = high - low

    def positive(x: Tensor) -> Tensor:
        G, before, _ = _solve(kind, parts, x)
        ratio = G.imag / before.imag
        return (ratio > TUNING.edge) & (ratio < TUNING.atom)

    angles = torch.linspace(0, math.pi, TUNING.scan, dtype=torch.float64)
    x = low + width * torch.sin(angles / 2).square()
    # Add a point outside of the support at each end, so that every band has two edges.
    x = torch.cat([x[:1] - 1e-3 * width, x, x[-1:] + 1e-3 * width])
    if kind == "product":
        x[0] = low  # 0 may be a hard edge, where the density is infinite
    inside = positive(x)
    inside[0] = inside[-1] = False
    changes = (inside[1:] != inside[:-1]).nonzero()[:, 0]
    rising = inside[changes + 1]
    left, right = x[changes], x[changes + 1]
    for _ in range(TUNING.bisections):
        middle = 0.5 * (left + right)
        move = positive(middle) == rising  # the middle and `right` are on the same side of the edge
        left, right = torch.where(move, left, middle), torch.where(move, middle, right)
    ends = (0.5 * (left + right)).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))


def _band(
    kind: Kind, parts: tuple[Transformable, Transformable], low: float, high: float
) -> tuple[Band, float, float]:
    """Return a band, the largest residual of its nodes, and the size of the tail of its series."""
    residuals = []

    def pdf(x: Tensor) -> Tensor:
        G, _, residual = _solve(kind, parts, x)
        residuals.append(residual)
        return -G.imag / math.pi

    band, tail = fit_band(pdf, low, high, last_nodes=TUNING.last_nodes, tail=TUNING.tail)
    return band, residuals[-1], tail


def _solve(
    kind: Kind, parts: tuple[Transformable, Transformable], z: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Return G at points of the closed upper half-plane, at the last height and the one before.

    The third result is the largest residual in units of the first law.
    """
    (a, b), (c, d) = parts[0].support, parts[1].support
    sizes = max(b - a, abs(a), abs(b)), max(d - c, abs(c), abs(d))
    width = sizes[0] + sizes[1] if kind == "sum" else sizes[0] * sizes[1]
    # w has the scale of the first law. In a product this is the scale of z over that of the second.
    unit = width if kind == "sum" else sizes[0]
    G, before, residual = _continue(kind, parts, z, width, unit, TUNING.heights)
    # Compute points that have left the fixed point again, with more heights.
    lost = (residual > TUNING.lost * unit).nonzero()[:, 0]
    if len(lost):
        # Four heights per decade. The last two stay the same, because they define edges.
        fine = [10 ** (-i / 4) for i in range(4 * 10)]
        again = _continue(kind, parts, z[lost], width, unit, (*fine, *TUNING.heights[-2:]))
        better = again[2] < residual[lost]
        for tensor, new in zip((G, before, residual), again, strict=True):
            tensor[lost[better]] = new[better]
    return G, before, float(residual.max()) / unit


def _continue(
    kind: Kind,
    parts: tuple[Transformable, Transformable],
    z: Tensor,
    width: float,
    unit: float,
    heights: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return G at the last height and the one before, and the residuals at the last height."""
    w = (z + 1j * width) * (unit / width)
    before = G = residual = w
    for height in heights:
        here = z + 1j * height * width
        atol = max(TUNING.residual, TUNING.loose * height if height > 1e-10 else 0.0)
        w, residual = _fixed_point(kind, parts, here, w, atol * unit)
        value = parts[0].stieltjes(w)
        before, G = G, value if kind == "sum" else w * value / here
    return G, before, residual


def _fixed_point(
    kind: Kind, parts: tuple[Transformable, Transformable], z: Tensor, w: Tensor, atol: float
) -> tuple[Tensor, Tensor]:
    """Return fixed points and their residuals, by Steffensen's iteration from ``w``."""
    w, residual = w.clone(), torch.full(z.shape, torch.inf, dtype=torch.float64)
    live, idle = torch.arange(len(z)), torch.zeros(len(z), dtype=torch.int64)
    here, plain, last = w.clone(), w.clone(), residual.clone()
    for _ in range(TUNING.max_steps):
        once = _map(kind, parts, z[live], here)
        error = (once - here).abs()
        better = error < residual[live]
        idle = torch.where(error < 0.9 * residual[live], 0, idle + 1)
        w[live[better]], residual[live[better]] = here[better], error[better]
        # Undo an extrapolation that increased the residual.
        worse = error > last
        twice = _map(kind, parts, z[live], once)
        # w - (f(w) - w)^2 / (f(f(w)) - 2 f(w) + w), moved into the region where w can lie: in a sum
        # not below z, in a product not below the ray through z
        leap = here - (once - here).square() / (twice - 2 * once + here)
        floor = z[live].imag * (1.0 if kind == "sum" else leap.abs() / z[live].abs())
        leap = torch.complex(leap.real, leap.imag.maximum(floor))
        here = torch.where(worse, plain, torch.where(leap.isfinite(), leap, twice))
        plain, last = twice, torch.where(worse, torch.inf, error)
        going = ~(residual[live] <= atol) & (idle < TUNING.patience)
        if not bool(going.any()):
            break
        # Continue with points that have not converged.
        live, idle = live[going], idle[going]
        here, plain, last = here[going], plain[going], last[going]
    return w, residual


def _map(kind: Kind, parts: tuple[Transformable, Transformable], z: Tensor, w: Tensor) -> Tensor:
    # D(w) = w - 1/G(w) tends to the mean far away. Its imaginary part is negative.
    first = w - 1 / parts[0].stieltjes(w)
    if kind == "sum":
        other = z - first
        return z - (other - 1 / parts[1].stieltjes(other))
    other = z / first
    return z / (other - 1 / parts[1].stieltjes(other))


def _angle(x: Tensor, band: Band) -> Tensor:
    # x = c - R cos f, solved for f / 2, which is accurate at both edges
    return 2 * torch.atan2((x - band.low).clamp(min=0).sqrt(), (band.high - x).clamp(min=0).sqrt())


def _cosines(f: Tensor, waves: Tensor) -> Tensor:
    orders = torch.arange(len(waves), dtype=torch.float64)
    return _series(f, lambda part: torch.cos(part[:, None] * orders) @ waves)


def _sines(f: Tensor, waves: Tensor) -> Tensor:
    orders = torch.arange(1, len(waves) + 1, dtype=torch.float64)
    return _series(f, lambda part: torch.sin(part[:, None] * orders) @ waves)


def _series(f: Tensor, evaluate: Callable[[Tensor], Tensor]) -> Tensor:
    # Evaluate in blocks of points, because each block needs memory of size (points, orders).
    parts = [evaluate(part) for part in f.reshape(-1).split(TUNING.block)]
    return torch.cat(parts).reshape(f.shape)
