"""Partial against full re-orthogonalisation, on a matrix with five well separated outliers.

Each time is that of a run minus that of a run without re-orthogonalisation. ``twice`` is the full
re-orthogonalisation of textbooks, which subtracts the basis twice per step.
"""

import argparse

import torch
from timing import interleaved, median, ratio, write

import ritz
from ritz.spectra._lanczos.recurrence import Basis
from ritz.testing import with_spectrum

OUTLIERS = (3.0, 4.0, 5.0, 6.0, 8.0)


def partial_row(n, num_steps, dtype, threads, rounds):
    """Return full and textbook over partial, minus the time without re-orthogonalisation."""
    torch.set_num_threads(threads)
    values = torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=dtype)
    values[: len(OUTLIERS)] = torch.tensor(OUTLIERS)
    op = with_spectrum(values, dense=False)
    basis = Basis(num_steps, values, placement="device")
    basis.rows.normal_().div_(n**0.5)
    vector, found = torch.randn(n, dtype=dtype), {}

    def run(mode):
        found[mode] = ritz.lanczos(op, num_steps=num_steps, reorthogonalize=mode)

    def twice():
        for basis.size in range(1, num_steps + 1):
            for _ in range(2):
                basis.subtract(vector, basis.project(vector))

    jobs = {mode: lambda mode=mode: run(mode) for mode in ("full", "partial", "none")}
    seconds = interleaved(jobs | {"twice": twice}, rounds=rounds)
    full, partial = (
        [a - b for a, b in zip(seconds[mode], seconds["none"], strict=True)]
        for mode in ("full", "partial")
    )
    copies = [int(((found["partial"].values - value).abs() < 0.01).sum()) for value in OUTLIERS]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        "seconds full": median(full),
        "seconds partial": median(partial),
        "twice/partial": ratio(seconds["twice"], partial),
        "full/partial": ratio(full, partial),
        "copies of each outlier": str(copies),
        "target": ">= 3",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = [
        partial_row(options.n, 300, dtype, threads, options.rounds)
        for threads in (1, 2)
        for dtype in (torch.float32, torch.float64)
    ]
    write(__file__, rows)


if __name__ == "__main__":
    main()
