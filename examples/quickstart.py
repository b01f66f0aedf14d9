"""A lattice with a random potential on its sites: a spectrum from products alone.

Usage: python examples/quickstart.py [--quick] [--out FOLDER]

The matrix is of order 90,000; ``--quick`` makes it 2,500, and a second.
"""

import argparse
from pathlib import Path

import numpy as np
import scipy.sparse as sparse
import torch

import ritz


def lattice(side: int) -> sparse.sparray:
    line = sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    potential = np.random.default_rng(0).uniform(0, 4, side * side)
    return sparse.csr_array(sparse.kronsum(line, line) + sparse.diags_array(potential))


def main(quick: bool, out: Path) -> None:
    matrix = lattice(50 if quick else 300)

    spectrum = ritz.lanczos(matrix, num_steps=100, progress=True)
    print(spectrum)

    density = ritz.density(matrix, num_probes=8, num_steps=60, width=0.2, progress=True)
    print("share of eigenvalues below 2:", round(density.mass(0.0, 2.0), 4))
    print("Frobenius norm:", ritz.frobenius_norm(matrix, rtol=0.01))
    print("sum of 1/eigenvalue:", ritz.trace_function(matrix, torch.reciprocal, num_steps=60))

    b = torch.ones(matrix.shape[0], dtype=torch.float64)
    print(ritz.solve(matrix, b, rtol=1e-8))

    out.mkdir(parents=True, exist_ok=True)
    ritz.save(spectrum, out / "spectrum.safetensors")
    again = ritz.load(out / "spectrum.safetensors")
    ritz.plots.spectrum(again).figure.savefig(out / "spectrum.png", dpi=150)
    ritz.plots.density(density).figure.savefig(out / "density.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"))
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out)
