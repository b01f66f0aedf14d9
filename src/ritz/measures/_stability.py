"""Edges of stability, scaling rules, least damping and curvature ratio, in closed form."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_range

OptimizerName = Literal["sgd", "momentum", "nesterov", "adam", "kfac"]
OPTIMIZERS = get_args(OptimizerName)
# Optimisers that divide by an estimate of the curvature: their damping matters.
ADAPTIVE = ("adam", "kfac")


def stable_rate(
    curvature: float | Tensor,
    *,
    optimizer: OptimizerName = "sgd",
    momentum: float = 0.0,
    dampening: float = 0.0,
    full: float | Tensor | None = None,
) -> Tensor:
    r"""Return the largest learning rate at which steps on a quadratic of this curvature are stable.

    With the update :math:`z \leftarrow \rho z + (1 - \tau) g`, on :math:`\lambda w^2 / 2`:

    ============  =============================================
    ``sgd``       :math:`2 / \lambda`
    ``momentum``  :math:`2 (1 + \rho) / ((1 - \tau) \lambda)`
    ``nesterov``  :math:`2 (1 + \rho) / ((1 + 2 \rho) \lambda)`
    ``adam``      as ``momentum`` with :math:`\tau = \rho = \beta_1`
    ``kfac``      as ``momentum``
    ============  =============================================

    With ``full``, each step has the curvature of another batch, with the mean :math:`\lambda` and
    the variance :math:`v`, and :math:`\lambda' = \lambda + v / \lambda`. For ``sgd`` the mean
    square of the weights stays finite below :math:`2 / \lambda'`. Momentum sums the noise of many
    batches, so its edge is lower:

    .. math:: \alpha < \frac{2 (1 + \rho)}{(1 - \tau) (\lambda + \kappa (\lambda' - \lambda))},
        \quad \kappa = \frac{1 + \rho}{1 - \rho}

    For ``nesterov``, :math:`u = \alpha \lambda` is the positive root of
    :math:`\rho (1 + 2 \rho) (1 + n) u^2 + (1 - \rho - 4 \rho^2 + n (1 + \rho)) u = 2 (1 - \rho^2)`
    with :math:`n = \lambda' / \lambda - 1`.

    For ``adam`` and ``kfac``, :math:`\lambda` is the largest eigenvalue of the preconditioned
    matrix :math:`D^{-1/2} H D^{-1/2}`. The edge of local stability is not the largest rate that
    trains: networks move to flatter places, and train at a few times the edge.

    Args:
        curvature: Curvature :math:`\lambda` of any shape, or :math:`\lambda'` if ``full`` is
        passed.
            The result is infinite where it is not positive, because no learning rate is unstable.
        optimizer: One of the table.
        momentum: Momentum :math:`\rho`, from 0 to 1; for ``adam`` it is :math:`\beta_1`.
        dampening: Dampening :math:`\tau` of heavy-ball momentum, as in ``torch.optim.SGD``.
        full: Curvature :math:`\lambda` of all data, if ``curvature`` is that of batches.

    Reference: *Spectral Machine Learning*, section 5.7; Polyak (1964).

    >>> stable_rate(4.0), stable_rate(4.0, optimizer="momentum", momentum=0.5)
    (tensor(0.5000, dtype=torch.float64), tensor(0.7500, dtype=torch.float64))
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_range("momentum", momentum, low=0.0, high=1.0)
    check_range("dampening", dampening, low=0.0, high=1.0)
    if dampening and optimizer not in ("momentum", "kfac"):
        raise ValueError(f"dampening must be 0 for {optimizer}, got {dampening}")
    if optimizer == "sgd" and momentum:
        raise ValueError(f"momentum must be 0 for sgd, got {momentum}: use optimizer='momentum'")
    curvature = torch.as_tensor(curvature, dtype=torch.float64)
    positive = curvature > 0
    safe = torch.where(positive, curvature, torch.ones_like(curvature))
    mean = safe if full is None else torch.as_tensor(full, dtype=torch.float64).expand_as(safe)
    # Without positive curvature of all data, treat the curvature of a batch as that of all batches.
    # NaN remains NaN.
    noise = torch.where(mean <= 0, 0.0, (safe / mean - 1).clamp(min=0.0))
    rate = _unit_rate(noise, optimizer, momentum, dampening) * (1 + noise) / safe
    # NaN remains NaN: the edge is infinite only if the curvature is known not to be positive.
    return torch.where(positive | curvature.isnan(), rate + 0 * curvature, torch.inf)


def _unit_rate(
    noise: Tensor, optimizer: OptimizerName, momentum: float, dampening: float
) -> Tensor:
    """Return the edge for a mean curvature of 1 and the variance ``noise`` between batches.

    With x_t = w_t and the curvature h = 1 + xi of a batch, steps are an autoregression of order two
    that is driven by alpha xi y, where y is the point of the gradient. The edge is where the
    stationary variance of y equals the variance that drives it.
    """
    rho = momentum
    if optimizer == "nesterov" and rho:
        # a u^2 + b u = c, in a form that does not cancel
        a = rho * (1 + 2 * rho) * (1 + noise)
        b, c = 1 - rho - 4 * rho**2 + noise * (1 + rho), 2 * (1 - rho**2)
        root = (b.square() + 4 * a * c).sqrt()
        return torch.where(b > 0, 2 * c / (root + b.abs()), (root + b.abs()) / (2 * a))
    if optimizer == "adam":  # its running mean of gradients has weight 1 - beta_1
        dampening = rho
    # 2 (1 + rho) / (1 + kappa n); for rho = 1 there is no edge of noise but 0.
    rate = 2 * (1 - rho**2) / ((1 - rho) + (1 + rho) * noise)
    rate = torch.where(noise == 0, 2 * (1 + rho), rate)
    return rate / (1 - dampening) if dampening < 1 else torch.full_like(rate, torch.inf)


def noise_weight(optimizer: OptimizerName, momentum: float) -> float:
    r"""Return the weight of batch noise in the edge, relative to that for plain SGD.

    If a curvature of 1 has the variance ``n`` over batches, noise halves the edge at
    ``n = 1 / weight``. This is exact for heavy-ball momentum. For Nesterov's momentum it is where
    the limits of weak and of strong noise cross.
    """
    if momentum == 1:
        return math.inf
    weight = (1 + momentum) / (1 - momentum)
    return weight / (1 + 2 * momentum) if optimizer == "nesterov" else weight


# ------------------------------------------------------------------------------------------
# How the edge scales with the batch size: alpha ~ B^e. All take and return float64 tensors, so that
# errors can be propagated through them.


def share_of_variance(batch_sizes: Tensor, num_samples: int) -> Tensor:
    r"""Return the variance of a batch over that of a sample, :math:`(1/B - 1/N) N / (N - 1)`."""
    # Batches are drawn without replacement, so the batch of all samples has no noise.
    return (1 / batch_sizes.double() - 1 / num_samples) * (num_samples / max(1, num_samples - 1))


def additive_exponent(
    curvature: Tensor,
    variance: Tensor,
    *,
    batch_sizes: Tensor,
    num_samples: int,
    homogeneous: bool = False,
) -> Tensor:
    r"""Return the local exponent :math:`e(B)` of the edge under additive noise, ``(S,)``.

    .. math:: e = \frac{x}{1 + x} \frac{N}{N - B}, \quad x = \frac{v}{b \lambda^2}

    Noise :math:`v = V(\phi)` along the outlier shifts it at every batch size. The edge is linear in
    the batch size for small batches and constant for large ones. Homogeneous noise
    :math:`v = P \sigma^2` hides the outlier in the semicircle for :math:`x > 1`, where the edge
    scales with the square root of :math:`b`.

    Args:
        curvature: The outlier :math:`\lambda`.
        variance: The variance :math:`v` of the matrices of single samples.
        batch_sizes: Batch sizes ``(S,)``.
        num_samples: :math:`N`.
        homogeneous: Whether the noise is homogeneous.
    """
    ratio = variance / curvature.square()
    x = ratio * share_of_variance(batch_sizes, num_samples)
    # x N/(N - B), which has a limit at B = N: d log b / d log B = N/(N - B).
    y = ratio / batch_sizes.double() * (num_samples / max(1, num_samples - 1))
    exponent = y / (1 + x)
    if not homogeneous:
        return exponent
    return torch.where(x > 1, 0.5 * y / x.clamp(min=1.0), exponent)


def additive_change(curvature: Tensor, variance: Tensor, *, num_samples: int) -> Tensor:
    r"""Return the batch size :math:`B` at which noise and curvature are equal, :math:`x = 1`."""
    b = variance / curvature.square()
    # 1/b = (1/B - 1/N) N/(N - 1) solved for B
    return num_samples * b / (num_samples - 1 + b)


def multiplicative_exponent(
    spike: Tensor, bulk: Tensor, *, batch_sizes: Tensor, num_parameters: int
) -> Tensor:
    r"""Return the local exponent of the edge in the multiplicative model, ``(S,)``.

    .. math:: e = \frac{q/\theta}{1 + q/\theta} \text{ if } \theta > \sqrt q, \quad
        e = \frac{\sqrt q}{1 + \sqrt q} \text{ otherwise}, \quad
        q = \frac{P}{B}, \; \theta = \frac{\lambda}{s} - 1

    Args:
        spike: The outlier :math:`\lambda`.
        bulk: The eigenvalue :math:`s` of the bulk.
        batch_sizes: Batch sizes ``(S,)``.
        num_parameters: :math:`P`.
    """
    q, theta = num_parameters / batch_sizes.double(), spike / bulk - 1
    ratio = torch.where(theta > q.sqrt(), q / theta, q.sqrt())
    return ratio / (1 + ratio)


def multiplicative_change(spike: Tensor, bulk: Tensor, *, num_parameters: int) -> Tensor:
    r"""Return the batch size :math:`P / \theta` up to which the edge is nearly linear in it."""
    return num_parameters / (spike / bulk - 1)


# ------------------------------------------------------------------------------------------
# Damping.


def least_damping(
    outliers: Tensor, *, variance: float | Tensor, learning_rate: float = 1.0
) -> Tensor:
    r"""Return the least damping at which the noise of a batch along outliers stays stable.

    .. math:: \delta > \frac{\alpha}{2} \max_\mu |\lambda_\mu|
        \min\Big(1, \frac{v}{\lambda_\mu^2}\Big)

    :math:`v / \lambda^2` is the part of an eigenvector that the noise rotates into the rest of the
    space, where a second-order method divides by the damping alone. The smallest outlier above the
    threshold :math:`\sqrt v` determines the maximum, and :math:`\delta` is at most
    :math:`\tfrac{\alpha}{2} \sqrt v`. It is inversely proportional to the batch size.

    Args:
        outliers: Outliers :math:`\lambda_\mu` of the whole matrix, ``(k,)``.
        variance: Variance :math:`v = P \sigma^2 / b` of the matrix of a batch, one number, or one
            per outlier if the noise is not homogeneous: :math:`V(\phi_\mu) / b`.
        learning_rate: Learning rate :math:`\alpha`.

    Reference: *Spectral Machine Learning*, equation 5.36, with its corrections.
    """
    check_range("learning_rate", learning_rate, low=0.0)
    size = outliers.double().abs()
    if size.ndim != 1 or not len(size):
        raise ValueError(f"outliers must be (k,), got {tuple(outliers.shape)}")
    noise = torch.as_tensor(variance, dtype=torch.float64)
    if bool((noise < 0).any()):
        raise ValueError(f"variance must be at least 0, got {float(noise.min()):g}")
    # lambda min(1, v / lambda^2) without 0 / 0 for an eigenvalue of zero
    share = torch.minimum(size, noise / size.clamp(min=torch.finfo(size.dtype).tiny))
    return 0.5 * learning_rate * share.max()


def curvature_ratio(
    largest: float | Tensor, damping: float | Tensor, *, smallest: float | Tensor = 0.0
) -> Tensor:
    r"""Return the ratio of the learning rates along flat and sharp directions of a damped method.

    .. math:: R = \frac{\alpha_\text{flat}}{\alpha_\text{sharp}}
        = \frac{\lambda_1 + \delta}{\lambda_P + \delta}

    since the effective rate along an eigenvector is :math:`\alpha / (\lambda + \delta)`. It is
    :math:`1 + (\lambda_1 - \lambda_P) / \delta` for :math:`\lambda_P \ll \delta`, and 1 for SGD,
    which is the limit of infinite damping.

    Args:
        largest: :math:`\lambda_1`, of the matrix that the method estimates.
        damping: Damping :math:`\delta`.
        smallest: :math:`\lambda_P`. Defaults to 0, the value of most eigenvalues of networks.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, equation 1.
    """
    top, bottom, delta = (
        torch.as_tensor(x, dtype=torch.float64) for x in (largest, smallest, damping)
    )
    if bool((delta < 0).any()):
        raise ValueError(f"damping must be at least 0, got {float(delta.min()):g}")
    # inf / inf, the limit of SGD
    ratio = (top + delta) / (bottom + delta)
    return torch.where(delta.isinf(), torch.ones_like(ratio), ratio)
