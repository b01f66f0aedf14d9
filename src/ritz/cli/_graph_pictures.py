"""The pictures of ``ritz graph``, written whole or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ritz._core.storage import atomic_path
from ritz.graphs import ClusterCount, Fit, Similarity
from ritz.spectra import EntropicDensity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".pdf", ".svg")


def check_picture(out: Path | None) -> None:
    """Raise before long work if a picture could not be written after it."""
    if out is None:
        return
    if out.suffix.lower() not in KINDS:
        raise ValueError(f"--out must end in {', '.join(KINDS)}; got {out.name!r}")
    check_folder("--out", out)


def check_folder(name: str, file: Path) -> None:
    """Raise unless the folder of a file is there."""
    if not file.parent.is_dir():
        raise ValueError(f"{name} must be in a folder that is there, got {file}")


def write_picture(out: Path | None, draw: Callable[[], "Figure"]) -> list[Path]:
    """Write a picture where one is asked for; return its name, or none."""
    if out is None:
        return []
    figure = draw()
    with atomic_path(out) as temporary:
        figure.savefig(temporary, format=out.suffix[1:].lower(), dpi=150)
    return [out]


def spectrum_figure(density: EntropicDensity, name: str) -> "Figure":
    """Draw an entropic spectrum."""
    from ritz import plots

    figure, (ax,) = plots.panels()
    plots.density(density, ax=ax, label=name)
    # An eigenvalue many times repeated, such as 0 or 1, must not flatten the rest.
    heights = density.pdf(torch.linspace(0.001, 1.999, 2000, dtype=torch.float64))
    ax.set_ylim(0, 1.5 * float(heights.quantile(0.98)))
    return figure


def compare_figure(found: Similarity) -> "Figure":
    """Draw distances as a heat map."""
    from ritz import plots

    side = 1.6 + 0.55 * len(found.names)
    figure, (ax,) = plots.panels(width=side + 0.6, height=side)
    plots.similarity(found, ax=ax)
    return figure


def clusters_figure(density: EntropicDensity, found: ClusterCount) -> "Figure":
    """Draw how many eigenvalues lie below each point: a gap is a level stretch."""
    from ritz import plots

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
    from ritz import plots

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
