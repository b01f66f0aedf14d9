"""The pictures of ``ritz graph``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ritz import plots
from ritz.graphs import ClusterCount, Fit, Similarity
from ritz.spectra import EntropicDensity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECADES = 20.0  # ratio of counts beyond which the axis is logarithmic


def check_picture(out: Path | None) -> None:
    """Raise before long work if a picture could not be written after it."""
    if out is not None:
        plots.check_picture(out)


def write_picture(out: Path | None, draw: Callable[[], "Figure"]) -> list[Path]:
    """Write a picture where one is asked for; return its name, or none."""
    if out is None:
        return []
    return [plots.save_figure(draw(), out)]


def spectrum_figure(density: EntropicDensity, name: str) -> "Figure":
    """Draw an entropic spectrum."""
    figure, (ax,) = plots.panels()
    plots.density(density, ax=ax, label=name)
    # An eigenvalue many times repeated, such as 0 or 1, must not flatten the rest.
    heights = density.pdf(torch.linspace(0.001, 1.999, 2000, dtype=torch.float64))
    ax.set_ylim(0, 1.5 * float(heights.quantile(0.98)))
    return figure


def compare_figure(found: Similarity) -> "Figure":
    """Draw distances as a heat map."""
    side = 1.6 + 0.55 * len(found.names)
    figure, (ax,) = plots.panels(width=side + 0.6, height=side)
    plots.similarity(found, ax=ax)
    return figure


def clusters_figure(density: EntropicDensity, found: ClusterCount) -> "Figure":
    """Draw how many eigenvalues lie below each point: a gap is a level stretch."""
    figure, (ax,) = plots.panels()
    points = torch.logspace(-4, 0, 1000, dtype=torch.float64)
    below = found.num_nodes * density.cdf(points)
    ax.plot(points.numpy(), below.numpy(), linewidth=1.2, label="entropic spectrum")
    low, high = _limits(below, found)
    if found.count is not None:
        ax.axvspan(max(found.gap[0], 1e-4), found.gap[1], alpha=0.15, color="grey", label="gap")
        ax.axhline(found.count, color="black", linewidth=0.8, label=f"{found.count:,} clusters")
    # Decades are for counts that span some; within one they would put all of it on one line.
    scale = "log" if high > DECADES * low else "linear"
    ax.set(xscale="log", yscale=scale, xlabel=r"$\lambda$", ylabel="eigenvalues below")
    ax.set(xlim=(float(points[0]), float(points[-1])), ylim=(low, high))
    ax.legend(frameon=False, fontsize="small")
    return figure


def _limits(below: torch.Tensor, found: ClusterCount) -> tuple[float, float]:
    """Counts from the least that is drawn to the largest, with some room on either side."""
    counts = [float(below[0]), float(below[-1]), float(found.count or below[0])]
    least, largest = max(min(counts), 0.5), max(*counts, 1.0)
    if largest > DECADES * least:
        return least / 1.5, 1.5 * largest
    room = 0.1 * (largest - least) or 1.0
    return max(least - room, 0.0), largest + room


def model_figure(found: Fit) -> "Figure":
    """Draw the divergence of each model over the parameter that was searched."""
    searched = [one for one in found.fits if len(one.values) > 1] or list(found.fits)
    figure, axes = plots.panels(1, len(searched), width=3.4, height=3.0)
    for ax, one in zip(axes, searched, strict=True):
        order = one.values.argsort()
        ax.plot(one.values[order].numpy(), one.divergences[order].numpy(), marker="o", markersize=3)
        ax.axhline(one.typical, color="black", linestyle=":", linewidth=0.8)
        name = next(iter(one.interval), next(iter(one.parameters), ""))
        ax.set(title=one.model.replace("_", " "), xlabel=name, yscale="log")
    axes[0].set_ylabel("divergence")
    return figure
