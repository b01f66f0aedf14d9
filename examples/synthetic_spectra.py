"""Wigner, Marchenko-Pastur and network-like matrices: exact, by Lanczos, and by the diagonal.

Usage: python examples/synthetic_spectra.py [--size N] [--quick] [--out FOLDER]

At the default size of 10,000 the exact eigenvalues, computed for comparison, take minutes;
``--quick`` is size 300, and a second.
"""

import argparse
from pathlib import Path

from ritz import studies
from ritz.studies import synthetic_spectra


def main(size: int, out: Path) -> None:
    config = synthetic_spectra.Config(size=size)
    result = synthetic_spectra.run(config, progress=True)
    print(result)
    print("written:", *studies.write(synthetic_spectra, result, out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/synthetic_spectra"))
    arguments = parser.parse_args()
    main(300 if arguments.quick else arguments.size, arguments.out)
