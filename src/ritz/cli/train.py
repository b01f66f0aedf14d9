"""``ritz train``: train a network into a folder from which it can be measured."""

import inspect
import os
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ritz._core.checks import check_choice, check_count
from ritz._core.training_config import EVALUATION, TrainingConfig
from ritz.cli._options import DataDir, Json, Loss, SetData, SetModel, check_size, print_result

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
    str, typer.Option("--model", metavar="NAME", help="Name (ritz list models) or module:factory.")
]
Data = Annotated[
    str, typer.Option("--data", metavar="NAME", help="Name (ritz list datasets) or module:factory.")
]
Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Folder of the run, created if missing.")
]
Rate = Annotated[
    float | None, typer.Option("--lr", help="Learning rate (default: that of the optimiser).")
]
Decay = Annotated[
    float | None,
    typer.Option("--weight-decay", help="Weight decay (default: that of the optimiser)."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Other option of the optimiser, such as momentum=0.8. May be repeated.",
    ),
]
Watch = Annotated[
    int | None,
    typer.Option(
        "--watch",
        metavar="K",
        help="Log the curvature every K epochs (default: never).",
        rich_help_panel=EVALUATION,
    ),
]
Quantities = Annotated[
    list[str] | None,
    typer.Option(
        "--quantity",
        metavar="NAME",
        help="Curvature to log: lambda_max, trace, spectrum or variance (P sigma^2). May be "
        "repeated (default: the first three).",
        rich_help_panel=EVALUATION,
    ),
]


def _flags(entry: Field[Any]) -> list[str]:
    flags = entry.metadata.get("flags", "--" + entry.name.replace("_", "-"))
    return [] if flags is None else flags.split()


def _parameter(entry: Field[Any]) -> inspect.Parameter:
    """Return a field of :class:`TrainingConfig` as a parameter that Typer makes an option of."""
    known, kind = entry.metadata, entry.metadata.get("kind", entry.type)
    text, metavar = known["help"], known.get("metavar")
    if get_origin(kind) is Literal:
        text, metavar = f"{text[:-1]}: {', '.join(get_args(kind))}.", "NAME"
    option = typer.Option(
        *_flags(entry), help=text, metavar=metavar, rich_help_panel=known["panel"]
    )
    default = None if entry.default == () else entry.default
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(entry.name, place, default=default, annotation=Annotated[kind, option])


OPTIONS = {entry.name: entry for entry in fields(TrainingConfig) if _flags(entry)}


def command(
    model: Model,
    data: Data,
    out: Out,
    *,
    loss: Loss = None,
    set_model: SetModel = None,
    set_data: SetData = None,
    data_dir: DataDir = None,
    lr: Rate = None,
    weight_decay: Decay = None,
    settings: Settings = None,
    watch: Watch = None,
    quantity: Quantities = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Train a network and write weights, checkpoint and log into a folder."""
    from ritz.cli._session import default_device, explain_mismatch, writing
    from ritz.cli._targets import loss_function, make_data, make_model, parse_settings
    from ritz.training._shared import RunConfig, run_files, train_run

    quantities = _quantities(watch, quantity)
    training = _training(options | {"optimizer_settings": _settings(lr, weight_decay, settings)})
    config = RunConfig(
        model=model,
        data=data,
        model_options=parse_settings("--set-model", set_model),
        data_options=parse_settings("--set-data", set_data),
        data_dir=None if data_dir is None else str(data_dir.expanduser().resolve()),
        loss=loss or "cross_entropy",
        training=training,
    )
    device = default_device(options["device"])
    parts = make_data(data, data_dir=data_dir, options=config.data_options)
    loss_fn = loss_function(config.loss)
    network = make_model(model, parts=parts, options=config.model_options, seed=training.seed)
    mismatch = explain_mismatch(network, parts, name=model, loss_fn=loss_fn)
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


# Typer reads the options of a command from its signature.
_fixed = list(inspect.signature(command).parameters.values())[:-1]
_all = [*_fixed[:3], *map(_parameter, OPTIONS.values()), *_fixed[3:]]
command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in _all]
)
command.__annotations__ = {each.name: each.annotation for each in _all}


def _training(options: dict[str, Any]) -> TrainingConfig:
    """Return the options of training; errors name the option of the command line."""
    try:
        return TrainingConfig(**(options | {"keep": options["keep"] or ()}))
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        if name not in OPTIONS:
            raise
        raise type(error)(f"{_flags(OPTIONS[name])[0].split('/')[0]} {rest}") from error


def _quantities(every: int | None, names: list[str] | None) -> tuple[Any, ...]:
    from ritz.training._shared import QUANTITIES

    for name in names or ():
        check_choice("--quantity", name, QUANTITIES)
    if every is not None:
        check_count("--watch", every)
    elif names:
        raise ValueError(f"--quantity {names[0]} needs --watch, got none")
    return tuple(names or ("lambda_max", "trace", "spectrum"))


def _settings(
    lr: float | None, weight_decay: float | None, settings: list[str] | None
) -> dict[str, Any]:
    """Return keyword arguments of the optimiser; refuse those with which it would diverge."""
    from ritz.cli._targets import parse_settings

    others = parse_settings("--set", settings)
    own = {"lr": ("--lr", lr), "weight_decay": ("--weight-decay", weight_decay)}
    for name, (option, value) in own.items():
        for flag, number in ((option, value), (f"--set {name}", others.get(name))):
            if number is not None:
                check_size(flag, number, zero=name == "weight_decay")
                others.setdefault(name, number)
    return others
