"""`LaplacianOperator`: adjacency, Laplacian, random-walk and modularity matrices of a graph."""

import sys
from typing import Any, Literal, Protocol, final, get_args

import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_real_floating
from ritz.operators._base import LinearOperator
from ritz.operators._sparse import CompressedRows, Scaling, SparseLike, SparseOperator, as_rows

GraphMatrix = Literal[
    "adjacency", "laplacian", "normalized", "normalized_adjacency", "random_walk", "modularity"
]
GRAPH_MATRICES: tuple[GraphMatrix, ...] = get_args(GraphMatrix)


class NetworkXGraph(Protocol):
    """The interface of a NetworkX graph; NetworkX need not be installed."""

    def is_directed(self) -> bool: ...
    def is_multigraph(self) -> bool: ...


@final
class LaplacianOperator(LinearOperator):
    r"""A matrix of an undirected graph with weights :math:`W`, multiplied without storing it.

    With the degrees :math:`d_i = \sum_j W_{ij}` and :math:`D = \operatorname{diag}(d)`:

    ========================  ====================================================================
    ``adjacency``             :math:`W`
    ``laplacian``             :math:`D - W`, eigenvalues from 0
    ``normalized``            :math:`I - D^{-1/2} W D^{-1/2}`, eigenvalues from 0 to 2
    ``normalized_adjacency``  :math:`D^{-1/2} W D^{-1/2}`, eigenvalues from -1 to 1
    ``random_walk``           ``normalized_adjacency``: :math:`D^{-1} W`, which is not symmetric,
                              has the same eigenvalues, and eigenvectors :math:`D^{-1/2} v`
    ``modularity``            :math:`W - d d^\top / \sum_i d_i`
    ========================  ====================================================================

    In all of them an isolated vertex has a row of zeros, and therefore an eigenvalue 0. Weights of
    repeated edges are summed. A self-loop is one entry :math:`W_{ii}` and counts once in the
    degree, as in NetworkX. It cancels in :math:`D - W`.

    A product is one pass over :math:`W`, and no scaled copy of :math:`W` is stored. The modularity
    needs a second pass over the block.

    Args:
        weights: :math:`W`, symmetric and non-negative: SciPy sparse, torch sparse, NetworkX graph
            (edge attribute ``weight``, default one), or :class:`CompressedRows`, whose values may
            be ``None`` if all are one.
        matrix: Which matrix.
        dtype: Data type of the matrix. Defaults to that of the weights, or float64 if they are
            integers.

    Attributes:
        degrees: :math:`d`, ``(n,)``, float64.
        total: :math:`\sum_i d_i`, twice the weight of all edges.

    Memory: the weights, which take 4 bytes per entry if all are one, so 8 GB for a billion edges;
    six vectors; and 64 bytes per row after the first product.
    """

    def __init__(
        self,
        weights: SparseLike | CompressedRows | NetworkXGraph,
        *,
        matrix: GraphMatrix = "normalized",
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("matrix", matrix, GRAPH_MATRICES)
        if dtype is not None:
            check_real_floating("the matrix of a graph", dtype)
        rows = _weights(weights, dtype)
        super().__init__(rows.num_rows, dtype=rows.dtype, device=rows.device, block_size=rows.width)
        _check_weights(rows)
        self.rows, self.matrix = rows, matrix
        self.origin["matrix"], self._detail = matrix, f"{matrix}, {rows.num_entries:,} entries"
        self.degrees = rows.sums()
        self.total = float(self.degrees.sum())
        self._scaling = self._factors()

    def _matmat(self, block: Tensor) -> Tensor:
        product = self.rows.multiply(block, self._scaling)
        if self.matrix == "modularity" and self.total:
            # B x = W x - d (d' x) / sum(d).
            d = self.degrees.to(self.dtype)[:, None]
            product.addmm_(d, d.T @ block, alpha=-1 / self.total)
        return product

    def _factors(self) -> Scaling:
        # multiply() returns a * (W u) + b * u with u = s * x. For the Laplacian, s = 1, a = -1 and
        # b = d give d x - W x. For the normalised one s = d^(-1/2), and x = d^(1/2) u:
        # x - d^(-1/2) W u = a * (W u) + b * u with a = -d^(-1/2) and b = d^(1/2).
        d = self.degrees
        inverse = torch.where(d > 0, d.rsqrt(), 0.0).to(self.dtype)
        if self.matrix == "laplacian":
            return None, torch.full_like(inverse, -1.0), d.to(self.dtype)
        if self.matrix == "normalized":
            return inverse, -inverse, d.sqrt().to(self.dtype)
        if self.matrix in ("normalized_adjacency", "random_walk"):
            return inverse, inverse, torch.zeros_like(inverse)
        return None, None, None


def is_networkx(x: Any) -> bool:
    """Return whether ``x`` is a NetworkX graph, without importing NetworkX."""
    networkx = sys.modules.get("networkx")
    return networkx is not None and isinstance(x, networkx.Graph)


def _weights(weights: Any, dtype: torch.dtype | None) -> CompressedRows:
    if is_networkx(weights):
        if weights.is_directed():
            raise ValueError(
                "weights must be an undirected graph, got a directed one: "
                "graph.to_undirected() drops the directions"
            )
        # NetworkX refuses to convert a graph without vertices.
        convert = sys.modules["networkx"].to_scipy_sparse_array
        weights = convert(weights, dtype=float) if len(weights) else scipy.sparse.csr_array((0, 0))
    name = str(getattr(weights, "dtype", "float64")).removeprefix("torch.")
    if name.startswith("complex"):
        raise TypeError(f"weights must be real, got {name}")
    if dtype is None and name not in ("float32", "float64", "float16", "bfloat16"):
        dtype = torch.float64
    rows = as_rows(weights, name="weights", dtype=dtype)
    if rows.values is not None and bool((rows.values == 1).all()):
        return CompressedRows(rows.pointers, rows.columns, dtype=rows.dtype)
    return rows


def _check_weights(rows: CompressedRows) -> None:
    if rows.values is not None:
        bad = ~((rows.values >= 0) & torch.isfinite(rows.values))
        if bool(bad.any()):
            entry = int(bad.int().argmax())
            row = int(torch.searchsorted(rows.pointers, entry, right=True)) - 1
            place = (row, int(rows.columns[entry]))
            raise ValueError(
                "weights must be non-negative and finite, "
                f"got {float(rows.values[entry])} at {place} and {int(bad.sum())} in all"
            )
    try:
        SparseOperator(rows)
    except ValueError as error:
        raise ValueError(f"weights must be of an undirected graph: {error}") from error
