"""``BatchCurve``: the largest eigenvalue over batch sizes, and the models that predict it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.results import Estimate, Status, format_uncertain, skewed_stderr
from ritz._core.storage import storable
from ritz.measures._batch_subspace import Projections, choose_groups, draw_batches
from ritz.measures._groups import product_roundoff, share_of_variance
from ritz.rmt import additive_spikes, multiplicative_spikes

# Minimum number of draws for the first-order change to serve as a control variate.
MIN_DRAWS = 10


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCurve:
    r"""Largest eigenvalue of mini-batch matrices, its spread and overlap, for several batch sizes.

    Attributes:
        value: Mean of :math:`\lambda_1` over batches, ``(S,)``.
        spread: Standard deviation of :math:`\lambda_1` between batches, ``(S,)``; NaN if the model
            does not predict it.
        overlap: Mean of :math:`|\langle \varphi', \varphi_1 \rangle|^2`, the squared cosine between
            the leading eigenvectors of a batch and of all data, ``(S,)``.
        source: Origin of each entry, ``S`` names: ``measured``, ``subspace``, ``directional``,
            ``additive`` or ``multiplicative``.
    """

    value: Estimate
    spread: Estimate
    overlap: Estimate
    source: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"Largest eigenvalue of batches of {len(self.source)} sizes",
            f"  {'lambda_1':>18}  {'spread':>18}  {'overlap':>18}  from",
        ]
        for place, source in enumerate(self.source):
            cells = (
                format_uncertain(float(part.mean[place]), float(part.stderr[place]))
                for part in (self.value, self.spread, self.overlap)
            )
            lines.append("  " + "  ".join([*(f"{cell:>18}" for cell in cells), source]))
        return "\n".join(lines)


class SampleStatistics:
    """Variances and mean eigenvalue that all predictions use, from the projections of groups.

    Args:
        projections: Projections of groups of samples.
        lambda_max: Largest eigenvalue of all data, with the L2 term.
        angle: Sine of the angle between the first vector of the basis and its eigenvector.
        l2: The L2 term, which shifts every eigenvalue.
        num_products: Number of products used.
        seed: Seed of groups and probes.
    """

    def __init__(
        self,
        projections: Projections,
        lambda_max: Estimate,
        angle: float,
        l2: float,
        num_products: int,
        seed: int,
    ) -> None:
        self.projections, self.l2 = projections, l2
        self.num_products, self.seed = num_products, seed
        self.lambda_1 = float(lambda_max.mean) - l2
        # The error of the eigenvalue of all data is part of the error of every prediction.
        self.lambda_error = float(lambda_max.truncation)
        p = projections
        size, rank = p.num_parameters, p.small.shape[1]
        along = p.factor * p.along()
        unit = product_roundoff(p.groups.risk)
        roundoff = p.factor * p.roundoff(unit)
        self.along = self._over_groups(along[:, 0], "V(phi_1)")
        # V is a quadratic form. If phi is off by the angle a, V(phi) changes by at most 2 a |V phi|
        # to first order, and |V phi|^2 is at most V(phi) times the largest V.
        largest = float(along.mean(0).max())
        tilt = 2 * angle * math.sqrt(max(float(self.along), 0.0) * largest)
        self.along = replace(self.along, truncation=roundoff[0] + tilt)
        # Relative error of V(phi_1). Groups of several samples do not show all their differences.
        self.relative_error = float(self.along.stderr) / max(float(self.along), 1e-300)
        outside = p.factor * p.gaps
        # P sigma^2 = (1/P) (sum_a V(u_a) + (P - k) E V(z)), where the probes z are orthogonal to U.
        left = (size - rank) / size
        inside = along.sum(1) / size
        probed = outside.mean(1) if outside.shape[1] else torch.zeros_like(inside)
        grouped = self._over_groups(inside + left * probed, "P sigma^2")
        # Probes that span the whole complement of U cause no sampling error.
        complete = outside.shape[1] == size - rank
        sampled = 0.0 if complete else _error(outside.mean(0)) * left
        self.variance = replace(
            grouped,
            stderr=grouped.stderr.hypot(torch.tensor(sampled, dtype=torch.float64)),
            # The mean over all directions of the roundoff along each
            truncation=roundoff[:rank].sum() / size + left * _mean(roundoff[rank:]),
            degrees=max(1, outside.shape[1] - 1),
            method=f"subspace and {outside.shape[1]} probes, {p.groups.count} groups",
        )
        # z'Hz is off by at most eps |H z|.
        self.bulk = self._mean_outside(
            p.curvature, complete, unit * float(_mean(p.sizes[rank:].sqrt()))
        )

    @property
    def bulk_mean(self) -> float:
        """Mean eigenvalue ``s`` outside of the subspace, without the L2 term."""
        return float(self.bulk) - self.l2

    def ratios(self, sizes: Sequence[int]) -> Tensor:
        """Return :math:`1/b`, the variance of a batch as a fraction of a sample's, ``(S,)``."""
        total = self.projections.groups.total
        return torch.tensor([share_of_variance(b, total) for b in sizes], dtype=torch.float64)

    def lindeberg(self, sizes: Sequence[int]) -> Tensor:
        """Return the Lindeberg ratio of each batch size, ``(S,)``."""
        p = self.projections
        squares = (p.small[:, 0, 0] - p.small[:, 0, 0].mean()).square()
        total = squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
        # A batch is a sum of B/g groups, so its standard deviation is sqrt(B/g) times theirs. A
        # group dominates if its own deviation exceeds this.
        limits = [squares.mean() * max(1.0, size / p.groups.size) for size in sizes]
        return torch.stack([squares[squares > limit].sum() / total for limit in limits])

    def _over_groups(self, gaps: Tensor, name: str) -> Estimate:
        """Return the mean over groups of squared deviations; exact for groups of one sample."""
        estimate = Estimate.exact(
            float(gaps.mean()),
            method=f"{name} from {len(gaps)} groups",
            num_products=self.num_products,
            seed=self.seed,
        )
        error = _error(gaps) * self.projections.groups.unseen
        return replace(
            estimate, stderr=torch.tensor(error, dtype=torch.float64), degrees=len(gaps) - 1
        )

    def _mean_outside(self, curvature: Tensor, complete: bool, roundoff: float) -> Estimate:
        estimate = Estimate.exact(
            float(_mean(curvature)) + self.l2,
            method=f"{len(curvature)} probes",
            truncation=roundoff,
            num_products=self.num_products,
        )
        error = torch.tensor(0.0 if complete else _error(curvature), dtype=torch.float64)
        return replace(estimate, stderr=error, degrees=max(1, len(curvature) - 1), seed=self.seed)


def _mean(values: Tensor) -> Tensor:
    """Return the mean of values; zero if there are none."""
    return values.sum() / max(1, len(values))


def _error(samples: Tensor) -> float:
    """Return the standard error of a mean, larger if the samples are skewed.

    A curve does not store its samples, from which an interval takes the skewness.
    """
    return float(skewed_stderr(Estimate.of(samples, method="mean", num_products=0)))


# ------------------------------------------------------------------------------------------
# Curves.


def make_curve(
    table: Tensor,
    method: str,
    source: str,
    num_products: int,
    degrees: int,
    generator: torch.Generator | int,
) -> BatchCurve:
    """Return a curve from a table ``(S, 3, 3)``.

    A row has value, spread and overlap of a batch size, each with standard error and truncation.
    """
    seed = generator if isinstance(generator, int) else generator.initial_seed()
    status = Status(outcome="completed", message=f"{len(table)} batch sizes")
    value, spread, overlap = (
        Estimate(
            mean=part[:, 0],
            stderr=part[:, 1],
            truncation=part[:, 2],
            degrees=degrees,
            num_products=num_products,
            method=method,
            status=status,
            seed=seed,
        )
        for part in table.unbind(1)
    )
    return BatchCurve(value=value, spread=spread, overlap=overlap, source=(source,) * len(table))


def summarize(values: Tensor, overlaps: Tensor, changes: Tensor) -> Tensor:
    """Return the row of a curve, ``(3, 3)``, from the results ``(d,)`` of ``d`` batches.

    ``changes`` are the first-order changes ``phi_1' (H_B - H) phi_1``. Their mean over all batches
    is zero, so they serve as a control variate of the value.
    """
    if len(values) == 1:
        rows = [(float(values), 0.0, 0.0), (0.0, 0.0, 0.0), (float(overlaps), 0.0, 0.0)]
        return torch.tensor(rows, dtype=torch.float64)
    off = changes - changes.mean()
    square = float(off @ off)
    # With few draws, the slope would fit their noise.
    slope = float(off @ values) / square if square > 0 and len(values) >= MIN_DRAWS else 0.0
    adjusted = values - slope * changes
    # The slope takes one more degree of freedom.
    wider = math.sqrt((len(values) - 1) / (len(values) - 2)) if slope else 1.0
    rows = [
        (float(adjusted.mean()), wider * _error(adjusted), 0.0),
        (float(values.std()), _spread_error(values), 0.0),
        (float(overlaps.mean()), _error(overlaps), 0.0),
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _spread_error(values: Tensor) -> float:
    """Return the standard error of a standard deviation."""
    off = values - values.mean()
    variance = float(off.square().mean())
    if variance == 0:
        return 0.0
    # var(s) = s^2 (kurtosis - 1) / (4 n). Few draws underestimate the kurtosis, so use at least
    # that of a normal distribution.
    kurtosis = max(3.0, float(off.pow(4).mean()) / variance**2)
    return math.sqrt(variance * (kurtosis - 1) / (4 * len(values)))


def subspace(
    stats: SampleStatistics, sizes: Sequence[int], num_draws: int, generator: torch.Generator
) -> BatchCurve:
    """Return the subspace bootstrap. Its truncation comes from two coarser versions of it."""
    p = stats.projections
    half = p.leading(max(1, p.small.shape[1] // 2))
    # Without the curvature of groups along their leaks, the equation is of second order.
    plain = replace(p, curved=False)
    rows = []
    for size in sizes:
        chosen = choose_groups(p, size, num_draws, generator)
        full, fewer, bare = (
            summarize(draws.values, draws.overlaps, draws.first)
            for draws in (
                draw_batches(part, size, chosen, stats.bulk_mean) for part in (p, half, plain)
            )
        )
        rows.append(_with_errors(full, fewer, bare, stats))
    method = f"{num_draws} batches of {p.groups.count} groups in {p.small.shape[1]} eigenvectors"
    return make_curve(
        torch.stack(rows), method, "subspace", stats.num_products, num_draws - 1, stats.seed
    )


def _with_errors(full: Tensor, fewer: Tensor, bare: Tensor, stats: SampleStatistics) -> Tensor:
    """Add the error of the groups, and as truncation the larger of two changes.

    The first is the change from half of the vectors. The second is half of the last term of the
    equation, because the omitted terms are smaller than this term.
    """
    value, spread, overlap = full[:, 0].tolist()
    # To first order, the shift is proportional to V(phi_1) and the spread to its root. An overlap
    # o = 1/(1 + x) changes by o (1 - o) per relative change of x.
    scales = [abs(value - stats.lambda_1), spread / 2, overlap * (1 - overlap)]
    errors = torch.tensor(scales, dtype=torch.float64) * stats.relative_error
    mean, last = full[:, 0], (full - bare)[:, 0].abs() / 2
    truncation = torch.maximum((full - fewer)[:, 0].abs(), last)
    row = torch.stack([mean, full[:, 1].hypot(errors), truncation], 1)
    row[0, 0] += stats.l2
    row[0, 2] += stats.lambda_error
    return row


def directional(stats: SampleStatistics, sizes: Sequence[int]) -> BatchCurve:
    r"""Return :math:`\lambda_1 + V(\varphi_1)/(b (\lambda_1 - s))`, to second order."""
    p, gap = stats.projections, stats.lambda_1 - stats.bulk_mean
    # phi'(H_B - H) phi is the first-order change. It has mean zero and causes the spread.
    first = p.small[:, 0, 0] - p.small[:, 0, 0].mean()
    ratios = stats.ratios(sizes)
    spread = (p.factor * first.square().mean() * ratios).sqrt()
    # If the gap is not positive, the eigenvalue is inside of the bulk.
    shift = float(stats.along) * ratios / (gap if gap > 0 else math.nan)
    error, zero = shift * stats.relative_error, torch.zeros_like(shift)
    table = [
        (stats.lambda_1 + stats.l2 + shift, error, shift * 0 + stats.lambda_error),
        (spread, spread * stats.relative_error / 2, zero),
        # 1 - V / (b gap^2)
        ((1 - shift / gap).clamp_min(0.0), error / gap, shift * 0),
    ]
    curve = torch.stack([torch.stack(row, 1) for row in table], 1)
    how = "V(phi_1) from the groups"
    return make_curve(
        curve, how, "directional", stats.num_products, stats.along.degrees, stats.seed
    )


def additive(stats: SampleStatistics, sizes: Sequence[int]) -> BatchCurve:
    """Return the additive model of the papers: noise of the same variance in all directions."""
    # P sigma^2, and P sigma^2 minus and plus one standard error, for each 1/b
    noise = stats.variance.mean + stats.variance.stderr * torch.tensor([0.0, -1.0, 1.0])
    spikes = additive_spikes(
        stats.lambda_1,
        variance=noise.clamp_min(0.0)[:, None] * stats.ratios(sizes),
        centre=stats.bulk_mean,
        size=stats.projections.num_parameters,
    )
    return _curve_of_spikes(stats, spikes.value, spikes.stddev, spikes.overlap, "additive")


def multiplicative(stats: SampleStatistics, sizes: Sequence[int]) -> BatchCurve:
    """Return the multiplicative model of the papers; NaN unless bulk and outlier are positive."""
    bulk = stats.bulk_mean + float(stats.bulk.stderr) * torch.tensor([0.0, -1.0, 1.0])
    shape = (3, len(sizes))
    if not (stats.bulk_mean > 0 and stats.lambda_1 > 0):
        unknown = torch.full(shape, torch.nan, dtype=torch.float64)
        return _curve_of_spikes(stats, unknown, unknown, unknown, "multiplicative")
    order = stats.projections.num_parameters
    spikes = multiplicative_spikes(
        stats.lambda_1,
        ratio=order / torch.tensor(sizes, dtype=torch.float64),
        # The lower value must stay positive, even if the error exceeds the bulk.
        bulk=bulk.double().clamp_min(0.1 * stats.bulk_mean)[:, None],
        size=order,
    )
    return _curve_of_spikes(stats, spikes.value, spikes.stddev, spikes.overlap, "multiplicative")


def _curve_of_spikes(
    stats: SampleStatistics, values: Tensor, spreads: Tensor, overlaps: Tensor, source: str
) -> BatchCurve:
    """Return a curve from a model at its parameter, and at one standard error below and above."""
    models = torch.stack([values + stats.l2, spreads, overlaps], -1)  # (3, S, 3)
    slack = torch.tensor([stats.lambda_error, 0.0, 0.0], dtype=torch.float64)
    half = (models[2] - models[1]).abs() / 2
    table = torch.stack([models[0], half, slack.expand_as(half)], -1)
    parameter = stats.variance if source == "additive" else stats.bulk
    how = f"{source} spiked model"
    return make_curve(table, how, source, stats.num_products, parameter.degrees, stats.seed)
