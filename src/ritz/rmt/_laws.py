"""``Law``, the base class of laws of eigenvalues; normal, semicircle and Marchenko-Pastur laws."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from scipy.special import wofz
from torch import Tensor

from ritz._core.checks import check_count, check_number, check_positive
from ritz._core.density import NO_ATOMS, Atoms, as_points, interval_ends
from ritz._core.random import resolve_generator
from ritz._core.storage import storable


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the inversion of distribution functions."""

    # Number of points of the table that brackets quantiles. Newton's method then takes three to
    # five steps for all laws of this package.
    table: int = 1025
    # Maximum number of steps of Newton's method with bisection. Bisection alone needs 45.
    max_steps: int = 60
    # Stop at this relative change of a quantile, which is a few eps.
    precision: float = 1e-15
    # Stop at this error of the level, which is the roundoff of the distribution function.
    level: float = 3e-16


TUNING = Tuning()


class Law(ABC):
    """Base class of laws of eigenvalues: density, distribution function, quantiles and samples.

    Points are tensors of any shape, and results are in float64. ``pdf`` and ``cdf`` are
    differentiable with respect to the points. ``cdf`` and ``mass`` include the ``atoms``; ``pdf``
    does not. Subclasses implement ``support``, ``atoms``, ``_moment``, ``_pdf`` and ``_cdf``.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def support(self) -> tuple[float, float]:
        """Interval outside of which the density is zero or negligible."""

    @property
    @abstractmethod
    def atoms(self) -> Atoms:
        """Points of positive mass."""

    @abstractmethod
    def _moment(self, degree: int) -> float:
        """Return the mean of ``eigenvalue ** degree``, for a checked degree."""

    @abstractmethod
    def _pdf(self, x: Tensor) -> Tensor:
        """Return the density at float64 points."""

    @abstractmethod
    def _cdf(self, x: Tensor) -> Tensor:
        """Return the fraction at or below float64 points, without derivatives."""

    def moment(self, degree: int) -> float:
        """Return the mean of ``eigenvalue ** degree``, for a degree of at least 0."""
        degree = check_count("degree", degree, low=0)
        return self._moment(degree)

    def pdf(self, x: Tensor) -> Tensor:
        """Return the density at the points."""
        points = as_points(x)
        # The formulas treat NaN as a point outside of the support.
        return torch.where(points.isnan(), points, self._pdf(points))

    def cdf(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below each point."""
        value: Tensor = _Integral.apply(as_points(x), self)  # type: ignore[no-untyped-call]
        return value

    def mass(self, low: float, high: float) -> float:
        """Return the fraction of eigenvalues in ``(low, high]``."""
        ends = self._cdf(interval_ends(low, high))
        return float(ends[1] - ends[0])

    def ppf(self, levels: float | Tensor) -> Tensor:
        """Return quantiles: the smallest points at which ``cdf`` reaches the levels.

        The levels 0 and 1 give the ends of the support.

        Args:
            levels: Levels between 0 and 1, of any shape.
        """
        # Convert to float64 at once, because in float32 a level of 1 - 1e-8 would be 1.
        p = as_points(levels, "levels").detach()
        if not bool(((p >= 0) & (p <= 1)).all()):
            raise ValueError(f"levels must be between 0 and 1, got {p.min():.6g} to {p.max():.6g}")
        return _quantiles(self, p.reshape(-1)).reshape(p.shape)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Return ``n`` independent draws ``(n,)`` by inversion.

        Eigenvalues of one matrix are not independent: they repel each other.

        Args:
            n: Number of draws.
            generator: Source of randomness. Defaults to a new generator with seed 0.
        """
        n = check_count("n", n)
        generator = resolve_generator(generator)
        where: Any = {"generator": generator, "device": generator.device}
        return self.ppf(torch.rand(n, dtype=torch.float64, **where).cpu())


class _Integral(torch.autograd.Function):
    # The derivative of the distribution function is the density. Automatic differentiation of the
    # formulas would give infinity times zero at the edges.

    @staticmethod
    def forward(ctx: Any, x: Tensor, law: Law) -> Tensor:
        ctx.save_for_backward(x)
        ctx.law = law
        return torch.where(x.isnan(), x, law._cdf(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.law.pdf(x), None


def _quantiles(law: Law, p: Tensor) -> Tensor:
    low, high = law.support
    # The nodes are denser near the ends, where densities behave like square roots.
    angles = torch.linspace(0, math.pi, TUNING.table, dtype=torch.float64)
    nodes = low + (high - low) * torch.sin(angles / 2).square()
    index = torch.searchsorted(law._cdf(nodes), p).clamp(1, TUNING.table - 1)
    left, right = nodes[index - 1], nodes[index]
    x, live = 0.5 * (left + right), torch.arange(len(p))
    size = TUNING.precision * max(abs(low), abs(high))
    for _ in range(TUNING.max_steps):
        here, level = x[live], p[live]
        value = law._cdf(here)
        left, right = (
            torch.where(value < level, here, left),
            torch.where(value < level, right, here),
        )
        step = here - (value - level) / law._pdf(here)
        # Bisect if Newton's step leaves the bracket, as it does at atoms.
        inside = (step > left) & (step < right)
        new = torch.where(inside, step, 0.5 * (left + right))
        # Stop if the level is reached up to roundoff, or if the point no longer changes.
        met = (value - level).abs() <= TUNING.level
        x[live] = torch.where(met, here, new)
        going = ~met & ((new - here).abs() > size)
        live, left, right = live[going], left[going], right[going]
        if not len(live):
            break
    # The quantile of all levels within the jump at an atom is the atom.
    for point, mass in zip(*law.atoms, strict=True):
        top = law._cdf(point)
        x = torch.where((p <= top) & (p > top - mass), point, x)
    # Near an edge, the distribution function is constant up to roundoff; use the known ends.
    return torch.where(p == 0, low, torch.where(p == 1, high, x.clamp(low, high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SymmetricLaw(Law):
    """A continuous law that is symmetric around its mean."""

    mean: float = 0.0
    variance: float = 1.0

    def __post_init__(self) -> None:
        check_number("mean", self.mean)
        check_positive("variance", self.variance)

    @property
    def atoms(self) -> Atoms:
        """No atoms: the law is continuous."""
        return NO_ATOMS

    @staticmethod
    @abstractmethod
    def _central(j: int) -> int:
        """Return the central moment of degree ``2 j`` for a variance of 1."""

    def _moment(self, degree: int) -> float:
        # sum_j binom(k, 2j) mu^(k - 2j) v^j c_j
        terms = (
            math.comb(degree, 2 * j)
            * self.mean ** (degree - 2 * j)
            * self.variance**j
            * self._central(j)
            for j in range(degree // 2 + 1)
        )
        return math.fsum(terms)


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Normal(_SymmetricLaw):
    r"""The normal law.

    Attributes:
        mean: Mean.
        variance: Variance.
    """

    @property
    def support(self) -> tuple[float, float]:
        """Interval of 8.3 standard deviations around the mean; a mass of 1e-16 lies outside."""
        reach = 8.3 * math.sqrt(self.variance)
        return self.mean - reach, self.mean + reach

    @staticmethod
    def _central(j: int) -> int:
        # (2j - 1)!!
        return math.prod(range(1, 2 * j, 2))

    def stieltjes(self, z: Tensor) -> Tensor:
        r"""Return :math:`G(z) = -i \sqrt{\pi / 2v}\, w((z - \mu)/\sqrt{2v})`, by Faddeeva's w."""
        scaled = (as_upper(z) - self.mean) / math.sqrt(2 * self.variance)
        values = torch.as_tensor(wofz(scaled.numpy()))  # a number for a single point
        return reflected(z, -1j * math.sqrt(math.pi / (2 * self.variance)) * values)

    def _pdf(self, x: Tensor) -> Tensor:
        z = (x - self.mean) / math.sqrt(self.variance)
        return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi * self.variance)

    def _cdf(self, x: Tensor) -> Tensor:
        value: Tensor = torch.special.ndtr((x - self.mean) / math.sqrt(self.variance))
        return value


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Semicircle(_SymmetricLaw):
    r"""Wigner's semicircle, the law of symmetric matrices with independent entries.

    .. math:: p(x) = \frac{2}{\pi R^2} \sqrt{R^2 - (x - \mu)^2}, \qquad R = 2 \sqrt v

    Entries have variance :math:`v / n`. Homogeneous fluctuations of a batch Hessian have
    :math:`v = P \sigma^2 / b`.

    Attributes:
        mean: Centre :math:`\mu`.
        variance: Variance :math:`v` of the law.

    Reference: *Spectral Machine Learning*, Theorems 9 and 13.
    """

    @property
    def support(self) -> tuple[float, float]:
        """The two edges of the semicircle."""
        radius = 2 * math.sqrt(self.variance)
        return self.mean - radius, self.mean + radius

    @staticmethod
    def _central(j: int) -> int:
        # The Catalan number C_j
        return math.comb(2 * j, j) // (j + 1)

    def stieltjes(self, z: Tensor) -> Tensor:
        r"""Return :math:`G(z) = 2 / (z - \mu + \sqrt{z - a} \sqrt{z - b})`, ``(k,)`` complex."""
        # Rationalised, because (z - root) / 2v cancels for large z. The product of two roots
        # selects the right branch; the root of the product would not.
        low, high = self.support
        w = as_upper(z)
        return reflected(z, 2 / (w - self.mean + torch.sqrt(w - low) * torch.sqrt(w - high)))

    def _pdf(self, x: Tensor) -> Tensor:
        radius = 2 * math.sqrt(self.variance)
        # Mask before taking the root: its gradient at negative numbers would be NaN.
        t = (x - self.mean) / radius
        inside = t.abs() < 1
        root = torch.sqrt(torch.where(inside, (1 - t) * (1 + t), 1.0))
        return torch.where(inside, 2 / (math.pi * radius) * root, 0.0)

    def _cdf(self, x: Tensor) -> Tensor:
        # 1/2 + (t sqrt(1 - t^2) + arcsin t) / pi
        t = ((x - self.mean) / (2 * math.sqrt(self.variance))).clamp(-1, 1)
        return 0.5 + (t * torch.sqrt((1 - t) * (1 + t)) + torch.asin(t)) / math.pi


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class MarchenkoPastur(Law):
    r"""The Marchenko-Pastur law of sample covariances :math:`X X^\top / T`, ``X`` of ``(n, T)``.

    .. math:: p(x) = \frac{\sqrt{(x - a)(b - x)}}{2 \pi q s x}, \qquad
        a, b = s (1 \mp \sqrt q)^2, \qquad q = n / T

    For :math:`q > 1` a mass of :math:`1 - 1/q` lies at 0.

    Attributes:
        ratio: Ratio :math:`q` of the order of the matrix to the number of samples.
        scale: Variance :math:`s` of the entries of ``X``.

    Reference: *Spectral Machine Learning*, Theorem 10 and equation 5.25.
    """

    ratio: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("ratio", self.ratio)
        check_positive("scale", self.scale)

    @property
    def edges(self) -> tuple[float, float]:
        """Edges of the continuous part."""
        root = math.sqrt(self.ratio)
        return self.scale * (1 - root) ** 2, self.scale * (1 + root) ** 2

    @property
    def support(self) -> tuple[float, float]:
        """The edges of the continuous part. The lower one is replaced by 0 if 0 is an atom."""
        low, high = self.edges
        return (0.0 if self.ratio > 1 else low), high

    @property
    def atoms(self) -> Atoms:
        """The mass at 0, if there are fewer samples than dimensions."""
        # The rank is at most T = n/q.
        if self.ratio <= 1:
            return NO_ATOMS
        points = torch.zeros(1, dtype=torch.float64)
        return Atoms(points, points + (1 - 1 / self.ratio))

    def _moment(self, degree: int) -> float:
        r"""Return :math:`s^k \sum_{r < k} \frac{q^r}{r + 1} \binom kr \binom{k - 1}r`."""
        k = degree
        terms = (
            self.ratio**r * math.comb(k, r) * math.comb(k - 1, r) / (r + 1)
            for r in range(max(k, 0))
        )
        return self.scale**k * math.fsum(terms) if k else 1.0

    def stieltjes(self, z: Tensor) -> Tensor:
        r"""Return :math:`G(z) = 2 / (z - s (1 - q) + \sqrt{z - a} \sqrt{z - b})`, complex."""
        low, high = self.edges
        w = as_upper(z)
        root = torch.sqrt(w - low) * torch.sqrt(w - high)
        plus, minus = (
            w - self.scale * (1 - self.ratio) + root,
            w - self.scale * (1 - self.ratio) - root,
        )
        # Of two equal forms, use the one that does not cancel: `plus` cancels near an atom at 0,
        # and `minus` far from the bulk.
        value = torch.where(
            plus.abs() > minus.abs(), 2 / plus, minus / (2 * self.ratio * self.scale * w)
        )
        return reflected(z, value)

    def _pdf(self, x: Tensor) -> Tensor:
        low, high = self.edges
        inside = (x > low) & (x < high)
        safe = torch.where(inside, x, 0.5 * (low + high))
        root = torch.sqrt((safe - low) * (high - safe))
        return torch.where(inside, root / (2 * math.pi * self.ratio * self.scale * safe), 0.0)

    def _cdf(self, x: Tensor) -> Tensor:
        # With x = s (1 + q - 2 sqrt(q) cos f), the density is proportional to
        # sin^2 f / (1 + r^2 - 2 r cos f) df, which is the same for r = sqrt(q) and r = 1/sqrt(q).
        low, high = self.edges
        r = min(math.sqrt(self.ratio), 1 / math.sqrt(self.ratio))
        f = 2 * torch.asin(torch.sqrt(((x - low) / (high - low)).clamp(0, 1)))
        # Its integral: (r^2 f + r sin f - (1 - r^2) arctan(r sin f / (1 - r cos f))) / (pi r^2)
        sine, angle = torch.sin(f), torch.atan2(r * torch.sin(f), 1 - r * torch.cos(f))
        part = (f + (sine / r - (1 - r**2) * angle / r**2)) / math.pi
        if self.ratio <= 1:
            return part.clamp(0, 1)
        # The nonzero eigenvalues have the mass 1/q, and 0 has the mass 1 - 1/q.
        return torch.where(x < 0, 0.0, 1 - (1 - part.clamp(0, 1)) / self.ratio)


def as_upper(z: Tensor) -> Tensor:
    """Return points reflected to the upper half-plane, where the formulas hold."""
    w = torch.as_tensor(z, dtype=torch.complex128)
    return torch.where(w.imag < 0, w.conj(), w).resolve_conj()


def reflected(z: Tensor, values: Tensor) -> Tensor:
    """Return transforms at ``z`` from those at :func:`as_upper` points: G(conj z) = conj G(z)."""
    below = torch.as_tensor(z, dtype=torch.complex128).imag < 0
    return torch.where(below, values.conj(), values).resolve_conj()
