"""Options that commands share, and the one way results are printed."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ritz._core.checks import check_range

Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no bar.")]

# Of ``spectrum``, ``sharpness`` and ``landscape``: what is measured, and where results go.

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


def check_size(option: str, value: float, *, zero: bool = False) -> None:
    """Raise unless the number of an option is finite and above zero, which may be allowed too."""
    check_range(option, value)
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{option} must be finite and {least}, got {value}")


def print_result(result: Any, files: Iterable[Path], *, as_json: bool) -> None:
    """Print a result and the names of its files, for people or for machines."""
    names = [str(file) for file in files]
    if as_json:
        from ritz.studies import describe

        facts = {"result": finite(describe(result)), "files": names}
        typer.echo(json.dumps(facts, indent=2, allow_nan=False))
        return
    typer.echo(str(result))
    typer.echo("\nwritten: " + ", ".join(names))


def print_results(found: Mapping[str, Any], files: Iterable[Path], *, as_json: bool) -> None:
    """Print several results by name and the names of their files."""
    several = len(found) > 1
    text = "\n\n".join(f"{name}\n{one}" if several else f"{one}" for name, one in found.items())
    print_result(found if as_json else text, files, as_json=as_json)


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list) else value
