"""Sharpness: norms, trace, negative mass and rank of the curvature, in every batch-norm mode."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.journal import Journal, Parts
from ritz._core.modes import BATCH_NORM_MODES, BatchNormMode, batch_norms
from ritz._core.progress import Progress
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Estimate, Status, plain_estimate, stderr
from ritz._core.storage import storable
from ritz.curvature import CurvatureOperator, Risk, curvature_operator, summary
from ritz.curvature._shared import MATRICES, CurvatureMatrix, EngineName, Summary
from ritz.measures._degeneracy import Degeneracy, rank_degeneracy
from ritz.operators import exact
from ritz.spectra import Spectrum, lanczos_block
from ritz.spectra._shared import least_frobenius_norm, negative_values

# ------------------------------------------------------------------------------------------
# Traces of functions from the runs of several probes, their simple eigenvalues counted
# exactly.

Function = Callable[[Spectrum], Tensor]
# Most that a Ritz vector may be off its eigenvector (a sine) for its eigenvalue to be split off.
CONVERGED = 1e-4
# Part of a probe, of entries of order one, along a Ritz vector: what roundoff may change in it.
ROUNDOFF = 1e-4


def traces(runs: Sequence[Spectrum], functions: Sequence[Function]) -> tuple[Tensor, int]:
    r"""Return samples ``(f, k)`` of :math:`\operatorname{tr} f(A)`, and how many were split off.

    .. math:: \operatorname{tr} f(A) = \sum_{k \in S} f(\theta_k) + (n - |S|)\, \mathbb{E}\,
        \frac{\sum_{k \notin S} \tau_k f(\theta_k)}{\sum_{k \notin S} \tau_k}

    with the simple eigenvalues :math:`S` that every probe has found: a probe without its part in
    their directions is, made a unit vector again, a uniform probe of what is left. Plain quadrature
    multiplies :math:`f(\theta_k)` by :math:`n \tau_k`, which is one in the mean and a
    :math:`\chi^2` of one degree of freedom: a standard deviation of :math:`\sqrt 2` about a number
    that is known. Where a few eigenvalues hold most of the trace of a function, that is nearly all
    of its error.

    The formula holds for a fixed :math:`S`. Whether an eigenvalue is in it depends on all probes
    having found it, which large weights favour: where it is just about to converge, two or three
    probes have been seen to be off by a part of a standard error in the mean.

    No product.

    Args:
        runs: One a probe, all values with their weights; the first with the cosines of all starts.
        functions: From a run to :math:`f` at its values, ``(m,)``.
    """
    chosen = simple_eigenvalues(runs)
    samples = [
        torch.stack([_sample(run, own, function(run)) for function in functions])
        for run, own in zip(runs, chosen, strict=True)
    ]
    return torch.stack(samples, 1), chosen.shape[1]


def simple_eigenvalues(runs: Sequence[Spectrum]) -> Tensor:
    r"""Return where each run has the simple eigenvalues that all have found, ``(k, s)`` indices.

    A run finds an eigenvalue once, whatever its multiplicity, as the part of its start vector in
    the eigenspace. If that is a line, every other start has the part
    :math:`|z_j^\top u| / \|z_j\| = \sqrt{\tau_j}` along the first run's :math:`u`; in a plane the
    two are at a random angle. So two probes tell what weights alone would need dozens for, but for
    one double eigenvalue in about a hundred that they take for simple; three hardly ever do.

    Args:
        runs: One a probe; the first with the cosines of all starts, or nothing is found.
    """
    first, others = runs[0], runs[1:]
    if first.cosines is None or not others:
        return torch.empty(len(runs), 0, dtype=torch.int64)
    angles = [_angles(run) for run in runs]
    found = []
    for index in (angles[0] <= CONVERGED).nonzero()[:, 0].tolist():
        places = [index] + [
            int((run.values - first.values[index]).abs().argmin()) for run in others
        ]
        if all(_same(runs, angles, places, other) for other in range(1, len(runs))):
            found.append(places)
    return torch.tensor(found, dtype=torch.int64).reshape(-1, len(runs)).T


def _sample(run: Spectrum, chosen: Tensor, at: Tensor) -> Tensor:
    rest = run.weights.clone()
    rest[chosen] = 0
    left, mass = run.dimension - len(chosen), rest.sum()
    # Not a product of BLAS, whose last bit depends on where in memory a run was read to.
    sampled = left * (rest * at).sum() / mass if left and mass > 0 else torch.zeros_like(mass)
    return at[chosen].sum() + sampled


def _angles(run: Spectrum) -> Tensor:
    r"""Bounds :math:`\|A u - \theta u\| / \text{gap}` of the sines from Ritz to eigenvectors."""
    distances = (run.values[:, None] - run.values).abs()
    distances.fill_diagonal_(math.inf)
    return run.residuals / distances.min(1).values


def _same(
    runs: Sequence[Spectrum], angles: Sequence[Tensor], places: Sequence[int], other: int
) -> bool:
    """Whether a run's value is the first run's, and its start has no other part in that space."""
    first, run, here, there = runs[0], runs[other], places[0], places[other]
    gap = abs(float(first.values[here] - run.values[there]))
    if gap > float(first.residuals[here] + run.residuals[there]):
        return False
    if first.cosines is None or float(angles[other][there]) > CONVERGED:
        return False
    along = abs(float(first.cosines[other, here]))
    part = math.sqrt(float(run.weights[there]))
    # Other directions have parts of the same order, of which four deviations may come in.
    slack = ROUNDOFF + 4 * float(angles[0][here] + angles[other][there])
    return abs(along - part) * math.sqrt(run.dimension) <= slack


# ------------------------------------------------------------------------------------------
# Sharpness: norms, trace, negative mass and rank of the curvature, in every batch-norm mode.

# Whose traces are the trace, the square of the Frobenius norm, and the numbers of eigenvalues that
# are below zero, and that may be.
_FUNCTIONS: tuple[Function, ...] = (
    lambda run: run.values,
    lambda run: run.values.square(),
    lambda run: negative_values(run)[0].double(),
    lambda run: negative_values(run)[1].double(),
)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SharpnessRow:
    r"""How sharp one matrix is.

    Attributes:
        matrix: ``hessian`` or ``ggn``.
        batch_norm: The mode of batch norm; ``None`` for a model without.
        spectral_norm: The largest :math:`|\theta_k|` of all probes; its truncation is the residual.
        largest: The largest Ritz value.
        smallest: The smallest Ritz value.
        trace: :math:`\operatorname{tr} H`.
        mean_eigenvalue: :math:`\operatorname{tr} H / P`.
        frobenius_norm: :math:`\|H\|_F`; its samples are those of the square. Never below the root
            of a probe's sum of :math:`\theta_k^2`, which is proven.
        negative_mass: Share of the eigenvalues below zero by more than roundoff and the residuals
            of their Ritz values; its truncation is the share that is zero within its residuals, and
            may be negative too.
        degeneracy: Mass at the origin, and where it lies.
        num_products: Products spent.
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


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """The curvature of a risk, one row for each matrix and batch-norm mode.

    Attributes:
        rows: What was measured.
        summaries: Loss, accuracy and norms in each batch-norm mode, by its name (``""`` for a
            model without).
        model: Name of the model's class.
        num_steps: Lanczos steps a probe.
        num_probes: Probes a row.
        batch_sizes: Smallest and largest batch: part of what ``train`` mode measures.
        l2: Coefficient of the L2 term, which is in every eigenvalue.
        seed: Of the probes, the same in all rows.
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
        return describe(self)


def sharpness(
    risk: Risk,
    *,
    num_steps: int | None = None,
    num_probes: int = 8,
    matrix: CurvatureMatrix | Sequence[CurvatureMatrix] = ("hessian", "ggn"),
    batch_norm: BatchNormMode | Sequence[BatchNormMode] | None = None,
    block_size: int | None = None,
    engine: EngineName = "auto",
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Sharpness:
    r"""Return spectral and Frobenius norm, trace, negative mass and rank degeneracy.

    For the Hessian and the Gauss-Newton matrix, and for a model with batch norm in both modes: the
    two differ by orders of magnitude. All numbers of a row come from the same Lanczos runs, of
    Ritz values :math:`\theta_k` and weights :math:`\tau_k`: :math:`\operatorname{tr} H = P\,
    \mathbb{E} \sum_k \tau_k \theta_k`, :math:`\|H\|_F^2 = P\, \mathbb{E} \sum_k \tau_k \theta_k^2`
    (but a trace that the structure of the operator knows is taken from there). Simple eigenvalues
    that every probe has found count once each, whatever their weights, and the rest is sampled:
    those weights are most of what differs between probes. All rows have the same start vectors, so
    what differs between them is not their luck.

    Cost: ``num_steps * num_probes`` products a row, a gradient and a forward pass a mode, and what
    the exact trace costs, where there is one (a backward pass for each output). Memory:
    ``num_steps + 4`` vectors for each probe of a block, and ``num_probes`` more.

    Args:
        risk: The loss at a point.
        num_steps: Lanczos steps ``m`` a probe; by default 100, or ``P`` if that is less.
        num_probes: Random start vectors. An error bar of ``d`` of them, a standard error, is itself
            uncertain by a share of about :math:`1 / \sqrt{2 (d - 1)}`; one has none.
        matrix: ``hessian``, ``ggn`` or a sequence of them.
        batch_norm: Mode or modes; by default both ``eval`` (or ``recomputed``, if the risk is so)
            and ``train`` with the batches of the risk, whose size must then have been given. A
            model without batch norm has one row.
        block_size: Probes that advance side by side; what suits the operator by default.
        engine: ``linearized`` (traced once), ``eager``, or ``auto``, the first if it can be traced.
        state: Where to resume from: what the names of files begin with. What is finished is kept
            there, and the Lanczos runs on their way every ``save_interval`` seconds, with the
            vectors of their block. The result is bit for bit that of an uninterrupted run (on the
            CPU); a state of other weights, data or settings is refused. The files of what is
            finished, which are small, stay when the run ends.
        save_interval: Seconds between saves.
        generator: Source of the start vectors.
        progress: Show progress bars, or a :class:`Progress` to report to.

    Reference: *Flatness is a False Friend*.
    """
    size = risk.space.size
    num_steps = min(100, size) if num_steps is None else num_steps
    check_count("num_steps", num_steps, high=size)
    check_count("num_probes", num_probes)
    wanted: Sequence[CurvatureMatrix] = (matrix,) if isinstance(matrix, str) else matrix
    if not wanted:
        raise ValueError(f"matrix must be one or several of {', '.join(MATRICES)}; got {matrix!r}")
    for name in wanted:
        check_choice("matrix", name, MATRICES)
    generator = resolve_generator(generator)
    start = probes(
        (size, num_probes),
        kind="gaussian",
        generator=generator,
        dtype=risk.theta.dtype,
        device=risk.theta.device,
    )
    settings = {
        "num_steps": num_steps,
        "engine": engine,
        "block_size": block_size,
        "risk": repr(risk),
        "batch_sizes": [min(risk.batch_sizes), max(risk.batch_sizes)],
        "weights": risk.theta,
        "start": start,
    }
    together = risk.sharing != "none"
    parts = Parts(
        Journal(state, settings, interval=save_interval, group=risk.group, together=together)
    )
    run = partial(lanczos_block, num_steps=num_steps, group=risk.group, save_interval=save_interval,
                  progress=progress)  # fmt: skip
    rows, summaries = [], {}
    for mode, centre in _modes(risk, batch_norm):
        summaries[mode or ""] = _summary(parts, centre, mode)
        for name in wanted:
            op = curvature_operator(centre, name, engine=engine, block_size=block_size)
            rows.append(_row(parts, op, run, start, name, mode, generator.initial_seed()))
    return Sharpness(
        rows=tuple(rows),
        summaries=summaries,
        model=type(risk.model).__name__,
        num_steps=num_steps,
        num_probes=num_probes,
        batch_sizes=(min(risk.batch_sizes), max(risk.batch_sizes)),
        l2=risk.l2,
        seed=generator.initial_seed(),
    )


def describe(report: Sharpness) -> str:
    """Return the report as a table, a line for each number and a column for each matrix."""
    first = next(iter(report.summaries.values()))
    low, high = report.batch_sizes
    lines = [
        f"Sharpness of {report.model}: {first.num_parameters:,} parameters, "
        f"{first.num_samples:,} samples in batches of {low if low == high else f'{low} to {high}'}"
        + (f", l2 {report.l2:g}" if report.l2 else ""),
        f"  {report.num_steps} Lanczos steps, {_probes(report.num_probes)}, seed {report.seed}",
    ]
    columns = [_column(row, report.summaries[row.batch_norm or ""]) for row in report.rows]
    width = max(len(cell) for column in columns for cell in column.values())
    for name in columns[0]:
        cells = "  ".join(f"{column[name]:>{width}}" for column in columns)
        lines.append(f"  {name:<18}  {cells}")
    return "\n".join(lines)


def _probes(count: int) -> str:
    if count == 1:
        return "one probe (no error bars)"
    share = (2 * (count - 1)) ** -0.5
    return f"{count} probes (± a standard error, itself uncertain by {share:.0%})"


def _modes(
    risk: Risk, chosen: BatchNormMode | Sequence[BatchNormMode] | None
) -> list[tuple[str | None, Risk]]:
    """Batch-norm modes with the risk in each."""
    modes: Sequence[BatchNormMode]
    if chosen is None:
        modes = ("recomputed" if risk.batch_norm == "recomputed" else "eval", "train")
    else:
        modes = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    if not modes:
        raise ValueError("batch_norm must hold at least one mode, got none")
    for mode in modes:
        check_choice("batch_norm", mode, BATCH_NORM_MODES)
    if not batch_norms(risk.model):
        return [(None, risk)]
    return [(mode, risk.with_batch_norm(mode)) for mode in modes]


def _summary(parts: Parts, risk: Risk, mode: str | None) -> Summary:
    """The risk in a few numbers, which also tell whether a state is of the same data."""
    now = summary(risk)
    saved = parts.get(mode or "none", lambda state: now)
    parts.journal.check_repeats("loss", [now.loss], [saved.loss], dtype=risk.theta.dtype)
    return saved


def _row(
    parts: Parts,
    op: CurvatureOperator,
    run: Callable[..., tuple[Spectrum, ...]],
    start: Tensor,
    matrix: CurvatureMatrix,
    mode: str | None,
    seed: int,
) -> SharpnessRow:
    """One matrix, each of whose blocks of runs is a part that can be resumed."""
    name, runs = f"{mode or 'none'}-{matrix}", list[Spectrum]()
    for index, block in enumerate(start.split(op.block_size, 1)):
        # The first run's angles with all starts: which of its values are simple eigenvalues.
        against = None if index or start.shape[1] == 1 else start
        runs += parts.get(f"{name}-{index}", partial(run, op, start=block, against=against))
    # A part as well: an exact trace may cost as much as a run.
    return parts.get(name, lambda state: _measured(op, runs, matrix, mode, seed))


def _measured(
    op: CurvatureOperator,
    runs: list[Spectrum],
    matrix: CurvatureMatrix,
    mode: str | None,
    seed: int,
) -> SharpnessRow:
    size, spent = op.shape[0], sum(run.num_products for run in runs)
    samples, split = traces(runs, _FUNCTIONS)
    how = "Lanczos quadrature" + (f", {split} eigenvalues split off" if split else "")
    first, second, negative, possible = (
        _estimate(row, spent, len(runs), seed, how) for row in samples
    )
    known, note = exact(op, "trace")
    whole = first if known is None else Estimate.exact(known, method=f"exact, by {note}")
    extreme, residual = _extreme(runs)
    return SharpnessRow(
        matrix=matrix,
        batch_norm=mode,
        spectral_norm=_estimate(extreme.abs()[None], spent, len(runs), seed, "Lanczos", residual),
        largest=max(float(run.values[-1]) for run in runs),
        smallest=min(float(run.values[0]) for run in runs),
        trace=whole,
        mean_eigenvalue=_scaled(whole, 1 / size),
        frobenius_norm=_root(second, max(map(least_frobenius_norm, runs))),
        negative_mass=replace(
            _scaled(negative, 1 / size), truncation=(possible.mean - negative.mean) / size
        ),
        degeneracy=rank_degeneracy(runs, matrix=matrix),
        num_products=spent,
        status=min((run.status for run in runs), key=lambda status: status.outcome == "breakdown"),
    )


def _extreme(runs: list[Spectrum]) -> tuple[Tensor, Tensor]:
    """The Ritz value largest in magnitude, and its residual."""
    values, residuals = (
        torch.cat([getattr(run, name) for run in runs]) for name in ("values", "residuals")
    )
    place = values.abs().argmax()
    return values[place], residuals[place]


def _estimate(
    samples: Tensor, spent: int, count: int, seed: int, how: str, truncation: Tensor | None = None
) -> Estimate:
    """A mean over probes; with a truncation, one value that is not sampled."""
    return Estimate(
        mean=samples.mean(),
        stderr=stderr(samples) if truncation is None else torch.zeros_like(samples[0]),
        truncation=truncation,
        samples=samples if truncation is None else None,
        num_products=spent,
        method=how,
        status=Status(outcome="completed", message=f"{count} probes"),
        seed=seed,
    )


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(
        mean=estimate.mean * factor,
        stderr=estimate.stderr * factor,
        samples=None if estimate.samples is None else estimate.samples * factor,
        num_products=estimate.num_products,
        method=estimate.method,
        status=estimate.status,
        seed=estimate.seed,
    )


def _root(square: Estimate, least: float) -> Estimate:
    mean = square.mean.sqrt().clamp(min=least)
    error = square.stderr / (2 * mean) if mean > 0 else torch.zeros_like(mean)
    return Estimate(
        mean=mean,
        stderr=error,
        samples=square.samples,
        num_products=square.num_products,
        method=square.method + ", root of the mean square",
        status=square.status,
        seed=square.seed,
    )


def _column(row: SharpnessRow, at: Summary) -> dict[str, str]:
    mass, value = row.degeneracy.mass, row.degeneracy.value
    column = {"": row.matrix, "batch norm": row.batch_norm or "none"}
    if at.accuracy is not None:
        column["accuracy"] = f"{at.accuracy:.2%}"
    residual, undecided = row.spectral_norm.truncation, row.negative_mass.truncation
    return column | {
        "loss": f"{at.loss:.6g}",
        "|gradient|": f"{at.gradient_norm:.4g}",
        "spectral norm": f"{float(row.spectral_norm):.6g}",
        "  residual": "" if residual is None else f"{float(residual):.1g}",
        "largest": f"{row.largest:.6g}",
        "smallest": f"{row.smallest:.4g}",
        "trace": plain_estimate(row.trace),
        "mean eigenvalue": plain_estimate(row.mean_eigenvalue),
        "Frobenius norm": plain_estimate(row.frobenius_norm),
        "negative mass": plain_estimate(row.negative_mass),
        "  undecided": "" if undecided is None else f"{float(undecided):.2g}",
        "mass at the origin": plain_estimate(mass),
        "  which is at": f"{float(value.mean):.2g} ± {float(value.stderr):.1g}",
        "products": f"{row.num_products:,}",
    }
