"""Plots of advice: predicted curvature, learning rates and damping over batch sizes."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ritz._core.results import Estimate
from ritz.measures import Advice, BatchCurve
from ritz.plots import _style as style
from ritz.plots._batches import prediction_line
from ritz.plots._plot import plot
from ritz.plots._series import as_array, check_drawn
from ritz.plots._style import STYLE, Axes, Figure

ADAPTIVE = ("adam", "kfac")
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
        style.legend(ax)
    return drawn


def _draw_curvature(ax: "Axes", advice: Advice) -> None:
    prediction, sizes = advice.prediction, advice.batch_sizes
    best: BatchCurve = prediction.best
    value, spread = as_array(best.value.mean), as_array(best.spread.mean)
    low = np.maximum(value - spread, 0.5 * value)  # a band to zero has no place on a log scale
    style.band(ax, np.array(sizes, dtype=np.float64), low, value + spread)
    _bars(ax, sizes, best.value, 0, "predicted mean; band: spread of batches")
    others = {
        "directional": prediction.directional,
        "additive": prediction.additive,
        "multiplicative": prediction.multiplicative,
    }
    for index, (name, curve) in enumerate(others.items(), start=1):
        if np.isfinite(as_array(curve.value.mean)).any():
            colour = style.series_look(index)[0]
            prediction_line(ax, prediction, name, as_array(curve.value.mean), colour)
    ax.axhline(
        float(prediction.lambda_max),
        linestyle=":",
        label=r"$\lambda_1$ of all data",
        **style.REFERENCE,
    )
    ax.set_ylabel(r"largest eigenvalue $\lambda_1$ of a batch")
    style.set_title(ax, f"{style.result_title(prediction)} of mini-batches")


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
