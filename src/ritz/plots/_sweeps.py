"""Plots of sweeps: metrics of all runs over one option."""

from itertools import product
from typing import Any

import numpy as np

from ritz.plots import _style as style
from ritz.plots._plot import plot, with_fields
from ritz.plots._style import Axes, Figure

SweepLike = with_fields("grid", "seeds", "metrics", "outcomes")
MAX_TICKS = 8  # number of tick labels that fit beside each other
# Metrics for a second panel, beside the one by which points are compared.
PANELS = ("train_loss", "lambda_max")


@plot.register(SweepLike)
def _(result: Any) -> "Figure":
    if not result.metric:
        raise ValueError(f"no run has ended with a metric that could be drawn: {result.status}")
    names = [result.metric, *(name for name in PANELS if name in result.metrics)]
    names = list(dict.fromkeys(names))[:2]
    figure, axes = style.panels(1, len(names), width=4.6, height=3.4)
    for ax, name in zip(axes, names, strict=True):
        _draw(ax, result, name)
    style.set_title(axes[0], f"{len(result.seeds)} runs (dots) and their mean")
    if len(axes) > 1 and axes[0].get_legend() is not None:
        style.share_legend(figure)
    return figure


def _draw(ax: "Axes", result: Any, name: str) -> None:
    """Draw a metric over one option, a line for each combination of the others."""
    percent = 100.0 if name.endswith("accuracy") else 1.0
    options = list(result.grid)
    along = _axis(result.grid)
    places = np.arange(1.0) if along is None else _places(result.grid[options[along]])
    values = percent * np.asarray(result.metrics[name])
    # The option along the axis comes before the seeds, and the others first.
    table = values[None] if along is None else np.moveaxis(values, along, -2)
    others = [option for place, option in enumerate(options) if place != along]
    rows = table.reshape(-1, *table.shape[-2:])
    for index, chosen in enumerate(product(*(result.grid[option] for option in others))):
        label = ", ".join(f"{option} {value}" for option, value in zip(others, chosen, strict=True))
        _draw_row(ax, places, rows[index], index, label or None)
    if percent == 1.0:
        style.log_scale(ax, rows)
    _name_places(ax, result, along, places)
    ax.set_ylabel(name.replace("_", " ") + (" (%)" if percent > 1 else ""))
    style.legend(ax)


def _draw_row(ax: "Axes", places: Any, runs: Any, index: int, label: str | None) -> None:
    """Draw runs ``(places, seeds)`` as points, and their means as a line."""
    colour, marker = style.series_look(index)
    seen = np.isfinite(style.drawable(runs))
    counts = seen.sum(1)
    sums = np.where(seen, runs, 0.0).sum(1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    order = np.argsort(places)
    # Markers of means are hollow, so that the runs behind them are visible.
    style.line(ax, places[order], means[order], colour, label, marker=marker,
               markerfacecolor="none", markersize=7)  # fmt: skip
    x = np.repeat(places, runs.shape[1])
    ax.scatter(x, style.drawable(runs).ravel(), s=9, color=colour, linewidths=0)


def _axis(grid: dict[str, list[Any]]) -> int | None:
    """Return the option for the horizontal axis: numeric if possible, with the most values."""
    if not grid:
        return None
    lists = list(grid.values())
    return max(range(len(lists)), key=lambda place: (_numeric(lists[place]), len(lists[place])))


def _numeric(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _places(values: list[Any]) -> Any:
    """Return the places of values on the horizontal axis; words have the places 0, 1, ..."""
    return np.asarray(values, dtype=float) if _numeric(values) else np.arange(float(len(values)))


def _name_places(ax: "Axes", result: Any, along: int | None, places: Any) -> None:
    if along is None:
        ax.set_xticks([])
        ax.set_xlabel(f"{len(result.seeds)} runs")
        return
    option, values = list(result.grid.items())[along]
    if _numeric(values) and style.spans_decade(places):
        style.log_scale(ax, name="x")
    if not _numeric(values) or len(values) <= MAX_TICKS:
        ax.set_xticks(places, [f"{x:g}" if _numeric(values) else str(x) for x in values])
        ax.tick_params(axis="x", which="minor", bottom=False)
    ax.set_xlabel("learning rate" if option == "lr" else option.replace("_", " "))
