"""Probes in blocks against single probes: Lanczos quadrature on a sparse matrix.

The matrix is the scaled adjacency of a random graph with 200,000 nodes and 2 million edges, and the
job is ``ritz.trace_function`` of its exponential with 30 steps, one block of probes and no
re-orthogonalisation. ``run`` is the cost per probe of the estimate and ``product`` that of a block
product, both over single probes. ``outside`` is the share of the run that is not products.
"""

import argparse

import numpy as np
import torch
from matrices import random_graph
from timing import interleaved, median, ratio, write

import ritz

NUM_STEPS = 30
PROBES = {1: 4, 4: 4, 8: 8, 16: 16}  # probes by block width


def rows(adjacency, dtype, threads, rounds):
    torch.set_num_threads(threads)
    op = ritz.operators.SparseOperator(adjacency.astype(dtype) / np.array(20, dtype))
    blocks = {width: torch.ones(op.shape[0], width, dtype=op.dtype) for width in PROBES}

    def run(width):
        ritz.trace_function(
            op, torch.exp, num_steps=NUM_STEPS, num_probes=PROBES[width], block_size=width
        )

    def products(width):
        for _ in range(NUM_STEPS // 5 * PROBES[width] // width):
            op.matmat(blocks[width])

    jobs = {
        (job, width): (lambda job=job, width=width: job(width))
        for width in PROBES
        for job in (run, products)
    }
    seconds = interleaved(jobs, rounds=rounds)
    run_cost = {w: [t / PROBES[w] for t in seconds[run, w]] for w in PROBES}  # per probe
    bare_cost = {w: [5 * t / PROBES[w] for t in seconds[products, w]] for w in PROBES}
    for width in PROBES:
        yield {
            "dtype": np.dtype(dtype).name,
            "threads": threads,
            "width": width,
            "ms a product": 1e3 * median(bare_cost[width]) / NUM_STEPS,
            "product": ratio(bare_cost[width], bare_cost[1]),
            "run": ratio(run_cost[width], run_cost[1]),
            "outside": 1 - ratio(bare_cost[width], run_cost[width]),
            "target": "<= 0.6 at the best",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n", type=int, default=200_000)
    options = parser.parse_args()
    adjacency = random_graph(options.n, 10 * options.n)
    found = []
    for threads in (1, 2):
        for dtype in (np.float32, np.float64):
            found += rows(adjacency, dtype, threads, options.rounds)
            write("blocks", found)


if __name__ == "__main__":
    main()
