"""Spectra of maximum entropy beside exact ones: Spectral Machine Learning, Figures 3.1 to 3.3.

The study fits a semicircle from its analytic moments, and a sparse Erdős-Rényi graph and a
Barabási-Albert graph from sampled moments. With more moments, the divergence from the exact
histogram falls, quickly at first. What remains is the sampling error of the histogram and of the
probes.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ritz import graphs, plots
from ritz._core.checks import check_range
from ritz._core.progress import Progress
from ritz.graphs._shared import chebyshev_means
from ritz.plots._shared import style
from ritz.spectra import EntropicDensity, Moments, maxent
from ritz.studies import _protocol as study
from ritz.studies._evidence import Evidence

ANGLES = 4000  # nodes of the quadrature over the semicircle


@study.record
class Config:
    """Graphs, numbers of moments, and probes.

    Attributes:
        num_nodes: Vertices of both graphs.
        p: Probability of an edge of the Erdős-Rényi graph.
        num_edges: Edges of each new vertex of the Barabási-Albert graph.
        semicircle: Numbers of moments for the panels of the semicircle.
        drawn: Numbers of moments for the panels of the graphs.
        counts: Numbers of moments at which divergences are measured, ascending.
        num_probes: Probes of the moments.
        num_bins: Bins of the histograms on ``[0, 2]`` that divergences are measured from.
        seed: Seed of graphs and probes.
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
        study.check_minimums(self, num_nodes=50, num_edges=1, num_probes=2, num_bins=2, seed=0)
        study.check_minimums(self, semicircle=1, drawn=1, counts=1)
        check_range("p", self.p, low=0.0, high=1.0)


@study.record
class Result(study.StudyResult[Config]):
    """Densities by the number of moments, and how far they are from the exact spectra.

    Attributes:
        names: Names of the graphs.
        eigenvalues: Exact eigenvalues by graph, ``(n,)`` each.
        densities: Densities by graph, one for each number of moments in ``drawn``.
        semicircle: Densities of the semicircle on ``[0, 1]``, one for each number of moments.
        divergences: Kullback-Leibler divergences by spectrum, ``(counts,)``: from the semicircle
            itself, and from the histograms of the graphs.
        entropies: Entropies by spectrum, ``(counts,)``.
        moment_errors: Largest difference of a fitted moment from the exact one of the graph, in
            standard errors, by graph, ``(counts,)``.
    """

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
            study.row("moments", c.counts, ">9", width=34),
        ]
        tables = {
            "divergence": self.divergences,
            "entropy": self.entropies,
            "moment error (stderr)": self.moment_errors,
        }
        for title, table in tables.items():
            for name in ("semicircle", *self.names):
                if name in table:
                    lines.append(study.row(f"{name}: {title}", table[name], ">9.2g", width=34))
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the spectra and their divergences."""
    generator = study.seeded(config.seed)
    n = config.num_nodes
    # Mean degrees p n = 5 and 2 num_edges = 10: sparse, so the spectra have spikes.
    made = {
        "Erdős-Rényi": graphs.erdos_renyi(n, p=config.p, generator=generator),
        "Barabási-Albert": graphs.barabasi_albert(
            n, num_edges=config.num_edges, generator=generator
        ),
    }
    # The semicircle has exact moments, so it shows the error of maximum entropy alone.
    circles = [semicircle_density(count) for count in config.counts]
    divergences = {"semicircle": study.column(map(semicircle_divergence, circles))}
    entropies = {"semicircle": study.column(one.entropy for one in circles)}
    exact, densities, errors = {}, {}, {}
    for name, graph in study.track(made.items(), "graphs", progress):
        exact[name] = values = graphs.eigenvalues(graph)
        # All moments at once: fewer moments are the first of more.
        sampled = graphs.moments(
            graph,
            num_moments=max(*config.counts, *config.drawn),
            num_probes=config.num_probes,
            exact=False,
            generator=generator,
        )
        fits = [_density(sampled, count) for count in config.counts]
        # From the histogram of the exact eigenvalues.
        divergences[name] = study.column(
            histogram_divergence(values, one, config.num_bins) for one in fits
        )
        entropies[name] = study.column(one.entropy for one in fits)
        errors[name] = study.column(_moment_error(values, sampled, one) for one in fits)
        densities[name] = tuple(_density(sampled, count) for count in config.drawn)
    return Result(
        config=config,
        names=tuple(made),
        eigenvalues=exact,
        densities=densities,
        semicircle=tuple(semicircle_density(count) for count in config.semicircle),
        divergences=divergences,
        entropies=entropies,
        moment_errors=errors,
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the divergences from the exact spectra."""
    figures = {
        "Erdős-Rényi": "Figure 3.1",
        "semicircle": "Figure 3.2",
        "Barabási-Albert": "Figure 3.3",
    }
    for name, divergence in result.divergences.items():
        falls = float(divergence[-1]) < 0.1 * float(divergence[0])
        yield Evidence(
            paper="SPECTRA",
            where=figures[name],
            what=f"{name}: divergence from the exact spectrum, {result.config.counts[0]} to "
            f"{result.config.counts[-1]} moments",
            published="the fit improves with moments",
            measured=f"{float(divergence[0]):.2g} to {float(divergence[-1]):.2g}",
            verdict="agrees" if falls else "differs",
        )


def figure(result: Result) -> style.Figure:
    """Draw the semicircle, both graphs by the number of moments, and the divergences."""
    drawn = result.config.drawn
    columns = max(len(drawn), len(result.semicircle) + 1)
    drawing, axes = plots.panels(3, columns, width=3.2, height=2.4)
    for ax, one in zip(axes, result.semicircle, strict=False):
        _draw_semicircle(ax, one)
    for place, name in enumerate(result.names, start=1):
        for ax, one in zip(axes[place * columns :], result.densities[name], strict=False):
            exact = result.eigenvalues[name]
            plots.over_histogram(one, exact, ax=ax, num_bins=200, label="entropic")
            style.set_title(ax, f"{name}, {len(one.alphas)} moments")
    style.share_legend(drawing)  # within the panels, legends would hide the curves
    last = axes[columns - 1]
    for name in ("semicircle", *result.names):
        # A logarithmic axis needs positive values; the semicircle goes below 1e-7.
        heights = result.divergences[name].clamp_min(1e-7).numpy()
        last.plot(result.config.counts, heights, marker=".", label=name)
    style.finish(last, "number of moments", "divergence from exact", yscale="log")
    for ax in axes:
        if not ax.has_data():
            ax.remove()
    # The divergences fill the rest of the first row.
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
    # E[T_2] = E[2 x^2 - 1] = 2 / 4 - 1 = -1/2 for the semicircle on [-1, 1]; E[T_2k] = 0 for k > 1.
    moments[2:3] = -0.5
    density: EntropicDensity = maxent(moments, interval=(0.0, 1.0))
    return density


def semicircle_divergence(density: EntropicDensity) -> float:
    r"""Return :math:`KL(p \| q)` of a density :math:`q` from the semicircle on ``[0, 1]``."""
    # x = (1 + cos a) / 2 turns p(x) dx into (2 / pi) sin(a)^2 da: the midpoint rule is spectrally
    # accurate for periodic integrands.
    angles = (torch.arange(ANGLES, dtype=torch.float64) + 0.5) * (math.pi / ANGLES)
    x, height = 0.5 + 0.5 * torch.cos(angles), 4 / math.pi * torch.sin(angles)
    weights = 2 / math.pi * torch.sin(angles).square() * (math.pi / ANGLES)
    return float((weights * (height.log() - density.log_pdf(x))).sum())


def histogram_divergence(values: Tensor, density: EntropicDensity, num_bins: int) -> float:
    """Return the divergence of a density from the histogram of eigenvalues on its support."""
    low, high = density.support
    edges = torch.linspace(low, high, num_bins + 1, dtype=torch.float64)
    # Roundoff may put eigenvalues just outside the support.
    inside = values.clamp(low, high)
    bins = torch.bucketize(inside, edges[1:-1], right=True)
    shares = torch.bincount(bins, minlength=num_bins).double() / len(values)
    masses = density.cdf(edges).diff().clamp_min(1e-300)
    # KL = sum_b s_b log(s_b / m_b); xlogy makes empty bins count 0.
    return float(torch.special.xlogy(shares, shares / masses).sum())


def _density(sampled: Moments, count: int) -> EntropicDensity:
    # `count` moments after moment zero, which is one.
    few = slice(count + 1)
    density: EntropicDensity = maxent(
        sampled.mean[few], interval=sampled.interval, stderr=sampled.stderr[few]
    )
    return density


def _moment_error(values: Tensor, sampled: Moments, density: EntropicDensity) -> float:
    """Return the largest error of a fitted moment, in standard errors."""
    m = len(density.alphas)
    exact = chebyshev_means(values, m, sampled.interval)[1:]
    # A moment without sampling error, such as the first, must not divide by zero.
    scale = sampled.stderr[1 : m + 1].clamp_min(1e-12)
    return float(((density.fitted - exact).abs() / scale).max())


def _draw_semicircle(ax: style.Axes, density: EntropicDensity) -> None:
    x = torch.linspace(0.0, 1.0, 500, dtype=torch.float64)
    # p(x) = (8 / pi) sqrt(1/4 - (x - 1/2)^2) on [0, 1].
    exact = 8 / math.pi * (0.25 - (x - 0.5).square()).clamp_min(0.0).sqrt()
    ax.plot(x, exact, color=style.STYLE.grey, linewidth=3, label="exact")
    ax.plot(x[1:-1], density.pdf(x[1:-1]), color=style.STYLE.blue, linewidth=1.2, label="entropic")
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="density", ylim=(0, None))
    style.set_title(ax, f"Semicircle, {len(density.alphas)} moments")
