"""Options that every command has, and the one way results are printed."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ritz._core.checks import check_range
from ritz.studies import describe

Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no bar.")]


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
