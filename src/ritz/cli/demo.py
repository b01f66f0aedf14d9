"""``ritz demo``: a small network trained on handwritten digits, and the loss around it."""

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import ritz
from ritz.cli._options import Json, Seed, examples, option, print_result

EPILOG = examples(
    "ritz demo",
    "ritz demo --out somewhere --seed 3",
    "The images come with scikit-learn. The demo takes half a minute on one core.",
)

Out = Annotated[Path, option("--out", "Folder for results and pictures.", None, "FOLDER")]
Device = Annotated[str, option("--device", "cpu, cuda or cuda:1.", None, "NAME")]
Quick = Annotated[bool, option("--quick", "Use one batch and a few steps of everything.")]


def command(
    out: Out = Path("out/demo"),
    quick: Quick = False,
    device: Device = "cpu",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train a small network on digits; measure its spectra, sharpness and landscape."""
    import torch

    from ritz.cli._session import default_device, writing
    from ritz.studies import digits

    settings: Any = digits.QUICK if quick else {}
    place, threads = default_device(device), torch.get_num_threads()
    # The tensors are so small that several threads would mostly wait for each other.
    torch.set_num_threads(1)
    try:
        with writing(out) as folder:
            config = digits.Config(seed=seed, **settings)
            result = digits.run(config, device=place, progress=not json)
            files = _write(result, folder)
    finally:
        torch.set_num_threads(threads)
    print_result(result, files, as_json=json)


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
