r"""Spiked models: how noise changes the outliers of a matrix, and when they can be detected.

An outlier is an eigenvalue outside of the bulk. Noise moves an outlier outwards and rotates its
eigenvector. Below a threshold, the outlier disappears in the bulk (Baik, Ben Arous and Péché 2005).
For a mini-batch, the matrix is the Hessian of all data, and the noise is the deviation of the
batch.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_range
from ritz._core.density import as_points, broadcast
from ritz._core.storage import storable
from ritz.rmt._tracy_widom import TracyWidom

NoiseModel = Literal["samples", "entries"]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    r"""Predicted outliers of a noisy matrix. All tensors have the same shape and are in float64.

    Attributes:
        value: Limit of the eigenvalue for large matrices; the edge of the bulk if not detected.
        overlap: Limit of :math:`\langle \phi', \phi \rangle^2` between the noisy and the true
            eigenvector; 0 if not detected.
        threshold: An outlier is detected if the true eigenvalue is farther from the centre.
        detected: Whether the outlier leaves the bulk.
        stddev: Standard deviation of the noisy eigenvalue: that of its Gaussian limit if detected,
            and that of the Tracy-Widom law if not. NaN if the arguments do not determine it.
        edge: Edge of the bulk of a finite matrix. By the Tracy-Widom law, the bulk exceeds it with
            probability ``1 - level``. Without ``size``, the edge in the limit.
    """

    value: Tensor
    overlap: Tensor
    threshold: Tensor
    detected: Tensor
    stddev: Tensor
    edge: Tensor

    def __str__(self) -> str:
        lines = [f"{int(self.detected.sum())} of {self.detected.numel()} outliers detected"]
        rows = zip(self.value.reshape(-1), self.overlap.reshape(-1), self.stddev.reshape(-1),
                   strict=True)  # fmt: skip
        lines += [f"  {v:.5g}, standard deviation {s:.2g}, overlap {o:.3f}" for v, o, s in rows]
        return "\n".join(lines)


# Standard deviation of the Tracy-Widom law of beta = 1 (Bornemann 2010, Table 10).
_STDDEV = 1.267983306
# Smaller magnitudes are replaced by this one, so that 1/x does not overflow.
_SMALL = 1e-150


def additive_spikes(
    values: float | Tensor,
    *,
    variance: float | Tensor,
    along: float | Tensor | None = None,
    centre: float | Tensor = 0.0,
    model: NoiseModel = "samples",
    spread: float | Tensor | None = None,
    size: int | None = None,
    level: float = 0.95,
) -> Spikes:
    r"""Predict the outliers of a matrix plus symmetric noise.

    .. math:: \lambda' = \lambda + \frac{v}{\theta}, \qquad
        \langle \phi', \phi \rangle^2 = 1 - \frac{v}{\theta^2}, \qquad
        \theta = \lambda - c, \quad |\theta| > \sqrt v

    The noise :math:`E` is a matrix of order ``n`` whose entries have variance :math:`v / n`. Its
    spectrum is a semicircle of radius :math:`2 \sqrt v` around the centre :math:`c` of the bulk.
    Below the threshold, the outlier disappears in the edge :math:`c \pm 2 \sqrt v`.

    The noise of networks is not homogeneous: its variance
    :math:`V(\phi) = \mathbb{E} |E \phi|^2` along an outlier may be a thousand times the mean
    :math:`v`. Pass this variance as ``along``:

    =============  ===========================================  ====================================
    model          eigenvalue and overlap                       exact for
    =============  ===========================================  ====================================
    ``samples``    :math:`\lambda + V/\theta`,                  sample covariances, where
                   :math:`\frac{1 - V c/(\lambda\theta^2)}      :math:`V = \lambda c n/T`; means of
                   {1 + V/(\lambda\theta)}`                     matrices of low rank
    ``entries``    :math:`\lambda + V g`,                       independent entries with unequal
                   :math:`\frac{1 - v g^2}{1 + (V - v) g^2}`    variances
    =============  ===========================================  ====================================

    with :math:`g = 2 / (\theta \pm \sqrt{\theta^2 + 4 (V - v)})`. The two models agree to first
    order in :math:`V/\theta^2`. For :math:`V = v`, ``entries`` is the homogeneous model.

    Args:
        values: Outliers :math:`\lambda` of the matrix without noise, of either sign and any shape.
        variance: Variance :math:`v` of a row of the noise; :math:`P \sigma^2 / b` for batches.
        along: Variance :math:`V(\phi)` along each outlier; :math:`V(\phi)/b` for batches. Defaults
            to homogeneous noise.
        centre: Centre :math:`c` of the bulk, the mean of its eigenvalues.
        model: ``samples`` or ``entries``. Only used with ``along``.
        spread: Variance of :math:`\phi^\top E \phi`. Defaults to that of Gaussian entries, twice
            the variance of a row over ``size``. For ``samples`` with ``along`` there is no default.
        size: Order ``n`` of the matrix, for ``stddev`` and ``edge``.
        level: Probability that the bulk stays below ``edge``.

    Returns:
        :class:`Spikes`. Arguments broadcast: outliers ``(k,)`` and variances ``(m, 1)`` give
        results ``(m, k)``.

    Reference: *Spectral Machine Learning*, Theorem 14, and Benaych-Georges and Nadakuditi (2011).

    Example:
        >>> spikes = additive_spikes(torch.tensor([3.0, 0.5, -2.0]), variance=1.0, size=1000)
        >>> print(spikes)
        2 of 3 outliers detected
          3.3333, standard deviation 0.042, overlap 0.889
          2, standard deviation 0.013, overlap 0.000
          -2.5, standard deviation 0.039, overlap 0.750
    """
    check_choice("model", model, get_args(NoiseModel))
    size = _check_finite_size(size, level)
    lam, c = _number("values", values), _number("centre", centre)
    v = _number("variance", variance, low=0.0)
    strength = v if along is None else _number("along", along, low=0.0)
    lam, v, c, strength = broadcast(values=lam, variance=v, centre=c, along=strength)
    side = torch.where(lam < c, -1.0, 1.0).double()
    unknown = strength * torch.nan if spread is None else _number("spread", spread, low=0.0)
    if model == "samples" and along is not None:
        shifted = _samples(lam, v, strength / _away_from_zero(lam), c, unknown)
    else:
        # Gaussian entries have twice the variance on the diagonal.
        gaussian = 2 * strength / size if size and spread is None else unknown
        shifted = _entries(lam, v, strength, c, gaussian)
    edge = _wigner_edge(v, c, side, size or math.inf, level)
    return _assemble(shifted, (lam - c).abs() > shifted.threshold, edge)


def multiplicative_spikes(
    values: float | Tensor,
    *,
    ratio: float | Tensor,
    bulk: float | Tensor = 1.0,
    size: int | None = None,
    level: float = 0.95,
) -> Spikes:
    r"""Predict the outliers of a positive semi-definite matrix that is estimated from samples.

    .. math:: \lambda' = \lambda \Big(1 + \frac q\theta\Big), \qquad
        \langle \phi', \phi \rangle^2 = \frac{1 - q/\theta^2}{1 + q/\theta}, \qquad
        \theta = \frac\lambda s - 1, \quad |\theta| > \sqrt q

    The noisy matrix is the covariance of ``T`` samples, and :math:`q = n/T`. All eigenvalues of the
    true covariance except the outliers are equal to :math:`s`. The bulk is then the
    Marchenko-Pastur law with the edges :math:`s (1 \pm \sqrt q)^2`. Outliers above :math:`s` leave
    the bulk at the upper edge, and outliers below :math:`s` at the lower edge. For :math:`q \ge 1`
    the sample covariance is singular, and outliers below :math:`s` are never detected.

    Args:
        values: Outliers :math:`\lambda` of the matrix without noise, at least 0, of any shape.
        ratio: Ratio :math:`q` of the order of the matrix to the number of samples (parameters over
            batch size).
        bulk: Eigenvalue :math:`s` of the bulk.
        size: Order ``n`` of the matrix, for ``edge`` and for ``stddev`` with Gaussian samples.
        level: Probability that the bulk stays inside ``edge``.

    Returns:
        :class:`Spikes`; arguments broadcast. The threshold is :math:`s \sqrt q`.

    Reference: *Spectral Machine Learning*, Theorem 16; Baik and Silverstein (2006); Paul (2007).

    Example:
        >>> print(multiplicative_spikes(torch.tensor([5.0, 1.2]), ratio=0.5, size=1000))
        1 of 2 outliers detected
          5.625, standard deviation 0.16, overlap 0.861
          2.9142, standard deviation 0.018, overlap 0.000
    """
    size = _check_finite_size(size, level)
    lam = _number("values", values, low=0.0)
    lam, q, s = broadcast(values=lam, ratio=_positive("ratio", ratio), bulk=_positive("bulk", bulk))
    side = torch.where(lam < s, -1.0, 1.0).double()
    # A row of the noise along phi has variance lambda s q, and phi'E phi has 2 lambda^2 / T.
    spread = 2 * lam.square() * q / size if size else lam * torch.nan
    shifted = _samples(lam, torch.zeros_like(q), s * q, s, spread)
    detected = ((lam - s).abs() > shifted.threshold) & ((side > 0) | (q < 1))
    return _assemble(shifted, detected, _wishart_edge(q, s, side, size, level))


@dataclass(frozen=True, slots=True)
class _Shifted:
    """Outliers above the threshold: their limits, and the variance around them."""

    value: Tensor
    overlap: Tensor
    threshold: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True)
class _Edge:
    """The edge of the bulk in the limit, and the centre and scale of its Tracy-Widom law.

    The scale is negative at a lower edge. It is 0 if the size of the matrix is not known.
    """

    limit: Tensor
    centre: Tensor
    scale: Tensor
    level: float


def _entries(lam: Tensor, v: Tensor, strength: Tensor, c: Tensor, spread: Tensor) -> _Shifted:
    theta = lam - c
    # x = lambda + V G(x) with the semicircle x = c + 1/G + v G: (V - v) G^2 + theta G = 1
    excess = strength - v
    root = (theta.square() + 4 * excess).clamp(min=_SMALL).sqrt()
    g = 2 / _away_from_zero(theta + torch.where(theta < 0, -root, root))
    # 1 / (1 - V G'(x)) with G'(x) = -g^2 / (1 - v g^2)
    inner = 1 - v * g.square()
    overlap = inner / (1 + excess * g.square())
    # var = o^2 (var phi'E phi + 2 V^2/n int dt/(x - t)^2). The second term comes from the other
    # entries of the row.
    rest = spread * strength * g.square() / inner
    # |G| < v^(-1/2) at the edge. For V > 2 v the threshold is negative: such noise has an outlier
    # even if the matrix has none.
    threshold = (2 * v - strength) / _away_from_zero(v.sqrt())
    return _Shifted(lam + strength * g, overlap, threshold, overlap.square() * (spread + rest))


def _samples(lam: Tensor, v: Tensor, relative: Tensor, c: Tensor, spread: Tensor) -> _Shifted:
    # V = lambda r, where r = q c for covariances. The value is lambda (1 + r/theta), `slope` is its
    # derivative by lambda, and the overlap is lambda/value times this derivative.
    theta = _away_from_zero(lam - c)
    slope = 1 - relative * c / theta.square()
    gain = 1 + relative / theta
    threshold = (relative * c).clamp(min=0).sqrt()
    # If the noise along the outlier is weaker than the mean, the outlier must exceed the edge of
    # the bulk: theta + V/theta > 2 v^.5.
    strength = relative * lam
    weak = torch.where(strength < v, v.sqrt() + (v - strength).clamp(min=0).sqrt(), 0.0)
    overlap = slope / _away_from_zero(gain)
    return _Shifted(lam * gain, overlap, threshold.maximum(weak), spread * slope)


def _wigner_edge(v: Tensor, c: Tensor, side: Tensor, size: float, level: float) -> _Edge:
    # With the centre of Johnstone and Ma (2012), the error is n^(-2/3) instead of n^(-1/3).
    reach = side * v.sqrt()
    centre = c + 2 * reach * math.sqrt(1 - 0.5 / size)
    return _Edge(c + 2 * reach, centre, reach * size ** (-2 / 3), level)


def _wishart_edge(q: Tensor, s: Tensor, side: Tensor, size: int | None, level: float) -> _Edge:
    limit = s * (1 + side * q.sqrt()).square()
    if size is None:
        return _Edge(limit, limit, torch.zeros_like(limit), level)
    # Johnstone (2001): s (n^.5 +- T^.5) (n^-.5 +- T^-.5)^(1/3) / T, with n = q T, around
    # s ((n - 1/2)^.5 +- (T - 1/2)^.5)^2 / T (Ma 2012)
    root, count = q.sqrt(), size / q
    halves = (q - 0.5 / count).clamp(min=0).sqrt() + side * (1 - 0.5 / count).clamp(min=0).sqrt()
    scale = s * (root + side) * (1 / root + side).sign() * (1 / root + side).abs() ** (1 / 3)
    return _Edge(limit, s * halves.square(), scale * count ** (-2 / 3), level)


def _assemble(shifted: _Shifted, detected: Tensor, edge: _Edge) -> Spikes:
    quantile = float(TracyWidom().ppf(edge.level)) if bool((edge.scale != 0).any()) else 0.0
    bulk = torch.where(edge.scale == 0, torch.nan, (_STDDEV * edge.scale).abs())
    return Spikes(
        value=torch.where(detected, shifted.value, edge.limit),
        overlap=torch.where(detected, shifted.overlap.clamp(0.0, 1.0), 0.0),
        threshold=shifted.threshold.clamp(min=0.0),
        detected=detected,
        stddev=torch.where(detected, shifted.variance.clamp(min=0.0).sqrt(), bulk),
        edge=edge.centre + quantile * edge.scale,
    )


def _check_finite_size(size: int | None, level: float) -> int | None:
    # At more extreme levels, the distribution function of Tracy-Widom is not accurate.
    check_range("level", level, low=1e-12, high=1 - 1e-12)
    return None if size is None else check_count("size", size)


def _number(name: str, value: float | Tensor, *, low: float | None = None) -> Tensor:
    tensor = as_points(value, name)
    check_finite(name, tensor)
    if low is not None:
        check_range(name, float(tensor.min()), low=low)
    return tensor


def _positive(name: str, value: float | Tensor) -> Tensor:
    tensor = _number(name, value)
    if not bool((tensor > 0).all()):
        raise ValueError(f"{name} must be positive, got {float(tensor.min()):.6g}")
    return tensor


def _away_from_zero(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _SMALL, torch.copysign(torch.full_like(x, _SMALL), x), x)
