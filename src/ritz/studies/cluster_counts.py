"""Numbers of clusters, planted and real: Spectral Machine Learning, Tables 3.2, 3.3, Fig. 3.5.

Of the large mixed graphs and the real ones only curves were published, no numbers: beside their
errors stands what independent probes leave, as in the table of planted clusters. In the real graphs
that have a gap the count is the number of their components, the published 20 of email-Eu-core too:
the gap is the one above the eigenvalue 0.
"""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from ritz.studies._cluster_figures import draw_mixed, draw_planted, draw_real
from ritz.studies._cluster_tables import (
    FIRST,
    METHODS,
    MIXED,
    mixed_lines,
    number,
    planted_lines,
    probe_limit,
    real_lines,
)
from ritz.studies.protocol import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLED = ("entropic", "lanczos")
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
        mixed_moments: Further numbers of moments, or steps, that these are sampled with.
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
    mixed_moments: tuple[int, ...] = (20, 40, 60)
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
        by_moments: Of these, counts of both sampled methods with ``mixed_moments``, NaN for no gap.
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
    by_moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def errors(self, method: str) -> Tensor:
        """Fractional errors, ``(len(clusters), num_seeds)``."""
        truth = torch.tensor(self.config.clusters, dtype=torch.float64)[:, None]
        return (self.counts[method] - truth).abs() / truth

    @property
    def limits(self) -> Tensor:
        """Standard deviation of a fraction that independent probes alone leave."""
        limits = [probe_limit(count, self.config.num_probes) for count in self.config.clusters]
        return torch.tensor(limits, dtype=torch.float64)

    def __str__(self) -> str:
        return "\n".join([*planted_lines(self), *mixed_lines(self), *real_lines(self)])


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
                    counts[name][i, j] = number(found)
                    products[name][i, j] = found.num_products
                    if name == "auto":
                        certified[i, j] = found.certified
                counts[FIRST][i, j] = _first_minimum(graph, config, seed)
                bar.update(i * config.num_seeds + j + 1)
    mixed, seconds, by_moments = _mixed(config, progress)
    return Result(
        config=config,
        versions=versions(),
        counts=counts,
        certified=certified,
        products={name: spent.mean(1) for name, spent in products.items()},
        mixed=mixed,
        seconds=seconds,
        by_moments=by_moments,
        real=tuple(_real(config, progress)),
    )


def figure(result: Result) -> "Figure":
    """Draw errors over the number of clusters; of mixed and real graphs over that of moments."""
    from ritz import plots

    # One number of clusters is a point, no curve: it has no picture beside those of other graphs.
    alone = not (result.mixed or result.real)
    drawn = [draw_planted] * (alone or len(result.config.clusters) > 1)
    drawn += [*[draw_mixed] * bool(result.mixed), *[draw_real] * bool(result.real)]
    drawing, axes = plots.panels(1, len(drawn), width=5.5 if len(drawn) > 1 else 8, height=3.8)
    for draw, ax in zip(drawn, axes, strict=True):
        draw(result, ax)
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
) -> tuple[
    dict[str, dict[str, ClusterCount]], dict[str, dict[str, float]], dict[str, dict[str, Tensor]]
]:
    found: dict[str, dict[str, ClusterCount]] = {}
    seconds: dict[str, dict[str, float]] = {}
    sampled: dict[str, dict[str, Tensor]] = {}
    for count in config.mixed:
        graph, key = _mixed_graph(config, count), str(count)
        found[key], seconds[key], sampled[key] = {}, {}, {}
        with tracking(progress, f"{count} clusters", len(METHODS) + len(SAMPLED)) as bar:
            for i, name in enumerate(METHODS):
                begin = time.perf_counter()
                found[key][name] = _count(graph, name, config, config.seed)
                seconds[key][name] = time.perf_counter() - begin
                bar.update(i + 1)
            for i, name in enumerate(SAMPLED):
                sampled[key][name] = _by_moments(graph, name, config)
                bar.update(len(METHODS) + i + 1)
    return found, seconds, sampled


def _mixed_graph(config: Config, count: int) -> Graph:
    num_nodes, low, high = MIXED[count]
    generator = torch.Generator().manual_seed(config.seed)
    sizes = graphs.cluster_sizes(
        count, num_nodes=num_nodes, low=low, high=high, generator=generator
    )
    return graphs.cluster_graph(
        sizes,
        kind="mixed",
        degree=config.mixed_degree,
        num_links=config.num_links * count,
        generator=generator,
    )


def _by_moments(graph: Graph, method: str, config: Config) -> Tensor:
    settings = [replace(config, num_moments=count) for count in config.mixed_moments]
    counts = [number(_count(graph, method, one, config.seed)) for one in settings]
    return torch.tensor(counts, dtype=torch.float64)


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
                rows.append((number(found), found.stderr))
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
