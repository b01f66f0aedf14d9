"""``ritz demo``: everything at once on a matrix whose answers are known."""

from pathlib import Path
from typing import Annotated

import typer

from ritz.cli._options import Json, Seed, print_result
from ritz.studies import network_spectrum, write

EPILOG = """
Examples:

ritz demo

ritz demo --out somewhere --seed 3
"""

Out = Annotated[Path, typer.Option("--out", help="Folder for the result and the picture.")]


def command(out: Out = Path("out/demo"), seed: Seed = 0, json: Json = False) -> None:
    """Show the spectrum of a network-like matrix beside the exact one, with a picture."""
    config = network_spectrum.Config(seed=seed)
    result = network_spectrum.run(config, progress=not json)
    print_result(result, write(network_spectrum, result, out), as_json=json)
