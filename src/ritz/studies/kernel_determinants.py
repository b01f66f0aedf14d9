"""Log determinants of kernel matrices by equal products: Spectral Machine Learning, Table 2.1."""

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.results import Estimate
from ritz._core.storage import storable
from ritz.operators import DenseOperator, KernelOperator
from ritz.spectra import logdet
from ritz.studies._protocol import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHSCALES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)
NOISE = 1e-8
SPREAD = (
    0.22  # of the points in each of six dimensions: condition numbers of the table from 0.15 on
)
METHODS = {
    "krylov": {"method": "krylov"},
    "lanczos 10 probes": {"method": "lanczos", "num_probes": 10},
    "lanczos 50 probes": {"method": "lanczos", "num_probes": 50},
    "maxent": {"method": "maxent", "num_probes": 50},
    "chebyshev": {"method": "chebyshev", "num_probes": 50},
}
PAPER = {
    "MEMe": (0.0014, 0.0522, 0.0387, 0.0263, 0.0284, 0.0256, 0.00048, 0.0086, 0.0177),
    "Chebyshev": (0.0037, 0.0104, 0.0795, 0.2302, 0.3439, 0.4089, 0.5049, 0.5049, 0.5358),
    "Lanczos": (0.0024, 0.0024, 0.0072, 0.0196, 0.0502, 0.0646, 0.0838, 0.1050, 0.1199),
}
# Which method a published one is drawn in the colour of.
KIN = {"MEMe": "maxent", "Chebyshev": "chebyshev", "Lanczos": "lanczos 50 probes"}


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is compared, and how often.

    Attributes:
        size: Order of the matrices.
        num_products: Products for every method.
        num_seeds: Runs of every method on every matrix.
        num_draws: Sets of points for every length scale.
        seed: Of the points and of the runs.
    """

    size: int = 1000
    num_products: int = 1500
    num_seeds: int = 10
    num_draws: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("size", self.size, low=50)
        check_count("num_products", self.num_products, low=200)
        check_count("num_seeds", self.num_seeds)
        check_count("num_draws", self.num_draws)
        check_range("seed", self.seed, low=0)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Relative errors of every run.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        conditions: Condition numbers, ``(9, num_draws)``.
        errors: Relative errors by method, ``(9, num_draws, num_seeds)``.
        covered: Whether the truth was within four combined error bars, likewise.
        seconds: Of one run, mean over all, by method.
        names: The methods in their order.
    """

    config: Config
    versions: dict[str, str]
    conditions: Tensor
    errors: dict[str, Tensor]
    covered: dict[str, Tensor]
    seconds: dict[str, float]
    names: tuple[str, ...]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Relative error of log det, order {c.size}, {c.num_products} products: root mean "
            f"square over {c.num_draws} draws x {c.num_seeds} seeds",
            f"{'':20}" + "".join(f"{scale:>9}" for scale in LENGTHSCALES) + f"{'s':>8}{'in 4':>7}",
            f"{'condition':20}" + "".join(f"{x:>9.0e}" for x in self.conditions.mean(1).tolist()),
        ]
        for name in self.names:
            rms = self.errors[name].square().mean((1, 2)).sqrt().tolist()
            inside = float(self.covered[name].double().mean())
            cells = "".join(f"{value:>9.1e}" for value in rms)
            lines.append(f"{name:20}{cells}{self.seconds[name]:>8.2f}{inside:>7.0%}")
        lines += [f"{'  spread, krylov':20}" + self._spread("krylov"), "as published:"]
        lines += [
            f"{'  ' + name:20}" + "".join(f"{value:>9.1e}" for value in row)
            for name, row in PAPER.items()
        ]
        return "\n".join(lines)

    def _spread(self, name: str) -> str:
        flat = self.errors[name].flatten(1)
        if flat.shape[1] < 2:
            return ""
        return "".join(f"{value:>9.1e}" for value in flat.std(1).tolist())


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the errors of all methods on all matrices."""
    shape = (len(LENGTHSCALES), config.num_draws, config.num_seeds)
    errors = {name: torch.zeros(shape, dtype=torch.float64) for name in METHODS}
    covered = {name: torch.zeros(shape, dtype=torch.bool) for name in METHODS}
    seconds = dict.fromkeys(METHODS, 0.0)
    conditions = torch.zeros(shape[:2], dtype=torch.float64)
    with tracking(progress, "matrices", shape[0] * shape[1]) as bar:
        for i, lengthscale in enumerate(LENGTHSCALES):
            for draw in range(config.num_draws):
                op, exact, condition = _matrix(config, lengthscale, draw)
                conditions[i, draw] = condition
                for name in METHODS:
                    for seed in range(config.num_seeds):
                        begin = time.perf_counter()
                        found = _run(op, name, config, seed)
                        seconds[name] += (time.perf_counter() - begin) / math.prod(shape)
                        errors[name][i, draw, seed] = (float(found) - exact) / abs(exact)
                        covered[name][i, draw, seed] = _covers(found, exact)
                bar.update(i * config.num_draws + draw + 1)
    return Result(
        config=config,
        versions=versions(),
        conditions=conditions,
        errors=errors,
        covered=covered,
        seconds=seconds,
        names=tuple(METHODS),
    )


def figure(result: Result) -> "Figure":
    """Draw the errors of every method over the length scale, beside the published ones."""
    from ritz import plots

    drawing, (axis,) = plots.panels(1, 1, width=8.5, height=3.6)
    for name, marker in zip(result.names, "oDs^v", strict=True):
        rms = (
            result.errors[name].square().mean((1, 2)).sqrt().clamp_min(1e-16)
        )  # zero has no logarithm
        axis.plot(LENGTHSCALES, rms.numpy(), marker=marker, markersize=5, label=name)
    colours = {line.get_label(): line.get_color() for line in axis.get_lines()}
    for name, row in PAPER.items():
        label = f"published, n = 1000: {name}"
        axis.plot(LENGTHSCALES, row, linestyle=":", color=colours[KIN[name]], label=label)
    axis.set_yscale("log")
    axis.set_xlabel("length scale")
    axis.set_ylabel("relative error of log det, rms")
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return drawing


def _matrix(config: Config, lengthscale: float, draw: int) -> tuple[DenseOperator, float, float]:
    generator = torch.Generator().manual_seed(1000 * config.seed + draw)
    points = SPREAD * torch.randn(config.size, 6, generator=generator, dtype=torch.float64)
    kernel = KernelOperator(points, lengthscale=lengthscale, noise=NOISE)
    op = DenseOperator(kernel.dense())
    factor = torch.linalg.cholesky(op.matrix)
    values = torch.linalg.eigvalsh(op.matrix)
    return op, float(2 * factor.diagonal().log().sum()), float(values[-1] / values[0])


def _run(op: DenseOperator, name: str, config: Config, seed: int) -> Estimate:
    generator = torch.Generator().manual_seed(1000 * config.seed + seed)
    options = METHODS[name]
    return logdet(op, floor=NOISE, num_products=config.num_products, generator=generator, **options)  # type: ignore[arg-type]


def _covers(found: Estimate, exact: float) -> bool:
    truncation = 0.0 if found.truncation is None else float(found.truncation)
    bars = math.hypot(float(found.stderr), truncation)
    return abs(float(found) - exact) <= 4 * bars + 1e-6 * abs(exact)
