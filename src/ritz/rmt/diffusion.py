r"""SGD on a quadratic with noise of any covariance: expected losses, and its diffusion limit.

.. math:: \theta_{k+1} = \theta_k - \alpha_k A \theta_k + \alpha_k C \xi_{k+1}, \qquad
    L(\theta) = \tfrac12 \theta^\top A \theta, \qquad
    d\theta = -A \theta\, dt + \sqrt\alpha\, C\, dW

:mod:`ritz.rmt.quadratic` treats noise that is independent in the eigen-directions.

Reference: Wen et al., *Interplay between optimization and generalization of stochastic gradient
descent with covariance noise*, section 4 and appendices A and B.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz._core.checks import (
    check_count,
    check_finite,
    check_positive,
    check_range,
    check_type,
    short,
)
from ritz._core.density import as_points
from ritz._core.random import resolve_generator
from ritz._core.storage import storable


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussian:
    """A normal distribution in ``d`` dimensions: ``mean`` ``(d,)``, ``covariance`` ``(d, d)``."""

    mean: Tensor
    covariance: Tensor


def noise_cost(curvature: Tensor, factor: Tensor) -> float:
    r"""Return :math:`\operatorname{tr} C^\top A C`, on which the loss under noise depends.

    It is :math:`|A|_F^2` for :math:`C = A^{1/2}`, and :math:`|\operatorname{diag} A|_F^2` for
    :math:`C = (\operatorname{diag} A)^{1/2}`, which has the same total variance
    :math:`\operatorname{tr} C^\top C = \operatorname{tr} A`.

    Args:
        curvature: :math:`A`, symmetric positive definite, ``(d, d)``.
        factor: :math:`C`, ``(d, r)``: the noise has the covariance :math:`C C^\top`.

    Reference: Section 4, equation 6.
    """
    A, C = _matrices(curvature, factor)
    # tr C'(A C) without forming the product of order r
    return float((C * (A @ C)).sum())


def decaying_rates(curvature: Tensor, *, num_steps: int, offset: float | None = None) -> Tensor:
    r"""Return the decaying learning rates of Theorem 4.1.

    .. math:: \alpha_k = \frac2{(k + \gamma) \lambda_{\min}}

    Args:
        curvature: :math:`A`, ``(d, d)``.
        num_steps: Number of rates, ``k`` from 0.
        offset: :math:`\gamma`. Defaults to the smallest for which no rate exceeds
            :math:`1/\lambda_{\max}`, twice the condition number. A smaller one is an error, as
            the theorem does not hold for it.
    """
    num_steps = check_count("num_steps", num_steps)
    values = torch.linalg.eigvalsh(positive_definite("curvature", curvature))
    gamma = _offset(values, offset)
    # The first rate is 2 / (gamma lambda_min): 1/lambda_max for the default.
    steps = torch.arange(num_steps, dtype=torch.float64)
    rates: Tensor = 2 / ((steps + gamma) * values[0])
    return rates


def loss_bound(
    curvature: Tensor, factor: Tensor, *, start: Tensor, step: int, offset: float | None = None
) -> float:
    r"""Return the bound of Theorem 4.1 for :math:`\mathbb{E} L(\theta_k)` with decaying rates.

    .. math:: \mathbb{E} L(\theta_k) \le \frac\nu{k + \gamma}, \qquad
        \nu = \max\Big(\frac{2 \operatorname{tr} C^\top A C}{\lambda_{\min}^2},
        \gamma L(\theta_0)\Big)

    The bound increases with :func:`noise_cost`. So do the losses themselves at a constant rate, but
    not always at decaying rates: noise costs most in steep directions, where it also decays
    fastest.

    Args:
        curvature: :math:`A`, ``(d, d)``.
        factor: :math:`C`, ``(d, r)``.
        start: :math:`\theta_0`, ``(d,)``.
        step: Number ``k`` of steps that were done.
        offset: :math:`\gamma`, as in :func:`decaying_rates`.

    Reference: Theorem 4.1.
    """
    step = check_count("step", step, low=0)
    A = positive_definite("curvature", curvature)
    values, theta = torch.linalg.eigvalsh(A), check_start(start, A)
    gamma = _offset(values, offset)
    # nu, and the induction E L_{k+1} <= (1 - alpha_k lambda_min) E L_k + alpha_k^2 tr(C'AC) / 2
    first = 2 * noise_cost(A, factor) / float(values[0]) ** 2
    return max(first, 0.5 * gamma * float(theta @ A @ theta)) / (step + gamma)


def expected_losses(
    curvature: Tensor, factor: Tensor, *, start: Tensor, rates: Sequence[float] | Tensor
) -> Tensor:
    r"""Return :math:`\mathbb{E} L(\theta_k)` after 0, 1, ... steps, ``(len(rates) + 1,)``, exactly.

    .. math:: S_{k+1} = (1 - \alpha_k A) S_k (1 - \alpha_k A) + \alpha_k^2 C C^\top, \qquad
        \mathbb{E} L = \tfrac12 \operatorname{tr} A S

    with the second moments :math:`S_k = \mathbb{E} \theta_k \theta_k^\top`. Only their diagonal in
    the eigenbasis of A is needed, so a step costs :math:`O(d)` operations.

    Args:
        curvature: :math:`A`, ``(d, d)``.
        factor: :math:`C`, ``(d, r)``.
        start: :math:`\theta_0`, ``(d,)``.
        rates: Learning rates, one per step.

    Reference: Appendix A, equation 9.
    """
    A, C = _matrices(curvature, factor)
    # In the eigenbasis tr A S = sum_i lambda_i S_ii, and the diagonal of S follows from itself.
    values, vectors = torch.linalg.eigh(A)
    second = (vectors.T @ check_start(start, A)).square()
    noise = (vectors.T @ C).square().sum(1)
    losses = [0.5 * values @ second]
    for rate in _rates(rates):
        second = (1 - rate * values).square() * second + rate**2 * noise
        losses.append(0.5 * values @ second)
    return torch.stack(losses)


def simulate(
    curvature: Tensor,
    factor: Tensor,
    *,
    start: Tensor,
    rates: Sequence[float] | Tensor,
    num_paths: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Simulate runs with Gaussian noise and return their ends, ``(num_paths, d)``.

    Args:
        curvature: :math:`A`, ``(d, d)``.
        factor: :math:`C`, ``(d, r)``.
        start: :math:`\theta_0`, ``(d,)``.
        rates: Learning rates, one per step.
        num_paths: Number of independent runs.
        generator: Source of the noise. Defaults to a new generator with seed 0.
    """
    num_paths = check_count("num_paths", num_paths)
    A, C = _matrices(curvature, factor)
    generator = resolve_generator(generator)
    theta = check_start(start, A).expand(num_paths, -1).clone()
    for rate in _rates(rates):
        shape = (num_paths, C.shape[1])
        drawn = torch.randn(
            shape, generator=generator, dtype=torch.float64, device=generator.device
        )
        # theta <- theta - alpha A theta + alpha C xi, a row per path
        theta = theta - rate * theta @ A + rate * drawn.cpu() @ C.T
    return theta


def ornstein_uhlenbeck(
    curvature: Tensor,
    factor: Tensor,
    *,
    time: float,
    rate: float = 1.0,
    start: Tensor | None = None,
) -> Gaussian:
    r"""Return the distribution of the weights at a time, for continuous time.

    .. math:: d\theta = -A \theta\, dt + \sqrt\alpha\, C\, dW, \qquad
        \mu(t) = e^{-A t} \theta_0, \qquad
        \dot\Sigma = -(A \Sigma + \Sigma A) + \alpha C C^\top, \qquad
        \tilde\Sigma_{ij}(t) = \alpha (\tilde C \tilde C^\top)_{ij}
        \frac{1 - e^{-(\lambda_i + \lambda_j) t}}{\lambda_i + \lambda_j}

    in the eigenbasis of A. After SGD with rate :math:`\alpha` for ``k`` steps the time is
    :math:`k \alpha`. At an infinite time, :math:`\Sigma` solves Lyapunov's equation.

    Args:
        curvature: :math:`A`, symmetric positive definite, ``(d, d)``.
        factor: :math:`C`, ``(d, r)``.
        time: Time ``t``, or ``math.inf``.
        rate: Learning rate :math:`\alpha`.
        start: :math:`\theta_0`, ``(d,)``. Defaults to the origin.

    Reference: Appendix B, equation 15.
    """
    check_range("time", time, low=0.0)
    check_positive("rate", rate, zero=True)
    A, C = _matrices(curvature, factor)
    values, vectors = torch.linalg.eigh(A)
    rotated = vectors.T @ C
    # int_0^t exp(-(lambda_i + lambda_j) u) du; at infinity, Lyapunov's 1/(lambda_i + lambda_j)
    sums = values[:, None] + values
    # expm1, since 1 - exp(-x) cancels for small times
    growth = -torch.expm1(-sums * time) / sums
    covariance = vectors @ (rate * (rotated @ rotated.T) * growth) @ vectors.T
    theta = torch.zeros_like(values) if start is None else check_start(start, A)
    mean = vectors @ (torch.exp(-values * time) * (vectors.T @ theta))
    return Gaussian(mean=mean, covariance=0.5 * (covariance + covariance.T))


def log_determinant(gaussian: Gaussian) -> float:
    r"""Return :math:`\log \det \Sigma`, minus infinity if the covariance is singular.

    For an Ornstein-Uhlenbeck process with :math:`C = A^{1/2}` it is
    :math:`d \log \frac\alpha2 + \log \det (1 - e^{-2 A t})`, and for :math:`C = 1` this less
    :math:`\log \det A`. Scaling C by s adds :math:`2 d \log s`.

    Args:
        gaussian: The distribution.

    Reference: Appendix B.
    """
    check_type("gaussian", gaussian, Gaussian, "a Gaussian")
    # The determinant itself would underflow in a few hundred dimensions.
    sign, value = torch.linalg.slogdet(gaussian.covariance)
    return float(value) if float(sign) > 0 else -math.inf


def hellinger(first: Gaussian, second: Gaussian) -> float:
    r"""Return the squared Hellinger distance of two normal distributions, from 0 to 1.

    .. math:: H^2 = 1 - \frac{(\det \Sigma_1 \det \Sigma_2)^{1/4}}{\det(\bar\Sigma)^{1/2}}
        \exp\Big(-\tfrac18 (\mu_1 - \mu_2)^\top \bar\Sigma^{-1} (\mu_1 - \mu_2)\Big), \qquad
        \bar\Sigma = \tfrac12 (\Sigma_1 + \Sigma_2)

    If the two are the distributions of a run's result for two data sets that differ in one sample,
    the square root bounds the uniform stability, and with it the generalisation error.

    Args:
        first: Distribution of the weights trained on one data set.
        second: The same on the other.

    Reference: Appendix B, equations 14 and 16.
    """
    for name, gaussian in (("first", first), ("second", second)):
        check_type(name, gaussian, Gaussian, "a Gaussian")
        if log_determinant(gaussian) == -math.inf:
            raise ValueError(f"{name} must have a positive definite covariance, got a singular one")
    if first.mean.shape != second.mean.shape:
        raise ValueError(f"second must have {len(first.mean)} dimensions, got {len(second.mean)}")
    middle = 0.5 * (first.covariance + second.covariance)
    gap = first.mean - second.mean
    # The exponent of 1 - exp(...), so that small distances keep their digits
    exponent = 0.25 * (log_determinant(first) + log_determinant(second))
    exponent -= 0.5 * float(torch.linalg.slogdet(middle).logabsdet)
    exponent -= 0.125 * float(gap @ torch.linalg.solve(middle, gap))
    return -math.expm1(min(exponent, 0.0))


def positive_definite(name: str, matrix: Tensor) -> Tensor:
    """Return a symmetric positive definite matrix in float64, checked."""
    A = _square(name, matrix)
    smallest = float(torch.linalg.eigvalsh(A)[0])
    if not smallest > 0:
        raise ValueError(f"{name} must be positive definite, got an eigenvalue of {smallest:.6g}")
    return A


def check_covariance(name: str, matrix: Tensor, like: Tensor) -> Tensor:
    """Return a symmetric matrix of the shape of another in float64, checked."""
    S = _square(name, matrix)
    if S.shape != like.shape:
        raise ValueError(f"{name} must be {tuple(like.shape)}, got {tuple(S.shape)}")
    return S


def check_start(start: Tensor, like: Tensor) -> Tensor:
    """Return a start of as many entries as a matrix has rows, in float64, checked."""
    check_type("start", start, Tensor, "a tensor")
    if start.shape != like.shape[:1]:
        raise ValueError(f"start must be ({len(like)},), got {tuple(start.shape)}")
    check_finite("start", start)
    return start.detach().double()


def _square(name: str, matrix: Tensor) -> Tensor:
    check_type(name, matrix, Tensor, "a tensor")
    A = matrix.detach().double()
    check_finite(name, A)
    if A.ndim != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"{name} must be (d, d), got {tuple(A.shape)}")
    if not torch.allclose(A, A.T):
        worst = float((A - A.T).abs().max())
        raise ValueError(f"{name} must be symmetric, got entries that differ by {worst:.3g}")
    return A


def _matrices(curvature: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    A = positive_definite("curvature", curvature)
    check_type("factor", factor, Tensor, "a tensor")
    # C may have fewer or more columns than rows: only CC' matters.
    C = factor.detach().double()
    check_finite("factor", C)
    if C.ndim != 2 or len(C) != len(A):
        raise ValueError(f"factor must be ({len(A)}, r), got {tuple(C.shape)}")
    return A, C


def _offset(values: Tensor, offset: float | None) -> float:
    # The first rate 2 / (gamma lambda_min) must not exceed 1 / lambda_max.
    least = 2 * float(values[-1] / values[0])
    if offset is None:
        return least
    check_positive("offset", offset)
    check_range("offset", offset, low=least * (1 - 1e-12))
    return offset


def _rates(rates: Sequence[float] | Tensor) -> list[float]:
    values = as_points(rates, "rates")
    check_finite("rates", values)
    if values.ndim != 1 or bool((values < 0).any()):
        raise ValueError(f"rates must be learning rates (n,) of at least 0, got {short(rates)}")
    return [float(rate) for rate in values]
