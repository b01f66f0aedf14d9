"""Options that every command has, and the one way results are printed."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ritz.studies.protocol import describe

Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no bar.")]


def print_result(result: Any, files: Iterable[Path], *, as_json: bool) -> None:
    """Print a result and the names of its files, for people or for machines."""
    names = [str(file) for file in files]
    if as_json:
        typer.echo(json.dumps({"result": describe(result), "files": names}, indent=2))
        return
    typer.echo(str(result))
    typer.echo("\nwritten: " + ", ".join(names))
