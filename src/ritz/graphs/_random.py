"""Random graphs: the standard models, given degrees, and planted clusters."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.random import resolve_generator
from ritz.graphs._graph import Graph
from ritz.graphs._io import Records, Rules, assemble

# ------------------------------------------------------------------------------------------
# Random graphs: Erdős-Rényi, Watts-Strogatz, Barabási-Albert, blocks, given degrees.

ROUNDS = 20  # of blind draws before the free places of each edge are listed


def erdos_renyi(n: int, *, p: float, generator: torch.Generator | None = None) -> Graph:
    """Return a graph on ``n`` vertices, each pair an edge with probability ``p`` by itself.

    Args:
        n: Number of vertices.
        p: Probability of an edge.
        generator: Source of all randomness.

    Cost: linear in the edges, by skipping from one to the next.
    """
    check_count("n", n)
    check_range("p", p, low=0, high=1)
    pairs = erdos_renyi_edges(n, p, resolve_generator(generator))
    return graph_of(pairs, n, f"Erdős-Rényi, n = {n}, p = {p:.4g}")


def stochastic_block_model(
    sizes: Sequence[int], *, probabilities: Tensor, generator: torch.Generator | None = None
) -> Graph:
    r"""Return a graph of blocks: a pair in blocks ``a``, ``b`` is an edge with :math:`P_{ab}`.

    Args:
        sizes: Vertices of each of the ``k`` blocks, which follow each other.
        probabilities: :math:`P`, symmetric ``(k, k)``.
        generator: Source of all randomness.

    Cost: linear in the edges and the pairs of blocks, and a step for each different probability.
    """
    _check_blocks(sizes, probabilities)
    generator = resolve_generator(generator)
    size = torch.tensor(list(sizes))
    a, b = torch.triu_indices(len(sizes), len(sizes))
    counts = torch.where(a == b, size[a] * (size[a] - 1) // 2, size[a] * size[b])
    chances = probabilities[a, b]
    found = []
    for p in chances.unique().tolist():
        # All pairs of vertices with this probability in a row, those of a pair of blocks together.
        mine = (chances == p).nonzero()[:, 0]
        ends = counts[mine].cumsum(0)
        index = _skipped(int(ends[-1]), p, generator)
        place = torch.searchsorted(ends, index, right=True)
        within = index - (ends - counts[mine])[place]
        found.append(_between(within, a[mine][place], b[mine][place], size))
    source = f"stochastic block model, {len(sizes)} blocks"
    return graph_of(torch.cat(found, dim=1), int(size.sum()), source)


def watts_strogatz(
    n: int, *, num_neighbors: int, p: float, generator: torch.Generator | None = None
) -> Graph:
    """Return a ring lattice whose edges have one end moved elsewhere with probability ``p``.

    Args:
        n: Number of vertices.
        num_neighbors: Neighbours of each in the lattice, even, less than ``n``.
        p: Probability that an edge is moved; no edge is doubled and no self-loop made, so that
            there are ``n * num_neighbors / 2`` edges. An edge stays where its vertex has all
            others for neighbours.
        generator: Source of all randomness.

    Memory: that of the edges, and where they are more than half of all pairs one byte a pair.
    """
    check_count("n", n, low=4)
    check_count("num_neighbors", num_neighbors, low=2, high=n - 1)
    check_range("p", p, low=0, high=1)
    if num_neighbors % 2:
        raise ValueError(f"num_neighbors must be even, got {num_neighbors}")
    pairs = ring_edges(n, num_neighbors, p, resolve_generator(generator))
    return graph_of(pairs, n, f"Watts-Strogatz, n = {n}, k = {num_neighbors}, p = {p:.4g}")


def barabasi_albert(n: int, *, num_edges: int, generator: torch.Generator | None = None) -> Graph:
    """Return a graph grown from a star: each new vertex joins others in proportion to degree.

    Args:
        n: Number of vertices, more than ``num_edges``.
        num_edges: Edges ``r`` of each new vertex, to different ones: ``r (n - r)`` in all.
        generator: Source of all randomness.
    """
    check_count("num_edges", num_edges)
    check_count("n", n, low=num_edges + 1)
    pairs = attached_edges(n, num_edges, resolve_generator(generator))
    return graph_of(pairs, n, f"Barabási-Albert, n = {n}, r = {num_edges}")


def configuration_model(
    degrees: Tensor | Sequence[int], *, generator: torch.Generator | None = None
) -> Graph:
    """Return a graph of given degrees: half-edges are paired at random.

    Args:
        degrees: Wanted degrees ``(n,)``, of even sum. Self-loops and repeated edges that the
            pairing makes are erased, so that a few degrees come out smaller;
            ``graph.intake`` counts them.
        generator: Source of all randomness.
    """
    wanted = torch.as_tensor(degrees, dtype=torch.int64)
    if wanted.ndim != 1 or not len(wanted) or bool((wanted < 0).any()) or int(wanted.sum()) % 2:
        raise ValueError("degrees must be a vector of whole numbers with an even sum")
    n, generator = len(wanted), resolve_generator(generator)
    stubs = torch.repeat_interleave(torch.arange(n), wanted)
    order = torch.randperm(len(stubs), generator=generator)
    return graph_of(stubs[order].reshape(2, -1), n, f"configuration model, n = {n}")


def graph_of(pairs: Tensor, n: int, source: str) -> Graph:
    """Return the graph of pairs ``(2, k)`` of ``n`` vertices; repeats are merged."""
    records = Records(source=source, num_nodes=n)
    u, v = pairs.cpu().numpy()
    records.add(u, v)
    return assemble(records, Rules(), edgeless=True)


def erdos_renyi_edges(n: int, p: float, generator: torch.Generator) -> Tensor:
    """Return the edges ``(2, k)`` of a graph whose pairs are edges with probability ``p``."""
    return _triangle(_skipped(n * (n - 1) // 2, p, generator))


def _check_blocks(sizes: Sequence[int], probabilities: Tensor) -> None:
    if not sizes:
        raise ValueError("sizes must name at least one block")
    for size in sizes:
        check_count("sizes", size)
    k = len(sizes)
    if probabilities.shape != (k, k) or not torch.equal(probabilities, probabilities.T):
        raise ValueError(
            f"probabilities must be symmetric ({k}, {k}), got {tuple(probabilities.shape)}"
        )
    if not bool(((probabilities >= 0) & (probabilities <= 1)).all()):
        raise ValueError("probabilities must lie between 0 and 1")


def _skipped(count: int, p: float, generator: torch.Generator) -> Tensor:
    """Indices below ``count``, each there with probability ``p``: sums of geometric gaps."""
    if p <= 0 or count <= 0:
        return torch.empty(0, dtype=torch.int64)
    if p >= 1:
        return torch.arange(count)
    found, last = [], -1
    while last < count:
        expected = p * (count - last)
        size = int(expected + 4 * math.sqrt(expected) + 16)
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        # 1 - u is never zero; a gap beyond the end need not be exact.
        gaps = ((1 - uniform).log_() / math.log1p(-p)).clamp_(max=float(count)).long() + 1
        places = last + gaps.cumsum(0)
        found.append(places)
        last = int(places[-1])
    places = torch.cat(found)
    return places[places < count]


def _triangle(index: Tensor) -> Tensor:
    """Pairs ``(2, k)`` with ``i > j`` in the order (1,0), (2,0), (2,1), ..."""
    row = ((1 + (1 + 8 * index.double()).sqrt()) / 2).long()
    # The root may round to the next whole number.
    row -= (row * (row - 1) // 2 > index).long()
    row += (row * (row + 1) // 2 <= index).long()
    return torch.stack([row, index - row * (row - 1) // 2])


def _between(index: Tensor, a: Tensor, b: Tensor, size: Tensor) -> Tensor:
    """Pairs ``(2, k)`` of vertices by their index within a pair of blocks ``a``, ``b``."""
    inside = _triangle(index)
    across = torch.stack([index // size[b], index % size[b]])
    starts = size.cumsum(0) - size
    return torch.where(a == b, inside, across) + torch.stack([starts[a], starts[b]])


def ring_edges(n: int, num_neighbors: int, p: float, generator: torch.Generator) -> Tensor:
    """Return the edges ``(2, n * num_neighbors / 2)`` of a rewired ring lattice."""
    if num_neighbors > n // 2:
        return _crowded_ring_edges(n, num_neighbors, p, generator)
    start = torch.arange(n).repeat(num_neighbors // 2)
    hop = torch.arange(1, num_neighbors // 2 + 1).repeat_interleave(n)
    end = (start + hop) % n
    moved = torch.rand(len(start), generator=generator, dtype=torch.float64) < p
    taken = _pair_keys(start[~moved], end[~moved], n)
    pending = moved.nonzero()[:, 0]
    while len(pending):
        # At least half of all vertices are free for each edge on average: this ends soon.
        ends = torch.randint(0, n, (len(pending),), generator=generator)
        keys = _pair_keys(start[pending], ends, n)
        free = (start[pending] != ends) & ~torch.isin(keys, taken) & first_of_equals(keys)
        end[pending[free]] = ends[free]
        taken = torch.cat([taken, keys[free]])
        pending = pending[~free]
    return torch.stack([start, end])


def _crowded_ring_edges(n: int, num_neighbors: int, p: float, generator: torch.Generator) -> Tensor:
    """The same where few places are free: an edge holds its own until it has moved."""
    start = torch.arange(n).repeat(num_neighbors // 2)
    end = (start + torch.arange(1, num_neighbors // 2 + 1).repeat_interleave(n)) % n
    taken = torch.eye(n, dtype=torch.bool)
    taken[start, end] = taken[end, start] = True
    moved = torch.rand(len(start), generator=generator, dtype=torch.float64) < p
    pending = moved.nonzero()[:, 0]
    for _ in range(ROUNDS):
        ends = torch.randint(0, n, (len(pending),), generator=generator)
        u = start[pending]
        free = ~taken[u, ends] & first_of_equals(_pair_keys(u, ends, n))
        _move(taken, start, end, pending[free], ends[free])
        pending = pending[~free]
    for edge in pending:
        places = (~taken[start[edge]]).nonzero()[:, 0]
        if len(places):
            chosen = torch.randint(0, len(places), (1,), generator=generator)
            _move(taken, start, end, edge[None], places[chosen])
    return torch.stack([start, end])


def _move(taken: Tensor, start: Tensor, end: Tensor, edges: Tensor, ends: Tensor) -> None:
    for place, value in ((end[edges], False), (ends, True)):
        taken[start[edges], place] = taken[place, start[edges]] = value
    end[edges] = ends


def _pair_keys(u: Tensor, v: Tensor, n: int) -> Tensor:
    return torch.minimum(u, v) * n + torch.maximum(u, v)


def first_of_equals(keys: Tensor) -> Tensor:
    ordered, order = keys.sort(stable=True)
    first = torch.ones(len(keys), dtype=torch.bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def attached_edges(n: int, num_edges: int, generator: torch.Generator) -> Tensor:
    r"""Return the edges ``(2, r (n - r))`` of a preferential attachment graph.

    Ends of edges stand in one list, two places an edge; an end drawn in proportion to degree is
    the content of a random earlier place. Which place is drawn first, for all at once; contents
    follow by pointer doubling (Batagelj and Brandes, 2005). Where a vertex meets another twice,
    the later place is drawn again, until none does. The first vertices, which meet each other
    twice more often than not, are joined one after another.
    """
    r = num_edges
    known = _first_attached(min(n, 8 * r + 64), r, generator)
    vertex = torch.arange(r + 1 + (len(known) - r) // r, n).repeat_interleave(r)
    source = torch.cat(
        [torch.zeros(r, dtype=torch.int64), torch.arange(r + 1, n).repeat_interleave(r)]
    )
    limit = 2 * r * (vertex - r)  # places that exist before a vertex comes
    places = _below(limit, generator)
    while True:
        target = _contents(source, known, places)
        again = _repeated_in_row(target[len(known) :].reshape(-1, r)).ravel()
        if not bool(again.any()):
            return torch.stack([source, target])
        places[again] = _below(limit[again], generator)


def _first_attached(n: int, r: int, generator: torch.Generator) -> Tensor:
    """Second ends of the edges of the first ``n`` vertices, ``r`` of them of the star."""
    uniform = _uniforms(generator)
    target = list(range(1, r + 1))
    ends = [end for leaf in target for end in (0, leaf)]
    for vertex in range(r + 1, n):
        chosen: dict[int, None] = {}  # a set that keeps its order
        while len(chosen) < r:
            chosen[ends[int(next(uniform) * len(ends))]] = None
        target += chosen
        ends += [end for other in chosen for end in (vertex, other)]
    return torch.tensor(target)


def _uniforms(generator: torch.Generator) -> Iterator[float]:
    while True:
        yield from torch.rand(1024, generator=generator, dtype=torch.float64).tolist()


def _below(limit: Tensor, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(len(limit), generator=generator, dtype=torch.float64)
    return torch.minimum((uniform * limit).long(), limit - 1)


def _contents(source: Tensor, known: Tensor, places: Tensor) -> Tensor:
    """Second ends of all edges: even places hold the source, odd ones the second end there."""
    target = torch.cat([known, torch.full_like(places, -1)])
    pointer = torch.cat([torch.zeros_like(known), places])
    waiting = torch.arange(len(known), len(source))
    while len(waiting):
        edge, odd = pointer[waiting] // 2, pointer[waiting] % 2 == 1
        content = torch.where(odd, target[edge], source[edge])
        target[waiting] = content
        still = content < 0
        # Whoever points at an unknown place points where that one points.
        waiting, edge = waiting[still], edge[still]
        pointer[waiting] = pointer[edge]
    return target


def _repeated_in_row(rows: Tensor) -> Tensor:
    """Entries that an earlier one of their row equals."""
    repeated = torch.zeros_like(rows, dtype=torch.bool)
    # Sorting many short rows is what NumPy does well; few of them need an order as well.
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

    The networks of *Spectral Machine Learning*, section 3.7.1.1: ``[30] * 9`` to ``[30] * 240`` for
    Table 3.2, and mixed clusters with the sizes of :func:`cluster_sizes` for Fig. 3.5. The
    normalised Laplacian has one small eigenvalue per cluster while links are few beside the edges
    within.

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
            404,420 between 200 and 400, in *Spectral Machine Learning* Fig. 3.5.
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
