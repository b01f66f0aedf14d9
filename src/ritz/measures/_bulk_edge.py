"""``bulk_edge``: edges of the bulk of a spectrum, and outliers. Errors of Ritz vectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range, check_type
from ritz._core.results import Estimate, plain_estimate
from ritz._core.storage import storable
from ritz.rmt import additive_spikes, multiplicative_spikes
from ritz.spectra import Eigenpairs, Spectrum

# The papers' rule of thumb for the upper edge is KAPPA tr(H) / P.
KAPPA = 5.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """When a Ritz value counts as a single eigenvalue outside of the bulk."""

    # A Ritz value has converged if its residual is below this fraction of the gap to the next one.
    converged: float = 0.01
    # A single eigenvalue has the weight z^2 / P, where z is standard normal. z^2 exceeds this
    # number with probability 0.001.
    weight: float = 10.8


TUNING = Tuning()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BulkEdge:
    r"""The bulk of a spectrum, and the outliers beyond it.

    Attributes:
        lower: Lower edge :math:`\lambda_-` of the bulk, from the weights of the Ritz values; NaN if
            all Ritz values are single eigenvalues, so that there is no bulk.
        upper: Upper edge :math:`\lambda_+`, likewise.
        noise: Lower and upper edge from the law of the noise; NaN if the noise is not known.
        margin: Width of the Tracy-Widom region beyond the edges of the law, including two
            standard errors of the centre; NaN if the noise is not known.
        crude: :math:`5 \operatorname{tr} H / P`, the papers' rule of thumb for the upper edge.
        outliers: Ritz values outside of the bulk and of the Tracy-Widom region, ascending,
            ``(r,)``.
        near: Ritz values outside of the bulk but inside of the Tracy-Widom region, ``(t,)``.
        values: All Ritz values of the first run, ascending, ``(m,)``.
        weights: Their weights, ``(m,)``.
        dimension: Order :math:`P` of the matrix.
        matrix: Name of the matrix, such as ``hessian``, or ``None``.
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
        none = "none: all Ritz values are single eigenvalues"
        edges = none if math.isnan(self.lower) else f"[{self.lower:.4g}, {self.upper:.4g}]"
        lines.append(f"  from Ritz weights      {edges}")
        if not math.isnan(self.margin):
            low, high = self.noise
            lines.append(
                f"  from the law of noise  [{low:.4g}, {high:.4g}], and a Tracy-Widom region of "
                f"{self.margin:.2g} on either side"
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

    Three criteria are computed, from the most to the least reliable:

    - *Ritz weights*: in a random start vector, a single eigenvalue has the weight :math:`z^2/P`,
      where :math:`z` is standard normal. A Ritz value is a single eigenvalue if its weight is
      below :math:`1/P`, or if it has converged and its weight is below the 0.999 quantile of
      :math:`z^2/P`. The bulk extends from the heaviest other Ritz value to either side, up to the
      first single eigenvalue. A small matrix, all of whose eigenvalues are found, has no bulk.
    - *Law of the noise*: differences between samples cause a bulk. For homogeneous noise with the
      variance :math:`P \sigma^2` per sample, the bulk is a semicircle of radius
      :math:`2 \sqrt{P \sigma^2 / B}` around the mean eigenvalue. For a sum of ``B`` random
      matrices of rank one, it is the Marchenko-Pastur law with the edges
      :math:`s (1 \pm \sqrt{P/B})^2`. The Tracy-Widom law says by how much the largest eigenvalue
      of the noise exceeds the edge.
    - *Rule of thumb*: :math:`5 \operatorname{tr} H / P`.

    Outliers are the Ritz values beyond the edge of the first criterion and, if the noise is known,
    also beyond the edge of the second plus its margin. Cost: no products.

    Args:
        spectrum: One or several Lanczos runs from random start vectors. The bulk of several runs is
            the intersection of their intervals.
        variance: Variance :math:`P \sigma^2` of single samples; see :func:`curvature_variance`.
            Required for the law ``semicircle``.
        batch_size: Number ``B`` of samples whose matrices are averaged.
        law: ``semicircle`` (additive noise) or ``marchenko_pastur`` (positive semi-definite
            matrices).
        level: The margin is this quantile of the Tracy-Widom law.

    Reference: Granziol et al., *Explaining the adaptive generalisation gap*, section 2.1; Johnstone
    (2001) for the margin.
    """
    runs = tuple(spectrum) if isinstance(spectrum, Sequence) else (spectrum,)
    if not runs:
        raise ValueError("spectrum must have at least one run, got none")
    for run in runs:
        check_type("spectrum", run, Spectrum, "a Spectrum from lanczos() or a sequence of them")
    check_choice("law", law, ("semicircle", "marchenko_pastur"))
    check_range("level", level, low=0.5, high=1 - 1e-6)
    noise = float(variance) if isinstance(variance, Estimate) else variance
    if noise is not None:
        check_range("variance", noise, low=0.0)
    if batch_size is not None:
        batch_size = check_count("batch_size", batch_size)
    # Intersect the intervals of all runs, because an outlier may have a large weight in some of
    # them by chance.
    edges = torch.tensor([_edges(run) for run in runs], dtype=torch.float64)
    edges = edges[~edges.isnan().any(1)]
    none = len(edges) == 0
    lower, upper = (
        (math.nan, math.nan) if none else (float(edges[:, 0].max()), float(edges[:, 1].min()))
    )
    first = runs[0]
    centre, error = _centre(runs, lower, upper)
    low, high, margin = _noise_edges(law, centre, noise, batch_size, first.dimension, level)
    margin += 2 * error  # of the centre of the law
    inside = (first.values >= lower) & (first.values <= upper)
    # Without a bulk and without a law of the noise, nothing tells outliers from other values.
    outside = ~inside & (not none or not math.isnan(margin))
    # If the noise is not known, its edges are NaN and the comparisons are false.
    near = outside & (first.values >= low - margin) & (first.values <= high + margin)
    # Each run estimates tr H / P by sum_k tau_k theta_k.
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
    """Return the Ritz values at the two ends of the bulk of a run, or NaN if it has none."""
    values, counts = run.values, run.weights * run.dimension
    # A single eigenvalue has the weight z^2 / P, with mean 1 / P; counts are z^2.
    single = (counts < 1) | ((vector_errors(run) < TUNING.converged) & (counts < TUNING.weight))
    if bool(single.all()):
        return math.nan, math.nan
    heaviest = int(torch.where(single, -1, counts).argmax())
    above = single[heaviest + 1 :].nonzero()[:, 0]
    below = single[:heaviest].nonzero()[:, 0]
    # Without a single eigenvalue on one side, the bulk extends to that end of the spectrum.
    last = heaviest + int(above[0]) if len(above) else len(values) - 1
    start = int(below[-1]) + 1 if len(below) else 0
    return float(values[start]), float(values[last])


def _centre(runs: Sequence[Spectrum], lower: float, upper: float) -> tuple[float, float]:
    """Return the mean eigenvalue of the bulk, or of all without a bulk, and its standard error."""
    values = torch.cat([run.values for run in runs])
    mass = torch.cat([run.weights for run in runs])
    if not math.isnan(lower):
        mass = mass * ((values >= lower) & (values <= upper))
    mass = mass / mass.sum()
    centre = float(mass @ values)
    # The quadratic form z'Az of a random unit vector has the variance 2 tr (A - c)^2 / n^2.
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
            raise ValueError(
                "law must be 'semicircle' unless the mean eigenvalue of the bulk is positive, got "
                f"'marchenko_pastur' and a mean of {centre:.3g}"
            )
        # Marchenko-Pastur: s (1 -+ sqrt(P / B))^2. If P > B, there is also a mass at 0.
        root = math.sqrt(size / batch_size)
        low, high = centre * max(0.0, 1 - root) ** 2, centre * (1 + root) ** 2
        bulk = multiplicative_spikes(centre, ratio=root**2, bulk=centre, size=size, level=level)
    else:
        # Entries of variance sigma^2 / B give a semicircle of radius 2 sqrt(P sigma^2 / B).
        noise = (variance or 0.0) / batch_size
        low, high = centre - 2 * math.sqrt(noise), centre + 2 * math.sqrt(noise)
        bulk = additive_spikes(centre, variance=noise, centre=centre, size=size, level=level)
    # bulk.edge is a quantile of the largest eigenvalue of the noise, at finite size.
    return low, high, max(0.0, float(bulk.edge) - high)


# ------------------------------------------------------------------------------------------
# Values and vectors of eigenpairs() and lanczos(), and how accurate they are.


def check_pairs(pairs: Eigenpairs | Spectrum, num_parameters: int) -> Tensor:
    """Return the vectors ``(P, k)`` of Ritz pairs; raise if there are none or of another order."""
    if not isinstance(pairs, Eigenpairs | Spectrum):
        raise TypeError(
            f"pairs must be a result of eigenpairs() or lanczos(), got {type(pairs).__name__}"
        )
    if pairs.vectors is None:
        raise ValueError("pairs must have vectors: pass vectors=True to eigenpairs() or lanczos()")
    if len(pairs.vectors) != num_parameters:
        raise ValueError(
            f"pairs must have vectors of {num_parameters} rows, got {len(pairs.vectors)}"
        )
    return pairs.vectors


def ritz_value(pairs: Eigenpairs | Spectrum, place: int, method: str) -> Estimate:
    """Return a Ritz value with its residual as truncation."""
    return Estimate.exact(
        pairs.values[place],
        method=method,
        truncation=float(pairs.residuals[place]),
        num_products=pairs.num_products,
        status=pairs.status,
        seed=pairs.seed,
    )


def vector_errors(pairs: Eigenpairs | Spectrum) -> Tensor:
    """Return bounds on the sine of the angle from each Ritz vector to its eigenvector, ``(m,)``."""
    # sin(angle) <= |A u - theta u| / gap, with the gap to the nearest other eigenvalue.
    gaps = pairs.gaps if isinstance(pairs, Eigenpairs) else None
    if gaps is None:
        distances = (pairs.values[:, None] - pairs.values).abs()
        gaps = distances.fill_diagonal_(math.inf).amin(1)
    return (pairs.residuals / gaps).nan_to_num(nan=1.0).clamp(max=1.0)
