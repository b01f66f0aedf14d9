"""``ritz demo``: spectra, sharpness and loss landscape of a small network trained on digits."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import ritz
from ritz.cli._options import SeedOptions, examples, option
from ritz.cli._output import print_result

EPILOG = examples(
    "ritz demo",
    "ritz demo --out somewhere --seed 3",
    "The images come with scikit-learn. The demo takes half a minute on one core.",
)
NEXT = "Next: ritz train --help, which shows how to pass your own model and data."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SeedOptions):
    """Options of the command."""

    out: Path = option(Path("out/demo"), "Folder for results and figures.", metavar="FOLDER")
    quick: bool = option(
        False, "Use one batch and few Lanczos steps, to test the installation. Ignore the numbers."
    )
    device: str = option("cpu", "Device, such as cpu or cuda:1.", metavar="NAME")


def command(options: Options) -> None:
    """Train a small network on digits, and measure its spectra, sharpness and loss landscape."""
    import torch

    from ritz.cli._factories import default_device
    from ritz.cli._output import writing
    from ritz.studies import digits

    settings: Any = digits.QUICK if options.quick else {}
    place, threads = default_device(options.device), torch.get_num_threads()
    # The tensors are so small that several threads would mostly wait for each other.
    torch.set_num_threads(1)
    try:
        # An unwritable folder must fail before half a minute of training.
        with writing(options.out) as folder:
            config = digits.Config(seed=options.seed, **settings)
            result = digits.run(config, device=place, progress=not options.json)
            files = _write(result, folder)
    finally:
        torch.set_num_threads(threads)
    print_result(result, files, as_json=options.json)
    if not options.json:
        pictures = [f"Look at {file} first. " for file in files if file.name == "spectra.png"]
        typer.echo("\n" + "".join(pictures) + NEXT)


def _write(result: Any, folder: Path) -> list[Path]:
    from ritz.studies import digits

    parts = {
        name: getattr(result, name) for name in ("training", "sharpness", "landscape", "plane")
    }
    files = []
    # The parts are results by themselves, which ritz plot can draw.
    for name, part in (parts | {"hessian": result.spectra[digits.FIRST]}).items():
        files.append(folder / f"{name}.safetensors")
        ritz.save(part, files[-1])
    # Matplotlib is an optional extra.
    if importlib.util.find_spec("matplotlib") is not None:
        for name, figure in digits.figures(result).items():
            files.append(ritz.plots.save_figure(figure, folder / f"{name}.png", dpi=120))
    return files
