"""From records of edges to a graph, in memory bounded by its compressed rows."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_choice
from ritz.graphs._graph import NUM_REASONS, Array, Graph, GraphError, Intake

# ------------------------------------------------------------------------------------------
# Sorting records of edges into compressed rows of a symmetric matrix.

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]

BLOCK = 2**20  # entries handled at a time where a whole temporary would show in the memory


@dataclass(slots=True)
class Packed:
    """Edges as 64-bit keys: the smaller end, the larger end, and a bit that says they are swapped.

    Arrays are replaced as the work goes on, so that no more than one stage is in memory.
    """

    keys: Int
    weights: Float | None
    loops: Int
    loop_weights: Float | None
    num_zero: int


def distinct(ends: list[Array]) -> Int:
    """Return the ids that occur in pairs ``(2, k)``, ascending.

    A table of a byte for each id below the largest is used while it is no larger than the pairs.
    """
    size = sum(pair.size for pair in ends)
    top = max((int(pair.max()) for pair in ends), default=-1)
    if top < 4 * size:
        present = np.zeros(top + 1, bool)
        for pair in ends:
            present[pair.ravel()] = True
        return np.flatnonzero(present)
    found, fresh, waiting = np.empty(0, np.int64), [], 0
    for pair in ends:
        fresh.append(_unique(pair.ravel()))
        waiting += len(fresh[-1])
        if waiting > len(found):  # merging at each doubling keeps the cost near one sort
            found, fresh, waiting = _merged([found, *fresh]), [], 0
    return _merged([found, *fresh])


def _merged(parts: list[Int]) -> Int:
    return _unique(np.concatenate(parts), kind="stable")  # which merges what is sorted in parts


def _unique(ids: Array, kind: Literal["quicksort", "stable"] = "quicksort") -> Int:
    # By sorting: numpy.unique hashes, which costs several times more here.
    ordered = np.sort(ids, kind=kind)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first].astype(np.int64)


def pack(ends: list[Array], weights: list[Float], ids: Int | None) -> Packed:
    """Return the keys of pairs ``(2, k)``, which are used up, self-loops and zeros set aside.

    Args:
        ends: The pairs.
        weights: Their weights, or nothing.
        ids: Vertex ``i`` is ``ids[i]``; ``None``: it is ``i``.
    """
    keys = np.empty(sum(pair.shape[1] for pair in ends), np.int64)
    values = np.empty(len(keys)) if weights else None
    rank = _ranks(ids, len(keys))
    loops, loop_weights = [], []
    done = num_zero = 0
    while ends:
        u, v = _renamed(ends.pop(), ids, rank)
        weight = weights.pop() if values is not None else None
        straight = u != v
        if weight is not None:
            num_zero += int(np.count_nonzero(straight & (weight == 0)))
            loop_weights.append(weight[~straight])
            straight &= weight != 0
            weight = weight[straight]
        loops.append(u[u == v])
        u, v = u[straight], v[straight]
        stop = done + len(u)
        keys[done:stop] = np.minimum(u, v) << 32 | np.maximum(u, v) << 1 | (u > v)
        if values is not None:
            values[done:stop] = weight
        done = stop
    return Packed(
        keys=keys[:done],
        weights=None if values is None else values[:done],
        loops=np.concatenate([np.empty(0, np.int64), *loops]),
        loop_weights=None if values is None else np.concatenate([np.empty(0), *loop_weights]),
        num_zero=num_zero,
    )


def _ranks(ids: Int | None, num_pairs: int) -> npt.NDArray[np.int32] | None:
    if ids is None or not len(ids) or ids[-1] >= 2 * num_pairs:
        return None
    rank = np.zeros(int(ids[-1]) + 1, np.int32)
    rank[ids] = np.arange(len(ids), dtype=np.int32)
    return rank


def _renamed(pair: Array, ids: Int | None, rank: npt.NDArray[np.int32] | None) -> Int:
    if ids is None:
        return pair.astype(np.int64)
    if rank is not None:
        return rank[pair].astype(np.int64)
    return np.searchsorted(ids, pair).astype(np.int64)


def sort(packed: Packed) -> None:
    """Sort the keys in place, the weights with them; records of one edge keep their order."""
    if packed.weights is None:
        packed.keys.sort()
        return
    order = np.argsort(packed.keys, kind="stable")
    packed.keys = packed.keys[order]
    packed.weights = packed.weights[order]


def repeats(packed: Packed) -> int:
    """Return how many sorted keys equal the one before."""
    return int(np.count_nonzero(packed.keys[1:] == packed.keys[:-1]))


def reduce(packed: Packed, *, sums: bool) -> None:
    """Make one of equal sorted keys, their weights summed, or the largest of them."""
    if not repeats(packed):
        return
    first = np.ones(len(packed.keys), bool)
    np.not_equal(packed.keys[1:], packed.keys[:-1], out=first[1:])
    if packed.weights is not None or sums:
        starts = np.flatnonzero(first)
        if packed.weights is None:
            packed.weights = np.diff(starts, append=len(first)).astype(np.float64)
        else:
            combine = np.add if sums else np.maximum
            packed.weights = combine.reduceat(packed.weights, starts)
    packed.keys = packed.keys[first]


def one_way(packed: Packed) -> tuple[int, int, int]:
    """Return how many pairs have both directions, one only, and both with unequal weights.

    Keys are sorted and each there once; their direction bits are dropped in place.
    """
    packed.keys >>= 1
    both = packed.keys[1:] == packed.keys[:-1]
    num_both = int(np.count_nonzero(both))
    unequal = 0
    if packed.weights is not None:
        unequal = int(np.count_nonzero(both & (packed.weights[1:] != packed.weights[:-1])))
    return num_both, len(packed.keys) - 2 * num_both, unequal


def symmetric_rows(packed: Packed, n: int, diagonal: Float | None) -> tuple[Array, Array, Array]:
    """Return row pointers, columns and weights of the symmetric matrix; the keys are used up.

    Args:
        packed: One sorted key an edge, without direction bits.
        n: Number of vertices.
        diagonal: Weights ``(n,)`` of self-loops.
    """
    col = np.empty(len(packed.keys), np.int32)
    for start in range(0, len(col), BLOCK):
        block = slice(start, start + BLOCK)
        col[block] = packed.keys[block] & (2**31 - 1)
    packed.keys >>= 31
    counts = np.bincount(packed.keys, minlength=n)
    packed.keys = np.empty(0, np.int64)
    # Entries of one byte where there are no weights: only the places matter then.
    data: Array = np.ones(len(col), np.int8) if packed.weights is None else packed.weights
    packed.weights = None
    # 32 bits while all entries of both triangles can be counted with them.
    index = np.int32 if 2 * len(col) + n < 2**31 else np.int64
    crow = np.concatenate([[0], np.cumsum(counts)]).astype(index)
    upper: Any = scipy.sparse.csr_array((data, col, crow), shape=(n, n), copy=False)
    del col, crow
    matrix = upper + upper.T.tocsr()
    if diagonal is not None:
        matrix = matrix + scipy.sparse.diags_array(diagonal, dtype=matrix.dtype).tocsr()
        matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix.indptr, matrix.indices, matrix.data


# ------------------------------------------------------------------------------------------
# From records of edges to a graph, in memory bounded by its compressed rows.

MAX_NODES = 2**31 - 1  # two ends and a direction are packed into one 64-bit key
SLAB = 2**22  # records kept in one array: 32 MiB
ROOMY = 2**24  # vertices that a source may declare however few its edges: under half a gibibyte
CROWD = 64  # vertices for each edge beyond that
VERTEX = 28  # bytes a vertex takes while a graph is assembled, at the least
Kind = Literal["edges", "arcs", "list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What self-loops, repeated edges and directions mean.

    Attributes:
        directed: ``drop`` or ``refuse`` a directed source.
        self_loops: ``drop``, ``keep`` or ``refuse``.
        multi_edges: ``merge`` (one edge, of the largest weight), ``sum`` or ``refuse``.
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
    """Records of edges as they are read, 8 bytes each while ids fit in 31 bits (16 if not).

    Attributes:
        source: Where they come from, for messages.
        kind: ``edges``: both orders of a pair name one edge; ``arcs``: an order is a direction,
            and a pair without its reverse is directed; ``list``: edges, unless some pairs come in
            both orders and others in one, as only a directed graph has it.
        num_nodes: Vertices are ``0 .. num_nodes - 1``; ``None``: those that occur, renamed.
        names: What the source calls the vertices; only with ``num_nodes``.
        directed: The source says that it is directed.
    """

    source: str
    kind: Kind = "edges"
    num_nodes: int | None = None
    names: Tensor | tuple[str, ...] | None = None
    directed: bool = False
    num_accepted: int = 0
    num_rejected: int = 0
    reasons: list[str] = field(default_factory=list)
    ends: list[Array] = field(default_factory=list)
    weights: list[Float] = field(default_factory=list)
    _loose: int = 0
    _waiting: int = 0

    def add(self, u: Int, v: Int, weights: Float | None = None) -> None:
        """Take records with ends ``u``, ``v`` ``(k,)``, and weights in all calls or in none."""
        if not len(u):
            return
        pair = np.stack([u, v])
        self.ends.append(pair.astype(np.int32) if pair.max() < MAX_NODES else pair)
        if weights is not None:
            self.weights.append(weights)
        self.num_accepted += len(u)
        self._loose += 1
        self._waiting += len(u)
        if self._waiting >= SLAB:
            self._settle()

    def _settle(self) -> None:
        # Small arrays stay with the allocator when freed; large ones go back to the system.
        for parts in (self.ends, self.weights):
            if parts:
                parts[-self._loose :] = [np.concatenate(parts[-self._loose :], axis=-1)]
        self._loose = self._waiting = 0

    def reject(self, reason: str) -> None:
        """Count a record that cannot be read."""
        self.num_rejected += 1
        if len(self.reasons) < NUM_REASONS:
            self.reasons.append(reason)


def assemble(records: Records, rules: Rules, *, edgeless: bool = False) -> Graph:
    """Return the graph of all records, which are used up.

    Args:
        records: What was read.
        rules: What to make of loops, repeats and directions.
        edgeless: Whether a graph without an edge is one.

    Cost: a sort of the records. Memory: two to three times the compressed rows at the most.
    """
    n, ids = _vertices(records)
    packed = pack(records.ends, records.weights, ids)
    num_keys = len(packed.keys)
    num_both, directed = _combine(packed, records, rules)
    num_edges = len(packed.keys)
    diagonal = _diagonal(packed, n, records, rules)
    intake = Intake(
        source=records.source,
        num_records=records.num_accepted + records.num_rejected,
        num_self_loops=len(packed.loops),
        loops_kept=diagonal is not None,
        num_zero_weights=packed.num_zero,
        num_merged=num_keys - num_edges,
        num_reciprocal=num_both,
        directed=directed,
        num_rejected=records.num_rejected,
        reasons=tuple(records.reasons),
    )
    if not (num_edges or edgeless):
        raise GraphError(_edgeless_message(n, intake))
    return _graph(packed, n, diagonal, records.names, intake)


def _edgeless_message(n: int, intake: Intake) -> str:
    count = f"{n:,} {'vertex' if n == 1 else 'vertices'}"
    # What was read and left out may say why.
    told = f" ({intake})" if intake.num_records else ""
    return f"{intake.source} holds no edge between two vertices, it has {count}{told}"


def _vertices(records: Records) -> tuple[int, Int | None]:
    if records.num_nodes is not None:
        return _countable(records, records.num_nodes), None
    ids = distinct(records.ends)
    n = _countable(records, len(ids))
    if not n or ids[-1] == n - 1:
        return n, None
    records.names = torch.from_numpy(ids)
    return n, ids


def check_size(source: str, num_nodes: int, num_records: int, told: int | None) -> None:
    """Raise if a source declares vertices that would fill the memory for next to no edges.

    Args:
        source: For messages.
        num_nodes: As declared.
        num_records: Edges, as declared or found.
        told: What the user says is the number of vertices, which then is meant.
    """
    if told is not None and told != num_nodes:
        raise GraphError(f"{source} declares {num_nodes:,} vertices, num_nodes is {told:,}")
    if told is None and num_nodes > max(ROOMY, CROWD * num_records):
        size = VERTEX * num_nodes / 2**30
        raise GraphError(
            f"{source} declares {num_nodes:,} vertices for {num_records:,} edges, which would take "
            f"{size:.2g} GiB; if they are meant, pass num_nodes={num_nodes} (--nodes {num_nodes})"
        )


def _countable(records: Records, n: int) -> int:
    if n > MAX_NODES:
        raise GraphError(f"{records.source} has {n} vertices, {MAX_NODES} are possible")
    return n


def _combine(packed: Packed, records: Records, rules: Rules) -> tuple[int, bool]:
    """Make one key an edge; return the pairs that had both directions, and whether directed."""
    sort(packed)
    sums, refuse = rules.multi_edges == "sum", rules.multi_edges == "refuse"
    if refuse and repeats(packed):
        raise GraphError(f"{records.source} names an edge twice: {_repeated(packed, records)}")
    reduce(packed, sums=sums)
    both, single, unequal = one_way(packed)
    asymmetric = single > 0 or unequal > 0
    directed = records.directed or (
        (records.kind == "arcs" and asymmetric)
        or (records.kind == "list" and both > 0 and asymmetric)
    )
    if directed and rules.directed == "refuse":
        raise GraphError(_directed_message(records, both, single, unequal))
    if refuse and records.kind == "edges" and both:
        raise GraphError(f"{records.source} names {both} edges in both orders")
    # An arc and its reverse are one edge, not two that would add.
    reduce(packed, sums=sums and records.kind != "arcs")
    return both, directed


def _directed_message(records: Records, both: int, single: int, unequal: int) -> str:
    if records.directed:
        found = "says that it is directed"
    else:
        found = f"is directed: {single} edges in one direction only, {both} in both"
        found += f", {unequal} of these with unequal weights" if unequal else ""
    return f'{records.source} {found}; pass directed="drop" (--directed drop) to ignore directions'


def _repeated(packed: Packed, records: Records) -> str:
    same = int(np.flatnonzero(packed.keys[1:] == packed.keys[:-1])[0])
    key = int(packed.keys[same])
    return f"{_name(records, key >> 32)} - {_name(records, (key & (2**32 - 1)) >> 1)}"


def _name(records: Records, vertex: int) -> int | str:
    if isinstance(records.names, Tensor):
        return int(records.names[vertex])
    return vertex if records.names is None else records.names[vertex]


def _diagonal(packed: Packed, n: int, records: Records, rules: Rules) -> Float | None:
    """Weights of the self-loops ``(n,)``, or ``None`` where they are dropped."""
    if rules.self_loops == "refuse" and len(packed.loops):
        name = _name(records, int(packed.loops[0]))
        raise GraphError(
            f"{records.source} has {len(packed.loops)} self-loops, the first at vertex {name}"
        )
    if rules.self_loops != "keep" or not len(packed.loops):
        return None
    weights = np.ones(len(packed.loops)) if packed.loop_weights is None else packed.loop_weights
    diagonal = np.zeros(n)
    combine = np.add if rules.multi_edges == "sum" else np.maximum
    combine.at(diagonal, packed.loops, weights)
    return diagonal


def _check_total(data: Array, source: str) -> None:
    with np.errstate(over="ignore"):
        total = float(data.sum())
    if not np.isfinite(total):
        raise GraphError(
            f"{source} has weights so large, up to {float(data.max()):.3g}, that their sum is "
            "beyond float64; divide all of them by the largest"
        )


def _graph(
    packed: Packed,
    n: int,
    diagonal: Float | None,
    names: Tensor | tuple[str, ...] | None,
    intake: Intake,
) -> Graph:
    ones = packed.weights is None and (diagonal is None or bool((diagonal <= 1).all()))
    if not ones and packed.weights is None:
        packed.weights = np.ones(len(packed.keys))
    crow, col, data = symmetric_rows(packed, n, diagonal)
    weighted = not ones and not bool((data == 1).all())
    if weighted:
        _check_total(data, intake.source)
    return Graph(
        crow=torch.from_numpy(crow),
        col=torch.from_numpy(col),
        weights=torch.from_numpy(data) if weighted else None,
        names=names,
        num_loops=0 if diagonal is None else int(np.count_nonzero(diagonal)),
        intake=intake,
    )
