"""Plots of networks: sharpness, mass at the origin, calibration, mini-batches, layers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ritz.measures import Degeneracy, Temperature
from ritz.plots._estimates import SIGMAS, draw_rows
from ritz.plots._graphs import heat_map
from ritz.plots._scales import drawable, log_x, result_title, set_title, spans_decade
from ritz.plots._series import as_array
from ritz.plots._spectra import BLUE, GREY, LEGEND, PALETTE, panels, share_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Quantities of a row of a sharpness, and what they are called.
QUANTITIES = {
    "spectral_norm": "spectral norm",
    "trace": "trace",
    "frobenius_norm": "Frobenius norm",
    "negative_mass": "share below 0",
    "degeneracy": "share near 0",
}
# Numbers of every layer, by place, of results that have this field of the whole. The mean square of
# gradients is left out: it is the sum of the two that are drawn.
LAYERS = {
    "cosine": {0: r"distance $L_2$", 1: r"distance $L_\infty$"},
    "total_variance": {1: r"$\|\mathrm{E}\, g_i\|^2$", 2: "variance"},
    "l2": {0: r"$L_2$ norm", 1: r"$L_\infty$ norm"},
}
MARKERS = "oD"


def draw_sharpness(rows: Sequence[Any], *, title: str = "") -> "Figure":
    """Return a figure of the rows of a sharpness, a panel for each quantity.

    Bars are two standard errors.

    Args:
        rows: Of a :class:`ritz.measures.Sharpness`.
        title: Of the figure.
    """
    figure, axes = panels(1, len(QUANTITIES), width=2.4, height=1.1 + 0.45 * len(rows))
    names = [result_title(row).replace(", ", "\n") for row in rows]
    for ax, (quantity, label) in zip(axes, QUANTITIES.items(), strict=True):
        found = [getattr(row, quantity) for row in rows]
        found = [one.mass if isinstance(one, Degeneracy) else one for one in found]
        errors = np.array([SIGMAS * float(one.stderr) for one in found])
        draw_rows(ax, names, np.array([float(one) for one in found]), errors)
        set_title(ax, label)
        ax.locator_params(axis="x", nbins=4)
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
        if quantity in ("negative_mass", "degeneracy"):
            ax.set_xlim(-0.05, 1.05)
            ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    figure.supxlabel(f"± {SIGMAS:g} stderr", fontsize="small")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    return figure


def draw_degeneracy(result: Degeneracy, ax: "Axes") -> None:
    """Draw mass and place of what is nearest to zero, a point for each probe, and their means.

    Args:
        result: From one probe or several.
        ax: Where to draw.
    """
    mass, value = result.mass, result.value
    if mass.samples is not None and value.samples is not None:
        ax.plot(drawable(value.samples), drawable(mass.samples), "o", color=GREY, markersize=4,
                label="probe")  # fmt: skip
    errors = [SIGMAS * np.nan_to_num(float(one.stderr)) for one in (value, mass)]
    label = f"mean ± {SIGMAS:g} stderr" if any(errors) else "one probe"
    ax.errorbar(float(value), float(mass), xerr=errors[0], yerr=errors[1], fmt="s", color=BLUE,
                markersize=5, capsize=3, label=label)  # fmt: skip
    ax.axvline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    ax.set(xlabel=r"where it lies, $\lambda$", ylabel="share of eigenvalues near 0")
    ax.margins(0.15)
    set_title(ax, result_title(result))
    ax.legend(loc="best", **LEGEND)


def draw_reliability(reliability: Any, ax: "Axes", *, title: str = "") -> None:
    """Draw accuracy over confidence, with the share of the samples in each bin as bars.

    Args:
        reliability: ``before`` or ``after`` of a :class:`ritz.measures.Temperature`.
        ax: Where to draw.
        title: Beside the calibration error.
    """
    share = as_array(reliability.counts) / max(float(reliability.counts.sum()), 1.0)
    known = as_array(reliability.counts) > 0
    ax.stairs(share, as_array(reliability.edges), fill=True, color=GREY, alpha=0.4,
              label="share of the samples")  # fmt: skip
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle="--", label="calibrated")
    x, y = as_array(reliability.confidence)[known], as_array(reliability.accuracy)[known]
    ax.plot(x, y, color=BLUE, marker="o", markersize=4, linewidth=1.2, label="accuracy")
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.03))
    error = f"calibration error {reliability.error:.3g}"
    set_title(ax, f"{title}: {error}" if title else error)
    ax.legend(loc="best", **LEGEND)


def draw_temperature(result: Temperature) -> "Figure":
    """Return a figure of confidence and accuracy before and after a temperature.

    Args:
        result: Of :func:`ritz.measures.temperature`.
    """
    figure, (left, right) = panels(1, 2, width=4.4, height=3.4)
    draw_reliability(result.before, left, title="As trained")
    draw_reliability(result.after, right, title=f"Temperature {result.temperature:.3g}")
    share_legend(figure)
    return figure


def draw_shrinkage(result: Any, ax: "Axes") -> None:
    """Draw the best weight of a mini-batch matrix over batch sizes, with its errors.

    Args:
        result: Of :func:`ritz.measures.shrinkage`.
        ax: Where to draw.
    """
    mean, error = as_array(result.beta.mean), SIGMAS * as_array(result.beta.stderr)
    bars: Any = {"yerr": error} if error.any() else {}
    ax.errorbar(result.batch_sizes, mean, fmt="o-", color=BLUE, markersize=4, linewidth=1.2,
                capsize=3, label=rf"$\beta$ ± {SIGMAS:g} stderr", **bars)  # fmt: skip
    ax.set_xscale("log", base=2)
    sizes = sorted(result.batch_sizes)
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.tick_params(axis="x", which="minor", bottom=False)
    ax.set(xlabel="batch size $B$ (samples)", ylabel=r"best weight $\beta$", ylim=(0, 1.05))
    set_title(ax, result_title(result))
    ax.legend(loc="best", **LEGEND)


def draw_layers(result: Any) -> "Figure":
    """Return a figure of the numbers that a result has of every layer, a row for each.

    Args:
        result: With ``layers``, tuples of numbers by name, and ``names`` in their order.
    """
    labels = next(names for field, names in LAYERS.items() if hasattr(result, field))
    rows = [[result.layers[name][place] for place in labels] for name in result.names]
    columns = np.array(rows).T
    figure, (ax,) = panels(width=6.0, height=1.2 + 0.24 * len(result.names))
    places = np.arange(len(result.names))
    for column, label, marker, colour in zip(
        columns, labels.values(), MARKERS, PALETTE, strict=False
    ):
        ax.plot(drawable(column), places, marker, color=colour, markersize=5, label=label)
    if spans_decade(columns):
        log_x(ax)
    ax.set_yticks(places, result.names)
    ax.set_ylim(len(places) - 0.5, -0.5)
    ax.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
    style = LEGEND | {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(labels)}
    ax.legend(**style)
    return figure


def draw_diversity(result: Any) -> "Figure":
    """Return a figure of how much every two solutions differ, a heat map for each measure.

    Args:
        result: Of :func:`ritz.optim.solution_diversity`.
    """
    pairs = {
        "KL divergence (nats)": (result.kl_pairs, result.kl),
        "squared total variation": (result.total_variation_pairs, result.total_variation),
        "squared distance": (result.distance_pairs, result.distance),
    }
    count = len(result.kl_pairs)
    side = 1.7 + 0.5 * count
    figure, axes = panels(1, len(pairs), width=side + 0.6, height=side)
    names = [str(number) for number in range(1, count + 1)]
    for ax, (label, (matrix, mean)) in zip(axes, pairs.items(), strict=True):
        heat_map(ax, as_array(matrix), names=names, label=label)
        ax.tick_params(axis="x", rotation=0)
        ax.set(xlabel="solution", ylabel="solution" if ax is axes[0] else "")
        set_title(ax, f"mean {mean:.3g}")
    return figure
