"""``ritz train``: train a network into a folder from which it can be measured."""

import os
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ritz._core.checks import check_positive
from ritz._core.training_config import RATE, TrainingConfig
from ritz.cli import _options as shared
from ritz.cli._options import NETWORK, OUTPUT, option
from ritz.cli._output import print_result

if TYPE_CHECKING:
    from ritz._core.progress import Progress
    from ritz.training import TrainingResult
    from ritz.training._shared import RunConfig

EPILOG = shared.examples(
    "ritz train --model mlp --data digits --epochs 20 --out runs/digits",
    "ritz train --model vgg16_bn --data cifar100 --optimizer gadamx --lr 0.1 --epochs 300 "
    "--average-from 161 --schedule linear --data-dir ~/data --out runs/gadamx",
    "ritz train --model mlp --data digits --epochs 20 --watch 2 --quantity lambda_max "
    "--quantity gsnr --out runs/watched",
    "ritz train --model model:net --data data:load --epochs 30 --out runs/spirals",
    "The last example calls net() in model.py and load() in data.py, both in the current folder. "
    "load() returns (inputs, targets), or (train, test), or (train, validation, test). Each part "
    "is (inputs, targets), a torch dataset, a DataLoader or a list of batches.",
    "ritz train --model vgg16_bn --data cifar10 --preset noisy_sgd/vgg16_bn/cifar10 --out runs/lb",
    "If the command is interrupted, run it again. It resumes from the last checkpoint.",
    "While other programs use the cores, training on the CPU is much slower with several threads. "
    "Then start the command with OMP_NUM_THREADS=1, and resume it with the same number.",
)
# Panel of --help.
WATCHING = "Curvature during training"
# Options that need --watch.
WATCHED = ("quantity", "watch_matrix", "watch_batch_norm", "watch_samples", "watch_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(shared.PrintOptions):
    """Options of the command that are not options of training."""

    # fmt: off
    model: str = option(MISSING, "Model: a name (ritz list models) or module:factory.", NETWORK,
                        metavar="NAME")
    data: str = option(MISSING, "Data set: a name (ritz list datasets) or module:factory.", NETWORK,
                       metavar="NAME")
    preset: str | None = option(None, "Published setting (ritz list optimizers) with its schedule, "
                                "epochs, batch size and so on. Other options take precedence.",
                                RATE, metavar="NAME")
    out: Path = option(MISSING, "Folder of the run, created if missing.", OUTPUT, metavar="FOLDER")
    # No default here: each optimiser has its own.
    lr: float | None = option(None, "Learning rate (default: see ritz list optimizers).", RATE)
    weight_decay: float | None = option(None, "Weight decay (default: see ritz list optimizers).",
                                        RATE)
    settings: list[str] | None = option(
        None, "Other option of the optimiser, such as momentum=0.8. May be repeated.", RATE,
        flags="--set", metavar="KEY=VALUE")
    loss: str | None = option(None, shared.LOSS.format("cross_entropy"), NETWORK, metavar="NAME")
    set_model: list[str] | None = option(None, shared.SET_MODEL, NETWORK, metavar="KEY=VALUE")
    set_data: list[str] | None = option(None, shared.SET_DATA, NETWORK, metavar="KEY=VALUE")
    data_dir: Path | None = option(None, shared.DATA_DIR, NETWORK, metavar="FOLDER")
    watch: int | None = option(None, "Measure and log curvature, gradients and weights every "
                               "K epochs (default: never).", WATCHING, metavar="K", low=1)
    quantity: list[str] | None = option(
        None, "Quantity to log with --watch (ritz list quantities). May be repeated (default: "
        "lambda_max, weight_norms, gradient_norm, gradient_variance and noise_scale).", WATCHING,
        metavar="NAME")
    watch_matrix: Literal["hessian", "ggn"] = option(
        "hessian", shared.MATRIX, WATCHING)
    watch_batch_norm: Literal["eval", "train", "recomputed"] = option(
        "eval", f"{shared.MODE} Gradients of single samples are not defined with train.", WATCHING)
    watch_samples: int | None = option(None, "Number of samples to watch; of a text, tokens "
                                       "(default: 1024; 512 for more than a million parameters).",
                                       WATCHING, low=2)
    watch_steps: int = option(20, "Number of Lanczos steps of a spectrum. The first search for an "
                              "eigenvalue takes at most ten times as many.", WATCHING, low=1)
    # fmt: on


def command(options: Options, training: TrainingConfig) -> None:
    """Train a network and write weights, checkpoint and log into a folder."""
    from ritz.training._shared import run_files

    result = train_one(
        run_config(options, training), options.out, progress=not options.json, **watching(options)
    )
    if int(os.environ.get("RANK", "0")):
        return  # the first process of torchrun prints
    print_result(result, run_files(options.out), as_json=options.json)
    # A run that diverged or was interrupted has printed its result, and still fails.
    if not result.status.ok:
        typer.echo(f"ritz: {result.status}", err=True)
        raise typer.Exit(1)


def watching(options: Options) -> dict[str, Any]:
    """Return when to watch the curvature and which quantities, as keywords of `train_one`."""
    from ritz.training._shared import QUANTITIES

    # Names are checked before the data are read.
    for name in options.quantity or ():
        QUANTITIES[name]  # an unknown name raises and suggests similar ones
    for entry in fields(Options) if options.watch is None else ():
        value = getattr(options, entry.name)
        if entry.name in WATCHED and value != entry.default:
            first = value[0] if isinstance(value, list) else value
            flag = entry.name.replace("_", "-")
            raise ValueError(f"--{flag} {first} needs --watch: add --watch 1")
    watched = {"matrix": options.watch_matrix, "batch_norm": options.watch_batch_norm,
               "num_samples": options.watch_samples, "num_steps": options.watch_steps}  # fmt: skip
    return {
        "watch": options.watch,
        "quantities": options.quantity or None,
        "monitor_options": watched,
    }


def run_config(options: Options, training: TrainingConfig) -> "RunConfig":
    """Return the configuration of a run."""
    from ritz.cli._factories import parse_settings
    from ritz.training._shared import RunConfig

    return RunConfig(
        model=options.model,
        data=options.data,
        model_options=parse_settings("--set-model", options.set_model),
        data_options=parse_settings("--set-data", options.set_data),
        # Absolute, so that the run can be measured from another folder.
        data_dir=str(options.data_dir.expanduser().resolve()) if options.data_dir else None,
        loss=options.loss or "cross_entropy",
        training=replace(training, optimizer_settings=_optimizer_settings(options)),
    )


def train_one(
    config: "RunConfig", out: Path, *, progress: "bool | Progress", **watch: Any
) -> "TrainingResult":
    """Train the network of a configuration into a folder."""
    from ritz.cli._factories import (
        default_device,
        explain_mismatch,
        loss_function,
        make_data,
        make_model,
    )
    from ritz.cli._output import writing
    from ritz.training._shared import train_run

    device = default_device(config.training.device)
    data_dir = Path(config.data_dir) if config.data_dir else None
    # The data come before the model, which may need their shape and number of classes.
    parts = make_data(config.data, data_dir=data_dir, options=config.data_options)
    loss_fn = loss_function(config.loss)
    model = make_model(config.model, parts, config.model_options, seed=config.training.seed)
    mismatch = explain_mismatch(model, parts, name=config.model, loss_fn=loss_fn)
    # The folder first: an error of the first step must leave it as it was.
    with writing(out) as folder, mismatch:
        return train_run(
            config, model, parts, folder, loss_fn=loss_fn, device=device, progress=progress, **watch
        )


def _optimizer_settings(options: Options) -> dict[str, Any]:
    """Return keyword arguments of the optimiser; refuse those with which it would diverge."""
    from ritz.cli._factories import parse_settings

    others = parse_settings("--set", options.settings)
    named = {"lr": ("--lr", options.lr), "weight_decay": ("--weight-decay", options.weight_decay)}
    for name, (flag, value) in named.items():
        for source, number in ((flag, value), (f"--set {name}", others.get(name))):
            if number is not None:
                check_positive(source, number, zero=name == "weight_decay")
                others.setdefault(name, number)  # --set lr=... takes precedence over --lr
    return others
