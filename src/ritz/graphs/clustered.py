"""Random graphs with a known number of clusters."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.random import resolve_generator
from ritz.graphs.models import attached_edges, erdos_renyi_edges, graph_of, ring_edges
from ritz.graphs.structures import Graph

Cluster = Literal["erdos_renyi", "watts_strogatz", "barabasi_albert", "mixed"]
_KINDS = ("erdos_renyi", "watts_strogatz", "barabasi_albert")
REWIRED = 0.5  # of a Watts-Strogatz cluster: a ring, hardly rewired, is no cluster


def cluster_graph(
    sizes: Sequence[int],
    *,
    kind: Cluster = "erdos_renyi",
    degree: float,
    num_links: int,
    generator: torch.Generator | None = None,
) -> Graph:
    r"""Return disconnected random graphs to which a few edges between them are added.

    The networks of THESIS 3.7.1.1: ``[30] * 9`` to ``[30] * 240`` for Table 3.2, and mixed
    clusters with the sizes of :func:`cluster_sizes` for Fig. 3.5. The spectrum of the normalised
    Laplacian has one small eigenvalue a cluster while links are few beside the edges within.

    Args:
        sizes: Vertices of each cluster; clusters follow each other.
        kind: Model of the clusters; ``mixed`` takes the three in turn.
        degree: Mean degree within a cluster (rounded to an even number, or half of it to a
            whole one, for ``watts_strogatz`` and ``barabasi_albert``).
        num_links: Edges between clusters, each joining a random vertex of a random cluster to a
            random vertex of another.
        generator: Source of all randomness.
    """
    check_choice("kind", kind, (*_KINDS, "mixed"))
    if not sizes:
        raise ValueError("sizes must name at least one cluster")
    for size in sizes:
        check_count("sizes", size, low=4)
    # A ring needs room to be rewired.
    largest = min(sizes) / 2 if kind in ("mixed", "watts_strogatz") else min(sizes) - 1
    check_range("degree", degree, low=1, high=largest)
    check_count("num_links", num_links, low=0)
    generator = resolve_generator(generator)
    starts = torch.tensor([0, *sizes]).cumsum(0)
    pairs = []
    for i, size in enumerate(sizes):
        name = _KINDS[i % 3] if kind == "mixed" else kind
        pairs.append(_cluster(name, size, degree, generator) + starts[i])
    pairs.append(_links(starts, num_links, generator))
    source = f"{len(sizes)} clusters ({kind}, degree {degree:g}) with {num_links} links"
    return graph_of(torch.cat(pairs, dim=1), int(starts[-1]), source)


def cluster_sizes(
    num_clusters: int,
    *,
    num_nodes: int,
    low: int,
    high: int,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Return random sizes between ``low`` and ``high`` with the sum ``num_nodes``.

    Args:
        num_clusters: How many; 305 with 201,600 vertices between 500 and 1000, or 1355 with
            404,420 between 200 and 400, in THESIS Fig. 3.5.
        num_nodes: Their sum.
        low: The least.
        high: The largest.
        generator: Source of all randomness.
    """
    check_count("num_clusters", num_clusters)
    check_count("low", low)
    check_count("high", high, low=low)
    check_count("num_nodes", num_nodes, low=num_clusters * low, high=num_clusters * high)
    generator = resolve_generator(generator)
    share = (num_nodes / num_clusters - low) / max(high - low, 1)
    uniform = torch.rand(num_clusters, generator=generator, dtype=torch.float64)
    # A power of a uniform number has the wanted mean.
    sizes = low + ((high - low) * uniform ** (1 / max(share, 1e-9) - 1)).round().long()
    while missing := num_nodes - int(sizes.sum()):
        step = 1 if missing > 0 else -1
        room = ((sizes < high) if step > 0 else (sizes > low)).nonzero()[:, 0]
        order = torch.randperm(len(room), generator=generator)[: abs(missing)]
        sizes[room[order]] += step
    return [int(size) for size in sizes]


def _cluster(kind: str, size: int, degree: float, generator: torch.Generator) -> Tensor:
    if kind == "erdos_renyi":
        return erdos_renyi_edges(size, degree / (size - 1), generator)
    half = max(1, round(degree / 2))
    if kind == "watts_strogatz":
        return ring_edges(size, 2 * half, REWIRED, generator)
    return attached_edges(size, half, generator)


def _links(starts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    num_clusters = len(starts) - 1
    if num_clusters < 2:
        return torch.empty(2, 0, dtype=torch.int64)
    first = torch.randint(0, num_clusters, (count,), generator=generator)
    other = torch.randint(0, num_clusters - 1, (count,), generator=generator)
    other += (other >= first).long()
    ends = []
    for cluster in (first, other):
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        ends.append(starts[cluster] + (uniform * starts.diff()[cluster]).long())
    return torch.stack(ends)
