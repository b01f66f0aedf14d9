"""Parameters of random graphs from their spectra: Spectral Machine Learning, Table 3.1.

Graphs of Erdős-Rényi, Watts-Strogatz and Barabási-Albert are drawn, and the parameter whose graphs
have the nearest spectrum is searched. Then the model of large Barabási-Albert graphs is to be found
among small graphs of all three.

Errors of a mean are taken from the parameter that the graphs were drawn with. Of Erdős-Rényi graphs
the share of pairs that became edges scatters about it by itself, and so must whatever is told from
a graph: two more rows have the standard error of that share, and how far the spectra are from the
share that was drawn. The published error 0 at n = 50 is below that scatter for any mean over fewer
than 800 graphs.
How many neighbours the published Watts-Strogatz graphs had is not said: ten are taken, and fewer
and more beside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ritz import graphs
from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.graphs._shared import Model
from ritz.studies._protocol import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS: tuple[Model, ...] = ("erdos_renyi", "watts_strogatz", "barabasi_albert")
TITLES = {
    "erdos_renyi": "Erdős-Rényi, p = 0.6",
    "watts_strogatz": "Watts-Strogatz, p = 0.4, k = ",
    "barabasi_albert": "Barabási-Albert, r = 0.4 n",
}
SHARES = {"erdos_renyi": 0.6, "watts_strogatz": 0.4, "barabasi_albert": 0.4}
PAPER = {
    "erdos_renyi": {50: 0.600, 100: 0.598, 150: 0.604},
    "watts_strogatz": {50: 0.468, 100: 0.454, 150: 0.414},
    "barabasi_albert": {50: 18.936, 100: 40.239, 150: 58.428},
}


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is drawn and searched.

    Attributes:
        sizes: Vertices of the graphs whose parameter is searched.
        num_seeds: Graphs of every size and model.
        num_neighbors: Of Watts-Strogatz graphs; what it was in the published table is not said.
        other_neighbors: Further ones that these are drawn with.
        num_draws: Graphs that are drawn at each value of a parameter.
        large: Vertices of the graphs whose model is searched.
        small: Vertices of the graphs that they are compared with.
        large_edges: Edges of each new vertex of the large graphs.
        large_seeds: Large graphs of each.
        seed: Of all graphs and probes.
    """

    sizes: tuple[int, ...] = (50, 100, 150)
    num_seeds: int = 10
    num_neighbors: int = 10
    other_neighbors: tuple[int, ...] = (4, 20)
    num_draws: int = 48
    large: int = 5000
    small: int = 1000
    large_edges: tuple[int, ...] = (1, 2, 3, 5)
    large_seeds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for size in self.sizes:
            check_count("sizes", size, low=20)
        check_count("num_seeds", self.num_seeds, low=2)
        for count in (self.num_neighbors, *self.other_neighbors):
            check_count("num_neighbors", count, low=2)
        check_count("num_draws", self.num_draws, low=2)
        check_count("large", self.large, low=50)
        check_count("small", self.small, low=50)
        check_count("large_seeds", self.large_seeds)
        check_range("seed", self.seed, low=0)

    @property
    def cases(self) -> dict[str, tuple[Model, int]]:
        """Model and neighbours of every row by its name."""
        found: dict[str, tuple[Model, int]] = {one: (one, self.num_neighbors) for one in MODELS}
        for k in self.other_neighbors:
            found[f"watts_strogatz, {k}"] = ("watts_strogatz", k)
        return dict(sorted(found.items(), key=lambda one: MODELS.index(one[1][0])))


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Parameters that were found, and divergences of the large graphs.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        truths: Parameters by case (a model, with other neighbours too), ``(sizes,)``.
        estimates: Parameters found, by case, ``(sizes, num_seeds)``.
        covered: Whether the interval held the truth, likewise.
        drawn: Share of pairs that are edges in the Erdős-Rényi graphs as drawn, likewise.
        divergences: Of large graphs from the nearest of each model,
            ``(large_edges, large_seeds, models)``.
        stderr: Their errors likewise.
        large_estimates: Edges of each new vertex that were found, ``(large_edges, large_seeds)``.
    """

    config: Config
    versions: dict[str, str]
    truths: dict[str, Tensor]
    estimates: dict[str, Tensor]
    covered: dict[str, Tensor]
    drawn: Tensor
    divergences: Tensor
    stderr: Tensor
    large_estimates: Tensor

    def __str__(self) -> str:
        c = self.config
        lines = [f"Parameters from spectra, mean over {c.num_seeds} graphs ± its standard error"]
        lines.append(f"{'':36}" + "".join(f"{f'n = {size}':>22}" for size in c.sizes))
        for case in c.cases:
            lines += self._rows(case)
        lines.append(
            f"Large Barabási-Albert graphs, {c.large:,} vertices, among models of {c.small:,}: "
            "divergence from each"
        )
        for edges, apart, error, found in zip(
            c.large_edges, self.divergences, self.stderr, self.large_estimates, strict=True
        ):
            cells = [
                f"{model} {value:.2g} ± {off:.1g}"
                for model, value, off in zip(
                    MODELS, apart.mean(0).tolist(), error.mean(0).tolist(), strict=True
                )
            ]
            right = int((apart.argmin(1) == MODELS.index("barabasi_albert")).sum())
            told = f"recognised {right} of {len(apart)}, r found {found.tolist()}"
            lines.append(f"  r = {edges}: " + ", ".join(cells) + f"; {told}")
        return "\n".join(lines)

    def _rows(self, case: str) -> list[str]:
        model, k = self.config.cases[case]
        found, truth = self.estimates[case], self.truths[case]
        mean, error = found.mean(1), found.std(1) / found.shape[1] ** 0.5
        title = TITLES[model] + (str(k) if model == "watts_strogatz" else "")
        rows = {
            title: [
                f"{a:.4g} ± {b:.2g}" for a, b in zip(mean.tolist(), error.tolist(), strict=True)
            ],
            "  error of the mean": _told(mean - truth),
            "  as published": [self._published(model, place) for place in range(len(truth))],
            "  interval holds the truth": [f"{x:.0%}" for x in self.covered[case].mean(1)],
        }
        if model == "erdos_renyi":
            rows["  standard error of the share drawn"] = _told(self.scatter)
            rows["  distance from the share drawn"] = _told((found - self.drawn).mean(1))
        return [f"{name:36}" + "".join(f"{cell:>22}" for cell in row) for name, row in rows.items()]

    @property
    def scatter(self) -> Tensor:
        r"""Standard error of the mean share of pairs that are drawn as edges, ``(sizes,)``.

        .. math:: \sqrt{p (1 - p) / (N n (n - 1) / 2)}
        """
        n, p = _column([float(size) for size in self.config.sizes]), SHARES["erdos_renyi"]
        return (p * (1 - p) / (self.config.num_seeds * n * (n - 1) / 2)).sqrt()

    def _published(self, model: str, place: int) -> str:
        size = self.config.sizes[place]
        truth = _truth(model, size)
        if size not in PAPER[model]:
            return "-"
        return f"{PAPER[model][size]:.4g}, {abs(PAPER[model][size] - truth):.2g}"


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the parameters that are found, and the divergences of large graphs."""
    shape = (len(config.sizes), config.num_seeds)
    estimates: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    truths: dict[str, Tensor] = {}
    drawn = torch.zeros(shape, dtype=torch.float64)
    steps = len(config.cases) * len(config.sizes) + len(config.large_edges)
    with tracking(progress, "tables", steps) as bar:
        for place, (case, (model, k)) in enumerate(config.cases.items()):
            truths[case] = _column([_truth(model, size) for size in config.sizes])
            estimates[case], covered[case] = torch.zeros(2, *shape, dtype=torch.float64)
            for row, size in enumerate(config.sizes):
                for seed in range(config.num_seeds):
                    graph, value, inside = _searched(model, k, size, seed, config)
                    estimates[case][row, seed], covered[case][row, seed] = value, float(inside)
                    if model == "erdos_renyi":
                        drawn[row, seed] = 2 * graph.num_edges / size / (size - 1)
                bar.update(place * len(config.sizes) + row + 1, case)
        large = torch.stack([_large(edges, config) for edges in config.large_edges])
        bar.update(steps)
    return Result(
        config=config,
        versions=versions(),
        truths=truths,
        estimates=estimates,
        covered=covered,
        drawn=drawn,
        divergences=large[..., :3],
        stderr=large[..., 3:6],
        large_estimates=large[..., 6],
    )


def figure(result: Result) -> "Figure":
    """Draw what was found over the truth, and the divergences of the large graphs."""
    from ritz import plots

    c = result.config
    drawing, axes = plots.panels(1, 4, width=3.0, height=2.8)
    for ax, model in zip(axes, MODELS, strict=False):
        truth = result.truths[model][:, None]
        ratios = result.estimates[model] / truth
        for place, size in enumerate(c.sizes):
            label = "found" if place == 0 else None
            ax.plot([size] * c.num_seeds, ratios[place], ".", color="#0072B2", label=label)
            if size in PAPER[model]:
                mean = PAPER[model][size] / float(truth[place])
                label = "published mean" if place == 0 else None
                ax.plot(size, mean, "x", color="#D55E00", markersize=8, label=label)
        ax.axhline(1.0, color="#999999", linewidth=0.8)
        ax.set(xlabel="vertices", xticks=c.sizes)
        title = TITLES[model] + (str(c.num_neighbors) if model == "watts_strogatz" else "")
        ax.set_title(title, loc="left", fontsize="small")
    axes[0].set_ylabel("parameter over the truth")
    axes[0].legend(fontsize="small", frameon=False)
    for place, model in enumerate(MODELS):
        heights = result.divergences[..., place].mean(1).numpy()
        axes[3].plot(range(len(heights)), heights, "o-", label=TITLES[model].partition(",")[0])
    axes[3].set(yscale="log", xlabel="edges of a new vertex", ylabel="divergence")
    axes[3].set_xticks(range(len(c.large_edges)), [str(edges) for edges in c.large_edges])
    axes[3].set_title(f"Barabási-Albert, n = {c.large:,}", loc="left", fontsize="small")
    axes[3].legend(fontsize="small", frameon=False)
    return drawing


def _searched(
    model: Model, k: int, size: int, seed: int, config: Config
) -> tuple[graphs.Graph, float, bool]:
    """A graph, the parameter found in it, and whether the interval holds the truth."""
    generator = _seeded(config, seed)
    truth = _truth(model, size)
    graph = _makers(size, k)[model](truth, generator)
    fitted = graphs.fit(graph, models=[model], num_draws=config.num_draws, generator=generator)
    (found,) = fitted.fits
    name = "num_edges" if model == "barabasi_albert" else "p"
    low, high = found.interval[name]
    return graph, found.parameters[name], low <= truth <= high


def _large(edges: int, config: Config) -> Tensor:
    """Three divergences, their errors, and the edges found, for every seed."""
    rows = []
    for seed in range(config.large_seeds):
        generator = _seeded(config, 1000 + seed)
        graph = graphs.barabasi_albert(config.large, num_edges=edges, generator=generator)
        found = graphs.fit(
            graph, models=MODELS, num_probes=128, num_nodes=config.small, generator=generator
        )
        by_name = {one.model: one for one in found.fits}
        fits = [by_name[model] for model in MODELS]
        numbers = [one.divergence for one in fits] + [one.stderr for one in fits]
        rows.append(_column([*numbers, fits[2].parameters["num_edges"]]))
    return torch.stack(rows)


def _makers(size: int, k: int) -> dict[str, Callable[[float, torch.Generator], graphs.Graph]]:
    return {
        "erdos_renyi": lambda p, g: graphs.erdos_renyi(size, p=p, generator=g),
        "watts_strogatz": lambda p, g: graphs.watts_strogatz(
            size, num_neighbors=k, p=p, generator=g
        ),
        "barabasi_albert": lambda r, g: graphs.barabasi_albert(
            size, num_edges=round(r), generator=g
        ),
    }


def _truth(model: str, size: int) -> float:
    share = SHARES[model]
    return float(round(share * size)) if model == "barabasi_albert" else share


def _told(errors: Tensor) -> list[str]:
    return [f"{value:.2g}" for value in errors.abs().tolist()]


def _seeded(config: Config, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(100_000 * config.seed + seed)


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
