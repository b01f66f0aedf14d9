"""Readable scales, ticks and titles."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ritz.plots._series import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Formatter, Locator

T = TypeVar("T")

# ------------------------------------------------------------------------------------------
# Scales that can be read: logarithmic where there is a decade to show, numbers as people
# write.

DECADE = 10.0
LARGEST = 1e200  # beyond it the margins of a logarithmic scale would overflow


def drawable(values: Any) -> Array:
    """Return values as an array with NaN, which is a gap, for those that no scale can hold.

    Args:
        values: Of any shape; infinite ones and those beyond 1e200 are left out.
    """
    found = np.asarray(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(found) <= LARGEST, found, np.nan)


def isolated(values: Array) -> NDArray[np.bool_]:
    """Return which values have no neighbour that a line could join them to.

    Args:
        values: ``(n,)``, NaN where there is a gap.
    """
    seen = np.pad(np.isfinite(values), 1)
    found: NDArray[np.bool_] = seen[1:-1] & ~seen[:-2] & ~seen[2:]
    return found


def reach(ax: "Axes", x: Array) -> None:
    """Let the horizontal axis hold all places, also those at which nothing could be drawn.

    Args:
        ax: On which all is drawn already.
        x: Places, ``(n,)``.
    """
    found = x[np.isfinite(x)]
    if found.size:
        # A single place stands in the middle of one unit.
        margin = 0.5 if found.min() == found.max() else 0.0
        ends = [(found.min() - margin, 0.0), (found.max() + margin, 0.0)]
        ax.update_datalim(ends, updatey=False)
        ax.autoscale_view()


def whole_x(ax: "Axes", x: Array) -> None:
    """Give axes a horizontal scale over all places with ticks at whole numbers alone.

    Args:
        ax: On which all is drawn already.
        x: Epochs or steps, ``(n,)``.
    """
    from matplotlib.ticker import MaxNLocator

    reach(ax, x)
    steps = MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    ax.xaxis.set_major_locator(steps)


def spans_decade(*values: Any) -> bool:
    """Return whether all finite values are positive and the largest is ten times the smallest.

    Args:
        values: Arrays of any shape.
    """
    found = np.concatenate([drawable(one).ravel() for one in values])
    found = found[np.isfinite(found)]
    return bool(found.size and found.min() > 0 and found.max() >= DECADE * found.min())


def ticks(low: float, high: float) -> tuple["Locator", "Formatter"]:
    """Return where ticks stand from ``low`` to ``high`` and how they are written.

    Below a decade they are in equal steps; below three at 1, 2 and 5 of each, or 1, 2, 3 and 5
    where these are few; beyond at powers of ten.

    Args:
        low: Least value; equal steps are taken where it is not positive.
        high: Largest value.
    """
    from matplotlib import ticker

    if not (low > 0 and high >= DECADE * low):
        steps = ticker.MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10])
        return steps, ticker.ScalarFormatter(useOffset=False)
    if high < DECADE**3 * low:
        few = (1.0, 2.0, 3.0, 5.0) if high < 3 * DECADE * low else (1.0, 2.0, 5.0)
        return ticker.LogLocator(subs=few), ticker.StrMethodFormatter("{x:g}")
    return ticker.LogLocator(), ticker.LogFormatterMathtext()


def log_y(ax: "Axes") -> None:
    """Give axes a logarithmic vertical scale with ticks that suit what is drawn on them.

    Args:
        ax: On which all is drawn already; axes that share the scale count too.
    """
    ax.set_yscale("log")
    _set_ticks(ax.yaxis, *ax.get_ylim())


def log_x(ax: "Axes") -> None:
    """Give axes a logarithmic horizontal scale likewise.

    Args:
        ax: On which all is drawn already.
    """
    ax.set_xscale("log")
    _set_ticks(ax.xaxis, *ax.get_xlim())


def _set_ticks(axis: "Axis", low: float, high: float) -> None:
    from matplotlib.ticker import NullFormatter

    locator, formatter = ticks(low, high)
    axis.set_major_locator(locator)
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------------------------------
# What results are called in pictures, by what they say of themselves.

MATRICES = {
    "hessian": "Hessian",
    "ggn": "Gauss-Newton",
    "fisher": "Fisher",
    "covariance": "Covariance of gradients",
    "normalized": "Normalised Laplacian",
    "laplacian": "Laplacian",
    "adjacency": "Adjacency matrix",
}
DIRECTIONS = {
    "largest": "Ritz vector of the largest value",
    "smallest": "Ritz vector of the smallest value",
    "smallest magnitude": "Ritz vector of the value nearest zero",
}


def result_title(result: Any) -> str:
    """Return the matrix of a result, and its batch-norm mode where it has one.

    Such as ``Hessian, batch norm eval``; empty for a matrix that has no name.

    Args:
        result: A spectrum, eigenpairs or another result; those without ``matrix`` and
            ``batch_norm`` have an empty title.
    """
    matrix, mode = getattr(result, "matrix", None), getattr(result, "batch_norm", None)
    name = MATRICES.get(matrix, matrix) if isinstance(matrix, str) else ""
    return ", ".join(part for part in (name, f"batch norm {mode}" if mode else "") if part)


def set_title(ax: "Axes", title: str) -> None:
    """Write a title above the left end of axes, as all plots here have it.

    Args:
        ax: Of any plot.
        title: May be empty.
    """
    ax.set_title(title, loc="left", fontsize="medium")


def titled(results: Mapping[str, T]) -> dict[str, T]:
    """Return results by what they say they are, where that tells them all apart.

    Args:
        results: By names, which they keep otherwise.
    """
    titles = [result_title(result) for result in results.values()]
    apart = all(titles) and len(set(titles)) == len(titles)
    return dict(zip(titles if apart else results, results.values(), strict=True))


def direction_title(name: str) -> str:
    """Return what a direction of a landscape is called in a picture.

    Args:
        name: That of the direction.
    """
    return DIRECTIONS.get(name, name)


def monitor_title(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the matrix that a monitor watched; empty where a log has none, or several.

    Args:
        records: Of a log; those of other kinds than ``curvature`` are passed over.
    """
    found = {record.get("matrix") for record in records if record.get("kind") == "curvature"}
    return MATRICES.get(str(*found), "") if len(found) == 1 else ""
