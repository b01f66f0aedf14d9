"""``batch_prediction`` of the curvature of mini-batches, and ``measured_batches`` to compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.blocks import column_norms, inner_products, orthonormalize
from ritz._core.checks import check_count, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, EngineName
from ritz.measures._batch_models import (
    BatchCurve,
    SampleStatistics,
    additive,
    directional,
    make_curve,
    multiplicative,
    subspace,
    summarize,
)
from ritz.measures._batch_subspace import Projections, project, small_batches
from ritz.measures._bulk_edge import check_pairs, ritz_value, vector_errors
from ritz.measures._groups import (
    check_batch_sizes,
    check_groups,
    choose_group_size,
    random_groups,
    random_vectors,
)
from ritz.measures._landscape import check_direction
from ritz.operators import ShiftedOperator
from ritz.spectra import Eigenpairs, Spectrum, eigenpairs


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the work of :func:`batch_prediction`."""

    # Number of vectors of the subspace. On three networks on MNIST and for batches of 32 or more,
    # 40 vectors changed the predictions by less than 3 %, and 10 vectors by up to 4 %.
    num_vectors: int = 20
    # Default number of groups. V(phi_1) is then known to 5 to 10 %.
    num_groups: int = 512
    # Number of random vectors outside of the subspace, for P sigma^2 and the mean eigenvalue there.
    num_probes: int = 8
    # Residual of the eigenvectors relative to the norm. Overlaps then have errors of 0.01, unless
    # eigenvalues lie closer together than 10 % of the norm.
    rtol: float = 1e-3
    # Minimum and maximum number of batches that are drawn for each small size. Eigenvalues of
    # batches of 8 are skewed: for a LeNet, the means of 20 and of 32 batches, each over two epochs
    # and three seeds, differed by 19 %.
    num_measured: tuple[int, int] = (32, 128)
    # Relative residual of their eigenvectors. The error of the eigenvalue is about its square.
    rtol_measured: float = 1e-2
    # Smallest batch size for which products are traced. For a LeNet, tracing is twice as fast at
    # 2,048; at 512 it takes longer than the products.
    traced: int = 1024
    # The noise is not homogeneous if V(phi_1) / P sigma^2 is above this (homogeneous noise has 1).
    homogeneous: float = 2.0
    # The noise is not normal if the Lindeberg ratio is above this. Homogeneous Gaussian noise has
    # 0.2 for a batch of one and 0.05 for a batch of four.
    lindeberg: float = 0.1
    # Batches below this size are drawn, if they have at most 1/share of all samples. For two
    # samples on well-trained networks (N = 600) the subspace was 13 to 44 % too low, and for four
    # it was up to 26 % off.
    smallest: int = 8
    share: int = 64
    # Batches of up to 1/cheap of all samples are drawn as well. 32 of them, with 16 products each,
    # cost 4 products with the whole matrix.
    cheap: int = 128
    # `directional` is of second order. It is trusted up to this shift relative to lambda_1. On four
    # networks that had fitted their N = 600 samples it was 0 to 10 % too high for shifts of 0.1 to
    # 0.25, 14 % for 0.65, 3 to 29 % for 1.1, and 38 to 290 % for shifts of 2.7 or more.
    second_order: float = 0.5
    # Other predictions are trusted up to this relative deviation from `best`.
    agreement: float = 0.1


TUNING = Tuning()
# The predictions, in the order of the columns of the table.
MODELS = ("subspace", "directional", "additive", "multiplicative")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrediction:
    r"""Predicted curvature of mini-batches; see :func:`batch_prediction`.

    Attributes:
        batch_sizes: Batch sizes :math:`B`; batches are drawn without replacement.
        matrix: ``hessian`` or ``ggn``.
        num_samples: Number of samples :math:`N`.
        num_parameters: Number of parameters :math:`P`.
        lambda_max: Largest eigenvalue :math:`\lambda_1` of the matrix of all data.
        variance: :math:`P \sigma^2`, the variance of the matrices of single samples.
        along: :math:`V(\varphi_1)`, the variance along the leading eigenvector.
        bulk: Mean :math:`s` of the eigenvalues outside of the subspace.
        lindeberg: Lindeberg ratio for each batch size, ``(S,)``: the fraction of the variance of
            :math:`\varphi_1^\top H_i \varphi_1` that comes from samples so extreme that one of them
            moves the mean of a batch by more than a standard deviation. The papers' models assume
            that this fraction is small.
        subspace: The subspace bootstrap.
        directional: :math:`\lambda_1 + V(\varphi_1) / (b (\lambda_1 - s))`.
        additive: The additive model of the papers, with homogeneous noise.
        multiplicative: The multiplicative model of the papers; NaN where it does not apply.
        best: The prediction to use for each batch size.
        trusted: For each prediction, by name, whether it can be trusted at each batch size; see
            :func:`batch_prediction`.
        num_vectors: Number ``k`` of vectors of the subspace.
        group_size: Number of samples per group.
        num_draws: Number of batches drawn for each size.
        num_products: Number of products with the whole matrix.
        cost: Cost in products with the whole matrix. A product with a batch counts in proportion to
            the size of the batch. One product costs about as much as one or two gradients.
        seed: Seed of groups, probes and draws.
    """

    batch_sizes: tuple[int, ...]
    matrix: str
    num_samples: int
    num_parameters: int
    lambda_max: Estimate
    variance: Estimate
    along: Estimate
    bulk: Estimate
    lindeberg: Tensor
    subspace: BatchCurve
    directional: BatchCurve
    additive: BatchCurve
    multiplicative: BatchCurve
    best: BatchCurve
    trusted: dict[str, tuple[bool, ...]]
    num_vectors: int
    group_size: int
    num_draws: int
    num_products: int
    cost: float
    seed: int

    def __str__(self) -> str:
        lines = [
            f"Predicted {self.matrix} of mini-batches: {self.num_parameters:,} parameters, "
            f"{self.num_samples:,} samples",
            f"  lambda_1 = {plain_estimate(self.lambda_max)}, "
            f"P sigma^2 = {plain_estimate(self.variance)}, "
            f"V(phi_1) = {plain_estimate(self.along)}",
            f"  {'batch':>8}{'lambda_1':>12}{'spread':>10}{'overlap':>9}  {'from':<12}"
            f"{'subspace':>12}{'directional':>12}{'additive':>12}{'multiplic.':>12}",
        ]
        for i, size in enumerate(self.batch_sizes):
            best = self.best
            others = (format_prediction(self, name, i) for name in MODELS)
            lines.append(
                f"  {size:>8,}{best.value.mean[i]:>12.4g}{best.spread.mean[i]:>10.3g}"
                f"{best.overlap.mean[i]:>9.3f}  {best.source[i]:<12}"
                + "".join(f"{text:>12}" for text in others)
            )
        lines += [f"  {line}" for line in _verdicts(self)]
        extra = self.cost - self.num_products
        lines.append(
            f"  {self.num_vectors} eigenvectors, groups of {self.group_size}; cost: "
            f"{self.num_products} products"
            + (f", and {extra:.2g} more for measured batches" if extra else "")
        )
        return "\n".join(lines)


def homogeneity(result: BatchPrediction) -> float:
    r"""Return :math:`V(\varphi_1) / P \sigma^2`: 1 for homogeneous noise and without noise."""
    # Variances below the squared roundoff of the eigenvalue count as zero.
    noise = float(result.along), float(result.variance)
    roundoff = (1e-12 * float(result.lambda_max)) ** 2
    return 1.0 if is_below(max(noise), roundoff) else noise[0] / max(noise[1], 1e-300)


def format_prediction(result: BatchPrediction, name: str, place: int) -> str:
    """Return a prediction as text, in brackets if it cannot be trusted."""
    mean = float(getattr(result, name).value.mean[place])
    text = f"{mean:.4g}" if math.isfinite(mean) else "-"
    return text if result.trusted[name][place] else f"({text})"


def _trust(
    lambda_max: Estimate,
    best: BatchCurve,
    curves: Mapping[str, BatchCurve],
) -> dict[str, tuple[bool, ...]]:
    """Return whether each prediction can be trusted, for each batch size."""
    top, value = float(lambda_max), best.value.mean
    # The second-order formula needs a shift V / (b lambda) that is small beside lambda.
    shift = (curves["directional"].value.mean - top).abs()
    rules = {"directional": shift <= TUNING.second_order * abs(top)}
    # For sizes at which no batches were drawn, `best` is `subspace`.
    for name in ("subspace", "additive", "multiplicative"):
        gap = (curves[name].value.mean - value).abs()
        rules[name] = gap <= TUNING.agreement * value.abs()
    # A model that does not apply gives NaN, and comparisons with NaN are false.
    return {name: tuple(rule.tolist()) for name, rule in rules.items()}


def _verdicts(result: BatchPrediction) -> list[str]:
    """Return which predictions to trust, and which assumptions of the models fail."""
    lines = [
        "Use the first three columns. Do not trust the numbers in brackets:",
        f"  `directional` if it shifts lambda_1 by more than {TUNING.second_order:.0%},",
        f"  the others if they deviate from the first column by more than {TUNING.agreement:.0%}",
    ]
    ratio = homogeneity(result)
    if not is_below(ratio, TUNING.homogeneous):
        lines.append(
            "The additive model does not apply: it assumes V(phi_1) = P sigma^2, but the ratio is "
            f"{ratio:.3g}."
        )
    if bool(result.multiplicative.value.mean.isnan().any()):
        lines.append(
            "The multiplicative model does not apply: the mean eigenvalue is not positive."
        )
    heavy = [
        f"{size:,}"
        for size, share in zip(result.batch_sizes, result.lindeberg.tolist(), strict=True)
        if not is_below(share, TUNING.lindeberg)
    ]
    if heavy:
        lines.append(
            f"The noise is not normal: single samples dominate batches of {', '.join(heavy)}."
        )
    return lines


def batch_prediction(
    risk: Risk,
    *,
    batch_sizes: Sequence[int],
    matrix: CurvatureMatrix = "hessian",
    num_vectors: int | None = None,
    num_draws: int = 200,
    group_size: int | None = None,
    pairs: Eigenpairs | Spectrum | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> BatchPrediction:
    r"""Predict the largest eigenvalue of mini-batch matrices, its spread and its overlap.

    .. math:: \lambda' = \lambda_\text{max}\Big(T + \frac{1}{c^2} \sum_{j \in \text{batch}}
        \frac{S_j}{\lambda' - s - \kappa_j / c}\Big), \quad
        T = \frac1c \sum_{j \in \text{batch}} U^\top H_j U

    One pass over the data projects the matrices :math:`H_j` of random groups of samples on the
    ``k`` leading eigenvectors :math:`U` of all data. It gives :math:`U^\top H_j U`, and the part
    that leaves the subspace, :math:`S_j = U^\top H_j (I - UU^\top) H_j U` (the *leak*). Batches of
    any size are then drawn as ``c`` groups without replacement, without further products.
    :math:`\kappa_j` is the curvature of a group along its leak, and :math:`s` is the mean
    eigenvalue outside of :math:`U`.

    =================  ========================================================================
    prediction         meaning
    =================  ========================================================================
    ``subspace``       the equation above, averaged over drawn batches: mean, spread and overlap
    ``directional``    :math:`\lambda_1 + V(\varphi_1) / (b (\lambda_1 - s))`; its overlap is too
                       large, because batches mix the outliers
    ``additive``       the papers' model: noise of variance :math:`P \sigma^2` in all directions
    ``multiplicative`` the papers' model of covariance matrices, whose bulk is :math:`s`
    ``best``           ``subspace``, but measured on 32 to 128 batches for small sizes: below 8
                       samples or one group, and up to ``N/128``; each size costs 4 products
    =================  ========================================================================

    Use ``best``. ``trusted`` says where the others can be trusted. ``directional`` is of second
    order and can be trusted if it shifts :math:`\lambda_1` by at most a half. Beyond, it is far too
    large: 6.7 instead of 2.4 on a network that had fitted its data. The others can be trusted
    within 10 % of ``best``. In the printed table, numbers that cannot be trusted are in brackets.

    Accuracy on four networks on MNIST: the mean of ``best`` was within 5 % of the measured mean for
    batches of 8, and within 2 % for batches of 32 or more; ``subspace`` was within 9 % and 3 %.
    ``additive`` was 68 to 73 % too low for batches of 8. See the study ``batch_spectra``.

    Errors: ``stderr`` includes the error of the draws. For groups of several samples it also
    includes that groups show only a part of the differences between samples. ``truncation`` is the
    change from ``k/2`` vectors, or half the change from :math:`\kappa_j = 0` if that is larger.

    Cost: 50 to 100 products for the eigenvectors, and one pass over small batches with ``k + 8``
    vectors. Memory: about ``4 k`` vectors, and ``k^2`` numbers per group.

    Args:
        risk: The loss at a point; see :func:`curvature_variance`. With several processes use
            ``sharing="none"``.
        batch_sizes: Batch sizes ``B``, from 1 to ``N``.
        matrix: ``hessian`` or ``ggn``.
        num_vectors: Number ``k`` of vectors of the subspace. Defaults to 20.
        num_draws: Number of batches drawn for each size, at least 10.
        group_size: Samples ``g`` per group. Defaults to 1 below 1,024 samples, and otherwise to the
            largest size that gives at least 512 groups.
        pairs: Eigenpairs or Ritz pairs of the matrix of all data, with their vectors. Pass them to
            save the cost of computing them.
        generator: Source of groups, probes and draws. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    check_groups(risk, "batch_prediction()")
    risk.require_sample_mean(alone=True)
    count = sum(risk.batch_rows)
    sizes = check_batch_sizes(batch_sizes, count)
    num_draws = check_count("num_draws", num_draws, low=10)
    if pairs is not None:
        check_pairs(pairs, risk.space.size)
    generator = resolve_generator(generator)
    group_size = choose_group_size(group_size, count, num_groups=TUNING.num_groups)
    if num_vectors is None:
        available = risk.space.size if pairs is None else len(pairs.values)
        num_vectors = min(TUNING.num_vectors, available)
    num_vectors = check_count("num_vectors", num_vectors, high=risk.space.size)
    basis, lambda_max, angle = _basis(risk, matrix, num_vectors, pairs, generator, progress)
    projections = _projections(risk, matrix, basis, group_size, generator, progress)
    spent = projections.columns + (lambda_max.num_products if pairs is None else 0)
    stats = SampleStatistics(
        projections, lambda_max, angle, risk.l2, spent, generator.initial_seed()
    )
    models = _models(stats, sizes, num_draws, generator)
    best, extra = models["subspace"], 0.0
    if small := _small_sizes(sizes, group_size, count):
        leading = basis[:, 0].contiguous()
        # For each size, as many batches as cost 4 products with the whole matrix, within limits
        least, most = TUNING.num_measured
        counts = [min(most, max(least, least * count // (TUNING.cheap * size))) for size in small]
        drawn, extra = _measure(risk, small, matrix, counts, leading, generator, progress)
        best = _merge(best, drawn, sizes, small)
    return BatchPrediction(
        batch_sizes=sizes,
        matrix=matrix,
        num_samples=count,
        num_parameters=risk.space.size,
        lambda_max=lambda_max,
        variance=stats.variance,
        along=stats.along,
        bulk=stats.bulk,
        lindeberg=stats.lindeberg(sizes),
        **models,
        best=best,
        trusted=_trust(lambda_max, best, models),
        num_vectors=num_vectors,
        group_size=group_size,
        num_draws=num_draws,
        num_products=spent,
        cost=spent + extra,
        seed=generator.initial_seed(),
    )


def _models(
    stats: SampleStatistics, sizes: Sequence[int], num_draws: int, generator: torch.Generator
) -> dict[str, BatchCurve]:
    return {
        "subspace": subspace(stats, sizes, num_draws, generator),
        "directional": directional(stats, sizes),
        "additive": additive(stats, sizes),
        "multiplicative": multiplicative(stats, sizes),
    }


def _small_sizes(sizes: Sequence[int], group_size: int, count: int) -> list[int]:
    """Return the batch sizes to measure: too small for the prediction, or cheap to measure."""
    least = max(group_size, min(TUNING.smallest, count // TUNING.share))
    return [size for size in sizes if size < least or size * TUNING.cheap <= count]


def measured_batches(
    risk: Risk,
    *,
    batch_sizes: Sequence[int],
    leading: Tensor,
    matrix: CurvatureMatrix = "hessian",
    num_batches: int = 10,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> BatchCurve:
    r"""Measure the largest eigenvalue of random batches, by Lanczos on each batch.

    Cost: 12 to 20 products per batch of ``B`` samples, each ``B/N`` of a product with the whole
    matrix. With 4,096 samples, ten batches of 8 cost 0.3 products, and ten of 2,048 cost 75. One
    more product gives the scale of the eigenvalues.

    Args:
        risk: The loss at a point; see :func:`curvature_variance`.
        batch_sizes: Batch sizes ``B``, from 1 to ``N``. The samples of a batch are distinct.
        leading: Unit eigenvector :math:`\varphi_1` of the matrix of all data, ``(P,)``.
        matrix: ``hessian`` or ``ggn``.
        num_batches: Number of batches of each size, at least 2.
        generator: Source of the batches. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    check_groups(risk, "measured_batches()")
    sizes = check_batch_sizes(batch_sizes, sum(risk.batch_rows))
    num_batches = check_count("num_batches", num_batches, low=2)
    check_direction("leading", leading, risk)
    # Overlaps are squared cosines only for a unit vector.
    if abs((norm := float(column_norms(leading[:, None]))) - 1) > 1e-3:
        raise ValueError(f"leading must have norm 1, got {norm:.6g}")
    generator = resolve_generator(generator)
    counts = [num_batches] * len(sizes)
    return _measure(risk, sizes, matrix, counts, leading, generator, progress)[0]


def _basis(
    risk: Risk,
    matrix: CurvatureMatrix,
    num_vectors: int,
    pairs: Eigenpairs | Spectrum | None,
    generator: torch.Generator,
    progress: bool | Progress,
) -> tuple[Tensor, Estimate, float]:
    """Return leading eigenvectors ``(P, k)``, the largest eigenvalue, and the error of its vector.

    The eigenvector of the largest eigenvalue comes first. Its error is the sine of its angle to the
    true eigenvector.
    """
    if pairs is None:
        # certify="none": a Krylov space may miss copies of an eigenvalue, which do not matter here.
        pairs = eigenpairs(
            curvature_operator(risk, matrix),
            largest=num_vectors,
            rtol=TUNING.rtol,
            certify="none",
            generator=generator,
            progress=progress,
        )
    vectors = check_pairs(pairs, risk.space.size)
    if vectors.shape[1] < num_vectors:
        raise ValueError(f"pairs must have at least {num_vectors} vectors, got {vectors.shape[1]}")
    # Take the largest eigenvalues only: the equation is for the largest one.
    chosen = pairs.values.argsort(descending=True)[:num_vectors]
    # With partial re-orthogonalisation, Ritz vectors are orthogonal only to the root of roundoff.
    basis, _ = orthonormalize(vectors[:, chosen.to(vectors.device)])
    first = int(chosen[0])
    lambda_max = ritz_value(pairs, first, "largest Ritz value")
    return basis, lambda_max, float(vector_errors(pairs)[first])


def _projections(
    risk: Risk,
    matrix: CurvatureMatrix,
    basis: Tensor,
    group_size: int,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Projections:
    num_probes = min(TUNING.num_probes, len(basis) - basis.shape[1])
    probes = random_vectors(risk, num_probes, generator)
    # Probes are orthogonal to the subspace, inside of which everything is known exactly. Two steps
    # of Gram-Schmidt reach roundoff.
    for _ in range(2):
        probes -= basis @ inner_products(basis, probes).to(probes)
    # If the probes span the whole complement, orthonormal ones have an exact mean.
    complete = num_probes == len(basis) - basis.shape[1]
    probes = orthonormalize(probes)[0] if complete else probes / column_norms(probes).to(probes)
    groups = random_groups(risk, group_size, generator)
    return project(groups, basis, probes, matrix=matrix, progress=progress)


def _measure(
    risk: Risk,
    sizes: Sequence[int],
    matrix: CurvatureMatrix,
    counts: Sequence[int],
    leading: Tensor,
    generator: torch.Generator,
    progress: bool | Progress,
) -> tuple[BatchCurve, float]:
    """Return the curve of random batches, and its cost in products with the whole matrix."""
    total, table, column = sum(risk.batch_rows), [], leading[:, None]
    # The first product with an engine checks it. Do this on all data, because the products of a
    # batch that is fitted well may be nothing but roundoff.
    engines = {size: _engine(size) for size in sizes}
    for engine in sorted(set(engines.values())):
        op = curvature_operator(risk, matrix, engine=engine)
        quotient = float(inner_products(op @ column, leading))
    scale = abs(quotient)
    cost = float(len(set(engines.values())))
    with tracking(progress, "batches", sum(counts)) as bar:
        for index, (size, number) in enumerate(zip(sizes, counts, strict=True)):
            rows = []
            # All batches of N samples are the same.
            draws = number if size < total else 1
            for done, batch in enumerate(small_batches(risk, size, draws, generator), start=1):
                op = curvature_operator(batch, matrix, engine=engines[size])
                # A matrix that is only roundoff is not symmetric, which would raise. A shift by the
                # scale of all data makes the asymmetry negligible.
                pairs = eigenpairs(
                    ShiftedOperator(op, scale), largest=1, rtol=TUNING.rtol_measured,
                    certify="none", generator=generator,
                )  # fmt: skip
                value = float(pairs.values[0]) - scale
                overlap = inner_products(check_pairs(pairs, len(leading))[:, :1], leading)
                # Control variate: the mean of this change over all batches is zero.
                change = float(inner_products(op @ column, leading)) - quotient
                rows.append([value, float(overlap) ** 2, change])
                cost += (pairs.num_products + 1) * size / total
                bar.update(sum(counts[:index]) + done)
            table.append(summarize(*torch.tensor(rows, dtype=torch.float64).T))
    how = f"Lanczos on {', '.join(map(str, counts))} batches"
    curve = make_curve(torch.stack(table), how, "measured", round(cost), min(counts) - 1, generator)
    return curve, cost


def _engine(size: int) -> EngineName:
    # Within the dozen products of a batch, a trace pays only if the batch is large.
    return "eager" if size < TUNING.traced else "auto"


def _merge(
    predicted: BatchCurve, measured: BatchCurve, sizes: Sequence[int], few: Sequence[int]
) -> BatchCurve:
    """Return the predicted curve, with measured entries for the sizes ``few``."""
    # If a size is repeated, it is measured as often.
    places = [place for place, size in enumerate(sizes) if size in few]

    def merge(one: Estimate, other: Estimate) -> Estimate:
        columns = {}
        for name in ("mean", "stderr", "truncation"):
            columns[name] = getattr(one, name).clone()
            columns[name][places] = getattr(other, name)
        # Fewer degrees of freedom give wider intervals, so the smaller number is safe for both.
        degrees = min(one.degrees, other.degrees)
        method = f"{one.method}; for small batches {other.method}"
        return replace(one, **columns, degrees=degrees, method=method)

    source = ["measured" if size in few else "subspace" for size in sizes]
    return BatchCurve(
        value=merge(predicted.value, measured.value),
        spread=merge(predicted.spread, measured.spread),
        overlap=merge(predicted.overlap, measured.overlap),
        source=tuple(source),
    )
