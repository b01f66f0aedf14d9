"""Plots of what monitors logged during training: every quantity, curvature, degeneracy."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ritz.measures import Degeneracy
from ritz.plots import _series as arrays
from ritz.plots import _style as style
from ritz.plots._plot import plot_several
from ritz.plots._style import STYLE, Axes, Figure

# Endings of names that are drawn with another quantity: errors, thresholds, abscissae of lists.
BESIDE = ("_stderr", "_residual", "_truncation", "threshold", "_reach", "ritz_weights", "density_x")
COLUMNS = 4  # panels beside each other
# Axis labels of quantities whose logged name is not a label that a reader would understand.
LABELS = {
    "lambda_max": r"largest eigenvalue $\lambda_1$",
    "lambda_min": "smallest eigenvalue",
    "sharpness_ratio": "eigenvalue / edge of stability",
    "preconditioned_lambda_max": "largest preconditioned eigenvalue",
    "ritz_values": r"Ritz values $\theta$",
    "mean_square_eigenvalue": "mean squared eigenvalue",
    "negative_mass": "fraction of eigenvalues below 0",
    "degeneracy": "fraction of eigenvalues near 0",
    "bulk_lower": "lower edge of the bulk",
    "bulk_upper": "upper edge of the bulk",
    "num_outliers": "number of outliers",
    "variance": r"curvature variance $P \sigma^2$",
    "fisher_norm": r"$\|F\|$ of the empirical Fisher matrix",
    "fisher_diagonal_norm": r"$\|\mathrm{diag}\,F\|$ (empirical Fisher)",
    "watched_loss": "loss on the watched samples",
    "gradient_norm": r"gradient norm $\|g\|$",
    "gradient_variance": r"gradient variance $\mathrm{tr}\,\Sigma$",
    "gradient_square": r"squared gradient $\|g\|^2$",
    "gradient_overlap": r"share of $g$ in leading eigenvectors",
    "gradient_curvature": r"curvature along $g$",
    "overlaps": r"overlaps $(\varphi_i^\top \hat g)^2$",
    "noise_scale": "noise scale (samples)",
    "signal_to_noise": "signal-to-noise ratio of a batch",
    "gsnr": "gradient signal-to-noise ratio",
    "norm_test": "norm test (smallest tolerance)",
    "inner_product_test": "inner product test (tolerance)",
    "orthogonality_test": "orthogonality test (tolerance)",
    "cabs": "CABS batch size (samples)",
    "early_stopping": "early-stopping criterion",
    "tic_trace": r"$\mathrm{tr}\,C / \mathrm{tr}\,H$ (TIC)",
    "tic_diagonal": r"$\sum_p C_{pp} / H_{pp}$ (TIC)",
    "weight_norm": r"$L_2$ norm of weights",
    "weight_max": r"$L_\infty$ norm of weights",
    "average_weight_norm": r"$L_2$ norm of the average",
    "average_weight_max": r"$L_\infty$ norm of the average",
    "distance": r"$L_2$ distance from the start",
    "distance_max": r"$L_\infty$ distance from the start",
    "effective_rate": "effective learning rate",
    "update_size": "norm of the last step",
    "alpha": r"end of the step, $\alpha$ (0: minimum)",
    "step_values": r"eigenvalues $\lambda_i$",
    "step_gradient": r"gradient along $\varphi_i$",
    "step_update": r"last step along $\varphi_i$",
    "step_decay": r"weight decay along $\varphi_i$",
    "step_rates": r"learning rate along $\varphi_i$",
    "step_flat_rate": "learning rate, other directions",
}
LEGEND = 8  # maximum number of lines that the legend of one panel names
SHARED = 49  # the same for the legend of several panels: so many lines look different


def watched(
    runs: Mapping[str, Iterable[arrays.Record]], *, names: Sequence[str] | None = None
) -> "Figure":
    """Draw what monitors logged over epochs or steps, a panel for each quantity.

    Numbers are lines with a band of two standard errors, or of the residual of an eigenvalue; the
    threshold of stability is dashed. Numbers of layers share a panel with one line per layer, which
    has the same colour in all panels.
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
        curves = "; training_curves (--what curves) draws loss and accuracy"
        raise ValueError(f"{', '.join(unknown)} was not logged by a monitor, which logged {logged}"
                         f"{curves}")  # fmt: skip
    if not chosen:
        raise ValueError("runs must have been watched, got none: train with ritz train --watch")
    columns = min(COLUMNS, len(chosen))
    figure, axes = style.panels(math.ceil(len(chosen) / columns), columns, width=3.6, height=2.7)
    lines = {name: _lines_of(records, name) for name in chosen}
    # A run, or a layer, has one colour in all panels: first the runs, then the layers.
    every = [line for each in lines.values() for line in each]
    ordered = dict.fromkeys(line.key for line in sorted(every, key=lambda line: bool(line.layer)))
    looks = {key: index for index, key in enumerate(ordered)}
    for ax, name in zip(axes, chosen, strict=False):
        _draw(ax, records, name, lines[name], looks)
    _name_lines(figure, [ax for ax, name in zip(axes, chosen, strict=False) if lines[name]])
    for ax in axes[len(chosen) :]:
        ax.set_visible(False)
    return figure


def watched_names(records: Iterable[arrays.Record]) -> tuple[str, ...]:
    """Return the names that monitors logged, in the order of the log; one name for all layers."""
    logged: dict[str, None] = {}
    for record in records:
        if record.get("kind") != "curvature":
            continue
        for name, value in record.items():
            if isinstance(value, str) or name in ("epoch", "step"):
                continue
            if not any(name.endswith(word) for word in BESIDE):
                logged.setdefault(name.partition(".")[0])
    return tuple(logged)


class _Line(NamedTuple):
    """A line of a panel: a number of a run, or of one of its layers, with its records."""

    run: str
    layer: str
    records: Sequence[arrays.Record]
    name: str
    label: str

    @property
    def key(self) -> tuple[str, str]:
        """What has the same colour in all panels."""
        return self.run, self.layer


def _lines_of(runs: Mapping[str, Sequence[arrays.Record]], name: str) -> list[_Line]:
    """Return the lines of a quantity; none if it is a list."""
    first = [x for x in next(iter(runs.values())) if x.get("kind") == "curvature"]
    if any(isinstance(x.get(name), list) for x in first):
        return []
    layers = dict.fromkeys(key for x in first for key in x if key.startswith(f"{name}."))
    whole = {run: each for run, each in runs.items() if _has(each, name)}
    alone = "all layers" if layers else ""
    lines = [
        _Line(run, "", each, name, run if len(runs) > 1 else alone) for run, each in whole.items()
    ]
    # The layers of several runs only if there is no number of the whole that compares them.
    if len(runs) == 1 or not whole:
        for run, each in runs.items():
            for key in (key for key in layers if _has(each, key)):
                layer = key.partition(".")[2]
                label = ", ".join([run] * (len(runs) > 1) + [layer])
                lines.append(_Line(run, layer, each, key, label))
    return lines


def _draw(
    ax: "Axes",
    runs: Mapping[str, Sequence[arrays.Record]],
    name: str,
    lines: Sequence[_Line],
    looks: Mapping[tuple[str, str], int],
) -> None:
    if not lines:
        _draw_list(ax, next(iter(runs.values())), name)
        return
    drawn = [_line(ax, looks[line.key], line.label, line.records, line.name, len(runs) > 1)
             for line in lines]  # fmt: skip
    style.log_scale(ax, *drawn)
    points = arrays.curvature_points(lines[0].records, lines[0].name)
    style.whole_x(ax, points.x)
    ax.set(xlabel=points.unit, ylabel=_label(name))


def _name_lines(figure: "Figure", axes: Sequence["Axes"]) -> None:
    """Draw one legend above several panels whose lines have names, or a legend in a single one."""
    named = [ax for ax in axes if ax.get_legend_handles_labels()[1]]
    labels = {label for ax in named for label in ax.get_legend_handles_labels()[1]}
    # More lines than this cannot be told apart, so they are drawn without names.
    if len(labels) > (LEGEND if len(named) == 1 else SHARED):
        return
    if len(named) > 1:
        style.share_legend(figure, named)
    for ax in named if len(named) == 1 else ():
        style.legend(ax)
        _shade_legend(ax)


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def _shade_legend(ax: "Axes") -> None:
    """Put a translucent background behind the legend, which may have to cover lines."""
    if (legend := ax.get_legend()) is not None:
        legend.set_frame_on(True)
        legend.get_frame().set(alpha=0.8, edgecolor="none")


def _has(records: Sequence[arrays.Record], name: str) -> bool:
    return any(x.get("kind") == "curvature" and x.get(name) is not None for x in records)


def _line(
    ax: "Axes", index: int, label: str, records: Sequence[arrays.Record], name: str, several: bool
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
        # With several runs, each edge has the colour and the name of its run.
        tint = colour if several else STYLE.vermilion
        text = f"{label}, edge of stability" if several else "edge of stability"
        style.line(ax, edge.x, edge.y, tint, text, linestyle="--")
        return np.concatenate([y, style.drawable(edge.y)])
    return y


def _draw_list(ax: "Axes", records: Sequence[arrays.Record], name: str) -> None:
    logged = [x for x in records if x.get("kind") == "curvature" and x.get(name) is not None]
    unit = "epoch" if len({x.get("epoch") for x in logged}) == len(logged) else "step"
    last = logged[-1]
    if name == "gradient_weight_histogram":
        across, up = float(last["weight_reach"]), float(last["gradient_reach"])
        _map(ax, np.asarray(last[name], dtype=float), (-across, across, -up, up))
        title = f"{unit} {last.get(unit)}; colour: log of counts"
        style.finish(ax, "weight", "gradient of a sample", title)
    elif name == "gradient_histogram":
        for record in (logged[0], last):
            reach, counts = float(record["gradient_reach"]), record[name]
            edges = np.linspace(-reach, reach, len(counts) + 1)
            label = f"{unit} {record.get(unit)}"
            ax.stairs(counts, edges, label=label, baseline=None)
        ax.set_yscale("symlog", linthresh=1.0)
        style.finish(ax, "gradient of a sample", "number of entries")
    elif name == "density":
        for index, record in enumerate((logged[0], last)):
            label = f"{unit} {record.get(unit)}"
            colour = style.series_look(index)[0]
            style.line(ax, record["density_x"], np.maximum(record[name], 1e-8), colour, label)
        ax.set_yscale("log")
        style.finish(ax, "eigenvalue", "density")
    else:
        _dots(ax, logged, name, unit)
        style.finish(ax, unit, _label(name))


def _map(ax: "Axes", counts: arrays.Array, extent: tuple[float, float, float, float]) -> None:
    # Logarithmic, so that bins with few entries are visible beside those with thousands.
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


# ------------------------------------------------------------------------------------------
# The largest eigenvalue and the degeneracy over time.


def curvature_over_time(records: Iterable[arrays.Record], *, ax: "Axes | None" = None) -> "Axes":
    """Draw the largest eigenvalue and the edge of stability over time, and return the axes.

    Steps of SGD diverge along eigenvectors whose eigenvalue is above the edge. There is none in the
    log of a preconditioned method. The band is the residual of the eigenvalue. The scale is
    logarithmic if the values span a decade.

    Args:
        records: Records of a log with a ``CurvatureMonitor`` that measures ``lambda_max``.
        ax: Axes to draw on. Defaults to a new figure.
    """
    ax = ax or style.panels(width=4.4, height=3.1)[1][0]
    records = list(records)
    largest = arrays.curvature_points(records, "lambda_max")
    label = r"largest eigenvalue $\lambda_1$"
    _draw_line(ax, largest, 0, label, band=(1.0, "residual"))
    drawn = [largest.y]
    if any(record.get("threshold") is not None for record in records):
        bound = arrays.curvature_points(records, "threshold")
        drawn.append(bound.y)
        style.line(ax, bound.x, bound.y, STYLE.vermilion, "edge of stability", linestyle="--")
    style.log_scale(ax, *drawn)
    _finish_monitor(ax, [largest], "eigenvalue")
    return ax


def degeneracy(
    degeneracies: Mapping[str, Mapping[float, Degeneracy]] | Iterable[arrays.Record],
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the fraction of eigenvalues near zero for each epoch, and return the axes.

    The band is two standard errors. A log has spectra of one probe, which have no band.

    Args:
        degeneracies: ``{name: {epoch: Degeneracy}}``, or the records of a log with a
            ``CurvatureMonitor`` that measures ``spectrum``.
        ax: Axes to draw on. Defaults to a new figure.
    """
    if isinstance(degeneracies, Mapping):
        for epochs in degeneracies.values():
            arrays.check_named("degeneracies", epochs, "epochs to degeneracies")
        series = {str(name): arrays.points(list(epochs), [one.mass for one in epochs.values()])
                  for name, epochs in degeneracies.items()}  # fmt: skip
    else:
        series = {"": arrays.curvature_points(degeneracies, "degeneracy")}
    ax = ax or style.panels(width=4.4, height=3.1)[1][0]
    band = (STYLE.sigmas, f"{STYLE.sigmas:g} stderr")
    for index, (name, one) in enumerate(series.items()):
        _draw_line(ax, one, index, name, band=band)
    ax.set_ylim(0, 1.03)
    _finish_monitor(ax, list(series.values()), "fraction of eigenvalues near 0")
    return ax


@plot_several.register(Mapping)
def _(first: Mapping[Any, Degeneracy], results: Mapping[Any, Any]) -> "Figure":
    return cast("Figure", degeneracy(results).figure)


@plot_several.register(Degeneracy)
def _(first: Degeneracy, results: Mapping[Any, Degeneracy]) -> "Figure":
    if all(isinstance(key, int | float) for key in results):  # by epoch
        return cast("Figure", degeneracy({"": results}).figure)
    return plot_several.dispatch(object)(first, results)


def _finish_monitor(ax: "Axes", series: Sequence[arrays.Points], ylabel: str) -> None:
    style.whole_x(ax, np.concatenate([one.x for one in series]))
    style.finish(ax, series[0].unit, ylabel, style.result_title(series[0]) or None)


def _draw_line(
    ax: "Axes", series: arrays.Points, index: int, label: str, *, band: tuple[float, str]
) -> None:
    """Draw points joined by a line, with a band of ``band[0]`` errors, named ``band[1]``."""
    colour, marker = style.series_look(index)
    y, error = style.drawable(series.y), style.drawable(band[0] * series.stderr)
    # NaN where an error is unknown: a gap in the band, since a width of zero would mean exact.
    known = np.isfinite(y + error)
    if (error[known] > 0).any():
        style.band(ax, series.x, y - error, y + error, colour)
        label = f"{label} ± {band[1]}".lstrip()
        # A band through one point has no area.
        if (alone := style.isolated(y + error)).any():
            ax.errorbar(series.x[alone], y[alone], yerr=error[alone], fmt="none", ecolor=colour,
                        elinewidth=STYLE.line, capsize=3)  # fmt: skip
    named = label and np.isfinite(y).any()
    style.line(ax, series.x, y, colour, label if named else None, marker=marker)
