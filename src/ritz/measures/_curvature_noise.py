"""``curvature_variance`` between samples, ``batch_variance``, and ``shrinkage`` of batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ritz._core.blocks import column_dots, column_norms
from ritz._core.checks import check_count, check_tensor, check_type, is_below
from ritz._core.progress import Progress
from ritz._core.propagation import propagate
from ritz._core.random import resolve_generator
from ritz._core.results import (
    Estimate,
    Status,
    format_uncertain,
    plain_estimate,
    skewed_stderr,
    stderr,
)
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, check_risk
from ritz.measures._groups import (
    check_batch_sizes,
    check_groups,
    choose_group_size,
    contrasts,
    random_groups,
    random_vectors,
    share_of_variance,
)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Shrinkage:
    r"""Optimal weight of a mini-batch matrix in a shrinkage towards the identity.

    Attributes:
        batch_sizes: Batch sizes :math:`B`; batches are drawn without replacement.
        beta: Weights :math:`\beta(B)`, ``(S,)``.
        damping: Equivalent damping :math:`\delta(B) = m (1 - \beta) / \beta`, ``(S,)``, because
            :math:`\beta H_B + (1 - \beta) m I = \beta (H_B + \delta I)`. It has the sign of the
            mean eigenvalue :math:`m`.
        signal: :math:`d^2 = \|H - m I\|_F^2`.
        variance: :math:`P \sigma^2`, the variance of the matrices of single samples.
        matrix: ``hessian`` or ``ggn``.
        num_parameters: Number of parameters :math:`P`.
        num_samples: Number of samples :math:`N`.
    """

    batch_sizes: tuple[int, ...]
    beta: Estimate
    damping: Estimate
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
            f"  {'batch':>10}  {'beta':>18}  {'damping':>18}",
        ]
        for i, size in enumerate(self.batch_sizes):
            cells = (
                format_uncertain(float(part.mean[i]), float(part.stderr[i]))
                for part in (self.beta, self.damping)
            )
            lines.append("  ".join([f"  {size:>10,}", *(f"{cell:>18}" for cell in cells)]))
        return "\n".join(lines)


def curvature_variance(
    risk: Risk,
    *,
    matrix: CurvatureMatrix = "hessian",
    group_size: int | None = None,
    num_probes: int = 8,
    along: Tensor | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`P \sigma^2`, the variance of the matrices :math:`H_i` of single samples.

    .. math:: P \sigma^2 = \mathbb{E}_v V(v), \quad
        V(v) = \frac{1}{N} \sum_i \|H_i v\|^2 - \|H v\|^2, \quad \|v\| = 1

    :math:`\sigma^2` is the variance of an entry of :math:`H_i` over the samples, averaged over the
    entries. :math:`P \sigma^2` is the mean of :math:`\|(H_i - H) v\|^2` over samples and random
    unit vectors. :func:`batch_variance` gives the variance of the matrix of a batch.

    Random disjoint groups of ``g`` samples may replace single samples. With the matrices
    :math:`H_j` of :math:`M` groups,

    .. math:: \hat V(v) = \frac{N - 1}{N} \frac{g}{M - 1}
        \sum_j \|(H_j - \bar H) v\|^2

    is an unbiased estimate of :math:`V(v)`, and for ``g = 1`` it equals :math:`V(v)`. If ``g`` does
    not divide ``N``, random samples are left out, and ``method`` says how many. The standard error
    combines the errors of probes and of groups. If groups are small and a few samples have most of
    the variance, it may be too large by a factor of about two.

    Cost: one product with the whole matrix per probe or direction, in blocks of 8. Products in
    small groups are slower. Memory: four blocks and a copy of the data.

    Args:
        risk: The loss at a point. It must be a mean over samples, and batch norm must not be in
            ``train`` mode, in which the matrix of one sample is not defined; both are checked. With
            several processes use ``sharing="none"``.
        matrix: ``hessian`` or ``ggn``.
        group_size: Samples ``g`` per group. Defaults to 1 below 256 samples, and otherwise to the
            largest size that gives at least 128 groups.
        num_probes: Number of random unit vectors :math:`v` (scaled Rademacher vectors).
        along: Unit vectors ``(P,)`` or ``(P, k)`` to use instead of random ones, such as Ritz
            vectors. The result is then :math:`V(v)` along each of them, exact for ``g = 1``.
        generator: Source of groups and probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Algorithm 8 of *Spectral Machine Learning*, corrected to the formulas above.
    """
    check_groups(risk, "curvature_variance()")
    risk.require_sample_mean(alone=True)
    count = sum(risk.batch_rows)
    group_size = choose_group_size(group_size, count)
    generator = resolve_generator(generator)
    if along is None:
        num_probes = check_count("num_probes", num_probes, low=2)
        vectors = _unit_probes(risk, num_probes, generator)
    else:
        vectors = _unit_block(risk, along)
    groups = random_groups(risk, group_size, generator)
    gaps, roundoff = contrasts(groups, vectors, matrix, progress=progress)
    # V = (N - 1)/N g/(M - 1) sum |y_j - mean|^2; the mean over contrasts divides by M - 1.
    gaps, roundoff = groups.scale * gaps, groups.scale * roundoff
    whole = group_size == 1
    # Few groups are skewed: V sums the squares of their deviations.
    by_groups = Estimate.of(
        gaps.mean(1) if along is None else gaps, method="groups", num_products=0
    )
    zero = torch.zeros_like(by_groups.mean)
    error = zero if whole else skewed_stderr(by_groups) * groups.unseen
    method = str(groups)
    if left := count % group_size:
        method += f", {left} of {count} samples left out at random"
    # Random probes are averaged. Directions in `along` have one value each.
    make, kind = (Estimate.of, "probes") if along is None else (Estimate.exact, "directions")
    num_vectors = vectors.shape[1]
    estimate = make(
        gaps.mean(0),
        method=method,
        truncation=roundoff.mean() if along is None else roundoff,
        num_products=num_vectors,
        status=Status(outcome="completed", message=f"{num_vectors} {kind}"),
        seed=None if whole and along is not None else generator.initial_seed(),
    )
    # Probes and groups are independent sources of error.
    degrees = by_groups.degrees if along is not None and not whole else estimate.degrees
    return replace(estimate, stderr=estimate.stderr.hypot(error), degrees=degrees)


def batch_variance(
    variance: Estimate, *, batch_sizes: Sequence[int], num_samples: int | None = None
) -> Estimate:
    r"""Return the variance of the matrices of batches, from that of single samples, ``(S,)``.

    .. math:: \mathbb{E} \|(H_B - H) v\|^2 = \frac{V(v)}{b}, \quad
        \frac1b = \Big(\frac1B - \frac1N\Big) \frac{N}{N - 1}

    This holds for ``B`` distinct samples of ``N``. For samples drawn with replacement, or from an
    infinite population, :math:`b = B`. Cost: no products.

    Args:
        variance: :math:`P \sigma^2`, or :math:`V(v)` along one direction; see
            :func:`curvature_variance`.
        batch_sizes: Batch sizes ``B``.
        num_samples: Number ``N`` of samples. ``None`` stands for sampling with replacement.
    """
    if num_samples is not None:
        num_samples = check_count("num_samples", num_samples)
    check_type("variance", variance, Estimate, "an Estimate")
    sizes = check_batch_sizes(batch_sizes, num_samples)
    if variance.mean.ndim:
        raise ValueError(f"variance must be one number, got shape {tuple(variance.mean.shape)}")
    # 1/b for each size. The errors are multiplied by it as well.
    factors = torch.tensor(
        [share_of_variance(size, num_samples) if num_samples else 1 / size for size in sizes],
        dtype=torch.float64,
    )
    samples = variance.samples
    return replace(
        variance,
        mean=variance.mean * factors,
        stderr=variance.stderr * factors,
        truncation=variance.truncation * factors,
        samples=None if samples is None else samples[:, None] * factors,
    )


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

    The matrix of a batch is a noisy estimate of the matrix of all data, and shrinkage reduces its
    error. Among :math:`\beta H_B + (1 - \beta) m I` with :math:`m = \operatorname{tr} H / P`, the
    closest to :math:`H` in mean square has

    .. math:: \beta = \frac{d^2}{d^2 + e^2}, \quad d^2 = \|H - m I\|_F^2, \quad
        e^2 = \mathbb{E} \|H_B - H\|_F^2 = P (P \sigma^2) \Big(\frac1B - \frac1N\Big) \frac{N}{N-1}

    :math:`d^2` is estimated from :math:`\|H z - m z\|^2`. Errors are propagated to first order.
    Cost: ``num_probes`` products for :math:`d^2`, and as many for :math:`P \sigma^2`.

    Args:
        risk: The loss at a point; see :func:`curvature_variance`.
        batch_sizes: Sizes ``B``, from 1 to ``N``.
        matrix: ``hessian`` or ``ggn``.
        group_size: Samples per group; see :func:`curvature_variance`.
        num_probes: Number of random vectors for :math:`d^2`, and for :math:`P \sigma^2`.
        generator: Source of groups and probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Ledoit and Wolf (2004) for shrinkage; Granziol et al. (2020), section 3.2, for
    shrinkage as damping.
    """
    check_risk(risk)
    count = sum(risk.batch_rows)
    sizes = check_batch_sizes(batch_sizes, count)
    generator = resolve_generator(generator)
    variance = curvature_variance(
        risk,
        matrix=matrix,
        group_size=group_size,
        num_probes=num_probes,
        generator=generator,
        progress=progress,
    )
    signal, share = _signal(risk, matrix, num_probes, generator)
    # e^2 = P (P sigma^2) (1/B - 1/N) N/(N - 1)
    factors = [share_of_variance(size, count) for size in sizes]
    scale = risk.space.size * torch.tensor(factors, dtype=torch.float64)
    # beta = d^2 / (d^2 + e^2)
    beta = propagate(
        lambda d2, spread: d2 / (d2 + spread * scale),
        signal,
        variance,
        method=f"d^2 / (d^2 + e^2); P sigma^2 from {variance.method}",
        status=signal.status,
    )
    # m (1 - beta)/beta = e^2 m/d^2
    damping = propagate(
        lambda share, spread: share * spread * scale,
        share,
        variance,
        method="m e^2 / d^2",
        status=signal.status,
    )
    num_products = variance.num_products + signal.num_products
    beta, damping = (replace(part, num_products=num_products) for part in (beta, damping))
    return Shrinkage(
        batch_sizes=sizes,
        beta=beta,
        damping=damping,
        signal=signal,
        variance=variance,
        matrix=matrix,
        num_parameters=risk.space.size,
        num_samples=count,
    )


def _unit_probes(risk: Risk, count: int, generator: torch.Generator) -> Tensor:
    block = random_vectors(risk, count, generator, kind="rademacher")
    return block.div_(column_norms(block).to(block))


def _unit_block(risk: Risk, along: Tensor) -> Tensor:
    theta = risk.theta
    check_tensor("along", along, dtype=theta.dtype, device=theta.device, rows=len(theta))
    block = along if along.ndim == 2 else along[:, None]
    norms = block.double().norm(dim=0)
    worst = float(norms[(norms - 1).abs().argmax()])
    # With partial re-orthogonalisation, lengths of Ritz vectors are off by the root of roundoff.
    if not is_below(abs(worst - 1), 10 * math.sqrt(torch.finfo(theta.dtype).eps)):
        raise ValueError(f"along must have vectors of unit length, got one of length {worst:.6g}")
    return block


def _signal(
    risk: Risk, matrix: CurvatureMatrix, num_probes: int, generator: torch.Generator
) -> tuple[Estimate, Estimate]:
    r"""Estimate :math:`d^2 = \|H - m I\|_F^2` and :math:`m / d^2`."""
    op = curvature_operator(risk, matrix)
    size = risk.space.size
    block = _unit_probes(risk, num_probes, generator)
    image = torch.cat([op.matmat(part) for part in block.split(op.block_size, 1)], 1)
    along, square = column_dots(block, image).cpu(), column_dots(image, image).cpu()
    # E |H v - m v|^2 = |H - m I|_F^2 / P for unit probes, and E v'Hv = m. The left side is smallest
    # at the true m, so an error of m has no effect to first order.
    m = along.mean()
    samples = size * (square - 2 * m * along + m * m)
    # The expected square of a sample mean exceeds the squared mean by the variance of the mean.
    bias = size * stderr(along).square()
    make = partial(Estimate.of, num_products=num_probes, seed=generator.initial_seed())
    signal = make(samples, method="mean of |H z - m z|^2")
    signal = replace(signal, mean=signal.mean + bias)
    # d(m/d^2) = dm/d^2 - m d(d^2)/d^4, for each probe, because the errors of m and d^2 are
    # correlated.
    d2 = signal.mean
    ratios = m / d2 + (along - m) / d2 - m * (samples - samples.mean()) / d2.square()
    return signal, make(ratios, method="m / d^2")
