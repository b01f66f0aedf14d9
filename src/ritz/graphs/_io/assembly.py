"""``assemble``: from records of edges to a graph, in memory bounded by its compressed rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_choice
from ritz.graphs._graph import NUM_REASONS, Array, Graph, GraphError, Intake

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]
Names = Tensor | tuple[str, ...] | None
MAX_NODES = 2**31 - 1  # two ends and a direction are packed into one 64-bit key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes that bound the memory of reading, which is about three times that of the graph.

    For the files of ``tests/graphs/test_memory.py`` it is 3.2 times without weights and 2.3 with.
    """

    # Records per array. Freed arrays of 32 MiB are returned to the system; small ones remain with
    # the allocator.
    slab: int = 2**22
    # Number of entries converted at a time, to keep temporary arrays small.
    block: int = 2**20
    # A source may always declare this many vertices, which take less than half a gibibyte.
    free_nodes: int = 2**24
    # Beyond that, at most this many vertices per edge: 64 x 28 bytes are 1.8 kB, about a hundred
    # times the line of the file that lists the edge.
    nodes_per_edge: int = 64
    # Bytes per vertex while a graph is assembled, for the error message.
    node_bytes: int = 28


SIZES = _Sizes()

# ------------------------------------------------------------------------------------------
# Records, and the rules by which they become edges.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How to treat self-loops, repeated edges and directions.

    Attributes:
        directed: ``drop`` the directions of a directed source, or ``refuse`` it.
        self_loops: ``drop``, ``keep`` or ``refuse``.
        multi_edges: ``merge`` into one edge with the largest weight, ``sum`` or ``refuse``.
    """

    directed: str = "drop"
    self_loops: str = "drop"
    multi_edges: str = "merge"

    def __post_init__(self) -> None:
        check_choice("directed", self.directed, ("drop", "refuse"))
        check_choice("self_loops", self.self_loops, ("drop", "keep", "refuse"))
        check_choice("multi_edges", self.multi_edges, ("merge", "sum", "refuse"))


@dataclass(slots=True, kw_only=True)
class Records:
    """Edges as they are read. An edge takes 8 bytes if ids fit into 31 bits, otherwise 16.

    Attributes:
        source: Name of the source for messages.
        kind: ``edges``: both orders of a pair are the same edge. ``arcs``: the order is a
            direction, and a pair without its reverse makes the source directed. ``list``: like
            ``edges``, but directed if some pairs occur in both orders and others in one.
        num_nodes: Vertices are ``0 .. num_nodes - 1``. ``None``: the ids that occur, renumbered.
        names: Names of the vertices in the source; only with ``num_nodes``.
        directed: Whether the source declares that it is directed.
    """

    source: str
    kind: Literal["edges", "arcs", "list"] = "edges"
    num_nodes: int | None = None
    names: Names = None
    directed: bool = False
    num_accepted: int = 0
    num_rejected: int = 0
    reasons: list[str] = field(default_factory=list)
    ends: list[Array] = field(default_factory=list)
    weights: list[Float] = field(default_factory=list)
    _num_loose: int = 0
    _size_loose: int = 0

    def add(self, u: Int, v: Int, weights: Float | None = None) -> None:
        """Add records with ends ``u``, ``v`` ``(k,)``, and weights in all calls or in none."""
        if not len(u):
            return
        pair = np.stack([u, v])
        self.ends.append(pair.astype(np.int32) if pair.max() < MAX_NODES else pair)
        if weights is not None:
            self.weights.append(weights)
        self.num_accepted += len(u)
        self._num_loose += 1
        self._size_loose += len(u)
        if self._size_loose >= SIZES.slab:
            for parts in (self.ends, self.weights):
                if parts:
                    loose = slice(len(parts) - self._num_loose, None)
                    parts[loose] = [np.concatenate(parts[loose], axis=-1)]
            self._num_loose = self._size_loose = 0

    def reject(self, reason: str) -> None:
        """Count an invalid record."""
        self.num_rejected += 1
        if len(self.reasons) < NUM_REASONS:
            self.reasons.append(reason)

    def name(self, vertex: int) -> int | str:
        """Return the name of a vertex in the source."""
        name = vertex if self.names is None else self.names[vertex]
        return int(name) if isinstance(name, Tensor) else name


def check_size(source: str, num_nodes: int, num_records: int, expected: int | None) -> None:
    """Raise if a source declares more vertices than its edges make plausible.

    Args:
        source: Name of the source for messages.
        num_nodes: Number of vertices that it declares.
        num_records: Number of edges that it declares or has.
        expected: Number of vertices that the user expects, which is then always plausible.
    """
    if num_nodes > MAX_NODES:
        raise GraphError(f"{source} has {num_nodes} vertices; the maximum is {MAX_NODES}")
    if expected is not None and expected != num_nodes:
        raise GraphError(f"{source} declares {num_nodes:,} vertices, num_nodes is {expected:,}")
    if expected is None and num_nodes > max(SIZES.free_nodes, SIZES.nodes_per_edge * num_records):
        gibibytes = SIZES.node_bytes * num_nodes / 2**30
        raise GraphError(
            f"{source} declares {num_nodes:,} vertices for {num_records:,} edges, which would take "
            f"{gibibytes:.2g} GiB; if this is intended, pass num_nodes={num_nodes} "
            f"(--nodes {num_nodes})"
        )


def check_weights(values: Array, name: str) -> None:
    """Raise unless all weights are finite and none is negative."""
    valid = np.isfinite(values) & (values >= 0)
    if not valid.all():
        bad = int(valid.argmin())
        raise GraphError(
            f"{name} must be finite and not negative, got {values[bad]} at entry {bad} of "
            f"{len(values)}"
        )


# ------------------------------------------------------------------------------------------
# Sorting: a pair {u, v} with u < v has the key u << 32 | v << 1 | (1 if it was listed as v, u).
# After one sort, repeats are neighbours, and so are both directions of an edge.


@dataclass(slots=True)
class _Packed:
    """Keys of edges. Each stage replaces the arrays, so that only one stage is in memory."""

    keys: Int
    weights: Float | None
    loops: Int
    loop_weights: Float
    num_zero: int

    def sort(self) -> None:
        """Sort the keys in place, and the weights with them; repeats keep their order."""
        if self.weights is None:
            self.keys.sort()
            return
        order = np.argsort(self.keys, kind="stable")
        self.keys, self.weights = self.keys[order], self.weights[order]

    def merge(self, *, sums: bool) -> None:
        """Replace equal sorted keys by one, with the sum or the largest of their weights."""
        first = _first_of_sorted(self.keys)
        if first.all():
            return
        if self.weights is not None:
            combine = np.add if sums else np.maximum
            self.weights = combine.reduceat(self.weights, np.flatnonzero(first))
        elif sums:
            self.weights = np.diff(np.flatnonzero(first), append=len(first)).astype(np.float64)
        self.keys = self.keys[first]

    def drop_directions(self) -> tuple[int, int, int]:
        """Drop the direction bits of sorted, distinct keys in place.

        Return the number of pairs with both directions, with one, and with both but unequal
        weights.
        """
        self.keys >>= 1
        both = self.keys[1:] == self.keys[:-1]
        unequal = 0
        if self.weights is not None:
            unequal = int(np.count_nonzero(both & (self.weights[1:] != self.weights[:-1])))
        num_both = int(np.count_nonzero(both))
        return num_both, len(self.keys) - 2 * num_both, unequal


def _first_of_sorted(values: Array) -> npt.NDArray[np.bool_]:
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return first


def _distinct(ends: list[Array]) -> Int:
    """Return the ids that occur in pairs ``(2, k)``, ascending."""
    size = sum(pair.size for pair in ends)
    largest = max((int(pair.max()) for pair in ends), default=-1)
    if largest < 4 * size:  # a table of one byte per id is no larger than the pairs
        present = np.zeros(largest + 1, bool)
        for pair in ends:
            present[pair.ravel()] = True
        return np.flatnonzero(present)

    def unique(ids: Array, kind: Literal["quicksort", "stable"] = "stable") -> Int:
        # A stable sort merges sorted parts, and is several times faster than numpy.unique.
        ordered = np.sort(ids, kind=kind)
        return ordered[_first_of_sorted(ordered)].astype(np.int64)

    ids, parts = np.empty(0, np.int64), []
    for pair in ends:
        parts.append(unique(pair.ravel(), "quicksort"))
        if sum(map(len, parts)) > len(ids):  # merging at each doubling costs about one sort
            ids, parts = unique(np.concatenate([ids, *parts])), []
    return unique(np.concatenate([ids, *parts]))


def _renumbering(ids: Int | None, num_pairs: int) -> Callable[[Array], Int]:
    """Return the function from ids to vertices, with a table if it is no larger than the pairs."""
    if ids is None or not len(ids):
        return lambda pair: pair.astype(np.int64)
    if ids[-1] >= 2 * num_pairs:
        return lambda pair: np.searchsorted(ids, pair).astype(np.int64)
    rank = np.zeros(int(ids[-1]) + 1, np.int32)
    rank[ids] = np.arange(len(ids), dtype=np.int32)
    return lambda pair: rank[pair].astype(np.int64)


def _pack(ends: list[Array], weights: list[Float], ids: Int | None) -> _Packed:
    """Return keys of pairs ``(2, k)`` without self-loops and weights of zero; empty the list."""
    keys = np.empty(sum(pair.shape[1] for pair in ends), np.int64)
    values = np.empty(len(keys)) if weights else None
    renumber = _renumbering(ids, len(keys))
    loops, loop_weights = [np.empty(0, np.int64)], [np.empty(0)]
    done = num_zero = 0
    while ends:
        u, v = renumber(ends.pop())
        edges = u != v
        loops.append(u[~edges])
        if values is not None:
            weight = weights.pop()
            loop_weights.append(weight[~edges])
            num_zero += int(np.count_nonzero(edges & (weight == 0)))
            edges &= weight != 0
            weight = weight[edges]
        u, v = u[edges], v[edges]
        part = slice(done, done + len(u))
        keys[part] = np.minimum(u, v) << 32 | np.maximum(u, v) << 1 | (u > v)
        if values is not None:
            values[part] = weight
        done += len(u)
    all_loops = np.concatenate(loops)
    if values is None:
        return _Packed(keys[:done], None, all_loops, np.ones(len(all_loops)), 0)
    return _Packed(keys[:done], values[:done], all_loops, np.concatenate(loop_weights), num_zero)


# ------------------------------------------------------------------------------------------
# The graph of all records.


def assemble(records: Records, rules: Rules, *, edgeless: bool = False) -> Graph:
    """Return the graph of all records, and release their memory.

    Args:
        records: All records.
        rules: How to treat loops, repeats and directions.
        edgeless: Accept a graph without edges.

    Cost: a sort of the records. Memory: about three times the compressed rows.
    """
    n, ids = records.num_nodes, None
    if n is None:
        ids = _distinct(records.ends)
        n = len(ids)
        if n and ids[-1] != n - 1:
            records.names = torch.from_numpy(ids)
    if n > MAX_NODES:
        raise GraphError(f"{records.source} has {n} vertices; the maximum is {MAX_NODES}")
    packed = _pack(records.ends, records.weights, ids)
    num_keys = len(packed.keys)
    num_both, directed = _combine(packed, records, rules)
    diagonal = _diagonal(packed, n, records, rules)
    intake = Intake(
        source=records.source,
        num_records=records.num_accepted + records.num_rejected,
        num_self_loops=len(packed.loops),
        loops_kept=diagonal is not None,
        num_zero_weights=packed.num_zero,
        num_merged=num_keys - len(packed.keys),
        num_reciprocal=num_both,
        directed=directed,
        num_rejected=records.num_rejected,
        reasons=tuple(records.reasons),
    )
    if not (len(packed.keys) or edgeless):
        count = f"{n:,} {'vertex' if n == 1 else 'vertices'}"
        # Name the records that were dropped, which may be the reason.
        dropped = f" ({intake})" if intake.num_records else ""
        raise GraphError(f"{records.source} has no edge between two vertices, but {count}{dropped}")
    return _graph(packed, n, diagonal, records.names, intake)


def _combine(packed: _Packed, records: Records, rules: Rules) -> tuple[int, bool]:
    """Leave one key per edge; return how many had both directions, and whether it is directed."""
    packed.sort()
    sums, refuse = rules.multi_edges == "sum", rules.multi_edges == "refuse"
    if refuse and len(repeats := np.flatnonzero(packed.keys[1:] == packed.keys[:-1])):
        key = int(packed.keys[repeats[0]])
        edge = f"{records.name(key >> 32)} - {records.name((key & (2**32 - 1)) >> 1)}"
        raise GraphError(f"{records.source} names an edge twice: {edge}")
    packed.merge(sums=sums)
    both, single, unequal = packed.drop_directions()
    asymmetric = single > 0 or unequal > 0
    directed = records.directed or (
        (records.kind == "arcs" and asymmetric)
        or (records.kind == "list" and both > 0 and asymmetric)
    )
    if directed and rules.directed == "refuse":
        reason = f"is directed: {single} edges in one direction only, {both} in both"
        reason += f", {unequal} of these with unequal weights" if unequal else ""
        reason = "says that it is directed" if records.directed else reason
        advice = 'pass directed="drop" (--directed drop) to ignore directions'
        raise GraphError(f"{records.source} {reason}; {advice}")
    if refuse and records.kind == "edges" and both:
        raise GraphError(f"{records.source} names {both} edges in both orders")
    # An arc and its reverse become one edge, whose weight is not their sum.
    packed.merge(sums=sums and records.kind != "arcs")
    return both, directed


def _diagonal(packed: _Packed, n: int, records: Records, rules: Rules) -> Float | None:
    """Return the weights of the self-loops ``(n,)``, or ``None`` if they are dropped."""
    if rules.self_loops == "refuse" and len(packed.loops):
        first = records.name(int(packed.loops[0]))
        raise GraphError(
            f"{records.source} has {len(packed.loops)} self-loops, the first at vertex {first}"
        )
    if rules.self_loops != "keep" or not len(packed.loops):
        return None
    diagonal = np.zeros(n)
    combine = np.add if rules.multi_edges == "sum" else np.maximum
    combine.at(diagonal, packed.loops, packed.loop_weights)
    return diagonal


def _graph(packed: _Packed, n: int, diagonal: Float | None, names: Names, intake: Intake) -> Graph:
    if packed.weights is None and diagonal is not None and (diagonal > 1).any():
        packed.weights = np.ones(len(packed.keys))
    unweighted = packed.weights is None
    matrix = _symmetric_matrix(packed, n, diagonal)
    weighted = not unweighted and not (matrix.data == 1).all()
    if weighted:
        with np.errstate(over="ignore"):
            total = float(matrix.data.sum())
        if not np.isfinite(total):
            raise GraphError(
                f"{intake.source} has weights so large, up to {float(matrix.data.max()):.3g}, that "
                "their sum is beyond float64; divide all of them by the largest"
            )
    return Graph(
        crow=torch.from_numpy(matrix.indptr),
        col=torch.from_numpy(matrix.indices),
        weights=torch.from_numpy(matrix.data) if weighted else None,
        names=names,
        num_loops=0 if diagonal is None else int(np.count_nonzero(diagonal)),
        intake=intake,
    )


def _symmetric_matrix(packed: _Packed, n: int, diagonal: Float | None) -> Any:
    """Return the symmetric matrix of sorted keys without direction bits; release the keys."""
    col = np.empty(len(packed.keys), np.int32)
    for start in range(0, len(col), SIZES.block):
        block = slice(start, start + SIZES.block)
        col[block] = packed.keys[block] & (2**31 - 1)
    packed.keys >>= 31
    counts = np.bincount(packed.keys, minlength=n)
    packed.keys = np.empty(0, np.int64)
    # Without weights one byte per entry suffices.
    data: Array = np.ones(len(col), np.int8) if packed.weights is None else packed.weights
    packed.weights = None
    # Indices have 32 bits if they can count the entries of both triangles.
    index = np.int32 if 2 * len(col) + n < 2**31 else np.int64
    crow = np.concatenate([[0], np.cumsum(counts)]).astype(index)
    upper: Any = scipy.sparse.csr_array((data, col, crow), shape=(n, n), copy=False)
    del col, crow
    # W = U + U' + diag(loops), with U the strict upper triangle.
    matrix = upper + upper.T.tocsr()
    if diagonal is not None:
        matrix = matrix + scipy.sparse.diags_array(diagonal, dtype=matrix.dtype).tocsr()
        matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix
