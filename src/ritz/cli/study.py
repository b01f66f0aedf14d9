"""``ritz study``: run a study, which reproduces a published table or figure."""

from pathlib import Path
from typing import Annotated

import typer

import ritz
from ritz.cli._options import Json, Seed, examples, option, print_result, split_settings

EPILOG = examples(
    "ritz study synthetic_spectra --set size=2000 --set network_steps=5,15",
    "ritz study kernel_determinants --out tables --seed 3",
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a study, see `ritz list studies`.")
]
SETTING = "Field of the study's configuration, such as size=2000. May be repeated."
Settings = Annotated[list[str] | None, option("--set", SETTING, None, "KEY=VALUE")]
Out = Annotated[
    Path | None,
    option("--out", "Folder for result and picture (default: out/NAME).", None, "FOLDER"),
]


def command(
    name: Name, settings: Settings = None, out: Out = None, seed: Seed = 0, json: Json = False
) -> None:
    """Reproduce a published table or figure; write the result and its picture."""
    study = ritz.studies.find(name)
    # --set seed=... wins over --seed.
    overrides = {"seed": str(seed)} | split_settings("--set", settings)
    config = ritz.studies.configure(study.Config, overrides)
    result = study.run(config, progress=not json)
    files = ritz.studies.write(study, result, out or Path("out") / name)
    print_result(result, files, as_json=json)
