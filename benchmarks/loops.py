"""The loop of sparse products: the numba loop of ritz, variants, and the LLVM IR that it replaced.

A random graph with 200,000 nodes, 2 million edges and random weights times a packed block with one
cache line per row. ``IR`` is the loop of commit aa10dda, read with git. ``numba`` is the loop of
ritz, and the other rows are variants of it. All run in one process, in random order in every round.
``over IR`` is the median over rounds of the ratio of times in the same round, with its quartiles.
``first call`` is the CPU time of the first product in a fresh process, including the import of
numba, without and with the cache on disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import types as python_types
from pathlib import Path

import numba
import numpy as np
import torch
from matrices import random_graph
from numba import njit, prange
from timing import median, write

from ritz.operators import _native
from ritz.operators._native import add_multiple, load, prefetch, store, zeros
from ritz.operators._sparse import TUNING, CompressedRows, _lines

IR = "aa10dda:src/ritz/operators/_native.py"
FIRST = """
import time, torch
from ritz.operators._sparse import CompressedRows
rows = CompressedRows(torch.arange(40_001), torch.arange(40_000))
begin = time.process_time()
rows.multiply(torch.ones(40_000, 8, dtype=torch.float64))
print(time.process_time() - begin)
"""


def ir_module():
    """Return the module of that commit."""
    source = subprocess.run(["git", "show", IR], check=True, capture_output=True, text=True).stdout
    module = python_types.ModuleType("ir")
    exec(source, module.__dict__)
    return module


def variant(width, *, ahead, parallel):
    """Return the loop of ritz with values, another prefetch, or the threads of numba."""
    size, ahead = np.uint64(width), np.uint64(ahead)

    @njit(nogil=True)
    def rows(begin, end, pointers, columns, values, x, y):
        last = np.uint64(len(columns) - 1)
        for i in range(np.uint64(begin), np.uint64(end)):
            total = zeros(x, width)
            for e in range(np.uint64(pointers[i]), np.uint64(pointers[i + np.uint64(1)])):
                if ahead:
                    prefetch(x, np.uint64(columns[min(e + ahead, last)]) * size)
                total = add_multiple(total, values[e], load(x, np.uint64(columns[e]) * size, width))
            store(y, i * size, total)

    @njit(nogil=True, parallel=True)
    def spread(cuts, pointers, columns, values, x, y):
        for piece in prange(len(cuts) - 1):
            rows(cuts[piece], cuts[piece + 1], pointers, columns, values, x, y)

    return spread if parallel else rows


def jobs(rows, width, x, y):
    """Return jobs by name; each writes the product to ``y``."""
    pointers, columns, values = (t.numpy() for t in (rows.pointers, rows.columns, rows.values))
    flat_x, flat_y = x.view(-1).numpy(), y.view(-1).numpy()
    ir = ir_module().product_loop(
        width, rows.dtype, pointer=torch.int32, column=torch.int32, weighted=True, affine=False
    )
    addresses = [t.data_ptr() for t in (rows.pointers, rows.columns, rows.values)]
    addresses += [0, 0, x.data_ptr(), y.data_ptr()]
    arrays = (pointers, columns, values, flat_x, flat_y)
    by_numba = _native.product_loop(width)
    plain = variant(width, ahead=0, parallel=False)
    parallel = variant(width, ahead=_native.AHEAD, parallel=True)
    pieces = rows._pieces(torch.get_num_threads() * TUNING.pieces_per_thread)
    cuts = np.array([0, *(end for _, end in pieces)])
    arguments = (pointers, columns, values, None, None, flat_x, flat_y, 0, width)
    return {
        "IR": lambda: rows._spread(ir, width, rows.num_entries - 1, width, *addresses),
        "IR again": lambda: rows._spread(ir, width, rows.num_entries - 1, width, *addresses),
        "numba": lambda: rows._spread(by_numba, width, *arguments),
        "numba, no prefetch": lambda: rows._spread(plain, width, *arrays),
        "numba, parallel=True": lambda: parallel(cuts, *arrays),
    }


def timed(todo, rounds):
    """Return the seconds of each job in each round, after one untimed run."""
    seconds = {name: [] for name in todo}
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for name in order.permutation(list(todo)):
            todo[name]()
            begin = time.perf_counter()
            todo[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def table(dtype, options):
    matrix = random_graph(options.n, 10 * options.n).astype(dtype)
    matrix.data = np.random.default_rng(1).random(matrix.nnz, dtype=dtype)
    matrix = (matrix + matrix.T).tocsr()
    rows = CompressedRows(
        torch.from_numpy(matrix.indptr.astype(np.int32)),
        torch.from_numpy(matrix.indices.astype(np.int32)),
        torch.from_numpy(matrix.data),
    )
    width = rows.width
    x, y = (_lines(64 * options.n).view(rows.dtype).view(-1, width) for _ in range(2))
    x.copy_(torch.randn(options.n, width, generator=torch.Generator().manual_seed(0)))
    todo, expected = jobs(rows, width, x, y), torch.from_numpy(matrix @ x.numpy())
    for job in todo.values():
        y.zero_()
        job()
        torch.testing.assert_close(y, expected)
    seconds = timed(todo, options.rounds)
    for name, times in seconds.items():
        ratios = np.array(times) / np.array(seconds["IR"])
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        yield {
            "dtype": np.dtype(dtype).name,
            "who": name,
            "ms a vector": 1e3 * median(times) / width,
            "over IR": middle,
            "quartiles": f"{low:.2f} to {high:.2f}",
        }


def first_calls():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first call", "first call, cached"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST],
                check=True,
                capture_output=True,
                text=True,
                env=os.environ | {"NUMBA_CACHE_DIR": folder},
            )
            seconds = float(done.stdout)
            blank = {"over IR": "", "quartiles": ""}
            yield {"dtype": "", "who": name, "ms a vector": 1e3 * seconds} | blank


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    os.chdir(Path(__file__).parent.parent)
    results = [*table(np.float64, options), *table(np.float32, options), *first_calls()]
    write("loops", results)


if __name__ == "__main__":
    main()
