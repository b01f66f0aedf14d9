"""Entropy and log determinant by the number of moments: Spectral Machine Learning, Figure 2.1.

Maximum entropy (MEMe) and the iteration of Bandyopadhyay (BMxnt) get the same moments of the same
matrices on ``[0, bound]``. The entropy of the first falls with every moment, but for small steps
up where exact moments had to be relaxed further; its log determinant gets better until the error
of the probes is left or, where eigenvalues crowd at zero (bcsstk16), worse at first and then better
slowly. The sweeps of the second stop short of the moments, mostly from the third on: its entropy
goes up and down, and its log determinant stays as far off as it was with two or three.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.io
import scipy.sparse
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.operators import LinearOperator, as_operator, read_matrix
from ritz.spectra import EntropicDensity, bounds, logdet, maxent, moments
from ritz.spectra._shared import bmxnt
from ritz.studies._protocol import data_file, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("entropies", "errors", "solved", "relaxations")
SERIES = ("MEMe", "BMxnt", "MEMe, exact moments", "BMxnt, exact moments")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is computed, and where it lies.

    Attributes:
        matrices: Positive definite matrices: Matrix Market files in the folder.
        graphs: Adjacency matrices likewise, for the identity plus the Laplacian of each.
        counts: Numbers of moments, ascending.
        num_probes: Probes of the sampled moments.
        dense_order: Largest order of a matrix whose moments are also computed from all eigenvalues.
        max_sweeps: Most sweeps of the iteration of Bandyopadhyay.
        data: The folder; ``RITZ_DATA`` of the environment by default.
        seed: Of the probes.
    """

    matrices: tuple[str, ...] = (
        "matrices/1138_bus.mtx",
        "matrices/bcsstk09.mtx",
        "matrices/bcsstk16.mtx.gz",
        "matrices/bcsstk28.mtx.gz",
    )
    graphs: tuple[str, ...] = ("graphs/road-minnesota.mtx", "graphs/road-luxembourg-osm.mtx.gz")
    counts: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60)
    num_probes: int = 50
    dense_order: int = 3000
    max_sweeps: int = 1000
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.counts and list(self.counts) == sorted(set(self.counts))):
            raise ValueError(f"counts must be numbers of moments, ascending, got {self.counts}")
        check_count("counts", self.counts[0])
        check_count("num_probes", self.num_probes, low=2)
        check_count("dense_order", self.dense_order, low=0)
        check_count("max_sweeps", self.max_sweeps)
        check_range("seed", self.seed, low=0)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Entropies and log determinants by the number of moments.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        names: Of the matrices.
        orders: Of the matrices.
        exact: Their log determinants, by factorisation.
        entropies: By series, ``(matrices, counts)``; NaN where eigenvalues were not computed.
        errors: Relative errors of the log determinants, likewise.
        solved: Whether the moments were matched to the tolerance, likewise.
        relaxations: Variance that the moments were given because no density had them, likewise.
    """

    config: Config
    versions: dict[str, str]
    names: tuple[str, ...]
    orders: tuple[int, ...]
    exact: tuple[float, ...]
    entropies: dict[str, Tensor]
    errors: dict[str, Tensor]
    solved: dict[str, Tensor]
    relaxations: dict[str, Tensor]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Entropy of the density on [0, bound] (0 is flat) and relative error of its log det, "
            f"moments from {c.num_probes} probes; * not solved, ~ moments relaxed",
            f"{'moments':38}" + "".join(f"{count:>9}" for count in c.counts),
        ]
        for row, (name, order) in enumerate(zip(self.names, self.orders, strict=True)):
            lines.append(f"{name}, order {order}, log det {self.exact[row]:.8g}")
            for series in SERIES:
                lines += self._rows(series, row)
        return "\n".join(lines)

    def _rows(self, series: str, row: int) -> list[str]:
        entropies, errors = self.entropies[series][row], self.errors[series][row]
        if bool(entropies.isnan().all()):
            return []
        relaxed = (self.relaxations[series][row] > 0).tolist()
        marks = [
            "*" if not done else "~" if loose else ""
            for done, loose in zip(self.solved[series][row].tolist(), relaxed, strict=True)
        ]
        cells = [
            [f"{value:.3f}{mark}" for value, mark in zip(entropies.tolist(), marks, strict=True)],
            [f"{value:.1e}{mark}" for value, mark in zip(errors.tolist(), marks, strict=True)],
        ]
        titles = (f"  {series}: entropy", f"  {series}: error")
        return [
            f"{title:38}" + "".join(f"{cell:>9}" for cell in line)
            for title, line in zip(titles, cells, strict=True)
        ]


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return what both iterations make of the same moments, of every matrix."""
    names = (*config.matrices, *config.graphs)
    paths = [data_file(name, config.data, fields="matrices= and graphs=") for name in names]
    shape = (len(names), len(config.counts))
    numbers = {kind: _empty(shape) for kind in KINDS}
    orders, exact = [], []
    with tracking(progress, "matrices", len(names)) as bar:
        for row, path in enumerate(paths):
            graph = row >= len(config.matrices)
            op = _identity_and_laplacian(path) if graph else read_matrix(path)
            orders.append(op.shape[0])
            exact.append(float(logdet(op, method="cholesky")))
            for series, found in _densities(op, config):
                column = config.counts.index(len(found.alphas))
                value = op.shape[0] * found.expectation(torch.log)
                error = abs(value / exact[-1] - 1)
                width = found.interval[1] - found.interval[0]
                numbers["entropies"][series][row, column] = found.entropy - math.log(width)
                numbers["errors"][series][row, column] = error
                numbers["solved"][series][row, column] = float(found.status.ok)
                numbers["relaxations"][series][row, column] = found.relaxation
            bar.update(row + 1)
    return Result(
        config=config,
        versions=versions(),
        names=tuple(_title(config, name) for name in names),
        orders=tuple(orders),
        exact=tuple(exact),
        **numbers,
    )


def figure(result: Result) -> "Figure":
    """Draw entropy above and error below, a column for each matrix."""
    from ritz import plots
    from ritz.plots._shared import share_legend

    columns = len(result.names)
    drawing, axes = plots.panels(2, columns, width=2.7, height=2.5)
    colours, lines = ("#0072B2", "#D55E00") * 2, ("-", "-", ":", ":")
    for series, colour, line in zip(SERIES, colours, lines, strict=True):
        style: dict[str, Any] = {"color": colour, "linestyle": line, "marker": ".", "label": series}
        for row, name in enumerate(result.names):
            above, below = axes[row], axes[columns + row]
            above.plot(result.config.counts, result.entropies[series][row].numpy(), **style)
            below.plot(result.config.counts, result.errors[series][row].numpy(), **style)
            below.set_yscale("log")
            above.set_title(f"{name}\nn = {result.orders[row]:,}", loc="left", fontsize="small")
            below.set_xlabel("moments")
    axes[0].set_ylabel("entropy")
    axes[columns].set_ylabel("relative error of log det")
    share_legend(drawing)
    return drawing


def _densities(op: LinearOperator, config: Config) -> Any:
    """The densities of every number of moments: the series, and what it gives."""
    degree = config.counts[-1]
    interval = (0.0, bounds(op, generator=_seeded(config)).high)
    sampled = moments(
        op,
        num_moments=degree,
        interval=interval,
        num_probes=config.num_probes,
        generator=_seeded(config),
    )
    yield from _both(sampled.mean, sampled.stderr, interval, config, SERIES[:2])
    if op.shape[0] <= config.dense_order:
        values = torch.linalg.eigvalsh(op.matmat(torch.eye(op.shape[0], dtype=op.dtype)).double())
        angles = torch.arccos((2 * values / interval[1] - 1).clamp(-1.0, 1.0))
        degrees = torch.arange(degree + 1, dtype=torch.float64)
        exact = torch.cos(degrees[:, None] * angles).mean(1)
        yield from _both(exact, None, interval, config, SERIES[2:])


def _both(
    mean: Tensor,
    stderr: Tensor | None,
    interval: tuple[float, float],
    config: Config,
    series: tuple[str, ...],
) -> Any:
    powers = _powers(len(mean) - 1) @ mean
    for count in config.counts:
        errors = None if stderr is None else stderr[: count + 1]
        new: EntropicDensity = maxent(mean[: count + 1], interval=interval, stderr=errors)
        yield series[0], new
        yield (
            series[1],
            bmxnt(powers[: count + 1], interval=interval, max_sweeps=config.max_sweeps),
        )


def _powers(degree: int) -> Tensor:
    """Rows take Chebyshev to power moments on ``[0, 1]``: positive shares of one, so stably."""
    rows = np.zeros((degree + 1, degree + 1))
    power = Chebyshev([1.0])
    half = Polynomial([0.5, 0.5]).convert(kind=Chebyshev)
    for k in range(degree + 1):
        rows[k, : len(power.coef)] = power.coef
        power = power * half
    return torch.from_numpy(rows)


def _identity_and_laplacian(path: Path) -> LinearOperator:
    read: Any = scipy.io.mmread(path)
    adjacency = scipy.sparse.csr_array(((abs(read) + abs(read.T)) > 0).astype(np.float64))
    adjacency.setdiag(0)
    degrees = np.asarray(adjacency.sum(1)).ravel()
    return as_operator((scipy.sparse.diags_array(1 + degrees) - adjacency).tocsr())


def _title(config: Config, name: str) -> str:
    stem = Path(name).name.partition(".")[0]
    return f"I + L, {stem}" if name in config.graphs else stem


def _empty(shape: tuple[int, int]) -> dict[str, Tensor]:
    return {name: torch.full(shape, math.nan, dtype=torch.float64) for name in SERIES}


def _seeded(config: Config) -> torch.Generator:
    return torch.Generator().manual_seed(config.seed)
