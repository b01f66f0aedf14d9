"""Sparse block products of graphs: against SciPy, torch, imate and the bandwidth of memory.

``speed``: a random graph with 200,000 nodes and 2 million edges, weighted at random; milliseconds a
vector of 32 probes, in blocks of several widths, cut beforehand. ``over ritz`` is over ritz at its
own width, a cache line, in which its estimators multiply their probes. ``bound`` is what must be
read and written for one such block (entries, indices, block, product) at the rate of a large copy
measured in the same rounds. Every job runs three times and the third is timed, as in a loop. The
normalised Laplacian has no values to read. ``quadrature`` is Lanczos quadrature with 32 probes and
30 steps, a probe and step, beside imate, which multiplies one vector at a time and has no bare
product. ``growth``: the normalised Laplacian of random regular graphs of degree 20, without values.
"""

import argparse

import numpy as np
import torch
from matrices import random_graph, regular_graph
from timing import interleaved, median, ratio, write

import ritz
from ritz.operators import CompressedRows, LaplacianOperator, SparseOperator, native

try:
    import imate
except ImportError:
    imate = None

NUM_PROBES = 32
NUM_STEPS = 30
WIDTHS = (1, 4, 8, 32)
KEYS = ("what", "dtype", "edges", "who", "ms a vector", "over ritz", "over bound", "MB", "target")
COPIED = 2**27  # bytes


def timed(job, device):
    """The job, and on a CUDA device what it started."""
    if device == "cpu":
        return job

    def finished():
        job()
        torch.cuda.synchronize()

    return finished


def weighted(n, num_edges, dtype):
    matrix = random_graph(n, num_edges).astype(dtype)
    matrix.data = np.random.default_rng(1).random(matrix.nnz, dtype=dtype)
    return (matrix + matrix.T).tocsr()


def speed_jobs(matrix, op, block, device):
    """Name to number of columns and job."""
    rows = op.rows
    graph = LaplacianOperator(CompressedRows(rows.pointers, rows.columns, dtype=op.dtype))
    width = min(op.block_size, NUM_PROBES)
    strips = {w: block[:, :w].contiguous() for w in (*WIDTHS, width)}
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    jobs = {
        "copy": (1, lambda: target.copy_(source)),
        "ritz": (width, lambda: op @ strips[width]),
        "ritz, 1": (1, lambda: op @ strips[1]),
        "ritz, 32": (32, lambda: op @ block),
        "ritz, Laplacian": (width, lambda: graph @ strips[width]),
    }
    for w in WIDTHS:
        jobs[f"torch, {w}"] = (w, lambda w=w: op.matrix @ strips[w])
        if device == "cpu":
            jobs[f"SciPy, {w}"] = (w, lambda w=w: matrix @ strips[w].numpy())
    return {name: (columns, timed(job, device)) for name, (columns, job) in jobs.items()}


def strip_bytes(op):
    """What one strip of a cache line must move at the least."""
    n, rows = op.shape[0], op.rows
    entries = rows.num_entries * (rows.columns.itemsize + op.dtype.itemsize)
    return entries + n * rows.pointers.itemsize + 2 * n * native.LINE


def target(name, options):
    if options.device != "cpu":
        return ""
    aims = {"ritz": "<= 2.5 of the bound", "SciPy": ">= 5", "torch": ">= 1.8"}
    return aims.get(name.partition(",")[0], "") if not name.startswith("ritz,") else ""


def speed_rows(matrix, options):
    host = SparseOperator(matrix)
    op = host if options.device == "cpu" else SparseOperator(host.matrix.to(options.device))
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(op.shape[0], NUM_PROBES, generator=generator, dtype=op.dtype)
    jobs = speed_jobs(matrix, op, block.to(op.device), options.device)
    seconds = interleaved(
        {name: job for name, (_, job) in jobs.items()}, rounds=options.rounds, before=2
    )
    cost = {name: [t / jobs[name][0] for t in times] for name, times in seconds.items()}
    columns = native.LINE // op.dtype.itemsize
    bound = [strip_bytes(op) / columns * t / (2 * COPIED) for t in seconds["copy"]]
    print(f"copy: {2 * COPIED / median(seconds['copy']) / 1e9:.1f} GB/s", flush=True)
    for name, times in (cost | {"bound": bound}).items():
        if name == "copy":
            continue
        yield {
            "what": "speed",
            "dtype": str(op.dtype).removeprefix("torch."),
            "edges": op.rows.num_entries // 2,
            "who": name,
            "ms a vector": 1e3 * median(times),
            "over ritz": ratio(times, cost["ritz"]),
            "over bound": ratio(times, bound),
            "target": target(name, options),
        }


def by_imate(matrix, threads):
    imate.logdet(
        matrix,
        method="slq",
        min_num_samples=NUM_PROBES,
        max_num_samples=NUM_PROBES,
        error_rtol=1e-12,
        lanczos_degree=NUM_STEPS,
        orthogonalize=0,
        num_threads=threads,
    )


def quadrature_rows(matrix, options):
    """Positive definite by a large diagonal, so that imate's logarithm is defined."""
    shifted = matrix.copy()
    shifted.setdiag(np.asarray(matrix.sum(1)).ravel() + 1)
    shifted = shifted.tocsr()
    op = SparseOperator(shifted)
    jobs = {
        "ritz": lambda: ritz.trace_function(
            op, torch.log, num_steps=NUM_STEPS, num_probes=NUM_PROBES
        ),
        "imate": lambda: by_imate(shifted, options.threads),
    }
    seconds = interleaved(jobs, rounds=min(3, options.rounds))
    for name, times in seconds.items():
        yield {
            "what": "quadrature",
            "dtype": str(op.dtype).removeprefix("torch."),
            "edges": matrix.nnz // 2,
            "who": name,
            "ms a vector": 1e3 * median(times) / NUM_PROBES / NUM_STEPS,
            "over ritz": ratio(times, seconds["ritz"]),
            "target": "> 1" if name == "imate" else "",
        }


def growth_row(num_edges, options):
    pointers, columns = (
        torch.from_numpy(part).to(options.device) for part in regular_graph(num_edges // 10, 20)
    )
    op = LaplacianOperator(CompressedRows(pointers, columns, dtype=torch.float32))
    block = torch.randn(op.shape[0], op.block_size, generator=torch.Generator().manual_seed(0))
    block = block.to(op.device)
    jobs = {"product": timed(lambda: op @ block, options.device)}
    times = interleaved(jobs, rounds=options.rounds)["product"]
    held = pointers.nbytes + columns.nbytes
    work = op.shape[0] * native.LINE + 2 * block.nbytes  # the packed strip, block and product
    return {
        "what": "growth",
        "dtype": "float32",
        "edges": op.rows.num_entries // 2,
        "who": f"ritz, block of {op.block_size}",
        "ms a vector": 1e3 * median(times) / op.block_size,
        "MB": f"{held / 1e6:.0f} + {work / 1e6:.0f}",
        "target": f"{1e9 * median(times) / op.block_size / num_edges:.2f} ns an edge",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--largest", type=int, default=50_000_000, help="edges of the last graph")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        "compiled loops" if native.compiler() else "no llvmlite: torch's own products", flush=True
    )
    found = []
    script = "graphs" if options.device == "cpu" else "graphs_cuda"

    def keep(rows):
        found.extend(dict.fromkeys(KEYS, "") | row for row in rows)
        write(script, found)

    for dtype in (np.float64, np.float32):
        matrix = weighted(options.n, 10 * options.n, dtype)
        keep(speed_rows(matrix, options))
        if imate is not None and options.device == "cpu":
            keep(quadrature_rows(matrix, options))
    for share in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        keep([growth_row(round(share * options.largest), options)])


if __name__ == "__main__":
    main()
