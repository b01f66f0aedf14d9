"""The pictures of the study of cluster counts."""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from ritz.studies._cluster_tables import FIRST, PAPER, number, probe_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ritz.studies.cluster_counts import Result


def draw_planted(result: "Result", ax: "Axes") -> None:
    """Draw mean errors over the number of planted clusters, beside what was published."""
    from ritz.plots.figures import BLUE, GREEN, VERMILION

    clusters = result.config.clusters
    colours = {"entropic": BLUE, "lanczos": VERMILION, FIRST: GREEN}
    # The first two have nearly the same errors: one is drawn around the other.
    for name, style, size in (("entropic", "s-", 9), ("lanczos", "x--", 5), (FIRST, "o-", 5)):
        errors = result.errors(name).nanmean(1).numpy()
        ax.plot(clusters, errors, style, color=colours[name], label=name, ms=size, mfc="none")
    for name, row in PAPER.items():
        label = f"published: {name}"
        ax.plot(list(row), list(row.values()), ":", color=colours[name], label=label)
    limit = result.limits.numpy() * math.sqrt(2 / math.pi)  # mean of the absolute value
    marker = "_" if len(clusters) == 1 else ""  # a line through one point is none
    ax.plot(clusters, limit, "--", color="black", marker=marker, label="limit of the probes")
    exact = bool((result.errors("auto") == 0).all())
    title = "default: exact in every graph" if exact else "default: not exact everywhere"
    ax.set(xscale="log", yscale="log", xlabel="planted clusters", title=title)
    ax.set_ylabel("fractional error, mean over seeds")
    ax.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))


def draw_mixed(result: "Result", ax: "Axes") -> None:
    """Draw errors of the large graphs over the number of moments."""
    from ritz.plots.figures import PALETTE

    c = result.config
    moments = [*c.mixed_moments, c.num_moments]
    for count, colour in zip(c.mixed, PALETTE, strict=False):
        found, last = result.by_moments[str(count)], result.mixed[str(count)]
        # Both have nearly the same errors: one is drawn around the other.
        for name, style, size in (("entropic", "s-", 9), ("lanczos", "x--", 5)):
            rows = [*found[name].tolist(), number(last[name])]
            errors = [100 * (value - count) / count for value in rows]
            label = f"{count} clusters, {name}{_missing(moments, rows)}"
            ax.plot(moments, errors, style, color=colour, label=label, ms=size, mfc="none")
        limit = 100 * probe_limit(count, c.num_probes)
        ax.axhspan(-limit, limit, color=colour, alpha=0.12, label=f"{count}: limit of the probes")
    exact = all(result.mixed[str(count)]["auto"].count == count for count in c.mixed)
    title = "mixed kinds; default: exact" if exact else "mixed kinds; default: not exact"
    ax.set(xlabel="moments", ylabel="error of the count, %", title=title)
    ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_real(result: "Result", ax: "Axes") -> None:
    """Draw the counts of the real graphs over the number of moments; which have no gap is said."""
    moments = result.config.moments
    # Curves lie on each other: every other one is dashed with small markers, within large ones.
    for place, (one, marker) in enumerate(zip(result.real, cycle("osD^vPXh*"), strict=False)):
        ax.errorbar(
            moments,
            one.estimates.numpy(),
            yerr=2 * one.stderr.numpy(),
            marker=marker,
            markersize=4 if place % 2 else 7.5,
            markerfacecolor=None if place % 2 else "none",
            linestyle="--" if place % 2 else "-",
            label=one.name.split(".")[0] + _missing(moments, one.estimates.tolist()),
        )
    ax.set(yscale="log", xlabel="moments", ylabel="entropic count")
    ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _missing(moments: Sequence[int], counts: Sequence[float]) -> str:
    """Where a curve has no points, for its label."""
    absent = [m for m, count in zip(moments, counts, strict=True) if math.isnan(count)]
    if len(absent) == len(counts):
        return ": no gap"
    return f" (no gap: m = {', '.join(map(str, absent))})" if absent else ""
