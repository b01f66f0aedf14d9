"""What the study of cluster counts prints, and what was published."""

import math
from typing import TYPE_CHECKING

from ritz.graphs import ClusterCount

if TYPE_CHECKING:
    from ritz.studies.cluster_counts import Result

METHODS = ("auto", "krylov", "entropic", "lanczos")
FIRST = "first minimum"  # Algorithm 5 by its letter
PAPER = {  # by number of clusters
    "entropic": {9: 9.7e-3, 30: 6.4e-3, 90: 5.8e-3, 240: 3.5e-3},
    "lanczos": {9: 3.2e-3, 30: 1.4e-2, 90: 1.8e-2, 240: 2.89e-2},
}
MIXED = {305: (201_600, 500, 1000), 1355: (404_420, 200, 400)}  # vertices, least, largest


def number(found: ClusterCount) -> float:
    """Return a count before it was rounded; NaN for no gap."""
    if found.count is None:
        return math.nan
    return float(found.count) if found.stderr == 0 else found.estimate


def probe_limit(count: int, num_probes: int) -> float:
    r"""Return :math:`\sqrt{2 / (d N_c)}`, the standard deviation that ``d`` probes alone leave."""
    return math.sqrt(2 / (num_probes * count))


def planted_lines(result: "Result") -> list[str]:
    """Return the table of planted clusters."""
    c = result.config
    lines = [
        f"Fractional error of the number of clusters of {c.size} vertices, {c.num_moments} moments "
        f"x {c.num_probes} probes: mean over {c.num_seeds} graphs",
        f"{'clusters':20}" + "".join(f"{count:>10}" for count in c.clusters),
        f"{'sqrt(2/(d N_c))':20}" + "".join(f"{value:>10.1e}" for value in result.limits.tolist()),
    ]
    for name in (*METHODS, FIRST):
        errors = result.errors(name)
        lines.append(f"{name:20}" + "".join(f"{value:>10.1e}" for value in errors.nanmean(1)))
    lines += [
        f"{'published ' + name:20}"
        + "".join(f"{row.get(count, math.nan):>10.1e}" for count in c.clusters)
        for name, row in PAPER.items()
    ]
    for name in METHODS:
        spent = "".join(f"{value:>10.0f}" for value in result.products[name].tolist())
        lines.append(f"{'products, ' + name:20}{spent}")
    exact = (result.errors("auto") == 0).sum(1).tolist()
    sure = result.certified.sum(1).tolist()
    lines.append(f"{'auto exact, of ' + str(c.num_seeds):20}" + "".join(f"{n:>10}" for n in exact))
    lines.append(f"{'auto certified':20}" + "".join(f"{n:>10}" for n in sure))
    return lines


def mixed_lines(result: "Result") -> list[str]:
    """Return what was found in the large graphs of mixed kinds."""
    c, lines = result.config, []
    for count in c.mixed:
        limit = probe_limit(count, c.num_probes)
        lines.append(
            f"{count} clusters of mixed kinds, {MIXED[count][0]:,} vertices; "
            f"sqrt(2/(d N_c)) {limit:.2%}, of the published curves no numbers"
        )
        for name in METHODS:
            one = result.mixed[str(count)][name]
            error = (number(one) - count) / count
            spent = f"{one.num_products:,} products, {result.seconds[str(count)][name]:.0f} s"
            lines.append(f"  {name:10}{number(one):>10.1f}{error:>+10.2%}  {spent}; {one.status}")
        for name, found in sorted(result.by_moments.get(str(count), {}).items()):
            cells = [
                f"m = {m} {'no gap' if math.isnan(x) else f'{(x - count) / count:+.2%}'}"
                for m, x in zip(c.mixed_moments, found.tolist(), strict=True)
            ]
            lines.append(f"  {name + ', fewer moments:':26}{'; '.join(cells)}")
    return lines


def real_lines(result: "Result") -> list[str]:
    """Return the counts of the real graphs."""
    if not result.real:
        return []
    moments = result.config.moments
    head = "".join(f"{f'm = {m}':>10}" for m in moments)
    lines = [f"{'Entropic counts':22}{'vertices':>9}{head}  settled   truth components   default"]
    for one in result.real:
        cells = "".join(
            f"{'no gap':>10}" if math.isnan(value) else f"{value:>10.1f}"
            for value in one.estimates.tolist()
        )
        truth = "" if one.truth is None else str(one.truth)
        settled = "yes" if one.settled else "no"
        sure = "certified" if one.default.certified else str(one.default.status)
        lines.append(
            f"{one.name.split('.')[0]:22}{one.num_nodes:>9}{cells}{settled:>9}{truth:>8}"
            f"{one.default.num_components:>11}{one.default.count!s:>10} {sure}"
        )
    return lines
