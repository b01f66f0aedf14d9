"""Random graph models: the standard ones, graphs with prescribed degrees, and planted clusters."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range, short
from ritz._core.density import as_points
from ritz._core.random import resolve_generator
from ritz.graphs._graph import Graph
from ritz.graphs._io import Records, Rules, assemble

# ------------------------------------------------------------------------------------------
# Erdős-Rényi, blocks, Watts-Strogatz, Barabási-Albert, and prescribed degrees.

# Number of rounds of random draws before free places are listed. If half of the places are free,
# each round succeeds for half of the edges.
_ROUNDS = 20


def erdos_renyi(n: int, *, p: float, generator: torch.Generator | None = None) -> Graph:
    """Return an Erdős-Rényi graph: each pair is an edge with probability ``p``, independently.

    Args:
        n: Number of vertices.
        p: Probability of an edge.
        generator: Source of randomness. Defaults to a new generator with seed 0.

    Cost: linear in the number of edges.
    """
    n = check_count("n", n)
    check_range("p", p, low=0, high=1)
    pairs = erdos_renyi_edges(n, p, resolve_generator(generator))
    return graph_of(pairs, n, f"Erdős-Rényi, n = {n}, p = {p:.4g}")


def stochastic_block_model(
    sizes: Sequence[int], *, probabilities: Tensor, generator: torch.Generator | None = None
) -> Graph:
    r"""Return a graph of blocks: a pair in blocks ``a``, ``b`` is an edge with :math:`P_{ab}`.

    Args:
        sizes: Number of vertices of each of the ``k`` blocks, in order.
        probabilities: :math:`P`, symmetric ``(k, k)``.
        generator: Source of randomness. Defaults to a new generator with seed 0.

    Cost: linear in the number of edges and of pairs of blocks, and one step per distinct
    probability.
    """
    check_sizes("sizes", sizes)
    k = len(sizes)
    probabilities = as_points(probabilities, "probabilities")
    if probabilities.shape != (k, k):
        raise ValueError(
            f"probabilities must be ({k}, {k}), one row per block, got {tuple(probabilities.shape)}"
        )
    if not torch.equal(probabilities, probabilities.T):
        raise ValueError(f"probabilities must be symmetric, got {short(probabilities.tolist())}")
    if not bool(((probabilities >= 0) & (probabilities <= 1)).all()):
        raise ValueError(
            f"probabilities must be between 0 and 1, got {float(probabilities.min()):g} to "
            f"{float(probabilities.max()):g}"
        )
    generator = resolve_generator(generator)
    size = torch.tensor(list(sizes))
    starts = size.cumsum(0) - size
    a, b = torch.triu_indices(k, k)
    counts = torch.where(a == b, size[a] * (size[a] - 1) // 2, size[a] * size[b])
    chances = probabilities[a, b]
    pairs = []
    for p in chances.unique().tolist():
        # Number all pairs of vertices with this probability, one pair of blocks after another.
        # `within` is the number of a pair within its pair of blocks.
        equal = (chances == p).nonzero()[:, 0]
        ends = counts[equal].cumsum(0)
        index = _skipped(int(ends[-1]), p, generator)
        place = torch.searchsorted(ends, index, right=True)
        within = index - (ends - counts[equal])[place]
        first, second = a[equal][place], b[equal][place]
        across = torch.stack([within // size[second], within % size[second]])
        local = torch.where(first == second, _triangle(within), across)
        pairs.append(local + torch.stack([starts[first], starts[second]]))
    source = f"stochastic block model, {k} blocks"
    return graph_of(torch.cat(pairs, dim=1), int(size.sum()), source)


def watts_strogatz(
    n: int, *, num_neighbors: int, p: float, generator: torch.Generator | None = None
) -> Graph:
    """Return a Watts-Strogatz graph: a ring lattice with edges rewired with probability ``p``.

    Args:
        n: Number of vertices.
        num_neighbors: Neighbours of each vertex in the lattice, even and less than ``n``.
        p: Probability that one end of an edge is moved. Repeated edges and self-loops are avoided,
            so there are always ``n * num_neighbors / 2`` edges.
        generator: Source of randomness. Defaults to a new generator with seed 0.

    Memory: that of the edges, and one byte per pair if more than half of all pairs are edges.
    """
    n = check_count("n", n, low=4)
    num_neighbors = check_count("num_neighbors", num_neighbors, low=2, high=n - 1)
    check_range("p", p, low=0, high=1)
    if num_neighbors % 2:
        raise ValueError(f"num_neighbors must be even, got {num_neighbors}")
    pairs = ring_edges(n, num_neighbors, p, resolve_generator(generator))
    return graph_of(pairs, n, f"Watts-Strogatz, n = {n}, k = {num_neighbors}, p = {p:.4g}")


def barabasi_albert(n: int, *, num_edges: int, generator: torch.Generator | None = None) -> Graph:
    """Return a Barabási-Albert graph: new vertices attach to others in proportion to their degree.

    Args:
        n: Number of vertices, more than ``num_edges``.
        num_edges: Number ``r`` of edges that each new vertex adds (``m`` in NetworkX). The graph
            grows from a star and has ``r (n - r)`` edges.
        generator: Source of randomness. Defaults to a new generator with seed 0.
    """
    num_edges = check_count("num_edges", num_edges)
    n = check_count("n", n, low=num_edges + 1)
    pairs = attached_edges(n, num_edges, resolve_generator(generator))
    return graph_of(pairs, n, f"Barabási-Albert, n = {n}, r = {num_edges}")


def configuration_model(
    degrees: Tensor | Sequence[int], *, generator: torch.Generator | None = None
) -> Graph:
    """Return a random graph with prescribed degrees: half-edges are paired at random.

    Args:
        degrees: Degrees ``(n,)``, with an even sum. Self-loops and repeated edges of the pairing
            are erased, so a few degrees become smaller; ``graph.intake`` counts them.
        generator: Source of randomness. Defaults to a new generator with seed 0.
    """
    values = as_points(degrees, "degrees")
    whole = values.ndim == 1 and len(values) > 0 and bool((values == values.round()).all())
    if not whole or bool((values < 0).any()) or values.sum() % 2:
        raise ValueError(
            f"degrees must be whole numbers (n,) with an even sum, got {short(degrees)}"
        )
    pairs = stub_pairs(values.long(), resolve_generator(generator))
    return graph_of(pairs, len(values), f"configuration model, n = {len(values)}")


def check_sizes(name: str, sizes: Sequence[int], *, low: int = 1) -> None:
    """Raise unless ``sizes`` is a sequence of integers of at least ``low``, and not empty."""
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise TypeError(f"{name} must be integers such as [30, 30], got {short(sizes)}")
    if not len(sizes):
        raise ValueError(f"{name} must have at least one size, got none")
    for size in sizes:
        check_count(name, size, low=low)


def stub_pairs(degrees: Tensor, generator: torch.Generator) -> Tensor:
    """Return pairs ``(2, k)`` in which vertex ``i`` occurs ``degrees[i]`` times."""
    stubs = torch.repeat_interleave(torch.arange(len(degrees)), degrees)
    return stubs[torch.randperm(len(stubs), generator=generator)].reshape(2, -1)


def graph_of(pairs: Tensor, n: int, source: str) -> Graph:
    """Return the graph of pairs ``(2, k)`` of ``n`` vertices; repeats are merged."""
    records = Records(source=source, num_nodes=n)
    u, v = pairs.cpu().numpy()
    records.add(u, v)
    return assemble(records, Rules(), edgeless=True)


def erdos_renyi_edges(n: int, p: float, generator: torch.Generator) -> Tensor:
    """Return the edges ``(2, k)`` of a graph whose pairs are edges with probability ``p``."""
    return _triangle(_skipped(n * (n - 1) // 2, p, generator))


def _skipped(count: int, p: float, generator: torch.Generator) -> Tensor:
    """Return random indices below ``count``, each with probability ``p``, by geometric gaps."""
    if p <= 0 or count <= 0:
        return torch.empty(0, dtype=torch.int64)
    if p >= 1:
        return torch.arange(count)
    parts, last = [], -1
    while last < count:
        expected = p * (count - last)
        size = int(expected + 4 * math.sqrt(expected) + 16)
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        # P(gap > k) = (1 - p)^k, so a gap is 1 + floor(log(1 - u) / log(1 - p)). 1 - u is never
        # zero. Gaps beyond the end are clamped.
        gaps = ((1 - uniform).log_() / math.log1p(-p)).clamp_(max=float(count)).long() + 1
        places = last + gaps.cumsum(0)
        parts.append(places)
        last = int(places[-1])
    places = torch.cat(parts)
    return places[places < count]


def _triangle(index: Tensor) -> Tensor:
    """Return the pairs ``(2, k)`` with these numbers, in the order (1,0), (2,0), (2,1), ..."""
    # Row i begins at number i (i - 1) / 2: solve the quadratic equation for i.
    row = ((1 + (1 + 8 * index.double()).sqrt()) / 2).long()
    # Roundoff of the root may change the row by one.
    row -= (row * (row - 1) // 2 > index).long()
    row += (row * (row + 1) // 2 <= index).long()
    return torch.stack([row, index - row * (row - 1) // 2])


def ring_edges(n: int, num_neighbors: int, p: float, generator: torch.Generator) -> Tensor:
    """Return the edges ``(2, n * num_neighbors / 2)`` of a rewired ring lattice."""
    start = torch.arange(n).repeat(num_neighbors // 2)
    end = (start + torch.arange(1, num_neighbors // 2 + 1).repeat_interleave(n)) % n
    moved = torch.rand(len(start), generator=generator, dtype=torch.float64) < p
    pending = moved.nonzero()[:, 0]
    if num_neighbors > n // 2:
        _rewire_dense(start, end, pending, n, generator)
        return torch.stack([start, end])
    taken = pair_keys(start[~moved], end[~moved], n)
    while len(pending):
        # On average, at least half of all vertices are free for each edge, so this ends soon.
        ends = torch.randint(0, n, (len(pending),), generator=generator)
        keys = pair_keys(start[pending], ends, n)
        free = (start[pending] != ends) & ~torch.isin(keys, taken) & first_of_equals(keys)
        end[pending[free]] = ends[free]
        taken = torch.cat([taken, keys[free]])
        pending = pending[~free]
    return torch.stack([start, end])


def _rewire_dense(
    start: Tensor, end: Tensor, pending: Tensor, n: int, generator: torch.Generator
) -> None:
    """Rewire a dense graph, in which few places are free, in place."""
    taken = torch.eye(n, dtype=torch.bool)
    taken[start, end] = taken[end, start] = True

    def move(edges: Tensor, ends: Tensor) -> None:
        for place, value in ((end[edges], False), (ends, True)):
            taken[start[edges], place] = taken[place, start[edges]] = value
        end[edges] = ends

    for _ in range(_ROUNDS):
        ends = torch.randint(0, n, (len(pending),), generator=generator)
        u = start[pending]
        free = ~taken[u, ends] & first_of_equals(pair_keys(u, ends, n))
        move(pending[free], ends[free])
        pending = pending[~free]
    for edge in pending:
        places = (~taken[start[edge]]).nonzero()[:, 0]
        if len(places):
            chosen = torch.randint(0, len(places), (1,), generator=generator)
            move(edge[None], places[chosen])


def pair_keys(u: Tensor, v: Tensor, n: int) -> Tensor:
    """Return one integer per unordered pair."""
    return torch.minimum(u, v) * n + torch.maximum(u, v)


def first_of_equals(keys: Tensor) -> Tensor:
    """Return a mask of the keys that have no equal key before them."""
    ordered, order = keys.sort(stable=True)
    first = torch.ones(len(keys), dtype=torch.bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def attached_edges(n: int, num_edges: int, generator: torch.Generator) -> Tensor:
    r"""Return the edges ``(2, r (n - r))`` of a preferential attachment graph.

    The ends of all edges form a list, with two places per edge. The content of a random earlier
    place is a vertex drawn in proportion to its degree. All places are drawn at once, and their
    contents follow by pointer doubling (Batagelj and Brandes, 2005). If a vertex draws the same
    vertex twice, the later place is drawn again. This is likely for the first vertices, so they are
    attached one by one.
    """
    r = num_edges
    known = _first_attached(min(n, 8 * r + 64), r, generator)
    vertex = torch.arange(r + 1 + (len(known) - r) // r, n).repeat_interleave(r)
    source = torch.cat(
        [torch.zeros(r, dtype=torch.int64), torch.arange(r + 1, n).repeat_interleave(r)]
    )
    limit = 2 * r * (vertex - r)  # places that exist before a vertex is attached
    places = _below(limit, generator)
    while True:
        target = _contents(source, known, places)
        again = _repeated_in_row(target[len(known) :].reshape(-1, r)).ravel()
        if not bool(again.any()):
            return torch.stack([source, target])
        places[again] = _below(limit[again], generator)


def _first_attached(n: int, r: int, generator: torch.Generator) -> Tensor:
    """Return the second ends of the edges of the first ``n`` vertices, beginning with a star."""

    def uniforms() -> Iterator[float]:
        while True:
            yield from torch.rand(1024, generator=generator, dtype=torch.float64).tolist()

    uniform = uniforms()
    target = list(range(1, r + 1))
    ends = [end for leaf in target for end in (0, leaf)]
    for vertex in range(r + 1, n):
        chosen: dict[int, None] = {}  # a set that keeps its order
        while len(chosen) < r:
            chosen[ends[int(next(uniform) * len(ends))]] = None
        target += chosen
        ends += [end for other in chosen for end in (vertex, other)]
    return torch.tensor(target)


def _below(limit: Tensor, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(len(limit), generator=generator, dtype=torch.float64)
    return torch.minimum((uniform * limit).long(), limit - 1)


def _contents(source: Tensor, known: Tensor, places: Tensor) -> Tensor:
    """Return the second ends of all edges. Even places are sources, odd ones their ends."""
    target = torch.cat([known, torch.full_like(places, -1)])
    pointer = torch.cat([torch.zeros_like(known), places])
    waiting = torch.arange(len(known), len(source))
    while len(waiting):
        edge, odd = pointer[waiting] // 2, pointer[waiting] % 2 == 1
        content = torch.where(odd, target[edge], source[edge])
        target[waiting] = content
        still = content < 0
        # A pointer to an unknown place follows the pointer of that place.
        waiting, edge = waiting[still], edge[still]
        pointer[waiting] = pointer[edge]
    return target


def _repeated_in_row(rows: Tensor) -> Tensor:
    """Return a mask of the entries that have an equal entry before them in their row."""
    repeated = torch.zeros_like(rows, dtype=torch.bool)
    # Sort all rows with NumPy, which is fast for short rows. Then sort the few rows with repeats
    # again, to get the order.
    ordered = torch.from_numpy(np.sort(rows.numpy(), axis=1))
    hit = (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()[:, 0]
    values, order = rows[hit].sort(dim=1, stable=True)
    same = torch.zeros_like(values, dtype=torch.bool)
    same[:, 1:] = values[:, 1:] == values[:, :-1]
    repeated[hit] = same.scatter(1, order, same)
    return repeated


# ------------------------------------------------------------------------------------------
# Random graphs with a known number of clusters.

Cluster = Literal["erdos_renyi", "watts_strogatz", "barabasi_albert", "mixed"]
_KINDS = ("erdos_renyi", "watts_strogatz", "barabasi_albert")


def cluster_graph(
    sizes: Sequence[int],
    *,
    kind: Cluster = "erdos_renyi",
    degree: float,
    num_links: int,
    generator: torch.Generator | None = None,
) -> Graph:
    r"""Return a graph with planted clusters: random graphs that are joined by a few edges.

    If there are few links compared with the edges inside of clusters, the normalised Laplacian has
    one small eigenvalue per cluster. The graphs of section 3.7.1.1 of *Spectral Machine Learning*
    have ``[30] * 9`` to ``[30] * 240`` (Table 3.2), and mixed clusters of random sizes (Fig. 3.5).

    Args:
        sizes: Number of vertices of each cluster, in order.
        kind: ``erdos_renyi``, ``watts_strogatz``, ``barabasi_albert``, or ``mixed``, which uses the
            three in turn.
        degree: Mean degree within a cluster. It is rounded to an even number for
            ``watts_strogatz`` and ``barabasi_albert``.
        num_links: Number of edges between clusters, each from a random vertex of a random cluster
            to a random vertex of another.
        generator: Source of randomness. Defaults to a new generator with seed 0.
    """
    check_choice("kind", kind, (*_KINDS, "mixed"))
    check_sizes("sizes", sizes, low=4)
    # A ring needs free places for rewiring.
    largest = min(sizes) / 2 if kind in ("mixed", "watts_strogatz") else min(sizes) - 1
    check_range("degree", degree, low=1, high=largest)
    num_links = check_count("num_links", num_links, low=0)
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
        num_clusters: Number of sizes. Fig. 3.5 of *Spectral Machine Learning* has 305 with 201,600
            vertices between 500 and 1000, and 1355 with 404,420 between 200 and 400.
        num_nodes: Sum of the sizes.
        low: Smallest size.
        high: Largest size.
        generator: Source of randomness. Defaults to a new generator with seed 0.
    """
    num_clusters = check_count("num_clusters", num_clusters)
    low = check_count("low", low)
    high = check_count("high", high, low=low)
    num_nodes = check_count(
        "num_nodes", num_nodes, low=num_clusters * low, high=num_clusters * high
    )
    generator = resolve_generator(generator)
    share = (num_nodes / num_clusters - low) / max(high - low, 1)
    uniform = torch.rand(num_clusters, generator=generator, dtype=torch.float64)
    # E u^c = 1 / (c + 1): choose the power c for the required mean.
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
        # Rewire half of the edges, because a ring has small eigenvalues and is not a cluster.
        return ring_edges(size, 2 * half, 0.5, generator)
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
