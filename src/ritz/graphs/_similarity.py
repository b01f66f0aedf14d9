"""How alike graphs are: divergences between their spectra, with errors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.storage import storable
from ritz.graphs._density import (
    INTERVAL,
    NUM_MOMENTS,
    NUM_PROBES,
    bias,
    check_moments,
    default_times,
    heat_weights,
    jackknife,
    leave_out,
    matched_within,
    moments,
)
from ritz.graphs._io import as_graph
from ritz.graphs._matrices import with_edges
from ritz.spectra import EntropicDensity, Moments, maxent
from ritz.spectra._shared import chebyshev

# ------------------------------------------------------------------------------------------
# Distances between many spectra at once, each by what it needs of them.

POINTS = 4096  # at which densities are integrated, crowded towards both ends
Features = Callable[[Tensor, Sequence[EntropicDensity]], Tensor]
Distance = Callable[[Tensor, Tensor], Tensor]


def multipliers(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Multipliers and fitted moments of densities, ``(N, 2, m)``."""
    return torch.stack([torch.stack([one.alphas, one.fitted]) for one in densities])


def symmetric_kl(a: Tensor, b: Tensor) -> Tensor:
    r"""Half the sum of both divergences: :math:`\tfrac12 \sum (\alpha - \beta)(\mu^q - \mu^p)`.

    Differences are taken before they are multiplied: the multipliers may be large and alike.
    """
    difference = a[:, None] - b[None]
    # Rounding may take it below zero, and the sum of nothing is a negative zero.
    return (-0.5 * (difference[:, :, 0] * difference[:, :, 1]).sum(-1)).clamp_min(0.0) + 0.0


def shares(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Masses of densities at points of a quadrature, ``(N, POINTS)``; each row sums to one."""
    angles = _angles()
    table = chebyshev(torch.cos(angles), densities[0].alphas.shape[0])[:, 1:]
    alphas = torch.stack([one.alphas for one in densities])
    log_masses = torch.sin(angles).log() - alphas @ table.T
    return log_masses.softmax(1)


def jensen_shannon(a: Tensor, b: Tensor) -> Tensor:
    r"""Mean divergence of two densities from their mean, at most :math:`\log 2`."""
    rows = [
        0.5 * (_divergence(one, 0.5 * (one + b)) + _divergence(b, 0.5 * (one + b))) for one in a
    ]
    return torch.stack(rows)


def wasserstein(a: Tensor, b: Tensor) -> Tensor:
    r"""The area :math:`\int |F_p - F_q|` between distribution functions."""
    angles = _angles()
    steps = torch.sin(angles) * (math.pi / POINTS)
    below = [rows.cumsum(1) - 0.5 * rows for rows in (a, b)]
    return torch.stack([((one - below[1]).abs() * steps).sum(1) for one in below[0]])


def heat_traces(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Heat traces at the default times, from moments alone, ``(N, T)``."""
    return means @ heat_weights(default_times(), means.shape[1] - 1).T


def root_mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square difference of rows."""
    return (a[:, None] - b[None]).square().mean(-1).sqrt()


def _angles() -> Tensor:
    """Midpoints in the angle whose cosine is the variable: from the upper end down."""
    return (torch.arange(POINTS, dtype=torch.float64) + 0.5).flip(0) * (math.pi / POINTS)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    # Where both underflow there is nothing to tell apart.
    terms: Tensor = torch.special.xlogy(p, p / q.clamp_min(1e-300))
    return terms.sum(-1)


FEATURES: dict[str, Features] = {
    "symmetric_kl": multipliers,
    "jensen_shannon": shares,
    "wasserstein": shares,
    "heat": heat_traces,
}
DISTANCES: dict[str, Distance] = {
    "symmetric_kl": symmetric_kl,
    "jensen_shannon": jensen_shannon,
    "wasserstein": wasserstein,
    "heat": root_mean_square,
}

# ------------------------------------------------------------------------------------------
# How alike graphs are: divergences between their spectra, with errors.

Measure = Literal["symmetric_kl", "jensen_shannon", "wasserstein", "heat"]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """Distances between the spectra of graphs.

    Attributes:
        names: Of the graphs, ``N`` of them.
        measure: What was measured.
        matrix: Distances, symmetric ``(N, N)``, zero on the diagonal.
        stderr: Their Monte-Carlo errors likewise, by the jackknife over probes: the root of the
            variance and the squared bias, which spectra that are alike have more of.
        densities: The entropic spectra, all matched to within the same errors.
        num_products: Products spent on all moments.
        seed: Seed of the generator.
    """

    names: tuple[str, ...]
    measure: str
    matrix: Tensor
    stderr: Tensor
    densities: tuple[EntropicDensity, ...] = field(repr=False)
    num_products: int
    seed: int

    def __str__(self) -> str:
        width = max(len(name) for name in self.names)
        many = len(self.names)
        title = f"{self.measure.replace('_', ' ')} between {many} graphs, largest standard error"
        lines = [f"{title} {float(self.stderr.max()):.2g}"]
        for name, row in zip(self.names, self.matrix.tolist(), strict=True):
            lines.append(f"  {name:{width}}" + "".join(f"{value + 0.0:>9.3g}" for value in row))
        return "\n".join(lines)


def similarity(
    graphs: Mapping[str, Any] | Sequence[Any],
    *,
    measure: Measure = "symmetric_kl",
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Similarity:
    r"""Return how far the spectra of graphs are from each other.

    .. math:: D(p, q) = \tfrac12 \big(KL(p \| q) + KL(q \| p)\big) =
        \tfrac12 \sum_i (\alpha_i - \beta_i)(\mu_i^q - \mu_i^p)

    between entropic spectra, or another distance between them. All are densities on ``[0, 2]``
    from as many moments, matched to within the same errors, the largest that any of them has or
    needs: otherwise a spectrum known better, and so sharper, would seem different. No error is
    below :math:`1/n`, the share of one eigenvalue. A distance between noisy spectra is too large by
    what the noise of each adds to it, and so never zero for different probes of one graph: this is
    part of the error, and not subtracted, for distances are those of ``densities``.

    Cost: the moments of every graph once, and for each eleven densities for the jackknife, a few
    hundredths of a second each.

    Args:
        graphs: Two or more by their names, or in a row: whatever :func:`ritz.graphs.as_graph`
            takes, or moments of :func:`ritz.graphs.moments`.
        measure: ``symmetric_kl``; ``jensen_shannon``, at most :math:`\log 2`; ``wasserstein``,
            :math:`\int |F_p - F_q|`; or ``heat``, the root mean square difference of the heat
            traces over the logarithm of time (NetLSD), which needs no density.
        num_moments: As for :func:`ritz.graphs.moments`.
        num_probes: As for :func:`ritz.graphs.moments`.
        dtype: As for :func:`ritz.graphs.moments`.
        device: As for :func:`ritz.graphs.moments`.
        generator: Source of all probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Equation 3.12 and section 3.6 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> rings = [graphs.watts_strogatz(200, num_neighbors=4, p=p) for p in (0.0, 0.1, 0.9)]
        >>> found = graphs.similarity(rings, num_moments=20).matrix
        >>> bool(found[0, 1] < found[0, 2])
        True
    """
    check_choice("measure", measure, tuple(DISTANCES))
    named = _named(graphs)
    generator = resolve_generator(generator)
    options: dict[str, Any] = {
        "num_moments": num_moments,
        "num_probes": num_probes,
        "dtype": dtype,
        "device": device,
        "generator": generator,
    }
    found, floors = [], []
    with tracking(progress, "graphs", len(named)) as bar:
        for graph in named.values():
            is_moments = isinstance(graph, Moments)
            found.append(graph if is_moments else moments(with_edges(graph), **options))
            floors.append(0.0 if is_moments else 1 / as_graph(graph).num_nodes)
            bar.update(len(found))
    _check_alike(found)
    densities, errors = common_densities(found, floors)
    matrix, error = _compared(found, densities, errors, measure)
    return Similarity(
        names=tuple(named),
        measure=measure,
        matrix=matrix,
        stderr=error,
        densities=densities,
        num_products=sum(one.num_products for one in found),
        seed=generator.initial_seed(),
    )


def common_densities(
    found: Sequence[Moments], floors: Sequence[float]
) -> tuple[tuple[EntropicDensity, ...], Tensor]:
    """Return densities matched to within the same errors, and these errors ``(m + 1,)``.

    Args:
        found: Moments of as many degrees each.
        floors: Least standard error of the moments of each.
    """
    means = torch.stack([one.mean for one in found])
    errors = torch.stack(
        [one.stderr.clamp_min(floor) for one, floor in zip(found, floors, strict=True)]
    )
    alone = maxent(means, interval=INTERVAL, stderr=errors)
    common = torch.stack([matched_within(one) for one in alone]).amax(0)
    return maxent(means, interval=INTERVAL, stderr=common.expand_as(means)), common


def _compared(
    found: Sequence[Moments],
    densities: Sequence[EntropicDensity],
    errors: Tensor,
    measure: str,
) -> tuple[Tensor, Tensor]:
    """Distances and their errors: leaving out probes of either graph, one independently."""
    features, distance = FEATURES[measure], DISTANCES[measure]
    whole = features(torch.stack([one.mean for one in found]), densities)
    matrix = distance(whole, whole)
    matrix = 0.5 * (matrix + matrix.T).fill_diagonal_(0.0)
    variance, offset = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for i, one in enumerate(found):
        left = leave_out(one.samples)
        if len(left):
            parts = maxent(left, interval=INTERVAL, stderr=errors.expand_as(left))
            values = distance(features(left, parts), whole)
            variance[i] = jackknife(values).square()
            offset[i] = bias(values, matrix[i])
    variance = variance + variance.T + (offset + offset.T).square()
    return matrix, variance.fill_diagonal_(0.0).sqrt()


def _named(graphs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(graphs, Mapping):
        named = {str(name): graph for name, graph in graphs.items()}
    elif isinstance(graphs, Sequence) and not isinstance(graphs, str):
        named = {str(place): graph for place, graph in enumerate(graphs)}
    else:
        raise TypeError(f"graphs must be several, in a row or by name, got {type(graphs).__name__}")
    if len(named) < 2:
        raise ValueError(f"graphs must be two at least, got {len(named)}")
    return {
        name: graph if isinstance(graph, Moments) else as_graph(graph)
        for name, graph in named.items()
    }


def _check_alike(found: Sequence[Moments]) -> None:
    for one in found:
        check_moments("graphs", one)
    counts = sorted({len(one.mean) - 1 for one in found})
    if len(counts) > 1:
        raise ValueError(f"graphs must have as many moments each, got {counts[0]} and {counts[-1]}")
