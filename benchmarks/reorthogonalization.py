"""Full re-orthogonalisation against the memory bandwidth.

The bound is four reads of the basis at the rate of a large copy, which counts bytes read and
written. ``twice`` is the full re-orthogonalisation of textbooks (project, subtract, project,
subtract) at basis sizes 10, 20, ..., 100. ``run`` is ``ritz.lanczos`` with 100 steps on a diagonal
matrix without its 100 products, including norms, scaling and storing of vectors. It subtracts the
basis once from the remainder of the recurrence, and can therefore be faster than the bound.
"""

import argparse

import torch
from timing import interleaved, median, ratio, write

import ritz
from ritz.operators import DiagonalOperator
from ritz.spectra._lanczos.recurrence import Basis

NUM_STEPS = 100


def bandwidth_rows(n, dtype, threads, rounds):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    basis = Basis(NUM_STEPS, torch.empty(n, dtype=dtype), placement="device")
    basis.rows.normal_(generator=generator).div_(n**0.5)
    vector = torch.randn(n, dtype=dtype, generator=generator)
    op = DiagonalOperator(torch.rand(n, dtype=dtype, generator=generator))
    source = torch.ones(2**28 // dtype.itemsize, dtype=dtype)
    target = torch.empty_like(source)

    def twice():
        for basis.size in range(10, NUM_STEPS + 1, 10):
            for _ in range(2):
                basis.subtract(vector, basis.project(vector))

    def products():
        for _ in range(NUM_STEPS):
            op.matmat(vector)

    jobs = {
        "copy": lambda: target.copy_(source),
        "twice": twice,
        "run": lambda: ritz.lanczos(op, num_steps=NUM_STEPS),
        "products": products,
    }
    seconds = interleaved(jobs, rounds=rounds)
    rate = [2 * source.nbytes / t for t in seconds["copy"]]
    reads = {"twice": sum(range(10, NUM_STEPS + 1, 10)), "run": sum(range(1, NUM_STEPS + 1))}
    spent = {
        "twice": seconds["twice"],
        "run": [a - b for a, b in zip(seconds["run"], seconds["products"], strict=True)],
    }
    for what, count in reads.items():
        bound = [4 * count * n * dtype.itemsize / r for r in rate]
        yield {
            "what": f"full/bound, {what}",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": threads,
            "seconds": median(spent[what]),
            "copy GB/s": median(rate) / 1e9,
            "ratio": ratio(spent[what], bound),
            "target": "<= 1.3" if threads == 1 else "<= 1.7",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [
        row
        for threads in (1, 2)
        for dtype in (torch.float32, torch.float64)
        for row in bandwidth_rows(options.n, dtype, threads, options.rounds)
    ]
    write(__file__, rows)


if __name__ == "__main__":
    main()
