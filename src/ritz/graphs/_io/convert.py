"""Graphs from the objects of other libraries."""

import os
from typing import Any, Literal, TypeAlias, Union

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io.assembly import MAX_NODES, Float, Records, Rules, assemble, check_size
from ritz.graphs._io.files import read
from ritz.graphs._io.markup_formats import simplified
from ritz.operators._shared import NetworkXGraph

# Types in quotes are generic for type checkers alone.
GraphLike: TypeAlias = Union[
    Graph,
    NetworkXGraph,
    Tensor,
    "np.ndarray[Any, Any]",
    "scipy.sparse.sparray[Any, Any]",
    "scipy.sparse.spmatrix[Any]",
    str,
    "os.PathLike[str]",
]


def as_graph(
    x: GraphLike,
    *,
    weights: Tensor | str | None = None,
    num_nodes: int | None = None,
    directed: Literal["drop", "refuse"] = "drop",
    self_loops: Literal["drop", "keep", "refuse"] = "drop",
    multi_edges: Literal["merge", "sum", "refuse"] = "merge",
) -> Graph:
    r"""Return ``x`` as an undirected graph: every function that takes a graph calls this.

    Args:
        x: A :class:`Graph` (returned as it is); a NetworkX graph; a square weight matrix, SciPy
            sparse, torch sparse (CSR, CSC, COO), or dense; an ``edge_index`` of integers
            ``(2, E)``, torch or NumPy; or the path of a file, read by :func:`ritz.graphs.read`.
        weights: Of an ``edge_index``: ``(E,)``. Of NetworkX: the attribute that is the weight,
            ``weight`` unless told otherwise; an edge without it has weight one.
        num_nodes: Of an ``edge_index``: vertices are ``0 .. num_nodes - 1``, one more than the
            largest index unless told otherwise. A ``(2, 2)`` array of integers may be a matrix
            as well: with ``num_nodes`` it is an ``edge_index``, as floats a matrix, and refused
            as it is.
        directed: ``drop`` the directions of a matrix that is not symmetric, of a directed
            NetworkX graph, or of arcs without their reverse (:math:`\max(W_{uv}, W_{vu})`), or
            ``refuse``. :func:`to_undirected` has other ways.
        self_loops: As in :func:`ritz.graphs.read`.
        multi_edges: As in :func:`ritz.graphs.read`; repeated entries of a sparse matrix are always
            summed, as SciPy and torch do.

    Raises:
        GraphError: ``x`` has a negative weight, NaN or Inf, or no edge.
    """
    if isinstance(x, Graph):
        return x
    rules = Rules(directed=directed, self_loops=self_loops, multi_edges=multi_edges)
    if isinstance(x, str | os.PathLike):
        return _from_path(x, weights, num_nodes, rules)
    if _is_networkx(x):
        return assemble(_from_networkx(x, "weight" if weights is None else weights), rules)
    if _is_edge_index(x, told=weights is not None or num_nodes is not None):
        return assemble(_from_edge_index(x, weights, num_nodes), rules)
    if weights is not None or num_nodes is not None:
        raise ValueError("weights and num_nodes are for an edge_index (2, E) of integers")
    return assemble(_from_matrix(_sparse(x), type(x).__name__), rules)


def to_undirected(
    x: GraphLike,
    *,
    combine: Literal["max", "sum", "mean"] = "max",
    weights: Tensor | str | None = None,
    num_nodes: int | None = None,
    self_loops: Literal["drop", "keep", "refuse"] = "drop",
    multi_edges: Literal["merge", "sum"] = "merge",
) -> Graph:
    r"""Return the undirected graph of a directed one, by a chosen rule.

    Args:
        x: A directed NetworkX graph, a square matrix :math:`A` or an ``edge_index``, as for
            :func:`as_graph`; files are read by :func:`ritz.graphs.read`.
        combine: :math:`W_{uv} = \max(A_{uv}, A_{vu})`, :math:`A_{uv} + A_{vu}`, or half of that.
        weights: As for :func:`as_graph`.
        num_nodes: As for :func:`as_graph`.
        self_loops: ``drop``, ``keep`` (as :math:`A_{ii}`, whatever the rule) or ``refuse``.
        multi_edges: An arc named more than once, in the same direction: ``merge`` makes it one, of
            the largest weight; ``sum`` adds the weights. Repeated entries of a sparse matrix are
            always summed.
    """
    check_choice("combine", combine, ("max", "sum", "mean"))
    check_choice("multi_edges", multi_edges, ("merge", "sum"))
    matrix = _directed_matrix(x, weights, num_nodes, sums=multi_edges == "sum")
    _check_entries(matrix.data, "the matrix")
    loops = matrix.diagonal()
    both = matrix.maximum(matrix.T) if combine == "max" else matrix + matrix.T
    both = both / 2 if combine == "mean" else both
    both = scipy.sparse.csr_array(both - scipy.sparse.diags_array(both.diagonal() - loops))
    records = _from_matrix(both, type(x).__name__)
    return assemble(records, Rules(self_loops=self_loops))


def _directed_matrix(x: Any, weights: Any, num_nodes: int | None, *, sums: bool) -> Any:
    if isinstance(x, Graph):
        return x.to_scipy()
    if isinstance(x, str | os.PathLike):
        raise TypeError(
            "x must be a NetworkX graph, a matrix or an edge_index, got a path: read() takes files"
        )
    if _is_networkx(x):
        both = x if x.is_directed() else x.to_directed(as_view=True)  # an edge is two arcs
        records = _from_networkx(both, "weight" if weights is None else weights)
    elif _is_edge_index(x, told=weights is not None or num_nodes is not None):
        records = _from_edge_index(x, weights, num_nodes)
    else:
        return _sparse(x)
    ends = np.concatenate([np.empty((2, 0), np.int64), *records.ends], axis=1)
    data = np.concatenate(records.weights) if records.weights else np.ones(ends.shape[1])
    if not sums and len(data):
        order = np.lexsort((ends[1], ends[0]))
        ends, data = ends[:, order], data[order]
        starts = np.flatnonzero(np.append(True, (ends[:, 1:] != ends[:, :-1]).any(0)))
        ends, data = ends[:, starts], np.maximum.reduceat(data, starts)
    shape = (records.num_nodes, records.num_nodes)
    matrix: Any = scipy.sparse.coo_array((data, tuple(ends)), shape=shape)
    return matrix.tocsr()


def _from_path(
    path: str | os.PathLike[str], weights: Any, num_nodes: int | None, rules: Rules
) -> Graph:
    choices: dict[str, Any] = {name: getattr(rules, name) for name in Rules.__slots__}
    return read(path, weights=weights, num_nodes=num_nodes, **choices)


def _is_networkx(x: Any) -> bool:
    return hasattr(x, "is_multigraph") and hasattr(x, "edges") and hasattr(x, "nodes")


def _from_networkx(x: Any, weight: Any) -> Records:
    nodes = list(x.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    count = x.number_of_edges()
    ends = np.fromiter(
        (index[node] for edge in x.edges() for node in edge[:2]), np.int64, 2 * count
    )
    try:
        values = np.fromiter(
            (value for *_, value in x.edges(data=weight, default=1.0)), np.float64, count
        )
    except (TypeError, ValueError) as error:
        raise TypeError(_no_number(x, weight)) from error
    _check_entries(values, f"the attribute {weight!r}")
    directed = x.is_directed()
    records = Records(
        source=type(x).__name__,
        kind="arcs" if directed else "edges",
        num_nodes=len(nodes),
        names=None if nodes == list(range(len(nodes))) else simplified(tuple(map(str, nodes))),
    )
    # A directed graph whose arcs all have their reverse, of the same weight, loses nothing.
    ones = bool((values == 1).all())
    records.add(ends[0::2], ends[1::2], None if ones else values)
    return records


def _no_number(x: Any, weight: Any) -> str:
    for u, v, value in x.edges(data=weight, default=1.0):
        try:
            float(value)
        except (TypeError, ValueError):
            text = repr(value)[:40]
            return (
                f"the attribute {weight!r} of the edge {u!r} - {v!r} must be a number, got {text}"
            )
    return f"the attribute {weight!r} must be a number for every edge"


def _is_edge_index(x: Any, *, told: bool) -> bool:
    if isinstance(x, Tensor) and x.layout != torch.strided:
        return False
    if not isinstance(x, Tensor | np.ndarray) or x.ndim != 2 or x.shape[0] != 2:
        return False
    if x.shape[1] != 2:
        return True
    if isinstance(x, Tensor):
        matrix = x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    else:
        matrix = x.dtype.kind not in "iu"
    if matrix:
        return False
    if not told:
        raise ValueError(
            "graph is a (2, 2) array of integers, which may be an edge_index of two edges or a "
            "weight matrix of two vertices: pass num_nodes for the first, floats for the second"
        )
    return True


def _from_edge_index(x: Any, weights: Any, num_nodes: int | None) -> Records:
    ends = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    if ends.dtype.kind not in "iu":
        raise TypeError(f"edge_index must hold integers, got {ends.dtype}")
    largest = int(ends.max(initial=-1))
    n = largest + 1 if num_nodes is None else num_nodes
    check_count("num_nodes", n, low=0, high=MAX_NODES)
    check_size("edge_index", n, ends.shape[1], num_nodes)
    if largest >= n or ends.min(initial=0) < 0:
        raise GraphError(f"edge_index must lie between 0 and {n - 1}, got {ends.min()}..{largest}")
    # A list: edges that are there once, in whichever order, are an undirected graph too.
    records = Records(source="edge_index", kind="list", num_nodes=n)
    u, v = ends.astype(np.int64)
    records.add(u, v, _edge_weights(weights, ends.shape[1]))
    return records


def _edge_weights(weights: Any, count: int) -> Float | None:
    if weights is None:
        return None
    values = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights)
    if values.shape != (count,):
        raise ValueError(f"weights must be ({count},), one an edge, got {values.shape}")
    values = values.astype(np.float64)
    _check_entries(values, "weights")
    return values


def _sparse(x: Any) -> Any:
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        if x.layout == torch.strided:
            x = x.numpy()
        else:
            coo = x.to_sparse_coo().coalesce()
            x = scipy.sparse.coo_array(
                (coo.values().numpy(), tuple(coo.indices().numpy())), shape=tuple(coo.shape)
            )
    if not (isinstance(x, np.ndarray) or scipy.sparse.issparse(x)):
        raise TypeError(
            "graph must be a ritz, NetworkX or sparse graph, a weight matrix, an edge_index "
            f"(2, E), or a path, got {type(x).__name__}"
        )
    return _canonical(x)


def _canonical(x: Any) -> Any:
    if len(x.shape) != 2 or x.shape[0] != x.shape[1]:
        raise ValueError(f"the weight matrix of a graph must be square, got {tuple(x.shape)}")
    if x.dtype.kind not in "fiub":
        raise TypeError(f"the weight matrix of a graph must hold real numbers, got {x.dtype}")
    matrix: Any = scipy.sparse.csr_array(x)
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    return matrix


def _from_matrix(matrix: Any, source: str) -> Records:
    data = np.asarray(matrix.data, dtype=np.float64)
    _check_entries(data, "the weight matrix")
    n = matrix.shape[0]
    records = Records(source=source, kind="arcs", num_nodes=n)
    rows = np.repeat(np.arange(n), np.diff(matrix.indptr))
    ones = bool((data == 1).all())
    records.add(rows, matrix.indices.astype(np.int64), None if ones else data)
    return records


def _check_entries(values: Any, what: str) -> None:
    values = np.asarray(values)
    if not len(values) or (np.isfinite(values).all() and values.min() >= 0):
        return
    bad = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
    raise GraphError(
        f"{what} must be finite and not negative, got {values[bad]} at entry {bad} of {len(values)}"
    )
