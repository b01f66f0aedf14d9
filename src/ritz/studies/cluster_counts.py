"""Numbers of clusters, planted and real: Spectral Machine Learning, Tables 3.2, 3.3, Fig. 3.5."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ritz import graphs
from ritz._core.checks import check_count
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.graphs import ClusterCount, Graph
from ritz.graphs.counting import sample_entropic
from ritz.studies.protocol import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("auto", "krylov", "entropic", "lanczos")
FIRST = "first minimum"  # Algorithm 5 by its letter
PAPER = {  # by number of clusters
    "entropic": {9: 9.7e-3, 30: 6.4e-3, 90: 5.8e-3, 240: 3.5e-3},
    "lanczos": {9: 3.2e-3, 30: 1.4e-2, 90: 1.8e-2, 240: 2.89e-2},
}
MIXED = {305: (201_600, 500, 1000), 1355: (404_420, 200, 400)}  # vertices, least, largest
REAL = (
    "email-Eu-core.txt.gz",
    "netscience.mtx",
    "ca-GrQc.txt.gz",
    "ca-HepTh.txt.gz",
    "ca-HepPh.txt.gz",
    "ca-AstroPh.txt.gz",
    "ca-CondMat.txt.gz",
    "soc-Epinions1.txt.gz",
    "web-NotreDame.txt.gz",
)
SETTLED = 0.05  # change from one number of moments to the next that is none
EXACT = 2000  # vertices of graphs whose eigenvalues are all computed
ZERO = 1e-8  # below it, an eigenvalue is zero


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is counted, and how often.

    Attributes:
        clusters: Numbers of planted clusters.
        size: Vertices of each.
        degree: Mean degree within a cluster.
        num_links: Edges between clusters, to a cluster.
        num_moments: Moments, or Lanczos steps.
        num_probes: Probes.
        num_seeds: Graphs for each number of clusters.
        mixed: Numbers of clusters of the large mixed graphs, of 305 and 1355.
        mixed_degree: Mean degree within these.
        data: Folder of the real graphs; that of ``RITZ_DATA`` if empty, none if that is not set.
        moments: Numbers of moments for the real graphs.
        seed: Of graphs and probes.
    """

    clusters: tuple[int, ...] = (9, 30, 90, 240)
    size: int = 30
    degree: int = 12
    num_links: int = 2
    num_moments: int = 80
    num_probes: int = 100
    num_seeds: int = 10
    mixed: tuple[int, ...] = ()
    mixed_degree: int = 16
    data: str = ""
    moments: tuple[int, ...] = (40, 70, 100, 150)
    seed: int = 0

    def __post_init__(self) -> None:
        for count in self.clusters:
            check_count("clusters", count, low=2)
        check_count("num_seeds", self.num_seeds)
        check_count("seed", self.seed, low=0)
        for count in self.mixed:
            if count not in MIXED:
                raise ValueError(f"mixed must be of {', '.join(map(str, MIXED))}; got {count}")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """Counts of one graph.

    Attributes:
        name: Of the file.
        num_nodes: Vertices.
        truth: Eigenvalues before the largest jump of their logarithms; ``None`` where there are
            too many to compute.
        estimates: Entropic counts for each number of moments, NaN for no gap, ``(M,)``.
        stderr: Of these.
        default: What the default says with the most moments.
    """

    name: str
    num_nodes: int
    truth: int | None
    estimates: Tensor
    stderr: Tensor
    default: ClusterCount

    @property
    def settled(self) -> bool:
        """Whether the last two counts are one within their errors, or nearly."""
        before, last = map(float, self.estimates[-2:])
        error = float(self.stderr[-2:].square().sum().sqrt())
        return abs(last - before) <= max(4 * error, SETTLED * last)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Counts of every method on every graph.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        counts: By method, ``(len(clusters), num_seeds)``, before rounding; NaN for no gap.
        certified: Whether the default was sure of its count, likewise.
        products: Products of one count by method, mean over seeds, ``(len(clusters),)``.
        mixed: Of the large graphs: the results by method, by number of clusters.
        seconds: Of these.
        real: Of the real graphs.
    """

    config: Config
    versions: dict[str, str]
    counts: dict[str, Tensor]
    certified: Tensor
    products: dict[str, Tensor]
    mixed: dict[str, dict[str, ClusterCount]]
    seconds: dict[str, dict[str, float]]
    real: tuple[Real, ...]

    def errors(self, method: str) -> Tensor:
        """Fractional errors, ``(len(clusters), num_seeds)``."""
        truth = torch.tensor(self.config.clusters, dtype=torch.float64)[:, None]
        return (self.counts[method] - truth).abs() / truth

    @property
    def limits(self) -> Tensor:
        """Standard deviation of a fraction that independent probes alone leave."""
        counts = torch.tensor(self.config.clusters, dtype=torch.float64)
        return (2 / (self.config.num_probes * counts)).sqrt()

    def __str__(self) -> str:
        return "\n".join([*_table(self), *_mixed_lines(self), *_real_lines(self)])


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the counts of all methods."""
    shape = (len(config.clusters), config.num_seeds)
    counts = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in (*METHODS, FIRST)}
    products = {name: torch.zeros(shape, dtype=torch.float64) for name in METHODS}
    certified = torch.zeros(shape, dtype=torch.bool)
    with tracking(progress, "graphs", math.prod(shape)) as bar:
        for i, count in enumerate(config.clusters):
            for j in range(config.num_seeds):
                graph, seed = _planted(config, count, j), 1000 * config.seed + j
                for name in METHODS:
                    found = _count(graph, name, config, seed)
                    counts[name][i, j] = _number(found)
                    products[name][i, j] = found.num_products
                    if name == "auto":
                        certified[i, j] = found.certified
                counts[FIRST][i, j] = _first_minimum(graph, config, seed)
                bar.update(i * config.num_seeds + j + 1)
    mixed, seconds = _mixed(config, progress)
    return Result(
        config=config,
        versions=versions(),
        counts=counts,
        certified=certified,
        products={name: spent.mean(1) for name, spent in products.items()},
        mixed=mixed,
        seconds=seconds,
        real=tuple(_real(config, progress)),
    )


def figure(result: Result) -> "Figure":
    """Draw errors over the number of clusters, and real counts over that of moments."""
    from ritz import plots

    drawing, axes = plots.panels(1, 2 if result.real else 1, width=5.5, height=3.8)
    clusters = result.config.clusters
    for name, marker in (("entropic", "s"), ("lanczos", "x"), (FIRST, "o")):
        axes[0].plot(clusters, result.errors(name).nanmean(1).numpy(), marker=marker, label=name)
    for name, row in PAPER.items():
        axes[0].plot(list(row), list(row.values()), linestyle=":", label=f"published: {name}")
    limit = result.limits.numpy() * math.sqrt(2 / math.pi)  # mean of the absolute value
    axes[0].plot(clusters, limit, color="black", linestyle="--", label="limit of the probes")
    exact = bool((result.errors("auto") == 0).all())
    title = "default: exact in every graph" if exact else "default: not exact everywhere"
    axes[0].set(xscale="log", yscale="log", xlabel="planted clusters", title=title)
    axes[0].set_ylabel("fractional error, mean over seeds")
    axes[0].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))
    for one in result.real:
        axes[1].errorbar(
            result.config.moments,
            one.estimates.numpy(),
            yerr=2 * one.stderr.numpy(),
            marker="o",
            label=one.name.split(".")[0],
        )
        axes[1].set(yscale="log", xlabel="moments", ylabel="entropic count")
        axes[1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawing


def _planted(config: Config, count: int, seed: int) -> Graph:
    return graphs.cluster_graph(
        [config.size] * count,
        degree=config.degree,
        num_links=config.num_links * count,
        generator=torch.Generator().manual_seed(1000 * config.seed + seed),
    )


def _count(graph: Graph, method: str, config: Config, seed: int) -> ClusterCount:
    return graphs.count_clusters(
        graph,
        method=method,  # type: ignore[arg-type]  # one of METHODS
        num_moments=config.num_moments,
        num_probes=config.num_probes,
        generator=torch.Generator().manual_seed(seed),
    )


def _number(found: ClusterCount) -> float:
    if found.count is None:
        return math.nan
    return float(found.count) if found.stderr == 0 else found.estimate


def _first_minimum(graph: Graph, config: Config, seed: int) -> float:
    """The count of Algorithm 5 as it is written: up to the first minimum of the density."""
    sampled = sample_entropic(
        graph,
        num_moments=config.num_moments,
        num_probes=config.num_probes,
        bulk=0.5,
        generator=torch.Generator().manual_seed(seed),
        progress=False,
    )
    points = torch.linspace(0, 1, 20_001, dtype=torch.float64)[1:]
    rising = sampled.density.pdf(points).diff() > 0
    falling = (~rising).nonzero()[:, 0]
    after = rising[int(falling[0]) :].nonzero()[:, 0]
    return sampled.below(float(points[int(falling[0]) + int(after[0])]))[0]


def _mixed(
    config: Config, progress: bool | Progress
) -> tuple[dict[str, dict[str, ClusterCount]], dict[str, dict[str, float]]]:
    found: dict[str, dict[str, ClusterCount]] = {}
    seconds: dict[str, dict[str, float]] = {}
    for count in config.mixed:
        num_nodes, low, high = MIXED[count]
        generator = torch.Generator().manual_seed(config.seed)
        sizes = graphs.cluster_sizes(
            count, num_nodes=num_nodes, low=low, high=high, generator=generator
        )
        graph = graphs.cluster_graph(
            sizes,
            kind="mixed",
            degree=config.mixed_degree,
            num_links=config.num_links * count,
            generator=generator,
        )
        found[str(count)], seconds[str(count)] = {}, {}
        with tracking(progress, f"{count} clusters", len(METHODS)) as bar:
            for i, name in enumerate(METHODS):
                begin = time.perf_counter()
                found[str(count)][name] = _count(graph, name, config, config.seed)
                seconds[str(count)][name] = time.perf_counter() - begin
                bar.update(i + 1)
    return found, seconds


def _real(config: Config, progress: bool | Progress) -> Iterator[Real]:
    folder = config.data or os.environ.get("RITZ_DATA", "")
    paths = [Path(folder) / "graphs" / name for name in REAL if folder]
    paths = [path for path in paths if path.is_file()]
    with tracking(progress, "real graphs", len(paths)) as bar:
        for i, path in enumerate(paths):
            graph = graphs.read(path)
            rows = []
            for num_moments in config.moments:
                found = graphs.count_clusters(
                    graph,
                    method="entropic",
                    num_moments=num_moments,
                    num_probes=config.num_probes,
                    generator=torch.Generator().manual_seed(config.seed),
                )
                rows.append((_number(found), found.stderr))
            estimates, stderr = torch.tensor(rows, dtype=torch.float64).T
            default = graphs.count_clusters(
                graph, num_moments=config.moments[-1], num_probes=config.num_probes
            )
            yield Real(
                name=path.name,
                num_nodes=graph.num_nodes,
                truth=_truth(graph) if graph.num_nodes <= EXACT else None,
                estimates=estimates.contiguous(),
                stderr=stderr.contiguous(),
                default=default,
            )
            bar.update(i + 1, path.name)


def _truth(graph: Graph) -> int:
    """Eigenvalues before the largest jump of their logarithms, in the lower half."""
    values = graphs.eigenvalues(graph)
    half = values[: len(values) // 2 + 1].clamp_min(ZERO)
    return 1 + int(half.log().diff().argmax())


def _table(result: Result) -> list[str]:
    c = result.config
    lines = [
        f"Fractional error of the number of clusters of {c.size} vertices, {c.num_moments} moments "
        f"x {c.num_probes} probes: mean over {c.num_seeds} graphs",
        f"{'clusters':20}" + "".join(f"{count:>10}" for count in c.clusters),
        f"{'sqrt(2/(d N_c))':20}" + "".join(f"{value:>10.1e}" for value in result.limits.tolist()),
    ]
    for name in (*METHODS, FIRST):
        errors = result.errors(name)
        lines.append(f"{name:20}" + "".join(f"{value:>10.1e}" for value in errors.nanmean(1)))
    lines += [
        f"{'published ' + name:20}"
        + "".join(f"{row.get(count, math.nan):>10.1e}" for count in c.clusters)
        for name, row in PAPER.items()
    ]
    for name in METHODS:
        spent = "".join(f"{value:>10.0f}" for value in result.products[name].tolist())
        lines.append(f"{'products, ' + name:20}{spent}")
    exact = (result.errors("auto") == 0).sum(1).tolist()
    sure = result.certified.sum(1).tolist()
    lines.append(f"{'auto exact, of ' + str(c.num_seeds):20}" + "".join(f"{n:>10}" for n in exact))
    lines.append(f"{'auto certified':20}" + "".join(f"{n:>10}" for n in sure))
    return lines


def _mixed_lines(result: Result) -> list[str]:
    lines = []
    for count in result.config.mixed:
        lines.append(f"{count} clusters of mixed kinds, {MIXED[count][0]:,} vertices")
        for name in METHODS:
            one = result.mixed[str(count)][name]
            error = (_number(one) - count) / count
            spent = f"{one.num_products:,} products, {result.seconds[str(count)][name]:.0f} s"
            lines.append(f"  {name:10}{_number(one):>10.1f}{error:>+10.2%}  {spent}; {one.status}")
    return lines


def _real_lines(result: Result) -> list[str]:
    if not result.real:
        return []
    moments = result.config.moments
    head = "".join(f"{f'm = {m}':>10}" for m in moments)
    lines = [f"{'Entropic counts':22}{'vertices':>9}{head}  settled   truth   default"]
    for one in result.real:
        cells = "".join(
            f"{'no gap':>10}" if math.isnan(value) else f"{value:>10.1f}"
            for value in one.estimates.tolist()
        )
        truth = "" if one.truth is None else str(one.truth)
        settled = "yes" if one.settled else "no"
        sure = "certified" if one.default.certified else str(one.default.status)
        lines.append(
            f"{one.name.split('.')[0]:22}{one.num_nodes:>9}{cells}{settled:>9}{truth:>8}"
            f"{one.default.count!s:>10} {sure}"
        )
    return lines
