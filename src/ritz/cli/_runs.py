"""What ``spectrum``, ``sharpness`` and ``landscape`` share: a trained model, opened by name."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors import SafetensorError
from torch import nn

from ritz import plots
from ritz._core.batchnorm import batch_norms
from ritz._core.checks import check_count
from ritz.cli._pairs import check_pair
from ritz.cli._targets import loss_function, make_data, make_model, parse_settings
from ritz.curvature import Risk
from ritz.training import load_weights
from ritz.training.settings import resolve_device
from ritz.training.sources import DataParts
from ritz.training.workflows import RunConfig, measured_risk, read_run, run_weights

Split = Literal["train", "validation", "test"]
Precision = Literal["float32", "tf32", "float64"]

Source = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or a file of weights.")
]
Average = Annotated[bool, typer.Option("--average", help="Take the averaged weights of the run.")]
Model = Annotated[
    str | None, typer.Option("--model", help="NAME or module:factory; that of the run by default.")
]
Data = Annotated[
    str | None, typer.Option("--data", help="NAME or module:factory; those of the run by default.")
]
SetModel = Annotated[
    list[str] | None,
    typer.Option(
        "--set-model",
        metavar="KEY=VALUE",
        help="Option of the model: width=32, or several numbers: hidden=64,32.",
    ),
]
SetData = Annotated[
    list[str] | None,
    typer.Option("--set-data", metavar="KEY=VALUE", help="Option of the data: file=./story.txt"),
]
Loss = Annotated[
    str | None,
    typer.Option("--loss", help="cross_entropy, mse, model (returns its own), module:function."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of data sets (default: $RITZ_DATA).")
]
SplitOption = Annotated[Split, typer.Option("--split", help="Which part of the data.")]
Samples = Annotated[
    int | None, typer.Option("--samples", help="Samples, drawn by the seed (default: all).")
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", help="Samples a batch (default: that of the run).")
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1 ... (default: cuda where there is one)."),
]
PrecisionOption = Annotated[
    Precision, typer.Option("--precision", "--dtype", help="Of the arithmetic.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for results and pictures (default: the run).")
]
SaveInterval = Annotated[
    float, typer.Option("--save-interval", help="Seconds between saves of what is done so far.")
]
Picture = Annotated[
    Literal["png", "svg", "pdf"], typer.Option("--picture", help="Kind of picture.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to open, as it was asked for."""

    source: Path
    average: bool = False
    model: str | None = None
    data: str | None = None
    set_model: list[str] | None = None
    set_data: list[str] | None = None
    loss: str | None = None
    data_dir: Path | None = None
    samples: int | None = None
    batch_size: int | None = None
    device: str | None = None
    precision: Precision = "float32"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model with its weights, its data and its loss.

    Attributes:
        choice: What was asked for.
        folder: Of the run, or of the file of weights.
        weights: That file.
        made: What the run was made with; defaults, without model and data, where nothing says so.
        config: The same with what was asked for in its place.
        model: On the device.
        parts: The data.
        loss_fn: The loss.
    """

    choice: Choice
    folder: Path
    weights: Path
    made: RunConfig
    config: RunConfig
    model: nn.Module
    parts: DataParts
    loss_fn: Callable[..., Any] | None

    def risk(self, split: Split = "train", *, whole: bool = False) -> Risk:
        """The risk on a part of the data: the samples asked for, or all of them."""
        try:
            return measured_risk(
                self.model,
                self.loss_fn,
                self.parts,
                split=split,
                num_samples=None if whole else self.choice.samples,
                batch_size=self.config.batch_size,
                precision=self.choice.precision,
                seed=self.choice.seed,
            )
        except ValueError:
            raise  # which says what is wrong
        except Exception:
            check_pair(self.model, self.parts, name=self.config.model, loss_fn=self.loss_fn)
            raise

    def matrices(self, asked: str) -> tuple[Any, ...]:
        """The kinds of matrix that ``--matrix`` names."""
        if asked != "hessian" and self.loss_fn is None:
            raise ValueError(f"--matrix {asked}: the Gauss-Newton matrix is of the outputs and a "
                             "loss of them, and with --loss model the network returns the loss "
                             "alone: give --matrix hessian")  # fmt: skip
        return ("hessian", "ggn") if asked == "both" else (asked,)

    @property
    def has_batch_norm(self) -> bool:
        """Whether modes of batch norm make a difference."""
        return bool(batch_norms(self.model))


def default_device(device: str | None) -> torch.device:
    """The device asked for, which must be there, or the best one."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return resolve_device(chosen, nn.Module())


def open_run(choice: Choice) -> Opened:
    """Build the model and the data of a run, and put the weights in.

    What the run's ``run.json`` says holds where nothing else is asked for.
    """
    if choice.batch_size is not None:
        check_count("--batch-size", choice.batch_size)
    device = default_device(choice.device)
    folder, weights = _located(choice.source, choice.average)
    made = read_run(folder) if (folder / "run.json").is_file() else None
    config = _config(choice, folder, made)
    data_dir = choice.data_dir or (None if config.data_dir is None else Path(config.data_dir))
    loss_fn = loss_function(config.loss, written_in=folder if choice.loss is None else None)
    parts = make_data(
        config.data,
        data_dir=data_dir,
        options=config.data_options,
        written_in=folder if choice.data is None else None,
    )
    # Without a forward pass of its own: what is measured begins with one.
    model = make_model(
        config.model,
        parts=parts,
        options=config.model_options,
        written_in=folder if choice.model is None else None,
    )
    load_weights(model, weights)
    return Opened(
        choice=choice,
        folder=folder,
        weights=weights,
        made=RunConfig(model="", data="") if made is None else made,
        config=config,
        model=model.to(device),
        parts=parts,
        loss_fn=loss_fn,
    )


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Give a folder for results, made where it is missing; say so where it takes none, or no more.

    That it takes none is seen before the block, which may be the work of hours.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield folder
    except SafetensorError as error:  # which has what the system said in words of its own
        raise _unwritable(folder, str(error)) from error
    except OSError as error:
        elsewhere = error.filename is not None and not Path(error.filename).is_relative_to(folder)
        if error.strerror is None or elsewhere:
            raise
        raise _unwritable(folder, error.strerror) from error


def _unwritable(folder: Path, reason: str) -> OSError:
    return OSError(f"cannot write to {folder}: {reason}; what was whole before is so still, and "
                   "the same command, given again, goes on from there")  # fmt: skip


def _located(source: Path, average: bool) -> tuple[Path, Path]:
    if source.is_dir():
        return source, run_weights(source, average=average)
    if not source.exists():
        raise FileNotFoundError(f"no such folder or file: {source}")
    if average:
        raise ValueError(f"--average needs the folder of a run, got the file {source}")
    return source.parent, source


def _config(choice: Choice, folder: Path, made: RunConfig | None) -> RunConfig:
    names = ("model", "data", "loss", "batch_size")
    given = {name: getattr(choice, name) for name in names}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for kind in ("model", "data"):
        changes[f"{kind}_options"] = _options(choice, kind, made)
    if made is not None:
        return RunConfig(**(made.plain() | changes))
    missing = [f"--{name}" for name in ("model", "data") if given[name] is None]
    if missing:
        raise ValueError(f"{folder} has no run.json, which says what {choice.source.name} was made "
                         f"from: give {' and '.join(missing)}")  # fmt: skip
    return RunConfig(**changes)


def _options(choice: Choice, kind: str, made: RunConfig | None) -> dict[str, Any]:
    """Those asked for, and the others of the run, unless they belong to another name."""
    asked = parse_settings(f"--set-{kind}", getattr(choice, f"set_{kind}"))
    if made is None or getattr(choice, kind) not in (None, getattr(made, kind)):
        return asked
    return {**getattr(made, f"{kind}_options"), **asked}


def draw(result: Any, path: Path) -> list[Path]:
    """Draw a result where matplotlib is there; return the picture, or nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    return [plots.save_figure(plots.picture(result), path)]
