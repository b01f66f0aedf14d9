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
    if found.count is not None:
        ax.axvspan(max(found.gap[0], 1e-4), found.gap[1], alpha=0.15, color="grey", label="gap")
        ax.axhline(found.count, color="black", linewidth=0.8, label=f"{found.count:,} clusters")
    ax.set(xscale="log", yscale="log", xlabel=r"$\lambda$", ylabel="eigenvalues below")
    ax.set_ylim(bottom=0.5)
    ax.legend(frameon=False, fontsize="small")
    return figure


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
