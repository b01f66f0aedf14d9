"""``sharpness``: norms, trace, negative mass and rank of the curvature in each batch-norm mode."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ritz._core.batch_norm import BATCH_NORM_MODES, BatchNormMode, batch_norms
from ritz._core.checks import check_choice, check_count, is_below
from ritz._core.journal import Journal, Parts
from ritz._core.progress import Progress, Stages, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status, plain_estimate
from ritz._core.storage import storable
from ritz.curvature import CurvatureOperator, Risk, curvature_operator, summary
from ritz.curvature._shared import MATRICES, CurvatureMatrix, EngineName, Summary, check_risk
from ritz.measures._bulk_edge import vector_errors
from ritz.measures._degeneracy import Degeneracy, rank_degeneracy
from ritz.measures._groups import group_roundoff, random_vectors
from ritz.operators import exact
from ritz.spectra import Spectrum, lanczos_block
from ritz.spectra._shared import least_frobenius_norm, negative_values

# Functions of the Ritz values of a run. Their traces are tr H, |H|_F^2, the number of eigenvalues
# that are certainly negative, and the number of those that may be negative.
Function = Callable[[Spectrum], Tensor]
_FUNCTIONS: tuple[Function, ...] = (
    lambda run: run.values,
    lambda run: run.values.square(),
    lambda run: negative_values(run)[0].double(),
    lambda run: negative_values(run)[1].double(),
    lambda run: run.values.abs(),
)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SharpnessRow:
    r"""Sharpness of one matrix.

    Attributes:
        matrix: ``hessian`` or ``ggn``.
        batch_norm: Mode of batch norm; ``None`` for a model without batch norm.
        spectral_norm: Largest :math:`|\theta_k|` of all probes. The truncation is its residual and
            the roundoff of products.
        largest: The largest Ritz value.
        smallest: The smallest Ritz value.
        trace: :math:`\operatorname{tr} H`.
        mean_eigenvalue: :math:`\operatorname{tr} H / P`.
        frobenius_norm: :math:`\|H\|_F`; the samples are squared norms. The estimate is never below
            :math:`(\sum_k \theta_k^2)^{1/2}` of any probe, which is a rigorous lower bound.
        negative_mass: Fraction of eigenvalues that are certainly negative: below zero by more than
            roundoff and residual. The truncation is the fraction whose sign is not determined.
        degeneracy: Fraction of eigenvalues near zero.
        num_products: Number of matrix-vector products.
        status: How the Lanczos runs ended.
    """

    matrix: str
    batch_norm: str | None
    spectral_norm: Estimate
    largest: float
    smallest: float
    trace: Estimate
    mean_eigenvalue: Estimate
    frobenius_norm: Estimate
    negative_mass: Estimate
    degeneracy: Degeneracy
    num_products: int
    status: Status

    def __str__(self) -> str:
        return "\n".join(f"  {name:<18}  {cell}" for name, cell in _column(self).items())


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """The curvature of a risk, one row for each matrix and batch-norm mode.

    Attributes:
        rows: One row per matrix and batch-norm mode.
        summaries: Loss, accuracy and norms for each batch-norm mode (``""`` for a model without
            batch norm).
        model: Name of the class of the model.
        num_steps: Number of Lanczos steps per probe.
        num_probes: Number of probes per row.
        batch_sizes: Smallest and largest batch size. Results in ``train`` mode depend on them.
        l2: Coefficient of the L2 term, which is added to every eigenvalue.
        seed: Seed of the probes, the same in all rows.
    """

    rows: tuple[SharpnessRow, ...]
    summaries: dict[str, Summary]
    model: str
    num_steps: int
    num_probes: int
    batch_sizes: tuple[int, int]
    l2: float
    seed: int

    def __str__(self) -> str:
        first = next(iter(self.summaries.values()))
        sizes = " to ".join(map(str, sorted(set(self.batch_sizes))))
        lines = [
            f"Sharpness of {self.model}: {first.num_parameters:,} parameters, "
            f"{first.num_samples:,} {first.weighted_by} in batches of {sizes}"
            + (f", l2 {self.l2:g}" if self.l2 else ""),
            f"  {self.num_steps} Lanczos steps, {_probes(self.num_probes)}, seed {self.seed}",
        ]
        if not self.rows[0].status.ok:
            lines.append(f"  {self.rows[0].status}")
        columns = [_column(row, self.summaries[row.batch_norm or ""]) for row in self.rows]
        width = max(len(cell) for column in columns for cell in column.values())
        for name in columns[0]:
            cells = "  ".join(f"{column[name]:>{width}}" for column in columns)
            lines.append(f"  {name:<18}  {cells}")
        return "\n".join(lines)


def sharpness(
    risk: Risk,
    *,
    num_steps: int | None = None,
    num_probes: int = 8,
    matrix: CurvatureMatrix | Sequence[CurvatureMatrix] = ("hessian", "ggn"),
    batch_norm: BatchNormMode | Sequence[BatchNormMode] | None = None,
    block_size: int | None = None,
    engine: EngineName = "auto",
    max_products: int | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Sharpness:
    r"""Return spectral norm, Frobenius norm, trace, negative mass and rank degeneracy.

    By default, both the Hessian and the Gauss-Newton matrix are measured. A model with batch norm
    is measured in eval and in train mode, because the two can differ by orders of magnitude.

    All numbers of a row come from the same Lanczos runs with Ritz values :math:`\theta_k` and
    weights :math:`\tau_k`:

    .. math:: \operatorname{tr} H = P\, \mathbb{E} \sum_k \tau_k \theta_k, \quad
        \|H\|_F^2 = P\, \mathbb{E} \sum_k \tau_k \theta_k^2

    If the operator has an exact trace, the exact trace is used. Simple eigenvalues that have
    converged in the runs of all probes are counted exactly, which reduces the variance. All rows
    use the same start vectors.

    Cost: ``num_steps * num_probes`` products per row, one gradient and one forward pass per mode,
    and the exact trace if there is one (a backward pass for each output). Memory: ``num_steps + 4``
    vectors for each probe of a block, and ``num_probes`` more.

    Args:
        risk: The loss at a point.
        num_steps: Lanczos steps ``m`` per probe. Defaults to 100, or ``P`` if that is less.
        num_probes: Number ``d`` of random start vectors. The relative uncertainty of the standard
            error is about :math:`1 / \sqrt{2 (d - 1)}`. A single probe gives no error bars.
        matrix: ``hessian``, ``ggn`` or a sequence of them.
        batch_norm: Mode or modes of batch norm. Defaults to ``eval`` (``recomputed`` if the risk
            has that mode) and ``train``. The mode ``train`` needs a risk whose batch size is known.
            Ignored for a model without batch norm.
        block_size: Number of probes per block. Defaults to the block size of the operator.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, which prefers the first.
        max_products: Maximum number of products of all rows together. If it is too small, there are
            fewer probes; if it is too small even for one probe, there are fewer steps. The status
            of each row then says so. Defaults to no limit.
        state: File to resume from, and to save to every ``save_interval`` seconds; further files
            have names that begin with its name. They are not deleted at the end. A resumed
            computation gives the same result bit for bit (on the CPU). Raises ``ValueError`` if the
            state belongs to other weights, data or settings.
        save_interval: Seconds between saves.
        generator: Source of the start vectors. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: *Flatness is a False Friend*.
    """
    check_risk(risk)
    size = risk.space.size
    num_steps = min(100, size) if num_steps is None else num_steps
    num_steps = check_count("num_steps", num_steps, high=size)
    num_probes = check_count("num_probes", num_probes)
    matrices = _matrices(matrix)
    if "ggn" in matrices and risk.loss_fn is None:
        raise ValueError(
            "matrix must be 'hessian' for a risk with loss_fn=None, since the Gauss-Newton matrix "
            "needs outputs that are separate from the loss"
        )
    operator = partial(curvature_operator, engine=engine, block_size=block_size)
    centres = _modes(risk, batch_norm)
    for _, centre in centres:
        for name in matrices:
            operator(centre, name)  # raise before the first product if a matrix is not possible
    generator = resolve_generator(generator)
    num_rows = len(centres) * len(matrices)
    num_steps, num_probes, spent = _limit_products(max_products, num_steps, num_probes, num_rows)
    # Few products do not repay a trace.
    operator = partial(operator, num_products=num_steps * num_probes)
    start = random_vectors(risk, num_probes, generator)
    settings = {
        "num_steps": num_steps,
        "engine": engine,
        "block_size": block_size,
        "risk": repr(risk),
        "batch_sizes": [min(risk.batch_sizes), max(risk.batch_sizes)],
        "weights": risk.theta,
        "start": start,
    }
    # If the data is not shared, the processes are independent and must not wait for each other.
    together = risk.sharing != "none"
    parts = Parts(
        Journal(state, settings, interval=save_interval, group=risk.group, together=together)
    )
    run = partial(lanczos_block, num_steps=num_steps, group=risk.group, save_interval=save_interval)
    rows, summaries, seed = [], {}, generator.initial_seed()
    total = num_rows * num_steps * num_probes
    with tracking(progress, "sharpness", total) as bar:
        stages = Stages(bar)
        for mode, centre in centres:
            summaries[mode or ""] = _summary(parts, centre, mode)
            for name in matrices:
                row = _row(parts, operator(centre, name), run, start, stages, name, mode, seed)
                rows.append(row if spent is None else replace(row, status=spent))
        stages.close()
    return Sharpness(
        rows=tuple(rows),
        summaries=summaries,
        model=type(risk.model).__name__,
        num_steps=num_steps,
        num_probes=num_probes,
        batch_sizes=(min(risk.batch_sizes), max(risk.batch_sizes)),
        l2=risk.l2,
        seed=seed,
    )


def _matrices(chosen: CurvatureMatrix | Sequence[CurvatureMatrix]) -> Sequence[CurvatureMatrix]:
    """Return the matrices to measure; raise unless there is one, and all are known."""
    matrices: Sequence[CurvatureMatrix] = chosen if isinstance(chosen, list | tuple) else (chosen,)
    if not matrices:
        raise ValueError(f"matrix must be one or more of {', '.join(MATRICES)}; got {chosen!r}")
    for name in matrices:
        check_choice("matrix", name, MATRICES)
    return matrices


def _limit_products(
    max_products: int | None, num_steps: int, num_probes: int, num_rows: int
) -> tuple[int, int, Status | None]:
    """Return the steps and probes that ``max_products`` allows, and a status if it reduces them."""
    if max_products is None:
        return num_steps, num_probes, None
    max_products = check_count("max_products", max_products, low=num_rows)
    # Fewer probes only widen the error bars. Fewer steps cause a bias that the error bars do not
    # show, so steps are reduced only if there are not enough products for one probe.
    each = max_products // num_rows
    steps, probes = min(num_steps, each), min(num_probes, max(1, each // num_steps))
    if (steps, probes) == (num_steps, num_probes):
        return steps, probes, None
    counts = f"{probes} of {num_probes} probes, {steps} of {num_steps} steps"
    needed = num_rows * num_steps * num_probes
    return steps, probes, Status(
        outcome="max_steps",
        message=f"{counts}, limited by max_products={max_products}",
        advice=f"max_products={needed} would suffice for all",
    )  # fmt: skip


def _probes(count: int) -> str:
    if count == 1:
        return "one probe (no error bars)"
    # The standard deviation of d normal samples has a relative error of 1 / sqrt(2 (d - 1)).
    share = (2 * (count - 1)) ** -0.5
    return f"{count} probes (± standard error, which is known to {share:.0%})"


def _modes(
    risk: Risk, chosen: BatchNormMode | Sequence[BatchNormMode] | None
) -> list[tuple[str | None, Risk]]:
    """Return the batch-norm modes with the risk in each."""
    running: BatchNormMode = "recomputed" if risk.batch_norm == "recomputed" else "eval"
    several = (running, "train") if chosen is None else chosen
    modes: Sequence[BatchNormMode] = several if isinstance(several, list | tuple) else (several,)
    if not modes:
        raise ValueError(
            f"batch_norm must be one or more of {', '.join(BATCH_NORM_MODES)}; got {chosen!r}"
        )
    for mode in modes:
        check_choice("batch_norm", mode, BATCH_NORM_MODES)
    if not batch_norms(risk.model):
        return [(None, risk)]
    return [(mode, risk.with_batch_norm(mode)) for mode in modes]


def _summary(parts: Parts, risk: Risk, mode: str | None) -> Summary:
    """Return the summary of a risk. Raise if the saved state belongs to other data."""
    now = summary(risk)
    saved = parts.get(mode or "none", lambda state: now)
    parts.journal.check_repeats("loss", [now.loss], [saved.loss], dtype=risk.theta.dtype)
    return saved


def _row(
    parts: Parts,
    op: CurvatureOperator,
    run: partial[tuple[Spectrum, ...]],
    start: Tensor,
    stages: Stages,
    matrix: CurvatureMatrix,
    mode: str | None,
    seed: int,
) -> SharpnessRow:
    """Measure one matrix. Each block of Lanczos runs is a part that can be resumed."""
    name, runs = f"{mode or 'none'}-{matrix}", list[Spectrum]()
    for index, block in enumerate(start.split(op.block_size, 1)):
        # The cosines between all start vectors and the Ritz vectors of the first run show which
        # Ritz values are simple eigenvalues.
        against = None if index or start.shape[1] == 1 else start
        width, num_steps = block.shape[1], run.keywords["num_steps"]
        bar = stages.stage(size=width * num_steps, weight=width)
        call = partial(run, op, start=block, against=against, progress=bar)
        runs += parts.get(f"{name}-{index}", call)
    # Save the row as a part as well, because an exact trace may cost as much as a run.
    labels = {"matrix": matrix, "batch_norm": mode}
    return parts.get(
        name, lambda state: _measure(op, runs, seed, group_roundoff(op.risk), **labels)
    )


def _measure(
    op: CurvatureOperator, runs: list[Spectrum], seed: int, unit: float, **labels: Any
) -> SharpnessRow:
    size, num_products = op.shape[0], sum(run.num_products for run in runs)
    samples, num_split = traces(runs, _FUNCTIONS)
    method = "Lanczos quadrature" + (f", {num_split} simple eigenvalues" if num_split else "")
    # Roundoff in the products moves eigenvalues by the fraction `unit` of their size.
    moved = unit * torch.stack([samples[4], 2 * samples[1]]).mean(1)
    first, second, negative, possible = (
        Estimate.of(row, method=method, num_products=num_products, truncation=error, seed=seed)
        for row, error in zip(samples[:4], [*moved, 0.0, 0.0], strict=True)
    )
    known, note = exact(op, "trace")
    whole = first
    if known is not None:
        whole = Estimate.exact(known, method=f"exact, by {note}", truncation=moved[0])
    # |H| is the largest |theta|, up to its residual |H u - theta u|.
    values, residuals = (
        torch.cat([getattr(run, k) for run in runs]) for k in ("values", "residuals")
    )
    place = values.abs().argmax()
    norm = Estimate.exact(
        values[place].abs(),
        method="Lanczos",
        num_products=num_products,
        truncation=residuals[place] + unit * values[place].abs(),
        status=first.status,
        seed=seed,
    )
    # Eigenvalues that are zero within their residuals may be negative.
    undecided = (possible.mean - negative.mean) / size
    return SharpnessRow(
        **labels,
        spectral_norm=norm,
        largest=float(values.max()),
        smallest=float(values.min()),
        trace=whole,
        mean_eigenvalue=whole.scaled(1 / size),
        frobenius_norm=_root(second, max(map(least_frobenius_norm, runs))),
        negative_mass=replace(negative.scaled(1 / size), truncation=undecided),
        degeneracy=rank_degeneracy(runs, matrix=labels["matrix"]),
        num_products=num_products,
        # "breakdown" (an invariant space, so exact results) is reported only if all runs have it.
        status=min((run.status for run in runs), key=lambda status: status.outcome == "breakdown"),
    )


def _root(square: Estimate, least: float) -> Estimate:
    # |V'HV|_F <= |H|_F for orthonormal V, so the Ritz values of a run bound the norm from below.
    mean = square.mean.sqrt().clamp(min=least)
    # d sqrt(x) = dx / (2 sqrt(x))
    slope = 1 / (2 * mean) if mean > 0 else torch.zeros_like(mean)
    error, truncation = square.stderr * slope, square.truncation * slope
    method = square.method + ", root of the mean square"
    return replace(square, mean=mean, stderr=error, truncation=truncation, method=method)


def _column(row: SharpnessRow, at: Summary | None = None) -> dict[str, str]:
    mass, (low, high) = row.degeneracy.mass, row.degeneracy.interval
    column = {"": row.matrix, "batch norm": row.batch_norm or "none"}
    if at is not None and at.accuracy is not None:
        column["accuracy"] = f"{at.accuracy:.2%}"
    if at is not None:
        column |= {"loss": f"{at.loss:.6g}", "|gradient|": f"{at.gradient_norm:.4g}"}
    return column | {
        "spectral norm": f"{float(row.spectral_norm):.6g}",
        "  residual": f"{float(row.spectral_norm.truncation):.1g}",
        "largest": f"{row.largest:.6g}",
        "smallest": f"{row.smallest:.4g}",
        "trace": plain_estimate(row.trace),
        "mean eigenvalue": plain_estimate(row.mean_eigenvalue),
        "Frobenius norm": plain_estimate(row.frobenius_norm),
        "negative fraction": plain_estimate(row.negative_mass),
        "  sign undecided": f"{float(row.negative_mass.truncation):.2g}",
        "fraction near zero": plain_estimate(mass),
        "  undecided": f"{float(mass.truncation):.2g}",
        "  interval": f"[{low:.2g}, {high:.2g}]",
        "products": f"{row.num_products:,}",
    }


# ------------------------------------------------------------------------------------------
# Traces of functions of the matrix from the Lanczos runs of several probes. Simple eigenvalues are
# counted exactly.


@dataclass(frozen=True, slots=True)
class Tuning:
    """When an eigenvalue counts as simple and as converged in the run of every probe."""

    # Largest sine of the angle from a Ritz vector to its eigenvector. With 1e-3 some cases of
    # tests/measures/test_sharpness_traces.py fail.
    converged: float = 1e-4
    # Allowed roundoff in the component of a probe along a Ritz vector, for a probe with entries of
    # order one.
    roundoff: float = 1e-4
    # The error of the Ritz vectors changes this component at random. This many standard deviations
    # are allowed.
    deviations: float = 4.0


TUNING = Tuning()


def traces(runs: Sequence[Spectrum], functions: Sequence[Function]) -> tuple[Tensor, int]:
    r"""Return samples ``(f, k)`` of :math:`\operatorname{tr} f(A)`, and the size of :math:`S`.

    .. math:: \operatorname{tr} f(A) = \sum_{k \in S} f(\theta_k) + (n - |S|)\, \mathbb{E}\,
        \frac{\sum_{k \notin S} \tau_k f(\theta_k)}{\sum_{k \notin S} \tau_k}

    :math:`S` are the simple eigenvalues that have converged in the runs of all probes. If their
    directions are removed from a probe and the rest is normalised, the result is a uniform probe of
    the remaining space. Plain quadrature multiplies :math:`f(\theta_k)` by :math:`n \tau_k`, which
    has a :math:`\chi^2` distribution with mean one and standard deviation :math:`\sqrt 2`. If the
    trace is dominated by a few eigenvalues, this is nearly all of its error.

    The formula holds for a fixed :math:`S`, but an eigenvalue is more likely to be in :math:`S` if
    its weights are large. For eigenvalues that are just converging, the mean over two or three
    probes was biased by a fraction of a standard error.

    Cost: no products.

    Args:
        runs: One run per probe, with all Ritz values and weights. The first run has the cosines of
            all start vectors.
        functions: Functions from a run to :math:`f` at its Ritz values, ``(m,)``.
    """
    places = simple_eigenvalues(runs)
    samples = [
        torch.stack([_sample(run, chosen, function(run)) for function in functions])
        for run, chosen in zip(runs, places, strict=True)
    ]
    return torch.stack(samples, 1), places.shape[1]


def simple_eigenvalues(runs: Sequence[Spectrum]) -> Tensor:
    r"""Return the indices ``(k, s)`` of simple eigenvalues that have converged in all ``k`` runs.

    A run has one Ritz vector per eigenvalue, whatever the multiplicity: the projection of its start
    vector onto the eigenspace. If the eigenspace is a line, every other start vector has the
    component :math:`|z_j^\top u| / \|z_j\| = \sqrt{\tau_j}` along the Ritz vector :math:`u` of the
    first run. In a plane, the two projections are at a random angle. With two probes, about one
    double eigenvalue in a hundred counts as simple by chance; with three, hardly any.

    Args:
        runs: One run per probe. If the first run has no cosines of the start vectors, no eigenvalue
            is returned.
    """
    first, others = runs[0], runs[1:]
    if first.cosines is None or not others:
        return torch.empty(len(runs), 0, dtype=torch.int64)
    angles = [vector_errors(run) for run in runs]
    simple = []
    # Candidates are the converged values of the first run; every other run must confirm them.
    for index in (angles[0] <= TUNING.converged).nonzero()[:, 0].tolist():
        nearest = [int((run.values - first.values[index]).abs().argmin()) for run in others]
        places = [index, *nearest]
        if all(_same(runs, angles, places, other) for other in range(1, len(runs))):
            simple.append(places)
    return torch.tensor(simple, dtype=torch.int64).reshape(-1, len(runs)).T


def _sample(run: Spectrum, chosen: Tensor, at: Tensor) -> Tensor:
    rest = run.weights.clone()
    rest[chosen] = 0
    left, mass = run.dimension - len(chosen), rest.sum()
    # (n - |S|) sum tau f / sum tau over the rest. BLAS is avoided, because its last bit depends on
    # the memory alignment, which differs for a run that was read from a file.
    sampled = left * (rest * at).sum() / mass if left and mass > 0 else torch.zeros_like(mass)
    return at[chosen].sum() + sampled


def _same(
    runs: Sequence[Spectrum], angles: Sequence[Tensor], places: Sequence[int], other: int
) -> bool:
    """Return whether two runs have the same eigenvalue, with a one-dimensional eigenspace."""
    first, run, here, there = runs[0], runs[other], places[0], places[other]
    # An eigenvalue lies within the residual of each Ritz value, so the two intervals must overlap.
    gap = abs(float(first.values[here] - run.values[there]))
    if not is_below(gap, float(first.residuals[here] + run.residuals[there])):
        return False
    if first.cosines is None or not is_below(float(angles[other][there]), TUNING.converged):
        return False
    # On a line |z'u| / |z| = sqrt(tau).
    along = abs(float(first.cosines[other, here]))
    part = math.sqrt(float(run.weights[there]))
    slack = TUNING.deviations * float(angles[0][here] + angles[other][there])
    return is_below(abs(along - part) * math.sqrt(run.dimension), TUNING.roundoff + slack)
