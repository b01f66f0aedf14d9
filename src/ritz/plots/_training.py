"""Pictures of training: curves, curvature over time, and what the batch size does."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ritz.measures import Degeneracy
from ritz.plots._scales import drawable, isolated, log_y, monitor_title, spans_decade, whole_x
from ritz.plots._series import (
    Array,
    Number,
    Points,
    Record,
    TrainingSeries,
    curvature_points,
    degeneracy_points,
    points,
    training_series,
)
from ritz.plots._spectra import (
    BLUE,
    GREY,
    LEGEND,
    ORANGE,
    PALETTE,
    SKY,
    VERMILION,
    panels,
    share_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

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
    a colour each, beyond the seventh with a marker too, and a line for each part. Texts have
    perplexities in place of accuracies. Losses and perplexities that span a decade are on a
    logarithmic scale. What is infinite or NaN is left out.

    Args:
        runs: Records of logs, as :func:`ritz.training.read_log` returns them, by name.
        axes: One for the loss and, where there are any, one for accuracies or perplexities; new
            ones otherwise, with one legend above both where there are several runs.
    """
    if not isinstance(runs, Mapping):
        raise TypeError(f"runs must be a mapping of names to the records of logs, such as "
                        f"{{'sgd': read_log(folder)}}, got {type(runs).__name__}")  # fmt: skip
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
        _draw_runs(ax, found, what)
    if axes is None and len(found) > 1:
        share_legend(drawn[0].figure)  # type: ignore[arg-type]
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
        _draw_curve(ax, bound, VERMILION, r"$2/\alpha$", linestyle="--")
    if log and spans_decade(*drawn):
        log_y(ax)
    ax.set(xlabel=_unit(records), ylabel="eigenvalue")
    ax.set_title(monitor_title(records), loc="left", fontsize="medium")
    whole_x(ax, largest.x)
    _legend(ax)
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
        _draw_line(ax, one, *_look(index), name, band=(2.0, "2 stderr"))
    ax.set(xlabel=unit, ylabel="share of eigenvalues near 0", ylim=(0, 1.03))
    whole_x(ax, np.concatenate([one.x for one in series.values()]))
    _legend(ax)
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
    handles = []
    for index, name in enumerate(names):
        colour, marker = _look(index)
        if name in measured:
            found = points(batch_sizes, measured[name])
            handles.append(_draw_points(ax, found, colour, marker, name))
        if name in (predicted or {}):
            line = points(batch_sizes, (predicted or {})[name])
            handles.append(_draw_curve(ax, line, colour, f"{name}, predicted"))
    ax.set_xscale("log", base=2)
    log_y(ax)
    ax.set_xticks(sorted(set(batch_sizes)), [f"{size:,}" for size in sorted(set(batch_sizes))])
    ax.tick_params(axis="x", which="minor", bottom=False)
    ax.set(xlabel="batch size $B$ (samples)", ylabel=quantity)
    # In the order they are drawn in: matplotlib's own has all lines before all error bars.
    ax.legend(handles=handles, loc="best", **LEGEND)
    return ax


def _draw_runs(ax: "Axes", runs: Mapping[str, TrainingSeries], what: str) -> None:
    alone = len(runs) == 1
    for index, (name, series) in enumerate(runs.items()):
        _draw_run(ax, series, getattr(series, what), None if alone else name, index)
    ax.set(xlabel="epoch", ylabel="accuracy (%)" if what == "accuracy" else what)
    whole_x(ax, np.concatenate([series.epoch for series in runs.values()]))
    values = [y for series in runs.values() for y in getattr(series, what).values()]
    if what != "accuracy" and values and spans_decade(*values):
        log_y(ax)
    # White behind the legend of one run: the mark of averaging may run there.
    _legend(ax, **({"frameon": True, "edgecolor": "none", "framealpha": 1.0} if alone else {}))


def _draw_run(
    ax: "Axes", series: TrainingSeries, values: Mapping[str, Array], run: str | None, index: int
) -> None:
    for part, found in values.items():
        own, line, width = LINES[part]
        y = drawable(found)
        keep = np.isfinite(y)
        if not keep.any():
            continue
        # A line of one point is not seen, and colours begin again after the seventh run.
        lap = index // len(PALETTE)
        marker = MARKERS[lap % len(MARKERS)] if lap or keep.sum() == 1 else ""
        ax.plot(series.epoch[keep], y[keep], linestyle=line, linewidth=width, marker=marker,
                markersize=3 if lap == 0 else 4.5, markevery=0.1 if keep.sum() > 10 else None,
                color=own if run is None else _look(index)[0],
                label=part if run is None else f"{run}, {part}")  # fmt: skip
    if run is None and series.average_from is not None:
        # Named in the legend: a word beside the line would lie on a curve sooner or later.
        ax.axvline(series.average_from, color=GREY, linewidth=0.8, linestyle="--", zorder=0,
                   label="averaging begins")  # fmt: skip


def _draw_line(
    ax: "Axes", found: Points, colour: str, marker: str, label: str, *, band: tuple[float, str]
) -> None:
    """Points joined by a line, between so many errors, which the legend names."""
    sigmas, what = band
    y, error = drawable(found.y), drawable(sigmas * found.stderr)
    known = np.isfinite(y + error)  # NaN where a single probe has no error: a gap of the band
    if (error[known] > 0).any():
        ax.fill_between(found.x, y - error, y + error, color=colour, alpha=0.25, linewidth=0)
        label = f"{label} ± {what}".lstrip()
        single = isolated(y + error)  # where a band has no width
        if single.any():
            ax.errorbar(found.x[single], y[single], yerr=error[single], fmt="none",
                        ecolor=colour, elinewidth=1.2, capsize=3)  # fmt: skip
    ax.plot(found.x, y, color=colour, marker=marker, markersize=4, linewidth=1.2,
            label=label if label and np.isfinite(y).any() else None)  # fmt: skip


def _draw_curve(
    ax: "Axes", found: Points, colour: str, label: str, *, linestyle: str = "-"
) -> "Line2D":
    """A line without markers but where a point has no neighbour: there it is a dash."""
    y = drawable(found.y)
    single = np.flatnonzero(isolated(y))
    (line,) = ax.plot(found.x, y, linestyle=linestyle, color=colour, linewidth=1.2, label=label,
                      marker="_" if single.size else "", markersize=14,
                      markevery=single if single.size else None)  # fmt: skip
    return line


def _draw_points(ax: "Axes", found: Points, colour: str, marker: str, label: str) -> Any:
    return ax.errorbar(
        found.x, drawable(found.y), yerr=2 * found.stderr if found.stderr.any() else None,
        color=colour, marker=marker, markersize=4, linewidth=1.2, capsize=2,
        linestyle="none", label=label)  # fmt: skip


def _look(index: int) -> tuple[str, str]:
    """Colour and marker; a colour that comes again has another marker."""
    lap = index // len(PALETTE)
    return PALETTE[index % len(PALETTE)], MARKERS[(index + lap) % len(MARKERS)]


def _legend(ax: "Axes", **style: Any) -> None:
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="best", **LEGEND | style)


def _unit(records: Iterable[Record]) -> str:
    found = [record for record in records if record.get("kind") == "curvature"]
    epochs = [record.get("epoch") for record in found]
    return "epoch" if None not in epochs and len(set(epochs)) == len(epochs) else "step"
