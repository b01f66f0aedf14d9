"""Plots of graphs: similarity, numbers of clusters and fits of random graph models."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ritz.graphs import ClusterCount, Fit, Similarity
from ritz.plots import _style as style
from ritz.plots._plot import draw, plot, with_fields
from ritz.plots._series import Array, check_drawn
from ritz.plots._style import STYLE, Axes, Figure

NEAREST = style.REFERENCE | {"color": STYLE.vermilion}


def similarity(
    similarity: Similarity, *, ax: "Axes | None" = None, groups: tuple[int, ...] = ()
) -> "Axes":
    """Draw the distances between graphs as a heat map with numbers, and return the axes.

    Args:
        similarity: Distances of up to a few dozen graphs, so that the numbers stay readable.
        ax: Axes to draw on. Defaults to a new figure.
        groups: Numbers of consecutive graphs that belong together. Lines separate the groups.
    """
    check_drawn("similarity", similarity, Similarity)
    names = similarity.names
    if sum(groups) > len(names):
        raise ValueError(f"groups must hold at most {len(names)} graphs, got {groups}")
    side = 1.6 + 0.55 * len(names)
    ax = ax or style.panels(width=side + 0.6, height=side)[1][0]
    measure = similarity.measure.replace("_", " ").replace("kl", "KL")
    heat_map(ax, similarity.matrix.numpy(), names=names, label=measure)
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
    counts: dict[str, tuple[Any, float]] = {
        "components": (result.num_components, 0.0),
        "found one by one": (result.found, result.missed),
        f"sampled, below {result.threshold:.3g}": (
            result.estimate,
            STYLE.sigmas * result.estimate_stderr,
        ),
    }
    known = {
        name: (float(count), error)
        for name, (count, error) in counts.items()
        if count is not None and np.isfinite(float(count))
    }
    places = style.name_rows(ax, list(known))
    ax.grid(visible=False)
    for place, (count, error) in zip(places, known.values(), strict=True):
        finite = error if np.isfinite(error) else 0.0
        style.bars(ax, [count], [place], xerr=finite, markersize=5)
    if result.count is not None:
        ax.axvline(result.count, linestyle="--", label=f"{result.count:,} clusters", **NEAREST)
        style.legend(ax, above=True)
    ax.set(xlabel="number of clusters", xmargin=0.15)
    ax.locator_params(axis="x", integer=True)
    low, high = result.gap
    known_gap = np.isfinite(low + high)
    style.set_title(ax, f"gap {low:.3g} to {high:.3g}" if known_gap else result.reason)


# ------------------------------------------------------------------------------------------
# Fits of random graph models.

MODELS = {
    "erdos_renyi": "Erdős-Rényi",
    "barabasi_albert": "Barabási-Albert",
    "watts_strogatz": "Watts-Strogatz",
}


@draw.register(with_fields("model", "divergences"))
def _(model: Any, ax: "Axes") -> None:
    order = model.values.argsort()
    x, y = model.values[order].numpy(), model.divergences[order].numpy()
    style.line(ax, x, y, STYLE.blue, "divergence", marker="o", markersize=3)
    # A graph of the model itself has a divergence below this in 95 % of draws.
    ax.axhline(model.typical, linestyle=":", label="95 % of the model's own graphs below",
               **style.REFERENCE)  # fmt: skip
    name = next(iter(model.interval), next(iter(model.parameters), ""))
    if len(x) > 1:
        ax.axvline(model.parameters[name], linestyle="--", label="nearest", **NEAREST)
    else:
        ax.set_xticks([])
    ax.set(xlabel=name.replace("_", " "), ylabel="divergence")
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
