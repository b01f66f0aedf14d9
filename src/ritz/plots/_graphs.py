"""Plots of graphs: densities over exact histograms, distances, numbers of clusters, models."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz.graphs import ClusterCount, Fit, Similarity
from ritz.plots._scales import log_y, set_title, spans_decade
from ritz.plots._series import Array, check_drawn, density_curve
from ritz.plots._spectra import BLUE, GREY, LEGEND, VERMILION, panels, share_legend, with_pdf
from ritz.spectra import Density, Spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def over_histogram(
    density: Density | Spectrum,
    exact: Tensor,
    *,
    ax: "Axes | None" = None,
    num_bins: int = 100,
    label: str | None = None,
) -> "Axes":
    """Draw a density over the histogram of the exact eigenvalues, and return the axes.

    The vertical axis ends at one and a half times the highest bin but the ten highest, so that an
    eigenvalue many times repeated does not flatten the rest.

    Args:
        density: On the support that is drawn; points are smoothed, as by :func:`density`.
        exact: All eigenvalues, ``(n,)``.
        ax: Where to draw; a new figure if not given.
        num_bins: Bins over the support.
        label: Of the density, in the legend.
    """
    smooth, width = with_pdf(density)
    check_count("num_bins", num_bins)
    ax = ax or panels()[1][0]
    heights, edges = np.histogram(
        exact.cpu().numpy(), bins=num_bins, range=smooth.support, density=True
    )
    ax.stairs(heights, edges, fill=True, color=GREY, alpha=0.6, label="exact")
    curve = density_curve(smooth)
    words = ", ".join(filter(None, (label or "density", width)))
    ax.plot(curve.x, curve.y, color=BLUE, linewidth=1.2, label=words)
    top = np.sort(heights)[-11] if num_bins > 20 else heights.max()
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="density", ylim=(0, 1.5 * top or None))
    ax.legend(loc="upper right", **LEGEND)
    return ax


def similarity(
    similarity: Similarity, *, ax: "Axes | None" = None, groups: tuple[int, ...] = ()
) -> "Axes":
    """Draw the distances between graphs as a heat map with its numbers, and return the axes.

    Args:
        similarity: Of a few dozen graphs at most, for the numbers to be read.
        ax: Where to draw; a new figure if not given.
        groups: How many graphs in a row belong together; lines are drawn between them.
    """
    check_drawn("similarity", similarity, Similarity)
    names, matrix = similarity.names, similarity.matrix.numpy()
    if sum(groups) > len(names):
        raise ValueError(f"groups must hold at most {len(names)} graphs, got {groups}")
    side = 1.6 + 0.55 * len(names)
    ax = ax or panels(width=side + 0.6, height=side)[1][0]
    heat_map(
        ax, matrix, names=names, label=similarity.measure.replace("_", " ").replace("kl", "KL")
    )
    for place in torch.tensor(groups).cumsum(0).tolist():
        if place < len(names):
            ax.axhline(place - 0.5, color="white", linewidth=2)
            ax.axvline(place - 0.5, color="white", linewidth=2)
    return ax


def heat_map(ax: "Axes", matrix: Array, *, names: Sequence[str], label: str) -> None:
    """Draw a matrix of distances as colours with its numbers.

    Args:
        ax: Where to draw.
        matrix: ``(N, N)``, none negative but for roundoff.
        names: Of rows and columns, ``N``.
        label: Of the bar of colours.
    """
    from matplotlib.colors import PowerNorm

    # The root spreads small distances, where things of a kind differ.
    norm = PowerNorm(0.5, vmin=0.0, vmax=float(matrix.max()) or 1.0)
    image = ax.imshow(matrix.clip(min=0.0), cmap="viridis_r", norm=norm)
    _write_numbers(ax, matrix)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")
    ax.set_yticks(range(len(names)), names, fontsize="small")
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label(label)


def _write_numbers(ax: "Axes", matrix: Any) -> None:
    dark = 0.2 * matrix.max()  # where viridis is as far from black as from white, by the root
    for (row, column), value in np.ndenumerate(matrix):
        colour = "white" if value > dark else "black"
        text = f"{round(value, 2) + 0.0:.2f}" if value < 9.95 else f"{value:.0f}"
        ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=6.5)


MODELS = {
    "erdos_renyi": "Erdős-Rényi",
    "barabasi_albert": "Barabási-Albert",
    "watts_strogatz": "Watts-Strogatz",
}


def draw_cluster_count(result: ClusterCount, ax: "Axes") -> None:
    """Draw the number of clusters as it was counted in each way, with two standard errors.

    Args:
        result: With a count, or with a sampled number of small eigenvalues at least.
        ax: Where to draw.
    """
    low, high = result.gap
    ways = {
        "components": (result.num_components, 0.0),
        "found one by one": (result.found, result.missed),
        f"sampled, below {result.threshold:.3g}": (result.estimate, 2 * result.estimate_stderr),
    }
    known = {name: pair for name, pair in ways.items() if pair[0] is not None}
    known = {name: pair for name, pair in known.items() if np.isfinite(float(pair[0] or 0))}
    for place, (number, error) in enumerate(known.values()):
        ax.errorbar(float(number or 0), place, xerr=error if np.isfinite(error) else None,
                    fmt="o", color=BLUE, markersize=5, capsize=3)  # fmt: skip
    if result.count is not None:
        ax.axvline(result.count, color=VERMILION, linewidth=1.0, linestyle="--", zorder=0,
                   label=f"{result.count:,} clusters")  # fmt: skip
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), **LEGEND)
    ax.set_yticks(range(len(known)), list(known))
    ax.set(xlabel="number of clusters", ylim=(len(known) - 0.5, -0.5))
    ax.margins(x=0.15)
    ax.locator_params(axis="x", integer=True)
    set_title(ax, f"gap {low:.3g} to {high:.3g}" if np.isfinite(low + high) else result.reason)


def draw_model(model: Any, ax: "Axes") -> None:
    """Draw the divergence of one model from a graph over the parameter that was searched.

    Args:
        model: One of the ``fits`` of a :class:`ritz.graphs.Fit`.
        ax: Where to draw.
    """
    order = model.values.argsort()
    x, y = model.values[order].numpy(), model.divergences[order].numpy()
    ax.plot(x, y, color=BLUE, marker="o", markersize=3, linewidth=1.2, label="divergence")
    ax.axhline(model.typical, color=GREY, linestyle=":", linewidth=1.2,
               label="95 % of the model's own graphs below")  # fmt: skip
    name = next(iter(model.interval), next(iter(model.parameters), ""))
    if len(x) > 1:
        ax.axvline(model.parameters[name], color=VERMILION, linewidth=0.8, linestyle="--",
                   label="nearest", zorder=0)  # fmt: skip
    else:
        ax.set_xticks([])
    ax.set(xlabel=name.replace("_", " "))
    ax.set_ylabel("divergence")
    if spans_decade(y, [model.typical]):
        log_y(ax)
    set_title(ax, MODELS.get(model.model, model.model.replace("_", " ")))


def draw_fit(result: Fit) -> "Figure":
    """Return a figure of the divergences of all models from a graph on one scale, nearest first.

    Args:
        result: Of one model at least.
    """
    columns = min(3, len(result.fits))
    figure, axes = panels(-(-len(result.fits) // columns), columns, width=3.4, height=2.8)
    for ax in axes[1:]:
        ax.sharey(axes[0])
    for ax, model in zip(axes, result.fits, strict=False):
        draw_model(model, ax)
    for spare in axes[len(result.fits) :]:
        spare.remove()
    for index, ax in enumerate(axes[: len(result.fits)]):
        if spans_decade(*(model.divergences for model in result.fits)):
            log_y(ax)
        if index % columns:
            ax.set_ylabel("")
    share_legend(figure)
    return figure
