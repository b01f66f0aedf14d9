"""``gradient_noise`` of mini-batches, and ``gradient_overlap`` with the leading eigenvectors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from ritz._core.blocks import column_dots, inner_products
from ritz._core.checks import check_count, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.propagation import propagate
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status, format_uncertain, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import CurvatureOperator, Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, check_risk, gradient_roundoff
from ritz.measures._bulk_edge import check_pairs, vector_errors
from ritz.measures._groups import TUNING as GROUPS
from ritz.measures._groups import (
    Groups,
    choose_group_size,
    contrast_roundoff,
    group_roundoff,
    random_groups,
)
from ritz.measures._landscape import check_direction
from ritz.operators import LinearOperator
from ritz.spectra import Eigenpairs, Spectrum, trace


@dataclass(frozen=True, slots=True)
class Tuning:
    """Memory of :func:`gradient_noise`."""

    # The gradients of all groups are stored if they have at most this many entries (128 MiB in
    # float32). Otherwise they are computed again in each of four passes.
    stored: int = 2**25


TUNING = Tuning()
# Block size of products with the matrix of the groups. Each product needs two passes over all
# gradients, for any number of columns, so large blocks are better.
WIDTH = 64
# Number of overlaps that are printed.
SHOWN = 10


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    r"""Noise of the gradients of mini-batches.

    Attributes:
        variance: :math:`\operatorname{tr} \Sigma`, the variance of the gradients of single samples.
        gradient_square: :math:`\|g\|^2`, where :math:`g` is the gradient of all data.
        along: Curvature along the gradient, :math:`g^\top H g / \|g\|^2`.
        simple: Simple noise scale :math:`\operatorname{tr} \Sigma / \|g\|^2`, a batch size.
        curved: Critical batch size :math:`\operatorname{tr}(H \Sigma) / g^\top H g`. Below it,
            training with half the batch size takes about twice the steps. NaN if the curvature
            along the gradient is not positive.
        matrix: ``hessian`` or ``ggn``.
        num_samples: Number of samples :math:`N`.
        num_products: Number of matrix-vector products used.
        num_gradients: Number of gradients of all data used.
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
                f"Gradient noise of {self.num_samples:,} samples",
                f"  tr Sigma = {plain_estimate(self.variance)}, "
                f"|g|^2 = {plain_estimate(self.gradient_square)}, "
                f"g'Hg / |g|^2 = {plain_estimate(self.along)}",
                f"  simple noise scale: batches of {plain_estimate(self.simple)}",
                f"  critical batch size (with the {self.matrix}): {plain_estimate(self.curved)}",
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
    r"""Return the noise scales of the gradient: the batch sizes at which noise equals signal.

    .. math:: B_\text{simple} = \frac{\operatorname{tr} \Sigma}{\|g\|^2}, \quad
        B = \frac{\operatorname{tr}(H \Sigma)}{g^\top H g}, \quad
        \Sigma = \frac{1}{N} \sum_i (g_i - g)(g_i - g)^\top

    A step along the gradient of :math:`b` samples reduces the loss by the fraction
    :math:`1 / (1 + B/b)` of what a step along :math:`g` does, if both use their best learning rate.
    Batches larger than :math:`B` therefore save few steps.

    :math:`\Sigma` is estimated from the gradients :math:`\bar g_j` of :math:`M` random disjoint
    groups of ``c`` samples. With the deviations :math:`d_j = \bar g_j - \bar g`, the estimate
    :math:`\hat \Sigma = \tfrac{N - 1}{N} \tfrac{c}{M - 1} \sum_j d_j d_j^\top` is unbiased, and for
    ``c = 1`` it equals :math:`\Sigma`. :math:`\operatorname{tr}(H \hat \Sigma)` is the trace of a
    matrix of size :math:`M`, estimated by XTrace.

    Cost: ``2 num_probes + 1`` products with the matrix, and two gradients of all data. If the
    gradients of all groups have more than :math:`2^{25}` entries, they are not stored, and six
    gradients are computed instead of two.

    Args:
        risk: The loss at a point. It must be a mean over samples, and batch norm must not be in
            ``train`` mode; both are checked.
        matrix: ``hessian`` or ``ggn``.
        group_size: Samples ``c`` per group. Defaults to 1 below 256 samples, and otherwise to the
            largest size that gives at least 128 groups.
        num_probes: Number of probes for the trace of :math:`H \Sigma`, at least 2.
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
    """Return :func:`gradient_noise` of an existing operator, whose traced products are reused."""
    risk = op.risk
    risk.require_separable("gradient_noise()")
    risk.require_sample_mean(alone=True)
    group_size = choose_group_size(group_size, sum(risk.batch_rows))
    num_probes = check_count("num_probes", num_probes, low=2)
    generator = resolve_generator(generator)
    groups = random_groups(risk, group_size, generator)
    # Sigma = scale sum_j d_j d_j'
    scale = groups.scale / max(1, groups.count - 1)
    # |g|^2 and g'Hg / |g|^2, for the signal
    gradient = risk.gradient()
    deviations = _Deviations(groups, progress)
    image = op.matmat(gradient[:, None])[:, 0]
    square = _square(gradient, deviations)
    along = _rayleigh(gradient, image, square)
    variance = _variance(deviations, scale, generator)
    # tr(H Sigma) = tr(scale D'HD), of order M instead of P
    noise = trace(
        _NoiseOperator(op, deviations, scale),
        # XTrace is exact with as many probes as rows.
        num_probes=min(num_probes, groups.count),
        generator=generator,
    )
    # The variance of a quadratic form of normal deviations is 2 |A|_F^2 <= 2 (tr A)^2.
    bound = abs(float(noise)) * math.sqrt(2 / max(1, groups.count - 1)) * groups.unseen
    # D'HD is quadratic in the deviations, whose relative error is half that of their variance.
    off = variance.truncation / variance.mean.clamp_min(torch.finfo(torch.float64).tiny)
    noise = replace(
        noise,
        stderr=noise.stderr.hypot(torch.tensor(bound, dtype=torch.float64)),
        truncation=noise.truncation + off * noise.mean.abs(),
    )
    return GradientNoise(
        variance=variance,
        gradient_square=square,
        along=along,
        simple=propagate(_ratio, variance, square, method=f"tr Sigma / |g|^2, {groups}"),
        curved=_critical_size(noise, along, square, str(groups)),
        matrix=op.matrix,
        num_samples=groups.total,
        num_products=noise.num_products + 1,
        num_gradients=1 + deviations.num_passes,
    )


@final
class _Deviations:
    """The deviations ``d_j`` of the gradients of groups: stored, or computed in each pass.

    Attributes:
        groups: The groups.
        mean: Their mean gradient ``(P,)``, float64.
        dtype: Data type of the gradients.
        contrasts: Terms ``(M - 1,)`` whose sum is the sum of the squared deviations.
        unit: Relative error of the gradients, by roundoff.
        num_passes: Passes over the data so far. Each costs one gradient of all data.
    """

    def __init__(self, groups: Groups, progress: bool | Progress) -> None:
        self.groups, self._progress, self.num_passes = groups, progress, 0
        theta = groups.risk.theta
        self.dtype = theta.dtype
        self.mean = torch.zeros_like(theta, dtype=torch.float64)
        fits = groups.count * len(theta) <= TUNING.stored
        self._rows = theta.new_empty(groups.count, len(theta)) if fits else None
        gaps = []
        for j, gradient in enumerate(self._pass(), start=1):
            if self._rows is not None:
                self._rows[j - 1] = gradient
            # Welford: mean_j = mean_{j-1} + (y_j - mean_{j-1}) / j
            step = gradient.double() - self.mean
            gaps.append(float(step.square().sum()) * ((j - 1) / j))
            self.mean.add_(step, alpha=1 / j)
        # The sum of (j - 1)/j |y_j - mean_{j-1}|^2 is the sum of |y_j - mean|^2.
        self.contrasts = torch.tensor(gaps[1:], dtype=torch.float64)
        # sum_j |y_j|^2 = sum_j |y_j - mean|^2 + M |mean|^2
        square = float(self.contrasts.sum()) / groups.count + float(self.mean.square().sum())
        self.unit = group_roundoff(groups.risk, math.sqrt(square))
        if self._rows is not None:
            self._rows -= self.mean.to(theta)

    def _pass(self) -> Iterator[Tensor]:
        self.num_passes += 1
        risk, count = self.groups.risk, self.groups.count
        with tracking(self._progress, "gradients of groups", count) as bar, risk.settings():
            for done, (_, context, _) in enumerate(risk.contexts(), start=1):
                yield risk.batch_gradient(context)[0]
                bar.update(done)

    def combine(self, weights: Tensor) -> Tensor:
        """Return the combinations ``D s`` of the deviations, ``(P, k)``, for ``s`` ``(M, k)``."""
        if self._rows is not None:
            return self._rows.T @ weights.to(self._rows)
        # D s = sum_j d_j s_j', one gradient at a time
        total = self.mean.new_zeros(len(self.mean), weights.shape[1])
        for row, gradient in zip(weights.double(), self._pass(), strict=True):
            total.addr_(gradient.double() - self.mean, row.to(total))
        return total.to(self.dtype)

    def project(self, block: Tensor) -> Tensor:
        """Return the inner products ``D'V`` with vectors ``V`` ``(P, k)``, of shape ``(M, k)``."""
        if self._rows is not None:
            return self._rows @ block
        rows = [(gradient - self.mean.to(gradient)) @ block for gradient in self._pass()]
        return torch.stack(rows)


@final
class _NoiseOperator(LinearOperator):
    """The matrix ``scale D'HD`` of size ``M``, which has the same trace as ``H Sigma``."""

    def __init__(self, op: CurvatureOperator, deviations: _Deviations, scale: float) -> None:
        super().__init__(
            deviations.groups.count, dtype=op.dtype, device=op.device, block_size=WIDTH
        )
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
    spread = float(deviations.contrasts.sum()) / deviations.groups.count
    off = deviations.unit * math.sqrt(size**2 + spread)
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
    eps = GROUPS.roundoff * torch.finfo(gradient.dtype).eps
    error = (2 * off * tilt + (off**2 + eps) * length) / size if off < 1 else math.inf
    return Estimate.exact(value, method="g'Hg / |g|^2", truncation=error, num_products=1)


def _ratio(top: Tensor, size: Tensor) -> Tensor:
    # Within its error the denominator must not reach zero.
    return torch.where(size > 0, top / size, torch.nan)


def _variance(deviations: _Deviations, scale: float, generator: torch.Generator) -> Estimate:
    groups, gaps = deviations.groups, deviations.contrasts
    # The mean of M - 1 contrasts is the sum over groups divided by M - 1.
    samples = gaps * (scale * (groups.count - 1))
    square = torch.tensor(float(deviations.mean.square().sum()), dtype=torch.float64)
    roundoff = contrast_roundoff(gaps, square, deviations.unit) * (scale * len(gaps))
    estimate = Estimate.of(
        samples,
        method=f"variance of the gradients of {groups}",
        num_products=0,
        truncation=roundoff,
        status=Status(outcome="completed", message=f"{groups.count} groups"),
        seed=generator.initial_seed(),
    )
    # A single contrast has no standard error, but that of two samples is exact.
    zero = torch.zeros_like(estimate.stderr)
    return replace(estimate, stderr=estimate.stderr * groups.unseen if groups.unseen else zero)


def _critical_size(noise: Estimate, along: Estimate, square: Estimate, method: str) -> Estimate:
    if is_below(along.mean, 0.0) or not bool(torch.isfinite(along.mean)):
        status = Status(
            outcome="uncertain",
            message=f"the curvature along the gradient is {float(along):.3g}, not positive",
            advice="use matrix='ggn'",
        )
        return Estimate.exact(
            math.nan, method="tr(H Sigma) / g'Hg", truncation=math.inf, status=status
        )
    return propagate(
        lambda top, rayleigh, size: _ratio(top, rayleigh * size),
        noise,
        along,
        square,
        method=f"tr(H Sigma) / g'Hg, {method}",
    )


# ------------------------------------------------------------------------------------------
# The gradient along the leading eigenvectors.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOverlap:
    r"""Overlap of the gradient with the leading eigenvectors, and the curvature along the gradient.

    Attributes:
        values: Eigenvalues :math:`\lambda_i`, the largest first, ``(k,)``.
        overlaps: :math:`(\varphi_i^\top \hat g)^2` with the unit gradient :math:`\hat g`, ``(k,)``.
            The truncation comes from the residuals of the eigenvectors and from roundoff in the
            gradient, which is measured beside float64.
        share: Sum of the overlaps: the fraction of :math:`\|g\|^2` in the leading subspace.
        curvature: Curvature along the gradient, :math:`\hat g^\top H \hat g`.
        explained: Part of this curvature in the subspace,
            :math:`\sum_i \lambda_i (\varphi_i^\top \hat g)^2`.
        gradient_norm: Norm of the gradient, :math:`\|g\|`.
        matrix: ``hessian`` or ``ggn``.
    """

    values: Tensor
    overlaps: Estimate
    share: Estimate
    curvature: Estimate
    explained: Estimate
    gradient_norm: float
    matrix: str

    def __str__(self) -> str:
        lines = [
            f"Overlap of the gradient (norm {self.gradient_norm:.4g}) with {len(self.values)} "
            f"eigenvectors of the {self.matrix}",
            f"  {float(self.share):.1%} of the squared gradient lies in their span",
            f"  curvature along the gradient {float(self.curvature):.4g}, of which "
            f"{float(self.explained):.4g} in their span",
            f"  {'lambda':>12}  overlap",
        ]
        shown = min(len(self.values), SHOWN)
        for place in range(shown):
            mean, error = self.overlaps.mean[place], self.overlaps.truncation[place]
            text = format_uncertain(float(mean), float(error))
            lines.append(f"  {float(self.values[place]):>12.5g}  {text}")
        if shown < len(self.values):
            lines.append(f"  and {len(self.values) - shown} smaller eigenvalues")
        return "\n".join(lines)


def gradient_overlap(
    risk: Risk,
    pairs: Eigenpairs | Spectrum,
    *,
    matrix: CurvatureMatrix = "hessian",
    gradient: Tensor | None = None,
) -> GradientOverlap:
    r"""Return the overlap of the gradient with eigenvectors, and the curvature along the gradient.

    .. math:: L(\theta - \alpha g) - L(\theta) = -\alpha \|g\|^2 \Big(1 - \frac{\alpha}{2}
        \sum_i \lambda_i (\varphi_i^\top \hat g)^2\Big) + O(\alpha^3)

    To second order, a step along the gradient lowers the loss if :math:`\alpha` is below two over
    the curvature along the gradient. If the gradient is nearly orthogonal to the leading
    eigenvectors, this limit is far above :math:`2 / \lambda_1`.

    Cost: one gradient and one product.

    Args:
        risk: The loss at a point.
        pairs: Eigenpairs or Ritz pairs with their vectors.
        matrix: ``hessian`` or ``ggn``: the matrix that the pairs belong to.
        gradient: Another direction ``(P,)``, such as the gradient of a batch or a step. Defaults to
            the gradient of the risk.

    Reference: *Spectral Machine Learning*, equation 5.34, with its sign corrected.
    """
    check_risk(risk)
    vectors = check_pairs(pairs, risk.space.size)
    g = risk.gradient() if gradient is None else gradient
    check_direction("gradient", g, risk)
    norm = float(g.double().norm())
    unit = g / norm
    # Eigenpairs are ascending; put the largest eigenvalue first.
    order = pairs.values.argsort(descending=True)
    values, errors = pairs.values[order], vector_errors(pairs)[order]
    cosines = inner_products(vectors, unit).cpu()[order]
    overlaps = cosines.square()
    # If an eigenvector is off by an angle of sine s, a cosine c changes by at most s. So it does if
    # the gradient is off, by roundoff near a minimum. Overlaps are between 0 and 1, so no error
    # exceeds 1.
    off = GROUPS.margin * gradient_roundoff(risk)[0] / norm if gradient is None and norm else 0.0
    errors = errors + off
    slack = (2 * cosines.abs() * errors + errors.square()).clamp(max=1.0)
    # The curvature along the gradient is g'Hg / |g|^2. Its part in the span of the eigenvectors is
    # sum_i lambda_i (phi_i'g)^2 / |g|^2.
    column = unit[:, None]
    image = curvature_operator(risk, matrix).matmat(column)
    curvature = float(column_dots(column, image))
    # As in _rayleigh(), with a gradient of norm one.
    tilt = float((image[:, 0].double() - curvature * unit.double()).norm())
    relative = off**2 + GROUPS.roundoff * torch.finfo(unit.dtype).eps
    roundoff = 2 * off * tilt + relative * float(image.double().norm())

    def exact(value: float | Tensor, truncation: float | Tensor, products: int = 0) -> Estimate:
        return Estimate.exact(
            value, method="inner products", truncation=truncation, num_products=products
        )

    return GradientOverlap(
        values=values,
        overlaps=exact(overlaps, slack),
        share=exact(float(overlaps.sum()), float(slack.sum())),
        curvature=exact(curvature, roundoff, 1),
        explained=exact(float(values @ overlaps), float(values.abs() @ slack)),
        gradient_norm=norm,
        matrix=matrix,
    )
