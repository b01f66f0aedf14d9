"""How often intervals hold the truth: matrices with known spectra, every estimator with a bar.

``test_intervals.py`` runs a small part. ``make intervals`` runs all of it and writes the table of
``docs/intervals.md``.
"""

import argparse
import copy
import json
import math
import statistics
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from families import TABLES, built, products_only
from torch import Tensor

import ritz
from ritz import Estimate, graphs, spectra
from ritz.curvature import Risk, hessian
from ritz.measures import curvature_variance, gradient_noise, rank_degeneracy, shrinkage

# ------------------------------------------------------------------------------------------
# Estimators. Each takes an operator and a generator; its truth follows from the eigenvalues.


@dataclass(frozen=True)
class Estimator:
    """A call and its truth.

    Attributes:
        run: From operator (graph, risk), generator and further keywords to an estimate, or to an
            estimate and the truth where that depends on the result.
        truth: From matrix and eigenvalues to what it estimates.
        needs: ``positive`` where the matrix must be positive definite.
        rtol: Relative error for the runs with a tolerance; ``None`` without such runs.
        kind: The table with its inputs.
        seeds: Seeds, if fewer than usual since a run takes long.
    """

    run: Callable[..., Any]
    truth: Callable[[Any, Tensor], Any]
    needs: str = ""
    rtol: float | None = 0.05
    kind: str = "matrices"
    seeds: int = 10**6


def _sum(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda matrix, values: function(values).sum()


def _traces(method: str, **settings: Any) -> Estimator:
    def run(op: Any, generator: Any, **more: Any) -> Any:
        return ritz.trace(op, method=method, num_probes=16, generator=generator, **settings, **more)

    # torch.trace adds one after the other, with more roundoff than the estimates.
    return Estimator(run, lambda matrix, values: math.fsum(matrix.diagonal().tolist()))


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
        op, y, method="lanczos", num_products=200, num_probes=16, generator=generator
    )


def _likelihood_truth(matrix: Tensor, values: Tensor) -> Tensor:
    y = torch.cos(torch.arange(len(matrix)).double())
    form = y @ torch.linalg.solve(matrix, y)
    return -0.5 * (form + values.log().sum() + len(y) * math.log(2 * math.pi))


def _together(estimates: list[Estimate]) -> Estimate:
    """Several estimates as one of a vector."""

    def stacked(name: str, dim: int = 0) -> Tensor:
        return torch.stack([getattr(estimate, name) for estimate in estimates], dim)

    return Estimate(
        mean=stacked("mean"),
        stderr=stacked("stderr"),
        truncation=stacked("truncation"),
        samples=stacked("samples", 1),
        degrees=estimates[0].degrees,
        num_products=estimates[0].num_products,
        method=estimates[0].method,
        status=estimates[0].status,
    )


def _gradient(op: Any, generator: Any) -> Any:
    slopes = spectra.logdet_gradient(
        op, method="lanczos", num_probes=16, rank=10, generator=generator
    )
    return _together(list(slopes.values()))


def _gradient_truth(op: Any, values: Tensor) -> Tensor:
    exact = spectra.logdet_gradient(op, method="cholesky")
    return torch.stack([exact[name].mean for name in op.parameters])


def _slope(op: Any, generator: Any) -> Any:
    y = torch.cos(torch.arange(op.shape[0]).double()).requires_grad_()
    value = spectra.log_likelihood(
        op, y, method="lanczos", num_products=100, num_probes=4, rank=10, generator=generator
    )
    value.mean.backward()
    return spectra.backward_gradient(value)["y"]


def _slope_truth(op: Any, values: Tensor) -> Tensor:
    y = torch.cos(torch.arange(op.shape[0]).double())
    return -torch.linalg.solve(op.dense(), y)


TIMES = torch.logspace(-1, 1.5, 8, dtype=torch.float64)


def _heat(graph: Any, generator: Any) -> Any:
    measured = graphs.moments(
        graph, num_moments=60, num_probes=16, exact=False, generator=generator
    )
    return graphs.heat_trace(measured, times=TIMES)


def _heat_truth(graph: Any, values: Tensor) -> Tensor:
    laplacian = graphs.laplacian(graph).dense().double()
    return torch.exp(-TIMES[:, None] * torch.linalg.eigvalsh(laplacian)).mean(1)


def _entropy(graph: Any, generator: Any) -> Any:
    return graphs.entropy(graph, num_moments=8, num_probes=32, exact=False, generator=generator)


def _entropy_truth(graph: Any, values: Tensor) -> Tensor:
    return graphs.entropy(graph, num_moments=8, exact=True).mean


def _mass(steps: int, op: Any, generator: Any) -> Any:
    steps = min(steps, op.shape[0])
    runs = spectra.lanczos_block(op, num_steps=steps, num_probes=12, generator=generator)
    found = rank_degeneracy(runs, matrix="hessian")
    low, high = found.interval
    values = OP_VALUES[op]
    return found.mass, ((values >= low) & (values <= high)).double().mean()


# The eigenvalues of an operator, for a truth that depends on the result.
OP_VALUES: dict[Any, Tensor] = {}


def _variance(risk: Any, generator: Any) -> Any:
    return curvature_variance(risk, num_probes=16, generator=generator)


@cache
def _samples(risk: Risk) -> tuple[Tensor, Tensor]:
    """The Hessians and gradients of all samples, in float64."""
    model = copy.deepcopy(risk.model).double()
    _, context, _ = next(iter(risk.contexts()))  # the only batch
    each = [
        Risk(model, risk.loss_fn, (x[None].double(), y[None]), batch_size=1)
        for x, y in zip(*context.batch, strict=True)
    ]
    matrices = [hessian(one, engine="eager").dense() for one in each]
    return torch.stack(matrices), torch.stack([one.gradient() for one in each])


def _variance_truth(risk: Any, values: Tensor) -> Tensor:
    matrices, _ = _samples(risk)
    # P sigma^2 = mean_i |H_i - H|_F^2 / P for random unit vectors
    return (matrices - matrices.mean(0)).square().sum((1, 2)).mean() / len(matrices[0])


def _noise_scale(name: str, group_size: int | None) -> Estimator:
    """One quantity of the noise of gradients, of single samples or of groups."""

    def run(risk: Any, generator: Any) -> Any:
        size = 1 if risk.num_samples < 9 else group_size
        return getattr(gradient_noise(risk, group_size=size, generator=generator), name)

    def truth(risk: Any, values: Tensor) -> Tensor:
        matrices, gradients = _samples(risk)
        gradient = gradients.mean(0)
        covariance = torch.cov(gradients.T, correction=0)
        square, variance = gradient @ gradient, covariance.trace()
        return {"gradient_square": square, "variance": variance, "simple": variance / square}.get(
            name, gradient @ matrices.mean(0) @ gradient / square
        )

    return Estimator(run, truth, rtol=None, kind="trained", seeds=100 if group_size else 3)


def _shrunk(risk: Any, generator: Any) -> Any:
    return shrinkage(risk, batch_sizes=(1, 4), num_probes=16, generator=generator).beta


def _shrunk_truth(risk: Any, values: Tensor) -> Tensor:
    matrices, _ = _samples(risk)
    matrix, size, count = matrices.mean(0), len(matrices[0]), len(matrices)
    signal = (matrix - matrix.trace() / size * torch.eye(size)).square().sum()
    share = torch.tensor([(1 / b - 1 / count) * count / (count - 1) for b in (1, 4)]).double()
    return signal / (signal + size * share * _variance_truth(risk, values))


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
    "diagonal, Gaussian": Estimator(
        lambda op, generator, **more: ritz.diagonal(
            op, method="probes", num_probes=8, probe="gaussian", generator=generator, **more
        ),
        lambda matrix, values: matrix.diagonal(),
        rtol=None,
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
    "eigenvalues above 1.5, Lanczos": replace(_functions(lambda x: x > 1.5, "lanczos"), rtol=None),
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
    "log det gradient": Estimator(_gradient, _gradient_truth, rtol=None, kind="kernels"),
    "log likelihood gradient": Estimator(_slope, _slope_truth, rtol=None, kind="kernels", seeds=3),
    "heat trace of a graph": Estimator(_heat, _heat_truth, rtol=None, kind="graphs"),
    "entropy of a graph": Estimator(_entropy, _entropy_truth, rtol=None, kind="graphs"),
    "mass at the origin, 12 steps": Estimator(partial(_mass, 12), lambda *_: None, rtol=None),
    "mass at the origin, 30 steps": Estimator(partial(_mass, 30), lambda *_: None, rtol=None),
    "curvature variance": Estimator(
        _variance, _variance_truth, rtol=None, kind="networks", seeds=20
    ),
    "shrinkage": Estimator(_shrunk, _shrunk_truth, rtol=None, kind="networks", seeds=20),
    **{
        f"{title}{suffix}": _noise_scale(name, size)
        for title, name in (
            ("squared gradient", "gradient_square"),
            ("variance of gradients", "variance"),
            ("noise scale", "simple"),
            ("curvature along the gradient", "along"),
        )
        for suffix, size in (("", None), (", groups of 3", 3))
        if size is None or name in ("variance", "simple")
    },
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
    cell, call = Cell(), ESTIMATORS[estimator]
    source, values = built(matrix, call.kind)
    op = products_only(source) if call.kind == "matrices" else source
    if call.kind == "matrices":
        OP_VALUES[op] = values
    truth = call.truth(source, values)
    more: dict[str, Any] = {"rtol": call.rtol} if rtol else {}
    if rtol and estimator.startswith("tr ") and not TABLES[call.kind][matrix].easy:
        more["max_probes"] = 160  # these runs would take most of the time
    begin, seeds = time.process_time(), min(seeds, call.seeds)
    doubtful = False
    for seed in range(5 * seeds):
        # Where few runs hold, more of them tell whether that is chance. How many does not depend on
        # how these turn out: a cell that stopped as soon as it looks well would flatter.
        if seed == seeds:
            doubtful = seeds >= 100 and cell.coverage(0.95) < DOUBTFUL
        used = time.process_time() - begin
        if (seed >= seeds and not doubtful) or (seed >= 20 and used > seconds * (1 + 4 * doubtful)):
            break
        # Cells have different seeds, so that one unlucky draw is not counted many times.
        name = f"{estimator}/{matrix}/{rtol}/{seed}".encode()
        try:
            estimate = call.run(op, torch.Generator().manual_seed(zlib.crc32(name)), **more)
        except ValueError as error:
            cell.refused = str(error)
            break
        if isinstance(estimate, tuple):
            estimate, truth = estimate
        _record(cell, estimate, truth)
    cell.seconds = time.process_time() - begin
    OP_VALUES.clear()
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
# A run of up to 0.2 s is repeated with 100 seeds.
SEEDS, SECONDS = 100, 20.0
# A cell in which fewer of these runs hold continues to five times as many: of 100 runs that hold
# with probability .95, fewer than .92 do in 6 of 100 cells.
DOUBTFUL = 0.92

Key = tuple[str, str, bool]


def cells() -> list[Key]:
    """Every matrix with every estimator that takes it, without and with a tolerance."""
    return [
        (matrix, name, rtol)
        for name, estimator in ESTIMATORS.items()
        for matrix, spec in TABLES[estimator.kind].items()
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
            table = TABLES[ESTIMATORS[name].kind]
            easy = [here[matrix] for matrix in here if table[matrix].easy]
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
                    "worst runs": here[worst].runs,
                    "width": statistics.median(widths) if widths else None,
                    "converged": sum(c.converged() * c.runs for c in easy)
                    / sum(c.runs for c in easy),
                    "seconds": sum(cell.seconds for cell in here.values()),
                    "date": time.strftime("%Y-%m-%d"),
                }
            )
    return rows


def updated(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier run, replaced where there are new ones, in the order of estimators."""
    names, new = list(ESTIMATORS), {row["estimator"] for row in rows}
    kept = [row for row in before if row["estimator"] not in new and row["estimator"] in names]
    return sorted(kept + rows, key=lambda row: names.index(row["estimator"]))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| estimator | rtol | runs | 95 % held | 99.9 % held | lowest (its runs) | width "
        "| converged | measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        rtol = "" if row["rtol"] is None else f"{row['rtol']:g}"
        width = "" if row["width"] is None else f"{row['width']:.2f}"
        converged = f"{row['converged']:.3f}" if rtol else ""
        lines.append(
            f"| {row['estimator']} | {rtol} | {row['runs']:,} | {row['held 95 %']:.3f} "
            f"| {row['held 99.9 %']:.4f} "
            f"| {row['worst 95 %']:.3f} ({row['worst']}; {row['worst runs']}) "
            f"| {width} | {converged} | {row['date']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of estimators")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "intervals.json")
    parser.add_argument("--docs", type=Path, help="page whose table is replaced by the new one")
    options = parser.parse_args()
    keys = [key for key in cells() if any(part in key[1] for part in options.only)]
    results, begin = {}, time.perf_counter()
    options.out.parent.mkdir(exist_ok=True)
    before = json.loads(options.out.read_text()) if options.out.exists() else []
    with ProcessPoolExecutor(options.workers) as pool:
        for key, cell in pool.map(partial(run, seeds=options.seeds), keys):
            results[key] = cell
            if len(results) == len(keys) or keys[len(results)][1] != key[1]:  # it is complete
                options.out.write_text(json.dumps(updated(before, summary(results)), indent=1))
    print(f"{time.perf_counter() - begin:.0f} s")
    for (matrix, name, rtol), cell in results.items():
        if cell.runs and cell.coverage(0.95) < 0.9:
            print(f"low: {name}, {matrix}, rtol {rtol}: {cell.coverage(0.95):.3f} of {cell.runs}")
    text = table(json.loads(options.out.read_text()))
    print(text)
    if options.docs is not None:
        page = options.docs.read_text()
        above, mark, _ = page.partition("<!-- make intervals replaces what follows -->\n")
        options.docs.write_text(f"{above}{mark}\n{text}")


if __name__ == "__main__":
    main()
