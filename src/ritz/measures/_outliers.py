"""``bulk_edge``: bulk and outliers of a spectrum; ``gradient_overlap`` with its eigenvectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_range, check_tensor
from ritz._core.results import Estimate, format_uncertain, plain_estimate
from ritz._core.sampling import ROUNDOFF, column_dots
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, check_risk
from ritz.rmt import additive_spikes, multiplicative_spikes
from ritz.spectra import Eigenpairs, Spectrum

# The crude cut-off of the papers is KAPPA tr(H) / P.
KAPPA = 5.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """When a Ritz value counts as a single eigenvalue, apart from the bulk."""

    # A Ritz value has converged if its residual is below this fraction of the gap to the next one.
    converged: float = 0.01
    # A single eigenvalue has the weight z^2 / P with normal z, and z^2 exceeds this number with
    # probability 0.001.
    weight: float = 10.8


TUNING = Tuning()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BulkEdge:
    r"""The bulk of a spectrum, and the outliers beyond it.

    Attributes:
        lower: Lower edge :math:`\lambda_-` of the bulk, by the weights of Ritz values.
        upper: Upper edge :math:`\lambda_+`.
        noise: Edges of the bulk by the law of the noise, or NaN if the noise is not known.
        margin: Width of the Tracy-Widom region beyond the edges of the law, including two
            standard errors of its centre; NaN if the noise is not known.
        crude: :math:`5 \operatorname{tr} H / P`, the papers' rule of thumb.
        outliers: Ritz values outside of bulk and Tracy-Widom region, ascending, ``(r,)``.
        near: Ritz values beyond the bulk, but inside of the Tracy-Widom region, ``(t,)``.
        values: All Ritz values of the first run, ascending, ``(m,)``.
        weights: Their weights, ``(m,)``.
        dimension: Order :math:`P` of the matrix.
        matrix: Which matrix it is.
    """

    lower: float
    upper: float
    noise: tuple[float, float]
    margin: float
    crude: Estimate
    outliers: Tensor
    near: Tensor
    values: Tensor
    weights: Tensor
    dimension: int
    matrix: str | None

    def __str__(self) -> str:
        lines = [f"Bulk of the {self.matrix or 'matrix'} of order {self.dimension:,}"]
        lines.append(f"  by Ritz weights        [{self.lower:.4g}, {self.upper:.4g}]")
        if not math.isnan(self.margin):
            low, high = self.noise
            lines.append(
                f"  by the law of noise    [{low:.4g}, {high:.4g}], Tracy-Widom region "
                f"{self.margin:.2g} beyond"
            )
        lines.append(f"  5 tr H / P             {plain_estimate(self.crude)}")
        shown = ", ".join(f"{value:.4g}" for value in self.outliers.flip(0).tolist())
        lines.append(f"  {len(self.outliers)} outliers: {shown or 'none'}")
        if len(self.near):
            lines.append(f"  {len(self.near)} more in the Tracy-Widom region")
        return "\n".join(lines)


def bulk_edge(
    spectrum: Spectrum | Sequence[Spectrum],
    *,
    variance: float | Estimate | None = None,
    batch_size: int | None = None,
    law: str = "semicircle",
    level: float = 0.99,
) -> BulkEdge:
    r"""Return the edges of the bulk of a spectrum, and the outliers beyond it.

    There are three criteria, from the most to the least reliable:

    - *Ritz weights*: a single eigenvalue has the weight :math:`z^2/P`, :math:`z` normal, in a
      random start vector. The bulk ends, on either side of the heaviest Ritz value, before the
      first whose weight is below :math:`1/P`, or which has converged and whose weight is that of
      a single eigenvalue with probability 0.999.
    - *law of the noise*: differences between samples cause a bulk. For homogeneous noise of
      :math:`P \sigma^2` per sample it is a semicircle of radius :math:`2 \sqrt{P \sigma^2 / B}`
      around the mean eigenvalue. For a sum of ``B`` random matrices of rank one it is the
      Marchenko-Pastur law with the edges :math:`s (1 \pm \sqrt{P/B})^2`. The Tracy-Widom law
      describes by how much the largest eigenvalue of the noise exceeds the edge.
    - *crude*: :math:`5 \operatorname{tr} H / P`.

    An outlier lies beyond the first edge and, if the noise is known, beyond the second edge plus
    its margin. Cost: no products.

    Args:
        spectrum: Lanczos runs from random start vectors; weights of several are averaged.
        variance: :math:`P \sigma^2` of single samples; see :func:`curvature_variance`. Needed for
            ``semicircle``.
        batch_size: Number ``B`` of samples of which the matrix is a mean.
        law: ``semicircle`` (additive noise) or ``marchenko_pastur`` (a positive semi-definite
            matrix).
        level: Quantile of the Tracy-Widom law that is the margin.

    Reference: Granziol et al., *Explaining the adaptive generalisation gap*, section 2.1; Johnstone
    (2001) for the margin.
    """
    runs = (spectrum,) if isinstance(spectrum, Spectrum) else tuple(spectrum)
    if not runs:
        raise ValueError("spectrum must hold at least one run")
    check_choice("law", law, ("semicircle", "marchenko_pastur"))
    check_range("level", level, low=0.5, high=1 - 1e-6)
    noise = None if variance is None else float(variance)
    if noise is not None:
        check_range("variance", noise, low=0.0)
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size)
    # The bulk is the intersection of the intervals of all runs: in some of them an outlier may have
    # a large weight by chance.
    edges = torch.tensor([_edges(run) for run in runs], dtype=torch.float64)
    lower, upper = float(edges[:, 0].max()), float(edges[:, 1].min())
    first = runs[0]
    centre, error = _centre(runs, lower, upper)
    low, high, margin = _noise_edges(law, centre, noise, batch_size, first.dimension, level)
    # Add the error of the centre of the law.
    margin += 2 * error
    inside = (first.values >= lower) & (first.values <= upper)
    outside = ~inside
    # Without a law the edges are NaN, and no value is near.
    near = outside & (first.values >= low - margin) & (first.values <= high + margin)
    # tr H / P = sum_k tau_k theta_k for one unit start vector.
    means = torch.stack([run.weights @ run.values for run in runs])
    spent = sum(run.num_products for run in runs)
    crude = Estimate.of(KAPPA * means, method="5 tr H / P", num_products=spent)
    if len(runs) == 1:
        # The variance of v'Hv over unit vectors is 2/(P + 2) times that of the eigenvalues.
        spread = first.weights @ (first.values - means[0]).square()
        deviation = KAPPA * (2 * spread / (first.dimension + 2)).sqrt()
        crude = replace(crude, stderr=deviation.to(crude.mean))
    return BulkEdge(
        lower=lower,
        upper=upper,
        noise=(low, high),
        margin=margin,
        crude=crude,
        outliers=first.values[outside & ~near],
        near=first.values[near],
        values=first.values,
        weights=first.weights,
        dimension=first.dimension,
        matrix=first.matrix,
    )


def _edges(run: Spectrum) -> tuple[float, float]:
    """Return the Ritz values at the two ends of the bulk of a run."""
    values, counts = run.values, run.weights * run.dimension
    heaviest = int(counts.argmax())
    # One eigenvalue has the weight z^2 / P in a random unit vector, with mean 1 / P.
    single = (counts < 1) | ((vector_errors(run) < TUNING.converged) & (counts < TUNING.weight))
    above = single[heaviest + 1 :].nonzero()[:, 0]
    below = single[:heaviest].nonzero()[:, 0]
    # Without a single value on a side, the bulk reaches to the end of the spectrum.
    last = heaviest + int(above[0]) if len(above) else len(values) - 1
    start = int(below[-1]) + 1 if len(below) else 0
    return float(values[start]), float(values[last])


def _centre(runs: Sequence[Spectrum], lower: float, upper: float) -> tuple[float, float]:
    """Return the mean of the bulk, without its outliers, and its standard error."""
    values = torch.cat([run.values for run in runs])
    mass = torch.cat([run.weights for run in runs]) * ((values >= lower) & (values <= upper))
    mass = mass / mass.sum()
    centre = float(mass @ values)
    # A quadratic form z'Az of a unit vector has the variance 2 tr (A - c)^2 / n^2.
    variance = 2 * float(mass @ (values - centre).square()) / runs[0].dimension
    return centre, math.sqrt(variance / len(runs))


def _noise_edges(
    law: str,
    centre: float,
    variance: float | None,
    batch_size: int | None,
    size: int,
    level: float,
) -> tuple[float, float, float]:
    """Return the edges of the noise and the width of the Tracy-Widom region, or NaN."""
    if batch_size is None or (law == "semicircle" and variance is None):
        return math.nan, math.nan, math.nan
    if law == "marchenko_pastur":
        if centre <= 0:
            raise ValueError(f"law='marchenko_pastur' needs a positive mean, got {centre:.3g}")
        # Marchenko-Pastur: s (1 -+ sqrt(P / B))^2. If P > B, a mass at 0 is below the lower edge.
        root = math.sqrt(size / batch_size)
        low, high = centre * max(0.0, 1 - root) ** 2, centre * (1 + root) ** 2
        bulk = multiplicative_spikes(centre, ratio=root**2, bulk=centre, size=size, level=level)
    else:
        # Entries of variance sigma^2 / B make a semicircle of radius 2 sqrt(P sigma^2 / B).
        noise = (variance or 0.0) / batch_size
        low, high = centre - 2 * math.sqrt(noise), centre + 2 * math.sqrt(noise)
        bulk = additive_spikes(centre, variance=noise, centre=centre, size=size, level=level)
    # The finite-size edge is a quantile of the largest eigenvalue of noise alone.
    return low, high, max(0.0, float(bulk.edge) - high)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOverlap:
    r"""Components of the gradient along the leading eigenvectors, and the curvature along it.

    Attributes:
        values: Eigenvalues :math:`\lambda_i`, the largest first, ``(k,)``.
        overlaps: :math:`(\varphi_i^\top \hat g)^2` with the unit gradient, ``(k,)``. Its truncation
            comes from the residuals of the eigenvectors.
        share: Their sum: the part of the squared gradient inside of the leading subspace.
        curvature: Curvature along the gradient, :math:`\hat g^\top H \hat g`.
        explained: :math:`\sum_i \lambda_i (\varphi_i^\top \hat g)^2`, its part in the subspace.
        gradient_norm: :math:`\|g\|`.
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
            f"Gradient of norm {self.gradient_norm:.4g} in {len(self.values)} eigenvectors of the "
            f"{self.matrix}",
            f"  {float(self.share):.1%} of its square; curvature along it "
            f"{float(self.curvature):.4g}, of which they explain {float(self.explained):.4g}",
            f"  {'lambda':>12}  overlap",
        ]
        errors = self.overlaps.truncation.tolist()
        for value, mean, error in zip(
            self.values.tolist(), self.overlaps.mean.tolist(), errors, strict=True
        ):
            lines.append(f"  {value:>12.5g}  {format_uncertain(mean, error)}")
        return "\n".join(lines)


def gradient_overlap(
    risk: Risk,
    pairs: Eigenpairs | Spectrum,
    *,
    matrix: CurvatureMatrix = "hessian",
    gradient: Tensor | None = None,
) -> GradientOverlap:
    r"""Return the overlap of the gradient with eigenvectors, and the curvature along it.

    .. math:: L(\theta - \alpha g) - L(\theta) = -\alpha \|g\|^2 \Big(1 - \frac{\alpha}{2}
        \sum_i \lambda_i (\varphi_i^\top \hat g)^2\Big) + O(\alpha^3)

    To second order, a step along the gradient lowers the loss if :math:`\alpha` is below two over
    the curvature along it. This is far above :math:`2 / \lambda_1` if the gradient is nearly
    orthogonal to the leading eigenvectors.

    Cost: one gradient and one product.

    Args:
        risk: The loss at a point.
        pairs: Eigenpairs or Ritz pairs with their vectors.
        matrix: ``hessian`` or ``ggn``, the matrix of the pairs.
        gradient: Another direction ``(P,)``, such as the gradient of a batch or a step. Defaults to
            the gradient of the risk.

    Reference: *Spectral Machine Learning*, equation 5.34, with its sign corrected.
    """
    check_risk(risk)
    vectors, theta = check_pairs(pairs), risk.theta
    g = risk.gradient() if gradient is None else gradient
    check_tensor("gradient", g, dtype=theta.dtype, device=theta.device, rows=len(theta))
    check_finite("gradient", g)
    norm = float(g.double().norm())
    if norm == 0:
        raise ValueError("gradient must not be zero")
    unit = g / norm
    # Eigenpairs ascend; the largest eigenvalues come first here.
    order = pairs.values.argsort(descending=True)
    values, errors = pairs.values[order], vector_errors(pairs)[order]
    cosines = (vectors.T @ unit).double().cpu()[order]
    overlaps = cosines.square()
    # An eigenvector off by an angle of sine s changes a cosine c by at most s.
    slack = 2 * cosines.abs() * errors + errors.square()
    # The curvature along the gradient is g'Hg / |g|^2. Its part in the span of the eigenvectors is
    # sum_i lambda_i (phi_i'g)^2 / |g|^2.
    column = unit[:, None]
    image = curvature_operator(risk, matrix).matmat(column)
    curvature = float(column_dots(column, image))
    roundoff = ROUNDOFF * torch.finfo(theta.dtype).eps * float(image.double().norm())

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


def check_pairs(pairs: Eigenpairs | Spectrum) -> Tensor:
    """Return the vectors ``(P, k)`` of Ritz pairs; raise if there are none."""
    if not isinstance(pairs, Eigenpairs | Spectrum):
        raise TypeError(
            f"pairs must be a result of eigenpairs() or lanczos(), got {type(pairs).__name__}"
        )
    if pairs.vectors is None:
        raise ValueError("pairs must have vectors: pass vectors=True to eigenpairs() or lanczos()")
    return pairs.vectors


def vector_errors(pairs: Eigenpairs | Spectrum) -> Tensor:
    """Return bounds of the sines of the angles between Ritz vectors and eigenvectors, ``(m,)``."""
    # sin(u, eigenvector) <= |A u - theta u| / gap, with the gap to the nearest other eigenvalue.
    gaps = pairs.gaps if isinstance(pairs, Eigenpairs) else None
    if gaps is None:
        distances = (pairs.values[:, None] - pairs.values).abs()
        gaps = distances.fill_diagonal_(math.inf).amin(1)
    return (pairs.residuals / gaps).nan_to_num(nan=1.0).clamp(max=1.0)
