"""Log determinants of kernel matrices of order 20,000 that are never stored, and their gradients.

Points in six dimensions, squared exponential kernel, float64. Each row runs in a separate process.
The peak of the resident memory is reset after the operator is built, and the table has its increase
until the end. The exact value comes from an in-place Cholesky factorisation, also in a separate
process, which takes the memory of the dense matrix, and minutes.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from memory import kilobytes
from scipy.linalg import cholesky
from timing import write

import ritz
from ritz.operators import KernelOperator
from ritz.spectra import logdet_gradient

SPREAD = 0.22  # standard deviation of the points, as in the study kernel_determinants
# length scale, noise
CASES = [(0.45, 1e-2), (0.45, 1e-4), (0.25, 1e-2)]


def operator(n, lengthscale, noise):
    generator = torch.Generator().manual_seed(0)
    points = SPREAD * torch.randn(n, 6, generator=generator, dtype=torch.float64)
    scales = torch.full((6,), lengthscale, dtype=torch.float64, requires_grad=True)
    level = torch.tensor(noise, dtype=torch.float64, requires_grad=True)
    return KernelOperator(points, lengthscale=scales, noise=level)


def exact(op, _):
    n = op.shape[0]
    matrix = torch.empty(n, n, dtype=torch.float64)
    with torch.no_grad():
        for columns in range(0, n, 512):
            matrix[columns : columns + 512] = op.cross(op.points[columns : columns + 512]).T
        matrix.diagonal().add_(op.noise)
    # LAPACK overwrites column-major matrices only; the matrix is symmetric, so .T is free.
    factor = cholesky(matrix.numpy().T, lower=True, overwrite_a=True, check_finite=False)
    return {"value": float(2 * torch.from_numpy(factor).diagonal().log().sum())}


def value(op, num_products):
    found = ritz.logdet(op, method="krylov", num_products=num_products)
    return {
        "value": found.mean.item(),
        "stderr": found.stderr.item(),
        "truncation": found.truncation.item(),
        "products": found.num_products,
    }


def gradient(op, _):
    found = logdet_gradient(op, method="lanczos")
    scales, noise = found["lengthscale"], found["noise"]
    return {
        "value": scales.mean.sum().item(),
        "stderr": scales.samples.sum(1).std().item() / len(scales.samples) ** 0.5,
        "truncation": scales.truncation.sum().item(),
        "products": noise.num_products,
    }


JOBS = {"value": value, "gradient": gradient, "exact": exact}


def measure(job, n, lengthscale, noise, num_products):
    """In the child process: print the result, seconds and the increase of the peak memory."""
    JOBS["value"](operator(64, 1.0, 0.1), 20)  # warm-up: libraries are loaded
    op = operator(n, lengthscale, noise)
    op @ torch.ones(n, 1, dtype=torch.float64)
    Path("/proc/self/clear_refs").write_text("5")
    before, begin, busy = kilobytes("VmRSS"), time.perf_counter(), time.process_time()
    found = JOBS[job](op, num_products)
    found["s"], found["CPU s"] = time.perf_counter() - begin, time.process_time() - busy
    print(json.dumps(found | {"GB": 1.024e-6 * (kilobytes("VmHWM") - before)}))


def row(job, options, lengthscale, noise, truth):
    arguments = [job, options.n, lengthscale, noise, options.num_products]
    command = [sys.executable, __file__, "--case", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    what = {"gradient": "d logdet / d length scale"}.get(job, "logdet")
    error = "" if truth is None or job != "value" else abs(found["value"] - truth) / abs(truth)
    return {
        "what": what if job != "exact" else "logdet, Cholesky",
        "n": options.n,
        "length scale": lengthscale,
        "noise": noise,
        "value": found["value"],
        "stderr": found.get("stderr", 0.0),
        "truncation": found.get("truncation", 0.0),
        "relative error": error,
        "products": found.get("products", 0),
        "s": found["s"],
        "CPU s": found["CPU s"],
        "GB": found["GB"],
        "dense GB": 8e-9 * options.n**2,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="run this case in this process")
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--num-products", type=int, default=1500)
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases to run")
    options = parser.parse_args()
    if options.case:
        measure(*json.loads(options.case))
        return
    found = []
    for lengthscale, noise in CASES[: options.cases]:
        truth = None
        for job in ("exact", "value", "gradient"):
            found.append(row(job, options, lengthscale, noise, truth))
            truth = found[-1]["value"] if job == "exact" else truth
        write("kernels", found)


if __name__ == "__main__":
    main()
