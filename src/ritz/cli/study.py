"""``ritz study``: run a study, which reproduces a published table or figure."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import ritz
from ritz.cli._options import SeedOptions, examples, option, split_settings
from ritz.cli._output import print_result

EPILOG = examples(
    "ritz study synthetic_spectra --set size=2000 --set network_steps=5,15",
    "ritz study kernel_determinants --out tables --seed 3",
    "ritz study averaging --size smoke",
    "An interrupted study resumes if it is run again with the same options.",
)

SETTING = "Option of the study, such as size=2000. An unknown name lists all. May be repeated."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SeedOptions):
    """Options of the command."""

    name: str = option(
        MISSING, "Name of a study (ritz list studies).", metavar="NAME", argument=True
    )
    size: Literal["smoke", "small", "gpu", "paper"] = option(
        "small",
        "Size of the study. smoke takes seconds, small takes minutes on two cores, and gpu takes "
        "minutes on a GPU; paper is as published and may need a GPU for hours. Not every study has "
        "all sizes.",
    )
    settings: list[str] | None = option(None, SETTING, flags="--set", metavar="KEY=VALUE")
    out: Path | None = option(
        None, "Folder for the result and its figure (default: out/NAME).", metavar="FOLDER"
    )


def command(options: Options) -> None:
    """Reproduce a published table or figure, and write the result and its figure."""
    from ritz.cli._output import writing

    study = ritz.studies.find(options.name)
    # --set seed=... wins over --seed.
    overrides = {"seed": str(options.seed)} | split_settings("--set", options.settings)
    config = ritz.studies.configure(ritz.studies.sized(study, options.size), overrides)
    # A folder that cannot be written to must be found before a study of hours.
    with writing(options.out or Path("out") / options.name) as folder:
        result = ritz.studies.run(study, config, folder, progress=not options.json)
        # This removes the saved state, which is no longer needed.
        files = ritz.studies.write(study, result, folder)
    print_result(result, files, as_json=options.json)
