"""``laplacian`` and other matrices of a graph; all ``eigenvalues`` of a small graph."""

import torch
from torch import Tensor

from ritz._core.checks import check_device
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io import GraphLike, as_graph
from ritz.operators import LaplacianOperator
from ritz.operators._shared import CompressedRows, GraphMatrix

# Largest number of vertices for which all eigenvalues are computed: a dense matrix of 3.2 GB.
_LARGEST = 20_000


def laplacian(
    graph: GraphLike,
    *,
    matrix: GraphMatrix = "normalized",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> LaplacianOperator:
    """Return a matrix of a graph as an operator, by default the normalised Laplacian.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts.
        matrix: Which matrix; see :class:`ritz.operators.LaplacianOperator`.
        dtype: Data type of the products; float32 is faster.
        device: Device of the products.

    Memory: none beyond the graph, on the CPU and if its weights have this dtype.
    """
    graph, device = as_graph(graph), check_place(dtype, device)
    weights = None if graph.weights is None else graph.weights.to(device)
    rows = CompressedRows(graph.crow.to(device), graph.col.to(device), weights, dtype=dtype)
    return LaplacianOperator(rows, matrix=matrix)


def check_place(dtype: torch.dtype, device: torch.device | str) -> torch.device:
    """Return the device; raise unless it exists and products can have this dtype."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return check_device(device)


def eigenvalues(graph: GraphLike, *, matrix: GraphMatrix = "normalized") -> Tensor:
    """Return all eigenvalues of a matrix of a graph, ascending, ``(n,)``, float64.

    Args:
        graph: A graph with at most 20,000 vertices.
        matrix: Which matrix.

    Cost: that of a dense matrix, :math:`O(n^3)`. Memory: two matrices of :math:`8 n^2` bytes.
    """
    graph = as_graph(graph)
    if graph.num_nodes > _LARGEST:
        raise GraphError(
            f"graph must have at most {_LARGEST:,} vertices for eigenvalues(), got "
            f"{graph.num_nodes:,}: use density() for larger graphs"
        )
    if matrix == "normalized":
        # L = I - D^-1/2 W D^-1/2, and 0 for isolated vertices. For the karate club an operator
        # would take 50 times as long, mostly to check its symmetry.
        degrees = graph.degrees
        scale = torch.where(degrees > 0, degrees.rsqrt(), 0.0)
        weights = torch.from_numpy(graph.to_scipy().toarray())
        dense = (degrees > 0).double().diag() - scale[:, None] * weights * scale
    else:
        dense = laplacian(graph, matrix=matrix).matmat(torch.eye(graph.num_nodes).double())
    values: Tensor = torch.linalg.eigvalsh(dense)
    return values


def with_edges(graph: GraphLike) -> Graph:
    """Return ``graph`` as a :class:`Graph`, and raise if it has no edge."""
    graph = as_graph(graph)
    if not graph.num_edges:
        count = "one vertex" if graph.num_nodes == 1 else f"{graph.num_nodes:,} vertices"
        raise GraphError(
            f"graph must have at least one edge, got {count} and no edge: all its eigenvalues are "
            "0, which have no density; use eigenvalues()"
        )
    return graph
