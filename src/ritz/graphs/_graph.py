"""The container of a graph: compressed rows of its weight matrix, and where they came from."""

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.csgraph
import torch
from torch import Tensor

from ritz._core.storage import storable

Array = npt.NDArray[Any]

NUM_REASONS = 5  # rejected lines that are quoted; all of them are counted


class GraphError(ValueError):
    """What was given is not a graph ritz can use; the message says where and why."""


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What became of the records (lines, entries, edges) a graph was made from.

    Every record is accounted for: ``num_records`` is the sum of the edges of the graph without
    self-loops, ``num_self_loops``, ``num_zero_weights``, ``num_merged`` and ``num_rejected``.

    Attributes:
        source: A file name, or what kind of object it was.
        num_records: Records that were there.
        num_self_loops: Of these, self-loops.
        loops_kept: Whether self-loops are entries of the diagonal or were dropped.
        num_zero_weights: Edges of weight zero, which are no edges.
        num_merged: Records of an edge that another record had named already.
        num_reciprocal: Pairs of vertices named in both orders.
        directed: Whether the source was directed, so that directions were dropped.
        num_rejected: Records that could not be read, with ``errors="report"``.
        reasons: The first few of these, each with its line.
    """

    source: str
    num_records: int
    num_self_loops: int = 0
    loops_kept: bool = False
    num_zero_weights: int = 0
    num_merged: int = 0
    num_reciprocal: int = 0
    directed: bool = False
    num_rejected: int = 0
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        loops = f"self-loops {'kept' if self.loops_kept else 'dropped'}"
        counts = {
            "merged into others": self.num_merged,
            loops: self.num_self_loops,
            "of weight zero dropped": self.num_zero_weights,
            "rejected": self.num_rejected,
        }
        parts = [f"{count:,} {what}" for what, count in counts.items() if count]
        directions = ["directions dropped"] if self.directed else []
        text = f"{self.source}: {self.num_records:,} records"
        return "; ".join([text, ", ".join(parts), *directions] if parts else [text, *directions])


@storable
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    r"""An undirected graph: the symmetric weight matrix :math:`W \ge 0` in compressed rows.

    Columns ascend within each row, no entry is repeated and none is zero. A self-loop, where kept,
    is one entry :math:`W_{ii}` and counts once in the degree :math:`d_i = \sum_j W_{ij}`. Indices
    have 32 bits where they fit: 8 bytes an edge, 24 with weights. The tensors are not to be
    changed.

    Attributes:
        crow: Row ``i`` has the entries ``crow[i]:crow[i + 1]``, ``(num_nodes + 1,)``.
        col: Columns of the entries, ``(num_entries,)``.
        weights: Their weights, ``(num_entries,)``, float64; ``None`` where all are one.
        names: What the source called the vertices, integers ``(num_nodes,)`` or strings; ``None``
            where vertex ``i`` was ``i``.
        num_loops: Entries of the diagonal.
        intake: What the graph was made from.
    """

    crow: Tensor
    col: Tensor
    weights: Tensor | None = None
    names: Tensor | tuple[str, ...] | None = None
    num_loops: int = 0
    intake: Intake

    @property
    def num_nodes(self) -> int:
        """Number of vertices, isolated ones included."""
        return len(self.crow) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges, each counted once, kept self-loops included."""
        return (len(self.col) + self.num_loops) // 2

    @property
    def degrees(self) -> Tensor:
        r"""Weighted degrees :math:`d_i = \sum_j W_{ij}`, ``(num_nodes,)``, float64."""
        counts = self.crow.diff()
        if self.weights is None:
            return counts.double()
        return torch.segment_reduce(self.weights, "sum", lengths=counts.long())

    @property
    def num_isolated(self) -> int:
        """Number of vertices without an edge."""
        return int((self.crow.diff() == 0).sum())

    def to_scipy(self) -> "scipy.sparse.csr_array[Any]":
        """Return the weight matrix as a SciPy CSR array of float64; indices are shared."""
        data = np.ones(len(self.col)) if self.weights is None else self.weights.numpy()
        matrix: scipy.sparse.csr_array[Any] = _sparse(self, data)
        return matrix

    def components(self) -> tuple[int, Tensor]:
        """Return the number of connected components and that of each vertex, ``(num_nodes,)``."""
        # In a symmetric matrix strong components are components; asking for weak ones would
        # build the transpose first.
        count, labels = scipy.sparse.csgraph.connected_components(
            self.to_scipy(), directed=True, connection="strong"
        )
        return int(count), torch.from_numpy(labels)

    def largest_component(self) -> "Graph":
        """Return the largest connected component; of equals, that of the first vertex."""
        count, labels = self.components()
        if count == 1:
            return self
        sizes = labels.bincount()
        first = torch.full((count,), len(labels)).scatter_reduce(
            0, labels.long(), torch.arange(len(labels)), "amin"
        )
        largest = min(range(count), key=lambda c: (-int(sizes[c]), int(first[c])))
        return self.subgraph(labels == largest)

    def subgraph(self, nodes: Tensor | Array | list[int]) -> "Graph":
        """Return the graph of some vertices and the edges between them, in the order given.

        Args:
            nodes: Indices ``(k,)``, each once, or a mask ``(num_nodes,)``.
        """
        index = _indices(nodes, self.num_nodes)
        data = np.ones(len(self.col), np.int8) if self.weights is None else self.weights.numpy()
        # The selection writes explicit entries only, so that no weight is touched.
        matrix = _sparse(self, data)[index][:, index]
        matrix.sort_indices()
        names = torch.arange(self.num_nodes) if self.names is None else self.names
        return replace(
            self,
            crow=torch.from_numpy(matrix.indptr),
            col=torch.from_numpy(matrix.indices),
            weights=None if self.weights is None else torch.from_numpy(matrix.data),
            names=tuple(names[i] for i in index) if isinstance(names, tuple) else names[index],
            num_loops=int(np.count_nonzero(matrix.diagonal())),
        )

    def __str__(self) -> str:
        kind = "unweighted" if self.weights is None else f"weighted, {_span(self.weights)}"
        counts = self.crow.diff()
        degrees = f"mean {float(counts.double().mean()):.4g}, median {int(counts.median()):,}, "
        degrees += f"largest {int(counts.max()):,}; {self.num_isolated:,} isolated"
        loops = f", {self.num_loops:,} of them self-loops" if self.num_loops else ""
        lines = [
            f"Graph of {self.num_nodes:,} vertices and {self.num_edges:,} edges{loops}, {kind}",
            f"  neighbours: {degrees}",
            f"  from {self.intake}",
            *(f"    rejected: {reason}" for reason in self.intake.reasons),
        ]
        return "\n".join(lines)


def _sparse(graph: Graph, data: Array) -> Any:
    n = graph.num_nodes
    parts = (data, graph.col.numpy(), graph.crow.numpy())
    matrix = scipy.sparse.csr_array(parts, shape=(n, n), copy=False)
    matrix.has_sorted_indices = True
    matrix.has_canonical_format = True
    return matrix


def _indices(nodes: Tensor | Array | list[int], n: int) -> Array:
    index = np.asarray(nodes)
    if not index.size or (index.dtype == bool and not index.any()):
        raise ValueError("nodes must name at least one vertex")
    if index.dtype == bool:
        if index.shape != (n,):
            raise ValueError(f"nodes must be a mask of {n} entries, got shape {index.shape}")
        return np.flatnonzero(index)
    if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"nodes must be a mask or a list of indices, got {nodes!r}")
    if index.min() < 0 or index.max() >= n:
        raise ValueError(f"nodes must lie between 0 and {n - 1}, got {index.min()}..{index.max()}")
    if len(np.unique(index)) != len(index):
        raise ValueError("nodes must name each vertex once")
    return index


def _span(weights: Tensor) -> str:
    if not len(weights):
        return "none"
    return f"{float(weights.min()):.4g} to {float(weights.max()):.4g}"
