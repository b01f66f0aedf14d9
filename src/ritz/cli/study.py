"""``ritz study``: published tables and figures, made again."""

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

import ritz
from ritz.cli._options import Json, Seed, print_result

app = typer.Typer(no_args_is_help=True, help="Published tables and figures, made again.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `ritz study list` names it.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the configuration.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for result and picture (default: out/NAME).")
]


@app.command(name="list")
def list_studies(json: Json = False) -> None:
    """List the studies that can be run."""
    titles = {
        name: (ritz.studies.find(name).__doc__ or "").splitlines()[0]
        for name in ritz.studies.available()
    }
    if json:
        typer.echo(json_format.dumps(titles, indent=2))
        return
    for name, title in titles.items():
        typer.echo(f"{name:20} {title}")


@app.command()
def run(
    name: Name, settings: Settings = None, out: Out = None, seed: Seed = 0, json: Json = False
) -> None:
    """Run a study and write its result and its picture."""
    study = ritz.studies.find(name)
    overrides = {"seed": str(seed)} | dict(map(_split, settings or []))
    config = ritz.studies.configure(study.Config, overrides)
    result = study.run(config, progress=not json)
    files = ritz.studies.write(study, result, out or Path("out") / name)
    print_result(result, files, as_json=json)


def _split(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals:
        raise ValueError(f"--set takes KEY=VALUE, got {setting!r}")
    return key.strip(), value.strip()
