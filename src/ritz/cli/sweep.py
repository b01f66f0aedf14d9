"""``ritz sweep``: train with all combinations of some options and several seeds."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ritz._core.training_config import TrainingConfig
from ritz.cli import _options as shared
from ritz.cli import train
from ritz.cli._options import OUTPUT, option
from ritz.cli._output import print_result

if TYPE_CHECKING:
    from ritz._core.progress import Progress

EPILOG = shared.examples(
    "ritz sweep --model mlp --data digits --grid lr=0.03,0.1,0.3 --out sweeps/rates",
    "ritz sweep --model mlp --data digits --epochs 20 --grid optimizer=sgd,adam "
    "--grid batch-size=32,128 --seeds 5 --jobs 2 --out sweeps/batches",
    "ritz sweep --model mlp --data digits --grid optimizer.momentum=0,0.9 "
    "--grid model.hidden=[[32],[64,32]] --seeds 0,7 --watch 5 --out sweeps/widths",
    "The names of the grid are those of the options below, without the dashes. Other settings of "
    "the optimiser, the model and the data are optimizer.NAME, model.NAME and data.NAME. Values "
    "that contain commas are given as a list in JSON.",
    "Each run has a folder below --out, which the other commands take. If the command is "
    "interrupted, run it again: it resumes. With further values it trains what is missing.",
)
SWEEP = "Sweep"
# Options of a run that are not options of training.
NAMES = ("model", "data", "loss")
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


def command(options: Options, training: TrainingConfig) -> None:
    """Train with all combinations of some options and seeds; write a table and a picture."""
    from ritz.cli._factories import default_device
    from ritz.cli._output import writing
    from ritz.training._shared import WEIGHTS, available_cores, plan_sweep, run_plan

    config = train.run_config(options, training)
    grid = parse_grid(options.grid or ())
    seeds = parse_seeds(options.seeds)
    plan = plan_sweep(config.training, grid, seeds=seeds, folder=options.out, names=NAMES)
    device = default_device(training.device)
    # Several runs on one GPU would share its memory.
    jobs = options.jobs or (1 if device.type == "cuda" else available_cores())
    # Processes receive a function that can be pickled.
    run = partial(_train, config, train.watching(options))
    with writing(options.out) as folder:
        if not options.json:
            # A run that has ended has weights, and is not trained again.
            done = sum((folder / point.name / WEIGHTS).is_file() for point in plan.points)
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
    config: Any, watch: dict[str, Any], task: Any, *, progress: "bool | Progress"
) -> tuple[dict[str, float], Any]:
    from ritz.training._shared import outcome

    # Values of the grid that are not options of training.
    others = task.others
    # Options of a point come after those of the command, and replace them.
    config = replace(
        config,
        training=task.training,
        model_options={**config.model_options, **others["model"]},
        data_options={**config.data_options, **others["data"]},
        **others["names"],
    )
    return outcome(train.train_one(config, task.folder, progress=progress, **watch))


def _write(result: Any, folder: Path) -> list[Path]:
    """Write a result, and its picture if Matplotlib is installed."""
    from importlib.util import find_spec

    import ritz

    ritz.save(result, folder / RESULT)
    # Without a run that has ended there is no metric to draw.
    if find_spec("matplotlib") is None or not result.metric:
        return [folder / RESULT]
    return [folder / RESULT, ritz.plots.save_figure(ritz.plots.plot(result), folder / PICTURE)]
