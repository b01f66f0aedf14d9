"""``ritz list``: what can be chosen by name."""

import json as json_format
from collections.abc import Callable
from typing import Annotated, Literal

import typer

import ritz
from ritz.cli._options import Json

EPILOG = """
Examples:

ritz list models

ritz list optimizers --json
"""

What = Annotated[
    Literal["models", "datasets", "optimizers", "studies"],
    typer.Argument(metavar="WHAT", help="models, datasets, optimizers or studies."),
]


def command(what: What, json: Json = False) -> None:
    """List the models, data sets, optimisers or studies that have a name."""
    found = KINDS[what]()
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    width = max(map(len, found), default=0)
    for name, words in found.items():
        typer.echo(f"{name:{width}}  {words}".rstrip())


def _models() -> dict[str, str]:
    return {
        name: "options: " + ", ".join(ritz.models.options(name)) for name in ritz.models.available()
    }


def _datasets() -> dict[str, str]:
    return {name: ritz.data.describe(name) for name in ritz.data.available()}


def _optimizers() -> dict[str, str]:
    found = dict.fromkeys(ritz.training.optimizer_names(), "")
    return found | {name: ritz.optim.preset(name).source for name in ritz.optim.preset_names()}


def _studies() -> dict[str, str]:
    return {
        name: (ritz.studies.find(name).__doc__ or "").splitlines()[0]
        for name in ritz.studies.available()
    }


KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "models": _models,
    "datasets": _datasets,
    "optimizers": _optimizers,
    "studies": _studies,
}
