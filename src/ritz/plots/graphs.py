"""Pictures of graphs: spectra over exact histograms, and how alike graphs are."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz.graphs import Similarity
from ritz.plots.figures import BLUE, GREY, LEGEND, panels
from ritz.plots.series import density_curve
from ritz.spectra import Density

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_histogram(
    density: Density,
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
        density: On the support that is drawn.
        exact: All eigenvalues, ``(n,)``.
        ax: Where to draw; a new figure if not given.
        num_bins: Bins over the support.
        label: Of the density, in the legend.
    """
    check_count("num_bins", num_bins)
    ax = ax or panels()[1][0]
    heights, edges = np.histogram(
        exact.cpu().numpy(), bins=num_bins, range=density.support, density=True
    )
    ax.stairs(heights, edges, fill=True, color=GREY, alpha=0.6, label="exact")
    curve = density_curve(density)
    ax.plot(curve.x, curve.y, color=BLUE, linewidth=1.2, label=label or "density")
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
    from matplotlib.colors import PowerNorm

    names, matrix = similarity.names, similarity.matrix.numpy()
    if sum(groups) > len(names):
        raise ValueError(f"groups must hold at most {len(names)} graphs, got {groups}")
    side = 1.6 + 0.55 * len(names)
    ax = ax or panels(width=side + 0.6, height=side)[1][0]
    # The root spreads small distances, where graphs of a kind differ.
    norm = PowerNorm(0.5, vmin=0.0, vmax=float(matrix.max()) or 1.0)
    image = ax.imshow(matrix.clip(min=0.0), cmap="viridis_r", norm=norm)
    _write_numbers(ax, matrix)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize="small")
    ax.set_yticks(range(len(names)), names, fontsize="small")
    for place in torch.tensor(groups).cumsum(0).tolist():
        if place < len(names):
            ax.axhline(place - 0.5, color="white", linewidth=2)
            ax.axvline(place - 0.5, color="white", linewidth=2)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label(similarity.measure.replace("_", " "))
    return ax


def _write_numbers(ax: "Axes", matrix: Any) -> None:
    dark = 0.35 * matrix.max()
    for (row, column), value in np.ndenumerate(matrix):
        colour = "white" if value > dark else "black"
        text = f"{round(value, 2) + 0.0:.2f}" if value < 9.95 else f"{value:.0f}"
        ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=6.5)
