"""The density of maximum entropy, and what can be asked of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from ritz._core.checks import check_count
from ritz._core.density import Density, as_points
from ritz._core.random import resolve_generator
from ritz._core.results import Status
from ritz._core.storage import storable
from ritz.spectra._maxent.dual import Rule, chebyshev, log_prior, quadrature

PANEL = 5  # points of the Gauss rule between neighbouring nodes
UNDERFLOW = -650.0  # below it, a density times a weight of the quadrature may be zero


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class EntropicDensity:
    r"""The density of largest entropy with given moments.

    .. math:: q(\lambda) = \frac{2}{b - a} \frac{q_0(x)}{Z}
        \exp\Big(-\sum_{i=1}^m \alpha_i T_i(x)\Big), \quad x = \frac{2 \lambda - (a + b)}{b - a}

    Attributes:
        alphas: Multipliers of the Chebyshev polynomials, ``(m,)``.
        log_partition: :math:`\log Z`.
        interval: ``(a, b)``, its support.
        prior: The base measure :math:`q_0`.
        targets: Chebyshev moments asked for, degree 1 to ``m``, ``(m,)``.
        fitted: Chebyshev moments it has, ``(m,)``.
        ridge: Variances :math:`r_i` within which moments were matched, ``(m,)``.
        grid_size: Nodes of the quadrature that it was computed with.
        num_steps: Newton steps.
        status: Whether the dual was solved, how far moments were relaxed, and how far off they are
            then.
        relaxation: By how much the largest variance exceeds what was asked for; 0 where no moment
            was relaxed.
        matrix: Which matrix of a network or graph it is; ``None`` if unknown.
        batch_norm: The batch-norm mode of the network; ``None`` without batch norm.
    """

    alphas: Tensor
    log_partition: float
    interval: tuple[float, float]
    prior: Any
    targets: Tensor
    fitted: Tensor
    ridge: Tensor
    grid_size: int
    num_steps: int
    status: Status
    relaxation: float = 0.0
    matrix: str | None = None
    batch_norm: str | None = None

    @property
    def support(self) -> tuple[float, float]:
        """The interval."""
        return self.interval

    @property
    def moment_error(self) -> float:
        """Largest difference between a Chebyshev moment asked for and the one it has."""
        return float((self.fitted - self.targets).abs().max())

    @property
    def chi_squared(self) -> float:
        r"""Distance of the moments, in their errors, squared: :math:`\sum r_i \alpha_i^2`."""
        return float((self.ridge * self.alphas.square()).sum())

    @property
    def entropy(self) -> float:
        r"""Shannon's :math:`-\int q \log q` for the flat prior, else :math:`-KL(q \| q_0)`."""
        inner = self.log_partition + float(self.alphas @ self.fitted)
        low, high = self.interval
        if isinstance(self.prior, str) and self.prior == "flat":
            return inner + math.log((high - low) / 2)
        return inner - float(self._rule().log_mass)

    def log_pdf(self, x: Tensor) -> Tensor:
        """Logarithm of the density at the points, minus infinity outside the interval."""
        x = as_points(x)
        low, high = self.interval
        inside = (x > low) & (x < high)
        safe = torch.where(inside, x, 0.5 * (low + high))
        mapped = (2 * safe - (low + high)) / (high - low)
        exponent = chebyshev(mapped, len(self.alphas))[..., 1:] @ self.alphas
        base = log_prior(self.prior, safe, self.interval)
        found = base - exponent - self.log_partition - math.log((high - low) / 2)
        return torch.where(inside, found, -torch.inf)

    def pdf(self, x: Tensor) -> Tensor:
        """Density at the points."""
        return self.log_pdf(x).exp()

    def cdf(self, x: Tensor) -> Tensor:
        """Share of the eigenvalues at or below the points."""
        x = as_points(x)
        edges, below = self._panels()
        inside = x.clamp(*self.interval).reshape(-1)
        panel = (torch.searchsorted(edges, inside, right=True) - 1).clamp(0, len(edges) - 2)
        part = self._integral(edges[panel], inside)
        return ((below[panel] + part) / below[-1]).clamp(0.0, 1.0).reshape(x.shape)

    def quantile(self, share: Tensor) -> Tensor:
        """Points below which these shares of the eigenvalues lie."""
        share = as_points(share)
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise ValueError("share must be between 0 and 1")
        edges, below = self._panels()
        wanted = below[-1] * share.reshape(-1)
        panel = (torch.searchsorted(below, wanted) - 1).clamp(0, len(edges) - 2)
        return self._inverse(edges[panel], edges[panel + 1], wanted - below[panel]).reshape(
            share.shape
        )

    def sample(self, count: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Independent draws, ``(count,)``."""
        check_count("count", count)
        generator = resolve_generator(generator)
        return self.quantile(torch.rand(count, generator=generator, dtype=torch.float64))

    def mass(self, low: float, high: float) -> float:
        """Share of the eigenvalues in ``(low, high]``."""
        ends = self.cdf(torch.tensor([low, high], dtype=torch.float64))
        return float(ends[1] - ends[0])

    def expectation(self, function: Callable[[Tensor], Tensor]) -> float:
        """Mean of an elementwise function of an eigenvalue."""
        rule = self._rule()
        scale = (self.interval[1] - self.interval[0]) / 2
        shares = rule.grid.weights * scale * self.pdf(rule.points)
        return float((shares * function(rule.points)).sum())

    def moment(self, degree: int) -> float:
        """Mean of that power of an eigenvalue."""
        return self.expectation(lambda x: x**degree)

    def kl(self, other: Density) -> float:
        r"""Kullback-Leibler divergence :math:`\int p \log(p/q)` to another density.

        Infinite where the other vanishes and this does not.
        """
        log_other = partial(_log_pdf, other)

        def ratio(x: Tensor) -> Tensor:
            # No mass, no divergence: where the density underflows, zero times infinity is zero.
            here = self.log_pdf(x)
            return torch.where(here > UNDERFLOW, here - log_other(x), 0.0)

        return self.expectation(ratio)

    def symmetric_kl(self, other: "EntropicDensity") -> float:
        """Half the sum of the divergences to and from another such density."""
        return 0.5 * (self.kl(other) + other.kl(self))

    def raise_if_failed(self) -> None:
        """Raise :class:`ritz.NotConvergedError` unless the dual was solved."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        low, high = self.interval
        prior = self.prior if isinstance(self.prior, str) else "own prior"
        return (
            f"EntropicDensity on [{low:.4g}, {high:.4g}], {len(self.alphas)} moments ({prior}); "
            f"entropy {self.entropy:.4g}, largest moment error {self.moment_error:.1g}; "
            f"{self.status}"
        )

    def _rule(self) -> Rule:
        return quadrature(self.prior, self.interval, self.grid_size, 0)

    def _panels(self) -> tuple[Tensor, Tensor]:
        """Edges between which the density is smooth, and the integral up to each."""
        low, high = self.interval
        inner = self._rule().points
        edges = torch.cat([inner.new_tensor([low]), inner, inner.new_tensor([high])])
        parts = self._integral(edges[:-1], edges[1:])
        return edges, torch.cat([torch.zeros(1, dtype=torch.float64), parts.cumsum(0)])

    def _inverse(self, low: Tensor, high: Tensor, mass: Tensor) -> Tensor:
        """Where the integrals from ``low`` reach a mass, before ``high``."""
        begin, found, live = low, 0.5 * (low + high), torch.arange(len(mass))
        for _ in range(60):  # Newton's steps, or bisection where they lead out of what is left
            x = found[live]
            gap = self._integral(begin[live], x) - mass[live]
            low, high = torch.where(gap < 0, x, low), torch.where(gap < 0, high, x)
            following = x - gap / self.pdf(x)
            inside = (following >= low) & (following <= high)
            found[live] = torch.where(inside, following, 0.5 * (low + high))
            going = (gap.abs() > 1e-15) & (high - low > 1e-15 * x.abs())
            if not bool(going.any()):
                break
            live, low, high = live[going], low[going], high[going]
        return found

    def _integral(self, low: Tensor, high: Tensor) -> Tensor:
        nodes, weights = (torch.from_numpy(array) for array in leggauss(PANEL))
        half = 0.5 * (high - low)
        points = (low + half)[:, None] + half[:, None] * nodes
        return half * (self.pdf(points) @ weights)


def _log_pdf(density: Density, x: Tensor) -> Tensor:
    return density.log_pdf(x) if isinstance(density, EntropicDensity) else density.pdf(x).log()
