"""Run all benchmarks one after the other, or with ``--small`` a small form of each.

The expected minutes are printed first. Each script is stopped after three times its own, and none
begins that does not fit into ``--minutes``. The durations are written to
``results/everything.json`` after every script. One failure does not stop the others; what failed or
was left out is listed at the end.

A small form takes seconds, shows that a script runs, and writes its results to a temporary folder.
"""

import argparse
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import table, write

FOLDER = Path(__file__).parent
NO_DATA = "" if os.environ.get("RITZ_DATA") else "it needs RITZ_DATA, the folder of data sets"
CUDA = "" if torch.cuda.is_available() else "it needs a CUDA device"


@dataclass(frozen=True)
class Script:
    """How one script is run.

    Attributes:
        minutes: Expected duration of the full form, on two quiet cores.
        small: Arguments of the small form.
        full: Arguments of the full form, if the defaults take too long.
        missing: Why the full form is left out here.
        data: Whether both forms read a data set.
    """

    minutes: float
    small: str
    full: str = ""
    missing: str = ""
    data: bool = False


# In the order in which they run: what other scripts, or the documentation, quote most comes first.
SCRIPTS = {
    "models": Script(4, "--models GRU --rounds 1", full="--rounds 3"),
    "products": Script(1.5, "--networks mlp --rounds 1"),
    "steps": Script(1.5, "--rounds 1 --steps 20"),
    "optimizers": Script(1, "--steps 2 --rounds 1", full="--steps 25"),
    "kfac_steps": Script(2.5, "--rounds 1 --networks mlp", full="--rounds 3"),
    "second_order": Script(1, "--rounds 1"),
    "noise": Script(2, "--networks mlp --batch 256 --rounds 2", full="--rounds 5 --seconds 40"),
    "monitors": Script(1, "--samples 2000 --watched 500 --every 1 --rounds 1"),
    "training": Script(1, "--rounds 1"),
    "functions": Script(2.5, "--n 5000 --num-reference 32 --rounds 1",
                        full="--num-reference 100 --rounds 2"),
    "extreme_pairs": Script(2, "--n 4000 --rounds 1", full="--max-vectors 0 --ncv 0 --rounds 2"),
    "multiplicity": Script(1, "--rounds 1"),
    "determinants": Script(1.5, "--size 200 --seeds 1 --lengthscales .25 --rows 10000 --rounds 1",
                           full="--seeds 1"),
    "graphs": Script(3, "--n 5000 --largest 100000 --rounds 1", full="--rounds 3"),
    "memory": Script(2, "--scale .01"),
    "reorthogonalization": Script(1.5, "--n 5000 --rounds 1", full="--rounds 2"),
    "partial": Script(1, "--n 2000 --rounds 1", full="--n 50000 --rounds 2"),
    "blocks": Script(1, "--rounds 1 --n 20000", full="--rounds 3"),
    "maxent": Script(0.5, "--rounds 1 --rounds-many 1 --count 10"),
    "loops": Script(1, "--n 5000 --rounds 1"),
    "edge_lists": Script(1, "--edges 100000", full="--edges 5000000"),
    "random_matrices": Script(1.5, "--sizes 100 --dry", full="--sizes 500 1000 2000"),
    "kernels": Script(2, "--n 300 --num-products 60 --cases 1", full="--n 10000 --cases 1"),
    "advice": Script(5, "--seeds 1 --samples 70 --size 8 --repeats 1"),
    "cuda": Script(10, "--device cpu --small --seconds 120 --only noise-mlp optimizers",
                   missing=CUDA),
    "gpu": Script(1, "", missing=CUDA),
    "spectra": Script(20, "", missing="it needs a network, data and a CUDA device; see --help"),
    "ptb": Script(5, "--epochs 1 --width 20 --steps-per-epoch 2", full="--device cuda",
                  missing=CUDA and f"{CUDA}, or two hours: python benchmarks/ptb.py", data=True),
    "versions": Script(5, "--help", missing="it needs --old, a checkout to compare with"),
}  # fmt: skip


def run(name, small, out, left):
    """Run a script in the minutes that are left; return a row with its status and duration."""
    script = SCRIPTS[name]
    arguments = script.small if small else script.full
    print(f"\n== {name} {arguments}".rstrip(), flush=True)
    folder = {"RITZ_BENCHMARK_RESULTS": out} if small else {}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments.split()]
    begin, before = time.perf_counter(), processor_time()
    limit = 60 * min(20 if small else 3 * script.minutes, left)
    # In a session of its own: a script that is stopped takes its processes with it.
    process = subprocess.Popen(command, env=os.environ | folder, start_new_session=True)
    try:
        status = "failed" if process.wait(limit) else ""
    except subprocess.TimeoutExpired:
        status = f"stopped after {limit / 60:.1f} minutes"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {
        "script": name,
        "arguments": arguments,
        "expected minutes": script.minutes,
        "minutes": (time.perf_counter() - begin) / 60,
        "processor minutes": (processor_time() - before) / 60,
        "status": status,
    }


def processor_time():
    """Return the processor seconds of all scripts that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small forms; results are discarded")
    parser.add_argument("--minutes", type=float, default=45, help="for all full forms together")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, help="names of scripts")
    args = parser.parse_args()
    names, left_out = [], []
    for name in args.only or SCRIPTS:
        script = SCRIPTS[name]
        reason = NO_DATA if script.data and NO_DATA else "" if args.small else script.missing
        if reason:
            left_out.append(f"left out: {name}: {reason}")
        else:
            names.append(name)
    minutes = sum(SCRIPTS[name].minutes for name in names)
    expected = "a few" if args.small else f"about {minutes:.0f}"
    print("\n".join([*left_out, f"{len(names)} scripts, {expected} minutes on two quiet cores"]))
    rows, begin = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        for name in names:
            left = args.minutes - (time.perf_counter() - begin) / 60
            if not args.small and left < SCRIPTS[name].minutes:
                left_out.append(f"left out: {name}: {left:.0f} of {args.minutes:g} minutes left")
                continue
            rows.append(run(name, args.small, out, math.inf if args.small else left))
            if not args.small:
                write(__file__, rows, shown=1)
    print("\n" + "\n".join([table(rows), *left_out]))
    sys.exit(any(row["status"] for row in rows))


if __name__ == "__main__":
    main()
