"""Shared by all benchmarks: interleaved medians, machine and versions, tables and JSON."""

import datetime
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Small forms of the benchmarks write to another folder.
RESULTS = Path(os.environ.get("RITZ_BENCHMARK_RESULTS", Path(__file__).parent / "results"))
LIBRARIES = (
    "torch",
    "numpy",
    "scipy",
    "numba",
    "imate",
    "scikit-primate",
    "curvlinops-for-pytorch",
    "backpack-for-pytorch",
    "hessian-eigenthings",
    "pyhessian",
    "kfac-pytorch",
    "singd",
    "asdfghjkl",
)


def interleaved(
    jobs: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 5,
    warm_up: bool = True,
    before: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    limit: float = math.inf,
) -> dict[str, list[float]]:
    """Return the seconds of each job in each round. All jobs run once per round, in turn.

    No round begins after ``limit`` seconds, except the first.

    Each job runs ``before`` times untimed just before it is timed, so that its data are cached
    as in a loop of this job alone. ``time.process_time`` as the ``clock`` leaves out the time that
    other programs take on a shared CPU.
    """
    if warm_up:
        for job in jobs.values():
            job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    began = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - began > limit:
            break
        for name, job in jobs.items():
            for _ in range(before):
                job()
            begin = clock()
            job()
            seconds[name].append(clock() - begin)
    return seconds


def working(
    makers: Mapping[str, Callable[[], Callable[[], object]]], *, limit: float = math.inf
) -> dict[str, Callable[[], object]]:
    """Return the jobs that could be made and run once; name the others and say why.

    A job that fails does not lose the others, and none is begun after ``limit`` seconds.
    """
    began, jobs = time.perf_counter(), {}
    for name, make in makers.items():
        if time.perf_counter() - began > limit:
            print(f"{name} is left out: no time", flush=True)
            continue
        try:
            job = make()
            job()
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            print(f"{name} does not run here: {type(error).__name__}: {reason[0]:.120}", flush=True)
        else:
            jobs[name] = job
    return jobs


def median(seconds: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(seconds)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two jobs in the same round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def machine() -> dict[str, Any]:
    """Return date, processor and versions."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    models = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    device = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
    } | device


def write(script: str, results: Sequence[Mapping[str, Any]], *, shown: int | None = None) -> None:
    """Print rows as a table, and write them with the machine to ``results/<script>.json``.

    With ``shown``, only so many of the last rows are printed, for results written as they come.
    """
    print(table(results if shown is None else results[-shown:]), flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{Path(script).stem}.json"
    path.write_text(json.dumps({"machine": machine(), "results": list(results)}, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with equal keys as aligned text."""
    heads = list(rows[0])
    cells = [heads, *([_text(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    lines = (zip(line, widths, strict=True) for line in cells)
    return "\n".join("  ".join(cell.rjust(width) for cell, width in line) for line in lines)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(machine() | {"threads": torch.get_num_threads()}, indent=1))
