"""Draw the pictures of the gallery from stored results: ``python docs/pictures.py``."""

from pathlib import Path

from PIL import Image

import ritz
from ritz import plots, studies

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NETWORKS = {"vgg16": "VGG-16, 15,291,300 parameters", "gpt": "GPT, 124,439,808 parameters"}
RUNS = {"sgd": RESULTS / "cifar100" / "sgd-lr0.05", "gadamx": RESULTS / "cifar100" / "gadamx-0"}
MATRICES = {"hessian": "Hessian", "ggn": "Gauss-Newton"}


def figures():
    """Yield names of pictures and functions that draw them."""
    for path in sorted((RESULTS / "studies").glob("*.safetensors")):
        result = ritz.load(path)
        study = studies.find(type(result).__module__.rpartition(".")[2])
        yield path.stem, lambda study=study, result=result: study.figure(result)
    for name, title in NETWORKS.items():
        spectra = {
            f"{title}: {label}": ritz.load(RESULTS / f"{name}_{matrix}.ritz")
            for matrix, label in MATRICES.items()
        }
        yield f"{name}_spectrum", lambda spectra=spectra: plots.plot(spectra)
    for name, folder in RUNS.items():
        spectra = {
            f"{label}, batch norm {mode}": ritz.load(
                folder / f"spectrum-{matrix}-{mode}.safetensors"
            )
            for matrix, label in MATRICES.items()
            for mode in ("eval", "train")
        }
        lines = ritz.load(folder / "landscape.safetensors")
        yield f"vgg16_{name}_spectra", lambda spectra=spectra: plots.plot(spectra)
        yield f"vgg16_{name}_landscape", lambda lines=lines: plots.plot(lines)
    logs = {name: ritz.training.read_log(folder / "log.jsonl") for name, folder in RUNS.items()}
    yield "vgg16_training", lambda: plots.training_curves(logs)[0].figure


def shrink(path):
    """Write a picture with a palette of 256 colours, in a third of the bytes."""
    picture = Image.open(path).convert("RGB")
    # Without dithering, which would put dots into even areas.
    small = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    for name, draw in figures():
        # Some results have no picture in the gallery. Those of `ritz demo` are not stored.
        if (IMAGES / f"{name}.png").exists():
            plots.save_figure(draw(), IMAGES / f"{name}.png", dpi=110)
            shrink(IMAGES / f"{name}.png")
