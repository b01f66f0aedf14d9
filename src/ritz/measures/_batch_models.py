"""Curves of the largest eigenvalue over batch sizes, one function for each prediction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.results import Estimate, Status, skewed_stderr
from ritz._core.storage import storable
from ritz.measures._batch_subspace import Projections, choose_groups, draw_batches
from ritz.measures._groups import without_replacement
from ritz.rmt import additive_spikes, multiplicative_spikes

# Mean, standard error and truncation of a number.
Number = tuple[float, float, float]
UNKNOWN: Number = (math.nan, math.nan, math.nan)
# Fewest draws whose mean is corrected by the change of first order.
FEWEST = 10


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCurve:
    r"""Largest eigenvalue of mini-batch matrices, its spread and overlap, for several batch sizes.

    Attributes:
        value: Mean of :math:`\lambda_1` over batches, ``(S,)``.
        spread: Standard deviation of :math:`\lambda_1` between batches, ``(S,)``; NaN where the
            model says nothing about it.
        overlap: Mean of :math:`|\langle \varphi', \varphi_1 \rangle|^2`, the squared cosine between
            the leading eigenvectors of a batch and of all data, ``(S,)``.
        source: Where each entry comes from: ``measured``, ``subspace``, ``directional``,
            ``additive`` or ``multiplicative``, ``S`` of them.
    """

    value: Estimate
    spread: Estimate
    overlap: Estimate
    source: tuple[str, ...]


class Facts:
    """What all predictions use: the projections, and the numbers that follow from them.

    Args:
        projections: Projections of groups of samples.
        lambda_max: Largest eigenvalue of all data, with the L2 term.
        angle: Sine of the angle between the first vector of the basis and its eigenvector.
        l2: The L2 term, which shifts every eigenvalue.
        num_products: Products that were used.
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
        self.value = float(lambda_max.mean) - l2
        # No prediction is known better than the eigenvalue of all data that it starts from.
        self.slack = float(lambda_max.truncation)
        p = projections
        size, rank = p.num_parameters, p.small.shape[1]
        along = p.factor * p.along()
        self.along = self._over_groups(along[:, 0], "V(phi_1)")
        # V is a quadratic form: a vector off by the angle a changes it by 2 a |V phi| at most, to
        # first order, and |V phi|^2 is below V(phi) times the largest V.
        largest = float(along.mean(0).max())
        tilt = 2 * angle * math.sqrt(max(float(self.along), 0.0) * largest)
        self.along = replace(self.along, truncation=torch.tensor(tilt, dtype=torch.float64))
        # Relative error of V(phi_1), from the groups, which do not show all samples.
        self.relative = float(self.along.stderr) / max(float(self.along), 1e-300)
        outside = p.factor * p.gaps
        # P sigma^2 = (1/P) (sum of V in U + (P - k) E V(z)), and z is orthogonal to U.
        left = (size - rank) / size
        inside = along.sum(1) / size
        probed = outside.mean(1) if outside.shape[1] else torch.zeros_like(inside)
        grouped = self._over_groups(inside + left * probed, "P sigma^2")
        # As many orthogonal probes as there are dimensions outside show all of it.
        complete = outside.shape[1] == size - rank
        sampled = 0.0 if complete else _error(outside.mean(0)) * left
        self.variance = replace(
            grouped,
            stderr=grouped.stderr.hypot(torch.tensor(sampled, dtype=torch.float64)),
            degrees=max(1, outside.shape[1] - 1),
            method=f"subspace and {outside.shape[1]} probes, {p.num_groups} groups",
        )
        self.bulk = self._mean_outside(p.curvature, complete)

    @property
    def centre(self) -> float:
        """Mean eigenvalue outside of the subspace, without the L2 term."""
        return float(self.bulk) - self.l2

    def ratio(self, size: int) -> float:
        """Return the variance of a batch over that of a sample, :math:`1/b`."""
        return without_replacement(size, self.projections.num_samples)

    def lindeberg(self, sizes: Sequence[int]) -> Tensor:
        """Return the Lindeberg ratio of each batch size, ``(S,)``."""
        p = self.projections
        squares = (p.small[:, 0, 0] - p.small[:, 0, 0].mean()).square()
        total = squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
        # A batch has B/g terms, and the standard deviation of their sum is sqrt(B/g) times theirs.
        limits = [squares.mean() * max(1.0, size / p.group_size) for size in sizes]
        return torch.stack([squares[squares > limit].sum() / total for limit in limits])

    def _over_groups(self, gaps: Tensor, what: str) -> Estimate:
        """Return the mean of squared deviations of groups; exact for groups of one sample."""
        estimate = Estimate.exact(
            float(gaps.mean()),
            method=f"{what} from {len(gaps)} groups",
            num_products=self.num_products,
            seed=self.seed,
        )
        error = _error(gaps) * math.sqrt(self.projections.unseen)
        return replace(
            estimate, stderr=torch.tensor(error, dtype=torch.float64), degrees=len(gaps) - 1
        )

    def _mean_outside(self, curvature: Tensor, complete: bool) -> Estimate:
        mean = float(curvature.mean()) if len(curvature) else 0.0
        estimate = Estimate.exact(
            mean + self.l2, method=f"{len(curvature)} probes", num_products=self.num_products
        )
        error = torch.tensor(0.0 if complete else _error(curvature), dtype=torch.float64)
        return replace(estimate, stderr=error, degrees=max(1, len(curvature) - 1), seed=self.seed)


def _error(samples: Tensor) -> float:
    """Return the standard error of a mean, larger if the samples are skewed.

    A curve does not store its samples, from which an interval takes the skewness.
    """
    return float(skewed_stderr(Estimate.of(samples, method="mean", num_products=0)))


# ------------------------------------------------------------------------------------------
# Curves.


def curve(
    columns: Sequence[tuple[Number, Number, Number]],
    method: str,
    source: str,
    num_products: int,
    degrees: int,
    generator: torch.Generator | int,
) -> BatchCurve:
    """Return a curve from the value, spread and overlap of each batch size."""
    seed = generator if isinstance(generator, int) else generator.initial_seed()
    table = torch.tensor(columns, dtype=torch.float64)

    def estimate(part: Tensor) -> Estimate:
        return Estimate(
            mean=part[:, 0],
            stderr=part[:, 1],
            truncation=part[:, 2],
            degrees=degrees,
            num_products=num_products,
            method=method,
            status=Status(outcome="completed", message=f"{len(part)} batch sizes"),
            seed=seed,
        )

    value, spread, overlap = (estimate(table[:, place]) for place in range(3))
    return BatchCurve(value=value, spread=spread, overlap=overlap, source=(source,) * len(columns))


def of_samples(values: Tensor, overlaps: Tensor, changes: Tensor) -> tuple[Number, Number, Number]:
    """Return value, spread and overlap of batches, ``(d,)`` each.

    The changes of first order are ``phi_1' (H_B - H) phi_1``. Their mean over all batches is zero,
    so their mean over the draws is known error.
    """
    if len(values) == 1:
        return (float(values), 0.0, 0.0), (0.0, 0.0, 0.0), (float(overlaps), 0.0, 0.0)
    off = changes - changes.mean()
    square = float(off @ off)
    # A slope through a few draws would explain their noise as well.
    slope = float(off @ values) / square if square > 0 and len(values) >= FEWEST else 0.0
    adjusted = values - slope * changes
    # The slope takes one degree of freedom more than the mean.
    wider = math.sqrt((len(values) - 1) / (len(values) - 2)) if slope else 1.0
    return (
        (float(adjusted.mean()), wider * _error(adjusted), 0.0),
        (float(values.std()), _spread_error(values), 0.0),
        (float(overlaps.mean()), _error(overlaps), 0.0),
    )


def _spread_error(values: Tensor) -> float:
    """Return the standard error of a standard deviation."""
    off = values - values.mean()
    variance = float(off.square().mean())
    if variance == 0:
        return 0.0
    # var(s) = s^2 (kurtosis - 1) / (4 n); a normal kurtosis at least, as few draws have less.
    kurtosis = max(3.0, float(off.pow(4).mean()) / variance**2)
    return math.sqrt(variance * (kurtosis - 1) / (4 * len(values)))


def subspace(
    facts: Facts, sizes: Sequence[int], num_draws: int, generator: torch.Generator
) -> BatchCurve:
    """Return the subspace bootstrap, with the changes from coarser versions as truncation."""
    p = facts.projections
    half = p.leading(max(1, p.small.shape[1] // 2))
    # Without the curvature of a group along its own leak, the equation is that of second order.
    plain = replace(p, curved=False)
    columns = []
    for size in sizes:
        chosen = choose_groups(p, size, num_draws, generator)
        full, fewer, bare = (
            of_samples(draws.values, draws.overlaps, draws.first)
            for draws in (
                draw_batches(part, size, chosen, facts.centre) for part in (p, half, plain)
            )
        )
        columns.append(_with_errors(full, fewer, bare, facts))
    method = f"{num_draws} batches of {p.num_groups} groups in {p.small.shape[1]} eigenvectors"
    return curve(columns, method, "subspace", facts.num_products, num_draws - 1, facts.seed)


def _with_errors(
    full: tuple[Number, Number, Number],
    fewer: tuple[Number, Number, Number],
    bare: tuple[Number, Number, Number],
    facts: Facts,
) -> tuple[Number, Number, Number]:
    """Add the error of the groups, and as truncation the larger of two changes.

    One is the change from half of the vectors. The other is half of the last term of the equation,
    as the terms that are left out are smaller than the last one that is kept.
    """
    value, spread, overlap = (number[0] for number in full)
    # To first order the shift is proportional to the variance V(phi_1), the spread to its root,
    # and an overlap 1/(1 + x) changes by o (1 - o) per relative change of x.
    scales = (abs(value - facts.value), spread / 2, overlap * (1 - overlap))
    rows = [
        (
            number[0],
            math.hypot(number[1], scale * facts.relative),
            max(abs(number[0] - other[0]), abs(number[0] - last[0]) / 2),
        )
        for number, other, last, scale in zip(full, fewer, bare, scales, strict=True)
    ]
    first, second, third = rows
    return (first[0] + facts.l2, first[1], first[2] + facts.slack), second, third


def directional(facts: Facts, sizes: Sequence[int]) -> BatchCurve:
    r"""Return :math:`\lambda_1 + V(\varphi_1)/(b (\lambda_1 - s))`, to second order."""
    p, gap = facts.projections, facts.value - facts.centre
    # phi'(H_B - H) phi is the change of first order: it has mean zero and makes the spread.
    first = p.small[:, 0, 0] - p.small[:, 0, 0].mean()
    variance = p.factor * float(first.square().mean())
    columns = []
    for size in sizes:
        spread = math.sqrt(variance * facts.ratio(size))
        value, overlap = UNKNOWN, UNKNOWN
        if gap > 0:  # otherwise the eigenvalue is not outside of the bulk
            shift = float(facts.along) * facts.ratio(size) / gap
            error = shift * facts.relative
            value = facts.value + facts.l2 + shift, error, facts.slack
            # 1 - V / (b gap^2)
            overlap = max(0.0, 1 - shift / gap), error / gap, 0.0
        columns.append((value, (spread, spread * facts.relative / 2, 0.0), overlap))
    how = "V(phi_1) from the groups"
    return curve(columns, how, "directional", facts.num_products, facts.along.degrees, facts.seed)


def additive(facts: Facts, sizes: Sequence[int]) -> BatchCurve:
    """Return the additive model of the papers, with one variance for all directions."""
    # P sigma^2 and one standard error less and more, for each 1/b
    noise = facts.variance.mean + facts.variance.stderr * torch.tensor([0.0, -1.0, 1.0])
    ratios = torch.tensor([facts.ratio(size) for size in sizes], dtype=torch.float64)
    spikes = additive_spikes(
        facts.value,
        variance=noise.clamp_min(0.0)[:, None] * ratios,
        centre=facts.centre,
        size=facts.projections.num_parameters,
    )
    return _spiked(facts, spikes.value, spikes.stddev, spikes.overlap, "additive")


def multiplicative(facts: Facts, sizes: Sequence[int]) -> BatchCurve:
    """Return the multiplicative model of the papers; NaN unless bulk and outlier are positive."""
    bulk = facts.centre + float(facts.bulk.stderr) * torch.tensor([0.0, -1.0, 1.0])
    shape = (3, len(sizes))
    if not (facts.centre > 0 and facts.value > 0):
        unknown = torch.full(shape, torch.nan, dtype=torch.float64)
        return _spiked(facts, unknown, unknown, unknown, "multiplicative")
    order = facts.projections.num_parameters
    spikes = multiplicative_spikes(
        facts.value,
        ratio=order / torch.tensor(sizes, dtype=torch.float64),
        # An error as large as the bulk itself would make it negative.
        bulk=bulk.double().clamp_min(0.1 * facts.centre)[:, None],
        size=order,
    )
    return _spiked(facts, spikes.value, spikes.stddev, spikes.overlap, "multiplicative")


def _spiked(
    facts: Facts, values: Tensor, spreads: Tensor, overlaps: Tensor, source: str
) -> BatchCurve:
    """Return the curve of a model at a parameter and one standard error below and above it."""
    columns = []
    for place in range(values.shape[1]):
        numbers = [
            (float(part[0, place]), abs(float(part[2, place] - part[1, place])) / 2, slack)
            for part, slack in (
                (values + facts.l2, facts.slack),
                (spreads, 0.0),
                (overlaps, 0.0),
            )
        ]
        columns.append((numbers[0], numbers[1], numbers[2]))
    parameter = facts.variance if source == "additive" else facts.bulk
    how = f"{source} spiked model"
    return curve(columns, how, source, facts.num_products, parameter.degrees, facts.seed)
