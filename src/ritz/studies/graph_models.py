"""Parameters of random graphs from their spectra: Spectral Machine Learning, Table 3.1.

The study draws graphs of Erdős-Rényi, Watts-Strogatz and Barabási-Albert, and searches for the
parameter whose graphs have the nearest spectrum. Then it searches for the model of large
Barabási-Albert graphs among small graphs of all three models.

The error of a mean is its distance from the parameter with which the graphs were drawn. By chance,
the edge density of an Erdős-Rényi graph differs from its parameter p, and so does an estimate of p
from the graph. Two more rows show by how much: the standard error of the edge density, and the
distance of the estimates from the edge density. At n = 50 the paper reports the error 0, which is
smaller than this chance error for a mean over fewer than 800 graphs. The paper does not say how
many neighbours its Watts-Strogatz graphs had. The study uses ten, and repeats the rows with fewer
and with more.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from ritz import graphs, plots
from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz.graphs._shared import Model
from ritz.plots._shared import style
from ritz.studies._evidence import Evidence, all_of, judge, spread
from ritz.studies._protocol import StudyResult, check_minimums, column, record, row, seeded, track

MODELS: tuple[Model, ...] = ("erdos_renyi", "watts_strogatz", "barabasi_albert")
TITLES = {
    "erdos_renyi": "Erdős-Rényi, p = 0.6",
    "watts_strogatz": "Watts-Strogatz, p = 0.4, k = ",
    "barabasi_albert": "Barabási-Albert, r = 0.4 n",
}
# p, p and r / n of the published graphs.
SHARES = {"erdos_renyi": 0.6, "watts_strogatz": 0.4, "barabasi_albert": 0.4}
# Table 3.1: mean estimates by number of vertices.
PAPER = {
    "erdos_renyi": {50: 0.600, 100: 0.598, 150: 0.604},
    "watts_strogatz": {50: 0.468, 100: 0.454, 150: 0.414},
    "barabasi_albert": {50: 18.936, 100: 40.239, 150: 58.428},
}
TOLERANCE = 0.2  # of a parameter; the largest published error is 17 %


@record
class Config:
    """Graphs that are drawn, and what is searched.

    Attributes:
        sizes: Vertices of the graphs whose parameter is searched.
        num_seeds: Graphs of every size and model.
        num_neighbors: Neighbours in the Watts-Strogatz graphs.
        other_neighbors: Further numbers of neighbours, in additional rows.
        num_draws: Graphs drawn at each value of a parameter.
        large: Vertices of the graphs whose model is searched.
        small: Vertices of the graphs that they are compared with.
        large_edges: Edges of each new vertex of the large graphs.
        large_seeds: Large graphs for each number of edges.
        seed: Seed of all graphs and probes.
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
        check_minimums(self, sizes=20, num_seeds=2, num_draws=2, large=50, small=50)
        check_minimums(self, large_seeds=1, seed=0)
        for count in (self.num_neighbors, *self.other_neighbors):
            check_count("num_neighbors", count, low=2)

    @property
    def cases(self) -> dict[str, tuple[Model, int]]:
        """Model and number of neighbours of every row, by name of the row."""
        # Rows of the same model are adjacent in the table.
        rows: dict[str, tuple[Model, int]] = {one: (one, self.num_neighbors) for one in MODELS}
        rows |= {f"watts_strogatz, {k}": ("watts_strogatz", k) for k in self.other_neighbors}
        return dict(sorted(rows.items(), key=lambda item: MODELS.index(item[1][0])))


@record
class Result(StudyResult[Config]):
    """Estimated parameters, and divergences of the large graphs.

    Attributes:
        truths: True parameters by row of the table, ``(sizes,)``.
        estimates: Estimated parameters by row, ``(sizes, num_seeds)``.
        covered: Whether the interval holds the truth, by row, same shape.
        drawn: Share of pairs that are edges in the Erdős-Rényi graphs, same shape.
        divergences: Divergences of the large graphs from the nearest graphs of each model,
            ``(large_edges, large_seeds, models)``.
        stderr: Their standard errors, same shape.
        large_estimates: Estimated edges of each new vertex, ``(large_edges, large_seeds)``.
    """

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
        lines.append(row("", [f"n = {size}" for size in c.sizes], ">22", width=36))
        for case in c.cases:
            lines += self._rows(case)
        lines.append(
            f"Large Barabási-Albert graphs of {c.large:,} vertices: divergence from each model of "
            f"{c.small:,} vertices"
        )
        for place, edges in enumerate(c.large_edges):
            apart, error = self.divergences[place], self.stderr[place].mean(0)
            pairs = zip(MODELS, apart.mean(0), error, strict=True)
            cells = [f"{model} {value:.2g} ± {off:.1g}" for model, value, off in pairs]
            right = int((apart.argmin(1) == MODELS.index("barabasi_albert")).sum())
            lines.append(
                f"  r = {edges}: {', '.join(cells)}; correct model in {right} of {len(apart)}, "
                f"estimated r {self.large_estimates[place].tolist()}"
            )
        return "\n".join(lines)

    def _rows(self, case: str) -> list[str]:
        model, k = self.config.cases[case]
        estimates, truth = self.estimates[case], self.truths[case]
        mean, error = estimates.mean(1), estimates.std(1) / estimates.shape[1] ** 0.5
        means = [f"{a:.4g} ± {b:.2g}" for a, b in zip(mean, error, strict=True)]
        # The published mean, and its distance from the truth.
        paper = [
            f"{PAPER[model][size]:.4g}, {abs(PAPER[model][size] - float(true)):.2g}"
            if size in PAPER[model]
            else "-"
            for size, true in zip(self.config.sizes, truth, strict=True)
        ]
        rows = {
            _title(model, k): means,
            "  error of the mean": _magnitudes(mean - truth),
            "  as published": paper,
            "  interval holds the truth": [f"{x:.0%}" for x in self.covered[case].mean(1)],
        }
        if model == "erdos_renyi":
            rows["  standard error of the edge density"] = _magnitudes(self.scatter)
            rows["  distance from the edge density"] = _magnitudes((estimates - self.drawn).mean(1))
        return [row(name, cells, ">22", width=36) for name, cells in rows.items()]

    @property
    def scatter(self) -> Tensor:
        r"""Standard error of the mean share of pairs that are drawn as edges, ``(sizes,)``.

        .. math:: \sqrt{p (1 - p) / (N n (n - 1) / 2)}
        """
        n, p = column(self.config.sizes), SHARES["erdos_renyi"]
        # n (n - 1) / 2 pairs per graph, each an edge with probability p, over N graphs.
        return (p * (1 - p) / (self.config.num_seeds * n * (n - 1) / 2)).sqrt()


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the estimated parameters, and the divergences of the large graphs."""
    shape = (2, len(config.sizes), config.num_seeds)
    # Estimate, and whether its interval holds the truth.
    cells = {case: torch.zeros(shape, dtype=torch.float64) for case in config.cases}
    truths = {case: column(_truth(model, size) for size in config.sizes)
              for case, (model, _) in config.cases.items()}  # fmt: skip
    drawn = torch.zeros(shape[1:], dtype=torch.float64)
    rows = list(product(config.cases.items(), enumerate(config.sizes)))
    for (case, (model, k)), (i, size) in track(rows, "parameters", progress):
        for j in range(config.num_seeds):
            # The same seeds for every size and model; those of other configurations do not overlap.
            generator = seeded(100_000 * config.seed + j)
            graph = _draw(model, size, float(truths[case][i]), k, generator)
            cells[case][:, i, j] = _search(graph, model, truths[case][i], config, generator)
            if model == "erdos_renyi":
                # Pairs: n (n - 1) / 2.
                drawn[i, j] = 2 * graph.num_edges / size / (size - 1)
    # Three divergences, three errors and one parameter in the last dimension.
    edges = track(config.large_edges, "large graphs", progress)
    large = torch.stack([_large(number, config) for number in edges])
    return Result(
        config=config,
        truths=truths,
        estimates={case: numbers[0] for case, numbers in cells.items()},
        covered={case: numbers[1] for case, numbers in cells.items()},
        drawn=drawn,
        divergences=large[..., :3],
        stderr=large[..., 3:6],
        large_estimates=large[..., 6],
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the published estimates of Table 3.1 beside ours."""
    c = result.config
    note = f"tolerance {TOLERANCE:.0%} of the parameter"
    for case, (model, k) in c.cases.items():
        estimates, truth = result.estimates[case], result.truths[case]
        published = column(PAPER[model].get(size, torch.nan) for size in c.sizes)
        yield Evidence(
            paper="SPECTRA",
            where="Table 3.1a",
            what=f"{_title(model, k)}: estimate for n = {', '.join(map(str, c.sizes))}",
            published=", ".join(f"{value:.4g}" for value in published),
            measured=", ".join(spread(values) for values in estimates),
            # The published claim is that the parameters are recovered.
            **all_of(
                *(
                    judge(estimate / true, 1 - TOLERANCE, 1 + TOLERANCE, note=note)
                    for estimate, true in zip(estimates, truth, strict=True)
                )
            ),
        )
    # A graph is recognised if its own model has the least divergence.
    right = (result.divergences.argmin(2) == MODELS.index("barabasi_albert")).sum(1).tolist()
    yield Evidence(
        paper="SPECTRA",
        where="Table 3.1b",
        what=f"model of a Barabási-Albert graph of {c.large:,} vertices, r = "
        + ", ".join(map(str, c.large_edges)),
        published="recognised",
        measured=", ".join(f"{count} of {c.large_seeds}" for count in right),
        verdict="agrees" if min(right) == c.large_seeds else "differs",
    )


def figure(result: Result) -> style.Figure:
    """Draw the estimates over the truth, and the divergences of the large graphs."""
    c = result.config
    drawing, axes = plots.panels(1, 4, width=3.0, height=2.8)
    for ax, model in zip(axes, MODELS, strict=False):
        truth = result.truths[model][:, None]
        # Relative to the truth, so that sizes share an axis.
        ratios = result.estimates[model] / truth
        for place, size in enumerate(c.sizes):
            label = "estimate" if place == 0 else None
            ax.plot([size] * c.num_seeds, ratios[place], ".", color=style.STYLE.blue, label=label)
            if size in PAPER[model]:
                mean = PAPER[model][size] / float(truth[place])
                label = "published mean" if place == 0 else None
                ax.plot(size, mean, "x", color=style.STYLE.vermilion, markersize=8, label=label)
        ax.axhline(1.0, **style.REFERENCE)
        ylabel = "estimated / true parameter" if ax is axes[0] else ""
        style.finish(ax, "vertices", ylabel, _title(model, c.num_neighbors), xticks=c.sizes)
    for place, model in enumerate(MODELS):
        heights = result.divergences[..., place].mean(1).numpy()
        axes[3].plot(range(len(heights)), heights, "o-", label=TITLES[model].partition(",")[0])
    axes[3].set_xticks(range(len(c.large_edges)), [str(edges) for edges in c.large_edges])
    title = f"Barabási-Albert, n = {c.large:,}"
    style.finish(axes[3], "edges of a new vertex", "divergence", title, yscale="log")
    return drawing


def _search(
    graph: graphs.Graph, model: Model, truth: Tensor, config: Config, generator: torch.Generator
) -> Tensor:
    """Return the parameter estimated from a graph, and whether its interval holds the truth."""
    (fit,) = graphs.fit(graph, models=[model], num_draws=config.num_draws, generator=generator).fits
    name = "num_edges" if model == "barabasi_albert" else "p"
    # Two standard deviations of the scatter between graphs of the model.
    low, high = fit.interval[name]
    return column([fit.parameters[name], bool(low <= truth <= high)])


def _draw(model: str, size: int, value: float, k: int, generator: torch.Generator) -> graphs.Graph:
    if model == "erdos_renyi":
        return graphs.erdos_renyi(size, p=value, generator=generator)
    if model == "watts_strogatz":
        return graphs.watts_strogatz(size, num_neighbors=k, p=value, generator=generator)
    return graphs.barabasi_albert(size, num_edges=round(value), generator=generator)


def _large(edges: int, config: Config) -> Tensor:
    """Return three divergences, their errors and the estimated edges, ``(large_seeds, 7)``."""
    rows = []
    for seed in range(config.large_seeds):
        # Beyond the seeds of the first table.
        generator = seeded(100_000 * config.seed + 1000 + seed)
        graph = graphs.barabasi_albert(config.large, num_edges=edges, generator=generator)
        # Graphs of the models have `small` vertices, which is cheaper than the size of the graph.
        result = graphs.fit(
            graph, models=MODELS, num_probes=128, num_nodes=config.small, generator=generator
        )
        fits = sorted(result.fits, key=lambda fit: MODELS.index(fit.model))
        numbers = [fit.divergence for fit in fits] + [fit.stderr for fit in fits]
        rows.append(column([*numbers, fits[2].parameters["num_edges"]]))
    return torch.stack(rows)


def _truth(model: str, size: int) -> float:
    share = SHARES[model]
    # Edges of a new vertex are a whole number.
    return float(round(share * size)) if model == "barabasi_albert" else share


def _title(model: str, k: int) -> str:
    return TITLES[model] + (str(k) if model == "watts_strogatz" else "")


def _magnitudes(errors: Tensor) -> list[str]:
    return [f"{value:.2g}" for value in errors.abs().tolist()]
