"""Plots of graphs: similarity, numbers of clusters and fits of random graph models."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from ritz.graphs import ClusterCount, Fit, Similarity
from ritz.plots import _style as style
from ritz.plots._plot import draw, plot, with_fields
from ritz.plots._series import Array, check_drawn
from ritz.plots._style import STYLE, Axes, Figure

# Labels of the measures of similarity.
MEASURES = {
    "symmetric_kl": "symmetric KL divergence",
    "jensen_shannon": "Jensen-Shannon divergence",
    "wasserstein": "Wasserstein distance",
    "heat": "distance of heat traces",
}
NEAREST = style.REFERENCE | {"color": STYLE.vermilion}


def similarity(
    similarity: Similarity, *, ax: "Axes | None" = None, groups: tuple[int, ...] = ()
) -> "Axes":
    """Draw the distances between graphs as a heat map with numbers, and return the axes.

    Args:
        similarity: Distances of up to a few dozen graphs, so that the numbers stay readable.
        ax: Axes to draw on. Defaults to a new figure.
        groups: Sizes of groups of consecutive graphs. Lines are drawn between groups.
    """
    check_drawn("similarity", similarity, Similarity)
    names = similarity.names
    if sum(groups) > len(names):
        raise ValueError(f"groups must have a sum of at most {len(names)}, got {groups}")
    side = 1.6 + 0.55 * len(names)
    ax = ax or style.panels(width=side + 0.6, height=side)[1][0]
    heat_map(ax, similarity.matrix.numpy(), names=names, label=MEASURES[similarity.measure])
    for place in np.cumsum(groups):
        if place < len(names):
            ax.axhline(place - 0.5, color="white", linewidth=2)
            ax.axvline(place - 0.5, color="white", linewidth=2)
    return ax


@plot.register(Similarity)
def _(result: Similarity) -> "Figure":
    return cast("Figure", similarity(result).figure)


def heat_map(ax: "Axes", matrix: Array, *, names: Sequence[str], label: str) -> None:
    """Draw a matrix of distances ``(N, N)`` as colours, with its numbers.

    Args:
        ax: Axes to draw on.
        matrix: Distances, not negative except for roundoff.
        names: Names of rows and columns.
        label: Label of the colour bar.
    """
    from matplotlib.colors import PowerNorm

    # A square root spreads small distances, where similar things differ.
    largest = float(matrix.max())
    norm = PowerNorm(0.5, vmin=0.0, vmax=largest or 1.0)
    image = ax.imshow(matrix.clip(min=0.0), cmap="viridis_r", norm=norm)
    for (row, column), value in np.ndenumerate(matrix):
        # sqrt(0.2) = 0.45 of the colour map is equally far from black and from white.
        colour = "white" if value > 0.2 * largest else "black"
        # + 0.0 turns -0.0 into 0.0.
        text = f"{round(value, 2) + 0.0:.2f}" if value < 9.95 else f"{value:.0f}"
        ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=6.5)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")
    ax.set_yticks(range(len(names)), names, fontsize="small")
    ax.figure.colorbar(image, ax=ax, shrink=0.8).set_label(label)


@draw.register(ClusterCount)
def _(result: ClusterCount, ax: "Axes") -> None:
    # N(lambda) = n F(lambda) is level in a gap. Small eigenvalues need a logarithmic axis, on which
    # the eigenvalues 0 lie to the left of the panel.
    x = np.geomspace(1e-4, 1.0, STYLE.max_points)
    drawn = [np.array([float(result.num_components)])]
    if result.density is not None:
        below = result.num_nodes * result.density.cdf(torch.from_numpy(x)).numpy()
        style.line(ax, x, below, STYLE.blue, "eigenvalues below")
        drawn.append(below.clip(min=0.5))
    if result.estimate_stderr > 0:
        error = STYLE.sigmas * result.estimate_stderr
        style.bars(ax, [result.threshold], [result.estimate], yerr=[error], label="sampled")
    low, high = result.gap
    if result.count is not None:
        ax.axhline(result.count, linestyle="--", label=f"{result.count:,} clusters", **NEAREST)
        if np.isfinite(low + high):
            ax.axvspan(max(low, x[0]), high, color=STYLE.grey, alpha=STYLE.band, linewidth=0,
                       label="gap")  # fmt: skip
    ax.set(xlim=(x[0], x[-1]), ylim=(0.9 * min(map(np.min, drawn)), None))
    style.log_scale(ax, name="x")
    style.log_scale(ax, *drawn)
    title = f"gap {low:.3g} to {high:.3g}" if np.isfinite(low + high) else ""
    if result.count is None:
        title = result.reason.partition(":")[0]
    style.finish(ax, r"eigenvalue $\lambda$", r"number of eigenvalues below $\lambda$", title)


# ------------------------------------------------------------------------------------------
# Fits of random graph models.

MODELS = {
    "erdos_renyi": "Erdős-Rényi",
    "barabasi_albert": "Barabási-Albert",
    "watts_strogatz": "Watts-Strogatz",
}
# Labels of the parameter that is searched, for models whose argument is not a label by itself.
PARAMETERS = {
    "erdos_renyi": "edge probability $p$",
    "barabasi_albert": "edges of a new vertex",
    "stochastic_block_model": "share of edges between blocks",
    "watts_strogatz": "rewiring probability $p$",
}


@draw.register(with_fields("model", "divergences"))
def _(model: Any, ax: "Axes") -> None:
    order = model.values.argsort()
    x, y = model.values[order].numpy(), model.divergences[order].numpy()
    style.line(ax, x, y, STYLE.blue, "divergence", marker="o", markersize=3)
    # A graph of the model itself has a divergence below this in 95 % of draws.
    ax.axhline(model.typical, linestyle=":", label="95 % quantile of graphs drawn from the model",
               **style.REFERENCE)  # fmt: skip
    name = next(iter(model.interval), next(iter(model.parameters), ""))
    if len(x) > 1:
        ax.axvline(model.parameters[name], linestyle="--", label="nearest", **NEAREST)
        ax.locator_params(axis="x", nbins=5)
    else:
        ax.set_xticks([])
    ax.set(xlabel=PARAMETERS.get(model.model, name.replace("_", " ")), ylabel="divergence")
    style.log_scale(ax, y, [model.typical])
    style.set_title(ax, MODELS.get(model.model, model.model.replace("_", " ")))


@plot.register(Fit)
def _(result: Fit) -> "Figure":
    columns = min(3, len(result.fits))
    figure, axes = style.panel_grid(len(result.fits), columns, width=3.4, height=2.8)
    for ax in axes[1:]:
        ax.sharey(axes[0])
    for ax, model in zip(axes, result.fits, strict=True):
        draw(model, ax)
    # The common scale follows all models, not only the one drawn last.
    for index, ax in enumerate(axes):
        style.log_scale(ax, *(model.divergences for model in result.fits))
        if index % columns:
            ax.set_ylabel("")
    style.share_legend(figure)
    return figure
