"""Plots of estimates, eigenpairs, moments and solutions of linear systems, with error bars."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ritz._core.results import Estimate, plain_estimate
from ritz.plots import _style as style
from ritz.plots._plot import draw, plot_several
from ritz.plots._series import Array, as_array
from ritz.plots._style import STYLE
from ritz.spectra import Eigenpairs, Moments
from ritz.spectra._shared import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEAN = f"mean ± {STYLE.sigmas:g} stderr"


@draw.register(Estimate)
def _(estimate: Estimate, ax: "Axes") -> None:
    if estimate.mean.ndim:
        _draw_array(estimate, ax)
    elif estimate.samples is None:
        raise ValueError(f"an Estimate without samples has no plot, print it: {estimate}")
    else:
        _draw_samples(estimate, ax)


def _draw_array(estimate: Estimate, ax: "Axes") -> None:
    mean, stderr = as_array(estimate.mean).ravel(), as_array(estimate.stderr).ravel()
    order, size = np.argsort(-mean), len(mean)
    # Evenly spaced ranks, with the first and the last.
    ranks = np.unique(np.linspace(0, size - 1, min(size, STYLE.max_points)).astype(int))
    x, y, error = ranks + 1.0, mean[order[ranks]], STYLE.sigmas * stderr[order[ranks]]
    if len(y) <= STYLE.max_bars:
        style.bars(ax, x, y, yerr=error, label=MEAN if error.any() else None)
    else:
        # Sorted means are a smooth curve. Errors of neighbours differ and look like a haze.
        style.band(ax, x, style.drawable(y - error), style.drawable(y + error))
        style.line(ax, x, y, STYLE.blue, MEAN if error.any() else None)
    style.mark(ax, y=0)
    title = fill(f"{size:,} entries, {estimate.method}", STYLE.title_width)
    style.finish(ax, "rank, from the largest", "value", title)


def _draw_samples(estimate: Estimate, ax: "Axes") -> None:
    samples = as_array(estimate.samples).ravel()
    mean, error = float(estimate), STYLE.sigmas * float(estimate.stderr)
    # ||A||_F = sqrt(E ||Az||^2): the samples of a Frobenius norm are squares.
    if not np.isclose(samples.mean(), mean) and np.isclose(samples.mean(), mean**2):
        samples = np.sqrt(samples.clip(min=0))
    x = np.arange(1.0, len(samples) + 1)
    known = bool(np.isfinite(error))  # NaN for a single sample
    if known:
        ax.axhspan(mean - error, mean + error, color=STYLE.blue, alpha=STYLE.band, linewidth=0)
    ax.axhline(mean, color=STYLE.blue, linewidth=STYLE.line, label=MEAN if known else "mean")
    style.line(ax, x, samples, STYLE.grey, "sample", marker="o", linestyle="")
    style.whole_x(ax, x)
    title = fill(f"{plain_estimate(estimate)}, {estimate.method}", STYLE.title_width)
    style.finish(ax, "sample", "value", title)


@plot_several.register(Estimate)
def _(first: Estimate, results: Mapping[Any, Estimate]) -> "Figure":
    if any(one.mean.ndim for one in results.values()):
        return plot_several.dispatch(object)(first, results)
    figure, (ax,) = style.panels(height=1.2 + 0.3 * len(results))
    draw_estimates(ax, [*map(str, results)], list(results.values()))
    sampled = any(float(one.stderr) for one in results.values())
    ax.set(xlabel=MEAN if sampled else "value")
    return figure


def draw_estimates(ax: "Axes", names: Sequence[str], estimates: Sequence[Estimate]) -> None:
    """Draw one number per row, the first on top, with error bars."""
    errors = [STYLE.sigmas * float(one.stderr) for one in estimates]
    places = style.name_rows(ax, names)
    style.bars(ax, [*map(float, estimates)], places, xerr=errors, markersize=5)
    ax.margins(x=0.12)


# ------------------------------------------------------------------------------------------
# Eigenvalues, moments and residuals.


@draw.register(Eigenpairs)
def _(eigenpairs: Eigenpairs, ax: "Axes") -> None:
    values, residuals = (as_array(part)[::-1] for part in (eigenpairs.values, eigenpairs.residuals))
    converged = residuals <= STYLE.converged * np.abs(values).max()
    x = _set_ranks(ax, eigenpairs)
    for (sign, full), (_, colour) in style.STEMS.items():
        chosen = (np.where(values < 0, -1, 1) == sign) & (converged == full)
        if chosen.any():
            label = f"eigenvalue {'<' if sign < 0 else '≥'} 0{'' if full else ', unconverged'}"
            # An eigenvalue lies within the residual of each value.
            style.stems(ax, x[chosen], values[chosen], 0.0, yerr=residuals[chosen], color=colour,
                        label=label, markerfacecolor=colour if full else "white")  # fmt: skip
    style.mark(ax, y=0)
    style.finish(ax, "rank, from the largest", r"eigenvalue $\lambda$ ± residual")


def _set_ranks(ax: "Axes", eigenpairs: Eigenpairs) -> Array:
    """Set ticks 1, 2, ... and, after a gap, ..., n - 1, n; return the places of the values."""
    count = len(eigenpairs.values)
    low = min(int(eigenpairs.settings.get("smallest") or 0), count)
    if count == eigenpairs.dimension:  # all eigenvalues: no gap
        low = 0
    top, x = count - low, np.arange(1.0, count + 1)
    x[top:] += 1 if top and low else 0
    names = [str(rank) for rank in range(1, top + 1)]
    names += [f"$n{-back if back else ''}$" for back in range(low - 1, -1, -1)]
    # Counted from both ends, so that 1 and n have a tick.
    step = -(-count // STYLE.max_ranks)
    shown = [*range(0, top, step), *sorted(range(count - 1, top - 1, -step))]
    ax.set_xticks(x[shown], [names[index] for index in shown])
    return x


@draw.register(Moments)
def _(moments: Moments, ax: "Axes") -> None:
    # The moment of degree 0 is always 1.
    mean, error = as_array(moments.mean)[1:], STYLE.sigmas * as_array(moments.stderr)[1:]
    x = np.arange(1.0, len(mean) + 1)
    style.stems(ax, x, mean, 0.0, yerr=error, label=MEAN if error.any() else "exact")
    style.mark(ax, y=0)
    style.whole_x(ax, x)
    low, high = moments.interval
    basis = "power" if moments.basis == "power" else moments.basis.capitalize()
    title = f"{len(mean)} moments on [{low:.3g}, {high:.3g}]"
    style.finish(ax, "degree", f"{basis} moment", title)


@draw.register(Solution)
def _(solution: Solution, ax: "Axes") -> None:
    # A residual of zero has no place on a logarithmic scale.
    history, final = as_array(solution.history), as_array(solution.residuals)
    history, final = (np.where(part > 0, part, np.nan) for part in (history, final))
    x, count = np.arange(float(len(history))), history.shape[1]
    many = count > len(STYLE.palette)
    for column in range(count):
        name: str | None = "residual" if count == 1 else f"right-hand side {column + 1}"
        if many:  # one colour for all, and one entry of the legend
            name = None if column else f"{count:,} right-hand sides"
        colour = STYLE.blue if many else STYLE.palette[column]
        style.line(ax, x, history[:, column], colour, name, alpha=0.5 if many else 1.0)
    # The recurrence of the residual drifts from b - Ax, which is computed once at the end.
    style.line(ax, np.full(len(final), x[-1]), final, "black", r"$\|b - A x\|$ at the end",
               marker="x", linestyle="", markersize=6, clip_on=False)  # fmt: skip
    style.log_scale(ax, history)
    style.whole_x(ax, x)
    title = f"{solution.status.outcome} after {len(history) - 1} steps"
    style.finish(ax, "step", "residual norm", title)
