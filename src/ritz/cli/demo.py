"""``ritz demo``: a small network trained on handwritten digits, and the loss around it."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ritz
from ritz.cli._options import Json, Seed, print_result

if TYPE_CHECKING:
    from ritz.studies import digits

EPILOG = """
Examples:

ritz demo

ritz demo --out somewhere --seed 3

The images come with scikit-learn. It takes half a minute on one core.
"""

Out = Annotated[Path, typer.Option("--out", help="Folder for the results and the pictures.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...")]
Quick = Annotated[bool, typer.Option("--quick", help="One batch, a few steps of everything.")]


def command(
    out: Out = Path("out/demo"),
    quick: Quick = False,
    device: Device = "cpu",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train a small network on digits; show its spectra, sharpness and landscape."""
    from ritz.cli._session import default_device, writing
    from ritz.studies import digits

    settings: Any = digits.QUICK if quick else {}
    place = default_device(device)
    with writing(out) as folder, _one_thread():
        result = digits.run(digits.Config(seed=seed, **settings), device=place, progress=not json)
        files = _written(result, folder)
    print_result(result, files, as_json=json)


def _written(result: "digits.Result", folder: Path) -> list[Path]:
    from ritz.studies import digits

    found = {"training": result.training, "hessian": result.spectra[digits.FIRST],
             "sharpness": result.sharpness, "landscape": result.landscape,
             "plane": result.plane}  # fmt: skip
    files = []
    for name, part in found.items():
        files.append(folder / f"{name}.safetensors")
        ritz.save(part, files[-1])
    if importlib.util.find_spec("matplotlib") is not None:
        for name, figure in digits.figures(result).items():
            files.append(ritz.plots.save_figure(figure, folder / f"{name}.png", dpi=120))
    return files


@contextmanager
def _one_thread() -> Iterator[None]:
    """All is small: threads would wait for each other more than they work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
