"""Plots of numbers with error bars: estimates, eigenpairs, moments, solutions of systems."""

from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ritz._core.results import Estimate, format_uncertain
from ritz.plots._scales import drawable, log_y, result_title, set_title, spans_decade, whole_x
from ritz.plots._series import Array, as_array
from ritz.plots._spectra import BLUE, GREY, LEGEND, PALETTE, STEMS
from ritz.spectra import Eigenpairs, Moments
from ritz.spectra._shared import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGMAS = 2.0  # standard errors of every bar and band here
FEW = 40  # entries up to which each has a marker and an error bar
MOST_POINTS = 2000  # of a sorted curve: more than a page has dots for
MOST_TICKS = 12  # ranks that are written beside each other
WIDEST = 70  # characters of a line of a title
CONVERGED = 1e-3  # residual, relative to the largest absolute value, of a full marker


def draw_estimate(estimate: Estimate, ax: "Axes") -> None:
    """Draw the samples of a number beside their mean, or an array by size, with its errors.

    Args:
        estimate: A number with samples, or an array of any shape.
        ax: Where to draw.
    """
    if estimate.mean.ndim:
        _draw_array(estimate, ax)
    elif estimate.samples is None:
        raise ValueError(f"an Estimate without samples has no plot, print it: {estimate}")
    else:
        _draw_samples(estimate, ax)


def _draw_array(estimate: Estimate, ax: "Axes") -> None:
    mean, error = as_array(estimate.mean).ravel(), as_array(estimate.stderr).ravel()
    order, size = np.argsort(-mean), len(mean)
    kept = np.unique(np.linspace(0, size - 1, min(size, MOST_POINTS)).astype(int))
    x, y, error = kept + 1.0, drawable(mean[order[kept]]), SIGMAS * error[order[kept]]
    label = f"mean ± {SIGMAS:g} stderr"
    if len(y) <= FEW:
        _draw_bars(ax, x, y, error, label=label)
    else:
        # Sorted means make a smooth curve; the errors of neighbours do not, and show as a haze.
        ax.fill_between(x, y - error, y + error, color=BLUE, alpha=0.25, linewidth=0)
        ax.plot(x, y, color=BLUE, linewidth=1.2, label=label)
    if error.any():
        ax.legend(loc="best", **LEGEND)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    ax.set(xlabel="rank, from the largest", ylabel="value")
    set_title(ax, fill(f"{size:,} entries, {estimate.method}", WIDEST))


def _draw_samples(estimate: Estimate, ax: "Axes") -> None:
    samples = as_array(estimate.samples).ravel()
    mean, error = float(estimate), float(estimate.stderr)
    # A Frobenius norm is the root of a mean, and its samples are those of the square.
    if not np.isclose(samples.mean(), mean) and np.isclose(samples.mean(), mean**2):
        samples = np.sqrt(samples.clip(min=0))
    x = np.arange(1.0, len(samples) + 1)
    label = "mean"
    if np.isfinite(error):  # not known of one sample
        label = f"mean ± {SIGMAS:g} stderr"
        low, high = mean - SIGMAS * error, mean + SIGMAS * error
        ax.axhspan(low, high, color=BLUE, alpha=0.25, linewidth=0)
    ax.axhline(mean, color=BLUE, linewidth=1.2, label=label)
    ax.plot(x, drawable(samples), "o", color=GREY, markersize=4, label="sample")
    ax.set(xlabel="sample", ylabel="value")
    whole_x(ax, x)
    set_title(ax, fill(f"{format_uncertain(mean, error)}, {estimate.method}", WIDEST))
    ax.legend(loc="best", **LEGEND)


def draw_estimates(estimates: Mapping[str, Estimate], ax: "Axes") -> None:
    """Draw several numbers by name, with their errors.

    Args:
        estimates: Of single numbers.
        ax: Where to draw.
    """
    means = np.array([float(one) for one in estimates.values()])
    errors = np.array([SIGMAS * float(one.stderr) for one in estimates.values()])
    draw_rows(ax, list(estimates), means, errors)
    ax.set(xlabel=f"mean ± {SIGMAS:g} stderr" if errors.any() else "value")


def draw_rows(ax: "Axes", names: list[str], values: Array, errors: Array) -> None:
    """Draw one number a row, the first on top, with bars where there is an error.

    Args:
        ax: Where to draw.
        names: Of the rows.
        values: ``(n,)``.
        errors: Half widths of the bars, ``(n,)``; zero or NaN where there is none.
    """
    places = np.arange(len(names))
    bars: Any = {"xerr": np.nan_to_num(errors)} if np.nan_to_num(errors).any() else {}
    ax.errorbar(drawable(values), places, fmt="o", color=BLUE, markersize=5, capsize=3, **bars)
    ax.set_yticks(places, names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
    ax.margins(x=0.12)


def draw_eigenpairs(eigenpairs: Eigenpairs, ax: "Axes") -> None:
    """Draw eigenvalues as stems from zero, the largest first, with residuals as error bars.

    A full marker has converged; an empty one has a residual above a thousandth of the largest
    absolute value.

    Args:
        eigenpairs: Extreme ones, of either end.
        ax: Where to draw.
    """
    values, residuals = (as_array(part)[::-1] for part in (eigenpairs.values, eigenpairs.residuals))
    converged = residuals <= CONVERGED * np.abs(values).max()
    x = _set_ranks(ax, eigenpairs)
    for sign in (-1, 1):
        colour = STEMS[sign][1]
        name = "eigenvalue < 0" if sign < 0 else "eigenvalue ≥ 0"
        for full in (True, False):
            keep = (np.where(values < 0, -1, 1) == sign) & (converged == full)
            if keep.any():
                ax.vlines(x[keep], 0, values[keep], color=colour, linewidth=0.9)
                ax.errorbar(x[keep], values[keep], yerr=residuals[keep], fmt="o", markersize=4.5,
                            color=colour, markerfacecolor=colour if full else "white", capsize=3,
                            label=name + ("" if full else ", unconverged"))  # fmt: skip
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    ax.set(xlabel="rank, from the largest", ylabel=r"eigenvalue $\lambda$ ± residual")
    set_title(ax, result_title(eigenpairs))
    ax.legend(loc="best", **LEGEND)


def _set_ranks(ax: "Axes", eigenpairs: Eigenpairs) -> Array:
    """Ticks 1, 2, ... of the largest and, after a gap, ..., n - 1, n of the smallest; places."""
    count = len(eigenpairs.values)
    low = min(int(eigenpairs.settings.get("smallest") or 0), count)
    if count == eigenpairs.dimension:  # all of them: no gap
        low = 0
    top, x = count - low, np.arange(1.0, count + 1)
    x[top:] += 1 if top and low else 0
    names = [str(rank) for rank in range(1, top + 1)]
    names += [f"$n{-back if back else ''}$" for back in range(low - 1, -1, -1)]
    step = -(-count // MOST_TICKS)
    # From either end, so that 1 and n have theirs.
    kept = [*range(0, top, step), *sorted(range(count - 1, top - 1, -step))]
    ax.set_xticks(x[kept], [names[index] for index in kept])
    return x


def draw_moments(moments: Moments, ax: "Axes") -> None:
    """Draw moments from degree 1 as stems with their errors; that of degree 0 is always 1.

    Args:
        moments: In any basis.
        ax: Where to draw.
    """
    mean, error = as_array(moments.mean)[1:], SIGMAS * as_array(moments.stderr)[1:]
    x = np.arange(1.0, len(mean) + 1)
    ax.vlines(x, 0, mean, color=BLUE, linewidth=0.9)
    label = f"mean ± {SIGMAS:g} stderr" if error.any() else "exact"
    _draw_bars(ax, x, mean, error, label=label)
    ax.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    low, high = moments.interval
    ax.set(xlabel="degree", ylabel=f"{moments.basis.capitalize()} moment".replace("Power", "power"))
    whole_x(ax, x)
    set_title(ax, f"{len(mean)} moments on [{low:.3g}, {high:.3g}]")
    ax.legend(loc="best", **LEGEND)


def draw_solution(solution: Solution, ax: "Axes") -> None:
    """Draw residuals by step on a logarithmic scale, and those computed anew at the end.

    Args:
        solution: Of one right-hand side or several.
        ax: Where to draw.
    """
    history, final = as_array(solution.history), as_array(solution.residuals)
    x, count = np.arange(float(len(history))), history.shape[1]
    many = count > len(PALETTE)
    for column in range(count):
        name: str | None = "residual" if count == 1 else f"right-hand side {column + 1}"
        if many:  # all in one colour, named once
            name = None if column else f"{count:,} right-hand sides"
        colour = BLUE if many else PALETTE[column]
        ax.plot(x, _positive(history[:, column]), color=colour, linewidth=1.2, label=name,
                alpha=0.5 if many else 1.0)  # fmt: skip
    ax.plot(np.full(len(final), x[-1]), _positive(final), "x", color="black", markersize=6,
            label=r"$\|b - A x\|$ at the end", clip_on=False)  # fmt: skip
    if spans_decade(_positive(history)):
        log_y(ax)
    ax.set(xlabel="step", ylabel="residual norm")
    whole_x(ax, x)
    set_title(ax, f"{solution.status.outcome} after {len(history) - 1} steps")
    ax.legend(loc="best", **LEGEND)


def _draw_bars(ax: "Axes", x: Array, y: Array, error: Array, *, label: str) -> None:
    bars: Any = {"yerr": error} if error.any() else {}
    ax.errorbar(x, y, fmt="o", color=BLUE, markersize=4, capsize=2, label=label, **bars)


def _positive(values: Array) -> Array:
    """Values with gaps at zero, which no logarithmic scale holds."""
    return drawable(np.where(values > 0, values, np.nan))
