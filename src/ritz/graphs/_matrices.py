"""The matrices of a graph as operators, and all their eigenvalues where it is small."""

import torch
from torch import Tensor

from ritz._core.checks import check_device, check_real_floating
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io import GraphLike, as_graph
from ritz.operators import LaplacianOperator
from ritz.operators._shared import CompressedRows, GraphMatrix

LARGEST = 20_000  # vertices of a dense matrix of 3.2 GB


def laplacian(
    graph: GraphLike,
    *,
    matrix: GraphMatrix = "normalized",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> LaplacianOperator:
    """Return a matrix of a graph as an operator, the normalised Laplacian by default.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes.
        matrix: Which matrix; see :class:`ritz.operators.LaplacianOperator`.
        dtype: Of the products: float32 moves half as many bytes.
        device: Where products are made.

    Memory: that of the graph, shared on the CPU where its weights are of that dtype.
    """
    graph = as_graph(graph)
    check_place(dtype, device)
    weights = None if graph.weights is None else graph.weights.to(device)
    rows = CompressedRows(graph.crow.to(device), graph.col.to(device), weights, dtype=dtype)
    return LaplacianOperator(rows, matrix=matrix)


def check_place(dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise unless products can be made in ``dtype`` on ``device``."""
    check_real_floating("dtype", dtype)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    check_device(device)


def eigenvalues(graph: GraphLike, *, matrix: GraphMatrix = "normalized") -> Tensor:
    """Return all eigenvalues of a matrix of a graph, ascending, ``(n,)``, float64.

    Args:
        graph: Of at most 20,000 vertices.
        matrix: Which matrix.

    Cost: that of a dense matrix, :math:`O(n^3)`. Memory: two matrices of :math:`8 n^2` bytes.
    """
    graph = as_graph(graph)
    if graph.num_nodes > LARGEST:
        raise GraphError(
            f"graph must have at most {LARGEST:,} vertices for all its eigenvalues, "
            f"got {graph.num_nodes:,}: density() needs no matrix"
        )
    op = laplacian(graph, matrix=matrix)
    dense = op.matmat(torch.eye(graph.num_nodes, dtype=torch.float64))
    values: Tensor = torch.linalg.eigvalsh(dense)
    return values


def exact_moments(
    values: Tensor, num_moments: int, *, interval: tuple[float, float] = (0.0, 2.0)
) -> Tensor:
    """Return the Chebyshev moments of eigenvalues in an interval, ``(num_moments + 1,)``."""
    low, high = interval
    # T_j(cos a) = cos(j a); roundoff may put an eigenvalue beyond the ends.
    angles = torch.arccos(((2 * values.double() - low - high) / (high - low)).clamp(-1.0, 1.0))
    degrees = torch.arange(num_moments + 1, dtype=torch.float64)
    # One degree at a time: a table of all of them would dwarf the eigenvalues.
    return torch.stack([torch.cos(degree * angles).mean() for degree in degrees])


def with_edges(graph: GraphLike) -> Graph:
    """Return ``graph`` as one, and raise if it has no edge."""
    found = as_graph(graph)
    if not found.num_edges:
        count = "one vertex" if found.num_nodes == 1 else f"{found.num_nodes:,} vertices"
        raise GraphError(
            f"graph must have an edge, got {count} and none: all its eigenvalues are 0, and a "
            "point has no density; eigenvalues() and moments() are exact"
        )
    return found
