"""``sweep``: train over a grid of options and seeds; a table of metrics with their spread."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import sha256
from inspect import signature
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz._core.checks import (
    MAX_SEED,
    as_plain,
    check_choice,
    check_count,
    check_positive,
    is_below,
)
from ritz._core.distributed import world_size
from ritz._core.progress import Progress
from ritz._core.registry import suggest
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
from ritz.training._optimizers import create_optimizer
from ritz.training._result import TrainingResult, TrainingStatus
from ritz.training._writers import scalars

# Prefixes of settings that are not fields of TrainingConfig.
GROUPS = ("optimizer", "model", "data")
SHORT = ("lr", "weight_decay")  # settings of the optimiser that need no prefix
# Points are compared by the first of these metrics that all runs have.
METRICS = tuple(
    f"{average}{part}_{name}"
    for part in ("validation", "test", "train")
    for average in ("average_", "")
    for name in ("accuracy", "perplexity", "loss")
)
COLUMNS = 4  # of metrics in a table: more do not fit 80 characters beside two options
LONGEST = 120  # characters of the name of a run, which is also that of its folder

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


def describe(grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> str:
    """Return the number of runs of a sweep, such as ``6 runs: 3 values of lr x 2 seeds``."""
    parts = [f"{len(v)} value{'s' * (len(v) > 1)} of {name}" for name, v in grid.items()]
    parts.append(f"{len(seeds)} seed{'s' * (len(seeds) > 1)}")
    total = len(seeds) * math.prod(map(len, grid.values()))
    return f"{total} run{'s' * (total > 1)}: {' x '.join(parts)}"


def _table(result: SweepResult) -> list[str]:
    """Return a line for each point, and the legend."""
    columns = _columns(result)
    points = [
        dict(zip(result.grid, values, strict=True)) for values in product(*result.grid.values())
    ]
    rows = [[*result.grid, *columns, ""]]
    n = len(result.seeds)
    for number, point in enumerate(points):
        row = [_text(value) for value in point.values()]
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


def _text(value: Any) -> str:
    """Return a value as a short text: 0.1, sgd, 64x32."""
    if isinstance(value, list | tuple):
        return "x".join(map(_text, value))
    whole = isinstance(value, float) and float(f"{value:g}") == value
    return f"{value:g}" if whole else str(value)


# ------------------------------------------------------------------------------------------
# The grid: names and values of options, and the runs that they make.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: Values of the grid and seed, also the name of its folder.
        training: Options of training.
        others: Keywords of ``model`` and ``data``, and other ``names``: the model, the data.
        folder: Folder of the run, or ``None``.
    """

    name: str
    training: TrainingConfig
    others: dict[str, dict[str, Any]]
    folder: Path | None


def check_grid(
    grid: Mapping[str, Sequence[Any]], names: Iterable[str] = ()
) -> dict[str, list[Any]]:
    """Return the values of each option by its name in the library; raise for a bad grid.

    Args:
        grid: Values by name. A name may be a field of :class:`TrainingConfig`, also as on the
            command line; ``lr`` or ``weight_decay``; or ``optimizer.NAME``, ``model.NAME``,
            ``data.NAME``.
        names: Further options.
    """
    if not isinstance(grid, Mapping):
        raise TypeError(f"grid must be a dictionary of names and values, got {type(grid).__name__}")
    checked: dict[str, list[Any]] = {}
    for word, values in grid.items():
        name = _option_name(word, names)
        if name in checked:
            raise ValueError(f"grid must have {name} once, got it twice")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"grid must have a list of values of {name}, got {values!r}")
        if not values:
            raise ValueError(f"grid must have at least one value of {name}, got none")
        values = [as_plain(value) for value in values]
        for place, value in enumerate(values):
            _check_plain(name, value)
            # 1 and True are equal, and not the same.
            if any(value == each and isinstance(value, bool) == isinstance(each, bool)
                   for each in values[:place]):  # fmt: skip
                raise ValueError(f"grid must have each value of {name} once, got {value} twice")
        checked[name] = values
    return checked


def _option_name(word: str, names: Iterable[str]) -> str:
    """Return the name of an option in the library."""
    known = {*SHORT, *names}
    aliases = {}
    for entry in fields(TrainingConfig):
        if entry.name not in ("seed", "resume", "optimizer_settings"):
            known.add(entry.name)
            flag = (entry.metadata.get("flags") or entry.name).split("/")[0].split()[0]
            # Such as epochs, the flag of num_epochs.
            aliases[flag.lstrip("-").replace("-", "_")] = entry.name
    name = str(word).lstrip("-").replace("-", "_")
    group, dot, key = str(word).partition(".")
    if dot and key and group in GROUPS:
        return str(word)
    if name == "seed":
        raise ValueError("grid must not have seed: pass seeds=[0,1,2] (--seeds 0,1,2)")
    if name not in known and name not in aliases:
        hint = suggest(name, sorted(known), listing="ritz train --help")
        hint += "" if hint.endswith("?") else "."
        raise ValueError(
            f"grid must have options of training, got {word!r}; {hint} Settings of "
            "the optimiser, the model and the data are optimizer.NAME, model.NAME and data.NAME"
        )
    return name if name in known else aliases[name]


def _check_plain(name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        for part in value:
            _check_plain(name, part)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"grid must have numbers, text, lists or None as values of {name}, got "
                        f"{type(value).__name__}")  # fmt: skip
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"grid must have finite values of {name}, got {value}")


def check_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Return the seeds of a sweep: so many from ``first`` on, or those of a list."""
    seeds = as_plain(seeds)
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        check_count("seeds", seeds)
        return list(range(first, first + seeds))
    if isinstance(seeds, str | bool) or not isinstance(seeds, Sequence):
        raise TypeError(f"seeds must be a number or a list of whole numbers, got {seeds!r}")
    if first:
        raise ValueError(f"seed must not be given with a list of seeds, got {first} and {seeds}")
    if not seeds:
        raise ValueError("seeds must contain at least one seed, got none")
    for place, seed in enumerate(seeds):
        check_count("seeds", seed, low=0, high=MAX_SEED)
        if seed in seeds[:place]:
            raise ValueError(f"seeds must differ, got {seed} twice")
    return list(map(int, seeds))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All runs of a sweep, checked before the first.

    Attributes:
        base: Options of all runs.
        grid: Values by option.
        seeds: Seeds.
        points: The runs: all points for one seed after the other, so that an unfinished table
            compares points.
        folder: Folder of the sweep, or ``None``.
    """

    base: TrainingConfig
    grid: dict[str, list[Any]]
    seeds: list[int]
    points: list[Point]
    folder: Path | None

    def __str__(self) -> str:
        number = self.base.num_epochs
        epochs = f"; {number} epoch{'s' * (number > 1)} each"
        return describe(self.grid, self.seeds) + ("" if "num_epochs" in self.grid else epochs)


def plan_sweep(
    base: TrainingConfig,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int | Sequence[int],
    folder: FilePath | None,
    names: Iterable[str] = (),
) -> Plan:
    """Return the runs of a sweep; raise if the grid is wrong.

    Args:
        base: Options of all runs.
        grid: As for :func:`sweep`.
        seeds: As for :func:`sweep`.
        folder: As for :func:`sweep`.
        names: Options that are not in :class:`TrainingConfig`.
    """
    if world_size() > 1:
        raise ValueError("a sweep must be started in one process, got several: leave out torchrun")
    grid, seeds = check_grid(grid, names), check_seeds(seeds, base.seed)
    place, points = None if folder is None else Path(folder), []
    for seed in seeds:
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            name = _name(chosen | {"seed": seed})
            training, others = _apply(replace(base, seed=seed), chosen)
            points.append(Point(name=name, training=training, others=others,
                                folder=None if place is None else place / name))  # fmt: skip
    return Plan(base=base, grid=grid, seeds=seeds, points=points, folder=place)


def _apply(
    base: TrainingConfig, chosen: Mapping[str, Any]
) -> tuple[TrainingConfig, dict[str, dict[str, Any]]]:
    """Return the options of training of a point, and its options of model and data."""
    training: dict[str, Any] = {}
    settings = dict(base.optimizer_settings)
    others: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "names": {}}
    known = {entry.name for entry in fields(TrainingConfig)}
    for name, value in chosen.items():
        # Without a dot the group is empty and the key is the whole name.
        group, _, key = name.rpartition(".")
        if group == "optimizer" or name in SHORT:
            settings[key] = value
        elif group:
            others[group][key] = value
        else:
            (training if name in known else others["names"])[name] = value
    for name in SHORT:
        if name in settings:
            check_positive(name, settings[name], zero=name == "weight_decay")
    config = replace(base, **training, optimizer_settings=settings)
    # Names of optimisers and their settings, on a stand-in for the model, which draws no weights.
    layer = nn.utils.skip_init(nn.Linear, 1, 1)
    create_optimizer(config.optimizer, layer.parameters(), model=layer, **settings)
    return config, others


def _name(chosen: Mapping[str, Any]) -> str:
    """Return a name of a run that can be the name of a folder."""
    whole = ",".join(f"{name}={_text(value)}" for name, value in chosen.items())
    name = re.sub(r"[^\w.,=+-]+", "_", whole)
    if name == whole and len(name) <= LONGEST:
        return name
    # A tag tells names apart that differ only in characters that were replaced or cut.
    return f"{name[:LONGEST]}-{sha256(whole.encode()).hexdigest()[:8]}"


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
            ``weight_decay``; other settings of the optimiser as ``optimizer.momentum`` and keywords
            of the model as ``model.width``. If the grid is empty, only the seeds vary.
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
    base = combine(config, {name: options[name] for name in options.keys() - objects.keys()})
    plan = plan_sweep(base, grid, seeds=seeds, folder=folder)
    task = _Fit(model, data, objects)
    if "batch_size" in plan.grid and not task.cuts:
        refuse_batch_size(plan.grid["batch_size"])
    return run_plan(plan, task, max_jobs=max_jobs, metric=metric,
                    progress=progress)  # fmt: skip


@final
class _Fit:
    """Trains one point."""

    def __init__(self, model: Callable[..., nn.Module], data: Any, objects: Any) -> None:
        self._model, self._data, self._objects = model, as_parts(data), objects
        # Whether the batch size of training is an option, and not that of a loader.
        self.cuts = takes_batch_size(self._data.train)
        held = (getattr(self._data, part) or objects.get(part) for part in PARTS)
        self._generators = [each for part in held for each in loader_generators(part)]

    def __call__(self, task: Point, *, progress: bool | Progress) -> Outcome:
        # The initial weights depend on the seed of the run, and not on the runs before it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(task.training.seed)
            model = self._model(**task.others["model"])
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
    runs = run_tasks(train, tasks, max_jobs=max_jobs, is_over=is_over, progress=progress)
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
