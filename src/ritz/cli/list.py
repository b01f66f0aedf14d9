"""``ritz list``: everything that can be chosen by name."""

from typing import Annotated, Literal

import typer

import ritz
from ritz.cli._options import Json, examples, print_result

EPILOG = examples("ritz list models", "ritz list optimizers --json")

What = Annotated[
    Literal["models", "datasets", "optimizers", "studies"],
    typer.Argument(metavar="WHAT", help="models, datasets, optimizers or studies."),
]


def command(what: What, json: Json = False) -> None:
    """List the models, data sets, optimisers or studies that can be chosen by name."""
    if what == "models":
        names = {name: f"options: {', '.join(ritz.models.options(name))}"
                 for name in ritz.models.available()}  # fmt: skip
    elif what == "datasets":
        names = {name: ritz.data.describe(name) for name in ritz.data.available()}
    elif what == "optimizers":
        # Presets are optimisers with published settings, and know where these were published.
        names = dict.fromkeys(ritz.training.optimizer_names(), "")
        names |= {name: ritz.optim.preset(name).source for name in ritz.optim.preset_names()}
    else:
        # The first line of a study names the table or figure.
        documents = {name: ritz.studies.find(name).__doc__ for name in ritz.studies.available()}
        names = {name: (text or "").splitlines()[0] for name, text in documents.items()}
    width = max(map(len, names))
    lines = [f"{name:{width}}  {words}".rstrip() for name, words in names.items()]
    print_result(names, as_json=json, text="\n".join(lines))
