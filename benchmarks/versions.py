"""Two checkouts of ritz compared: the time of the new one over the time of the old one.

    python benchmarks/versions.py --old ../before --new .

Each checkout runs in a separate process. The two processes alternate, job by job and round by
round, so that noise of the machine affects both. ``ratio`` is the median over rounds of new over
old, with its quartiles.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from timing import table, write


def product(name, matrix):
    """A Hessian or Gauss-Newton product of a network on 1024 samples (CNN: 256)."""
    import torch
    from networks import cnn, mlp
    from torch.nn.functional import cross_entropy

    import ritz

    torch.manual_seed(0)
    model, x, classes = {"mlp": mlp, "cnn": cnn}[name]()
    y = torch.randint(0, classes, (len(x),))
    batches = list(zip(x.split(128), y.split(128), strict=True))
    op = ritz.curvature.curvature_operator(ritz.Risk(model.eval(), cross_entropy, batches), matrix)
    vector = torch.randn(op.shape[0])
    return lambda: op @ vector


def sparse_product(dtype):
    """A normalised Laplacian of 200,000 nodes and 2 million edges times one block of probes."""
    import numpy as np
    import torch
    from matrices import random_graph

    from ritz.operators import SparseOperator

    matrix = random_graph(200_000, 2_000_000).astype(dtype)
    matrix.data = np.random.default_rng(1).random(matrix.nnz, dtype=dtype)
    op = SparseOperator((matrix + matrix.T).tocsr())
    block = torch.randn(op.shape[0], op.block_size, dtype=op.dtype)
    return lambda: op @ block


def step(name, **settings):
    """A step of an optimiser on 5 million parameters."""
    import torch

    from ritz import optim

    torch.manual_seed(0)
    weights = [torch.nn.Parameter(0.05 * torch.randn(512, 512)) for _ in range(20)]
    for p in weights:
        p.grad = 0.01 * torch.randn_like(p)
    optimizer = getattr(optim, name)(weights, lr=1e-3, weight_decay=1e-2, **settings)
    return optimizer.step


def lanczos(n, num_steps, **settings):
    """Lanczos on a diagonal matrix: almost all of the time is re-orthogonalisation."""
    import torch

    import ritz
    from ritz.operators import DiagonalOperator

    op = DiagonalOperator(torch.linspace(0.1, 1.0, n))
    return lambda: ritz.lanczos(op, num_steps=num_steps, **settings)


def density():
    """The entropic density of a random graph of 20,000 nodes and 200,000 edges."""
    from matrices import random_graph

    from ritz import graphs

    graph = random_graph(20_000, 200_000)
    return lambda: graphs.density(graph, num_moments=30)


def grid(side):
    """A well-conditioned Laplacian of a square grid."""
    import scipy.sparse as sp

    line = sp.diags([-1.0, 2.1, -1.0], [-1, 0, 1], shape=(side, side))
    return (sp.kron(line, sp.eye(side)) + sp.kron(sp.eye(side), line)).tocsr()


def log_determinant():
    """The log determinant of a grid Laplacian of 40,000 rows by Lanczos quadrature."""
    import ritz

    matrix = grid(200)
    return lambda: ritz.logdet(matrix, method="lanczos", num_products=300)


def function_trace():
    """The trace of the inverse of a grid Laplacian of 40,000 rows by Lanczos quadrature."""
    import torch

    import ritz

    matrix = grid(200)
    return lambda: ritz.trace_function(matrix, torch.reciprocal, num_steps=20, method="lanczos")


def plain_trace(method):
    """The trace of a grid Laplacian of 40,000 rows from products."""
    import ritz

    matrix = grid(200)
    return lambda: ritz.trace(matrix, method=method)


def bounds():
    """Bounds of the spectrum of a grid Laplacian of 40,000 rows by Lanczos."""
    import ritz

    matrix = grid(200)
    return lambda: ritz.bounds(matrix, method="lanczos")


def several(n, num_steps, **settings):
    """Lanczos runs of eight probes on a diagonal matrix."""
    import torch

    from ritz.operators import DiagonalOperator
    from ritz.spectra import lanczos_block

    op = DiagonalOperator(torch.linspace(0.1, 1.0, n))
    return lambda: lanczos_block(op, num_steps=num_steps, num_probes=8, **settings)


def training():
    """Two epochs of a small network on 2,048 samples."""
    import torch

    import ritz.training

    x = torch.randn(2048, 64)
    y = (x[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
    return lambda: ritz.training.fit(model, (x, y), num_epochs=2, batch_size=32)


JOBS = {
    "Hessian product, MLP": lambda: product("mlp", "hessian"),
    "GGN product, MLP": lambda: product("mlp", "ggn"),
    "Hessian product, CNN": lambda: product("cnn", "hessian"),
    "GGN product, CNN": lambda: product("cnn", "ggn"),
    "sparse block product, float32": lambda: sparse_product("float32"),
    "sparse block product, float64": lambda: sparse_product("float64"),
    "Gadam step": lambda: step("Gadam"),
    "GadamX step": lambda: step("GadamX"),
    "GadamX step, averaging": lambda: step("GadamX", start=1),
    "Lanczos, 100 steps, 200,000 rows": lambda: lanczos(200_000, 100),
    "Lanczos, 8 probes, 30 steps, 500 rows": lambda: several(500, 30),
    "Lanczos, 8 probes, 30 steps, 200,000 rows": lambda: several(200_000, 30),
    "Lanczos, 8 probes, none, 30 steps, 200,000 rows": lambda: several(
        200_000, 30, reorthogonalize="none"
    ),
    "entropic density": density,
    "log determinant": log_determinant,
    "trace of the inverse": function_trace,
    "trace, Hutchinson": lambda: plain_trace("hutchinson"),
    "trace, XTrace": lambda: plain_trace("xtrace"),
    "bounds": bounds,
    "training, 128 steps": training,
}


LEAST = 0.05  # seconds of one timing: short jobs are repeated
# On a busy machine, the time of the processor (--cpu) varies less than that of the clock.
CLOCKS = {"clock": time.perf_counter, "cpu": time.process_time}


def serve(clock):
    """Run the job named by each line of the input, and answer with its seconds."""
    jobs, repeats = {}, 1
    for line in sys.stdin:
        name = line.strip()
        if name not in jobs:
            jobs.clear()  # the memory of one job at a time
            jobs[name] = JOBS[name]()
            jobs[name]()
            repeats = max(1, int(LEAST / seconds(jobs[name], 1, clock)))
        print(json.dumps(seconds(jobs[name], repeats, clock)), flush=True)


def seconds(job, repeats, clock):
    begin = clock()
    for _ in range(repeats):
        job()
    return (clock() - begin) / repeats


def worker(checkout, clock):
    paths = os.pathsep.join([str(checkout / "src"), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, __file__, "--serve", *["--cpu"] * (clock == "cpu")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def ask(process, name):
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(old, new, name, rounds):
    ratios, new_seconds = [], []
    for turn in range(rounds + 1):
        # The order alternates, so that neither always runs after the other.
        order = (old, new) if turn % 2 else (new, old)
        times = {process: ask(process, name) for process in order}
        if turn:  # the first round sets up
            ratios.append(times[new] / times[old])
            new_seconds.append(times[new])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "job": name,
        "ms": 1000 * statistics.median(new_seconds),
        "ratio": middle,
        "quartiles": f"{low:.2f}-{high:.2f}",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="run the jobs whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="time of the processor, not the clock")
    parser.add_argument("--serve", action="store_true", help="used by the script itself")
    args = parser.parse_args()
    clock = "cpu" if args.cpu else "clock"
    if args.serve:
        return serve(CLOCKS[clock])
    if args.old is None:
        print("versions.py needs --old, a checkout to compare with", file=sys.stderr)
        return None
    old, new = (worker(path.resolve(), clock) for path in (args.old, args.new))
    rows = []
    for name in JOBS:
        if args.only.lower() in name.lower():
            rows.append(compare(old, new, name, args.rounds))
            print(table(rows[-1:]), flush=True)
    return write(__file__, rows)


if __name__ == "__main__":
    main()
