r"""Tracy-Widom laws of the largest eigenvalue of a random matrix, by Fredholm determinants."""

from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from numpy.polynomial import chebyshev, legendre
from scipy.special import airy
from torch import Tensor

from ritz._core.density import NO_ATOMS, Atoms
from ritz._core.storage import storable
from ritz.rmt._laws import Law

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the determinants and of the series that replace them."""

    # The panels of the series cover [-9, 15]: F_1(-9) is 1e-16, and 1 - F_1(15) is 1e-17.
    low: float = -9.0
    width: float = 2.0
    panels: int = 12
    # Degree in a panel: with 24 the last coefficients are roundoff.
    degree: int = 24
    # Nodes of the Gauss-Legendre rule: 40 and 120 differ by less than 1e-15.
    nodes: int = 48
    reach: float = 16.0


TUNING = Tuning()


@final
@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class TracyWidom(Law):
    r"""The Tracy-Widom law, of the largest eigenvalue of large random matrices.

    .. math:: n^{2/3} \Big(\frac{\lambda_1}{\sqrt v} - 2\Big) \to TW_\beta

    for a Wigner matrix with entries of variance :math:`v/n`. The distribution function is a
    Fredholm determinant, computed to about 1e-15.

    Attributes:
        beta: 1 for real symmetric matrices, 2 for complex Hermitian ones.

    Reference: Tracy and Widom (1996); Bornemann (2010), *On the numerical evaluation of Fredholm
    determinants*.

    Example:
        >>> float(TracyWidom(beta=1).ppf(0.95).round(decimals=4))
        0.9793
    """

    beta: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or self.beta not in (1, 2):
            raise ValueError(f"beta must be 1 or 2, got {self.beta!r}")

    @property
    def support(self) -> tuple[float, float]:
        """Interval that contains all but a mass of 1e-15."""
        return (-8.5, 13.5) if self.beta == 1 else (-7.0, 8.0)

    @property
    def atoms(self) -> Atoms:
        """No atoms: the law is continuous."""
        return NO_ATOMS

    def _moment(self, degree: int) -> float:
        """Return the mean of a power, by a Gauss-Legendre rule over the support."""
        nodes, weights = legendre.leggauss(TUNING.nodes)
        low, high = self.support
        x = torch.from_numpy(0.5 * (low + high) + 0.5 * (high - low) * nodes)
        shares = torch.from_numpy(0.5 * (high - low) * weights) * self._pdf(x)
        return float(shares @ x**degree)

    def _pdf(self, x: Tensor) -> Tensor:
        # F' = F (log F)'. The series is that of the logarithm of (log F)', so the density is
        # positive in both tails.
        inside, panel, t = _panel(x)
        log_cdf, log_slope = (_clenshaw(t, rows[panel]) for rows in _series(self.beta))
        return torch.where(inside, torch.exp(log_cdf + log_slope), 0.0)

    def _cdf(self, x: Tensor) -> Tensor:
        inside, panel, t = _panel(x)
        value = torch.exp(_clenshaw(t, _series(self.beta)[0][panel])).clamp(max=1.0)
        return torch.where(inside, value, (x > 0).double())


def _panel(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether points are inside of the panels, their panel, and their place in [-1, 1]."""
    position = (x - TUNING.low) / TUNING.width
    inside = (position > 0) & (position < TUNING.panels)
    panel = position.detach().nan_to_num().clamp(0, TUNING.panels - 1).long()
    return inside, panel, torch.where(inside, 2 * (position - panel) - 1, 0.0)


def _clenshaw(t: Tensor, coefficients: Tensor) -> Tensor:
    """Return Chebyshev series ``(*s, degree + 1)`` at points ``s``, differentiably."""
    first, second = torch.zeros_like(t), torch.zeros_like(t)
    for c in coefficients.unbind(-1)[:0:-1]:
        first, second = 2 * t * first - second + c, first
    return t * first - second + coefficients[..., 0]


@cache
def _series(beta: int) -> tuple[Tensor, Tensor]:
    """Return Chebyshev series of log F and of log (log F)', one row per panel.

    With one series per panel, errors of log F in the far left tail stay in their panel.
    """
    t = chebyshev.chebpts1(TUNING.degree + 1)
    low = TUNING.low + TUNING.width * np.arange(TUNING.panels)
    points = low[:, None] + 0.5 * TUNING.width * (t + 1)
    rows = np.array([_determinant(float(s), beta) for s in points.reshape(-1)])
    first, second = (column.reshape(points.shape).T for column in (rows[:, 0], np.log(rows[:, 1])))
    fits = (chebyshev.chebfit(t, columns, TUNING.degree).T for columns in (first, second))
    log_cdf, log_slope = (torch.from_numpy(np.ascontiguousarray(fit)) for fit in fits)
    return log_cdf, log_slope


def _determinant(s: float, beta: int) -> tuple[float, float]:
    r"""Return log F(s) and its derivative, by Fredholm determinants at Gauss-Legendre nodes.

    .. math:: F_1(s) = \det(I - H), \qquad F_2(s) = \det(I - H^2), \qquad
        H(x, y) = Ai(x + y + s) \text{ on } L^2(0, \infty)

    The square of H is the Airy kernel. The determinants converge exponentially in the number of
    nodes, as the kernel is entire.

    Reference: Bornemann (2010); Ferrari and Spohn (2005) for ``beta = 1``.
    """
    unit, weights = legendre.leggauss(TUNING.nodes)
    # H decays as exp(-2/3 (x + s)^(3/2)), which is negligible for x + s = 16.
    half = 0.5 * (TUNING.reach - min(s, 0.0))
    x, root = half * (unit + 1), np.sqrt(half * weights)
    # det(I - H) = det(delta_ij - w_i^(1/2) H(x_i, x_j) w_j^(1/2)), from the eigenvalues
    values, vectors = np.linalg.eigh(root[:, None] * airy(x[:, None] + x + s)[0] * root)
    ends = (root * airy(x + s)[0]) @ vectors
    # The derivatives of the logarithms are the kernels of H^2 (I - H^2)^-1 and of H (I - H)^-1 / 2
    # at the end point, here by the vector H(0, .).
    if beta == 2:
        return float(np.log1p(-(values**2)).sum()), float((ends**2 / (1 - values**2)).sum())
    slope = 0.5 * (airy(s)[0] + (ends**2 / (1 - values)).sum())
    return float(np.log1p(-values).sum()), float(slope)
