"""What the curvature of a mini-batch will be, predicted from products on the full data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_finite, check_tensor, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix, EngineName
from ritz.measures._batch_models import (
    BatchCurve,
    Facts,
    additive,
    curve,
    directional,
    multiplicative,
    of_samples,
    subspace,
)
from ritz.measures._batch_subspace import Projections, project, small_batches
from ritz.measures._groups import check_batch_sizes, check_groups, random_vectors
from ritz.measures._outliers import vector_errors
from ritz.operators import ShiftedOperator
from ritz.spectra import Eigenpairs, Spectrum, eigenpairs


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the work of :func:`batch_prediction`."""

    # Vectors of the subspace. On three networks on MNIST 40 moved predictions by less than 3 %
    # from batches of 32 on, and 10 by up to 4 %.
    num_vectors: int = 20
    # Groups by default: V(phi_1) is then known to 5 to 10 %.
    num_groups: int = 512
    # Random vectors outside of the subspace, for P sigma^2 and the mean eigenvalue there.
    num_probes: int = 8
    # Residual of the eigenvectors, relative to the norm. Overlaps are then good to 0.01 unless
    # eigenvalues lie closer than 10 % of the norm.
    rtol: float = 1e-3
    # Fewest and most batches that are drawn for each small size, and the residual of their
    # eigenvectors. The error of the eigenvalue is of the order of its square. Eigenvalues of 8
    # samples are skewed: for LeNet the means of 20 and of 32 batches, each over two epochs and
    # three seeds, differed by 19 %.
    num_measured: tuple[int, int] = (32, 128)
    rtol_measured: float = 1e-2
    # Batch size from which on products are traced. For a LeNet at 2,048 tracing is twice as fast,
    # at 512 it takes longer than the products.
    traced: int = 1024
    # V(phi_1) / P sigma^2 above which noise is not homogeneous, and Lindeberg ratio above which it
    # is not normal. Homogeneous Gaussian noise has 1, and 0.2 for a batch of one, 0.05 for four.
    homogeneous: float = 2.0
    lindeberg: float = 0.1
    # Batches of fewer samples are drawn, up to this share of all samples: the subspace was 13 to
    # 44 % low for two samples on well-trained networks (N = 600), and up to 26 % off for four.
    smallest: int = 8
    share: int = 64
    # Batches of up to this share of all samples are drawn as well: 32 of them need 16 products
    # each, together 4 with the whole matrix.
    cheap: int = 128
    # Shift over lambda_1 up to which `directional`, which is of second order, is trusted. On four
    # networks of N = 600 that had fitted their data it was 0 to 10 % high for shifts of 0.1 to
    # 0.25, 14 % for 0.65, 3 to 29 % for 1.1, and 38 to 290 % for shifts of 2.7 and more.
    second_order: float = 0.5
    # Deviation from `best` up to which the others are trusted.
    agreement: float = 0.1


TUNING = Tuning()
# Predictions beside the best one, in the order of the table.
MODELS = ("subspace", "directional", "additive", "multiplicative")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrediction:
    r"""Predicted curvature of mini-batches; see :func:`batch_prediction`.

    Attributes:
        batch_sizes: Batch sizes :math:`B`; batches are drawn without replacement.
        matrix: ``hessian`` or ``ggn``.
        num_samples: :math:`N`.
        num_parameters: :math:`P`.
        lambda_max: Largest eigenvalue :math:`\lambda_1` of the matrix of all data.
        variance: :math:`P \sigma^2`, the variance of the matrices of single samples.
        along: :math:`V(\varphi_1)`, the variance along the leading eigenvector.
        bulk: Mean :math:`s` of the eigenvalues outside of the subspace.
        lindeberg: Lindeberg ratio of each batch size, ``(S,)``: the share of the variance of
            :math:`\varphi_1^\top H_i \varphi_1` in samples that alone move the mean of a batch by
            more than one standard deviation. The papers' models assume that it is small.
        subspace: The subspace bootstrap.
        directional: :math:`\lambda_1 + V(\varphi_1) / (b (\lambda_1 - s))`.
        additive: The additive model of the papers, with homogeneous noise.
        multiplicative: The multiplicative model of the papers; NaN where it does not apply.
        best: The prediction to use for each batch size.
        trusted: Whether to trust each prediction, by its name and for each batch size; see
            :func:`batch_prediction`.
        num_vectors: Vectors ``k`` of the subspace.
        group_size: Samples per group.
        num_draws: Batches drawn for each size.
        num_products: Number of products with the whole matrix.
        cost: Cost in products with the whole matrix, where a product with a batch counts in
            proportion to its size. One product costs about one gradient.
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
            f"Batches of the {self.matrix}: {self.num_parameters:,} parameters, "
            f"{self.num_samples:,} samples",
            f"  lambda_1 = {plain_estimate(self.lambda_max)}, "
            f"P sigma^2 = {plain_estimate(self.variance)}, "
            f"V(phi_1) = {plain_estimate(self.along)}",
            f"  {'batch':>8}{'lambda_1':>12}{'spread':>10}{'overlap':>9}  {'from':<12}"
            f"{'subspace':>12}{'directional':>12}{'additive':>12}{'multiplic.':>12}",
        ]
        for i, size in enumerate(self.batch_sizes):
            best = self.best
            others = (
                bracketed(self, name, i, f"{getattr(self, name).value.mean[i]:.4g}")
                for name in MODELS
            )
            lines.append(
                f"  {size:>8,}{best.value.mean[i]:>12.4g}{best.spread.mean[i]:>10.3g}"
                f"{best.overlap.mean[i]:>9.3f}  {best.source[i]:<12}"
                + "".join(f"{text:>12}" for text in others)
            )
        lines += [f"  {line}" for line in _verdicts(self)]
        lines.append(
            f"  {self.num_products} products and {self.cost - self.num_products:.2g} more in "
            f"batches; {self.num_vectors} eigenvectors, groups of {self.group_size}"
        )
        return "\n".join(lines)


def homogeneity(result: BatchPrediction) -> float:
    r"""Return :math:`V(\varphi_1) / P \sigma^2`, which is 1 for homogeneous noise and for none."""
    # Variances below the squared roundoff of the eigenvalue are zero.
    noise = float(result.along), float(result.variance)
    roundoff = (1e-12 * float(result.lambda_max)) ** 2
    return 1.0 if is_below(max(noise), roundoff) else noise[0] / max(noise[1], 1e-300)


def bracketed(result: BatchPrediction, name: str, place: int, text: str) -> str:
    """Return a number of a prediction as text, in brackets if it is not to be trusted."""
    return text if result.trusted[name][place] else f"({text})"


def _trusted(
    lambda_max: Estimate,
    best: BatchCurve,
    curves: Mapping[str, BatchCurve],
) -> dict[str, tuple[bool, ...]]:
    """Return whether to trust each prediction, for each batch size."""
    top, value = float(lambda_max), best.value.mean
    # A shift V / (b lambda) beyond a half of lambda is no longer small, as second order asks.
    shift = (curves["directional"].value.mean - top).abs()
    rules = {"directional": shift <= TUNING.second_order * abs(top)}
    # Where batches were drawn they judge the subspace, and elsewhere it is the best.
    for name in ("subspace", "additive", "multiplicative"):
        gap = (curves[name].value.mean - value).abs()
        rules[name] = gap <= TUNING.agreement * value.abs()
    # NaN, of a model that does not apply, is never below anything.
    return {name: tuple(rule.tolist()) for name, rule in rules.items()}


def _verdicts(result: BatchPrediction) -> list[str]:
    """Return when to trust which prediction, and which assumptions of the models fail."""
    lines = [
        "trust the first three columns; a number in brackets is outside of the range of its model:",
        f"  `directional` where it moves lambda_1 by more than {TUNING.second_order:.0%},",
        f"  the others where they are more than {TUNING.agreement:.0%} from the first column",
    ]
    ratio = homogeneity(result)
    if not is_below(ratio, TUNING.homogeneous):
        lines.append(
            f"the additive model does not apply: V(phi_1) is {ratio:.3g} times P sigma^2, which it "
            "takes for equal"
        )
    if bool(result.multiplicative.value.mean.isnan().any()):
        lines.append("the multiplicative model does not apply: the mean eigenvalue is not positive")
    heavy = [
        f"{size:,}"
        for size, share in zip(result.batch_sizes, result.lindeberg.tolist(), strict=True)
        if not is_below(share, TUNING.lindeberg)
    ]
    if heavy:
        lines.append(
            "single samples dominate batches of " + ", ".join(heavy) + ": the noise is not normal"
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
    r"""Predict the largest eigenvalue of mini-batch matrices, its spread and the overlap.

    .. math:: \lambda' = \lambda_\text{max}\Big(T + \frac{1}{c^2} \sum_{j \in \text{batch}}
        \frac{S_j}{\lambda' - s - \kappa_j / c}\Big), \quad
        T = \frac1c \sum_{j \in \text{batch}} U^\top H_j U

    Random groups ``j`` of samples are seen from the ``k`` leading eigenvectors :math:`U` of all
    data, in one pass: :math:`U^\top H_j U`, and :math:`S_j = U^\top H_j (I - UU^\top) H_j U`,
    what leaves the subspace. A batch of any size is then ``c`` groups drawn without replacement,
    without further products. :math:`\kappa_j` is the curvature of a group along its own leak, and
    :math:`s` the mean eigenvalue outside of :math:`U`.

    =================  ========================================================================
    prediction         what it is
    =================  ========================================================================
    ``subspace``       the equation above, averaged over drawn batches: mean, spread and overlap
    ``directional``    :math:`\lambda_1 + V(\varphi_1) / (b (\lambda_1 - s))`; its overlap is too
                       large, because batches mix the outliers
    ``additive``       the papers' model: noise of variance :math:`P \sigma^2` in all directions
    ``multiplicative`` the papers' model of covariance matrices, whose bulk is :math:`s`
    ``best``           ``subspace``, and for small sizes 32 to 128 batches that are really drawn:
                       below 8 samples or a group, and up to ``N/128``, for 4 products each
    =================  ========================================================================

    Trust ``best``. ``trusted`` says where the others can be trusted: ``directional`` where it moves
    :math:`\lambda_1` by at most a half, because it is of second order and far too large beyond
    (6.7 for 2.4 on a network that has fitted its data); the others where they are within 10 % of
    ``best``. Printed tables have all other numbers in brackets.

    On four networks on MNIST the mean of ``best`` was within 5 % of the measured one for batches of
    8, and within 2 % from 32 on; that of ``subspace`` within 9 and 3 %. ``additive`` was 68 to
    73 % too low for 8; see the study ``batch_spectra``.

    Errors: ``stderr`` has the draws and, for groups of several samples, that groups show a part of
    the differences between samples. ``truncation`` is the larger of the change from ``k/2``
    vectors and of half the change from :math:`\kappa_j = 0`.

    Cost: the eigenvectors (50 to 100 products), and one pass with ``k + 8`` vectors, which is as
    many products in small batches. Memory: about ``4 k`` vectors, and ``k^2`` numbers per group.

    Args:
        risk: The loss at a point; see :func:`curvature_variance`. With several processes use
            ``sharing="none"``.
        batch_sizes: Sizes ``B``, from 1 to ``N``.
        matrix: ``hessian`` or ``ggn``.
        num_vectors: Vectors ``k`` of the subspace. Defaults to 20.
        num_draws: Batches drawn for each size.
        group_size: Samples ``g`` per group. Defaults to 1 below 1,024 samples, and otherwise to the
            largest that gives at least 512 groups.
        pairs: Eigenpairs or Ritz pairs of the matrix of all data, with their vectors, to save their
            cost.
        generator: Source of groups, probes and draws. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    check_groups(risk, "batch_prediction()")
    risk.require_sample_mean(alone=True)
    count = sum(risk.batch_rows)
    sizes = check_batch_sizes(batch_sizes, count)
    num_draws = check_count("num_draws", num_draws, low=10)
    if pairs is not None and not isinstance(pairs, Eigenpairs | Spectrum):
        raise TypeError(
            f"pairs must be a result of eigenpairs() or lanczos(), got {type(pairs).__name__}"
        )
    generator = resolve_generator(generator)
    if group_size is None:
        group_size = max(1, count // TUNING.num_groups)
    # Fewer than three groups have no spread.
    group_size = check_count("group_size", group_size, high=max(1, count // 3))
    if num_vectors is None:
        # As many as there are, if they are given.
        most = risk.space.size if pairs is None else len(pairs.values)
        num_vectors = min(TUNING.num_vectors, most)
    num_vectors = check_count("num_vectors", num_vectors, high=risk.space.size)
    basis, lambda_max, angle = _basis(risk, matrix, num_vectors, pairs, generator, progress)
    projections = _projections(risk, matrix, basis, group_size, generator, progress)
    spent = projections.columns + (lambda_max.num_products if pairs is None else 0)
    facts = Facts(projections, lambda_max, angle, risk.l2, spent, generator.initial_seed())
    models = _models(facts, sizes, num_draws, generator)
    few = _few(sizes, group_size, count)
    best, extra = models["subspace"], 0.0
    if few:
        first = basis[:, 0].contiguous()
        # As many as together cost 4 products with the whole matrix, within limits
        least, most = TUNING.num_measured
        counts = [min(most, max(least, least * count // (TUNING.cheap * size))) for size in few]
        drawn, extra = _measured(risk, few, matrix, counts, first, generator, progress)
        best = _merge(best, drawn, sizes, few)
    return BatchPrediction(
        batch_sizes=sizes,
        matrix=matrix,
        num_samples=count,
        num_parameters=risk.space.size,
        lambda_max=lambda_max,
        variance=facts.variance,
        along=facts.along,
        bulk=facts.bulk,
        lindeberg=facts.lindeberg(sizes),
        **models,
        best=best,
        trusted=_trusted(lambda_max, best, models),
        num_vectors=num_vectors,
        group_size=group_size,
        num_draws=num_draws,
        num_products=spent,
        cost=spent + extra,
        seed=generator.initial_seed(),
    )


def _models(
    facts: Facts, sizes: Sequence[int], num_draws: int, generator: torch.Generator
) -> dict[str, BatchCurve]:
    return {
        "subspace": subspace(facts, sizes, num_draws, generator),
        "directional": directional(facts, sizes),
        "additive": additive(facts, sizes),
        "multiplicative": multiplicative(facts, sizes),
    }


def _few(sizes: Sequence[int], group_size: int, count: int) -> list[int]:
    """Return the batch sizes that are cheap to draw, or better drawn, than predicted."""
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
    r"""Measure the largest eigenvalue of drawn batches, by Lanczos on each.

    A batch of ``B`` samples needs 12 to 20 products, each ``B/N`` of one with the whole matrix: ten
    batches of 8 of 4,096 samples cost 0.3 products, ten of 2,048 cost 75. One more product gives
    the scale of the eigenvalues.

    Args:
        risk: The loss at a point; see :func:`curvature_variance`.
        batch_sizes: Sizes ``B``, from 1 to ``N``; samples are distinct.
        leading: Unit eigenvector :math:`\varphi_1` of the matrix of all data, ``(P,)``.
        matrix: ``hessian`` or ``ggn``.
        num_batches: Batches of each size.
        generator: Source of the batches. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    check_groups(risk, "measured_batches()")
    sizes = check_batch_sizes(batch_sizes, sum(risk.batch_rows))
    num_batches = check_count("num_batches", num_batches, low=2)
    theta = risk.theta
    check_tensor("leading", leading, dtype=theta.dtype, device=theta.device, rows=len(theta))
    if leading.ndim != 1:
        raise ValueError(f"leading must be one vector, got {tuple(leading.shape)}")
    check_finite("leading", leading)
    # Overlaps are squared cosines only with a unit vector.
    if abs(float(leading.norm()) - 1) > 1e-3:
        raise ValueError(f"leading must have the norm 1, got {float(leading.norm()):.6g}")
    generator = resolve_generator(generator)
    counts = [num_batches] * len(sizes)
    return _measured(risk, sizes, matrix, counts, leading, generator, progress)[0]


def _basis(
    risk: Risk,
    matrix: CurvatureMatrix,
    num_vectors: int,
    pairs: Eigenpairs | Spectrum | None,
    generator: torch.Generator,
    progress: bool | Progress,
) -> tuple[Tensor, Estimate, float]:
    """Return leading eigenvectors ``(P, k)``, the largest eigenvalue, and the error of the first.

    The largest comes first. The error is the sine of the angle to the true eigenvector.
    """
    if pairs is None:
        # A Krylov space finds what a random vector sees; repeated eigenvalues do not matter here.
        pairs = eigenpairs(
            curvature_operator(risk, matrix),
            largest=num_vectors,
            rtol=TUNING.rtol,
            certify="none",
            generator=generator,
            progress=progress,
        )
    if pairs.vectors is None:
        raise ValueError("pairs must have vectors: pass vectors=True to eigenpairs() or lanczos()")
    rows, width = pairs.vectors.shape
    if rows != risk.space.size or width < num_vectors:
        raise ValueError(
            f"pairs must have {num_vectors} vectors or more of {risk.space.size} rows, got "
            f"{width} of {rows}"
        )
    # The equation is for the largest eigenvalue: pairs at the other end do not enter it.
    chosen = pairs.values.argsort(descending=True)[:num_vectors]
    # Ritz vectors of partial re-orthogonalisation are orthogonal to the root of roundoff only.
    basis = torch.linalg.qr(pairs.vectors[:, chosen.to(pairs.vectors.device)])[0]
    first = chosen[0]
    lambda_max = Estimate.exact(
        pairs.values[first],
        method="largest Ritz value",
        truncation=float(pairs.residuals[first]),
        num_products=pairs.num_products,
        status=pairs.status,
        seed=pairs.seed,
    )
    return basis, lambda_max, float(vector_errors(pairs)[first])


def _projections(
    risk: Risk,
    matrix: CurvatureMatrix,
    basis: Tensor,
    group_size: int,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Projections:
    count = sum(risk.batch_rows)
    num_probes = min(TUNING.num_probes, len(basis) - basis.shape[1])
    probes = random_vectors(risk, num_probes, generator)
    # Twice is enough: what the subspace holds is known exactly, so the probes leave it out.
    for _ in range(2):
        probes -= basis @ (basis.T @ probes)
    # Orthogonal ones, if they span all that is outside: their mean is exact.
    complete = num_probes == len(basis) - basis.shape[1]
    probes = torch.linalg.qr(probes)[0] if complete else probes / probes.norm(dim=0)
    order = torch.randperm(count, generator=generator, device=generator.device)
    # Groups of one size: the rest is left out at random.
    used = order[: count // group_size * group_size].to(risk.theta.device)
    groups = risk.samples(used, batch_size=group_size)
    return project(groups, basis, probes, matrix=matrix, num_samples=count, progress=progress)


def _measured(
    risk: Risk,
    sizes: Sequence[int],
    matrix: CurvatureMatrix,
    counts: Sequence[int],
    leading: Tensor,
    generator: torch.Generator,
    progress: bool | Progress,
) -> tuple[BatchCurve, float]:
    """Return the curve of drawn batches, and its cost in products with the whole matrix."""
    total, columns = sum(risk.batch_rows), []
    # The way in which products are computed is checked once, here on all data: a batch of samples
    # that are fitted well has nothing but roundoff.
    engines = {size: _engine(size) for size in sizes}
    for engine in sorted(set(engines.values())):
        op = curvature_operator(risk, matrix, engine=engine)
        quotient = float(leading @ (op @ leading))
    scale = abs(quotient)
    cost = float(len(set(engines.values())))
    with tracking(progress, "batches", sum(counts)) as bar:
        for index, (size, number) in enumerate(zip(sizes, counts, strict=True)):
            rows = []
            # All batches of N samples are the same.
            draws = number if size < total else 1
            for done, batch in enumerate(small_batches(risk, size, draws, generator), start=1):
                op = curvature_operator(batch, matrix, engine=engines[size])
                # A matrix of roundoff is not symmetric. A shift by the scale of all data makes it
                # small beside the norm.
                pairs = eigenpairs(
                    ShiftedOperator(op, scale), largest=1, rtol=TUNING.rtol_measured,
                    certify="none", generator=generator,
                )  # fmt: skip
                if pairs.vectors is None:
                    raise RuntimeError("eigenpairs() returned no vectors")
                value, overlap = float(pairs.values[0]) - scale, pairs.vectors[:, 0] @ leading
                # Its mean over batches is that of all data: a control variate.
                change = float(leading @ (op @ leading)) - quotient
                rows.append([value, float(overlap) ** 2, change])
                cost += (pairs.num_products + 1) * size / total
                bar.update(sum(counts[:index]) + done)
            columns.append(of_samples(*torch.tensor(rows, dtype=torch.float64).T))
    how = f"Lanczos on {', '.join(map(str, counts))} batches"
    return curve(columns, how, "measured", round(cost), min(counts) - 1, generator), cost


def _engine(size: int) -> EngineName:
    # A trace pays for itself in a dozen products of large batches only.
    return "eager" if size < TUNING.traced else "auto"


def _merge(
    predicted: BatchCurve, measured: BatchCurve, sizes: Sequence[int], few: Sequence[int]
) -> BatchCurve:
    """Return the predicted curve with the entries of some sizes replaced by measured ones."""
    # A size may be there twice, and is then measured twice.
    places = [place for place, size in enumerate(sizes) if size in few]

    def merge(one: Estimate, other: Estimate) -> Estimate:
        columns = {}
        for name in ("mean", "stderr", "truncation"):
            columns[name] = getattr(one, name).clone()
            columns[name][places] = getattr(other, name)
        # The fewer degrees of freedom make the wider intervals.
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
