"""What the curvature of a mini-batch will be, predicted from products on the full data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import CurvatureMatrix
from ritz.measures._landscape import random_vectors
from ritz.measures._noise import check_groups
from ritz.measures._subspace import (
    Projections,
    drawn_means,
    outlier,
    project,
    relative_error,
    rounded_groups,
    without_replacement,
)
from ritz.spectra import Eigenpairs, Spectrum, eigenpairs


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the work of :func:`batch_prediction`."""

    # Vectors of the subspace.
    num_vectors: int = 20
    # Groups by default.
    num_groups: int = 512
    # Random vectors for P sigma^2 and the trace.
    num_probes: int = 8
    # Residual of the eigenvectors, relative to the norm.
    rtol: float = 1e-3


TUNING = Tuning()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCurve:
    r"""The largest eigenvalue of the matrix of a batch, over batch sizes.

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
        variance: :math:`P \sigma^2`, of single samples.
        along: :math:`V(\varphi_1)`, the variance along the leading eigenvector.
        bulk: Mean :math:`s` of the eigenvalues outside of the subspace.
        subspace: The subspace bootstrap.
        directional: :math:`\lambda_1 + V(\varphi_1) / (b (\lambda_1 - s))`.
        additive: The additive model of the papers, with homogeneous noise.
        multiplicative: The multiplicative model of the papers; NaN where it does not apply.
        best: What to trust for each batch size.
        conditions: What each model assumes, and whether it holds.
        num_vectors: Vectors ``k`` of the subspace.
        group_size: Samples per group.
        num_products: Number of products with the whole matrix.
        cost: Work in products with the whole matrix, with the parts of it that went into batches.
            One product costs about one gradient.
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
    subspace: BatchCurve
    directional: BatchCurve
    additive: BatchCurve
    multiplicative: BatchCurve
    best: BatchCurve
    conditions: tuple[str, ...]
    num_vectors: int
    group_size: int
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
            lines.append(
                f"  {size:>8,}{best.value.mean[i]:>12.4g}{best.spread.mean[i]:>10.3g}"
                f"{best.overlap.mean[i]:>9.3f}  {best.source[i]:<12}"
                f"{self.subspace.value.mean[i]:>12.4g}{self.directional.value.mean[i]:>12.4g}"
                f"{self.additive.value.mean[i]:>12.4g}{self.multiplicative.value.mean[i]:>12.4g}"
            )
        lines += [f"  {condition}" for condition in self.conditions]
        lines.append(f"  {self.num_products} products, {self.cost:.1f} with those of batches")
        return "\n".join(lines)


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
    r"""Return the largest eigenvalue of the matrix of a batch, its spread and its overlap.

    ==================  ====================================================================
    ``subspace``        :math:`\lambda' = \lambda_\text{max}(T + R/(b(\lambda' - s)))`, where
                        :math:`T` is the mean of the :math:`U^\top H_i U` of a drawn batch in
                        the ``k`` leading eigenvectors, and :math:`R` is what leaves them
    ``directional``     :math:`\lambda_1 + V(\varphi_1) / (b (\lambda_1 - s))`
    ``additive``        the papers' model: noise of variance :math:`P \sigma^2` in all directions
    ``multiplicative``  the papers' model of covariance matrices
    ==================  ====================================================================

    Args:
        risk: The loss at a point; see :func:`curvature_variance`.
        batch_sizes: Sizes ``B``, from 1 to ``N``.
        matrix: ``hessian`` or ``ggn``.
        num_vectors: Vectors ``k`` of the subspace. Defaults to 20.
        num_draws: Batches drawn for each size.
        group_size: Samples ``g`` per group. Batches below ``g`` are not drawn from groups.
        pairs: Eigenpairs or Ritz pairs of the matrix of all data, with their vectors, to save their
            cost.
        generator: Source of groups, probes and draws. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    check_groups(risk, "batch_prediction()")
    risk.require_sample_mean(alone=True)
    sizes, count = tuple(batch_sizes), sum(risk.batch_rows)
    if not sizes:
        raise ValueError("batch_sizes must not be empty")
    for size in sizes:
        check_count("batch_sizes", size, high=count)
    check_count("num_draws", num_draws, low=2)
    generator = resolve_generator(generator)
    if group_size is None:
        group_size = max(1, count // TUNING.num_groups)
    check_count("group_size", group_size, high=max(1, count // 3))
    if num_vectors is None:
        num_vectors = min(TUNING.num_vectors, risk.space.size)
    check_count("num_vectors", num_vectors, high=risk.space.size)
    basis, lambda_max, spent = _basis(risk, matrix, num_vectors, pairs, generator, progress)
    order = torch.randperm(count, generator=generator, device=generator.device)
    used = order[: count // group_size * group_size].to(risk.theta.device)
    probes = random_vectors(risk, TUNING.num_probes, generator, kind="rademacher")
    probes.div_(probes.norm(dim=0))
    projections = project(
        risk.samples(used, batch_size=group_size),
        basis,
        probes,
        matrix=matrix,
        num_samples=count,
        progress=progress,
    )
    spent += basis.shape[1] + TUNING.num_probes
    facts = _Facts(projections, lambda_max, risk, num_draws, spent)
    curves = {
        "subspace": _subspace(facts, sizes, generator),
        "directional": _directional(facts, sizes),
        "additive": _additive(facts, sizes),
        "multiplicative": _multiplicative(facts, sizes),
    }
    return BatchPrediction(
        batch_sizes=sizes,
        matrix=matrix,
        num_samples=count,
        num_parameters=risk.space.size,
        lambda_max=lambda_max,
        variance=facts.variance,
        along=facts.along,
        bulk=facts.bulk,
        best=curves["subspace"],
        conditions=(),
        num_vectors=basis.shape[1],
        group_size=group_size,
        num_products=spent,
        cost=float(spent),
        seed=generator.initial_seed(),
        **curves,
    )


def _basis(
    risk: Risk,
    matrix: CurvatureMatrix,
    num_vectors: int,
    pairs: Eigenpairs | Spectrum | None,
    generator: torch.Generator,
    progress: bool | Progress,
) -> tuple[Tensor, Estimate, int]:
    """Return leading eigenvectors ``(P, k)``, the largest first, its value, and the products."""
    spent = 0
    if pairs is None:
        pairs = eigenpairs(
            curvature_operator(risk, matrix),
            largest=num_vectors,
            rtol=TUNING.rtol,
            certify="none",
            generator=generator,
            progress=progress,
        )
        spent = pairs.num_products
    if pairs.vectors is None:
        raise ValueError("pairs must have vectors: pass vectors=True to eigenpairs() or lanczos()")
    if pairs.vectors.shape[0] != risk.space.size:
        raise ValueError(
            f"pairs must have vectors of {risk.space.size} rows, got {pairs.vectors.shape[0]}"
        )
    chosen = pairs.values.argsort(descending=True)[:num_vectors]
    basis = torch.linalg.qr(pairs.vectors[:, chosen.to(pairs.vectors.device)])[0]
    value = Estimate.exact(
        pairs.values[chosen[0]],
        method="largest Ritz value",
        truncation=float(pairs.residuals[chosen[0]]),
        num_products=pairs.num_products,
        status=pairs.status,
        seed=pairs.seed,
    )
    return basis, value, spent


class _Facts:
    """What all predictors use: the projections, and the numbers that follow from them."""

    def __init__(
        self,
        projections: Projections,
        lambda_max: Estimate,
        risk: Risk,
        num_draws: int,
        num_products: int,
    ) -> None:
        self.projections, self.num_draws, self.num_products = projections, num_draws, num_products
        self.l2, self.size = risk.l2, risk.space.size
        self.lambda_max, self.value = lambda_max, float(lambda_max.mean) - risk.l2
        p = projections
        # V = (1/N) sum |H_i v|^2 - |H v|^2 of single samples from groups of g, whose matrices have
        # the variance V (1/g - 1/N) N/(N - 1).
        self.factor = 1 / without_replacement(p.group_size, p.num_samples)
        gaps = p.squares - (p.quadratic.mean(0)).square()
        self.variance = Estimate.of(
            self.factor * gaps.mean(0), method="groups", num_products=num_products
        )
        first = p.small[:, 0]  # U' H_j phi_1
        leaving = float(p.leak[0, 0])
        self.gaps = (first - first.mean(0)).square().sum(1) + leaving
        along = self.factor * float(self.gaps.mean())
        self.error = relative_error(self.gaps) * math.sqrt(p.unseen)
        self.along = replace(
            Estimate.exact(along, method="groups", num_products=num_products),
            stderr=torch.tensor(along * self.error, dtype=torch.float64),
        )
        trace = self.size * p.quadratic.mean(0)
        top = float(p.small.mean(0).diagonal().sum())
        self.bulk = Estimate.of(
            (trace - top) / max(1, self.size - p.small.shape[1]),
            method="trace less the subspace",
            num_products=num_products,
        )

    def estimate(self, means: Sequence[float], errors: Sequence[float], how: str) -> Estimate:
        mean = torch.tensor(means, dtype=torch.float64)
        estimate = Estimate.exact(
            mean,
            method=how,
            num_products=self.num_products,
            status=Status(outcome="completed", message="propagated errors"),
        )
        return replace(estimate, stderr=torch.tensor(errors, dtype=torch.float64))

    def unknown(self, length: int) -> Estimate:
        return self.estimate([math.nan] * length, [math.nan] * length, "not predicted")


def _subspace(facts: _Facts, sizes: Sequence[int], generator: torch.Generator) -> BatchCurve:
    p = facts.projections
    rows = []
    for size in sizes:
        groups = rounded_groups(size, p)
        means = drawn_means(p.small, groups, facts.num_draws, generator)
        factor = without_replacement(size, p.num_samples) * facts.factor
        values, overlaps = outlier(means, factor * p.leak, 0.0)
        values = values + facts.l2
        root = math.sqrt(facts.num_draws)
        spread = float(values.std())
        rows.append(
            (
                float(values.mean()),
                spread / root,
                spread,
                spread / root,
                float(overlaps.mean()),
                float(overlaps.std()) / root,
            )
        )
    columns = list(zip(*rows, strict=True))
    how = "subspace bootstrap"
    return BatchCurve(
        value=facts.estimate(columns[0], columns[1], how),
        spread=facts.estimate(columns[2], columns[3], how),
        overlap=facts.estimate(columns[4], columns[5], how),
        source=("subspace",) * len(sizes),
    )


def _directional(facts: _Facts, sizes: Sequence[int]) -> BatchCurve:
    along, gap = float(facts.along), facts.value - float(facts.bulk)
    values, errors, overlaps, overlap_errors, spreads = [], [], [], [], []
    diagonal = float(facts.projections.small[:, 0, 0].var(correction=0)) * facts.factor
    for size in sizes:
        factor = without_replacement(size, facts.projections.num_samples)
        shift = along * factor / gap
        values.append(facts.value + shift + facts.l2)
        errors.append(shift * facts.error)
        overlaps.append(max(0.0, 1 - shift / gap))
        overlap_errors.append(shift / gap * facts.error)
        spreads.append(math.sqrt(diagonal * factor))
    how = "lambda + V(phi) / (b (lambda - s))"
    return BatchCurve(
        value=facts.estimate(values, errors, how),
        spread=facts.estimate(spreads, [s * facts.error / 2 for s in spreads], how),
        overlap=facts.estimate(overlaps, overlap_errors, how),
        source=("directional",) * len(sizes),
    )


def _additive(facts: _Facts, sizes: Sequence[int]) -> BatchCurve:
    value, overlaps, values = facts.value, [], []
    for size in sizes:
        noise = float(facts.variance) * without_replacement(size, facts.projections.num_samples)
        above = value > math.sqrt(max(noise, 0.0))
        values.append((value + noise / value if above else 2 * math.sqrt(noise)) + facts.l2)
        overlaps.append(1 - noise / value**2 if above else 0.0)
    zeros = [0.0] * len(sizes)
    return BatchCurve(
        value=facts.estimate(values, zeros, "additive model"),
        spread=facts.unknown(len(sizes)),
        overlap=facts.estimate(overlaps, zeros, "additive model"),
        source=("additive",) * len(sizes),
    )


def _multiplicative(facts: _Facts, sizes: Sequence[int]) -> BatchCurve:
    s, values, overlaps = float(facts.bulk), [], []
    for size in sizes:
        q = facts.size / size
        theta = facts.value / s - 1 if s > 0 else math.nan
        above = theta > math.sqrt(q)
        edge = s * (1 + math.sqrt(q)) ** 2 if s > 0 else math.nan
        values.append((s * (1 + theta) * (1 + q / theta) if above else edge) + facts.l2)
        overlaps.append((1 - q / theta**2) / (1 + q / theta) if above else 0.0)
    zeros = [0.0] * len(sizes)
    return BatchCurve(
        value=facts.estimate(values, zeros, "multiplicative model"),
        spread=facts.unknown(len(sizes)),
        overlap=facts.estimate(overlaps, zeros, "multiplicative model"),
        source=("multiplicative",) * len(sizes),
    )
