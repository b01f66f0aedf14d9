"""The figure of the study ``adaptive_gap``."""

import math
from typing import Any

import numpy as np
from torch import Tensor

from ritz import plots
from ritz.plots._shared import style


def draw(result: Any, setup: Any, curves: list[tuple[str, Tensor]]) -> style.Figure:
    """Draw errors against damping, both heat maps, the grid, and the curves by epoch and time.

    Args:
        result: Result of the study; parts that were not run are empty.
        setup: Its data and lengths.
        curves: Errors and times by method, in order.
    """
    rows = [bool(len(result.lopt)), bool(result.grids), bool(curves)]
    drawing, axes = plots.panels(max(1, sum(rows)), 3, width=4.2, height=3.4)
    left = iter(axes)
    if rows[0]:
        _draw_lopt(result, setup, [next(left) for _ in range(3)])
    if rows[1]:
        _draw_grid(result, [next(left) for _ in range(3)])
    if rows[2]:
        _draw_curves(curves, [next(left) for _ in range(3)])
    for spare in left:
        spare.remove()
    return drawing


def _draw_lopt(result: Any, setup: Any, axes: list[Any]) -> None:
    errors = 100 * result.lopt.mean(1)
    for j, eta in enumerate(setup.etas):
        colour = style.STYLE.palette[j]
        # One entry for each eta: the title says which lines are of training.
        for part, (label, dashes) in enumerate(((None, "--"), (f"eta = {eta:g}", "-"))):
            style.line(axes[0], setup.deltas, errors[part, :, j], colour, label, linestyle=dashes)
    for part, dashes in ((0, "--"), (1, "-")):
        level = 100 * float(result.descent[part].mean())
        label = "gradient descent" if part else None
        axes[0].axhline(level, color=style.STYLE.grey, linestyle=dashes, linewidth=0.8, label=label)
    axes[0].set_ylim(top=1.4 * float(errors.max()))  # room for the legend
    title = "Solid: test; dashed: training"
    style.finish(axes[0], "damping", "error (%)", title, xscale="log")
    for part, name in enumerate(("training", "test")):
        change = errors[part] - np.nanmin(errors[part])
        names = [f"{eta:g}" for eta in setup.etas]
        title = f"{name.capitalize()} error above the best (%)"
        _map(axes[1 + part], change, [f"{delta:g}" for delta in setup.deltas], names, title)
        axes[1 + part].set(xlabel="eta", ylabel="damping")


def _draw_grid(result: Any, axes: list[Any]) -> None:
    name, scores = next(iter(result.grids.items()))
    # Runs that diverged and runs that are missing are both NaN.
    blank = "none" if result.missing else "diverged"
    grid, mean = result.config.grid(name), scores.mean(1)
    rates, deltas = [f"{rate:g}" for rate in grid.rates], [f"{delta:g}" for delta in grid.deltas]
    for part, title in enumerate(("training error (%)", "test error (%)", "largest eigenvalue")):
        values = mean[part].T * (1 if part == 2 else 100)
        _map(axes[part], values, deltas, rates, f"{name.replace('_', ' ')}: {title}", blank)
        axes[part].set(xlabel="learning rate", ylabel="damping")


def _draw_curves(curves: list[tuple[str, Tensor]], axes: list[Any]) -> None:
    for index, (name, curve) in enumerate(curves):
        errors, times = 100 * curve[0].mean(0), curve[1].mean(0)
        colour, marker = style.series_look(index)
        options: dict[str, Any] = {"marker": marker, "markevery": max(1, len(errors) // 5)}
        style.line(axes[0], range(1, len(errors) + 1), errors, colour, name, **options)
        style.line(axes[1], times, errors, colour, None, **options)
    style.finish(axes[0], "epoch", "training error (%)", "at equal epochs", xscale="log")
    style.finish(axes[1], "processor time (s)", "", "at equal time", xscale="log")
    # The legend fills the third panel.
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].get_legend().remove()
    axes[2].legend(handles, labels, loc="center left", frameon=False, fontsize="small")
    axes[2].axis("off")


def _map(
    ax: Any,
    values: Tensor,
    rows: list[str],
    columns: list[str],
    title: str,
    blank: str = "diverged",
) -> None:
    """Draw a matrix as colours with its numbers."""
    array = style.drawable(values)
    image = ax.imshow(array, cmap="viridis_r", aspect="auto")
    finite = array[np.isfinite(array)]
    middle = float(finite.min() + finite.max()) / 2 if len(finite) else math.nan
    for (i, j), value in np.ndenumerate(array):
        text = blank if math.isnan(value) else f"{value:.3g}"
        # Numbers must be legible on light and on dark colours.
        colour = "white" if value > middle else "black"
        ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    style.set_title(ax, title)
    ax.figure.colorbar(image, ax=ax)
