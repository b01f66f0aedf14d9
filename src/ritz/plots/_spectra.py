"""Plots of spectra, densities, estimates, eigenpairs, moments and solutions of a matrix."""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz._core.results import Estimate, plain_estimate
from ritz.plots import _series as arrays
from ritz.plots import _style as style
from ritz.plots._plot import draw, plot_several, with_fields
from ritz.plots._series import as_array
from ritz.plots._style import STYLE, Axes, Figure
from ritz.spectra import (
    Density,
    DiscreteDensity,
    Eigenpairs,
    EntropicDensity,
    Moments,
    Spectrum,
)
from ritz.spectra._shared import Solution

DensityLike = with_fields("pdf", "support")
MEAN = f"mean ± {STYLE.sigmas:g} stderr"

# ------------------------------------------------------------------------------------------
# Spectra as stems.


def spectrum(spectrum: Spectrum, *, ax: "Axes | None" = None) -> "Axes":
    """Draw Ritz values as stems with their weights as heights, and return the axes.

    Colours show the sign of a Ritz value, or that it is zero within its residual. A filled marker
    is a converged eigenvalue. An empty one stands for a part of the spectrum.

    Args:
        spectrum: Result of :func:`ritz.lanczos`.
        ax: Axes to draw on. Defaults to a new figure.
    """
    arrays.check_drawn("spectrum", spectrum, Spectrum)
    ax = ax or style.panels()[1][0]
    _draw_spectra([ax], [arrays.spectrum_stems(spectrum)])
    style.legend(ax, loc="upper right")
    return ax


@draw.register(Spectrum)
def _(result: Spectrum, ax: "Axes") -> None:
    spectrum(result, ax=ax)
    # In the panel the legend would cover stems.
    style.share_legend(cast("Figure", ax.figure))


@plot_several.register(Spectrum)
def _(first: Spectrum, results: Mapping[Any, Spectrum]) -> "Figure":
    titles = {str(name): one for name, one in results.items()}
    return cast("Figure", spectra(titles, log=True)[0].figure)


def spectra(
    spectra: Mapping[str, Spectrum], *, axes: "Sequence[Axes] | None" = None, log: bool = False
) -> list["Axes"]:
    """Draw several spectra, each in its own panel, on common scales, and return the axes.

    Args:
        spectra: Spectra by the titles of their panels.
        axes: Axes to draw on, one per spectrum. Defaults to a new figure with one legend.
        log: Logarithmic horizontal axis on both sides of zero (symlog), for spectra that differ by
            orders of magnitude. Between -1 % and 1 % of the largest absolute value the scale is
            linear.
    """
    arrays.check_named("spectra", spectra, "titles to spectra")
    for title, one in spectra.items():
        arrays.check_drawn(f"spectra[{title!r}]", one, Spectrum)
    if axes is not None and len(axes) != len(spectra):
        raise ValueError(f"axes must be {len(spectra)}, one for each spectrum, got {len(axes)}")
    stems = [arrays.spectrum_stems(one) for one in spectra.values()]
    drawn = list(axes or style.panel_grid(len(stems), 2, width=4.5, height=2.6)[1])
    _draw_spectra(drawn, stems)
    values = np.concatenate([one.values for one in stems])
    for ax, title in zip(drawn, spectra, strict=True):
        style.set_title(ax, title)
        _set_x_scale(ax, float(values.min()), float(values.max()), log)
    if axes is None:
        # Axes.label_outer would leave the panel above a removed one without labels.
        for index, ax in enumerate(drawn):
            if index + 2 < len(drawn):
                ax.set_xlabel("")
                ax.tick_params(labelbottom=False)
            if index % 2:
                ax.set_ylabel("")
                ax.tick_params(labelleft=False)
        style.share_legend(cast("Figure", drawn[0].figure))
    return drawn


def _draw_spectra(axes: "Sequence[Axes]", spectra: Sequence[arrays.Stems]) -> None:
    # A logarithmic scale has no zero: stems begin at half the smallest weight.
    floor = max(0.5 * min(float(stems.weights.min()) for stems in spectra), 1e-18)
    for ax, stems in zip(axes, spectra, strict=True):
        _draw_stems(ax, stems, floor)
        ax.set(xlabel=r"Ritz value $\theta$", ylabel=r"weight $\tau$", ylim=(floor, 2.0))


def _draw_stems(ax: "Axes", stems: arrays.Stems, floor: float) -> None:
    for (sign, converged), (label, colour) in style.STEMS.items():
        chosen = (stems.signs == sign) & (stems.converged == converged)
        if chosen.any():  # only kinds that occur are in the legend
            style.stems(ax, stems.values[chosen], stems.weights[chosen], floor, color=colour,
                        markerfacecolor=colour if converged else "white", label=label)  # fmt: skip
    ax.set_yscale("log")


def _set_x_scale(ax: "Axes", low: float, high: float, log: bool) -> None:
    from matplotlib.ticker import NullLocator

    if not log:
        margin = 0.04 * (high - low) or 1.0
        ax.set_xlim(low - margin, high + margin)
        return
    # Four powers of ten up to the largest absolute value; linear below the smallest of them.
    least = math.floor(math.log10(max(-low, high) or 1.0)) - 2
    powers = [10.0**k for k in range(least, least + 4)]
    ax.set_xscale("symlog", linthresh=powers[0], linscale=0.5)
    # Both sides reach the first power, so that a short side has a tick as well.
    left, right = min(1.5 * low, -powers[0]), max(1.5 * high, powers[0])
    below, above = [-p for p in powers if -p >= left], [p for p in powers if p <= right]
    ax.set_xticks([*(below if low < 0 else []), 0, *above])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(left, right)


# ------------------------------------------------------------------------------------------
# Densities as curves.


def density(
    density: Density | Spectrum,
    *,
    ax: "Axes | None" = None,
    cumulative: bool = False,
    log: bool = False,
    label: str | None = None,
) -> "Axes":
    """Draw a density, or its distribution function, with its error band, and return the axes.

    A discrete density or a spectrum is smoothed with its automatic width, which the legend states.
    Call ``.smoothed(width)`` first to choose another width. Densities on the same axes have
    different colours.

    Args:
        density: Density of any kind, or a spectrum, which is the density of one probe.
        ax: Axes to draw on. Defaults to a new figure.
        cumulative: Draw the distribution function, without smoothing.
        log: Logarithmic vertical axis.
        label: Label in the legend. Defaults to a description of curve and band.
    """
    curve_density, width = _smooth(density, cumulative=cumulative)
    ax = ax or style.panels()[1][0]
    curve = arrays.density_curve(curve_density, cumulative=cumulative, level=STYLE.level)
    # One probe has no standard error, and a density of maximum entropy no probes.
    has_band = bool(np.isfinite(curve.low).any())
    if label is None:
        label = f"mean, {100 * STYLE.level:g} % interval" if has_band else "density"
        if isinstance(curve_density, EntropicDensity):
            label = f"maximum entropy, {len(curve_density.alphas)} moments"
        elif hasattr(curve_density, "cdf_interval") and not has_band:
            label = "one probe"
    (line,) = ax.plot(curve.x, curve.y, linewidth=STYLE.line, label=label + width)
    if has_band:
        style.band(ax, curve.x, curve.low, curve.high, line.get_color())
    if not cumulative:
        for point, mass in zip(*curve_density.atoms, strict=True):
            # An atom has no height: a line over the whole panel, with its mass in the legend.
            at = f"mass {float(mass):.3g} at {float(point):.3g}"
            ax.axvline(float(point), color=line.get_color(), linestyle=":", label=at)
    # Five decades below the maximum are negligible.
    bottom = max(float(curve.y.max()) * 1e-5, float(curve.y.min()) or 1e-18) if log else 0.0
    if log:
        ax.set_yscale("log")
    ax.set_ylim(bottom=bottom, auto=True)  # a second density may be higher
    style.finish(ax, r"eigenvalue $\lambda$", "mass below" if cumulative else "density")
    return ax


@draw.register(DensityLike)
def _(result: Density, ax: "Axes") -> None:
    density(result, ax=ax)


@plot_several.register(DensityLike)
def _(first: Density, results: Mapping[Any, Density]) -> "Figure":
    figure, (ax,) = style.panels()
    for name, one in results.items():
        density(one, ax=ax, label=str(name))
    return figure


def _smooth(density: Any, *, cumulative: bool = False) -> tuple[Density, str]:
    """Return the density to draw, and the width of the smoothing as text for the legend."""
    if isinstance(density, Spectrum):
        # Ritz values and weights are the discrete density of one probe.
        density = DiscreteDensity(
            nodes=density.values[None].cpu(),
            weights=density.weights[None].cpu(),
            roundoff=density.roundoff,
            dimension=density.dimension,
            num_products=density.num_products,
            seed=density.seed or 0,
        )
    elif not isinstance(density, DensityLike):
        raise arrays.not_drawn("density", "a density or a Spectrum", density)
    # Points have a distribution function, but no density.
    if cumulative or not isinstance(density, DiscreteDensity):
        return cast("Density", density), ""
    smooth = density.smoothed()
    return smooth, f", smoothed by {smooth.width:.2g}"


# ------------------------------------------------------------------------------------------
# Estimates over the histogram of the exact eigenvalues.


def against_exact(
    spectrum: Spectrum,
    exact: Tensor,
    *,
    diagonal: Tensor | None = None,
    law: Density | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw a spectrum over the histogram of the exact eigenvalues, and return the axes.

    Bars and stems are fractions that sum to 1, on a logarithmic scale. :func:`over_histogram` draws
    a density in the same way.

    Args:
        spectrum: Result of :func:`ritz.lanczos`.
        exact: All eigenvalues, ``(n,)``.
        diagonal: Diagonal of the matrix, ``(n,)``, to compare as a cheap approximation.
        law: Law of the eigenvalues, such as those of ``ritz.rmt``, drawn as its share of each bin.
        ax: Axes to draw on. Defaults to a new figure.
    """
    arrays.check_drawn("spectrum", spectrum, Spectrum)
    ax = ax or style.panels()[1][0]
    stems, n = arrays.spectrum_stems(spectrum), len(exact)
    # One eigenvalue has the share 1/n. A stem below a thousandth of it is noise of the probe.
    floor = min(0.3, max(1e-3, 0.5 * float(stems.weights.min()) * n)) / n
    edges: Any = np.histogram_bin_edges(exact.cpu().numpy(), bins=60)
    for values, label, colour, alpha in (
        (diagonal, "diagonal", STYLE.orange, 0.7),
        (exact, "exact", STYLE.grey, 0.6),
    ):
        if values is not None:
            shares = np.full(len(values), 1 / len(values))
            ax.hist(values.cpu().numpy(), bins=edges, weights=shares, color=colour, alpha=alpha,
                    label=label)  # fmt: skip
    if law is not None:
        ends = torch.from_numpy(edges.copy())
        # The first bin holds its left end, where an atom may lie.
        ends[0] -= 1e-6 * (ends[-1] - ends[0])
        ax.stairs(
            law.cdf(ends).diff().numpy(),
            edges,
            color=STYLE.vermilion,
            linewidth=STYLE.line,
            label="law",
        )
    _draw_stems(ax, stems, floor)
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="share", ylim=(floor, 3.0))
    style.legend(ax, loc="upper right")
    return ax


def over_histogram(
    density: Density | Spectrum,
    exact: Tensor,
    *,
    ax: "Axes | None" = None,
    num_bins: int = 100,
    label: str | None = None,
) -> "Axes":
    """Draw a density over the histogram of the exact eigenvalues, and return the axes.

    The vertical axis is limited, so that very high bins, such as those of a repeated eigenvalue,
    are cut off. :func:`against_exact` draws a spectrum in the same way.

    Args:
        density: Density of any kind, or a spectrum. Points are smoothed, as by :func:`density`.
        exact: All eigenvalues, ``(n,)``.
        ax: Axes to draw on. Defaults to a new figure.
        num_bins: Number of bins over the support of the density.
        label: Label of the density in the legend.
    """
    smooth, width = _smooth(density)
    num_bins = check_count("num_bins", num_bins)
    ax = ax or style.panels()[1][0]
    eigenvalues = exact.cpu().numpy()
    heights, edges = np.histogram(eigenvalues, bins=num_bins, range=smooth.support, density=True)
    ax.stairs(heights, edges, fill=True, color=STYLE.grey, alpha=0.6, label="exact")
    curve = arrays.density_curve(smooth)
    style.line(ax, curve.x, curve.y, STYLE.blue, (label or "density") + width)
    # An eigenvalue of high multiplicity would flatten everything else.
    top = np.sort(heights)[-11] if num_bins > 20 else heights.max()
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="density", ylim=(0, 1.5 * top or None))
    style.legend(ax, loc="upper right")
    return ax


# ------------------------------------------------------------------------------------------
# Estimates.


@draw.register(Estimate)
def _(estimate: Estimate, ax: "Axes") -> None:
    if not estimate.mean.ndim:
        _draw_samples(estimate, ax)
        return
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
    ax.axhline(0, **style.REFERENCE)
    title = fill(f"{size:,} entries, {estimate.method}", STYLE.title_width)
    style.finish(ax, "rank, from the largest", "value", title)


def _draw_samples(estimate: Estimate, ax: "Axes") -> None:
    if estimate.samples is None:
        raise ValueError(f"an Estimate without samples has no plot, print it: {estimate}")
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
# Eigenpairs, moments and solutions of linear systems.


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
    ax.axhline(0, **style.REFERENCE)
    style.finish(ax, "rank, from the largest", r"eigenvalue $\lambda$ ± residual")


def _set_ranks(ax: "Axes", eigenpairs: Eigenpairs) -> arrays.Array:
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
    mean, error = (
        as_array(moments.mean)[1:],
        STYLE.sigmas * as_array(moments.stderr)[1:],
    )
    x = np.arange(1.0, len(mean) + 1)
    style.stems(ax, x, mean, 0.0, yerr=error, label=MEAN if error.any() else "exact")
    ax.axhline(0, **style.REFERENCE)
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
