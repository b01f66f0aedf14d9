"""Entropic spectra over exact ones: Spectral Machine Learning, Figures 3.1, 3.2 and 3.3.

A semicircle from its analytic moments, a sparse Erdős-Rényi graph and a Barabási-Albert graph from
sampled ones, each by the number of moments. The divergence from the exact histogram falls with the
moments, fast at first; what is left is the scatter of the histogram itself and that of the probes.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ritz import graphs
from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.spectra import EntropicDensity, Moments, maxent
from ritz.studies._protocol import versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEMICIRCLE = (0.0, 1.0)
ANGLES = 4000


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is computed.

    Attributes:
        num_nodes: Vertices of both graphs.
        p: Probability of an edge of the Erdős-Rényi graph.
        num_edges: Edges of each new vertex of the Barabási-Albert graph.
        semicircle: Numbers of moments of the semicircle that are drawn.
        drawn: Numbers of moments of the graphs that are drawn.
        counts: Numbers of moments at which divergences are measured, ascending.
        num_probes: Probes of the moments.
        num_bins: Of the histograms on ``[0, 2]`` that divergences are measured from.
        seed: Of graphs and probes.
    """

    num_nodes: int = 5000
    p: float = 0.001
    num_edges: int = 5
    semicircle: tuple[int, ...] = (5, 30)
    drawn: tuple[int, ...] = (3, 30, 60, 100)
    counts: tuple[int, ...] = (2, 3, 5, 8, 12, 20, 30, 40, 60, 80, 100)
    num_probes: int = 100
    num_bins: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes, low=50)
        check_range("p", self.p, low=0.0, high=1.0)
        check_count("num_edges", self.num_edges)
        check_count("num_probes", self.num_probes, low=2)
        check_count("num_bins", self.num_bins, low=2)
        check_range("seed", self.seed, low=0)
        for name in ("semicircle", "drawn", "counts"):
            for count in getattr(self, name):
                check_count(name, count)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Densities by the number of moments, and how far they are from the exact spectra.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        names: Of the graphs.
        eigenvalues: Exact, by graph, ``(n,)`` each.
        densities: By graph, one for each number of moments that is drawn.
        semicircle: Densities of the semicircle on ``[0, 1]`` likewise.
        divergences: Kullback-Leibler divergences by spectrum, ``(counts,)``: from the semicircle
            itself, and from the histograms of the graphs.
        entropies: Likewise.
        moment_errors: Largest difference of a fitted moment from the exact one of the graph, in
            standard errors, by graph, ``(counts,)``.
    """

    config: Config
    versions: dict[str, str]
    names: tuple[str, ...]
    eigenvalues: dict[str, Tensor]
    densities: dict[str, tuple[EntropicDensity, ...]]
    semicircle: tuple[EntropicDensity, ...]
    divergences: dict[str, Tensor]
    entropies: dict[str, Tensor]
    moment_errors: dict[str, Tensor]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Divergence of entropic spectra from the exact ones by the number of moments; graphs "
            f"of {c.num_nodes:,} vertices, {c.num_probes} probes, {c.num_bins} bins",
            f"{'moments':34}" + "".join(f"{count:>9}" for count in c.counts),
        ]
        tables = {
            "divergence": self.divergences,
            "entropy": self.entropies,
            "moments off, in errors": self.moment_errors,
        }
        for title, table in tables.items():
            for name in ("semicircle", *self.names):
                if name not in table:
                    continue
                cells = "".join(f"{value:>9.2g}" for value in table[name].tolist())
                lines.append(f"{name + ': ' + title:34}{cells}")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the spectra and their divergences."""
    generator = torch.Generator().manual_seed(config.seed)
    n = config.num_nodes
    made = {
        "Erdős-Rényi": graphs.erdos_renyi(n, p=config.p, generator=generator),
        "Barabási-Albert": graphs.barabasi_albert(
            n, num_edges=config.num_edges, generator=generator
        ),
    }
    own = [semicircle_density(count) for count in config.counts]
    divergences = {"semicircle": _column([semicircle_divergence(one) for one in own])}
    entropies = {"semicircle": _column([one.entropy for one in own])}
    exact, densities, errors = {}, {}, {}
    with tracking(progress, "graphs", len(made)) as bar:
        for place, (name, graph) in enumerate(made.items()):
            values, found = graphs.eigenvalues(graph), _moments(graph, config, generator)
            rows = [_density(found, count) for count in config.counts]
            apart = [histogram_divergence(values, one, config.num_bins) for one in rows]
            exact[name], divergences[name] = values, _column(apart)
            entropies[name] = _column([one.entropy for one in rows])
            errors[name] = _column([_off(values, found, one) for one in rows])
            densities[name] = tuple(_density(found, count) for count in config.drawn)
            bar.update(place + 1)
    return Result(
        config=config,
        versions=versions(),
        names=tuple(made),
        eigenvalues=exact,
        densities=densities,
        semicircle=tuple(semicircle_density(count) for count in config.semicircle),
        divergences=divergences,
        entropies=entropies,
        moment_errors=errors,
    )


def figure(result: Result) -> "Figure":
    """Draw the semicircle, both graphs by the number of moments, and the divergences."""
    from ritz import plots
    from ritz.plots._shared import share_legend

    drawn = result.config.drawn
    columns = max(len(drawn), len(result.semicircle) + 1)
    drawing, axes = plots.panels(3, columns, width=3.2, height=2.4)
    for ax, one in zip(axes, result.semicircle, strict=False):
        _draw_semicircle(ax, one)
    for place, name in enumerate(result.names, start=1):
        for ax, one in zip(axes[place * columns :], result.densities[name], strict=False):
            exact = result.eigenvalues[name]
            plots.over_histogram(one, exact, ax=ax, num_bins=200, label="entropic")
            ax.set_title(f"{name}, {len(one.alphas)} moments", loc="left", fontsize="small")
    share_legend(drawing)  # in the panels, legends would lie on the curves
    last = axes[columns - 1]
    for name in ("semicircle", *result.names):
        heights = result.divergences[name].clamp_min(1e-7).numpy()
        last.plot(result.config.counts, heights, marker=".", label=name)
    last.set(yscale="log", xlabel="moments", ylabel="divergence from exact")
    last.legend(fontsize="small", frameon=False)
    for ax in axes:
        if not ax.has_data():
            ax.remove()
    # The divergences take what the semicircles leave of the first row.
    grid = last.get_gridspec()
    if grid is not None:
        last.set_subplotspec(grid[0, len(result.semicircle) : columns])
    return drawing


def semicircle_density(num_moments: int) -> EntropicDensity:
    r"""Return the density on ``[0, 1]`` with the analytic moments of the semicircle.

    The Catalan numbers :math:`\int x^{2k} = C_k / 4^k` make the Chebyshev moments
    :math:`1, 0, -\tfrac12, 0, 0, \dots`
    """
    moments = torch.zeros(num_moments + 1, dtype=torch.float64)
    moments[0] = 1.0
    moments[2:3] = -0.5
    density: EntropicDensity = maxent(moments, interval=SEMICIRCLE)
    return density


def semicircle_divergence(density: EntropicDensity) -> float:
    r"""Return :math:`KL(p \| q)` of a density :math:`q` from the semicircle on ``[0, 1]``."""
    angles = (torch.arange(ANGLES, dtype=torch.float64) + 0.5) * (math.pi / ANGLES)
    x, height = 0.5 + 0.5 * torch.cos(angles), 4 / math.pi * torch.sin(angles)
    weights = 2 / math.pi * torch.sin(angles).square() * (math.pi / ANGLES)
    return float((weights * (height.log() - density.log_pdf(x))).sum())


def histogram_divergence(values: Tensor, density: EntropicDensity, num_bins: int) -> float:
    """Return the divergence of a density from the histogram of eigenvalues on its support."""
    low, high = density.support
    edges = torch.linspace(low, high, num_bins + 1, dtype=torch.float64)
    inside = values.clamp(low, high)
    bins = torch.bucketize(inside, edges[1:-1], right=True)
    shares = torch.bincount(bins, minlength=num_bins).double() / len(values)
    masses = density.cdf(edges).diff().clamp_min(1e-300)
    return float(torch.special.xlogy(shares, shares / masses).sum())


def _moments(graph: graphs.Graph, config: Config, generator: torch.Generator) -> Moments:
    return graphs.moments(
        graph,
        num_moments=max(*config.counts, *config.drawn),
        num_probes=config.num_probes,
        exact=False,
        generator=generator,
    )


def _density(found: Moments, count: int) -> EntropicDensity:
    errors = found.stderr[: count + 1]
    density: EntropicDensity = maxent(
        found.mean[: count + 1], interval=found.interval, stderr=errors
    )
    return density


def _off(values: Tensor, found: Moments, density: EntropicDensity) -> float:
    """Largest distance of a fitted moment from the exact one, in standard errors."""
    m = len(density.alphas)
    angles = torch.arccos((values - 1).clamp(-1.0, 1.0))
    exact = _column([float(torch.cos(k * angles).mean()) for k in range(1, m + 1)])
    scale = found.stderr[1 : m + 1].clamp_min(1e-12)
    return float(((density.fitted - exact).abs() / scale).max())


def _draw_semicircle(ax: "Axes", density: EntropicDensity) -> None:
    x = torch.linspace(0.0, 1.0, 500, dtype=torch.float64)
    exact = 8 / math.pi * (0.25 - (x - 0.5).square()).clamp_min(0.0).sqrt()
    ax.plot(x, exact, color="#999999", linewidth=3, label="exact")
    ax.plot(x[1:-1], density.pdf(x[1:-1]), color="#0072B2", linewidth=1.2, label="entropic")
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="density", ylim=(0, None))
    ax.set_title(f"Semicircle, {len(density.alphas)} moments", loc="left", fontsize="small")


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
