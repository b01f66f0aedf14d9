"""Run all benchmarks one after the other, or with ``--small`` a small form of each.

A small form takes seconds, shows that a script runs, and writes its results to a temporary folder.
One failure does not stop the others. The scripts that failed are listed at the end.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent

# Arguments of the small forms. Scripts that are not here print how they are used; drawing.py is
# left out, as it draws the pictures of the documentation.
SMALL = {
    "advice": "--seeds 1 --samples 70 --size 8 --repeats 1 --out {out}/advice.json",
    "cuda": "--device cpu --small --seconds 120 --only noise-mlp optimizers",
    "blocks": "--rounds 1 --n 20000",
    "determinants": "--size 200 --seeds 1 --lengthscales .25 --rows 10000 --rounds 1",
    "edge_lists": "--edges 100000",
    "extreme_pairs": "--n 4000 --rounds 1",
    "functions": "--n 5000 --num-reference 32 --rounds 1",
    "gpu": "",
    "graphs": "--n 5000 --rounds 1",
    "kernels": "--n 300 --num-products 60 --cases 1",
    "kfac_steps": "--rounds 1 --networks mlp",
    "loops": "--n 5000 --rounds 1",
    "maxent": "--rounds 1 --rounds-many 1 --count 10",
    "models": "--models GRU --rounds 1",
    "multiplicity": "--scale 1 --rounds 1",
    "noise": "--networks mlp --batch 256 --rounds 2",
    "optimizers": "--steps 2 --rounds 1",
    "partial": "--n 2000 --rounds 1",
    "products": "--networks mlp --rounds 1",
    "ptb": "--epochs 1 --width 20 --steps-per-epoch 2",
    "random_matrices": "--sizes 100 --dry",
    "reorthogonalization": "--n 5000 --rounds 1",
    "second_order": "--rounds 1",
    "spectra": "",
    "steps": "--rounds 1 --steps 20",
    "timing": "",
    "training": "--rounds 1",
}


def scripts():
    """Return the names of the scripts, without this one."""
    names = [path.stem for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)]
    return [name for name in names if "__main__" in (FOLDER / f"{name}.py").read_text()]


def run(name, small, out):
    """Run a script; return its exit status and seconds."""
    arguments = SMALL.get(name, "--help").format(out=out).split() if small else []
    folder = {"RITZ_BENCHMARK_RESULTS": out} if small else {}
    print(f"== {name} {' '.join(arguments)}", flush=True)
    begin = time.perf_counter()
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    status = subprocess.run(command, env=os.environ | folder).returncode
    return status, time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small forms; results are discarded")
    parser.add_argument("--only", nargs="+", choices=scripts(), help="names of scripts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        names = args.only or [name for name in scripts() if not args.small or name != "drawing"]
        done = {name: run(name, args.small, out) for name in names}
    for name, (status, seconds) in done.items():
        print(f"{name:22} {seconds:8.1f} s  {'failed' if status else ''}")
    sys.exit(any(status for status, _ in done.values()))


if __name__ == "__main__":
    main()
