"""``ritz train``: a network on data, into a folder that everything else can be measured from."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ritz._core.checks import check_count, check_range
from ritz.cli._options import Json, Seed, check_size, print_result
from ritz.cli._runs import Device, Loss, SetData, SetModel, default_device, writing
from ritz.cli._targets import loss_function, make_data, make_model, parse_settings
from ritz.training import CurvatureMonitor, TrainingResult
from ritz.training.sources import DataParts, sample
from ritz.training.workflows import RunConfig, train_run

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
Model = Annotated[str, typer.Option("--model", help="NAME (`ritz list models`) or module:factory.")]
Data = Annotated[str, typer.Option("--data", help="NAME (`ritz list datasets`) or module:factory.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run, made where it is missing.")]
Epochs = Annotated[int, typer.Option("--epochs", help="Epochs in all.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples a batch.")]
OptimizerName = Annotated[
    str, typer.Option("--optimizer", help="NAME (`ritz list optimizers`), or a published setting.")
]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate (default: its own).")]
Decay = Annotated[float | None, typer.Option("--weight-decay", help="Weight decay.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Other keyword of the optimiser: momentum=0.8"),
]
ScheduleName = Annotated[Schedule, typer.Option("--schedule", help="Of the rate.")]
Warmup = Annotated[int, typer.Option("--warmup", help="Epochs over which the rate grows.")]
AverageFrom = Annotated[
    int | None, typer.Option("--average-from", help="Epoch, from 1, that the average begins in.")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of data sets (default: $RITZ_DATA).")
]
PrecisionName = Annotated[
    Precision, typer.Option("--precision", "--dtype", help="Of the arithmetic; the last two mixed.")
]
Accumulate = Annotated[int, typer.Option("--accumulate", help="Batches a step.")]
Clip = Annotated[float | None, typer.Option("--clip-norm", help="Largest norm of a gradient.")]
Every = Annotated[int, typer.Option("--evaluate-every", help="Epochs between evaluations.")]
Watch = Annotated[
    int | None, typer.Option("--watch", metavar="K", help="Log the curvature every K epochs.")
]
Keep = Annotated[
    list[int] | None, typer.Option("--keep", help="Epoch whose weights to keep; as often as liked.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same bits every time, on CUDA too.")
]
SaveInterval = Annotated[
    float, typer.Option("--save-interval", help="Seconds between checkpoints.")
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the network.")]
Resume = Annotated[
    bool, typer.Option("--resume/--restart", help="Go on from what is there, or begin anew.")
]


def command(
    model: Model,
    data: Data,
    out: Out,
    epochs: Epochs = 10,
    batch_size: BatchSize = 128,
    optimizer: OptimizerName = "sgd",
    lr: Rate = None,
    weight_decay: Decay = None,
    settings: Settings = None,
    schedule: ScheduleName = "constant",
    warmup: Warmup = 0,
    average_from: AverageFrom = None,
    loss: Loss = None,
    set_model: SetModel = None,
    set_data: SetData = None,
    data_dir: DataDir = None,
    accumulate: Accumulate = 1,
    clip_norm: Clip = None,
    evaluate_every: Every = 1,
    watch: Watch = None,
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
    check_count("--batch-size", batch_size)
    check_count("--epochs", epochs)
    check_count("--warmup", warmup, low=0, high=epochs)
    check_range("--save-interval", save_interval, low=0.0)
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
            "schedule": schedule,
            "warmup": warmup,
            "average_from": average_from,
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
    _run(config, out, device=device, resume=resume, watch=watch, as_json=json)


def _optimizer_settings(
    lr: float | None, weight_decay: float | None, settings: list[str] | None
) -> dict[str, Any]:
    """Keywords of the optimiser; what would let it diverge or climb is refused by its option."""
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
    config: RunConfig,
    out: Path,
    *,
    device: str | None,
    resume: bool,
    watch: int | None,
    as_json: bool,
) -> None:
    """Build what the configuration names, train, and print how it went."""
    place = default_device(device)
    folder = None if config.data_dir is None else Path(config.data_dir)
    parts = make_data(config.data, data_dir=folder, options=config.data_options)
    loss_fn = loss_function(config.loss)
    model = make_model(config.model, parts=parts, options=config.model_options, seed=config.seed)
    monitors = _monitors(watch, parts, config, loss_fn)
    with writing(out) as run:
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
    print_result(shown, sorted(out.glob("*.*")), as_json=as_json)
    if not result.status.ok:
        typer.echo(f"ritz: {result.status}", err=True)
        raise typer.Exit(1)


def _facts(result: TrainingResult) -> dict[str, Any]:
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
    every: int | None, parts: DataParts, config: RunConfig, loss_fn: Any
) -> list[CurvatureMonitor]:
    """Watch a thousand samples, where that is asked for."""
    if every is None:
        return []
    check_count("--watch", every)
    batches, options = sample(parts.train, 1024, batch_size=config.batch_size, seed=config.seed)
    options.pop("count", None)
    quantities: Any = ("lambda_max", "trace", "spectrum")
    return [CurvatureMonitor(batches, loss_fn=loss_fn, quantities=quantities, every=every,
                             seed=config.seed, **options)]  # fmt: skip
