"""Plots of networks: landscapes, sharpness, degeneracy, calibration, mini-batches and layers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ritz.measures import Degeneracy, Landscape, Landscape2d, Sharpness, Temperature
from ritz.plots import _style as style
from ritz.plots._graphs import heat_map
from ritz.plots._plot import draw, plot, with_fields
from ritz.plots._series import as_array, check_drawn, landscape_lines, landscape_surface
from ritz.plots._spectra import MEAN, draw_estimates
from ritz.plots._style import STYLE, Axes, Figure

# ------------------------------------------------------------------------------------------
# Landscapes.


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
    ax.set(xlabel=r"step $t$", ylabel="loss")
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


# ------------------------------------------------------------------------------------------
# Sharpness and degeneracy.

# Quantities of a row of a sharpness, and their titles.
QUANTITIES = {
    "spectral_norm": "spectral norm",
    "trace": "trace",
    "frobenius_norm": "Frobenius norm",
    "negative_mass": "fraction below 0",
    "degeneracy": "fraction near 0",
}


@plot.register(Sharpness)
@plot.register(with_fields(*QUANTITIES))  # a single row
def _(result: Any) -> "Figure":
    rows = result.rows if isinstance(result, Sharpness) else (result,)
    figure, axes = style.panels(1, len(QUANTITIES), width=2.4, height=1.1 + 0.45 * len(rows))
    for ax, (quantity, label) in zip(axes, QUANTITIES.items(), strict=True):
        estimates = [getattr(row, quantity) for row in rows]
        # The share near zero is the mass of a degeneracy.
        estimates = [one.mass if isinstance(one, Degeneracy) else one for one in estimates]
        names = [style.result_title(row).replace(", ", "\n") for row in rows]
        draw_estimates(ax, names, estimates)
        style.set_title(ax, label)
        ax.locator_params(axis="x", nbins=4)
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
        if label.startswith("fraction"):
            ax.set_xlim(-0.05, 1.05)
            ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    figure.supxlabel(f"± {STYLE.sigmas:g} stderr", fontsize="small")
    figure.suptitle(getattr(result, "model", ""), x=0.01, ha="left", fontsize="medium")
    return figure


@draw.register(Degeneracy)
def _(result: Degeneracy, ax: "Axes") -> None:
    mass, value = result.mass, result.value
    if mass.samples is not None and value.samples is not None:
        style.line(ax, value.samples, mass.samples, STYLE.grey, "probe", marker="o", linestyle="")
    errors = [STYLE.sigmas * np.nan_to_num(float(one.stderr)) for one in (value, mass)]
    style.bars(ax, [float(value)], [float(mass)], xerr=errors[0], yerr=errors[1], fmt="s",
              markersize=5, label=MEAN if any(errors) else "one probe")  # fmt: skip
    ax.axvline(0, linestyle="--", **style.REFERENCE)
    ax.margins(0.15)
    style.finish(ax, r"mean eigenvalue near 0, $\lambda$", "fraction of eigenvalues near 0")


# ------------------------------------------------------------------------------------------
# Calibration and mini-batches.


@draw.register(with_fields("confidence", "accuracy", "edges"))
def _(reliability: Any, ax: "Axes") -> None:
    counts = as_array(reliability.counts)
    ax.stairs(counts / max(counts.sum(), 1.0), as_array(reliability.edges), fill=True,
              color=STYLE.grey, alpha=0.4, label="share of the samples")  # fmt: skip
    style.line(ax, [0, 1], [0, 1], STYLE.grey, "calibrated", linestyle="--", linewidth=STYLE.thin)
    # Bins without samples have no confidence.
    x, y = (as_array(part)[counts > 0] for part in (reliability.confidence, reliability.accuracy))
    style.line(ax, x, y, STYLE.blue, "accuracy", marker="o")
    title = f"calibration error {reliability.error:.3g}"
    style.finish(ax, "confidence", "accuracy", title, xlim=(0, 1), ylim=(0, 1.03))


@plot.register(Temperature)
def _(result: Temperature) -> "Figure":
    figure, axes = style.panels(1, 2, width=4.4, height=3.4)
    titles = ("As trained", f"Temperature {result.temperature:.3g}")
    for ax, one, title in zip(axes, (result.before, result.after), titles, strict=True):
        draw(one, ax)
        style.set_title(ax, f"{title}: {ax.get_title('left')}")
    style.share_legend(figure)
    return figure


@draw.register(with_fields("beta", "batch_sizes"))
def _(shrinkage: Any, ax: "Axes") -> None:
    beta = shrinkage.beta
    style.bars(ax, shrinkage.batch_sizes, as_array(beta.mean), fmt="o-", linewidth=STYLE.line,
              yerr=STYLE.sigmas * as_array(beta.stderr),
              label=rf"$\beta$ ± {STYLE.sigmas:g} stderr")  # fmt: skip
    style.batch_size_x(ax, shrinkage.batch_sizes)
    style.finish(ax, ax.get_xlabel(), r"shrinkage coefficient $\beta$", ylim=(0, 1.05))


# ------------------------------------------------------------------------------------------
# Layers and pairs of solutions.

# Quantities of each layer by their place in `layers`, and the label of the axis, for results that
# have this field. The mean square of gradients is left out: it is the sum of the two others.
LAYERS = {
    "cosine": ("distance", {0: r"distance $L_2$", 1: r"distance $L_\infty$"}),
    "total_variance": ("squared gradient", {1: r"$\|\mathrm{E}\, g_i\|^2$", 2: "variance"}),
    "l2": ("norm", {0: r"$L_2$ norm", 1: r"$L_\infty$ norm"}),
}


@plot.register(with_fields("layers", "names", "linf"))
@plot.register(with_fields("layers", "names", "total_variance"))
def _(result: Any) -> "Figure":
    xlabel, labels = next(entry for field, entry in LAYERS.items() if hasattr(result, field))
    rows = [[result.layers[name][place] for place in labels] for name in result.names]
    columns = np.array(rows).T
    figure, (ax,) = style.panels(width=6.0, height=1.3 + 0.24 * len(result.names))
    places = style.name_rows(ax, result.names)
    for index, (column, label) in enumerate(zip(columns, labels.values(), strict=True)):
        colour, marker = STYLE.palette[index], "oD"[index]
        style.line(ax, column, places, colour, label, marker=marker, linestyle="", markersize=5)
    style.log_scale(ax, columns, name="x")
    ax.set_xlabel(xlabel)
    style.legend(ax, above=True, ncols=len(labels))
    return figure


@plot.register(with_fields("kl_pairs", "distance_pairs"))
def _(diversity: Any) -> "Figure":
    pairs = {
        "KL divergence (nats)": (diversity.kl_pairs, diversity.kl),
        "squared total variation": (diversity.total_variation_pairs, diversity.total_variation),
        "squared distance": (diversity.distance_pairs, diversity.distance),
    }
    names = [str(number) for number in range(1, len(diversity.kl_pairs) + 1)]
    side = 1.7 + 0.5 * len(names)
    figure, axes = style.panels(1, len(pairs), width=side + 0.6, height=side)
    for ax, (label, (matrix, mean)) in zip(axes, pairs.items(), strict=True):
        heat_map(ax, as_array(matrix), names=names, label=label)
        ax.tick_params(axis="x", rotation=0)
        ax.set(xlabel="solution", ylabel="solution" if ax is axes[0] else "")
        style.set_title(ax, f"mean {mean:.3g}")
    return figure
