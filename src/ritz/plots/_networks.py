"""Plots of networks: sharpness, degeneracy, bulk, gradient, calibration, layers, diversity."""

from typing import Any

import numpy as np

from ritz.measures import BulkEdge, Degeneracy, GradientOverlap, Sharpness, Temperature
from ritz.plots import _style as style
from ritz.plots._graphs import heat_map
from ritz.plots._plot import draw, plot, with_fields
from ritz.plots._series import as_array
from ritz.plots._spectra import MEAN, draw_estimates
from ritz.plots._style import STYLE, Axes, Figure

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
    figure.supxlabel(f"bars: ± {STYLE.sigmas:g} standard errors", fontsize="small")
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
# Calibration of probabilities, and shrinkage of batch matrices.


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


# ------------------------------------------------------------------------------------------
# The edge of the bulk, and the overlap of the gradient with eigenvectors.


@draw.register(BulkEdge)
def _(result: BulkEdge, ax: "Axes") -> None:
    values, weights = as_array(result.values), as_array(result.weights)
    # A logarithmic scale has no zero: stems begin at half the smallest weight.
    floor = max(0.5 * float(weights.min()), 1e-18)
    outside, near = (as_array(part) for part in (result.outliers, result.near))
    beyond = np.isin(values, outside)
    kinds: Any = (
        ("bulk", ~beyond & ~np.isin(values, near), STYLE.grey),
        ("Tracy-Widom region", np.isin(values, near), STYLE.blue),
        ("outliers", beyond, STYLE.vermilion),
    )
    for label, chosen, colour in kinds:
        if chosen.any():
            style.stems(ax, values[chosen], weights[chosen], floor, color=colour, label=label)
    ax.set(yscale="log", ylim=(floor, 2.0))
    low, high = result.noise
    if np.isfinite(result.margin):
        for edge, side in ((low, -1), (high, 1)):
            ax.axvspan(*sorted((edge, edge + side * result.margin)), color=STYLE.sky, alpha=0.4,
                       linewidth=0)  # fmt: skip
            ax.axvline(edge, label="edge of the noise" if side > 0 else None, **style.REFERENCE)
    ax.axvline(float(result.crude), linestyle="--", color=STYLE.vermilion, linewidth=STYLE.thin,
               label=r"$5\,\mathrm{tr} H / P$")  # fmt: skip
    title = style.result_title(result)
    style.finish(ax, r"Ritz value $\theta$", r"weight $\tau$", title)


@draw.register(GradientOverlap)
def _(result: GradientOverlap, ax: "Axes") -> None:
    ranks = np.arange(1, len(result.values) + 1)
    mean, error = as_array(result.overlaps.mean), as_array(result.overlaps.truncation)
    ax.bar(ranks, mean, color=STYLE.blue, width=0.7, label=r"$(\varphi_i^\top \hat g)^2$")
    ax.errorbar(ranks, mean, yerr=error, fmt="none", color="black", linewidth=STYLE.thin)
    style.line(ax, ranks, mean.cumsum(), STYLE.vermilion, "sum", marker="o")
    shown = f"curvature along the gradient {float(result.curvature):.3g}"
    style.finish(ax, "rank of the eigenvalue", "part of the squared gradient",
                 f"{style.result_title(result)}: {shown}", ylim=(0, 1.05))  # fmt: skip
