"""The look of all plots: style, panels, legends, error bars, scales and titles."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ritz.plots._series import Array

# Matplotlib is optional: these names are for annotations only.
if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.ticker import Formatter, Locator
else:
    Axes = Figure = Line2D = Any

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Style:
    """Colours, sizes and limits of all plots. Line widths and marker sizes are in points."""

    # Okabe and Ito (2008): colours that are distinct for every kind of colour vision.
    blue: str = "#0072B2"
    vermilion: str = "#D55E00"
    green: str = "#009E73"
    orange: str = "#E69F00"
    purple: str = "#CC79A7"
    sky: str = "#56B4E9"
    grey: str = "#999999"
    dark_grey: str = "#666666"  # visible on grey bars
    palette: tuple[str, ...] = (blue, vermilion, green, orange, purple, sky, "black")
    markers: str = "osD^vPX"  # a colour that is used again gets the next marker
    line: float = 1.2
    thin: float = 0.8
    marker: float = 4.0
    band: float = 0.25  # opacity: where two bands overlap, both stay visible
    level: float = 0.95  # of the intervals of densities
    sigmas: float = 2.0  # half width of other bars and bands in standard errors: 95 % if normal
    converged: float = 1e-3  # residual of a filled marker, relative to the largest |value|
    max_bars: int = 40  # entries with a bar each; the bars of more touch in a 6-inch panel
    max_points: int = 2000  # of a curve; a 6-inch panel at 200 dpi has 1200 columns of pixels
    max_ranks: int = 12  # tick labels "n-10" that fit beside each other in a 6-inch panel
    title_width: int = 70  # characters of a medium font in a 6-inch panel
    largest: float = 1e200  # matplotlib's margins of a log scale overflow beyond it
    dpi: int = 200  # of a PNG: hairlines stay visible in two-column print


STYLE = Style()
# Options of a reference line: thin, and behind everything else.
REFERENCE: dict[str, Any] = {"color": STYLE.grey, "linewidth": STYLE.thin, "zorder": 0}
# Stems by sign and convergence: label and colour, in the order of legends.
STEMS = {
    (sign, converged): (name if converged else f"{name}, unconverged", colour)
    for sign, name, colour in (
        (-1, "Ritz value < 0", STYLE.vermilion),
        (0, "sign not known", STYLE.dark_grey),
        (1, "Ritz value > 0", STYLE.blue),
    )
    for converged in (True, False)
}

# ------------------------------------------------------------------------------------------
# Panels and legends.


def panels(
    rows: int = 1, columns: int = 1, *, width: float = 6.0, height: float = 3.4
) -> tuple["Figure", list["Axes"]]:
    """Return a figure and its axes, row by row, each ``width`` by ``height`` inches.

    To use ``pyplot.show`` or see the figure in a notebook, import ``matplotlib.pyplot`` before. It
    is not imported here, so that no display is needed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "ritz[plots]"') from error
    # Inches around each panel: the labels of neighbours are twice as far apart.
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)
    shape: dict[str, Any] = {"figsize": (width * columns, height * rows), "layout": layout}
    pyplot = sys.modules.get("matplotlib.pyplot")
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(**shape) if pyplot else Figure(**shape)
        axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_prop_cycle(color=STYLE.palette)
    return figure, list(axes.flat)


def panel_grid(
    count: int, columns: int, *, width: float, height: float
) -> tuple["Figure", list["Axes"]]:
    """Return a figure with ``count`` axes in at most ``columns`` columns."""
    columns = min(columns, count)
    figure, axes = panels(-(-count // columns), columns, width=width, height=height)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def legend(ax: "Axes", *, above: bool = False, **options: Any) -> None:
    """Draw a legend in the panel, or above its right end, if anything has a label."""
    if above:
        options = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)} | options
    if "handles" in options or ax.get_legend_handles_labels()[1]:
        ax.legend(**({"loc": "best", "frameon": False, "fontsize": "small"} | options))


def share_legend(figure: "Figure", axes: "Sequence[Axes] | None" = None) -> None:
    """Replace the legends of panels, by default of all, by one legend above the panels.

    Ritz values come first, from negative to positive, and then the other labels in the order of the
    panels. The legend has as many columns as fit. For further rows the figure grows, so that the
    panels keep their height.
    """
    entries: dict[str, Any] = {}
    for ax in figure.axes if axes is None else axes:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
        if (inner := ax.get_legend()) is not None:
            inner.remove()
    # The first panel may lack some kinds of stems, so the order of panels is not enough.
    stems = [label for label, _ in STEMS.values()]
    labels = [label for label in dict.fromkeys((*stems, *entries)) if label in entries]
    for rows in range(1, len(labels) + 1):
        outer = figure.legend([entries[label] for label in labels], labels, frameon=False,
                              fontsize="small", loc="outside upper center",
                              ncols=-(-len(labels) // rows))  # fmt: skip
        extent = outer.get_window_extent()
        if extent.width <= figure.bbox.width or rows == len(labels):
            further = extent.height * (1 - 1 / rows) / figure.dpi
            figure.set_figheight(figure.get_figheight() + further)
            return
        outer.remove()


# ------------------------------------------------------------------------------------------
# Marks that several plots share.


def line(ax: "Axes", x: Any, y: Any, colour: str, label: str | None, **options: Any) -> "Line2D":
    """Draw a line through points ``(n,)``, with gaps where a value cannot be drawn."""
    usual: Any = {"color": colour, "label": label, "linewidth": STYLE.line}
    # No line reaches a point without neighbours: a dash shows it.
    alone = np.flatnonzero(isolated(drawable(y)))
    dashes: Any = {"marker": "_", "markersize": 14, "markevery": alone} if alone.size else {}
    usual |= {"markersize": STYLE.marker} if "marker" in options else dashes
    return ax.plot(drawable(x), drawable(y), **usual | options)[0]


def bars(ax: "Axes", x: Any, y: Any, **options: Any) -> Any:
    """Draw markers with error bars and return them.

    Args:
        ax: Axes to draw on.
        x: Places, ``(n,)``.
        y: Values, ``(n,)``.
        **options: Options of ``errorbar``. Errors that are all zero or NaN draw no bars.
    """
    for name in ("xerr", "yerr"):
        error = np.nan_to_num(options.pop(name, 0.0))
        if error.any():
            options[name] = error
    usual: dict[str, Any] = {"fmt": "o", "color": STYLE.blue, "markersize": STYLE.marker}
    return ax.errorbar(drawable(x), drawable(y), **usual | {"capsize": 3} | options)


def stems(ax: "Axes", x: Array, y: Array, floor: float, **options: Any) -> None:
    """Draw error bars on vertical lines from ``floor``; see :func:`bars`."""
    ax.vlines(x, floor, y, color=options.get("color", STYLE.blue), linewidth=0.9)
    bars(ax, x, y, **options)


def band(ax: "Axes", x: Array, low: Array, high: Array, colour: Any = STYLE.blue) -> None:
    """Fill the area between two curves."""
    ax.fill_between(x, low, high, color=colour, alpha=STYLE.band, linewidth=0)


def name_rows(ax: "Axes", names: Sequence[str]) -> Array:
    """Name rows from top to bottom, with a grid line each, and return their places."""
    places = np.arange(float(len(names)))
    ax.set_yticks(places, names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", color=STYLE.grey, alpha=0.3, linewidth=0.6)
    return places


def series_look(index: int) -> tuple[str, str]:
    """Return the colour and marker of a series; the first 49 series have different pairs."""
    colours, markers = STYLE.palette, STYLE.markers
    lap = index // len(colours)
    return colours[index % len(colours)], markers[(index + lap) % len(markers)]


def finish(
    ax: "Axes", xlabel: str, ylabel: str = "", title: str | None = None, **settings: Any
) -> None:
    """Set labels, title and other properties of axes, and draw their legend."""
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    if title is not None:
        set_title(ax, title)
    legend(ax)


# ------------------------------------------------------------------------------------------
# Scales and ticks.


def drawable(values: Any) -> Array:
    """Return values as an array, with NaN (a gap) for infinite values and those above 1e200."""
    array = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(array) <= STYLE.largest, array, np.nan)


def isolated(values: Array) -> NDArray[np.bool_]:
    """Return which values ``(n,)`` have gaps on both sides, so that no line reaches them."""
    finite = np.pad(np.isfinite(values), 1)
    alone: NDArray[np.bool_] = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    return alone


def include_x(ax: "Axes", x: Array) -> None:
    """Extend the horizontal axis to all places ``(n,)``, also those where the curve has a gap."""
    finite = x[np.isfinite(x)]
    if finite.size:
        # A single place is in the middle of one unit.
        margin = 0.5 if finite.min() == finite.max() else 0.0
        ends = [(finite.min() - margin, 0.0), (finite.max() + margin, 0.0)]
        ax.update_datalim(ends, updatey=False)
        ax.autoscale_view()


def whole_x(ax: "Axes", x: Array) -> None:
    """Extend the horizontal axis to all places ``(n,)``, such as epochs, with whole ticks only."""
    from matplotlib.ticker import MaxNLocator

    include_x(ax, x)
    steps = MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    ax.xaxis.set_major_locator(steps)


def batch_size_x(ax: "Axes", batch_sizes: Sequence[int]) -> None:
    """Give axes a logarithmic scale of batch sizes, with a tick at each."""
    sizes = sorted(set(batch_sizes))
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.tick_params(axis="x", which="minor", bottom=False)
    ax.set_xlabel("batch size $B$ (samples)")


def spans_decade(*values: Any) -> bool:
    """Return whether all finite values are positive and the largest is ten times the smallest."""
    array = np.concatenate([drawable(one).ravel() for one in values])
    finite = array[np.isfinite(array)]
    return bool(finite.size and finite.min() > 0 and finite.max() >= 10 * finite.min())


def ticks(low: float, high: float) -> tuple["Locator", "Formatter"]:
    """Return a locator and a formatter for ticks between ``low`` and ``high``.

    Less than a decade has equal steps. Up to three decades have ticks at 1, 2 and 5 of each, and
    also at 3 if there are few. More decades have powers of ten.
    """
    from matplotlib import ticker

    if not (low > 0 and high >= 10 * low):
        steps = ticker.MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
        return steps, ticker.ScalarFormatter(useOffset=False)
    if high < 1000 * low:
        multiples = (1.0, 2.0, 3.0, 5.0) if high < 30 * low else (1.0, 2.0, 5.0)
        return ticker.LogLocator(subs=multiples), ticker.StrMethodFormatter("{x:g}")
    return ticker.LogLocator(), ticker.LogFormatterMathtext()


def log_scale(ax: "Axes", *values: Any, name: str = "y") -> None:
    """Make the ``x`` or ``y`` axis logarithmic, with ticks that suit what is already drawn.

    Args:
        ax: Axes with everything already drawn.
        *values: If passed, the scale becomes logarithmic only if these span a decade.
        name: ``x`` or ``y``.
    """
    from matplotlib.ticker import NullFormatter

    if values and not spans_decade(*values):
        return
    axis = ax.yaxis if name == "y" else ax.xaxis
    ax.set(**{f"{name}scale": "log"})
    locator, formatter = ticks(*axis.get_view_interval())
    axis.set_major_locator(locator)
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------------------------------
# Titles.

# Titles of matrices whose name is not their title, as in "hessian" and "Hessian".
MATRICES = {
    "ggn": "Gauss-Newton",
    "covariance": "Covariance of gradients",
    "normalized": "Normalised Laplacian",
    "adjacency": "Adjacency matrix",
}
DIRECTIONS = {
    "largest": "Ritz vector of the largest value",
    "smallest": "Ritz vector of the smallest value",
    "smallest magnitude": "Ritz vector of the value nearest zero",
}


def set_title(ax: "Axes", title: str) -> None:
    """Write a title above the left end of a panel."""
    ax.set_title(title, loc="left", fontsize="medium")


def result_title(result: Any) -> str:
    """Return the matrix and the batch-norm mode of a result, such as ``Hessian, batch norm eval``.

    Results without ``matrix`` and ``batch_norm`` have an empty title.
    """
    matrix, mode = getattr(result, "matrix", None), getattr(result, "batch_norm", None)
    name = MATRICES.get(matrix, matrix.capitalize()) if isinstance(matrix, str) else ""
    return ", ".join(part for part in (name, f"batch norm {mode}" if mode else "") if part)


def titled(results: Mapping[str, T]) -> dict[str, T]:
    """Return results by their titles if all have different ones, otherwise by their names."""
    titles = [result_title(result) for result in results.values()]
    distinct = all(titles) and len(set(titles)) == len(titles)
    return dict(zip(titles if distinct else results, results.values(), strict=True))


def direction_title(name: str) -> str:
    """Return the title of a direction of a landscape."""
    return DIRECTIONS.get(name, name)
