"""Plots over batch sizes: ``batch_scaling``, predictions of batches, and ``advice``."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ritz._core.results import Estimate
from ritz.measures import Advice, BatchPrediction
from ritz.plots import _series as arrays
from ritz.plots import _style as style
from ritz.plots._plot import plot
from ritz.plots._series import as_array, check_drawn
from ritz.plots._style import STYLE, Axes, Figure

# Predictions that are drawn as lines without error bars, beside the one to trust.
OTHERS = ("directional", "additive", "multiplicative")
# Panels of a prediction: quantity and label.
PANELS = {"value": r"largest eigenvalue $\lambda_1$ of a batch", "overlap": "overlap"}


# ------------------------------------------------------------------------------------------
# Quantities over batch sizes.


def batch_scaling(
    batch_sizes: Sequence[int],
    measured: Mapping[str, Sequence[arrays.Number]],
    *,
    predicted: Mapping[str, Sequence[arrays.Number]] | None = None,
    quantity: str = "largest eigenvalue",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw quantities over batch sizes on logarithmic scales, and return the axes.

    Args:
        batch_sizes: Batch sizes in samples, in any order.
        measured: Estimates, drawn with two standard errors, or numbers; one per batch size, by
            name.
        predicted: Predictions, drawn as lines. A prediction has the colour of the measurement of
            the same name.
        quantity: Label of the vertical axis.
        ax: Axes to draw on. Defaults to a new figure.
    """
    arrays.check_named("measured", measured, "names to estimates")
    ax, predicted = ax or style.panels(width=4.4, height=3.1)[1][0], predicted or {}
    handles = []
    for index, name in enumerate(dict.fromkeys((*measured, *predicted))):
        colour, marker = style.series_look(index)
        if name in measured:
            series = arrays.points(batch_sizes, measured[name])
            handles.append(style.bars(ax, series.x, series.y, yerr=STYLE.sigmas * series.stderr,
                                     color=colour, fmt=marker, capsize=2, label=name))  # fmt: skip
        if name in predicted:
            series = arrays.points(batch_sizes, predicted[name])
            label = f"{name}, predicted"
            handles.append(style.line(ax, series.x, series.y, colour, label))
    style.batch_size_x(ax, batch_sizes)
    style.log_scale(ax)
    ax.set_ylabel(quantity)
    # In the order of drawing: matplotlib would put all lines before all error bars.
    style.legend(ax, handles=handles)
    return ax


@plot.register(BatchPrediction)
def _(result: BatchPrediction) -> "Figure":
    figure, axes = style.panels(1, len(PANELS), width=4.6, height=3.4)
    for ax, (quantity, label) in zip(axes, PANELS.items(), strict=True):
        _draw_curves(ax, result, quantity)
        style.batch_size_x(ax, result.batch_sizes)
        style.finish(ax, ax.get_xlabel(), label)
    drawn = [as_array(getattr(result, name).value.mean) for name in ("best", *OTHERS)]
    style.log_scale(axes[0], *drawn)
    axes[1].set_ylim(-0.03, 1.05)
    style.set_title(axes[0], style.result_title(result))
    style.share_legend(figure)
    return figure


def _draw_curves(ax: "Axes", result: BatchPrediction, quantity: str) -> None:
    sizes = result.batch_sizes
    for index, name in enumerate(OTHERS, start=1):
        values = as_array(getattr(getattr(result, name), quantity).mean)
        # A model that does not apply has no line.
        if np.isfinite(values).any():
            _draw_prediction(ax, result, name, values, STYLE.palette[index])
    estimate = getattr(result.best, quantity)
    mean, error = as_array(estimate.mean), np.nan_to_num(as_array(estimate.error()))
    if quantity == "value":
        spread = np.nan_to_num(as_array(result.best.spread.mean))
        # A band down to zero has no place on a logarithmic scale.
        low = np.maximum(mean - spread, 0.5 * mean)
        style.band(ax, np.array(sizes, dtype=np.float64), low, mean + spread)
        ax.collections[-1].set_label("spread of batches")
        ax.axhline(
            float(result.lambda_max),
            linestyle=":",
            label=r"$\lambda_1$ of all data",
            **style.REFERENCE,
        )
    style.bars(
        ax, sizes, mean, yerr=error, fmt="o-", linewidth=STYLE.line, label="best model ± 95 %"
    )


def _draw_prediction(
    ax: "Axes", result: BatchPrediction, name: str, values: np.ndarray[Any, Any], colour: str
) -> None:
    """Draw a prediction over batch sizes: dashed where its model holds, otherwise dotted."""
    trusted = np.array(result.trusted[name])
    label = None if trusted.any() else f"{name} model (does not hold)"
    style.line(ax, result.batch_sizes, values, colour, label, linestyle=":", marker="", alpha=0.6)
    if trusted.any():
        shown = np.where(trusted, values, np.nan)
        style.line(ax, result.batch_sizes, shown, colour, f"{name} model", linestyle="--")


# ------------------------------------------------------------------------------------------
# Advice: predicted curvature, learning rates and damping.

ADAPTIVE = ("adam", "kfac")  # optimisers with a damping
TITLES = {"sgd": "SGD", "momentum": "SGD", "nesterov": "Nesterov", "adam": "Adam", "kfac": "K-FAC"}


def advice(advice: Advice, *, axes: "Sequence[Axes] | None" = None) -> list["Axes"]:
    r"""Draw predicted curvature and learning rates over batch sizes, and return the axes.

    The first panel shows the largest eigenvalue of batches, its spread, and other models of it,
    dotted where they do not hold. The second shows the edge of local stability, the recommended
    learning rate, the largest one that trials trained with, and the one of the run. For Adam and
    K-FAC, a third shows the least damping per unit of learning rate. Bars are 95 % intervals.

    Args:
        advice: Result of :func:`ritz.advise`.
        axes: Two axes, or three for ``adam`` and ``kfac``. Defaults to a new figure.
    """
    check_drawn("advice", advice, Advice)
    panels = [_draw_curvature, _draw_rates]
    panels += [_draw_damping] if advice.optimizer in ADAPTIVE else []
    if axes is not None and len(axes) != len(panels):
        raise ValueError(f"axes must be {len(panels)} for {advice.optimizer}, got {len(axes)}")
    drawn = list(axes or style.panels(1, len(panels), width=4.6, height=3.5)[1])
    for ax, draw in zip(drawn, panels, strict=True):
        draw(ax, advice)
        style.batch_size_x(ax, advice.batch_sizes)
        style.log_scale(ax)
        # Translucent: with five curves and a band, no corner is free.
        style.legend(ax, frameon=True, framealpha=0.8, edgecolor="none")
    return drawn


def _draw_curvature(ax: "Axes", advice: Advice) -> None:
    _draw_curves(ax, advice.prediction, "value")
    ax.set_ylabel(PANELS["value"])
    style.set_title(ax, f"{style.result_title(advice.prediction)} of mini-batches")


def _draw_rates(ax: "Axes", advice: Advice) -> None:
    columns = {"edge of local stability": advice.edge, "recommended": advice.rate}
    if advice.trainable is not None:
        columns["largest in trials"] = advice.trainable
    for index, (name, estimate) in enumerate(columns.items()):
        if np.isfinite(as_array(estimate.mean)).any():
            _bars(ax, advice.batch_sizes, estimate, index, name)
    if advice.known is not None:
        ax.plot(*advice.known, "*", color="black", markersize=9, label="learning rate of the run")
    ax.set_ylabel("learning rate")
    momentum = f", momentum {advice.momentum:g}" if advice.momentum else ""
    style.set_title(ax, f"{TITLES[advice.optimizer]}{momentum}")


def _draw_damping(ax: "Axes", advice: Advice) -> None:
    label = "edge of stability" if advice.optimizer == "adam" else "noise along $\\varphi_1$"
    _bars(ax, advice.batch_sizes, advice.damping, 0, label)
    _bars(ax, advice.batch_sizes, advice.damping_papers, 1, "homogeneous noise")
    ax.set_ylabel("least damping / learning rate")


def _bars(ax: "Axes", sizes: Sequence[int], estimate: Estimate, index: int, label: str) -> None:
    colour, marker = style.series_look(index)
    error = as_array(estimate.error())
    error = np.where(np.isfinite(error), error, 0.0)  # an unknown error has no bar
    style.bars(ax, sizes, as_array(estimate.mean), yerr=error, color=colour, fmt=f"{marker}-",
               linewidth=STYLE.line, label=label)  # fmt: skip


@plot.register(Advice)
def _(result: Any) -> "Figure":
    return cast("Figure", advice(result)[0].figure)
