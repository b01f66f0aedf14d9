"""Training curves: loss, accuracy and settings by epoch; plots of sweeps over options."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, cast

import numpy as np

from ritz.plots import _series as arrays
from ritz.plots import _style as style
from ritz.plots._plot import plot, plot_several, with_fields
from ritz.plots._style import STYLE, Axes, Figure

# Lines by data set: colour (for a single run), line style and width.
LINES: dict[str, tuple[str, Any, float]] = {
    "train": (STYLE.grey, ":", 1.2),
    "validation": (STYLE.sky, "-.", 1.4),
    "test": (STYLE.blue, "-", 1.4),
    "average validation": (STYLE.orange, (0, (5, 1)), 1.6),
    "average test": (STYLE.vermilion, (0, (5, 1)), 1.6),
    "": (STYLE.blue, "-", 1.4),  # a setting of training, of no data set
}
TrainingLike = with_fields("history", "num_epochs")

# ------------------------------------------------------------------------------------------
# Curves by epoch.


def training_curves(
    runs: Mapping[str, Iterable[arrays.Record]], *, axes: "Sequence[Axes] | None" = None
) -> list["Axes"]:
    """Draw loss, accuracy and other metrics of training by epoch, and return the axes.

    A single run has one colour per data set, and a line where averaging begins. Several runs have
    one colour each and one line style per data set; from the eighth on they have markers as well.
    Texts show perplexity instead of accuracy. In a new figure, top-k accuracy, a learning rate that
    changed and a damping have panels too. Values that span a decade, but for accuracies, have a
    logarithmic scale. Infinite and NaN values are left out.

    Args:
        runs: Records of logs by name, as :func:`ritz.training.read_log` returns them.
        axes: Axes for the loss and, if there are any, for accuracies or perplexities. Defaults to a
            new figure, with one legend above it if there are several runs.
    """
    arrays.check_named("runs", runs, "names to the records of logs")
    series = {name: arrays.training_series(records) for name, records in runs.items()}
    measured = [name for name in ("perplexity", "accuracy")
                if any(one.quantities[name] for one in series.values())]  # fmt: skip
    shown = ["loss", *measured[:1]]
    if axes is not None and len(axes) != len(shown):
        raise ValueError(f"axes must be {len(shown)} for these runs, got {len(axes)}")
    if axes is None:
        usual = ("loss", "accuracy", "perplexity")
        # In the order of the log: top-k accuracies, learning rate, damping.
        shown += dict.fromkeys(
            name for one in series.values() for name in (*one.quantities, *one.settings)
            if name not in usual
        )  # fmt: skip
    # Up to three panels beside each other, and two rows of more.
    rows = 1 + (len(shown) > 3)
    drawn = list(axes or style.panels(rows, math.ceil(len(shown) / rows), width=4.4, height=3.1)[1])
    for ax, quantity in zip(drawn, shown, strict=False):
        _draw_runs(ax, series, quantity)
    for ax in drawn[len(shown) :]:
        ax.set_visible(False)
    if axes is None and len(series) > 1:
        style.share_legend(cast("Figure", drawn[0].figure))
    return drawn[: len(shown)]


def _draw_runs(ax: "Axes", runs: Mapping[str, arrays.TrainingSeries], quantity: str) -> None:
    alone = len(runs) == 1
    for index, (name, series) in enumerate(runs.items()):
        for part, values in _parts(series, quantity).items():
            y = style.drawable(values)
            _draw_run(ax, series.epoch, y, part, None if alone else name, index)
        if alone and series.average_from is not None:
            # Named in the legend: a text beside the line could cover a curve.
            ax.axvline(series.average_from, linestyle="--", label="averaging begins",
                       **style.REFERENCE)  # fmt: skip
    percent = quantity.endswith("accuracy")
    ax.set(xlabel="epoch", ylabel=f"{quantity} (%)" if percent else quantity)
    style.whole_x(ax, np.concatenate([series.epoch for series in runs.values()]))
    if not percent:
        curves = [y for one in runs.values() for y in _parts(one, quantity).values()]
        style.log_scale(ax, [], *curves)
    # The legend of a single run is opaque, because it may cover the line where averaging begins.
    opaque: Any = {"frameon": True, "edgecolor": "none", "framealpha": 1.0}
    style.legend(ax, **(opaque if alone else {}))


def _parts(series: arrays.TrainingSeries, quantity: str) -> Mapping[str, arrays.Array]:
    """Return a quantity by data set; a setting of training has no data set."""
    if quantity in series.settings:
        return {"": series.settings[quantity]}
    return series.quantities.get(quantity, {})


def _draw_run(
    ax: "Axes", epoch: arrays.Array, y: arrays.Array, part: str, run: str | None, index: int
) -> None:
    colour, line, width = LINES[part]
    finite = np.isfinite(y)
    if not finite.any():
        return
    # A line through one point is invisible, and colours repeat after the seventh run.
    lap = index // len(STYLE.palette)
    marker = STYLE.markers[lap % len(STYLE.markers)] if lap or finite.sum() == 1 else ""
    if run is not None:
        colour = style.series_look(index)[0]
        part = f"{run}, {part}" if part else ""
    style.line(ax, epoch[finite], y[finite], colour, part or None, linestyle=line, linewidth=width,
               marker=marker, markersize=4.5 if lap else 3.0,
               markevery=0.1 if finite.sum() > 10 else None)  # fmt: skip


@plot.register(TrainingLike)
def _(result: Any) -> "Figure":
    return plot_several(result, {"": result})


@plot_several.register(TrainingLike)
def _(first: Any, results: Mapping[Any, Any]) -> "Figure":
    return plot_several([], {str(name): _records(one) for name, one in results.items()})


@plot_several.register(list)
@plot_several.register(tuple)
def _(first: Sequence[arrays.Record], results: Mapping[Any, Any]) -> "Figure":
    return cast("Figure", training_curves(results)[0].figure)


def _records(result: Any) -> list[dict[str, Any]]:
    """Return the history of a training result as records of a log."""
    records: list[dict[str, Any]] = [{"kind": "epoch"} for _ in range(result.num_epochs)]
    for name, values in result.history.items():
        for record, value in zip(records, values.tolist(), strict=True):
            if not np.isnan(value):  # not measured, such as averages before averaging begins
                record[name] = value
    return records


# ------------------------------------------------------------------------------------------
# Sweeps: metrics of all runs over one option.

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
        _draw_metric(ax, result, name)
    if len(result.seeds) > 1:
        style.set_title(axes[0], f"{len(result.seeds)} runs (dots) and their mean")
    if len(axes) > 1 and axes[0].get_legend() is not None:
        style.share_legend(figure)
    return figure


def _draw_metric(ax: "Axes", result: Any, name: str) -> None:
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
        count = len(result.seeds)
        ax.set_xlabel(f"{count} run{'s' * (count > 1)}")
        return
    option, values = list(result.grid.items())[along]
    if _numeric(values) and style.spans_decade(places):
        style.log_scale(ax, name="x")
    if not _numeric(values) or len(values) <= MAX_TICKS:
        ax.set_xticks(places, [f"{x:g}" if _numeric(values) else str(x) for x in values])
        ax.tick_params(axis="x", which="minor", bottom=False)
    ax.set_xlabel("learning rate" if option == "lr" else option.replace("_", " "))
