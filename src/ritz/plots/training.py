"""Pictures of training: curves, curvature over time, and what the batch size does."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ritz.measures.degeneracy import Degeneracy
from ritz.plots.figures import BLUE, GREY, LEGEND, ORANGE, PALETTE, SKY, VERMILION, panels
from ritz.plots.records import (
    Number,
    Points,
    Record,
    TrainingSeries,
    curvature_points,
    degeneracy_points,
    points,
    training_series,
)
from ritz.plots.scales import log_y, spans_decade
from ritz.plots.series import Array
from ritz.plots.titles import monitor_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vPX"
# By data: colour where there is one run, and line where there are several.
LINES: dict[str, tuple[str, Any, float]] = {
    "train": (GREY, ":", 1.2),
    "validation": (SKY, "-.", 1.4),
    "test": (BLUE, "-", 1.4),
    "average validation": (ORANGE, (0, (5, 1)), 1.6),
    "average test": (VERMILION, (0, (5, 1)), 1.6),
}
Runs = Mapping[str, Iterable[Record]]


def training_curves(runs: Runs, *, axes: "Sequence[Axes] | None" = None) -> list["Axes"]:
    """Draw loss and accuracy by epoch, with those of the averaged iterate; return the axes.

    One run has a colour for each part of the data, and a mark where averaging begins; several have
    a colour each and a line for each part. Texts have perplexities in place of accuracies. Losses
    and perplexities that span a decade are on a logarithmic scale.

    Args:
        runs: Records of logs, as :func:`ritz.training.read_log` returns them, by name.
        axes: One for the loss and, where there are any, one for accuracies or perplexities; new
            ones otherwise.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    found = {name: training_series(list(records)) for name, records in runs.items()}
    second = [what for what in ("perplexity", "accuracy")
              if any(getattr(one, what) for one in found.values())]  # fmt: skip
    shown = ("loss", *second[:1])
    if axes is not None and len(axes) != len(shown):
        raise ValueError(f"axes must be {len(shown)} for these runs, got {len(axes)}")
    drawn = panels(1, len(shown), width=4.4, height=3.1)[1] if axes is None else list(axes)
    for ax, what in zip(drawn, shown, strict=True):
        for index, (name, series) in enumerate(found.items()):
            alone = len(found) == 1
            _draw_run(
                ax, series, getattr(series, what), None if alone else name, PALETTE[index % 7]
            )
        ax.set(xlabel="epoch", ylabel="accuracy (%)" if what == "accuracy" else what)
        _whole_epochs(ax)
        values = [y for one in found.values() for y in getattr(one, what).values()]
        if what != "accuracy" and spans_decade(*values):
            log_y(ax)
        # White behind it: the mark of averaging may run there.
        ax.legend(loc="best", **LEGEND | {"frameon": True, "edgecolor": "none", "framealpha": 1.0})
    return drawn


def curvature_over_time(
    records: Iterable[Record], *, ax: "Axes | None" = None, log: bool = True
) -> "Axes":
    r"""Draw the largest eigenvalue against :math:`2 / \alpha` over time, and return the axes.

    A band is the residual, within which an eigenvalue lies.

    Args:
        records: Of a log with a ``CurvatureMonitor`` that measures ``lambda_max``.
        ax: Where to draw; a new figure if not given.
        log: Logarithmic scale of the eigenvalue, where it spans a decade.
    """
    ax = ax or panels(width=4.4, height=3.1)[1][0]
    records = list(records)
    largest = curvature_points(records, "lambda_max")
    label = r"largest eigenvalue $\lambda_1$"
    _draw_line(ax, largest, BLUE, "o", label, band=(1.0, "residual"))
    drawn = [largest.y]
    if any(record.get("threshold") is not None for record in records):
        bound = curvature_points(records, "threshold")
        drawn.append(bound.y)
        ax.plot(bound.x, bound.y, "--", color=VERMILION, linewidth=1.2, label=r"$2/\alpha$")
    if log and spans_decade(*drawn):
        log_y(ax)
    ax.set(xlabel=_unit(records), ylabel="eigenvalue")
    ax.set_title(monitor_title(records), loc="left", fontsize="medium")
    _whole_epochs(ax)
    ax.legend(loc="best", **LEGEND)
    return ax


def degeneracy(
    found: Mapping[str, Mapping[float, Degeneracy]] | Iterable[Record],
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the share of eigenvalues at the origin over epochs, and return the axes.

    A band is two standard errors; a spectrum from one probe, as a log has it, has none.

    Args:
        found: Degeneracies by epoch, by name (such as ``Hessian, batch norm eval``); or the
            records of a log with a ``CurvatureMonitor`` that measures ``spectrum``.
        ax: Where to draw; a new figure if not given.
    """
    ax = ax or panels(width=4.4, height=3.1)[1][0]
    if isinstance(found, Mapping):
        series = {name: degeneracy_points(one) for name, one in found.items()}
        unit = "epoch"
    else:
        records = list(found)
        series, unit = {"": curvature_points(records, "degeneracy")}, _unit(records)
        ax.set_title(monitor_title(records), loc="left", fontsize="medium")
    for index, (name, one) in enumerate(series.items()):
        style = PALETTE[index % 7], MARKERS[index % 7]
        _draw_line(ax, one, *style, name, band=(2.0, "2 stderr"))
    ax.set(xlabel=unit, ylabel="share of eigenvalues near 0", ylim=(0, 1.03))
    _whole_epochs(ax)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="best", **LEGEND)
    return ax


def batch_scaling(
    batch_sizes: Sequence[int],
    measured: Mapping[str, Sequence[Number]],
    *,
    predicted: Mapping[str, Sequence[Number]] | None = None,
    quantity: str = "largest eigenvalue",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw quantities over batch sizes, both on logarithmic scales, and return the axes.

    Args:
        batch_sizes: In samples, in any order.
        measured: Estimates, drawn with two standard errors, or numbers; one for each batch size,
            by name.
        predicted: Likewise, drawn as lines; one with the name of a measurement has its colour.
        quantity: What it is, for the vertical axis.
        ax: Where to draw; a new figure if not given.
    """
    if not measured:
        raise ValueError("measured must hold at least one quantity, got none")
    ax = ax or panels(width=4.4, height=3.1)[1][0]
    names = [*measured, *(name for name in predicted or {} if name not in measured)]
    colours = {name: PALETTE[index % 7] for index, name in enumerate(names)}
    for index, (name, values) in enumerate(measured.items()):
        _draw_points(ax, points(batch_sizes, values), colours[name], MARKERS[index % 7], name)
    for name, values in (predicted or {}).items():
        line = points(batch_sizes, values)
        ax.plot(line.x, line.y, color=colours[name], linewidth=1.2, label=f"{name}, predicted")
    ax.set_xscale("log", base=2)
    log_y(ax)
    ax.set_xticks(sorted(set(batch_sizes)), [f"{size:,}" for size in sorted(set(batch_sizes))])
    ax.tick_params(axis="x", which="minor", bottom=False)
    ax.set(xlabel="batch size $B$ (samples)", ylabel=quantity)
    ax.legend(loc="best", **LEGEND)
    return ax


def _draw_run(
    ax: "Axes", series: TrainingSeries, values: Mapping[str, Array], run: str | None, colour: str
) -> None:
    for part, y in values.items():
        own, line, width = LINES[part]
        keep = np.isfinite(y)
        label = part if run is None else f"{run}, {part}"
        marker = "o" if keep.sum() == 1 else ""  # a line of one point is not seen
        ax.plot(series.epoch[keep], y[keep], linestyle=line, linewidth=width, label=label,
                color=own if run is None else colour, marker=marker, markersize=3)  # fmt: skip
    if run is None and series.average_from is not None:
        # Named in the legend: a word beside the line would lie on a curve sooner or later.
        ax.axvline(series.average_from, color=GREY, linewidth=0.8, linestyle="--", zorder=0,
                   label="averaging begins")  # fmt: skip


def _draw_line(
    ax: "Axes", found: Points, colour: str, marker: str, label: str, *, band: tuple[float, str]
) -> None:
    """Points joined by a line, between so many errors, which the legend names."""
    sigmas, what = band
    if (found.stderr > 0).any():  # NaN where a single probe has no error
        low, high = found.y - sigmas * found.stderr, found.y + sigmas * found.stderr
        ax.fill_between(found.x, low, high, color=colour, alpha=0.25, linewidth=0)
        label = f"{label} ± {what}".lstrip()
    ax.plot(found.x, found.y, color=colour, marker=marker, markersize=4, linewidth=1.2,
            label=label or None)  # fmt: skip


def _draw_points(ax: "Axes", found: Points, colour: str, marker: str, label: str) -> None:
    ax.errorbar(found.x, found.y, yerr=2 * found.stderr if found.stderr.any() else None,
                color=colour, marker=marker, markersize=4, linewidth=1.2, capsize=2,
                linestyle="none", label=label)  # fmt: skip


def _unit(records: Iterable[Record]) -> str:
    found = [record for record in records if record.get("kind") == "curvature"]
    epochs = [record.get("epoch") for record in found]
    return "epoch" if None not in epochs and len(set(epochs)) == len(epochs) else "step"


def _whole_epochs(ax: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
