"""``ritz train``: train a network into a folder from which it can be measured."""

import os
from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ritz._core.checks import check_choice
from ritz._core.training_config import EVALUATION, RATE, TrainingConfig
from ritz.cli._options import (
    NETWORK,
    OUTPUT,
    DataDir,
    Json,
    Loss,
    SetData,
    SetModel,
    check_size,
    option,
    print_result,
)

EPILOG = """
Examples:

ritz train --model mlp --data digits --epochs 20 --out runs/digits

ritz train --model vgg16_bn --data cifar100 --optimizer gadamx --lr 0.1 --epochs 300
--average-from 161 --schedule linear --data-dir ~/data --out runs/gadamx

ritz train --model model:net --data data:load --epochs 30 --out runs/spirals

The last example calls net() of model.py and load() of data.py in the current folder. load()
returns (inputs, targets), or one such pair to train on and one to test on, or torch datasets or
loaders. A run that was stopped resumes when the same command is repeated.
"""

Model = Annotated[
    str, option("--model", "Name (ritz list models) or module:factory.", NETWORK, "NAME")
]
Data = Annotated[
    str, option("--data", "Name (ritz list datasets) or module:factory.", NETWORK, "NAME")
]
Out = Annotated[Path, option("--out", "Folder of the run, created if missing.", OUTPUT, "FOLDER")]
OWN = "(default: that of the optimiser)"
Rate = Annotated[float | None, option("--lr", f"Learning rate {OWN}.", RATE)]
Decay = Annotated[float | None, option("--weight-decay", f"Weight decay {OWN}.", RATE)]
OTHER = "Other option of the optimiser, such as momentum=0.8. May be repeated."
Settings = Annotated[list[str] | None, option("--set", OTHER, RATE, "KEY=VALUE")]
EVERY = "Log the curvature every K epochs (default: never)."
Watch = Annotated[int | None, option("--watch", EVERY, EVALUATION, "K", low=1)]
LOGGED = (
    "Curvature to log: lambda_max, trace, spectrum or variance (P sigma^2). May be repeated "
    "(default: the first three)."
)
Quantities = Annotated[list[str] | None, option("--quantity", LOGGED, EVALUATION, "NAME")]


def _flags(entry: Field[Any]) -> str:
    """Return the names of a field of :class:`TrainingConfig` on the command line."""
    flags: str | None = entry.metadata.get("flags", "--" + entry.name.replace("_", "-"))
    return flags or ""


def _option(entry: Field[Any]) -> tuple[str, Any, Any]:
    """Return a field of :class:`TrainingConfig` as a field with an option of Typer."""
    known, kind = entry.metadata, entry.metadata.get("kind", entry.type)
    text, metavar = known["help"], known.get("metavar")
    # Typer shows choices beside the name, where four of them leave no room for the text.
    if get_origin(kind) is Literal:
        text, metavar = f"{text[:-1]}: {', '.join(get_args(kind))}.", "NAME"
    default = None if entry.default == () else entry.default
    flags = option(_flags(entry), text, known["panel"], metavar)
    return entry.name, Annotated[kind, flags], field(default=default)


# One option per field. `flatten_options` puts those of this dataclass into the signature of the
# command, from which Typer reads them.
OPTIONS = {entry.name: entry for entry in fields(TrainingConfig) if _flags(entry)}
Training = make_dataclass("Training", map(_option, OPTIONS.values()), kw_only=True)


def command(
    model: Model,
    data: Data,
    out: Out,
    training: Training,  # type: ignore[valid-type]
    lr: Rate = None,
    weight_decay: Decay = None,
    settings: Settings = None,
    loss: Loss = None,
    set_model: SetModel = None,
    set_data: SetData = None,
    data_dir: DataDir = None,
    watch: Watch = None,
    quantity: Quantities = None,
    json: Json = False,
) -> None:
    """Train a network and write weights, checkpoint and log into a folder."""
    from ritz.cli._session import default_device, explain_mismatch, writing
    from ritz.cli._targets import loss_function, make_data, make_model, parse_settings
    from ritz.training._shared import RunConfig, run_files, train_run

    quantities = _quantities(watch, quantity)
    options: dict[str, Any] = vars(training) | {
        "optimizer_settings": _settings(lr, weight_decay, settings)
    }
    config = RunConfig(
        model=model,
        data=data,
        model_options=parse_settings("--set-model", set_model),
        data_options=parse_settings("--set-data", set_data),
        data_dir=None if data_dir is None else str(data_dir.expanduser().resolve()),
        loss=loss or "cross_entropy",
        training=_training(options),
    )
    device = default_device(options["device"])
    parts = make_data(data, data_dir=data_dir, options=config.data_options)
    loss_fn = loss_function(config.loss)
    network = make_model(
        model, parts=parts, options=config.model_options, seed=config.training.seed
    )
    mismatch = explain_mismatch(network, parts, name=model, loss_fn=loss_fn)
    # The folder first: an error of the first step must leave it as it was.
    with writing(out) as folder, mismatch:
        result = train_run(
            config,
            network,
            parts,
            folder,
            loss_fn=loss_fn,
            device=device,
            watch=watch,
            quantities=quantities,
            progress=not json,
        )
    if int(os.environ.get("RANK", "0")):
        return  # the first process of torchrun prints
    print_result(result, run_files(out), as_json=json)
    if not result.status.ok:
        typer.echo(f"ritz: {result.status}", err=True)
        raise typer.Exit(1)


def _training(options: dict[str, Any]) -> TrainingConfig:
    """Return the options of training; errors name the option of the command line."""
    try:
        return TrainingConfig(**(options | {"keep": options["keep"] or ()}))
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        if name not in OPTIONS:
            raise
        # --resume of "--resume/--restart", --precision of "--precision --dtype"
        flag = _flags(OPTIONS[name]).replace("/", " ").split()[0]
        raise type(error)(f"{flag} {rest}") from error


def _quantities(every: int | None, names: list[str] | None) -> tuple[Any, ...]:
    from ritz.training._shared import QUANTITIES

    for name in names or ():
        check_choice("--quantity", name, QUANTITIES)
    if every is None and names:
        raise ValueError(f"--quantity {names[0]} needs --watch, got none")
    return tuple(names or ("lambda_max", "trace", "spectrum"))


def _settings(
    lr: float | None, weight_decay: float | None, settings: list[str] | None
) -> dict[str, Any]:
    """Return keyword arguments of the optimiser; refuse those with which it would diverge."""
    from ritz.cli._targets import parse_settings

    others = parse_settings("--set", settings)
    named = {"lr": ("--lr", lr), "weight_decay": ("--weight-decay", weight_decay)}
    for name, (flag, value) in named.items():
        for source, number in ((flag, value), (f"--set {name}", others.get(name))):
            if number is not None:
                check_size(source, number, zero=name == "weight_decay")
                others.setdefault(name, number)  # --set lr=... takes precedence over --lr
    return others
