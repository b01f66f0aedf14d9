"""How much the curvature of samples differs, and what that does to mini-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_tensor
from ritz._core.distributed import world_size
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes, resolve_generator
from ritz._core.results import Estimate, Status, format_uncertain, plain_estimate, stderr
from ritz._core.sampling import check_samples, column_dots
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, batch_products

BLOCK = 8  # probes multiplied at once


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Shrinkage:
    r"""The best weight of a mini-batch matrix against the multiple of the identity beside it.

    Attributes:
        batch_sizes: Sizes :math:`B` of the batches, drawn without replacement.
        beta: :math:`\beta(B)` with its error, ``(len(batch_sizes),)``.
        signal: :math:`d^2 = \|H - m I\|_F^2`.
        variance: :math:`P \sigma^2`, of single samples.
        matrix: ``hessian`` or ``ggn``.
        num_parameters: :math:`P`.
        num_samples: :math:`N`.
    """

    batch_sizes: tuple[int, ...]
    beta: Estimate
    signal: Estimate
    variance: Estimate
    matrix: str
    num_parameters: int
    num_samples: int

    def __str__(self) -> str:
        lines = [
            f"Shrinkage of the {self.matrix} towards m I, {self.num_parameters:,} parameters, "
            f"{self.num_samples:,} samples",
            f"  |H - m I|_F^2 = {plain_estimate(self.signal)}, "
            f"P sigma^2 = {plain_estimate(self.variance)}",
            f"  {'batch':>10}  beta",
        ]
        for size, mean, error in zip(
            self.batch_sizes, self.beta.mean.tolist(), self.beta.stderr.tolist(), strict=True
        ):
            lines.append(f"  {size:>10,}  {format_uncertain(mean, error)}")
        return "\n".join(lines)


def curvature_variance(
    risk: Risk,
    *,
    matrix: CurvatureMatrix = "hessian",
    group_size: int | None = None,
    num_probes: int = 8,
    along: Tensor | None = None,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`P \sigma^2`, the variance of the matrices :math:`H_i` of single samples.

    .. math:: P \sigma^2 = \mathbb{E}_v V(v), \quad
        V(v) = \frac{1}{N} \sum_i \|H_i v\|^2 - \|H v\|^2, \quad \|v\| = 1

    with :math:`\sigma^2` the variance of an element. A matrix of ``B`` samples drawn without
    replacement has :math:`(1/B - 1/N) N / (N - 1)` of it, with replacement :math:`1/B`.

    Random disjoint groups of ``g`` samples may stand for :math:`i`. With :math:`M` groups of
    matrices :math:`H_j`,

    .. math:: \hat V(v) = \frac{N - 1}{N} \frac{g}{M - 1}
        \sum_j \|(H_j - \bar H) v\|^2

    has mean :math:`V(v)` over the draw of the groups, exactly and for any ``N``: where ``g`` does
    not divide it, the samples left over are left out (at random, and the result says how many).
    For ``g = 1`` it *is* :math:`V(v)`. The standard error holds that of probes and that of groups;
    the latter is too large, by up to a factor of about two, where groups are small and few samples
    have most of the variance.

    Cost: one product with the whole for each block of 8 probes or directions, however many groups,
    though small groups use hardware less well. Memory: four blocks and a copy of the data.

    Args:
        risk: The loss at a point, a mean over samples (which is checked on the first batch); not
            with batch statistics, where samples have no matrix of their own, nor shared between
            processes.
        matrix: ``hessian`` or ``ggn``.
        group_size: ``g``; by default 1 below 256 samples, else such that there are at least 128
            groups.
        num_probes: Random unit vectors :math:`v`.
        along: Unit vectors ``(P,)`` or ``(P, k)`` instead, such as Ritz vectors: the result is
            :math:`V(v)` along each, exact for ``g = 1``.
        probe: ``rademacher`` or ``gaussian``, each then of unit length.
        generator: Source of groups and probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Algorithm 8 of *Spectral Machine Learning*, corrected.
    """
    _check_groups(risk)
    count = risk.num_samples
    if group_size is None:
        group_size = max(1, count // 128)
    # Fewer than three groups have no standard error.
    check_count("group_size", group_size, high=max(1, count // 3))
    generator = resolve_generator(generator)
    if along is None:
        check_count("num_probes", num_probes, low=2)
        vectors = _unit_probes(risk, num_probes, probe, generator)
    else:
        vectors = _checked(risk, along)
    groups = _groups(risk, group_size, generator)
    risk.require_sample_mean(alone=True)
    gaps = _contrasts(groups, vectors, matrix, progress)
    gaps *= group_size * (count - 1) / count
    # Of N - 1 contrasts of the samples M - 1 are seen: all of them where g = 1.
    unseen = (count - groups.num_batches) / (count - 1)
    return _estimate(gaps, unseen, groups, count, averaged=along is None, seed=generator)


def shrinkage(
    risk: Risk,
    *,
    batch_sizes: Sequence[int],
    matrix: CurvatureMatrix = "hessian",
    group_size: int | None = None,
    num_probes: int = 32,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Shrinkage:
    r"""Return the optimal linear shrinkage of the matrix of a mini-batch.

    Of all :math:`\beta H_B + (1 - \beta) m I`, :math:`m = \operatorname{tr} H / P`, the closest to
    :math:`H` in mean square has

    .. math:: \beta = \frac{d^2}{d^2 + e^2}, \quad d^2 = \|H - m I\|_F^2, \quad
        e^2 = \mathbb{E} \|H_B - H\|_F^2 = P (P \sigma^2) \Big(\frac1B - \frac1N\Big) \frac{N}{N-1}

    Cost: ``num_probes`` products for :math:`d^2`, from :math:`\|H z - m z\|^2`, and as many for
    :math:`P \sigma^2`, with probes of their own. Errors are propagated to first order.

    Args:
        risk: The loss at a point; see :func:`curvature_variance`.
        batch_sizes: Sizes ``B``, from 1 to ``N``.
        matrix: ``hessian`` or ``ggn``.
        group_size: Samples that stand for one; see :func:`curvature_variance`.
        num_probes: Random vectors for either part.
        generator: Source of groups and probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Ledoit and Wolf (2004), for matrices of which only products are known.
    """
    sizes, count = tuple(batch_sizes), risk.num_samples
    if not sizes:
        raise ValueError("batch_sizes must hold at least one size, got none")
    for size in sizes:
        check_count("batch_sizes", size, high=count)
    generator = resolve_generator(generator)
    variance = curvature_variance(
        risk,
        matrix=matrix,
        group_size=group_size,
        num_probes=num_probes,
        generator=generator,
        progress=progress,
    )
    signal = _signal(risk, matrix, num_probes, generator)
    rates = [(1 / size - 1 / count) * count / (count - 1) for size in sizes]
    error = risk.space.size * torch.tensor(rates, dtype=torch.float64)
    d2, e2 = signal.mean, variance.mean * error
    total = (d2 + e2).square()
    spread = torch.hypot(e2 * signal.stderr, d2 * variance.stderr * error) / total
    beta = Estimate(
        mean=d2 / (d2 + e2),
        stderr=spread,
        num_products=variance.num_products + signal.num_products,
        method=f"d^2 / (d^2 + e^2); P sigma^2 from {variance.method}",
        status=signal.status,
        seed=generator.initial_seed(),
    )
    return Shrinkage(
        batch_sizes=sizes,
        beta=beta,
        signal=signal,
        variance=variance,
        matrix=matrix,
        num_parameters=risk.space.size,
        num_samples=count,
    )


def _check_groups(risk: Risk) -> None:
    risk.require_separable("curvature_variance()")
    if risk.dropout != "off":
        raise ValueError("curvature_variance() needs dropout='off', got 'fixed': masks belong to "
                         "batches, not to samples")  # fmt: skip
    if risk.sharing != "none" and world_size(risk.group) > 1:
        raise ValueError(f"curvature_variance() needs all samples in one process, got a risk with "
                         f"sharing={risk.sharing!r}: use 'none'")  # fmt: skip
    if risk.num_samples < 2:
        raise ValueError(f"curvature_variance() needs at least 2 samples, got {risk.num_samples}")


def _groups(risk: Risk, group_size: int, generator: torch.Generator) -> Risk:
    """The risk whose batches are random disjoint groups of samples."""
    count = risk.num_samples
    order = torch.randperm(count, generator=generator, device=generator.device)
    used = order[: count // group_size * group_size].to(risk.theta.device)
    return risk.samples(used, batch_size=group_size)


def _unit_probes(risk: Risk, count: int, probe: Probe, generator: torch.Generator) -> Tensor:
    theta = risk.theta
    block = probes(
        (len(theta), count), kind=probe, generator=generator, dtype=theta.dtype, device=theta.device
    )
    return block.div_(block.norm(dim=0))


def _checked(risk: Risk, along: Tensor) -> Tensor:
    theta = risk.theta
    check_tensor("along", along, dtype=theta.dtype, device=theta.device, rows=len(theta))
    block = along if along.ndim == 2 else along[:, None]
    norms = block.double().norm(dim=0)
    worst = float(norms[(norms - 1).abs().argmax()])
    if not abs(worst - 1) <= 10 * math.sqrt(torch.finfo(theta.dtype).eps):
        raise ValueError(f"along must hold vectors of unit length, got one of length {worst:.6g}")
    return block


def _contrasts(
    groups: Risk, vectors: Tensor, matrix: CurvatureMatrix, progress: bool | Progress
) -> Tensor:
    r"""Return :math:`\frac{j-1}{j} \|y_j - \bar y_{j-1}\|^2`, :math:`y_j = H_j v`, ``(M - 1, k)``.

    Their sum over groups is that of :math:`\|y_j - \bar y\|^2`, in one pass and with nothing to
    cancel; over random groups they have one mean and are uncorrelated to first order.
    """
    blocks, done = vectors.split(BLOCK, 1), 0
    found = []
    with tracking(progress, "curvature of groups", len(blocks) * groups.num_batches) as bar:
        for block in blocks:
            mean = torch.zeros_like(block, dtype=torch.float64)
            gaps = []
            for j, (_, product) in enumerate(batch_products(groups, block, matrix=matrix), start=1):
                step = product.double() - mean
                gaps.append(column_dots(step, step) * ((j - 1) / j))
                mean.add_(step, alpha=1 / j)
                done += 1
                bar.update(done)
            found.append(torch.stack(gaps[1:]).cpu())
            check_samples(found[-1].T, sum(part.shape[1] for part in found[:-1]))
    return torch.cat(found, 1)


def _estimate(
    gaps: Tensor, unseen: float, groups: Risk, count: int, *, averaged: bool, seed: torch.Generator
) -> Estimate:
    """Mean over contrasts ``(M - 1, k)`` and, if ``averaged``, over probes."""
    samples = gaps.mean(0)
    by_groups = stderr(gaps.mean(1) if averaged else gaps) * math.sqrt(unseen) if unseen else 0.0
    size = groups.batch_sizes[0]
    method = "single samples" if size == 1 else f"{groups.num_batches} random groups of {size}"
    if (left := count - groups.num_samples) > 0:
        method += f", {left} of {count} samples left out at random"
    what = "probes" if averaged else "directions"
    return Estimate(
        mean=samples.mean() if averaged else samples,
        stderr=(stderr(samples) if averaged else torch.zeros_like(samples)).hypot(
            torch.as_tensor(by_groups, dtype=torch.float64)
        ),
        samples=samples if averaged else None,
        num_products=len(samples),
        method=method,
        status=Status(outcome="completed", message=f"{len(samples)} {what}"),
        seed=seed.initial_seed() if averaged or size > 1 else None,
    )


def _signal(
    risk: Risk, matrix: CurvatureMatrix, num_probes: int, generator: torch.Generator
) -> Estimate:
    r"""The squared distance :math:`\|H - m I\|_F^2` from the nearest multiple of the identity."""
    op = curvature_operator(risk, matrix)
    size = risk.space.size
    block = _unit_probes(risk, num_probes, "rademacher", generator)
    image = torch.cat([op.matmat(part) for part in block.split(op.block_size, 1)], 1)
    along, square = column_dots(block, image).cpu(), column_dots(image, image).cpu()
    # |H v - m v|^2 at the m of these probes: to first order that m need not be sampled again.
    m = along.mean()
    samples = size * (square - 2 * m * along + m * m)
    # The square of a sampled mean is too large by its variance.
    bias = size * stderr(along).square()
    return Estimate(
        mean=samples.mean() + bias,
        stderr=stderr(samples),
        samples=samples,
        num_products=num_probes,
        method="mean of |H z - m z|^2",
        status=Status(outcome="completed", message=f"{num_probes} probes"),
        seed=generator.initial_seed(),
    )
