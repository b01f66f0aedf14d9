"""``as_graph`` and ``to_undirected``: graphs from the objects of other libraries."""

import os
from dataclasses import asdict
from typing import Any, Literal, Protocol, Union

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from typing_extensions import TypeAliasType

from ritz._core.checks import check_choice, check_count
from ritz.graphs._graph import Array, Graph, GraphError
from ritz.graphs._io.assembly import (
    MAX_NODES,
    Records,
    Rules,
    assemble,
    check_size,
    check_weights,
)
from ritz.graphs._io.files import from_networkx, integer_names, read
from ritz.operators._shared import NetworkXGraph, is_networkx


class IGraph(Protocol):
    """The interface of an igraph graph; igraph need not be installed."""

    @property
    def es(self) -> Any: ...
    @property
    def vs(self) -> Any: ...
    def vcount(self) -> int: ...
    def get_edgelist(self) -> list[tuple[int, int]]: ...
    def is_directed(self) -> bool: ...


# An alias that signatures show by its name. Types in quotes are generic for type checkers alone.
GraphLike = TypeAliasType(
    "GraphLike",
    Union[
        Graph,
        NetworkXGraph,
        IGraph,
        Tensor,
        "np.ndarray[Any, Any]",
        "scipy.sparse.sparray[Any, Any]",
        "scipy.sparse.spmatrix[Any]",
        str,
        "os.PathLike[str]",
    ],
)


def as_graph(
    x: GraphLike,
    *,
    weights: Tensor | str | bool | None = None,
    num_nodes: int | None = None,
    directed: Literal["drop", "refuse"] = "drop",
    self_loops: Literal["drop", "keep", "refuse"] = "drop",
    multi_edges: Literal["merge", "sum", "refuse"] = "merge",
) -> Graph:
    r"""Return ``x`` as an undirected graph. Every function that takes a graph calls this.

    Args:
        x: A :class:`Graph` (returned unchanged); a NetworkX or igraph graph; a square weight
            matrix, SciPy sparse, torch sparse (CSR, CSC, COO) or dense; an ``edge_index`` of
            integers ``(2, E)``, torch or NumPy; or the path of a file, see
            :func:`ritz.graphs.read`.
        weights: For an ``edge_index``: weights ``(E,)``. For NetworkX and igraph: the attribute
            that is the weight, by default ``weight``, or ``False`` to ignore it. An edge without
            it has weight one. A matrix has no attributes: a name is ignored.
        num_nodes: For an ``edge_index``: vertices are ``0 .. num_nodes - 1``. Defaults to one more
            than the largest index. A ``(2, 2)`` array of integers is ambiguous and refused: pass
            ``num_nodes`` for an ``edge_index``, or floats for a matrix. For a matrix: its rows.
        directed: For a directed graph :math:`A`: ``drop`` the directions, :math:`W_{uv} =
            \max(A_{uv}, A_{vu})`, or ``refuse``. :func:`to_undirected` has other rules.
        self_loops: As in :func:`ritz.graphs.read`.
        multi_edges: As in :func:`ritz.graphs.read`. Repeated entries of a sparse matrix are always
            summed, as in SciPy and torch.

    Raises:
        GraphError: ``x`` has a negative weight, NaN or infinity, or no edge.
    """
    if isinstance(x, Graph):
        return x
    rules = Rules(directed=directed, self_loops=self_loops, multi_edges=multi_edges)
    if isinstance(x, str | os.PathLike):
        column = weights if isinstance(weights, str | bool) else None
        return read(x, weights=column, num_nodes=num_nodes, **asdict(rules))
    edges = _records_or_matrix(x, weights, num_nodes)
    return assemble(edges if isinstance(edges, Records) else _matrix_records(edges, x), rules)


def to_undirected(
    x: GraphLike,
    *,
    combine: Literal["max", "sum", "mean"] = "max",
    weights: Tensor | str | bool | None = None,
    num_nodes: int | None = None,
    self_loops: Literal["drop", "keep", "refuse"] = "drop",
    multi_edges: Literal["merge", "sum"] = "merge",
) -> Graph:
    r"""Return an undirected graph from a directed one, by a rule for the weights.

    Args:
        x: A directed NetworkX or igraph graph, a square matrix :math:`A` or an ``edge_index``, as
            for :func:`as_graph`. Use :func:`ritz.graphs.read` for files.
        combine: :math:`W_{uv} = \max(A_{uv}, A_{vu})`, their sum or their mean.
        weights: As for :func:`as_graph`.
        num_nodes: As for :func:`as_graph`.
        self_loops: ``drop``, ``keep`` (as :math:`A_{ii}`, whatever the rule) or ``refuse``.
        multi_edges: For an arc that occurs more than once in the same direction: ``merge`` into
            one with the largest weight, or ``sum`` the weights. Repeated entries of a sparse
            matrix are always summed.
    """
    check_choice("combine", combine, ("max", "sum", "mean"))
    check_choice("multi_edges", multi_edges, ("merge", "sum"))
    if isinstance(x, str | os.PathLike):
        raise TypeError(
            "x must be a NetworkX graph, a matrix or an edge_index, got a path: read() takes files"
        )
    matrix = x.to_scipy() if isinstance(x, Graph) else _records_or_matrix(x, weights, num_nodes)
    if isinstance(matrix, Records):
        matrix = _arc_matrix(matrix, sums=multi_edges == "sum")
    matrix = matrix.astype(np.float64)
    check_weights(matrix.data, "the matrix")
    both = matrix.maximum(matrix.T) if combine == "max" else matrix + matrix.T
    both = both / 2 if combine == "mean" else both
    # The rule applies to pairs of different vertices: A_ii does not change.
    both = both - scipy.sparse.diags_array(both.diagonal() - matrix.diagonal())
    return assemble(_matrix_records(scipy.sparse.csr_array(both), x), Rules(self_loops=self_loops))


def _arc_matrix(records: Records, *, sums: bool) -> Any:
    """Return the matrix of arcs, with the sum or the largest of the weights of repeated arcs."""
    ends = np.concatenate([np.empty((2, 0), np.int64), *records.ends], axis=1)
    data = np.concatenate(records.weights) if records.weights else np.ones(ends.shape[1])
    if records.kind == "edges":  # an edge is two arcs, a self-loop one
        arcs = ends[0] != ends[1]
        ends = np.concatenate([ends, ends[::-1, arcs]], axis=1)
        data = np.concatenate([data, data[arcs]])
    if not sums and len(data):
        # Sorted by row and column, repeats are neighbours; reduceat takes their maximum.
        order = np.lexsort((ends[1], ends[0]))
        ends, data = ends[:, order], data[order]
        starts = np.flatnonzero(np.append(True, (ends[:, 1:] != ends[:, :-1]).any(0)))
        ends, data = ends[:, starts], np.maximum.reduceat(data, starts)
    shape = (records.num_nodes, records.num_nodes)
    matrix: Any = scipy.sparse.coo_array((data, tuple(ends)), shape=shape)
    return matrix.tocsr()


def _records_or_matrix(x: Any, weights: Any, num_nodes: int | None) -> Any:
    """Return records of a graph or an ``edge_index``, or a matrix in compressed rows."""
    if is_networkx(x) or _is_igraph(x):
        if isinstance(weights, Tensor | np.ndarray | list):
            kind = type(weights).__name__
            raise TypeError(f"weights must be the name of an attribute of the graph, got {kind}")
        attribute = "weight" if weights is None or weights is True else weights
        convert = from_networkx if is_networkx(x) else _from_igraph
        return convert(x, attribute, source=type(x).__name__)
    unambiguous = weights is not None or num_nodes is not None
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        if x.layout == torch.strided:
            x = x.numpy()
        else:
            coo = x.to_sparse_coo().coalesce()
            entries = coo.values().numpy(), tuple(coo.indices().numpy())
            x = scipy.sparse.coo_array(entries, shape=tuple(coo.shape))
    if isinstance(x, np.ndarray) and _is_edge_index(x, unambiguous=unambiguous):
        return _edge_index_records(x, weights, num_nodes)
    supported = isinstance(x, np.ndarray) or scipy.sparse.issparse(x)
    if not supported:
        raise TypeError(
            "graph must be a ritz, NetworkX, igraph or sparse graph, a weight matrix, an "
            f"edge_index (2, E), or a path, got {type(x).__name__}"
            + " (a list of edges as numpy.array(edges).T, or networkx.Graph(edges) if vertices "
            "have names)" * isinstance(x, list | tuple)
        )
    if len(x.shape) != 2 or x.shape[0] != x.shape[1]:
        pairs = len(x.shape) == 2 and x.shape[1] == 2 and x.dtype.kind in "iu"
        advice = ": an edge_index is (2, E), the transpose" if pairs else ""
        got = f"{tuple(x.shape)}{advice}"
        raise ValueError(f"the weight matrix of a graph must be square, got {got}")
    if not isinstance(weights, str | None):
        raise ValueError("weights (E,) are for an edge_index (2, E): a matrix holds its weights")
    if num_nodes not in (None, x.shape[0]):
        raise ValueError(f"num_nodes must be {x.shape[0]}, the rows of the matrix, got {num_nodes}")
    if x.dtype.kind not in "fiub":
        raise TypeError(f"the weight matrix of a graph must contain real numbers, got {x.dtype}")
    matrix: Any = scipy.sparse.csr_array(x)
    # Copy before changing it: the array may share memory with x.
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    return matrix


def _is_igraph(x: Any) -> bool:
    return hasattr(x, "get_edgelist") and hasattr(x, "vcount")


def _from_igraph(x: Any, attribute: Any, *, source: str) -> Records:
    ends = np.array(x.get_edgelist(), np.int64).reshape(-1, 2)
    values = np.ones(len(ends))
    if attribute in x.es.attributes():
        # igraph stores None for an edge that lacks an attribute.
        values = np.array([1.0 if one is None else one for one in x.es[attribute]], np.float64)
    check_weights(values, f"the attribute {attribute!r}")
    names = integer_names(tuple(map(str, x.vs["name"]))) if "name" in x.vs.attributes() else None
    kind: Literal["arcs", "edges"] = "arcs" if x.is_directed() else "edges"
    records = Records(source=source, kind=kind, num_nodes=x.vcount(), names=names)
    records.add(ends[:, 0], ends[:, 1], None if (values == 1).all() else values)
    return records


def _is_edge_index(x: Array, *, unambiguous: bool) -> bool:
    # An array with two rows is an edge_index. With two columns it may be a square matrix instead.
    if x.ndim != 2 or x.shape != (2, 2):
        return x.ndim == 2 and x.shape[0] == 2
    if x.dtype.kind in "iu" and not unambiguous:
        raise ValueError(
            "graph is a (2, 2) array of integers, which may be an edge_index of two edges or a "
            "weight matrix of two vertices: pass num_nodes for the first, floats for the second"
        )
    return x.dtype.kind in "iu"


def _edge_index_records(ends: Array, weights: Any, num_nodes: int | None) -> Records:
    if ends.dtype.kind not in "iu":
        raise TypeError(f"edge_index must contain integers, got {ends.dtype}")
    largest = int(ends.max(initial=-1))
    n = largest + 1 if num_nodes is None else num_nodes
    check_count("num_nodes", n, low=0, high=MAX_NODES)
    check_size("edge_index", n, ends.shape[1], num_nodes)
    if largest >= n or ends.min(initial=0) < 0:
        raise GraphError(f"edge_index must lie between 0 and {n - 1}, got {ends.min()}..{largest}")
    if weights is not None:
        weights = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights)
        if weights.shape != ends.shape[1:]:
            raise ValueError(
                f"weights must be ({ends.shape[1]},), one per edge, got {weights.shape}"
            )
        check_weights(weights := weights.astype(np.float64), "weights")
    # As a list: if every edge occurs once, in either order, the graph is undirected too.
    records = Records(source="edge_index", kind="list", num_nodes=n)
    u, v = ends.astype(np.int64)
    records.add(u, v, weights)
    return records


def _matrix_records(matrix: Any, x: Any) -> Records:
    data = np.asarray(matrix.data, dtype=np.float64)
    check_weights(data, "the weight matrix")
    n = matrix.shape[0]
    records = Records(source=type(x).__name__, kind="arcs", num_nodes=n)
    # Row i has indptr[i + 1] - indptr[i] entries.
    rows = np.repeat(np.arange(n), np.diff(matrix.indptr))
    records.add(rows, matrix.indices.astype(np.int64), None if (data == 1).all() else data)
    return records
