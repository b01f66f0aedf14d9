"""``sweep``: train over a grid of options and seeds; a table of metrics with their spread."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz._core.checks import check_choice, check_count, is_below
from ritz._core.progress import Progress
from ritz._core.results import Estimate, format_uncertain
from ritz._core.storage import storable
from ritz._core.training_config import TrainingConfig, combine
from ritz.training._checkpoint import FilePath
from ritz.training._data import (
    PARTS,
    as_parts,
    loader_generators,
    refuse_batch_size,
    takes_batch_size,
)
from ritz.training._fit import fit
from ritz.training._jobs import Compute, run_tasks
from ritz.training._log import LOG, read_log
from ritz.training._optimizers import check_patience
from ritz.training._result import TrainingResult, TrainingStatus
from ritz.training._sweep_plan import (
    Others,
    Plan,
    Point,
    SweepOptions,
    check_metric,
    describe,
    plan_sweep,
    short_text,
)
from ritz.training._writers import scalars

# Points are compared by the first of these metrics that all runs have.
METRICS = tuple(
    f"{average}{part}_{name}"
    for part in ("validation", "test", "train")
    for average in ("average_", "")
    for name in ("accuracy", "perplexity", "loss")
)
COLUMNS = 4  # of metrics in a table: more do not fit 80 characters beside two options

# ------------------------------------------------------------------------------------------
# The result.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Result of a sweep: the last metrics of each run.

    Attributes:
        grid: Values of each option of the grid.
        seeds: Seeds of the runs of each point.
        metrics: The last value of each metric, in float64, ``(*lengths of the grid, num_seeds)``;
            NaN for a run that diverged, was not finished or does not have it. They are the metrics
            of :class:`TrainingResult` and the last numbers of a monitor.
        outcomes: How each run ended, in the order of the entries of ``metrics``: as in
            :class:`TrainingStatus`, or empty if it has not started.
        metric: The metric by which points are compared; empty if no run has one.
        best: The options with the best mean of this metric over the seeds.
        tied: Options that do not differ significantly from the best: the 95 % interval of the mean
            difference between runs with the same seed contains zero.
        folder: Folder of the runs, one folder each, or ``None``.
        settings: The other options of training in plain values.
        status: Whether all runs have ended.
    """

    grid: dict[str, list[Any]]
    seeds: list[int]
    metrics: dict[str, Tensor]
    outcomes: list[str]
    metric: str
    best: dict[str, Any]
    tied: list[dict[str, Any]]
    folder: str | None
    settings: dict[str, Any]
    status: TrainingStatus

    def __str__(self) -> str:
        return "\n".join([f"{describe(self.grid, self.seeds)}; {self.status}", "", *_table(self)])


def _table(result: SweepResult) -> list[str]:
    """Return a line for each point, and the legend."""
    columns = _columns(result)
    points = [
        dict(zip(result.grid, values, strict=True)) for values in product(*result.grid.values())
    ]
    rows = [[*result.grid, *columns, ""]]
    n = len(result.seeds)
    for number, point in enumerate(points):
        row = [short_text(value) for value in point.values()]
        for name in columns:
            values = result.metrics[name].reshape(-1, n)[number]
            row.append(_spread(values[values.isfinite()]))
        outcomes = result.outcomes[number * n : (number + 1) * n]
        rows.append([*row, _remark(point, outcomes, result)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = [len(result.grid) + len(columns)]  # remarks begin at the left
    lines = [
        "  ".join(
            f"{cell:<{width}}" if place in places else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [*lines, *_legend(result)]


def _columns(result: SweepResult) -> list[str]:
    """Return the metrics to show: first the one that points are compared by."""
    part = result.metric.rpartition("_")[0]
    wanted = [result.metric, f"{part}_loss", "train_loss", "lambda_max", *METRICS]
    shown = dict.fromkeys(name for name in wanted if name in result.metrics)
    # All columns fit with two options. Each further option takes the place of a column.
    return list(shown)[: max(1, COLUMNS - max(0, len(result.grid) - 2))]


def _spread(values: Tensor) -> str:
    """Return mean and standard deviation of the finite values ``(n,)`` as text."""
    if not len(values):
        return "-"
    deviation = float(values.std()) if len(values) > 1 else 0.0
    return format_uncertain(float(values.mean()), deviation) if deviation else f"{values[0]:.5g}"


def _remark(point: dict[str, Any], outcomes: list[str], result: SweepResult) -> str:
    """Return the remark on a point: best, tied, or how many runs diverged or are not finished."""
    ended = {"completed": "", "stopped": "", "": "not run"}
    words = [ended.get(outcome, outcome) for outcome in outcomes]
    remarks = [
        f"{words.count(word)} of {len(words)} {word}" for word in dict.fromkeys(words) if word
    ]
    if point == result.best:
        remarks.insert(0, "best")
    return ", ".join(remarks if point not in result.tied else ["tied", *remarks])


def _legend(result: SweepResult) -> list[str]:
    n = len(result.seeds)
    lines = [f"± standard deviation over {n} seeds."] if n > 1 else []
    if not result.metric:
        return lines
    lines.append(f"Best: highest mean {result.metric}." if _rises(result.metric) else
                 f"Best: lowest mean {result.metric}.")  # fmt: skip
    if n == 1:
        lines.append("One seed: differences may be chance.")
    elif result.tied:
        lines.append("Tied: the 95 % interval of the mean difference from the best contains zero.")
    if "test_" in result.metric:
        lines.append("The best was chosen on the test data, so its test result is optimistic: pass "
                     "validation data.")  # fmt: skip
    return ["", *lines]


def _rises(metric: str) -> bool:
    """Return whether larger values of a metric are better."""
    return metric.endswith("accuracy")


# ------------------------------------------------------------------------------------------
# The runs.

Outcome = tuple[dict[str, float], TrainingStatus]


def sweep(
    model: Callable[..., nn.Module],
    data: Any,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int | Sequence[int] = 3,
    folder: FilePath | None = None,
    max_jobs: int = 1,
    metric: str | None = None,
    config: TrainingConfig | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> SweepResult:
    """Return the metrics of trainings with all combinations of some options and several seeds.

    With a ``folder``, each run has a sub-folder, from which it resumes: the same call continues a
    sweep that was killed, reproducible bit for bit on the CPU. If values or seeds are added, only
    the missing runs are trained. Runs that diverge are part of the result.

    Args:
        model: A function that returns a new model. It may draw from the global generator, which is
            seeded with the seed of the run and then restored. Options ``model.NAME`` of the grid
            are its keywords.
        data: Data, as for :func:`fit`.
        grid: Values by the name of an option: of :class:`TrainingConfig`; ``lr`` and
            ``weight_decay``; ``preset``; other settings of the optimiser as ``optimizer.momentum``
            and keywords of the model as ``model.width``. All combinations are checked before the
            first run. If the grid is empty, only the seeds vary.
        seeds: Number of seeds, counted from the option ``seed``, or a list of them.
        folder: Folder of the sweep, created if missing. Without it nothing is saved.
        max_jobs: Largest number of runs at once. With more than one, each runs in its own process,
            and only as many start as fit in memory. Model, data and options must then be
            picklable. The runs share the cores, and on the CPU the number of threads changes
            roundoff: use the same number when you resume.
        metric: Metric by which points are compared. Defaults to accuracy, perplexity or loss, on
            validation data if there are any, otherwise on test or training data.
        config: Options of all runs.
        progress: Show a progress bar, or a :class:`Progress` to report to.
        **options: Other keywords of :func:`fit`, the same for all runs.

    Returns:
        The metrics of all runs. After ctrl-C or SIGTERM the ``status`` is ``interrupted``, and runs
        that had not ended are missing.

    Example:
        >>> import torch, ritz.training
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> result = ritz.training.sweep(lambda: torch.nn.Linear(3, 2), (x, (x[:, 0] > 0).long()),
        ...                              {"lr": [0.01, 1.0]}, seeds=2, num_epochs=5)
        >>> result.best, result.metrics["train_loss"].shape
        ({'lr': 1.0}, torch.Size([2, 2]))
    """
    if isinstance(model, nn.Module) or not callable(model):
        raise TypeError(
            f"model must be a function that returns a new model, got {type(model).__name__}"
        )
    for name in ("checkpoint", "log", "average", "writer"):
        if name in options:
            raise TypeError(f"sweep has no option {name!r}, which its runs would share")
    taken = {"model", "data", "config", "progress", "options"}
    known = signature(fit).parameters.keys() - taken
    # Names of optimisers and schedules are options of training, which are in the table; objects
    # are passed on.
    chosen = ("optimizer", "schedule")
    objects = {
        name: value
        for name, value in options.items()
        if name in known and not (name in chosen and isinstance(value, str))
    }
    given = options.keys() - objects.keys()
    base = combine(config, {name: options[name] for name in given})
    if config is not None and "preset" in set(grid):
        raise ValueError("config must be None with preset in the grid: pass options by keyword")
    task = _Fit(model, data, objects)
    made = SweepOptions(base=base, given=given, names=("preset",), check=task.check,
                        named=objects.get("optimizer") is None, cuts=task.cuts)  # fmt: skip
    plan = plan_sweep(made, grid, seeds=seeds, folder=folder)
    if "batch_size" in plan.grid and not task.cuts:
        refuse_batch_size(plan.grid["batch_size"])
    watched = bool(objects.get("monitors"))
    check_metric(metric, plan.points, parts=task.parts, watched=watched)
    return run_plan(plan, task, max_jobs=max_jobs, metric=metric,
                    progress=progress)  # fmt: skip


@final
class _Fit:
    """Trains one point."""

    def __init__(self, model: Callable[..., nn.Module], data: Any, objects: Any) -> None:
        self._model, self._data, self._objects = model, as_parts(data), objects
        # Whether the batch size of training is an option, and not that of a loader.
        self.cuts = takes_batch_size(self._data.train)
        held = {part: getattr(self._data, part) or objects.get(part) for part in PARTS}
        self.parts = [part for part in PARTS if held[part] is not None]
        self._generators = [each for part in held.values() for each in loader_generators(part)]
        self._made: list[dict[str, Any]] = []  # keywords with which the model was made in checks

    def check(self, training: TrainingConfig, others: Others) -> None:
        """Raise if the model cannot be made with the keywords of a point."""
        if others["data"]:
            raise ValueError(
                "the data of sweep() are the same for all runs: data.NAME is for ritz sweep"
            )
        if training.patience is not None:
            check_patience(self.parts)
        keywords = others["model"]
        if keywords and keywords not in self._made:
            self._model_of(keywords, training.seed)
            self._made.append(keywords)

    def _model_of(self, keywords: dict[str, Any], seed: int) -> nn.Module:
        # The initial weights depend on the seed of the run, and not on the runs before it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self._model(**keywords)

    def __call__(self, task: Point, *, progress: bool | Progress) -> Outcome:
        model = self._model_of(task.others["model"], task.training.seed)
        # Runs share the loaders, and none may begin where another has left their generators.
        states = [generator.get_state() for generator in self._generators]
        with TemporaryDirectory() as scratch:
            # The numbers of monitors are in the log, also if nothing is to be saved.
            files: Any = {"checkpoint": task.folder, "log": (task.folder or Path(scratch)) / LOG}
            files |= {"progress": progress} | self._objects
            ended = outcome(fit(model, self._data, task.training, **files))
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return ended


def outcome(result: TrainingResult) -> Outcome:
    """Return the last metrics of a run, with those of its monitors, and how it ended."""
    metrics = dict(result.metrics)
    # The last record of each quantity counts, as it does for the metrics of epochs.
    for record in read_log(result.log) if result.log is not None else ():
        if record["kind"] == "curvature":
            # A number that was not finite is null in the log.
            undefined = metrics.keys() & {name for name in record if record[name] is None}
            metrics |= scalars(record) | dict.fromkeys(undefined, math.nan)
    return metrics, result.status


def run_plan(
    plan: Plan,
    train: Compute[Outcome],
    *,
    max_jobs: int = 1,
    metric: str | None = None,
    progress: bool | Progress = False,
) -> SweepResult:
    """Return the result of a sweep.

    Args:
        plan: Its runs.
        train: Takes a :class:`Point` and returns what :func:`outcome` does.
        max_jobs: As for :func:`sweep`.
        metric: As for :func:`sweep`.
        progress: As for :func:`sweep`.
    """
    max_jobs = check_count("max_jobs", max_jobs)
    tasks = {point.name: point for point in plan.points}
    is_over = partial(_is_over, metric)
    runs = run_tasks(train, tasks, max_jobs=max_jobs, is_over=is_over, done=plan.done,
                     progress=progress)  # fmt: skip
    return _result(plan, runs, metric)


def _is_over(metric: str | None, result: Outcome) -> bool:
    """Return whether a sweep ends with this run; raise, at the first one, for an unknown metric."""
    metrics, status = result
    if metric is not None and status.ok:
        check_choice("metric", metric, metrics)
    return status.outcome == "interrupted"


def _result(plan: Plan, runs: Mapping[str, Outcome], metric: str | None) -> SweepResult:
    """Return the table of the runs that have ended."""
    n, seeds = len(plan.points) // len(plan.seeds), len(plan.seeds)
    # Runs are made by seeds; the table has the seeds last.
    order = [plan.points[j * n + i].name for i in range(n) for j in range(seeds)]
    outcomes = [runs[name][1].outcome if name in runs else "" for name in order]
    ended = {name: metrics for name, (metrics, status) in runs.items() if status.ok}
    columns = {
        name: torch.tensor([ended.get(run, {}).get(name, math.nan) for run in order],
                           dtype=torch.float64).view(n, seeds)
        for name in sorted({name for metrics in ended.values() for name in metrics})
    }  # fmt: skip
    shared = (name for name in METRICS if all(name in metrics for metrics in ended.values()))
    metric = (metric or next(shared, "")) if ended else ""
    best, tied = _best(columns[metric], metric) if metric else (None, [])
    points = [dict(zip(plan.grid, each, strict=True)) for each in product(*plan.grid.values())]
    shape = (*map(len, plan.grid.values()), seeds)
    return SweepResult(
        grid=plan.grid,
        seeds=plan.seeds,
        metrics={name: column.view(shape) for name, column in columns.items()},
        outcomes=outcomes,
        metric=metric,
        best={} if best is None else points[best],
        tied=[points[row] for row in tied],
        folder=None if plan.folder is None else str(plan.folder),
        settings=plan.base.to_plain(),
        status=_status(outcomes, plan.folder),
    )


def _status(outcomes: Sequence[str], folder: Path | None) -> TrainingStatus:
    missing = sum(outcome in ("", "interrupted") for outcome in outcomes)
    if not missing:
        return TrainingStatus(outcome="completed", message=f"{len(outcomes)} runs")
    where, advice = "; nothing was saved", "pass folder= to be able to resume"
    if folder is not None:
        where, advice = f", saved in {folder}", "repeat the call to resume"
    message = f"{len(outcomes) - missing} of {len(outcomes)} runs have ended{where}"
    return TrainingStatus(outcome="interrupted", message=message, advice=advice)


def _best(values: Tensor, metric: str) -> tuple[int | None, list[int]]:
    """Return the best row of a metric ``(points, seeds)``, and the rows that may be as good."""
    counts = values.isfinite().sum(1)
    if not bool(counts.any()):
        return None, []
    # Points with a diverged run are not candidates.
    rows = (counts == counts.max()).nonzero().flatten().tolist()
    sign = 1.0 if _rises(metric) else -1.0
    best = max(rows, key=lambda row: sign * float(values[row].nanmean()))
    tied = []
    for row in rows:
        # Runs with the same seed share initial weights and order, so they are compared in pairs.
        differences = values[row] - values[best]
        differences = differences[differences.isfinite()]
        if row != best and len(differences) > 1:
            mean = Estimate.of(differences, method="paired by seeds", num_products=0)
            # Student's interval, since differences of pairs are nearly symmetric.
            if is_below(abs(float(mean)), float(replace(mean, samples=None).error())):
                tied.append(row)
    return best, tied
