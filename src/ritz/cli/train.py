"""``ritz train``: a network on data, into a folder that everything else can be measured from."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ritz._core.checks import check_choice, check_count, check_range
from ritz.cli._options import (
    Device,
    Json,
    Loss,
    Seed,
    SetData,
    SetModel,
    check_size,
    print_result,
)

if TYPE_CHECKING:
    from ritz.training import CurvatureMonitor, TrainingResult
    from ritz.training._shared import DataParts, RunConfig

EPILOG = """
Examples:

ritz train --model mlp --data digits --epochs 20 --out runs/digits

ritz train --model vgg16_bn --data cifar100 --optimizer gadamx --lr 0.1 --epochs 300
--average-from 161 --schedule linear --data-dir ~/data --out runs/gadamx

ritz train --model model:net --data data:load --epochs 30 --out runs/own

The last one calls net() of model.py and load() of data.py in this folder; load returns
(inputs, targets), or such a pair to train on and one to test on, or datasets or loaders of torch.
A run that was stopped, by ctrl-C or worse, goes on when the same command is given again.
"""

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
Schedule = Literal["constant", "linear", "step"]
Unit = Literal["epoch", "step"]
USUAL = ("lambda_max", "trace", "spectrum")
WATCHED = 1024  # samples, or tokens of a text
Watched = tuple[int, tuple[Any, ...]]  # every so many epochs, and what
RATE, AVERAGE, SEEN, PLACE = "Rate", "Average", "What is seen of it", "Machine and files"
Model = Annotated[str, typer.Option("--model", help="NAME (`ritz list models`) or module:factory.")]
Data = Annotated[str, typer.Option("--data", help="NAME (`ritz list datasets`) or module:factory.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run, made where it is missing.")]
Epochs = Annotated[int, typer.Option("--epochs", help="Epochs in all.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples a batch.")]
DropLast = Annotated[
    bool, typer.Option("--drop-last", help="Leave out a last batch of fewer samples.")
]
Augment = Annotated[
    bool,
    typer.Option("--augment/--no-augment", help="Whether to augment data for which it is usual."),
]
OptimizerName = Annotated[
    str, typer.Option("--optimizer", help="NAME (`ritz list optimizers`), or a published setting.")
]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate (default: its own).")]
Decay = Annotated[float | None, typer.Option("--weight-decay", help="Weight decay.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Other keyword of the optimiser: momentum=0.8"),
]
ScheduleName = Annotated[
    Schedule, typer.Option("--schedule", help="Of the rate.", rich_help_panel=RATE)
]
ScheduleUnit = Annotated[
    Unit, typer.Option("--schedule-unit", help="When it changes.", rich_help_panel=RATE)
]
Warmup = Annotated[
    int,
    typer.Option("--warmup", help="Units over which the rate grows.", rich_help_panel=RATE),
]
AverageFrom = Annotated[
    int | None,
    typer.Option(
        "--average-from", help="Epoch, from 1, that it begins in.", rich_help_panel=AVERAGE
    ),
]
AverageEvery = Annotated[
    Unit, typer.Option("--average-every", help="What is averaged.", rich_help_panel=AVERAGE)
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        help="Evaluations without a better loss after which it begins, and training ends.",
        rich_help_panel=AVERAGE,
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of data sets (default: $RITZ_DATA).")
]
PrecisionName = Annotated[
    Precision,
    typer.Option(
        "--precision",
        "--dtype",
        help="Of the arithmetic; the last two mixed.",
        rich_help_panel=PLACE,
    ),
]
Accumulate = Annotated[int, typer.Option("--accumulate", help="Batches a step.")]
Clip = Annotated[float | None, typer.Option("--clip-norm", help="Largest norm of a gradient.")]
Every = Annotated[
    int,
    typer.Option("--evaluate-every", help="Epochs between evaluations.", rich_help_panel=SEEN),
]
Watch = Annotated[
    int | None,
    typer.Option(
        "--watch", metavar="K", help="Log the curvature every K epochs.", rich_help_panel=SEEN
    ),
]
Quantities = Annotated[
    list[str] | None,
    typer.Option(
        "--quantity",
        metavar="NAME",
        help="lambda_max, trace, spectrum, or variance (P sigma^2); as often as liked (default: "
        "the first three).",
        rich_help_panel=SEEN,
    ),
]
Keep = Annotated[
    list[int] | None,
    typer.Option(
        "--keep",
        metavar="EPOCH",
        help="Epoch whose weights to keep; as often as liked.",
        rich_help_panel=SEEN,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="The same bits every time, on CUDA too.", rich_help_panel=PLACE
    ),
]
SaveInterval = Annotated[
    float,
    typer.Option("--save-interval", help="Seconds between checkpoints.", rich_help_panel=PLACE),
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the network.", rich_help_panel=PLACE)
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--restart",
        help="Go on from what is there, or begin anew.",
        rich_help_panel=PLACE,
    ),
]


def command(
    model: Model,
    data: Data,
    out: Out,
    epochs: Epochs = 10,
    batch_size: BatchSize = 128,
    drop_last: DropLast = False,
    augment: Augment = True,
    optimizer: OptimizerName = "sgd",
    lr: Rate = None,
    weight_decay: Decay = None,
    settings: Settings = None,
    schedule: ScheduleName = "constant",
    schedule_unit: ScheduleUnit = "epoch",
    warmup: Warmup = 0,
    average_from: AverageFrom = None,
    average_every: AverageEvery = "epoch",
    patience: Patience = None,
    loss: Loss = None,
    set_model: SetModel = None,
    set_data: SetData = None,
    data_dir: DataDir = None,
    accumulate: Accumulate = 1,
    clip_norm: Clip = None,
    evaluate_every: Every = 1,
    watch: Watch = None,
    quantity: Quantities = None,
    keep: Keep = None,
    precision: PrecisionName = "float32",
    device: Device = None,
    deterministic: Deterministic = False,
    compile: Compile = False,
    save_interval: SaveInterval = 60.0,
    resume: Resume = True,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train a network, and write weights, checkpoint and log into a folder."""
    from ritz.cli._targets import parse_settings
    from ritz.training._shared import RunConfig

    check_count("--batch-size", batch_size)
    check_count("--epochs", epochs)
    check_count("--warmup", warmup, low=0, high=epochs if schedule_unit == "epoch" else None)
    if patience is not None:
        check_count("--patience", patience)
    check_range("--save-interval", save_interval, low=0.0)
    watched = _watched(watch, quantity)
    if clip_norm is not None:
        check_size("--clip-norm", clip_norm)
    config = RunConfig(
        model=model,
        data=data,
        model_options=parse_settings("--set-model", set_model),
        data_options=parse_settings("--set-data", set_data),
        data_dir=None if data_dir is None else str(data_dir.expanduser().resolve()),
        loss=loss or "cross_entropy",
        seed=seed,
        batch_size=batch_size,
        training={
            "num_epochs": epochs,
            "optimizer": optimizer,
            "optimizer_settings": _optimizer_settings(lr, weight_decay, settings),
            "drop_last": drop_last,
            "augment": augment,
            "schedule": schedule,
            "schedule_unit": schedule_unit,
            "warmup": warmup,
            "average_from": average_from,
            "average_every": average_every,
            "patience": patience,
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "evaluate_every": evaluate_every,
            "precision": precision,
            "deterministic": deterministic,
            "compile": compile,
            "keep": keep or [],
            "save_interval": save_interval,
        },
    )
    _run(config, out, device=device, resume=resume, watched=watched, as_json=json)


def _watched(every: int | None, quantities: list[str] | None) -> Watched | None:
    from ritz.training._shared import QUANTITIES

    for name in quantities or ():
        check_choice("--quantity", name, QUANTITIES)
    if every is None:
        if quantities:
            raise ValueError(f"--quantity {quantities[0]} needs --watch, got none")
        return None
    check_count("--watch", every)
    return every, tuple(quantities or USUAL)


def _optimizer_settings(
    lr: float | None, weight_decay: float | None, settings: list[str] | None
) -> dict[str, Any]:
    """Keywords of the optimiser; what would let it diverge or climb is refused by its option."""
    from ritz.cli._targets import parse_settings

    chosen = {"--lr": lr, "--weight-decay": weight_decay}
    given = {option: value for option, value in chosen.items() if value is not None}
    others = parse_settings("--set", settings)
    named = given | {f"--set {name}": value for name, value in others.items()}
    for option in ("--lr", "--set lr", "--weight-decay", "--set weight_decay"):
        if option in named:
            check_size(option, named[option], zero="decay" in option)
    keywords = {option[2:].replace("-", "_"): value for option, value in given.items()}
    return keywords | others


def _run(
    config: "RunConfig",
    out: Path,
    *,
    device: str | None,
    resume: bool,
    watched: Watched | None,
    as_json: bool,
) -> None:
    """Build what the configuration names, train, and print how it went."""
    from ritz.cli._session import default_device, explain_mismatch, writing
    from ritz.cli._targets import loss_function, make_data, make_model
    from ritz.training._shared import train_run

    place = default_device(device)
    folder = None if config.data_dir is None else Path(config.data_dir)
    parts = make_data(config.data, data_dir=folder, options=config.data_options)
    loss_fn = loss_function(config.loss)
    model = make_model(config.model, parts=parts, options=config.model_options, seed=config.seed)
    monitors = _monitors(watched, parts, config, loss_fn)
    named = explain_mismatch(model, parts, name=config.model, loss_fn=loss_fn)
    with writing(out) as run, named:
        result = train_run(
            config,
            model,
            parts,
            run,
            loss_fn=loss_fn,
            device=place,
            resume=resume,
            monitors=monitors,
            progress=not as_json,
        )
    if int(os.environ.get("RANK", "0")):
        return  # the first process of torchrun speaks
    shown = _facts(result) if as_json else result
    print_result(shown, _written(out), as_json=as_json)
    if not result.status.ok:
        typer.echo(f"ritz: {result.status}", err=True)
        raise typer.Exit(1)


def _written(folder: Path) -> list[Path]:
    """The files of a run, without what was measured, and lies in its folder too."""
    from ritz.training._shared import AVERAGE as AVERAGED
    from ritz.training._shared import CONFIG, LOG, NAME, WEIGHTS, times_path

    names = {CONFIG, LOG, times_path(LOG).name, NAME, WEIGHTS, AVERAGED}
    return sorted(
        path
        for path in folder.iterdir()
        if path.name in names or path.match("epoch-[0-9]*.safetensors")
    )


def _facts(result: "TrainingResult") -> dict[str, Any]:
    """What machines are told: JSON has no number for what is not finite."""
    finite = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    return {
        "metrics": finite,
        "num_epochs": result.num_epochs,
        "num_steps": result.num_steps,
        "seconds": round(result.seconds, 3),
        "seed": result.seed,
        "outcome": result.status.outcome,
        "status": str(result.status),
    }


def _monitors(
    watched: Watched | None, parts: "DataParts", config: "RunConfig", loss_fn: Any
) -> "list[CurvatureMonitor]":
    """Watch a thousand samples, where that is asked for."""
    if watched is None:
        return []
    from ritz.training import CurvatureMonitor
    from ritz.training._shared import sample

    every, quantities = watched
    size = _watched_size(parts.train, config.batch_size)
    batches, options = sample(parts.train, WATCHED, batch_size=size, seed=config.seed)
    return [CurvatureMonitor(batches, loss_fn=loss_fn, quantities=quantities, every=every,
                             seed=config.seed, **options)]  # fmt: skip


def _watched_size(source: Any, batch_size: int) -> int:
    """Samples a batch; of a text no more streams than have a whole segment each."""
    from ritz.data import TextSplit

    if not isinstance(source, TextSplit):
        return batch_size
    return max(1, min(batch_size, min(WATCHED, len(source.tokens)) // (source.length + 1)))
