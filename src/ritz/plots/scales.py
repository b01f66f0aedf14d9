"""Scales that can be read: logarithmic where there is a decade to show, numbers as people write."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Formatter, Locator

DECADE = 10.0


def spans_decade(*values: Any) -> bool:
    """Return whether all finite values are positive and the largest is ten times the smallest.

    Args:
        values: Arrays of any shape.
    """
    found = np.concatenate([np.asarray(one, dtype=np.float64).ravel() for one in values])
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
    from matplotlib.ticker import NullFormatter

    ax.set_yscale("log")
    locator, formatter = ticks(*ax.get_ylim())
    ax.yaxis.set_major_locator(locator)
    ax.yaxis.set_major_formatter(formatter)
    ax.yaxis.set_minor_formatter(NullFormatter())
