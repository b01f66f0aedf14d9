"""Plots of loss landscapes, along lines and on planes."""

from collections.abc import Mapping
from typing import Any

from ritz.measures import Landscape, Landscape2d
from ritz.plots import _style as style
from ritz.plots._plot import plot
from ritz.plots._series import as_array, check_drawn, landscape_lines, landscape_surface
from ritz.plots._style import STYLE, Axes, Figure


def landscape(
    landscape: Landscape,
    *,
    direction: str | int = 0,
    ax: "Axes | None" = None,
    log: bool = False,
) -> "Axes":
    """Draw the loss along a direction, with the accuracy on a second scale, and return the axes.

    Solid lines are the data of the risk and dashed lines the test data. Markers are computed
    points.

    Args:
        landscape: Landscape along one or several directions.
        direction: Name or number of the direction.
        ax: Axes to draw on. Defaults to a new figure.
        log: Logarithmic scale of the loss.
    """
    check_drawn("landscape", landscape, Landscape)
    ax = ax or style.panels()[1][0]
    t, lines = as_array(landscape.t), landscape_lines(landscape, direction)
    _draw_lines(ax, t, "loss", lines["loss"], STYLE.blue)
    ax.set(xlabel=r"step $t$ along the direction", ylabel="loss")
    ax.margins(x=0.03)  # the first and the last marker are not cut
    style.include_x(ax, t)
    ax.locator_params(axis="x", nbins=5)
    if log:
        style.log_scale(ax)
    handles = ax.get_lines()
    if lines["accuracy"]:
        right = _add_accuracy_scale(ax)
        _draw_lines(right, t, "accuracy", lines["accuracy"], STYLE.vermilion)
        handles = [*handles, *right.get_lines()]
    if len(handles) > 1:
        # Above the panel: lines on two scales leave no free corner.
        style.legend(ax, above=True, handles=handles, ncols=-(-len(handles) // 2))
    return ax


def _add_accuracy_scale(ax: "Axes") -> "Axes":
    """Return axes over these with a scale to the right; both scales get the colours of lines."""
    right = ax.twinx()
    right.spines[["top", "left"]].set_visible(False)
    right.spines["right"].set_visible(True)
    right.set(ylabel="accuracy (%)", ylim=(-3, 103))
    for one, side, colour in ((ax, "left", STYLE.blue), (right, "right", STYLE.vermilion)):
        one.yaxis.label.set_color(colour)
        one.tick_params(axis="y", which="both", colors=colour)
        one.spines[side].set_color(colour)
    return right


def _draw_lines(ax: "Axes", t: Any, name: str, lines: Mapping[str, Any], colour: str) -> None:
    for part, values in lines.items():
        label = name if len(lines) == 1 else f"{name}, {part}"
        dashed: Any = {"linestyle": "--", "markerfacecolor": "white"} if part == "test" else {}
        style.line(ax, t, values, colour, label, marker="o", markersize=2.8, **dashed)


@plot.register(Landscape)
def _(result: Landscape) -> "Figure":
    figure, axes = style.panel_grid(len(result.names), 3, width=4.4, height=3.0)
    losses = (loss for loss in (result.loss, result.test_loss) if loss is not None)
    log = style.spans_decade(*losses)
    for ax, name in zip(axes, result.names, strict=True):
        if ax is not axes[0]:
            ax.sharey(axes[0])
        landscape(result, direction=name, ax=ax, log=log)
        # Two lines: one would be wider than the panel.
        titles = (style.direction_title(name), style.result_title(result))
        style.set_title(ax, "\n".join(filter(None, titles)))
    style.share_legend(figure)
    return figure


def landscape2d(landscape: Landscape2d, *, ax: "Axes | None" = None, test: bool = False) -> "Axes":
    """Draw contours of the loss on a plane, with a cross at its centre, and return the axes.

    Levels have equal ratios if all losses are positive.

    Args:
        landscape: Landscape on a grid.
        ax: Axes to draw on. Defaults to a new figure.
        test: Draw the loss on the test data.
    """
    from matplotlib.colors import LogNorm, Normalize

    check_drawn("landscape", landscape, Landscape2d)
    z, levels = landscape_surface(landscape, test=test)
    ax = ax or style.panels(width=5.2, height=4.2)[1][0]
    low, high = float(levels[0]), float(levels[-1])
    norm = LogNorm(low, high) if low > 0 else Normalize(low, high)
    grid: Any = (as_array(landscape.s), as_array(landscape.t), z)
    filled = ax.contourf(*grid, levels=levels, norm=norm, cmap="viridis")
    ax.contour(*grid, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
    ax.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.6)
    ax.set(xlabel=landscape.names[0], ylabel=landscape.names[1])
    ax.locator_params(nbins=5)
    # Inset axes stay beside their panel in any grid.
    strip = ax.inset_axes((1.03, 0.0, 0.04, 1.0))
    locator, formatter = style.ticks(low, high)
    bar = ax.figure.colorbar(filled, cax=strip, ticks=locator, format=formatter)
    bar.set_label("test loss" if test else "loss")
    bar.minorticks_off()
    return ax


@plot.register(Landscape2d)
def _(result: Landscape2d) -> "Figure":
    figure, (ax,) = style.panels(width=5.4, height=4.2)
    landscape2d(result, ax=ax)
    first, second = map(style.direction_title, result.names)
    ax.set(xlabel=f"step along {first}", ylabel=f"step along {second}")
    style.set_title(ax, style.result_title(result))
    return figure
