"""Random groups of samples, the variance of their matrices, and checks of batch sizes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from ritz._core.blocks import column_dots
from ritz._core.checks import check_count
from ritz._core.distributed import world_size
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes
from ritz._core.sampling import check_samples
from ritz.curvature import Risk
from ritz.curvature._shared import (
    CurvatureMatrix,
    batch_products,
    check_risk,
    gradient_roundoff,
    known_loss,
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of groups and blocks."""

    # Number of probes per block. Each group costs one pass per block; the memory is four blocks.
    block: int = 8
    # Default number of groups. The relative error of the standard error is then 1 / sqrt(2 * 127),
    # or 6 %.
    num_groups: int = 128
    # Roundoff in a gradient or product of a network, in units of machine precision. The errors in
    # float32 are up to 6 units for networks with one hidden layer, and up to 50 for ten layers.
    roundoff: float = 16.0
    # Where the terms of a loss cancel, as predictions and targets do near a minimum, roundoff is
    # this multiple of what a few groups show beside float64. On 96 smooth networks with six losses,
    # fitted to 1e-1 to 1e-15, no error exceeds 0.3 of its bar.
    margin: float = 2.0


TUNING = Tuning()
Number = TypeVar("Number", float, Tensor)


def random_vectors(
    risk: Risk, count: int, generator: torch.Generator, *, kind: Probe = "gaussian"
) -> Tensor:
    """Return random vectors ``(P, count)`` in weight space, with the dtype of the weights."""
    theta = risk.theta
    shape = (len(theta), count)
    return probes(shape, kind=kind, generator=generator, dtype=theta.dtype, device=theta.device)


def share_of_variance(batch_size: Number, num_samples: int) -> Number:
    r"""Return the variance of the mean of a batch, as a fraction of the variance of one sample.

    .. math:: \frac1b = \Big(\frac1B - \frac1N\Big) \frac{N}{N - 1} = \frac{N - B}{B (N - 1)}

    The batch has :math:`B` distinct samples of :math:`N`. The fraction is exactly 0 for ``B = N``.
    """
    return (num_samples - batch_size) / (batch_size * max(1, num_samples - 1))


def check_groups(risk: Risk, caller: str) -> None:
    """Raise unless the matrices of single samples are defined and all samples are local."""
    check_risk(risk)
    risk.require_separable(caller)
    if risk.dropout != "off":
        # A dropout mask belongs to a batch, not to a sample.
        raise ValueError(f"{caller} needs dropout='off', got {risk.dropout!r}")
    if risk.sharing != "none" and world_size(risk.group) > 1:
        raise ValueError(f"{caller} needs sharing='none', got {risk.sharing!r}")
    if risk.num_samples < 2:
        raise ValueError(f"{caller} needs at least 2 samples, got {risk.num_samples}")


def choose_group_size(
    group_size: int | None, count: int, *, num_groups: int = TUNING.num_groups
) -> int:
    """Return the number of samples per group. The default gives at least ``num_groups`` groups."""
    if group_size is None:
        group_size = max(1, count // num_groups)
    # A standard error needs at least three groups.
    return check_count("group_size", group_size, high=max(1, count // 3))


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Random disjoint groups of samples.

    Attributes:
        risk: The risk with one batch per group.
        size: Number ``g`` of samples per group.
        total: Number ``N`` of all samples. Those left over are in no group.
    """

    risk: Risk
    size: int
    total: int

    @property
    def count(self) -> int:
        """Number ``M`` of groups."""
        return self.risk.num_batches

    @property
    def scale(self) -> float:
        """Variance of a sample over the mean contrast of groups, in expectation; see contrasts."""
        return self.size * (self.total - 1) / self.total

    @property
    def unseen(self) -> float:
        """Finite-population correction of a standard error over the groups."""
        # The means of M groups span M - 1 of the N - 1 contrasts between samples. Groups of one
        # sample span all of them, so that nothing is left to chance.
        return math.sqrt(max(0, self.total - self.count) / max(1, self.total - 1))

    def __str__(self) -> str:
        return "single samples" if self.size == 1 else f"{self.count} random groups of {self.size}"


def random_groups(risk: Risk, group_size: int, generator: torch.Generator) -> Groups:
    """Return random groups of this size; leftover samples are dropped."""
    count = sum(risk.batch_rows)
    order = torch.randperm(count, generator=generator, device=generator.device)
    used = order[: count // group_size * group_size].to(risk.theta.device)
    return Groups(risk.samples(used, batch_size=group_size), group_size, count)


def check_batch_sizes(sizes: Sequence[int], count: int | None) -> tuple[int, ...]:
    """Return batch sizes as a tuple; raise unless each is between 1 and ``count``."""
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise TypeError(
            f"batch_sizes must be a sequence of integers such as (8, 64), got {sizes!r}"
        )
    sizes = tuple(sizes)
    if not sizes:
        raise ValueError("batch_sizes must not be empty")
    for size in sizes:
        check_count("batch_sizes", size, high=count)
    return sizes


def contrasts(
    groups: Groups,
    vectors: Tensor,
    matrix: CurvatureMatrix,
    *,
    root: float | Tensor = 1.0,
    progress: bool | Progress = False,
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\frac{j-1}{j} \|y_j - \bar y_{j-1}\|^2` of groups, ``(M - 1, k)``.

    Here :math:`y_j = R H_j v`, and ``root`` ``(P, 1)`` is the diagonal of the matrix :math:`R`.
    The sum of the contrasts is :math:`\sum_j \|y_j - \bar y\|^2`, computed in one pass and without
    cancellation (Welford). For random groups, the contrasts have equal means and are uncorrelated
    to first order. Also return the roundoff of their mean, ``(k,)``.
    """
    blocks, done = vectors.split(TUNING.block, 1), 0
    parts: list[Tensor] = []
    means: list[Tensor] = []
    with tracking(progress, "curvature of groups", len(blocks) * groups.count) as bar:
        for block in blocks:
            mean = torch.zeros_like(block, dtype=torch.float64)
            terms, products = [], batch_products(groups.risk, block, matrix=matrix)
            for j, (_, product) in enumerate(products, start=1):
                # mean_j = mean_{j-1} + (y_j - mean_{j-1}) / j
                step = (root * product).double() - mean
                terms.append(column_dots(step, step) * ((j - 1) / j))
                mean.add_(step, alpha=1 / j)
                done += 1
                bar.update(done)
            # The first contrast is zero: a single group has no deviation from its mean.
            parts.append(torch.stack(terms[1:]).cpu())
            means.append(column_dots(mean, mean).cpu())
            check_samples(parts[-1].T, sum(part.shape[1] for part in parts[:-1]))
    gaps = torch.cat(parts, 1)
    return gaps, contrast_roundoff(gaps, torch.cat(means), product_roundoff(groups.risk))


def product_roundoff(risk: Risk) -> float:
    """Return the relative error of the products of groups, by roundoff."""
    # The second derivatives of squared errors do not cancel. For other losses, the errors of the
    # gradients stand for those of the products.
    known = known_loss(risk.loss_fn)
    if known is not None and known.kind == "squared_error":
        return TUNING.roundoff * torch.finfo(risk.theta.dtype).eps
    return group_roundoff(risk)


def group_roundoff(risk: Risk, size: float | None = None) -> float:
    """Return the relative error of the gradients of groups or batches, by roundoff.

    Args:
        risk: The risk, with one batch per group.
        size: The root mean square of the norms of all gradients. By default, those of a few groups
            stand for all of them.
    """
    gap, norm = gradient_roundoff(risk)
    known = known_loss(risk.loss_fn)
    if size is None:
        size = norm
    elif known is not None and known.kind != "squared_error":
        # Each gradient of an entropy has a relative error, that of its odds, which grows with the
        # outputs. A gradient that is larger than those compared has a larger error.
        size = min(size, norm)
    measured = TUNING.margin * gap / size if size > 0 else 0.0
    return max(TUNING.roundoff * torch.finfo(risk.theta.dtype).eps, measured)


def contrast_roundoff(gaps: Tensor, mean_square: Tensor, unit: float) -> Tensor:
    r"""Return the roundoff of the mean of contrasts ``(M - 1, k)``, ``(k,)``.

    Args:
        gaps: The contrasts, with the sum :math:`S = \sum_j \|y_j - \bar y\|^2`.
        mean_square: :math:`\|\bar y\|^2`, ``(k,)``.
        unit: Relative error of the :math:`y_j`.
    """
    total = gaps.sum(0)
    # If each y_j is off by eps |y_j|, the root of S is off by at most eps times that of
    # sum_j |y_j|^2 = S + M |mean|^2.
    size = (total + (len(gaps) + 1) * mean_square).sqrt()
    off = unit * size
    return (2 * total.sqrt() * off + off.square()) / len(gaps)
