"""``gradient_noise``: noise scales of mini-batch gradients, with and without the Hessian."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_count, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.propagation import propagate
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import CurvatureOperator, Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix
from ritz.measures._groups import TUNING as GROUPS
from ritz.measures._groups import (
    choose_group_size,
    contrast_roundoff,
    group_error_factor,
    random_groups,
)
from ritz.operators import LinearOperator
from ritz.spectra import trace


@dataclass(frozen=True, slots=True)
class Tuning:
    """Memory of :func:`gradient_noise`."""

    # The gradients of all groups are stored if they have at most this many entries, 128 MiB of
    # float32. Otherwise they are computed again in each of four passes.
    stored: int = 2**25


TUNING = Tuning()
# Block size of products with the matrix of the groups: each product needs two passes over all
# gradients, whatever the number of columns.
WIDTH = 64


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    r"""Noise of the gradients of mini-batches.

    Attributes:
        variance: :math:`\operatorname{tr} \Sigma`, of the gradients of single samples.
        gradient_square: :math:`\|g\|^2`, of the gradient of all data.
        along: :math:`g^\top H g / \|g\|^2`, the curvature along the gradient.
        simple: The simple noise scale :math:`\operatorname{tr} \Sigma / \|g\|^2`, a batch size.
        curved: The noise scale :math:`\operatorname{tr}(H \Sigma) / g^\top H g`, the critical batch
            size. Below it, training with half the batch size takes about twice the steps. Not a
            number if the curvature along the gradient is not positive.
        matrix: ``hessian`` or ``ggn``.
        num_samples: :math:`N`.
        num_products: Matrix-vector products that were used.
        num_gradients: Gradients of all data that were used.
    """

    variance: Estimate
    gradient_square: Estimate
    along: Estimate
    simple: Estimate
    curved: Estimate
    matrix: str
    num_samples: int
    num_products: int
    num_gradients: int

    def __str__(self) -> str:
        return "\n".join(
            [
                f"Noise of gradients, {self.num_samples:,} samples",
                f"  tr Sigma = {plain_estimate(self.variance)}, "
                f"|g|^2 = {plain_estimate(self.gradient_square)}, "
                f"g'Hg / |g|^2 = {plain_estimate(self.along)}",
                f"  simple noise scale {plain_estimate(self.simple)} samples",
                f"  with the {self.matrix} {plain_estimate(self.curved)} samples",
            ]
        )


def gradient_noise(
    risk: Risk,
    *,
    matrix: CurvatureMatrix = "hessian",
    group_size: int | None = None,
    num_probes: int = 6,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> GradientNoise:
    r"""Return the noise scales of the gradient: batch sizes at which noise and signal are equal.

    .. math:: B_\text{simple} = \frac{\operatorname{tr} \Sigma}{\|g\|^2}, \quad
        B = \frac{\operatorname{tr}(H \Sigma)}{g^\top H g}, \quad
        \Sigma = \frac{1}{N} \sum_i (g_i - g)(g_i - g)^\top

    With the best learning rates, a step along the gradient of a batch of :math:`b` samples reduces
    the loss by the fraction :math:`1 / (1 + B/b)` of a step along :math:`g`. Batches larger than
    :math:`B` save few steps.

    :math:`\Sigma` is estimated from the gradients :math:`\bar g_j` of :math:`M` random disjoint
    groups of ``c`` samples. With the deviations :math:`d_j = \bar g_j - \bar g`,
    :math:`\hat \Sigma = \tfrac{N - 1}{N} \tfrac{c}{M - 1} \sum_j d_j d_j^\top` is unbiased, and for
    ``c = 1`` equal to :math:`\Sigma`. :math:`\operatorname{tr}(H \hat \Sigma)` is the trace of a
    matrix of size :math:`M`, estimated by XTrace.

    Cost: ``2 num_probes + 1`` products with the matrix, and two gradients of all data. If the
    gradients of all groups have more than :math:`2^{25}` entries, they are not stored, and six
    gradients are needed instead of two.

    Args:
        risk: The loss at a point, a mean over samples (which is checked). Batch norm must not be in
            ``train`` mode.
        matrix: ``hessian`` or ``ggn``.
        group_size: Samples ``c`` per group. Defaults to 1 below 256 samples, and otherwise to the
            largest that gives at least 128 groups.
        num_probes: Probes of the trace of :math:`H \Sigma`, at least 2.
        generator: Source of groups and probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: McCandlish, Kaplan, Amodei et al. (2018), *An empirical model of large-batch
    training*.
    """
    return noise_of(
        curvature_operator(risk, matrix),
        group_size=group_size,
        num_probes=num_probes,
        generator=generator,
        progress=progress,
    )


def noise_of(
    op: CurvatureOperator,
    *,
    group_size: int | None = None,
    num_probes: int = 6,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> GradientNoise:
    """Return :func:`gradient_noise` of an existing operator, to reuse its traced products."""
    risk = op.risk
    risk.require_separable("gradient_noise()")
    risk.require_sample_mean(alone=True)
    count = sum(risk.batch_rows)
    group_size = choose_group_size(group_size, count)
    num_probes = check_count("num_probes", num_probes, low=2)
    generator = resolve_generator(generator)
    groups = random_groups(risk, group_size, generator)
    # Sigma = scale sum_j d_j d_j'
    scale = (count - 1) / count * group_size / max(1, groups.num_batches - 1)
    # |g|^2 and g'Hg / |g|^2, for the signal
    gradient = risk.gradient()
    deviations = _Deviations(groups, progress)
    image = op.matmat(gradient[:, None])[:, 0]
    square = _square(gradient, deviations)
    along = _rayleigh(gradient, image, square)
    unseen = group_error_factor(groups, count)  # 0 with single samples, of which Sigma is exact
    method = "single samples" if group_size == 1 else f"{groups.num_batches} random groups"
    variance = _variance(deviations, scale, unseen, method, generator)
    # tr(H Sigma) = tr(scale D'HD), of order M instead of P
    noise = trace(
        _NoiseOperator(op, deviations, scale),
        # More probes than rows are of no use.
        num_probes=min(num_probes, groups.num_batches),
        generator=generator,
    )
    # The variance of a quadratic form of normal deviations is 2 |A|_F^2 <= 2 (tr A)^2.
    bound = abs(float(noise)) * math.sqrt(2 / max(1, groups.num_batches - 1)) * unseen
    noise = replace(noise, stderr=noise.stderr.hypot(torch.tensor(bound, dtype=torch.float64)))
    return GradientNoise(
        variance=variance,
        gradient_square=square,
        along=along,
        simple=propagate(_ratio, variance, square, method=f"tr Sigma / |g|^2, {method}"),
        curved=_curved(noise, along, square, method),
        matrix=op.matrix,
        num_samples=count,
        num_products=noise.num_products + 1,
        num_gradients=1 + deviations.num_passes,
    )


@final
class _Deviations:
    """The deviations ``d_j`` of the gradients of groups: stored, or computed in each pass.

    Attributes:
        count: Number of groups ``M``.
        mean: Their mean gradient ``(P,)``, float64.
        dtype: Data type of the gradients.
        contrasts: Terms ``(M - 1,)`` whose sum is that of the squares of the deviations.
        num_passes: Passes over the data so far; each costs a gradient.
    """

    def __init__(self, groups: Risk, progress: bool | Progress) -> None:
        self._groups, self._progress, self.num_passes = groups, progress, 0
        self.dtype = groups.theta.dtype
        self.count = groups.num_batches
        theta = groups.theta
        self.mean = torch.zeros_like(theta, dtype=torch.float64)
        fits = self.count * len(theta) <= TUNING.stored
        self._rows = theta.new_empty(self.count, len(theta)) if fits else None
        gaps = []
        for j, gradient in enumerate(self._pass(), start=1):
            if self._rows is not None:
                self._rows[j - 1] = gradient
            # Welford: mean_j = mean_{j-1} + (y_j - mean_{j-1}) / j
            step = gradient.double() - self.mean
            gaps.append(float(step.square().sum()) * ((j - 1) / j))
            self.mean.add_(step, alpha=1 / j)
        # (j - 1)/j |y_j - mean_{j-1}|^2: their sum is that of |y_j - mean|^2.
        self.contrasts = torch.tensor(gaps[1:], dtype=torch.float64)
        if self._rows is not None:
            self._rows -= self.mean.to(theta)

    def _pass(self) -> Iterator[Tensor]:
        self.num_passes += 1
        groups = self._groups
        with tracking(self._progress, "gradients of groups", self.count) as bar, groups.settings():
            for done, (_, context, _) in enumerate(groups.contexts(), start=1):
                yield groups.batch_gradient(context)[0]
                bar.update(done)

    def combine(self, weights: Tensor) -> Tensor:
        """Return the combinations ``D s`` of deviations, ``(P, k)``, of weights ``(M, k)``."""
        if self._rows is not None:
            return self._rows.T @ weights.to(self._rows)
        # D s = sum_j d_j s_j', one gradient at a time
        total = self.mean.new_zeros(len(self.mean), weights.shape[1])
        for row, gradient in zip(weights.double(), self._pass(), strict=True):
            total.addr_(gradient.double() - self.mean, row.to(total))
        return total.to(self._groups.theta)

    def project(self, block: Tensor) -> Tensor:
        """Return the inner products ``D'V`` with vectors ``(P, k)``, ``(M, k)``."""
        if self._rows is not None:
            return self._rows @ block
        rows = [(gradient - self.mean.to(gradient)) @ block for gradient in self._pass()]
        return torch.stack(rows)


@final
class _NoiseOperator(LinearOperator):
    """The matrix ``scale D'HD`` of size ``M``, whose trace is that of ``H Sigma``."""

    def __init__(self, op: CurvatureOperator, deviations: _Deviations, scale: float) -> None:
        super().__init__(deviations.count, dtype=op.dtype, device=op.device, block_size=WIDTH)
        self._op, self._deviations, self._scale = op, deviations, scale

    def _matmat(self, block: Tensor) -> Tensor:
        # (D'HD) s = D'(H (D s)), in blocks of the operator
        vectors = self._deviations.combine(block)
        image = [self._op.matmat(part) for part in vectors.split(self._op.block_size, 1)]
        return self._deviations.project(torch.cat(image, 1)).mul_(self._scale)


def _square(gradient: Tensor, deviations: _Deviations) -> Estimate:
    """Return the squared norm of the gradient."""
    size = float(gradient.double().norm())
    # The gradients of groups cancel near a minimum; roundoff is relative to their norms.
    spread = float(deviations.contrasts.sum()) / deviations.count
    off = GROUPS.roundoff * torch.finfo(gradient.dtype).eps * math.sqrt(size**2 + spread)
    return Estimate.exact(size**2, method="|g|^2", truncation=2 * size * off + off**2)


def _rayleigh(gradient: Tensor, image: Tensor, square: Estimate) -> Estimate:
    """Return the curvature along the gradient, from the product ``Hg``."""
    g, y = gradient.double(), image.double()
    size, length = float(g.norm()), float(y.norm())
    value = float(g @ y) / size**2 if size else math.nan
    # The relative error e of g changes the quotient by 2 e |Hg - value g| / |g| to first order and
    # by e^2 |H| to second; |Hg| / |g| stands for the norm.
    off = float(square.truncation) / (2 * size**2) if size else math.inf
    tilt = float((y - value * g).norm())
    error = (
        2 * off * tilt + (off**2 + GROUPS.roundoff * torch.finfo(gradient.dtype).eps) * length
    ) / (size or math.nan)
    method = "g'Hg / |g|^2"
    known = off < 1
    return Estimate.exact(
        value, method=method, truncation=error if known else math.inf, num_products=1
    )


def _ratio(top: Tensor, size: Tensor) -> Tensor:
    # Within its error the denominator must not reach zero.
    return torch.where(size > 0, top / size, torch.nan)


def _variance(
    deviations: _Deviations,
    scale: float,
    unseen: float,
    method: str,
    generator: torch.Generator,
) -> Estimate:
    # The mean of M - 1 contrasts is the sum over groups divided by M - 1.
    gaps = deviations.contrasts
    samples = gaps * (scale * (deviations.count - 1))
    square = torch.tensor(float(deviations.mean.square().sum()), dtype=torch.float64)
    roundoff = contrast_roundoff(gaps, square, deviations.dtype) * (scale * len(gaps))
    estimate = Estimate.of(
        samples,
        method=f"variance of the gradients of {method}",
        num_products=0,
        truncation=roundoff,
        status=Status(outcome="completed", message=f"{deviations.count} groups"),
        seed=generator.initial_seed(),
    )
    # A single contrast has no standard error, but that of two samples is exact.
    error = estimate.stderr * unseen if unseen else torch.zeros_like(estimate.stderr)
    return replace(estimate, stderr=error)


def _curved(noise: Estimate, along: Estimate, square: Estimate, method: str) -> Estimate:
    if is_below(along.mean, 0.0) or not bool(torch.isfinite(along.mean)):
        status = Status(
            outcome="uncertain",
            message=f"the curvature along the gradient is {float(along):.3g}, not positive",
            advice="use matrix='ggn'",
        )
        nan = torch.tensor(math.nan, dtype=torch.float64)
        unknown = torch.tensor(math.inf, dtype=torch.float64)
        return replace(
            Estimate.exact(nan, method="tr(H Sigma) / g'Hg", status=status), truncation=unknown
        )
    return propagate(
        lambda top, rayleigh, size: _ratio(top, rayleigh * size),
        noise,
        along,
        square,
        method=f"tr(H Sigma) / g'Hg, {method}",
    )
