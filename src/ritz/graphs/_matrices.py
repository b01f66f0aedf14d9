"""The matrices of a graph as operators, and all their eigenvalues for a small graph."""

import torch
from torch import Tensor

from ritz._core.checks import check_device
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io import GraphLike, as_graph
from ritz.operators import LaplacianOperator
from ritz.operators._shared import CompressedRows, GraphMatrix

_LARGEST = 20_000  # vertices: a dense matrix of 3.2 GB


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
        dtype: Data type of the products; float32 moves half as many bytes.
        device: Device of the products.

    Memory: that of the graph, shared on the CPU if its weights have that dtype.
    """
    graph = as_graph(graph)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    device = check_device(device)
    weights = None if graph.weights is None else graph.weights.to(device)
    rows = CompressedRows(graph.crow.to(device), graph.col.to(device), weights, dtype=dtype)
    return LaplacianOperator(rows, matrix=matrix)


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
            f"graph must have at most {_LARGEST:,} vertices for all its eigenvalues, "
            f"got {graph.num_nodes:,}: density() needs no matrix"
        )
    identity = torch.eye(graph.num_nodes, dtype=torch.float64)
    values: Tensor = torch.linalg.eigvalsh(laplacian(graph, matrix=matrix).matmat(identity))
    return values


def with_edges(graph: GraphLike) -> Graph:
    """Return ``graph`` as a :class:`Graph`, and raise if it has no edge."""
    graph = as_graph(graph)
    if not graph.num_edges:
        count = "one vertex" if graph.num_nodes == 1 else f"{graph.num_nodes:,} vertices"
        raise GraphError(
            f"graph must have an edge, got {count} and none: all its eigenvalues are 0, and a "
            "point has no density; eigenvalues() and moments() are exact"
        )
    return graph
