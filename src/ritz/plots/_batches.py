"""Plots of mini-batches: quantities over batch sizes, the edge of the bulk, the gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ritz.measures import BatchPrediction, BulkEdge, GradientOverlap
from ritz.plots import _series as arrays
from ritz.plots import _style as style
from ritz.plots._plot import draw, plot
from ritz.plots._series import as_array
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
            prediction_line(ax, result, name, values, STYLE.palette[index])
    estimate = getattr(result.best, quantity)
    mean, error = as_array(estimate.mean), np.nan_to_num(as_array(estimate.error()))
    if quantity == "value":
        spread = np.nan_to_num(as_array(result.best.spread.mean))
        # A band down to zero has no place on a logarithmic scale.
        low = np.maximum(mean - spread, 0.5 * mean)
        style.band(ax, np.array(sizes, dtype=np.float64), low, mean + spread)
        ax.axhline(
            float(result.lambda_max),
            linestyle=":",
            label=r"$\lambda_1$ of all data",
            **style.REFERENCE,
        )
    style.bars(
        ax, sizes, mean, yerr=error, fmt="o-", linewidth=STYLE.line, label="best model ± 95 %"
    )


def prediction_line(
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
# The edge of the bulk, and the overlap of the gradient with eigenvectors.


@draw.register(BulkEdge)
def _(result: BulkEdge, ax: "Axes") -> None:
    values, weights = as_array(result.values), as_array(result.weights)
    # A logarithmic scale has no zero: stems begin at half the smallest weight.
    floor = max(0.5 * float(weights.min()), 1e-18)
    outside, near = (as_array(part) for part in (result.outliers, result.near))
    beyond = np.isin(values, outside)
    kinds: Any = (
        ("bulk", ~beyond & ~np.isin(values, near), STYLE.grey),
        ("Tracy-Widom region", np.isin(values, near), STYLE.blue),
        ("outliers", beyond, STYLE.vermilion),
    )
    for label, chosen, colour in kinds:
        if chosen.any():
            style.stems(ax, values[chosen], weights[chosen], floor, color=colour, label=label)
    ax.set(yscale="log", ylim=(floor, 2.0))
    low, high = result.noise
    if np.isfinite(result.margin):
        for edge, side in ((low, -1), (high, 1)):
            ax.axvspan(*sorted((edge, edge + side * result.margin)), color=STYLE.sky, alpha=0.4,
                       linewidth=0)  # fmt: skip
            ax.axvline(edge, label="edge of the noise" if side > 0 else None, **style.REFERENCE)
    ax.axvline(float(result.crude), linestyle="--", color=STYLE.vermilion, linewidth=STYLE.thin,
               label=r"$5\,\mathrm{tr} H / P$")  # fmt: skip
    title = style.result_title(result)
    style.finish(ax, r"Ritz value $\theta$", r"weight $\tau$", title)


@draw.register(GradientOverlap)
def _(result: GradientOverlap, ax: "Axes") -> None:
    ranks = np.arange(1, len(result.values) + 1)
    mean, error = as_array(result.overlaps.mean), as_array(result.overlaps.truncation)
    ax.bar(ranks, mean, color=STYLE.blue, width=0.7, label=r"$(\varphi_i^\top \hat g)^2$")
    ax.errorbar(ranks, mean, yerr=error, fmt="none", color="black", linewidth=STYLE.thin)
    style.line(ax, ranks, mean.cumsum(), STYLE.vermilion, "sum", marker="o")
    shown = f"curvature along the gradient {float(result.curvature):.3g}"
    style.finish(ax, "rank of the eigenvalue", "part of the squared gradient",
                 f"{style.result_title(result)}: {shown}", ylim=(0, 1.05))  # fmt: skip
