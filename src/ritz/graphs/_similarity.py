"""``similarity``: distances between the spectra of graphs, with errors."""

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
    check_moments,
    default_times,
    heat_weights,
    matched_within,
    moments,
)
from ritz.graphs._io import as_graph
from ritz.graphs._jackknife import bias, jackknife, leave_out
from ritz.graphs._matrices import with_edges
from ritz.spectra import EntropicDensity, Moments, maxent
from ritz.spectra._shared import chebyshev

Measure = Literal["symmetric_kl", "jensen_shannon", "wasserstein", "heat"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the error by the tolerance of the moments.

    Set on 60 pairs of random graphs of five kinds with 100 to 800 vertices, 20 to 100 moments and 8
    to 128 probes, beside the distances of exact moments.
    """

    # The error of a distance that has a limit, over its change when the tolerance is doubled: at
    # most 1.7 for Jensen-Shannon, apart from a pair whose error is a tenth of its sampling error.
    limit: float = 2.0
    # The same for each halving of the tolerance of the divergence.
    halving: float = 4.0


TUNING = Tuning()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """Distances between the spectra of graphs.

    Attributes:
        names: Names of the ``N`` graphs.
        measure: The distance.
        matrix: Distances, symmetric ``(N, N)``, zero on the diagonal.
        stderr: Monte-Carlo errors ``(N, N)`` from the jackknife over probes: the root of the
            variance plus the squared bias. The bias dominates for similar spectra.
        truncation: Estimate ``(N, N)`` of how much the tolerance of the moments changes the
            distances: of their difference to those of exact moments, whose tolerance is
            :math:`1/n`. Infinite if it is unknown.
        densities: The entropic spectra, whose moments are all matched to within the same errors.
        num_products: Number of matrix-vector products for all moments.
        seed: Seed of the generator.
    """

    names: tuple[str, ...]
    measure: str
    matrix: Tensor
    stderr: Tensor
    truncation: Tensor
    densities: tuple[EntropicDensity, ...] = field(repr=False)
    num_products: int
    seed: int

    def __str__(self) -> str:
        width = max(len(name) for name in self.names)
        error, fixed = float(self.stderr.max()), float(self.truncation.max())
        sampled = f"; largest standard error {error:.2g}" if error else ""
        sampled += f", truncation {fixed:.2g}" if fixed else ""
        title = _TITLES[self.measure]
        lines = [f"{title} between the spectra of {len(self.names)} graphs{sampled}"]
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
    r"""Estimate the distances between the spectra of graphs. Similar graphs have small distances.

    .. math:: D(p, q) = \tfrac12 \big(KL(p \| q) + KL(q \| p)\big) =
        \tfrac12 \sum_i (\alpha_i - \beta_i)(\mu_i^q - \mu_i^p)

    This is the default distance between entropic spectra :math:`p` and :math:`q`. All densities use
    the same number of moments and the same tolerance, because a spectrum with a smaller tolerance
    would be sharper, which would add to the distance. The tolerance is the largest that any of the
    graphs needs, and at least :math:`1/n`, the mass of one eigenvalue. The divergence :math:`D`
    grows without limit as the tolerance falls, if one spectrum has gaps where the other has
    eigenvalues. So it depends on the number of probes, and ``truncation`` says how much. Sampling
    noise makes distances too large: with different probes, a graph has a positive distance from
    itself. This bias is included in ``stderr``. It is not subtracted.

    Cost: the moments of every graph, and twelve densities per graph for the errors, a few
    hundredths of a second each.

    Args:
        graphs: Two or more graphs, in a sequence or in a dictionary by name: anything
            :func:`ritz.graphs.as_graph` accepts, or moments from :func:`ritz.graphs.moments`.
        measure: ``symmetric_kl``; ``jensen_shannon``, at most :math:`\log 2`; ``wasserstein``,
            :math:`\int |F_p - F_q|`; or ``heat``, the root mean square difference of the heat
            traces over the logarithm of time (NetLSD), which needs no density.
        num_moments: Highest degree of the moments.
        num_probes: Number of random probes per graph.
        dtype: Data type of the products.
        device: Device of the products.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Equation 3.12 and section 3.6 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> rings = [graphs.watts_strogatz(200, num_neighbors=4, p=p) for p in (0.0, 0.1, 0.9)]
        >>> distances = graphs.similarity(rings, num_moments=20).matrix
        >>> bool(distances[0, 1] < distances[0, 2])
        True
    """
    check_choice("measure", measure, tuple(_MEASURES))
    named = _by_name(graphs)
    generator = resolve_generator(generator)
    spectra: list[Moments] = []
    with tracking(progress, "graphs", len(named)) as bar:
        for graph in named.values():
            if not isinstance(graph, Moments):
                graph = moments(
                    with_edges(graph),
                    num_moments=num_moments,
                    num_probes=num_probes,
                    dtype=dtype,
                    device=device,
                    generator=generator,
                )
            spectra.append(graph)
            bar.update(len(spectra))
    # The number of vertices is not known for moments.
    floors = [0.0 if isinstance(one, Moments) else 1 / one.num_nodes for one in named.values()]
    for one in spectra:
        check_moments("graphs", one)
    counts = sorted({len(one.mean) - 1 for one in spectra})
    if len(counts) > 1:
        raise ValueError(
            f"graphs must all have the same number of moments, got {counts[0]} and {counts[-1]}"
        )
    densities, errors, least = _common_densities(spectra, floors)
    matrix, error = _distances(spectra, densities, errors, measure)
    truncation = _tolerance_error(spectra, matrix, errors, least, measure)
    return Similarity(
        names=tuple(named),
        measure=measure,
        matrix=matrix,
        stderr=error,
        truncation=truncation,
        densities=densities,
        num_products=sum(one.num_products for one in spectra),
        seed=generator.initial_seed(),
    )


def _by_name(graphs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(graphs, Sequence) and not isinstance(graphs, str):
        graphs = {str(place): graph for place, graph in enumerate(graphs)}
    if not isinstance(graphs, Mapping):
        kind = type(graphs).__name__
        raise TypeError(f"graphs must be a list or a dictionary of graphs by name, got {kind}")
    if len(graphs) < 2:
        raise ValueError(f"graphs must contain at least two graphs, got {len(graphs)}")
    return {
        str(name): graph if isinstance(graph, Moments) else as_graph(graph)
        for name, graph in graphs.items()
    }


def _common_densities(
    spectra: Sequence[Moments], floors: Sequence[float]
) -> tuple[tuple[EntropicDensity, ...], Tensor, float]:
    """Return densities matched to within the same errors, and these errors ``(m + 1,)``.

    The last value is the error within which exact moments would be matched; zero if unknown.
    """
    means = torch.stack([one.mean for one in spectra])
    errors = torch.stack(
        [one.stderr.clamp_min(floor) for one, floor in zip(spectra, floors, strict=True)]
    )
    alone = maxent(means, interval=INTERVAL, stderr=errors)
    common = torch.stack([matched_within(one) for one in alone]).amax(0)
    # No smooth density has the moments of equal eigenvalues, even if they are exact.
    least = max(max(floors), *(one.relaxation**0.5 for one in alone))
    return maxent(means, interval=INTERVAL, stderr=common.expand_as(means)), common, least


def _distances(
    spectra: Sequence[Moments],
    densities: Sequence[EntropicDensity],
    errors: Tensor,
    measure: Measure,
) -> tuple[Tensor, Tensor]:
    """Return distances and their errors, by leaving out probes of one graph at a time."""
    features, distance = _MEASURES[measure]
    whole = features(torch.stack([one.mean for one in spectra]), densities)
    matrix = distance(whole, whole)
    matrix = 0.5 * (matrix + matrix.T).fill_diagonal_(0.0)
    variance, offset = torch.zeros_like(matrix), torch.zeros_like(matrix)
    for i, one in enumerate(spectra):
        left = leave_out(one.samples)
        if len(left):
            parts = maxent(left, interval=INTERVAL, stderr=errors.expand_as(left))
            values = distance(features(left, parts), whole)
            variance[i] = jackknife(values).square()
            offset[i] = bias(values, matrix[i])
    # The probes of different graphs are independent, so their variances add, as do their biases.
    variance = variance + variance.T + (offset + offset.T).square()
    return matrix, variance.fill_diagonal_(0.0).sqrt()


def _tolerance_error(
    spectra: Sequence[Moments], matrix: Tensor, errors: Tensor, least: float, measure: Measure
) -> Tensor:
    """Return the estimated change of the distances if the tolerance falls to ``least``."""
    if all(len(one.samples) < 2 for one in spectra):  # the tolerance is not due to sampling
        return torch.zeros_like(matrix)
    features, distance = _MEASURES[measure]
    means = torch.stack([one.mean for one in spectra])
    loose = maxent(means, interval=INTERVAL, stderr=2 * errors.expand_as(means))
    whole = features(means, loose)
    change = (distance(whole, whole) - matrix).abs().fill_diagonal_(0.0)
    # Half the tolerance changes a distance that has a limit by less each time, and a divergence by
    # as much or more.
    halvings = max(0.0, math.log2(float(errors.max()) / least)) if least else math.inf
    factor = TUNING.halving * halvings if measure == "symmetric_kl" else TUNING.limit
    return torch.where(change > 0, factor * min(1.0, halvings) * change, 0.0)


# ------------------------------------------------------------------------------------------
# Distances between many spectra at once. Each measure is a function that computes features of the
# spectra from mean moments ``(N, m + 1)`` and ``N`` densities, and a distance between all pairs of
# features.

_POINTS = 4096  # nodes of the quadrature; 3,000 give errors of 0.001 in the tests


def multipliers(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Return multipliers and fitted moments of densities, ``(N, 2, m)``."""
    return torch.stack([torch.stack([one.alphas, one.fitted]) for one in densities])


def symmetric_kl(a: Tensor, b: Tensor) -> Tensor:
    r"""Return the symmetric divergence :math:`\tfrac12 \sum (\alpha - \beta)(\mu^q - \mu^p)`."""
    # log p - log q = -sum (alpha_i - beta_i) T_i + const, so KL(p|q) + KL(q|p) needs no integral.
    # Subtract before multiplying, because the multipliers may be large and nearly equal.
    difference = a[:, None] - b[None]
    # Roundoff may make it negative. Adding zero turns a negative zero into zero.
    return (-0.5 * (difference[:, :, 0] * difference[:, :, 1]).sum(-1)).clamp_min(0.0) + 0.0


def _masses(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Return masses of densities at quadrature points, ``(N, _POINTS)``; rows sum to one."""
    angles = _angles()
    table = chebyshev(torch.cos(angles), densities[0].alphas.shape[0])[:, 1:]
    alphas = torch.stack([one.alphas for one in densities])
    # p(x) dx with dx = sin(a) da; the softmax normalises without overflow.
    return (torch.sin(angles).log() - alphas @ table.T).softmax(1)


def _jensen_shannon(a: Tensor, b: Tensor) -> Tensor:
    # JS(p, q) = (KL(p | m) + KL(q | m)) / 2 with m = (p + q) / 2.
    def divergence(p: Tensor, q: Tensor) -> Tensor:
        # If both underflow, the term is zero.
        terms: Tensor = torch.special.xlogy(p, p / q.clamp_min(1e-300))
        return terms.sum(-1)

    middles = (0.5 * (one + b) for one in a)
    rows = [
        0.5 * (divergence(one, middle) + divergence(b, middle))
        for one, middle in zip(a, middles, strict=True)
    ]
    return torch.stack(rows)


def _wasserstein(a: Tensor, b: Tensor) -> Tensor:
    # In one dimension the distance is the area int |F_p - F_q| between distribution functions.
    steps = torch.sin(_angles()) * (math.pi / _POINTS)
    below_a, below_b = (rows.cumsum(1) - 0.5 * rows for rows in (a, b))
    return torch.stack([((one - below_b).abs() * steps).sum(1) for one in below_a])


def _heat_traces(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    return means @ heat_weights(default_times(), means.shape[1] - 1).T


def _root_mean_square(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, None] - b[None]).square().mean(-1).sqrt()


def _angles() -> Tensor:
    """Return evenly spaced angles, descending, so that their cosines ascend."""
    return (torch.arange(_POINTS, dtype=torch.float64) + 0.5).flip(0) * (math.pi / _POINTS)


_Features = Callable[[Tensor, Sequence[EntropicDensity]], Tensor]
_MEASURES: dict[str, tuple[_Features, Callable[[Tensor, Tensor], Tensor]]] = {
    "symmetric_kl": (multipliers, symmetric_kl),
    "jensen_shannon": (_masses, _jensen_shannon),
    "wasserstein": (_masses, _wasserstein),
    "heat": (_heat_traces, _root_mean_square),
}
_TITLES = {
    "symmetric_kl": "Symmetric Kullback-Leibler divergence",
    "jensen_shannon": "Jensen-Shannon divergence",
    "wasserstein": "Wasserstein distance",
    "heat": "Heat-trace distance",
}
