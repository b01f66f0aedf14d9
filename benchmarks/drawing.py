"""Draw the spectra that ``spectra.py`` wrote to ``results/`` into ``docs/images/``."""

from pathlib import Path

from timing import RESULTS

import ritz

IMAGES = Path(__file__).parent.parent / "docs" / "images"
NAMES = {"vgg16": "VGG-16, 15,291,300 parameters", "gpt": "GPT, 124,439,808 parameters"}
KINDS = {"hessian": "Hessian", "ggn": "Gauss-Newton"}


def main():
    for name, title in NAMES.items():
        loaded = {
            f"{title}: {label}": ritz.load(RESULTS / f"{name}_{kind}.ritz")
            for kind, label in KINDS.items()
        }
        axes = ritz.plots.spectra(loaded, log=True)
        axes[0].figure.savefig(IMAGES / f"{name}_spectrum.png", dpi=110)


if __name__ == "__main__":
    main()
