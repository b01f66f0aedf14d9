"""Sparse block products of graphs, against SciPy, torch, imate and the memory bandwidth.

``speed``: milliseconds per vector for 32 probes, in blocks of several widths, on a random graph
with 200,000 nodes, 2 million edges and random weights. ``over ritz`` is relative to ritz at its
block width, one cache line, which its estimators use. ``bound`` is the time to read and write
everything that one such block needs (entries, indices, block, product) at the rate of a large copy,
measured in the same rounds. Each job runs three times and the third run is timed. The normalised
Laplacian has no values to read. ``quadrature`` is Lanczos quadrature with 32 probes and 30 steps,
per probe and step, compared with imate, which multiplies single vectors and has no separate
product.

``growth``: the normalised Laplacian of random regular graphs of degree 20, without values. ``MB``
is the graph plus strip, block and product of 16 columns in float32: 8.4 bytes per edge and 192 per
node. A billion edges between 100 million nodes take 8.4 GB, and 19 GB more for a product with such
a block, 1.2 GB per column.

``moments``: 100 moments of web-NotreDame with 100 probes, in a separate process, if ``--data-dir``
or ``RITZ_DATA`` contains the graph. ``MB`` is the graph plus the increase of the peak memory.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from matrices import random_graph, regular_graph
from memory import kilobytes
from timing import RESULTS, interleaved, median, ratio, write

import ritz
from ritz import graphs
from ritz.operators import LaplacianOperator, SparseOperator
from ritz.operators._sparse import LINE, CompressedRows, native_loops

try:
    import imate
except ImportError:
    imate = None

NUM_PROBES = 32
NUM_STEPS = 30
WIDTHS = (1, 4, 8, 32)
KEYS = ("what", "dtype", "edges", "who", "ms a vector", "over ritz", "over bound", "MB", "target")
COPIED = 2**27  # bytes
PARTS = ("speed", "quadrature", "growth", "moments")
WEB = Path("graphs", "web-NotreDame.txt.gz")
NUM_MOMENTS = 100  # and as many probes


def timed(job, device):
    """Return the job; on a CUDA device it waits for the kernels."""
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
    """Return the number of columns and the job by name."""
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
    """Return the bytes that a product with one strip must move."""
    n, rows = op.shape[0], op.rows
    entries = rows.num_entries * (rows.columns.itemsize + op.dtype.itemsize)
    return entries + n * rows.pointers.itemsize + 2 * n * LINE


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
    columns = LINE // op.dtype.itemsize
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
    """Return the matrix with a large diagonal: imate needs it to be positive definite."""
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
    work = op.shape[0] * LINE + 2 * block.nbytes  # the packed strip, block and product
    return {
        "what": "growth",
        "dtype": "float32",
        "edges": op.rows.num_entries // 2,
        "who": f"ritz, block of {op.block_size}",
        "ms a vector": 1e3 * median(times) / op.block_size,
        "MB": f"{held / 1e6:.0f} + {work / 1e6:.0f}",
        "target": f"{1e9 * median(times) / op.block_size / num_edges:.2f} ns an edge",
    }


def web(options):
    """Return the file of the web graph, or ``None``."""
    folder = options.data_dir or os.environ.get("RITZ_DATA")
    path = None if folder is None else Path(folder) / WEB
    return path if path is not None and path.is_file() else None


def measured_moments(dtype, options):
    """In the child process: print seconds, bytes of the graph and additional bytes."""
    graph = graphs.read(web(options))
    graphs.moments(graph, num_moments=4, num_probes=2, exact=False, dtype=dtype)  # loops compile
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = kilobytes("VmRSS"), time.perf_counter()
    graphs.moments(graph, num_moments=NUM_MOMENTS, num_probes=NUM_MOMENTS, dtype=dtype)
    seconds = time.perf_counter() - begin
    beyond = 1024 * (kilobytes("VmHWM") - before)
    held = sum(part.nbytes for part in (graph.crow, graph.col))
    print(json.dumps([seconds, held, beyond, graph.num_edges]))


def moments_rows(options):
    if web(options) is None or options.device != "cpu":
        print("moments: left out, web-NotreDame is not there or the device is no CPU", flush=True)
        return
    for name in ("float64", "float32"):
        command = [sys.executable, __file__, "--moments-of", name]
        command += ["--threads", str(options.threads)]
        command += ["--data-dir", options.data_dir] if options.data_dir else []
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, held, beyond, num_edges = json.loads(done.stdout)
        yield {
            "what": "moments",
            "dtype": name,
            "edges": num_edges,
            "who": f"ritz, web-NotreDame, {NUM_MOMENTS} x {NUM_MOMENTS}",
            "ms a vector": 1e3 * seconds / (NUM_MOMENTS * NUM_MOMENTS / 2),
            "MB": f"{held / 1e6:.0f} + {beyond / 1e6:.0f}",
            "target": f"{seconds:.1f} s in all",
        }


def kept(script, parts):
    """Return the rows of an earlier run that are not measured again."""
    path = RESULTS / f"{script}.json"
    if set(parts) == set(PARTS) or not path.is_file():
        return []
    return [row for row in json.loads(path.read_text())["results"] if row["what"] not in parts]


def order(row):
    """Return the first two parts by precision, followed by the others."""
    part = PARTS.index(row["what"])
    return (0, row["dtype"] != "float64", part) if part < 2 else (part, False, 0)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument(
        "--largest", type=int, default=50_000_000, help="edges of the largest graph"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--data-dir", help="folder of data sets; defaults to RITZ_DATA")
    parser.add_argument(
        "--only", choices=PARTS, help="measure this part only; other rows are not changed"
    )
    parser.add_argument("--moments-of", choices=("float64", "float32"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.moments_of:
        measured_moments(getattr(torch, options.moments_of), options)
        return
    print("compiled loops" if native_loops() else "no numba: torch's products", flush=True)
    script = "graphs" if options.device == "cpu" else "graphs_cuda"
    parts = (options.only,) if options.only else PARTS
    found = kept(script, parts)

    def keep(rows):
        new = [dict.fromkeys(KEYS, "") | row for row in rows]
        found.extend(new)
        found.sort(key=order)
        if new:
            write(script, found)

    if {"speed", "quadrature"} & set(parts):
        for dtype in (np.float64, np.float32):
            matrix = weighted(options.n, 10 * options.n, dtype)
            if "speed" in parts:
                keep(speed_rows(matrix, options))
            if "quadrature" in parts and imate is not None and options.device == "cpu":
                keep(quadrature_rows(matrix, options))
    if "growth" in parts:
        for share in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
            keep([growth_row(round(share * options.largest), options)])
    if "moments" in parts:
        keep(moments_rows(options))


if __name__ == "__main__":
    main()
