"""Plots of spectra and densities, drawn on the axes they are given."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ritz._core.checks import check_count
from ritz.plots._series import (
    Stems,
    check_drawn,
    density_curve,
    is_density,
    not_drawn,
    one_probe_density,
    spectrum_stems,
)
from ritz.spectra import Density, DiscreteDensity, EntropicDensity, Spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by every kind of colour vision.
BLUE, ORANGE, VERMILION, GREY = "#0072B2", "#E69F00", "#D55E00", "#999999"
GREEN, PURPLE, SKY = "#009E73", "#CC79A7", "#56B4E9"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, "black")
# By sign, from left to right; grey dark enough to stand on bars of the other one.
STEMS = {-1: ("Ritz value < 0", VERMILION), 0: ("zero within its residual", "#666666"),
         1: ("Ritz value > 0", BLUE)}  # fmt: skip
STYLE = {"axes.spines.top": False, "axes.spines.right": False}
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": "small"}
# Inches about each panel: twice as much lies between the label of one and that of the next.
ROOM: dict[str, Any] = {"w_pad": 0.1, "h_pad": 0.06}


def panels(
    rows: int = 1, columns: int = 1, *, width: float = 6.0, height: float = 3.4
) -> tuple["Figure", list["Axes"]]:
    """Return a figure and its axes, row by row, each ``width`` by ``height`` inches.

    The figure belongs to pyplot only where the caller has imported pyplot, so that its ``show``
    and notebooks find it; elsewhere no display is ever asked for.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError('drawing needs matplotlib: pip install "ritz[plots]"') from error
    layout = ConstrainedLayoutEngine(**ROOM)
    shape: dict[str, Any] = {"figsize": (width * columns, height * rows), "layout": layout}
    pyplot = sys.modules.get("matplotlib.pyplot")
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = pyplot.figure(**shape) if pyplot else Figure(**shape)
        axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_prop_cycle(color=PALETTE)
    return figure, list(axes.flat)


def share_legend(figure: "Figure", *, first: Sequence[str] = ()) -> None:
    """Put one legend above all panels in place of one in each.

    It has as many columns as fit the width; for rows beyond the first the figure grows, so that
    panels keep their height.

    Args:
        figure: Whose axes have labels; equal ones are taken for the same thing.
        first: Labels that come first where they occur; then Ritz values, from negative to
            positive; the others follow as they appear.
    """
    entries: dict[str, Any] = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
        if (own := ax.get_legend()) is not None:
            own.remove()
    # From left to right as in the panels, whichever of them has which.
    stems = [_stem_label(sign, converged) for sign in STEMS for converged in (True, False)]
    labels = [label for label in dict.fromkeys((*first, *stems, *entries)) if label in entries]
    if labels:
        _legend_above(figure, [entries[label] for label in labels], labels)


def spectrum(spectrum: Spectrum, *, ax: "Axes | None" = None, rtol: float = 1e-3) -> "Axes":
    """Draw Ritz values as stems of their weights, on a logarithmic scale, and return the axes.

    Negative values have a colour of their own, and so have those within their residuals of zero;
    a full marker is an eigenvalue, an empty one stands for a whole stretch of the spectrum.

    Args:
        spectrum: A run without restarts, so that it has weights.
        ax: Where to draw; a new figure if not given.
        rtol: Largest residual, relative to the largest absolute value, of a full marker.
    """
    check_drawn("spectrum", spectrum, Spectrum)
    ax = ax or panels()[1][0]
    stems = spectrum_stems(spectrum, rtol=rtol)
    floor = max(0.5 * float(stems.weights.min()), 1e-18)
    _draw_stems(ax, stems, floor)
    ax.set_yscale("log")
    ax.set(xlabel=r"Ritz value $\theta$", ylabel=r"weight $\tau$", ylim=(floor, 2.0))
    ax.legend(loc="upper right", **LEGEND)
    return ax


def spectra(
    spectra: Mapping[str, Spectrum],
    *,
    axes: "Sequence[Axes] | None" = None,
    columns: int = 2,
    rtol: float = 1e-3,
    log: bool = False,
) -> list["Axes"]:
    """Draw several spectra in panels of their own on common scales, and return the axes.

    Args:
        spectra: By the titles of their panels; each as for :func:`spectrum`.
        axes: Where to draw, one for each; a new figure with one legend if not given.
        columns: Panels beside each other in a new figure.
        rtol: Largest residual, relative to the largest absolute value, of a full marker.
        log: Logarithmic horizontal axis on both sides of zero, linear below a hundredth to a
            thousandth of the largest absolute value; where spectra differ by orders of magnitude.
    """
    check_count("columns", columns)
    if not isinstance(spectra, Mapping):
        raise TypeError(f"spectra must be a mapping of titles to spectra, such as "
                        f"{{'Hessian': spectrum}}, got {type(spectra).__name__}")  # fmt: skip
    if not spectra:
        raise ValueError("spectra must hold at least one spectrum, got none")
    for title, found in spectra.items():
        check_drawn(f"spectra[{title!r}]", found, Spectrum)
    if axes is not None and len(axes) != len(spectra):
        raise ValueError(f"axes must be one for each of {len(spectra)} spectra, got {len(axes)}")
    stems = [spectrum_stems(found, rtol=rtol) for found in spectra.values()]
    drawn = _grid(len(stems), columns) if axes is None else list(axes)
    floor = max(0.5 * min(float(one.weights.min()) for one in stems), 1e-18)
    for ax, title, one in zip(drawn, spectra, stems, strict=True):
        _draw_stems(ax, one, floor)
        ax.set_yscale("log")
        ax.set_title(title, loc="left", fontsize="medium")
        ax.set(xlabel=r"Ritz value $\theta$", ylabel=r"weight $\tau$", ylim=(floor, 2.0))
    values = np.concatenate([one.values for one in stems])
    for ax in drawn:
        _scale(ax, float(values.min()), float(values.max()), log)
    if axes is None:
        _label_outer(drawn, columns)
        share_legend(drawn[0].figure)  # type: ignore[arg-type]
    return drawn


def density(
    density: Density | Spectrum,
    *,
    ax: "Axes | None" = None,
    cumulative: bool = False,
    sigmas: float = 2.0,
    log: bool = False,
    label: str | None = None,
) -> "Axes":
    """Draw a density, or its cumulative form, with its error band, and return the axes.

    What is made of points, a discrete density or a spectrum, is smoothed by its automatic width,
    which the legend states; call ``.smoothed(width)`` first for another. Several densities on the
    same axes have a colour each.

    Args:
        density: Of any kind, or a spectrum, which is the density of one probe.
        ax: Where to draw; a new figure if not given.
        cumulative: The distribution function in place of the density; points are not smoothed.
        sigmas: Half width of the band in standard errors.
        log: Logarithmic vertical axis.
        label: In the legend; says what curve and band are if not given.
    """
    smooth, width = with_pdf(density, cumulative=cumulative)
    ax = ax or panels()[1][0]
    curve = density_curve(smooth, cumulative=cumulative, sigmas=sigmas)
    # One probe has no error, and what is no mean over probes has no band.
    has_band = hasattr(smooth, "cdf_band") and bool(np.isfinite(curve.low).any())
    usual = f"mean ± {sigmas:g} stderr" if has_band else _density_label(smooth)
    parts = (label or usual, width)
    (line,) = ax.plot(curve.x, curve.y, linewidth=1.2, label=", ".join(filter(None, parts)))
    if has_band:
        band: Any = {"color": line.get_color(), "alpha": 0.25, "linewidth": 0}
        ax.fill_between(curve.x, curve.low, curve.high, **band)
    ax.set_ylim(bottom=0)
    if log:
        ax.set_yscale("log")
        ax.set_ylim(bottom=max(float(curve.y.max()) * 1e-5, float(curve.y.min()) or 1e-18))
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="mass below" if cumulative else "density")
    ax.legend(loc="best", **LEGEND)
    return ax


def with_pdf(density: Any, *, cumulative: bool = False) -> tuple[Density, str]:
    """Return the density that is drawn, and the width by which points were smoothed, in words.

    Args:
        density: Of any kind, or a spectrum.
        cumulative: Whether the distribution function is drawn, which points have too.
    """
    if isinstance(density, Spectrum):
        density = one_probe_density(density)
    elif not is_density(density):
        raise not_drawn("density", "a density or a Spectrum", density)
    if cumulative or not isinstance(density, DiscreteDensity):
        return density, ""
    smooth = density.smoothed()
    return smooth, f"smoothed by {smooth.width:.2g}"


def against_exact(
    spectrum: Spectrum,
    exact: Tensor,
    *,
    diagonal: Tensor | None = None,
    ax: "Axes | None" = None,
    num_bins: int = 60,
) -> "Axes":
    r"""Draw a spectrum over the histogram of the exact eigenvalues, and return the axes.

    Bars and stems are both shares of the whole that sum to 1, on a logarithmic scale.

    Args:
        spectrum: A run without restarts, so that it has weights.
        exact: All eigenvalues, ``(n,)``.
        diagonal: The diagonal of the matrix, ``(n,)``, as the approximation it often is.
        ax: Where to draw; a new figure if not given.
        num_bins: Bins of the histograms over the range of the eigenvalues.
    """
    check_drawn("spectrum", spectrum, Spectrum)
    check_count("num_bins", num_bins)
    ax = ax or panels()[1][0]
    stems = spectrum_stems(spectrum)
    # Below a thousandth of an eigenvalue a stem is noise of the start vector.
    floor = min(0.3, max(1e-3, 0.5 * float(stems.weights.min()) * len(exact))) / len(exact)
    edges = np.histogram_bin_edges(exact.cpu().numpy(), bins=num_bins)
    if diagonal is not None:
        _draw_bars(ax, diagonal, edges, color=ORANGE, alpha=0.7, label="diagonal")
    _draw_bars(ax, exact, edges, color=GREY, alpha=0.6, label="exact")
    _draw_stems(ax, stems, floor)
    ax.set_yscale("log")
    ax.set(xlabel=r"eigenvalue $\lambda$", ylabel="share", ylim=(floor, 3.0))
    ax.legend(loc="upper right", **LEGEND)
    return ax


def _density_label(density: Density) -> str:
    """What a density without a band is called."""
    if isinstance(density, EntropicDensity):
        return f"maximum entropy, {len(density.alphas)} moments"
    return "one probe" if hasattr(density, "cdf_band") else "density"


def _grid(count: int, columns: int) -> list["Axes"]:
    """That many axes in a new figure, row by row."""
    columns = min(columns, count)
    found = panels(-(-count // columns), columns, width=4.5, height=2.6)[1]
    for spare in found[count:]:
        spare.remove()
    return found[:count]


def _label_outer(axes: "Sequence[Axes]", columns: int) -> None:
    """Labels only where no panel stands below, or to the left."""
    for index, ax in enumerate(axes):
        if index + columns < len(axes):
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
        if index % columns:
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)


def _scale(ax: "Axes", low: float, high: float, log: bool) -> None:
    """A horizontal scale from ``low`` to ``high`` with a margin, logarithmic about zero or not."""
    from matplotlib.ticker import NullLocator

    if log:
        least = math.floor(math.log10(max(-low, high) or 1.0)) - 2
        powers = [10.0**k for k in range(least, least + 4)]
        ax.set_xscale("symlog", linthresh=10.0**least, linscale=0.5)
        # Both sides reach the first power at least, so that each that is used has a tick.
        left, right = min(1.5 * low, -powers[0]), max(1.5 * high, powers[0])
        below, above = [-p for p in powers if -p >= left], [p for p in powers if p <= right]
        ax.set_xticks([*(below if low < 0 else []), 0, *above])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(left, right)
    else:
        margin = 0.04 * (high - low) or 1.0
        ax.set_xlim(low - margin, high + margin)


def _draw_bars(ax: "Axes", values: Tensor, edges: Any, **style: Any) -> None:
    values_array = values.cpu().numpy()
    ax.hist(values_array, bins=edges, weights=np.full(len(values), 1 / len(values)), **style)


def _legend_above(figure: "Figure", handles: list[Any], labels: list[str]) -> None:
    for rows in range(1, len(labels) + 1):
        style = LEGEND | {"loc": "outside upper center", "ncols": -(-len(labels) // rows)}
        legend = figure.legend(handles, labels, **style)
        taken = legend.get_window_extent()
        if taken.width <= figure.bbox.width or rows == len(labels):
            more = taken.height * (rows - 1) / rows / figure.dpi
            figure.set_figheight(figure.get_figheight() + more)
            return
        legend.remove()


def _stem_label(sign: int, converged: bool) -> str:
    return f"{STEMS[sign][0]}{'' if converged else ', unconverged'}"


# Full markers converged, empty ones not; only kinds that occur reach the legend.
def _draw_stems(ax: "Axes", stems: Stems, floor: float) -> None:
    for sign, (_, colour) in STEMS.items():
        for converged in (True, False):
            keep = (stems.signs == sign) & (stems.converged == converged)
            if not keep.any():
                continue
            x, y = stems.values[keep], stems.weights[keep]
            label = _stem_label(sign, converged)
            face = colour if converged else "white"
            ax.vlines(x, floor, y, color=colour, linewidth=0.9)
            ax.plot(x, y, "o", markersize=4.5, color=colour, markerfacecolor=face, label=label)
