"""How often intervals hold the truth: matrices with known spectra, every estimator with a bar.

``test_intervals.py`` runs a small part. ``make intervals`` runs all of it and writes the table of
``docs/intervals.md``.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import torch
from scipy.linalg import hilbert
from torch import Tensor

import ritz
from ritz import Estimate, spectra

# ------------------------------------------------------------------------------------------
# Matrices. Each is dense and float64; eigenvectors are random unless the name says otherwise.


def rotated(eigenvalues: Any, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    values = torch.as_tensor(np.asarray(eigenvalues), dtype=torch.float64)
    noise = torch.randn(
        len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    basis = torch.linalg.qr(noise).Q
    matrix = (basis * values) @ basis.T
    return (matrix + matrix.T) / 2


def kernel(n: int, noise: float, length: float = 0.3) -> Tensor:
    """A squared-exponential kernel of points in the unit square."""
    points = torch.rand(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    squared = torch.cdist(points, points).square()
    return torch.exp(-squared / (2 * length**2)) + noise * torch.eye(n, dtype=torch.float64)


def laplacian(n: int, degree: float, *, normalized: bool) -> Tensor:
    """The Laplacian of a random graph."""
    draws = torch.rand(n, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    edges = (draws < degree / n).double().triu(1)
    adjacency = edges + edges.T
    degrees = adjacency.sum(1)
    if not normalized:
        return torch.diag(degrees) - adjacency
    scale = degrees.clamp_min(1).rsqrt()
    return torch.diag((degrees > 0).double()) - scale[:, None] * adjacency * scale


def poisson(side: int, shift: float) -> Tensor:
    """The five-point Laplacian of a square grid, whose eigenvalues repeat."""
    line = 2 * torch.eye(side, dtype=torch.float64)
    line -= torch.diag(torch.ones(side - 1, dtype=torch.float64), 1)
    line -= torch.diag(torch.ones(side - 1, dtype=torch.float64), -1)
    eye = torch.eye(side, dtype=torch.float64)
    return torch.kron(line, eye) + torch.kron(eye, line) + shift * torch.eye(side * side).double()


def pairs(n: int, size: float) -> Tensor:
    """The identity with one large entry off the diagonal: samples take two values."""
    matrix = torch.eye(n, dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = size
    return matrix


def wishart(n: int, samples: int, shift: float = 0.0) -> Tensor:
    draws = torch.randn(n, samples, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return draws @ draws.T / samples + shift * torch.eye(n, dtype=torch.float64)


def wigner(n: int, *spikes: float) -> Tensor:
    draws = torch.randn(n, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    matrix = (draws + draws.T) / math.sqrt(2 * n)
    for i, spike in enumerate(spikes):
        matrix[i, i] += spike
    return matrix


@dataclass(frozen=True)
class Matrix:
    """A named matrix: whether it is positive definite, and whether it is easy."""

    build: Callable[[], Tensor]
    positive: bool = True
    easy: bool = False


MATRICES = {
    "two rows": Matrix(lambda: torch.diag(torch.tensor([1.0, 2.0]).double()), easy=True),
    "three rows": Matrix(lambda: rotated([1.0, 2.0, 4.0]), easy=True),
    "seven rows": Matrix(lambda: rotated(np.linspace(0.5, 3, 7)), easy=True),
    "identity": Matrix(lambda: 3 * torch.eye(50, dtype=torch.float64), easy=True),
    "diagonal": Matrix(lambda: torch.diag(torch.linspace(1, 5, 100).double()), easy=True),
    "uniform": Matrix(lambda: rotated(np.linspace(1, 2, 300)), easy=True),
    "condition 30": Matrix(lambda: rotated(np.geomspace(0.1, 3, 200)), easy=True),
    "clusters": Matrix(lambda: rotated(np.repeat([1.0, 2.0, 5.0], [150, 100, 50])), easy=True),
    "repeated": Matrix(lambda: rotated(np.repeat([0.5, 1.0, 1.5, 4.0, 8.0], 40)), easy=True),
    "Wishart": Matrix(lambda: wishart(400, 1200), easy=True),
    "Wishart, 1000 rows": Matrix(lambda: wishart(1000, 4000), easy=True),
    "Poisson, shifted": Matrix(lambda: poisson(14, 0.5), easy=True),
    "condition 1e4": Matrix(lambda: rotated(np.geomspace(1e-3, 10, 300))),
    "condition 1e8": Matrix(lambda: rotated(np.geomspace(1e-6, 1e2, 500))),
    "Poisson": Matrix(lambda: poisson(20, 0.0)),
    "rank 6 plus noise": Matrix(lambda: _low_rank(300, 6, 1e-3)),
    "one outlier": Matrix(lambda: rotated(np.r_[np.linspace(0.9, 1.1, 299), 500.0])),
    "powers": Matrix(lambda: rotated(1.0 / np.arange(1, 401) ** 2 + 1e-6)),
    "exponential": Matrix(lambda: rotated(0.8 ** np.arange(200) + 1e-8)),
    "kernel, noise 1e-2": Matrix(lambda: kernel(300, 1e-2)),
    "kernel, noise 1e-9": Matrix(lambda: kernel(200, 1e-9)),
    "Hilbert": Matrix(lambda: torch.from_numpy(hilbert(6)).double()),
    "one entry off the diagonal": Matrix(lambda: pairs(60, 20.0), positive=False),
    "rank 10": Matrix(lambda: _low_rank(200, 10, 0.0), positive=False),
    "Laplacian": Matrix(lambda: laplacian(300, 8, normalized=False), positive=False),
    "normalized Laplacian": Matrix(lambda: laplacian(300, 6, normalized=True), positive=False),
    "Wigner": Matrix(lambda: wigner(400), positive=False, easy=True),
    "spiked Wigner": Matrix(lambda: wigner(300, 10.0, -6.0), positive=False),
    "indefinite": Matrix(lambda: rotated(np.linspace(-1, 3, 150)), positive=False, easy=True),
}


def _low_rank(n: int, rank: int, shift: float) -> Tensor:
    draws = torch.randn(n, rank, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return draws @ draws.T + shift * torch.eye(n, dtype=torch.float64)


@cache
def built(name: str) -> tuple[Tensor, Tensor]:
    """A matrix and its eigenvalues."""
    matrix = MATRICES[name].build()
    if len(matrix) > 10:
        return matrix, torch.linalg.eigvalsh(matrix)
    # Roundoff in the truth of a few rows would exceed that of the estimate.
    with mpmath.workdps(40):
        values = mpmath.eigsy(mpmath.matrix(matrix.tolist()), eigvals_only=True)
        return matrix, torch.tensor([float(value) for value in values], dtype=torch.float64)


def products_only(matrix: Tensor) -> ritz.operators.FunctionOperator:
    """The matrix behind its products: no structure to take an exact answer from."""
    return ritz.operators.FunctionOperator(
        lambda block: matrix @ block, n=len(matrix), dtype=matrix.dtype
    )


# ------------------------------------------------------------------------------------------
# Estimators. Each takes an operator and a generator; its truth follows from the eigenvalues.


@dataclass(frozen=True)
class Estimator:
    """A call and its truth.

    Attributes:
        run: From operator, generator and further keywords to an estimate.
        truth: From matrix and eigenvalues to what it estimates.
        needs: ``positive`` where the matrix must be positive definite.
        rtol: Relative error for the runs with a tolerance; ``None`` without such runs.
    """

    run: Callable[..., Any]
    truth: Callable[[Tensor, Tensor], Tensor]
    needs: str = ""
    rtol: float | None = 0.05


def _sum(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda matrix, values: function(values).sum()


def _traces(method: str, **settings: Any) -> Estimator:
    def run(op: Any, generator: Any, **more: Any) -> Any:
        return ritz.trace(op, method=method, num_probes=16, generator=generator, **settings, **more)

    return Estimator(run, lambda matrix, values: matrix.trace())


def _functions(
    function: Callable[[Tensor], Tensor], method: str, needs: str = "", **settings: Any
) -> Estimator:
    def run(op: Any, generator: Any, **more: Any) -> Any:
        # A block Krylov space spends a fixed number of products, and needs more for a tolerance.
        steps, probes = (20, 32) if more and method == "krylov" else (12, 16)
        return ritz.trace_function(
            op,
            function,
            num_steps=min(steps, op.shape[0]),
            num_probes=probes,
            method=method,
            generator=generator,
            **settings,
            **more,
        )

    return Estimator(run, _sum(function), needs)


def _logdets(method: str) -> Estimator:
    def run(op: Any, generator: Any, **more: Any) -> Any:
        products = 1500 if more else 150  # the default where a tolerance is to be reached
        return ritz.logdet(op, method=method, num_products=products, generator=generator, **more)

    return Estimator(run, _sum(torch.log), "positive")


def _moments(op: Any, generator: Any, **more: Any) -> Any:
    high = float(ritz.spectral_norm(op)) * 1.01
    result = spectra.moments(
        op, num_moments=6, num_probes=16, interval=(-high, high), generator=generator, **more
    )
    return Estimate.of(
        result.samples,
        method="moments",
        num_products=result.num_products,
        truncation=1e-14,
        status=result.status,
    )


def _moment_truth(matrix: Tensor, values: Tensor) -> Tensor:
    high = float(ritz.spectral_norm(products_only(matrix))) * 1.01
    angles = torch.arccos((values / high).clamp(-1, 1))
    return torch.stack([torch.cos(k * angles).mean() for k in range(7)])


def _likelihood(op: Any, generator: Any) -> Any:
    y = torch.cos(torch.arange(op.shape[0]).double())
    return spectra.log_likelihood(
        op, y, method="lanczos", num_products=150, num_probes=8, generator=generator
    )


def _likelihood_truth(matrix: Tensor, values: Tensor) -> Tensor:
    y = torch.cos(torch.arange(len(matrix)).double())
    form = y @ torch.linalg.solve(matrix, y)
    return -0.5 * (form + values.log().sum() + len(y) * math.log(2 * math.pi))


ESTIMATORS = {
    "trace, XTrace": _traces("xtrace"),
    "trace, Hutchinson": _traces("hutchinson"),
    "trace, Hutch++": _traces("hutch++"),
    "trace, Hutch++, Gaussian": _traces("hutch++", probe="gaussian"),
    "diagonal": Estimator(
        lambda op, generator, **more: ritz.diagonal(
            op, method="probes", num_probes=32, generator=generator, **more
        ),
        lambda matrix, values: matrix.diagonal(),
        rtol=0.2,
    ),
    "Frobenius norm": Estimator(
        lambda op, generator, **more: ritz.spectra.frobenius_norm(
            op, num_probes=32, generator=generator, **more
        ),
        lambda matrix, values: values.square().sum().sqrt(),
    ),
    "moments": Estimator(_moments, _moment_truth),
    "tr exp(A), Lanczos": _functions(torch.exp, "lanczos"),
    "tr log(A), Lanczos": _functions(torch.log, "lanczos", "positive"),
    "tr 1/A, Lanczos": _functions(torch.reciprocal, "lanczos", "positive"),
    "tr sqrt(A), Lanczos": _functions(torch.sqrt, "lanczos", "positive"),
    "tr -A log A, Lanczos": _functions(torch.special.entr, "lanczos", "positive"),
    "tr 1/A, block Krylov": _functions(torch.reciprocal, "krylov", "positive"),
    "tr exp(A), Chebyshev": _functions(torch.exp, "chebyshev"),
    "tr exp(A), maximum entropy": _functions(torch.exp, "maxent"),
    "log det, Lanczos": _logdets("lanczos"),
    "log det, block Krylov": _logdets("krylov"),
    "log det, auto": _logdets("auto"),
    "log likelihood": Estimator(_likelihood, _likelihood_truth, "positive", rtol=None),
    "spectral norm": Estimator(
        lambda op, generator, **more: ritz.spectral_norm(op, generator=generator, **more),
        lambda matrix, values: values.abs().max(),
        rtol=1e-3,
    ),
}


# ------------------------------------------------------------------------------------------
# Runs.


@dataclass
class Cell:
    """What many seeds of one estimator on one matrix gave."""

    runs: int = 0
    held: dict[float, float] = field(default_factory=lambda: {0.95: 0.0, 0.999: 0.0})
    errors: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    refused: str = ""

    def coverage(self, level: float) -> float:
        return self.held[level] / max(1, self.runs)

    def converged(self) -> float:
        good = sum(self.outcomes.get(name, 0) for name in ("converged", "completed", "breakdown"))
        return good / max(1, self.runs)

    def relative_width(self) -> float:
        """Half-width over twice the root mean square error, where only sampling matters."""
        rms = math.sqrt(statistics.fmean(e * e for e in self.errors)) if self.errors else 0.0
        if not rms or not all(self.sampled):
            return math.nan
        return statistics.median(self.widths) / (2 * rms)


def measure(
    matrix: str, estimator: str, *, rtol: bool, seeds: int, seconds: float = math.inf
) -> Cell:
    """Run an estimator on a matrix with many seeds; stop early where it takes too long."""
    cell, (dense, values), call = Cell(), built(matrix), ESTIMATORS[estimator]
    op, truth = products_only(dense), call.truth(dense, values)
    more: dict[str, Any] = {"rtol": call.rtol} if rtol else {}
    if rtol and estimator.startswith("tr "):
        more["max_probes"] = 320  # runs on hard matrices would take most of the time
    begin = time.perf_counter()
    for seed in range(seeds):
        if seed >= 20 and time.perf_counter() - begin > seconds:
            break
        try:
            estimate = call.run(op, torch.Generator().manual_seed(seed), **more)
        except ValueError as error:
            cell.refused = str(error)
            break
        _record(cell, estimate, truth)
    cell.seconds = time.perf_counter() - begin
    return cell


def _record(cell: Cell, estimate: Any, truth: Tensor) -> None:
    cell.runs += 1
    for level in cell.held:
        low, high = estimate.interval(level)
        cell.held[level] += float(((low <= truth) & (truth <= high)).double().mean())
    low, high = estimate.interval(0.95)
    cell.errors.append(float((estimate.mean - truth).square().mean().sqrt()))
    cell.widths.append(float(((high - low) / 2).square().mean().sqrt()))
    fixed = getattr(estimate, "truncation", None)
    fixed = 0.0 if fixed is None else float(fixed.abs().max())
    cell.sampled.append(0.1 * float(estimate.stderr.abs().max()) > fixed)
    outcome = estimate.status.outcome
    cell.outcomes[outcome] = cell.outcomes.get(outcome, 0) + 1


# ------------------------------------------------------------------------------------------
# All of it, and the table.

ROOT = Path(__file__).parent.parent
# A run of up to 0.2 s is repeated with 200 seeds.
SEEDS, SECONDS = 200, 40.0

Key = tuple[str, str, bool]


def cells() -> list[Key]:
    """Every matrix with every estimator that takes it, without and with a tolerance."""
    return [
        (matrix, name, rtol)
        for name, estimator in ESTIMATORS.items()
        for matrix, spec in MATRICES.items()
        if spec.positive or estimator.needs != "positive"
        for rtol in (False, True)
        if not rtol or estimator.rtol is not None
    ]


def run(key: Key, seeds: int) -> tuple[Key, Cell]:
    torch.set_num_threads(1)
    matrix, estimator, rtol = key
    seconds = SECONDS * seeds / SEEDS
    return key, measure(matrix, estimator, rtol=rtol, seeds=seeds, seconds=seconds)


def summary(results: dict[Key, Cell]) -> list[dict[str, Any]]:
    """One row per estimator and kind of run."""
    rows = []
    for name in dict.fromkeys(estimator for _, estimator, _ in results):
        for rtol in (False, True):
            here = {
                matrix: cell
                for (matrix, estimator, kind), cell in results.items()
                if estimator == name and kind == rtol and cell.runs
            }
            if not here:
                continue
            total = sum(cell.runs for cell in here.values())
            worst = min(here, key=lambda matrix: here[matrix].coverage(0.95))
            widths = [w for cell in here.values() if not math.isnan(w := cell.relative_width())]
            easy = [here[matrix] for matrix in here if MATRICES[matrix].easy]
            rows.append(
                {
                    "estimator": name,
                    "rtol": ESTIMATORS[name].rtol if rtol else None,
                    "matrices": len(here),
                    "runs": total,
                    "held 95 %": sum(cell.held[0.95] for cell in here.values()) / total,
                    "held 99.9 %": sum(cell.held[0.999] for cell in here.values()) / total,
                    "worst": worst,
                    "worst 95 %": here[worst].coverage(0.95),
                    "width": statistics.median(widths) if widths else None,
                    "converged": sum(c.converged() * c.runs for c in easy)
                    / sum(c.runs for c in easy),
                    "seconds": sum(cell.seconds for cell in here.values()),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| estimator | rtol | runs | 95 % held | 99.9 % held | lowest matrix | width | converged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        rtol = "" if row["rtol"] is None else f"{row['rtol']:g}"
        width = "" if row["width"] is None else f"{row['width']:.2f}"
        converged = f"{row['converged']:.3f}" if rtol else ""
        lines.append(
            f"| {row['estimator']} | {rtol} | {row['runs']:,} | {row['held 95 %']:.3f} "
            f"| {row['held 99.9 %']:.4f} | {row['worst 95 %']:.3f} ({row['worst']}) "
            f"| {width} | {converged} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="part of the name of an estimator")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "intervals.json")
    options = parser.parse_args()
    keys = [key for key in cells() if options.only in key[1]]
    with ProcessPoolExecutor(options.workers) as pool:
        results = dict(pool.map(partial(run, seeds=options.seeds), keys))
    for (matrix, name, rtol), cell in results.items():
        if cell.runs and cell.coverage(0.95) < 0.9:
            print(f"low: {name}, {matrix}, rtol {rtol}: {cell.coverage(0.95):.3f} of {cell.runs}")
    rows = summary(results)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
