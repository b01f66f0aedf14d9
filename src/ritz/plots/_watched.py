"""Everything that monitors logged, one panel for each quantity."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ritz.plots import _series as arrays
from ritz.plots import _style as style
from ritz.plots._style import STYLE, Axes, Figure

# Names that belong to another: errors, thresholds, and the places of lists.
BESIDE = ("_stderr", "_residual", "_truncation", "threshold", "_reach", "ritz_weights", "density_x")
COLUMNS = 4  # panels beside each other
LEGEND = 8  # lines of a panel that a legend names


def watched(
    runs: Mapping[str, Iterable[arrays.Record]], *, names: Sequence[str] | None = None
) -> "Figure":
    """Draw what monitors logged over epochs or steps, a panel for each quantity.

    Numbers are lines with a band of two standard errors, or of the residual of an eigenvalue; the
    threshold of stability is dashed. Numbers of layers share a panel with one line per layer.
    Spectra are dots, larger where the weight is larger. Of histograms of gradients and of densities
    the first and the last are drawn, and of histograms by weight the last, as a map. Lists are
    drawn of the first run only. Scales are logarithmic for positive values that span a decade.

    Args:
        runs: Records of logs by name, as :func:`ritz.training.read_log` returns them.
        names: Quantities to draw; see :func:`watched_names`. Defaults to all.
    """
    arrays.check_named("runs", runs, "names to the records of logs")
    records = {name: list(each) for name, each in runs.items()}
    known = watched_names([record for each in records.values() for record in each])
    chosen = list(known if names is None else names)
    if unknown := [name for name in chosen if name not in known]:
        logged = ", ".join(known) or "nothing; log quantities with ritz train --watch"
        raise ValueError(f"{', '.join(unknown)} was not logged by a monitor, which logged {logged}")
    if not chosen:
        raise ValueError("runs must have been watched, got none: train with ritz train --watch")
    columns = min(COLUMNS, len(chosen))
    figure, axes = style.panels(math.ceil(len(chosen) / columns), columns, width=3.6, height=2.7)
    for ax, name in zip(axes, chosen, strict=False):
        _draw(ax, records, name)
    for ax in axes[len(chosen) :]:
        ax.set_visible(False)
    return figure


def watched_names(records: Iterable[arrays.Record]) -> tuple[str, ...]:
    """Return the names that monitors logged, in the order of the log; one name for all layers."""
    found: dict[str, None] = {}
    for record in records:
        if record.get("kind") != "curvature":
            continue
        for name, value in record.items():
            if isinstance(value, str) or name in ("epoch", "step"):
                continue
            if not any(name.endswith(word) for word in BESIDE):
                found.setdefault(name.partition(".")[0])
    return tuple(found)


def _draw(ax: "Axes", runs: Mapping[str, Sequence[arrays.Record]], name: str) -> None:
    first = next(iter(runs.values()))
    values = [x[name] for x in first if x.get("kind") == "curvature" and x.get(name) is not None]
    if values and isinstance(values[0], list):
        _draw_list(ax, first, name)
        return
    measured = (x for x in first if x.get("kind") == "curvature")
    layers = dict.fromkeys(key for x in measured for key in x if key.startswith(f"{name}."))
    whole = {run: each for run, each in runs.items() if _has(each, name)}
    lines = [(run if len(runs) > 1 else "", each, name) for run, each in whole.items()]
    # The layers of several runs only if there is no number of the whole that compares them.
    if len(runs) == 1 or not whole:
        lines += [
            (", ".join([run] * (len(runs) > 1) + [key.partition(".")[2]]), each, key)
            for run, each in runs.items()
            for key in layers
            if _has(each, key)
        ]
    drawn = [_line(ax, index, *line) for index, line in enumerate(lines)]
    if len(lines) > LEGEND:
        style.finish(ax, "", "")
        for line in ax.get_lines():
            line.set_label(f"_{line.get_label()}")
    style.log_scale(ax, *drawn)
    points = arrays.curvature_points(lines[0][1], lines[0][2])
    style.whole_x(ax, points.x)
    style.finish(ax, points.unit, name.replace("_", " "))


def _has(records: Sequence[arrays.Record], name: str) -> bool:
    return any(x.get("kind") == "curvature" and x.get(name) is not None for x in records)


def _line(
    ax: "Axes", index: int, label: str, records: Sequence[arrays.Record], name: str
) -> arrays.Array:
    points = arrays.curvature_points(records, name)
    colour, marker = style.series_look(index)
    # The error of an eigenvalue is at most its residual.
    width = 1.0 if name.startswith("lambda") else STYLE.sigmas
    y, error = style.drawable(points.y), style.drawable(width * points.stderr)
    if (error[np.isfinite(y + error)] > 0).any():
        style.band(ax, points.x, y - error, y + error, colour)
    style.line(ax, points.x, y, colour, label or None, marker=marker)
    beside = {"lambda_max": "threshold", "preconditioned_lambda_max": "preconditioned_threshold"}
    if (bound := beside.get(name)) and _has(records, bound):
        edge = arrays.curvature_points(records, bound)
        style.line(ax, edge.x, edge.y, STYLE.vermilion, "edge of stability", linestyle="--")
        return np.concatenate([y, style.drawable(edge.y)])
    return y


def _draw_list(ax: "Axes", records: Sequence[arrays.Record], name: str) -> None:
    logged = [x for x in records if x.get("kind") == "curvature" and x.get(name) is not None]
    unit = "epoch" if len({x.get("epoch") for x in logged}) == len(logged) else "step"
    title, last = name.replace("_", " "), logged[-1]
    if name == "gradient_weight_histogram":
        across, up = float(last["weight_reach"]), float(last["gradient_reach"])
        _map(ax, np.asarray(last[name], dtype=float), (-across, across, -up, up))
        style.finish(ax, "weight", "gradient of a sample", f"{unit} {last.get(unit)}")
    elif name == "gradient_histogram":
        for record in (logged[0], last):
            reach, counts = float(record["gradient_reach"]), record[name]
            edges = np.linspace(-reach, reach, len(counts) + 1)
            label = f"{unit} {record.get(unit)}"
            ax.stairs(counts, edges, label=label, baseline=None)
        ax.set_yscale("symlog", linthresh=1.0)
        style.finish(ax, "gradient of a sample", "entries")
    elif name == "density":
        for index, record in enumerate((logged[0], last)):
            label = f"{unit} {record.get(unit)}"
            colour = style.series_look(index)[0]
            style.line(ax, record["density_x"], np.maximum(record[name], 1e-8), colour, label)
        ax.set_yscale("log")
        style.finish(ax, "eigenvalue", "density")
    else:
        _dots(ax, logged, name, unit)
        style.finish(ax, unit, title)


def _map(ax: "Axes", counts: arrays.Array, extent: tuple[float, float, float, float]) -> None:
    # Counts of a few entries must be seen beside those of thousands.
    shown = np.log10(1 + counts)
    ax.imshow(shown, origin="lower", extent=extent, aspect="auto", cmap="viridis")


def _dots(ax: "Axes", logged: Sequence[arrays.Record], name: str, unit: str) -> None:
    x: list[float] = []
    y: list[float] = []
    sizes: list[float] = []
    for record in logged:
        values = [float("nan") if value is None else float(value) for value in record[name]]
        weights: Any = record.get("ritz_weights") if name == "ritz_values" else None
        x += [float(record.get(unit, 0))] * len(values)
        y += values
        sizes += [8 + 60 * float(w) for w in weights] if weights else [10.0] * len(values)
    ax.scatter(x, style.drawable(y), s=sizes, color=STYLE.blue, alpha=0.6, linewidths=0)
    style.whole_x(ax, np.asarray(x))
