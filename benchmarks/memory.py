"""Peak memory without the operator, in gigabytes and in vectors, against the docstrings.

Each case runs in a separate process. The peak of the resident memory is reset after the operator is
built (``/proc/self/clear_refs``), and the table has its increase until the end.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from timing import write

import ritz
from ritz.operators import DiagonalOperator

LARGE, SMALL = 10_000_000, 1_000_000
# name: (order, vectors according to the docstring, target in GB)
CASES = {
    "lanczos, 100 steps, basis on host": (LARGE, 104, 5.0),
    "eigenpairs, largest=5, max_vectors=20": (LARGE, 25, 1.5),
    "lanczos, 100 steps, vectors": (SMALL, 104, None),
    "lanczos, 100 steps, partial": (SMALL, 104, None),
    "lanczos, 100 steps, none": (SMALL, 6, None),
    "trace_function, block of 8": (SMALL, 6 * 8, None),
    "trace_function, block of 8, full": (SMALL, 35 * 8, None),
    "density, 1 probe, 30 steps": (SMALL, 35, None),
    "solve, 8 systems": (SMALL, 6 * 8, None),
}


def job(name, n):
    """Return the function to measure on a matrix of order ``n``, with everything prepared."""
    spread = torch.rand(n, generator=torch.Generator().manual_seed(1)) + 1
    # For restarts: outliers so close to the bulk that the basis fills several times.
    spread[:5] = torch.arange(1, 6) * (0.1 if "max_vectors" in name else 1.0) + 2
    op = DiagonalOperator(spread)
    right = torch.ones(n, 8) if name.startswith("solve") else None
    return {
        "lanczos, 100 steps, basis on host": lambda: ritz.lanczos(
            op, num_steps=100, placement="host"
        ),
        "eigenpairs, largest=5, max_vectors=20": lambda: ritz.eigenpairs(
            op, largest=5, max_vectors=20
        ),
        "lanczos, 100 steps, vectors": lambda: ritz.lanczos(op, num_steps=100, vectors=True),
        "lanczos, 100 steps, partial": lambda: ritz.lanczos(
            op, num_steps=100, reorthogonalize="partial"
        ),
        "lanczos, 100 steps, none": lambda: ritz.lanczos(op, num_steps=100, reorthogonalize="none"),
        "trace_function, block of 8": lambda: ritz.trace_function(
            op, torch.log, num_steps=30, num_probes=8, block_size=8
        ),
        "trace_function, block of 8, full": lambda: ritz.trace_function(
            op, torch.log, num_steps=30, num_probes=8, block_size=8, reorthogonalize="full"
        ),
        "density, 1 probe, 30 steps": lambda: ritz.density(op, num_probes=1, num_steps=30),
        "solve, 8 systems": lambda: ritz.solve(op, right),
    }[name]


def kilobytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def measure(name, n):
    """In the child process: print the increase of the peak memory in bytes."""
    ritz.lanczos(torch.diag(torch.arange(1.0, 50.0)), num_steps=10)  # warm-up: libraries are loaded
    run = job(name, n)
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    result = run()
    print(json.dumps(1024 * (kilobytes("VmHWM") - before)))
    del result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="run this case in this process")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all orders")
    options = parser.parse_args()
    if options.case:
        measure(options.case, int(options.scale * CASES[options.case][0]))
        return
    found = []
    for name, (order, stated, target) in CASES.items():
        n = int(options.scale * order)
        command = [sys.executable, __file__, "--case", name, "--scale", str(options.scale)]
        done = subprocess.run(command, capture_output=True, text=True)
        peak = json.loads(done.stdout) if done.returncode == 0 else None
        if done.returncode:
            print(name, done.stderr.strip().splitlines()[-1], flush=True)
        found.append(
            {
                "case": name,
                "n": n,
                "GB": "failed" if peak is None else peak / 1e9,
                "vectors": "" if peak is None else peak / (4 * n),
                "stated": stated,
                "target": f"<= {target} GB" if target else "",
            }
        )
    write("memory", found)


if __name__ == "__main__":
    main()
