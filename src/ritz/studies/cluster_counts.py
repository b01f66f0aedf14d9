"""Numbers of clusters, planted and real: Spectral Machine Learning, Tables 3.2, 3.3, Fig. 3.5."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ritz import graphs
from ritz._core.checks import check_count
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.graphs import ClusterCount, Graph
from ritz.graphs._shared import cluster_sizes, sample_density
from ritz.studies._protocol import versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ------------------------------------------------------------------------------------------
# What the study of cluster counts prints, and what was published.

METHODS = ("auto", "krylov", "entropic", "lanczos")
FIRST = "first minimum"  # Algorithm 5 by its letter
PAPER = {  # by number of clusters
    "entropic": {9: 9.7e-3, 30: 6.4e-3, 90: 5.8e-3, 240: 3.5e-3},
    "lanczos": {9: 3.2e-3, 30: 1.4e-2, 90: 1.8e-2, 240: 2.89e-2},
}
MIXED = {305: (201_600, 500, 1000), 1355: (404_420, 200, 400)}  # vertices, least, largest


def number(found: ClusterCount) -> float:
    """Return a count before it was rounded; NaN for no gap."""
    if found.count is None:
        return math.nan
    return float(found.count) if found.stderr == 0 else found.estimate


def probe_limit(count: int, num_probes: int) -> float:
    r"""Return :math:`\sqrt{2 / (d N_c)}`, the standard deviation that ``d`` probes alone leave."""
    return math.sqrt(2 / (num_probes * count))


def planted_lines(result: "Result") -> list[str]:
    """Return the table of planted clusters."""
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


def mixed_lines(result: "Result") -> list[str]:
    """Return what was found in the large graphs of mixed kinds."""
    c, lines = result.config, []
    for count in c.mixed:
        limit = probe_limit(count, c.num_probes)
        lines.append(
            f"{count} clusters of mixed kinds, {MIXED[count][0]:,} vertices; "
            f"sqrt(2/(d N_c)) {limit:.2%}, of the published curves no numbers"
        )
        for name in METHODS:
            one = result.mixed[str(count)][name]
            error = (number(one) - count) / count
            spent = f"{one.num_products:,} products, {result.seconds[str(count)][name]:.0f} s"
            lines.append(f"  {name:10}{number(one):>10.1f}{error:>+10.2%}  {spent}; {one.status}")
        for name, found in sorted(result.by_moments.get(str(count), {}).items()):
            cells = [
                f"m = {m} {'no gap' if math.isnan(x) else f'{(x - count) / count:+.2%}'}"
                for m, x in zip(c.mixed_moments, found.tolist(), strict=True)
            ]
            lines.append(f"  {name + ', fewer moments:':26}{'; '.join(cells)}")
    return lines


def real_lines(result: "Result") -> list[str]:
    """Return the counts of the real graphs."""
    if not result.real:
        return []
    moments = result.config.moments
    head = "".join(f"{f'm = {m}':>10}" for m in moments)
    lines = [f"{'Entropic counts':22}{'vertices':>9}{head}  settled   truth components   default"]
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
            f"{one.default.num_components:>11}{one.default.count!s:>10} {sure}"
        )
    return lines


# ------------------------------------------------------------------------------------------
# The pictures of the study of cluster counts.


def draw_planted(result: "Result", ax: "Axes") -> None:
    """Draw mean errors over the number of planted clusters, beside what was published."""
    from ritz.plots._shared import STYLE

    clusters = result.config.clusters
    colours = {"entropic": STYLE.blue, "lanczos": STYLE.vermilion, FIRST: STYLE.green}
    # The first two have nearly the same errors: one is drawn around the other.
    for name, style, size in (("entropic", "s-", 9), ("lanczos", "x--", 5), (FIRST, "o-", 5)):
        errors = result.errors(name).nanmean(1).numpy()
        ax.plot(clusters, errors, style, color=colours[name], label=name, ms=size, mfc="none")
    for name, row in PAPER.items():
        label = f"published: {name}"
        ax.plot(list(row), list(row.values()), ":", color=colours[name], label=label)
    limit = result.limits.numpy() * math.sqrt(2 / math.pi)  # mean of the absolute value
    marker = "_" if len(clusters) == 1 else ""  # a line through one point is none
    ax.plot(clusters, limit, "--", color="black", marker=marker, label="limit of the probes")
    exact = bool((result.errors("auto") == 0).all())
    title = "default: exact in every graph" if exact else "default: not exact everywhere"
    ax.set(xscale="log", yscale="log", xlabel="planted clusters", title=title)
    ax.set_ylabel("fractional error, mean over seeds")
    ax.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))


def draw_mixed(result: "Result", ax: "Axes") -> None:
    """Draw errors of the large graphs over the number of moments."""
    from ritz.plots._shared import STYLE

    c = result.config
    moments = [*c.mixed_moments, c.num_moments]
    for count, colour in zip(c.mixed, STYLE.palette, strict=False):
        found, last = result.by_moments[str(count)], result.mixed[str(count)]
        # Both have nearly the same errors: one is drawn around the other.
        for name, style, size in (("entropic", "s-", 9), ("lanczos", "x--", 5)):
            rows = [*found[name].tolist(), number(last[name])]
            errors = [100 * (value - count) / count for value in rows]
            label = f"{count} clusters, {name}{_missing(moments, rows)}"
            ax.plot(moments, errors, style, color=colour, label=label, ms=size, mfc="none")
        limit = 100 * probe_limit(count, c.num_probes)
        ax.axhspan(-limit, limit, color=colour, alpha=0.12, label=f"{count}: limit of the probes")
    exact = all(result.mixed[str(count)]["auto"].count == count for count in c.mixed)
    title = "mixed kinds; default: exact" if exact else "mixed kinds; default: not exact"
    ax.set(xlabel="moments", ylabel="error of the count, %", title=title)
    ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_real(result: "Result", ax: "Axes") -> None:
    """Draw the counts of the real graphs over the number of moments; which have no gap is said."""
    moments = result.config.moments
    # Curves lie on each other: every other one is dashed with small markers, within large ones.
    for place, (one, marker) in enumerate(zip(result.real, cycle("osD^vPXh*"), strict=False)):
        ax.errorbar(
            moments,
            one.estimates.numpy(),
            yerr=2 * one.stderr.numpy(),
            marker=marker,
            markersize=4 if place % 2 else 7.5,
            markerfacecolor=None if place % 2 else "none",
            linestyle="--" if place % 2 else "-",
            label=one.name.split(".")[0] + _missing(moments, one.estimates.tolist()),
        )
    ax.set(yscale="log", xlabel="moments", ylabel="entropic count")
    ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _missing(moments: Sequence[int], counts: Sequence[float]) -> str:
    """Where a curve has no points, for its label."""
    absent = [m for m, count in zip(moments, counts, strict=True) if math.isnan(count)]
    if len(absent) == len(counts):
        return ": no gap"
    return f" (no gap: m = {', '.join(map(str, absent))})" if absent else ""


# ------------------------------------------------------------------------------------------
# Numbers of clusters, planted and real: Spectral Machine Learning, Tables 3.2, 3.3, Fig. 3.5.
#
# Of the large mixed graphs and the real ones only curves were published, no numbers: beside
# their errors stands what independent probes leave, as in the table of planted clusters. In
# the real graphs that have a gap the count is the number of their components, the published
# 20 of email-Eu-core too: the gap is the one above the eigenvalue 0.

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
    sampled = sample_density(
        graph,
        lanczos=False,
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
    sizes = cluster_sizes(count, num_nodes=num_nodes, low=low, high=high, generator=generator)
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
