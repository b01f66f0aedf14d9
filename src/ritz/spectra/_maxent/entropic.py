"""``EntropicDensity`` of maximum entropy: values, integrals, entropy and divergences."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from ritz._core.density import NO_ATOMS, Atoms, Density, as_points, interval_ends
from ritz._core.results import HasStatus, Status
from ritz._core.storage import storable
from ritz.spectra._maxent.dual import TUNING, Rule, chebyshev, log_prior, quadrature


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class EntropicDensity(HasStatus):
    r"""The density of largest entropy with given moments.

    .. math:: q(\lambda) = \frac{2}{b - a} \frac{q_0(x)}{Z}
        \exp\Big(-\sum_{i=1}^m \alpha_i T_i(x)\Big), \quad x = \frac{2 \lambda - (a + b)}{b - a}

    Attributes:
        alphas: Multipliers of the Chebyshev polynomials, ``(m,)``.
        log_partition: :math:`\log Z`.
        interval: ``(a, b)``, the support.
        prior: The prior :math:`q_0`.
        targets: Chebyshev moments of degree 1 to ``m`` that were passed, ``(m,)``.
        fitted: Chebyshev moments of the density, ``(m,)``.
        ridge: Variances :math:`r_i` to which the moments were matched, ``(m,)``.
        grid_size: Number of nodes of the quadrature.
        num_steps: Number of Newton steps.
        status: Whether the dual was solved, and how far the moments had to be relaxed.
        relaxation: Largest increase of a variance :math:`r_i` over the squared standard error; 0 if
            the moments did not have to be relaxed.
        matrix: Which matrix of a network or graph it is; ``None`` if unknown.
        batch_norm: Batch-norm mode of the network; ``None`` without batch norm.
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
    def atoms(self) -> Atoms:
        """No atoms: the entropy of a density with atoms is minus infinity."""
        return NO_ATOMS

    @property
    def moment_error(self) -> float:
        """Largest absolute difference between ``targets`` and ``fitted``."""
        return float((self.fitted - self.targets).abs().max())

    @property
    def entropy(self) -> float:
        r"""Shannon's :math:`-\int q \log q` for the flat prior, else :math:`-KL(q \| q_0)`."""
        # -<log q> = log Z + sum_i alpha_i <T_i> - <log q_0>
        inner = self.log_partition + float(self.alphas @ self.fitted)
        low, high = self.interval
        if isinstance(self.prior, str) and self.prior == "flat":
            return inner + math.log((high - low) / 2)
        return inner - float(self._rule().log_mass)

    def log_pdf(self, x: Tensor) -> Tensor:
        """Return the log density at points, minus infinity outside the interval."""
        x = as_points(x)
        low, high = self.interval
        inside = (x > low) & (x < high)
        safe = torch.where(inside, x, 0.5 * (low + high))
        mapped = (2 * safe - (low + high)) / (high - low)
        exponent = chebyshev(mapped, len(self.alphas))[..., 1:] @ self.alphas
        base = log_prior(self.prior, safe, self.interval)
        values = base - exponent - self.log_partition - math.log((high - low) / 2)
        return torch.where(inside, values, -torch.inf)

    def pdf(self, x: Tensor) -> Tensor:
        """Return the density at points."""
        return self.log_pdf(x).exp()

    def cdf(self, x: Tensor) -> Tensor:
        """Return the fraction of eigenvalues at or below points."""
        x = as_points(x)
        edges, below = self._panels()
        inside = x.clamp(*self.interval).reshape(-1)
        panel = (torch.searchsorted(edges, inside, right=True) - 1).clamp(0, len(edges) - 2)
        part = self._integral(edges[panel], inside)
        return ((below[panel] + part) / below[-1]).clamp(0.0, 1.0).reshape(x.shape)

    def mass(self, low: float, high: float) -> float:
        """Return the fraction of eigenvalues in ``(low, high]``."""
        ends = self.cdf(interval_ends(low, high))
        return float(ends[1] - ends[0])

    def expectation(self, function: Callable[[Tensor], Tensor]) -> float:
        """Return the mean of an elementwise function of an eigenvalue."""
        points, shares = self.discretized()
        return float((shares * function(points)).sum())

    def discretized(self) -> tuple[Tensor, Tensor]:
        """Return the nodes of the quadrature and the fraction of eigenvalues at each, ``(G,)``."""
        rule = quadrature(self.prior, self.interval, self.grid_size, len(self.alphas))
        # At the nodes in [-1, 1]: mapped to a short interval far from zero and back, as in the
        # density, they would have the roundoff of that, which narrow peaks magnify.
        exponents = rule.log_prior - rule.grid.polynomials[:, 1:] @ self.alphas
        return rule.points, (exponents + rule.grid.weights.log()).softmax(0)

    def moment(self, degree: int) -> float:
        """Return the mean of a power of an eigenvalue."""
        return self.expectation(lambda x: x**degree)

    def kl(self, other: Density) -> float:
        r"""Return the Kullback-Leibler divergence :math:`\int p \log(p/q)` to another density.

        It is infinite if the other density vanishes where this one does not.
        """

        def ratio(x: Tensor) -> Tensor:
            # p log(p/q) -> 0 as p -> 0: where p underflows the product would be NaN.
            here = self.log_pdf(x)
            there = other.log_pdf(x) if isinstance(other, EntropicDensity) else other.pdf(x).log()
            return torch.where(here > TUNING.underflow, here - there, 0.0)

        return self.expectation(ratio)

    def symmetric_kl(self, other: "EntropicDensity") -> float:
        """Return half the sum of the divergences to and from another entropic density."""
        return 0.5 * (self.kl(other) + other.kl(self))

    def __str__(self) -> str:
        low, high = self.interval
        prior = self.prior if isinstance(self.prior, str) else "user-defined prior"
        return (
            f"EntropicDensity on [{low:.4g}, {high:.4g}], {len(self.alphas)} moments ({prior}); "
            f"entropy {self.entropy:.4g}, largest moment error {self.moment_error:.1g}; "
            f"{self.status}"
        )

    def _rule(self) -> Rule:
        return quadrature(self.prior, self.interval, self.grid_size, 0)

    def _panels(self) -> tuple[Tensor, Tensor]:
        """Return edges of panels in which the density is smooth, and the integral up to each."""
        low, high = self.interval
        inner = self._rule().points
        edges = torch.cat([inner.new_tensor([low]), inner, inner.new_tensor([high])])
        parts = self._integral(edges[:-1], edges[1:])
        return edges, torch.cat([torch.zeros(1, dtype=torch.float64), parts.cumsum(0)])

    def _integral(self, low: Tensor, high: Tensor) -> Tensor:
        nodes, weights = (torch.from_numpy(array) for array in leggauss(TUNING.panel))
        half = 0.5 * (high - low)
        points = (low + half)[:, None] + half[:, None] * nodes
        return half * (self.pdf(points) @ weights)
