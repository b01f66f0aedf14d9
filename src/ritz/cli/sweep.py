"""``ritz sweep``: train with all combinations of some options and several seeds."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer

from ritz._core.checks import check_choice, check_count
from ritz._core.training_config import TrainingConfig
from ritz.cli import _options as shared
from ritz.cli import train
from ritz.cli._options import OUTPUT, option
from ritz.cli._output import print_result

if TYPE_CHECKING:
    from ritz._core.progress import Progress
    from ritz.training._shared import Point, RunConfig

EPILOG = shared.examples(
    "ritz sweep --model mlp --data digits --grid lr=0.03,0.1,0.3 --out sweeps/rates",
    "ritz sweep --model mlp --data digits --epochs 20 --grid optimizer=sgd,adam "
    "--grid batch-size=32,128 --seeds 5 --jobs 2 --out sweeps/batches",
    "ritz sweep --model mlp --data digits --grid optimizer.momentum=0,0.9 "
    "--grid model.hidden=[[32],[64,32]] --seeds 0,7 --watch 5 --out sweeps/widths",
    "ritz sweep --model mlp --data digits --grid watch-samples=64,256 --watch 5 --out sweeps/watch",
    "The names of the grid are those of the options below, without the dashes: all but --seed, "
    "--data-dir and those of this command, of files and of printing. Other settings of "
    "the optimiser, the model and the data are optimizer.NAME, model.NAME and data.NAME. Values "
    "that contain commas are given as a list in JSON.",
    "Each run has a folder below --out, which the other commands take. If the command is "
    "interrupted, run it again: it resumes. With further values it trains what is missing.",
)
SWEEP = "Sweep"
WATCHING = ("watch", *train.WATCHED)
# Options of a run that are not options of training.
NAMES = ("model", "data", "loss", "preset", *WATCHING)
# Options that are the same in all runs, and how the grid varies what they set, if it does.
FIXED = {"set": "optimizer.NAME", "set_model": "model.NAME", "set_data": "data.NAME",
         "data_dir": "", "out": "", "json": "", "jobs": "", "seeds": "", "metric": "", "grid": "",
         "resume": "", "restart": ""}  # fmt: skip
RESULT, PICTURE = "sweep.safetensors", "sweep.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(train.Options):
    """Options of the command, in addition to those of ``ritz train``."""

    # fmt: off
    grid: list[str] | None = option(None, "Option with the values to try, such as lr=0.03,0.1. "
                                    "May be repeated: all combinations are tried.", SWEEP,
                                    metavar="NAME=VALUE,...")
    seeds: str = option("3", "Number of seeds, counted from --seed on, or a list such as 0,5,7.",
                        SWEEP, metavar="N")
    jobs: int | None = option(None, "Maximum number of runs at once; fewer run if memory is short "
                              "(default: the number of cores; on a GPU 1).", SWEEP, low=1)
    metric: str | None = option(None, "Metric to compare by, such as test_loss (default: accuracy "
                                "or loss on validation data, or else on test data).", SWEEP,
                                metavar="NAME")
    out: Path = option(MISSING, "Folder of the sweep, created if missing.", OUTPUT,
                       metavar="FOLDER")
    # fmt: on


def command(options: Options, training: TrainingConfig, given: frozenset[str]) -> None:
    """Train with all combinations of some options and seeds; write a table and a picture."""
    from ritz.cli._factories import default_device
    from ritz.cli._output import writing
    from ritz.training._shared import (
        SweepOptions,
        available_cores,
        check_metric,
        plan_sweep,
        run_plan,
    )

    config = train.run_config(options, training)
    grid = parse_grid(options.grid or ())
    seeds = parse_seeds(options.seeds)
    if "preset" in grid and options.preset is not None:
        raise ValueError(f"grid must not have preset with --preset, got --preset {options.preset}")
    if "watch" not in grid:
        train.watching(options)
    check = _Check(config, options)
    made = SweepOptions(base=config.training, given=given, preset=options.preset, names=NAMES,
                        check=check, cuts=check.cuts(grid))  # fmt: skip
    plan = plan_sweep(made, grid, seeds=seeds, folder=options.out)
    watched = options.watch is not None or "watch" in plan.grid
    if options.metric is not None and not watched:
        check_metric(options.metric, plan.points, parts=check.parts(plan.points))
    device = default_device(training.device)
    # Several runs on one GPU would share its memory.
    jobs = options.jobs or (1 if device.type == "cuda" else available_cores())
    # Processes receive a function that can be pickled.
    run = partial(_train, config, options)
    with writing(options.out) as folder:
        if not options.json:
            # A run that has ended is not trained again.
            done = len(plan.done)
            typer.echo(f"{plan}; {done} done before; up to {jobs} at once", err=True)
        result = run_plan(
            plan, run, max_jobs=jobs, metric=options.metric, progress=not options.json
        )
        files = _write(result, folder)
    print_result(result, files, as_json=options.json)
    if not result.status.ok:
        typer.echo(f"ritz: {result.status}", err=True)
        raise typer.Exit(1)


def parse_grid(entries: Sequence[str]) -> dict[str, list[Any]]:
    """Return values by name of ``NAME=VALUE,...``; ``[...]`` is a list of values in JSON."""
    from ritz.cli._factories import parse_settings

    grid: dict[str, list[Any]] = {}
    for entry in entries:
        # Values may contain "=" themselves.
        name, equals, text = entry.partition("=")
        name, text = name.strip(), text.strip()
        if not equals or not name:
            raise ValueError(f"--grid takes NAME=VALUE,..., got {entry!r}")
        if not text:
            raise ValueError(f"--grid {name} must have at least one value, got none")
        if name in grid:
            raise ValueError(f"--grid {name} must be given once, got it twice")
        word = name.lstrip("-").replace("-", "_")
        if word in FIXED:
            instead = f": use {FIXED[word]}" if FIXED[word] else ", which is one for all runs"
            raise ValueError(f"--grid must not have {name}{instead}")
        if text[0] == "[":
            try:
                grid[name] = json.loads(text)
            except ValueError as error:
                raise ValueError(f"--grid {name} must be values or a list in JSON, got {text!r}: "
                                 f"{error}") from error  # fmt: skip
            continue
        words = [word.strip() for word in text.split(",")]
        if "" in words:
            raise ValueError(f"--grid {name} must have a value between commas, got {text!r}")
        # Word by word: parsed as a whole, 32,128 would be one value, a list.
        grid[name] = [parse_settings("--grid", [f"{name}={word}"])[name] for word in words]
    return grid


def parse_seeds(text: str) -> int | list[int]:
    """Return a number of seeds, or a list of them."""
    seeds = shared.split_sizes("--seeds", text) or []
    # 3 is a number of seeds. With a comma, as in 0,5,7, these are the seeds themselves.
    return seeds if "," in text else seeds[0]


def _train(
    config: "RunConfig", options: Options, task: Any, *, progress: "bool | Progress"
) -> tuple[dict[str, float], Any]:
    from ritz.training._shared import outcome

    config, options = _at(config, options, task.training, task.others)
    watch = train.watching(options)
    return outcome(train.train_one(config, task.folder, progress=progress, **watch))


def _at(
    config: "RunConfig", options: Options, training: TrainingConfig, others: dict[str, Any]
) -> "tuple[RunConfig, Options]":
    """Return the configuration of a point of the grid, and the options of its monitor."""
    named = dict(others["names"])
    watch = {name: named.pop(name) for name in WATCHING if name in named}
    if isinstance(watch.get("quantity"), str):
        watch["quantity"] = [watch["quantity"]]
    # Options of a point come after those of the command, and replace them.
    return replace(
        config,
        training=training,
        model_options={**config.model_options, **others["model"]},
        data_options={**config.data_options, **others["data"]},
        **named,
    ), replace(options, **watch)


class _Check:
    """Raises for a point of the grid whose model, data, loss or monitor cannot be made."""

    def __init__(self, config: "RunConfig", options: Options) -> None:
        self._config, self._options = config, options
        self._data: dict[str, Any] = {}
        self._models: set[str] = set()

    def cuts(self, grid: dict[str, list[Any]]) -> bool | None:
        """Return whether the batch size is an option of training, or ``None`` if not known."""
        # Data sets by name are never read by a loader of the user.
        return True if "data" not in grid and ":" not in self._config.data else None

    def parts(self, points: "Iterable[Point]") -> list[str]:
        """Return the parts of the data that all points have."""
        from ritz.training._shared import PARTS

        configs = (_at(self._config, self._options, each.training, each.others)[0]
                   for each in points)  # fmt: skip
        held = [self._data_of(config) for config in configs]
        return [part for part in PARTS if all(getattr(data, part) is not None for data in held)]

    def _data_of(self, config: "RunConfig") -> Any:
        """Return the data of a point. Each data set of the grid is made once."""
        from ritz.cli._factories import make_data

        place = f"{config.data} {config.data_options}"
        if place not in self._data:
            folder = Path(config.data_dir) if config.data_dir else None
            self._data[place] = make_data(config.data, data_dir=folder, options=config.data_options)
        return self._data[place]

    def __call__(self, training: TrainingConfig, others: dict[str, Any]) -> None:
        from ritz.cli._factories import loss_function, make_model
        from ritz.training._shared import PARTS, check_patience

        config, options = _at(self._config, self._options, training, others)
        _check_watch(options, others["names"])
        if options.watch is not None:
            check_count("watch", options.watch, high=training.num_epochs)
        if "loss" in others["names"]:
            loss_function(config.loss)
        patient = training.patience is not None
        made = others["model"] or others["data"] or {"model", "data"} & others["names"].keys()
        if not (made or patient):
            return
        data = self._data_of(config)
        if patient:
            check_patience([part for part in PARTS if getattr(data, part) is not None])
        # Each model of the grid is made once.
        name = f"{config.model} {config.model_options} {config.data} {config.data_options}"
        if name not in self._models:
            make_model(config.model, data, config.model_options)
            self._models.add(name)


def _check_watch(options: Options, named: dict[str, Any]) -> None:
    """Raise for values of the grid that Typer would refuse as options of the monitor."""
    for entry in fields(train.Options):
        value = getattr(options, entry.name)
        if entry.name not in WATCHING or entry.name not in named:
            continue
        if get_origin(entry.type) is Literal:
            check_choice(entry.name, value, get_args(entry.type))
        elif entry.name == "quantity":
            if value is not None and not (value and isinstance(value, list)):
                raise TypeError(f"quantity must be a name or a list of names, got {value!r}")
        elif value is not None or entry.default is not None:
            check_count(entry.name, value, low=entry.metadata["low"])
    train.watching(options)


def _write(result: Any, folder: Path) -> list[Path]:
    """Write a result, and its picture if Matplotlib is installed."""
    from importlib.util import find_spec

    import ritz

    ritz.save(result, folder / RESULT)
    # Without a run that has ended there is no metric to draw.
    if find_spec("matplotlib") is None or not result.metric:
        return [folder / RESULT]
    return [folder / RESULT, ritz.plots.save_figure(ritz.plots.plot(result), folder / PICTURE)]
