"""Pictures of loss and accuracy in weight space, drawn on the axes they are given."""

from typing import TYPE_CHECKING, Any

from ritz.measures import Landscape, Landscape2d
from ritz.plots._scales import drawable, log_y, reach, ticks
from ritz.plots._series import Array, check_drawn, landscape_slice, landscape_surface
from ritz.plots._spectra import BLUE, LEGEND, VERMILION, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_TICKS = 5  # of steps: more would run into each other in a row of panels


def landscape(
    landscape: Landscape,
    *,
    direction: str | int = 0,
    ax: "Axes | None" = None,
    accuracy: bool = True,
    log: bool = False,
) -> "Axes":
    """Draw loss, and accuracy on a scale to the right, along a direction; return the axes.

    A line is the data of the risk, dashes are the test data. Markers are what was computed: the
    lines only join them.

    Args:
        landscape: With any number of directions.
        direction: Name or number of the one to draw.
        ax: Where to draw; a new figure if not given.
        accuracy: Whether to draw it, where there is one.
        log: Logarithmic scale of the loss.
    """
    check_drawn("landscape", landscape, Landscape)
    ax = ax or panels()[1][0]
    found = landscape_slice(landscape, direction)
    _draw_lines(ax, found.t, found.loss, found.test_loss, colour=BLUE, what="loss")
    ax.set(xlabel=r"step $t$", ylabel="loss")
    ax.margins(x=0.03)  # so that the first and the last marker are whole
    reach(ax, found.t)
    ax.locator_params(axis="x", nbins=NUM_TICKS)
    if log:
        log_y(ax)
    top = ax
    if accuracy and found.accuracy is not None:
        top = _on_the_right(ax)
        _draw_lines(
            top, found.t, found.accuracy, found.test_accuracy, colour=VERMILION, what="accuracy"
        )
    # Above the panel: lines on two scales leave no corner of it free.
    handles = [line for one in dict.fromkeys((ax, top)) for line in one.get_lines()]
    if len(handles) == 1:
        return ax
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": -(-len(handles) // 2)}
    ax.legend(handles=handles, **(LEGEND | place))
    return ax


def landscape2d(
    landscape: Landscape2d, *, ax: "Axes | None" = None, test: bool = False, num_levels: int = 12
) -> "Axes":
    """Draw contours of the loss on a plane, a cross at its centre, and return the axes.

    Levels are in equal ratios where all losses are positive.

    Args:
        landscape: On a grid.
        ax: Where to draw; a new figure if not given.
        test: The loss on the test data in place of the other.
        num_levels: Number of contours.
    """
    from matplotlib.colors import LogNorm, Normalize

    check_drawn("landscape", landscape, Landscape2d)
    ax = ax or panels(width=5.2, height=4.2)[1][0]
    found = landscape_surface(landscape, test=test, num_levels=num_levels)
    low, high = float(found.levels[0]), float(found.levels[-1])
    norm = LogNorm(low, high) if found.logarithmic else Normalize(low, high)
    grid: Any = (found.x, found.y, found.z)
    filled = ax.contourf(*grid, levels=found.levels, norm=norm, cmap="viridis")
    ax.contour(*grid, levels=found.levels, colors="white", linewidths=0.4, alpha=0.6)
    ax.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.6)
    ax.set(xlabel=landscape.names[0], ylabel=landscape.names[1])
    ax.locator_params(axis="x", nbins=NUM_TICKS)
    strip = ax.inset_axes((1.03, 0.0, 0.04, 1.0))  # stays beside its panel in any grid
    locator, formatter = ticks(low, high)
    bar = ax.figure.colorbar(filled, cax=strip, ticks=locator, format=formatter)
    bar.set_label("test loss" if test else "loss")
    bar.minorticks_off()
    return ax


def _on_the_right(ax: "Axes") -> "Axes":
    """Axes over these with a scale of accuracies to the right; both scales take their colours."""
    right = ax.twinx()
    right.spines[["top", "left"]].set_visible(False)
    right.spines["right"].set_visible(True)
    right.set(ylabel="accuracy (%)", ylim=(-3, 103))
    for one, side, colour in ((ax, "left", BLUE), (right, "right", VERMILION)):
        one.yaxis.label.set_color(colour)
        one.tick_params(axis="y", which="both", colors=colour)
        one.spines[side].set_color(colour)
    return right


def _draw_lines(
    ax: "Axes", t: Array, train: Array, test: Array | None, *, colour: str, what: str
) -> None:
    style: Any = {"color": colour, "linewidth": 1.2, "marker": "o", "markersize": 2.8}
    ax.plot(t, drawable(train), label=what if test is None else f"{what}, train", **style)
    if test is not None:
        ax.plot(t, drawable(test), "--", markerfacecolor="white", label=f"{what}, test", **style)
