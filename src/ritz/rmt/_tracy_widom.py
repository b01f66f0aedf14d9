r"""The Tracy-Widom laws: the largest eigenvalue of a large random matrix, centred and scaled."""

from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import airy

Array = npt.NDArray[np.float64]
# Beyond this point the determinants are 1 in double precision: 1 - F_1(16) is about 1e-20.
RIGHT = 16.0
# Nodes of the Gauss-Legendre rule. Bornemann's error is below 1e-14 from 40 nodes on for points
# right of -10 (compared with 120 nodes).
NODES = 64


@cache
def _rule() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return nodes, weights


def fredholm_cdf(points: Array, beta: int) -> Array:
    r"""Return the Tracy-Widom distribution function at points ``(k,)``, by Fredholm determinants.

    .. math:: F_2(s) = \det(I - K_{Ai})_{L^2(s, \infty)}, \qquad
        K_{Ai}(x, y) = \frac{Ai(x) Ai'(y) - Ai'(x) Ai(y)}{x - y}, \qquad
        F_1(s) = \det(I - T)_{L^2(s, \infty)}, \qquad T(x, y) = \tfrac12 Ai\big(\tfrac{x + y}2\big)

    A determinant is that of the kernel at the nodes of a Gauss-Legendre rule. It converges
    exponentially in the number of nodes, since the kernels are entire.

    Reference: Bornemann (2010), *On the numerical evaluation of Fredholm determinants*; Ferrari and
    Spohn (2005) for the kernel of ``beta = 1``.
    """
    unit, weights = _rule()
    values = np.ones_like(points)
    for i in np.flatnonzero(points < RIGHT):
        half = 0.5 * (RIGHT - points[i])
        x = points[i] + half * (unit + 1)
        root = np.sqrt(half * weights)
        kernel = _orthogonal(x) if beta == 1 else _unitary(x)
        # det(I - K) = det(delta_ij - w_i^(1/2) K(x_i, x_j) w_j^(1/2)) + exponentially small
        values[i] = np.linalg.det(np.eye(len(x)) - root[:, None] * kernel * root)
    return values


def _orthogonal(x: Array) -> Array:
    return np.asarray(0.5 * airy(0.5 * (x[:, None] + x))[0])


def _unitary(x: Array) -> Array:
    value, slope = airy(x)[:2]
    gaps = x[:, None] - x + np.eye(len(x))
    kernel = (value[:, None] * slope - slope[:, None] * value) / gaps
    # K(x, x) = Ai'(x)^2 - x Ai(x)^2, the limit on the diagonal
    np.fill_diagonal(kernel, slope**2 - x * value**2)
    return np.asarray(kernel)


@cache
def fredholm_ppf(level: float, beta: int) -> float:
    """Return the quantile of a level between 1e-15 and 1 - 1e-15, by bisection and secants."""
    return float(brentq(lambda s: float(fredholm_cdf(np.array([s]), beta)[0]) - level, -12.0, 12.0))
