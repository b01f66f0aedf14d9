"""``least_damping`` under the noise of batches, and ``curvature_ratio`` of a damped method."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ritz._core.checks import check_range
from ritz._core.density import as_points, broadcast


def least_damping(
    outliers: Sequence[float] | Tensor, *, variance: float | Tensor, learning_rate: float = 1.0
) -> Tensor:
    r"""Return the least damping at which a second-order method is stable under batch noise.

    .. math:: \delta > \frac{\alpha}{2} \max_\mu |\lambda_\mu|
        \min\Big(1, \frac{v}{\lambda_\mu^2}\Big)

    Noise rotates the fraction :math:`v / \lambda^2` of an eigenvector into the rest of the space,
    where a second-order method divides by the damping alone. The maximum belongs to the smallest
    outlier above the threshold :math:`\sqrt v`, so :math:`\delta` is at most
    :math:`\tfrac{\alpha}{2} \sqrt v`. As long as every outlier is above the threshold,
    :math:`\delta` is inversely proportional to the batch size.

    Args:
        outliers: Outliers :math:`\lambda_\mu` of the matrix of all data, ``(k,)``.
        variance: Variance of the matrix of a batch: :math:`v = P \sigma^2 / b` for homogeneous
            noise, or :math:`V(\phi_\mu) / b` for each outlier, ``(k,)``.
        learning_rate: Learning rate :math:`\alpha`.

    Reference: *Spectral Machine Learning*, equation 5.36, with its corrections.
    """
    check_range("learning_rate", learning_rate, low=0.0)
    size = as_points(outliers, "outliers").abs()
    if size.ndim != 1 or not len(size):
        raise ValueError(f"outliers must be (k,), got {tuple(size.shape)}")
    size, noise = broadcast(outliers=size, variance=as_points(variance, "variance"))
    if not bool((noise >= 0).all()):
        raise ValueError(f"variance must be at least 0, got {float(noise.min()):g}")
    # lambda min(1, v / lambda^2), without 0 / 0 for an eigenvalue of zero
    share = torch.minimum(size, noise / size.clamp(min=torch.finfo(size.dtype).tiny))
    return 0.5 * learning_rate * share.max()


def curvature_ratio(
    largest: float | Tensor, damping: float | Tensor, *, smallest: float | Tensor = 0.0
) -> Tensor:
    r"""Return the ratio of the learning rates along flat and sharp directions of a damped method.

    .. math:: R = \frac{\alpha_\text{flat}}{\alpha_\text{sharp}}
        = \frac{\lambda_1 + \delta}{\lambda_P + \delta}

    because the effective learning rate along an eigenvector is :math:`\alpha / (\lambda + \delta)`.
    For :math:`\lambda_P \ll \delta` the ratio is :math:`1 + (\lambda_1 - \lambda_P) / \delta`. For
    infinite damping, the limit of SGD, it is 1.

    Args:
        largest: Largest eigenvalue :math:`\lambda_1` of the matrix that the method estimates.
        damping: Damping :math:`\delta`.
        smallest: Smallest eigenvalue :math:`\lambda_P`. Defaults to 0, near which most eigenvalues
            of networks lie.

    Reference: Granziol et al. (2020), Explaining the adaptive generalisation gap, equation 1.
    """
    top, bottom, delta = broadcast(
        largest=as_points(largest, "largest"),
        smallest=as_points(smallest, "smallest"),
        damping=as_points(damping, "damping"),
    )
    if bool((delta < 0).any()):
        raise ValueError(f"damping must be at least 0, got {float(delta.min()):g}")
    # Infinite damping gives inf / inf, whose limit is 1.
    ratio = (top + delta) / (bottom + delta)
    return torch.where(delta.isinf(), torch.ones_like(ratio), ratio)
