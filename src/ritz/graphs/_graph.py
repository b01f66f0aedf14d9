"""``Graph``: the edge weights as compressed rows, with a record of how the graph was made."""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.csgraph
import torch
from torch import Tensor

from ritz._core.checks import short
from ritz._core.storage import storable

Array = npt.NDArray[Any]

NUM_REASONS = 5  # reasons are stored for this many rejected records; all are counted


class GraphError(ValueError):
    """The input is not a graph that ritz can use; the message says where and why."""


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """How the records (lines, entries, edges) of a source became a graph.

    Every record is counted: ``num_records`` is the sum of the edges of the graph without
    self-loops, ``num_self_loops``, ``num_zero_weights``, ``num_merged`` and ``num_rejected``.

    Attributes:
        source: Name of the file, or type of the object.
        num_records: Number of records.
        num_self_loops: Number of self-loops.
        loops_kept: Whether self-loops were kept, as entries of the diagonal.
        num_zero_weights: Number of edges of weight zero, which were dropped.
        num_merged: Number of repeated edges.
        num_reciprocal: Number of pairs of vertices that occur in both orders.
        directed: Whether the source was directed. Its directions were dropped.
        num_rejected: Number of invalid records, with ``errors="report"``.
        reasons: What is wrong with the first few of them, with line numbers.
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
        counts = {
            "merged into others": self.num_merged,
            f"self-loops {'kept' if self.loops_kept else 'dropped'}": self.num_self_loops,
            "of weight zero dropped": self.num_zero_weights,
            "rejected": self.num_rejected,
        }
        parts = [
            f"{self.source}: {self.num_records:,} records",
            ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count),
            "directions dropped" if self.directed else "",
        ]
        return "; ".join(part for part in parts if part)


@storable
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    r"""An undirected graph: the symmetric weight matrix :math:`W \ge 0` in compressed rows.

    Columns ascend within each row, no entry is repeated and none is zero. A self-loop, if kept, is
    one entry :math:`W_{ii}` and counts once in the degree :math:`d_i = \sum_j W_{ij}`. Indices have
    32 bits if they fit: 8 bytes per edge, 24 with weights. The tensors are read-only.

    Attributes:
        crow: Row ``i`` has the entries ``crow[i]:crow[i + 1]``, ``(num_nodes + 1,)``.
        col: Columns of the entries, ``(num_entries,)``.
        weights: Their weights, ``(num_entries,)``, float64; ``None`` if all are one.
        names: Names of the vertices in the source, integers ``(num_nodes,)`` or strings; ``None``
            if vertex ``i`` is called ``i``.
        num_loops: Number of entries of the diagonal.
        intake: How the graph was read or generated.
    """

    crow: Tensor
    col: Tensor
    weights: Tensor | None = None
    names: Tensor | tuple[str, ...] | None = None
    num_loops: int = 0
    intake: Intake

    @property
    def num_nodes(self) -> int:
        """Number of vertices, including isolated ones."""
        return len(self.crow) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges, each counted once, including self-loops that were kept."""
        # An edge has two entries, a self-loop has one.
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
        """Return the weight matrix as a SciPy CSR array of float64, which shares the indices."""
        matrix: scipy.sparse.csr_array[Any] = self._csr(np.float64)
        return matrix

    def _csr(self, dtype: Any) -> Any:
        data = np.ones(len(self.col), dtype) if self.weights is None else self.weights.numpy()
        parts = (data, self.col.numpy(), self.crow.numpy())
        matrix = scipy.sparse.csr_array(parts, shape=(self.num_nodes, self.num_nodes), copy=False)
        matrix.has_sorted_indices = matrix.has_canonical_format = True
        return matrix

    def components(self) -> tuple[int, Tensor]:
        """Return the number of components, and the component of each vertex ``(num_nodes,)``."""
        # The strong components of a symmetric matrix are its components. Weak ones are the same,
        # but SciPy would build the transpose first.
        count, labels = scipy.sparse.csgraph.connected_components(
            self.to_scipy(), directed=True, connection="strong"
        )
        return int(count), torch.from_numpy(labels)

    def largest_component(self) -> "Graph":
        """Return the largest connected component; of several, the one with the first vertex."""
        count, labels = self.components()
        if count == 1:
            return self
        sizes = labels.bincount()[labels.long()]
        return self.subgraph(labels == labels[sizes.argmax()])  # argmax is the first of equals

    def subgraph(self, nodes: Tensor | Array | list[int]) -> "Graph":
        """Return the graph of some vertices, in the order of ``nodes``, and the edges between them.

        Args:
            nodes: Distinct indices ``(k,)``, or a mask ``(num_nodes,)``.
        """
        index = _indices(nodes, self.num_nodes)
        # Without weights, one byte per entry is enough.
        matrix = self._csr(np.int8)[index][:, index]
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
        kind = "unweighted"
        if self.weights is not None:
            low, high = self.weights.aminmax() if len(self.weights) else (math.nan, math.nan)
            kind = f"weighted, {float(low):.4g} to {float(high):.4g}"
        counts = self.crow.diff()
        loops = f", {self.num_loops:,} of them self-loops" if self.num_loops else ""
        lines = [
            f"Graph of {self.num_nodes:,} vertices and {self.num_edges:,} edges{loops}, {kind}",
            f"  neighbours: mean {float(counts.double().mean()):.4g}, median "
            f"{int(counts.median()):,}, largest {int(counts.max()):,}; "
            f"{self.num_isolated:,} isolated",
            f"  from {self.intake}",
            *(f"    rejected: {reason}" for reason in self.intake.reasons),
        ]
        return "\n".join(lines)


def _indices(nodes: Tensor | Array | list[int], n: int) -> Array:
    index = np.asarray(nodes)
    if index.dtype == bool and index.size:
        if index.shape != (n,):
            raise ValueError(f"nodes must be a mask of {n} entries, got shape {index.shape}")
        index = np.flatnonzero(index)
    if not index.size:
        raise ValueError("nodes must have at least one vertex, got none")
    if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"nodes must be a mask or a list of indices, got {short(nodes)}")
    if index.min() < 0 or index.max() >= n:
        raise ValueError(f"nodes must be between 0 and {n - 1}, got {index.min()}..{index.max()}")
    if len(np.unique(index)) != len(index):
        values, counts = np.unique(index, return_counts=True)
        twice = values[counts > 1][0]
        raise ValueError(f"nodes must be distinct, got {twice} more than once")
    return index
