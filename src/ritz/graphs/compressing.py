"""Sorting records of edges into compressed rows of a symmetric matrix."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse

from ritz.graphs.structures import Array

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
