"""Options that commands share, each declared once, and the one way results are printed."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ritz._core.checks import check_range

NETWORK = "Network and data"  # titles of the panels that --help shows
OUTPUT = "Output"
MACHINE = "Arithmetic"


def option(
    names: str,
    help: str,
    panel: str | None = None,
    metavar: str | None = None,
    low: float | None = None,
) -> Any:
    """Return an option of Typer: names, help text, panel of the help, and smallest value."""

    def check(value: Any) -> Any:
        # Typer has min=, but its message does not tell the value.
        if value is not None and low is not None:
            check_range(names.split()[0], value, low=low)
        return value

    return typer.Option(
        *names.split(), help=help, rich_help_panel=panel, metavar=metavar, callback=check
    )


def choice(names: str, help: str, panel: str | None = None) -> Any:
    """Return an option with a few choices, which its help text names.

    Typer would list them in the column of values, which leaves no room for the text.
    """
    return option(names, help, panel, "NAME")


Seed = Annotated[int, option("--seed", "Seed of all random numbers.")]
Json = Annotated[bool, option("--json", "Print JSON, without a progress bar.")]
LOSS = "cross_entropy, mse, model (the model returns its loss) or module:function"
Loss = Annotated[
    str | None,
    option("--loss", f"{LOSS} (default: cross_entropy, or that of the run).", NETWORK, "NAME"),
]
MODEL_OPTION = "Option of the model, such as width=32 or hidden=64,32. May be repeated."
SetModel = Annotated[list[str] | None, option("--set-model", MODEL_OPTION, NETWORK, "KEY=VALUE")]
DATA_OPTION = "Option of the data set, such as file=./story.txt. May be repeated."
SetData = Annotated[list[str] | None, option("--set-data", DATA_OPTION, NETWORK, "KEY=VALUE")]
DataDir = Annotated[
    Path | None,
    option("--data-dir", "Folder of data sets (default: $RITZ_DATA).", NETWORK, "FOLDER"),
]
Device = Annotated[
    str | None,
    option("--device", "cpu, cuda or cuda:1 (default: cuda if present).", MACHINE, "NAME"),
]
Matrix = Annotated[
    Literal["hessian", "ggn", "both"], choice("--matrix", "hessian, ggn (Gauss-Newton) or both.")
]
Modes = Annotated[
    Literal["eval", "train", "recomputed", "both"],
    choice("--batch-norm", "eval, train, recomputed (statistics), or both: eval and train."),
]
Split = Annotated[
    Literal["train", "validation", "test"], choice("--split", "train, validation or test data.")
]
Picture = Annotated[
    Literal["png", "svg", "pdf"], choice("--picture", "Format: png, svg or pdf.", OUTPUT)
]
Precision = Annotated[
    Literal["float32", "tf32", "float64"],
    choice("--precision --dtype", "float32, tf32 or float64.", MACHINE),
]


OF_RUN = "Name or module:factory (default: that of the run)."


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Which trained network to measure on which data, how, and where results go."""

    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or a file of weights.")
    ]
    average: Annotated[bool, option("--average", "Use the averaged weights.", NETWORK)] = False
    model: Annotated[str | None, option("--model", OF_RUN, NETWORK, "NAME")] = None
    data: Annotated[str | None, option("--data", OF_RUN, NETWORK, "NAME")] = None
    loss: Loss = None
    set_model: SetModel = None
    set_data: SetData = None
    data_dir: DataDir = None
    samples: Annotated[
        int | None, option("--samples", "Number of random samples (default: all).", NETWORK)
    ] = None
    batch_size: Annotated[
        int | None,
        option("--batch-size", "Batch size (default: that of the run).", NETWORK, low=1),
    ] = None
    precision: Precision = "float32"
    device: Device = None
    seed: Seed = 0
    out: Annotated[
        Path | None,
        option("--out", "Folder for results (default: that of the run).", OUTPUT, "FOLDER"),
    ] = None
    save_interval: Annotated[
        float,
        option("--save-interval", "Seconds between saves of unfinished work.", OUTPUT, low=0.0),
    ] = 30.0
    json: Json = False


def examples(*lines: str, file: str = "") -> str:
    """Return the end of a help page: one paragraph per line.

    Args:
        lines: Commands, and remarks.
        file: Name of a file that the command may write, as an example.
    """
    names = f"The name of a file mentions every option that is not the default, such as {file}."
    resuming = "To resume an interrupted command, give it again."
    return "\n\n".join(["Examples:", *lines, *([names, resuming] if file else [])])


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose dataclass parameters are replaced by one option per field.

    Typer reads options from a signature. Commands that share options therefore take a dataclass,
    and this function writes the signature that Typer needs.
    """
    # include_extras: without it the options inside Annotated would be lost.
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    # Parameters whose type is a dataclass stand for all its fields.
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    for name, parameter in inspect.signature(command).parameters.items():
        entries = {name: (parameter.default, hints[name])}
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            defaults = {field.name: field.default for field in fields(groups[name])}
            entries = {key: (default, kinds[key]) for key, default in defaults.items()}
        for key, (default, kind) in entries.items():
            given = inspect.Parameter.empty if default is MISSING else default
            # Keyword-only, so that options without a default may follow those that have one.
            entry = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=given)
            parameters.append(entry.replace(annotation=kind))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            # Take the options of the group out of the flat values again.
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    # Typer reads kinds and defaults from the signature, and types from the annotations.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def split_settings(option: str, settings: Iterable[str] | None) -> dict[str, str]:
    """Return the ``KEY=VALUE`` pairs of an option as text."""
    pairs = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{option} takes KEY=VALUE, got {setting!r}")
        # A later pair replaces an earlier one, as usual on a command line.
        pairs[key.strip()] = value.strip()
    return pairs


def check_size(option: str, value: float, *, zero: bool = False) -> None:
    """Raise unless the value of an option is finite and positive, or zero if that is allowed."""
    check_range(option, value)
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{option} must be finite and {least}, got {value}")


def print_result(
    result: Any, files: Iterable[Path] = (), *, as_json: bool, text: str | None = None
) -> None:
    """Print a result and the names of its files, as text or as ``{"result": ..., "files": ...}``.

    Args:
        result: Any result, or several by name.
        files: Files that were written.
        as_json: Print JSON.
        text: Text to print instead of ``str(result)``.
    """
    from ritz._core.storage import to_json

    # JSON has no paths.
    names = [str(file) for file in files]
    if as_json:
        typer.echo(to_json({"result": result, "files": names}, indent=2))
        return
    # One result needs no title.
    if text is None and isinstance(result, Mapping):
        one = len(result) == 1
        text = "\n\n".join(f"{part}" if one else f"{name}\n{part}" for name, part in result.items())
    text = str(result) if text is None else text
    written = f"written: {', '.join(names)}" if names else ""
    typer.echo("\n\n".join(filter(None, (text, written))))
