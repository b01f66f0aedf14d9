"""What an operator knows about itself without a product: diagonal, trace, bounds.

Each function dispatches on the class and answers ``None`` where nothing is known. A new operator
that knows better registers here: ``exact_diagonal.register(MyOperator)(function)``.
"""

from functools import singledispatch

import torch
from torch import Tensor

from ritz.operators._algebra import RestrictedOperator, ScaledOperator, ShiftedOperator, SumOperator
from ritz.operators._base import LinearOperator
from ritz.operators._kernel import KernelOperator
from ritz.operators._laplacian import LaplacianOperator
from ritz.operators._sparse import SparseOperator
from ritz.operators._structured import (
    BlockDiagonalOperator,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    LowRankOperator,
)


@singledispatch
def exact_diagonal(op: LinearOperator) -> Tensor | None:
    """Return the diagonal ``(n,)`` where the structure of ``op`` gives it, else ``None``."""
    return None


@singledispatch
def exact_trace(op: LinearOperator) -> float | None:
    """Return the trace where the structure of ``op`` gives it, else ``None``."""
    diagonal = exact_diagonal(op)
    return None if diagonal is None else float(diagonal.double().sum())


@singledispatch
def structure_note(op: LinearOperator) -> str:
    """Return by what the diagonal and the trace are known, where they are."""
    return "structure"


@singledispatch
def structure_gap(op: LinearOperator) -> str:
    """Return why they are not known, where there is more to say than that they are not."""
    return ""


@singledispatch
def gershgorin(op: LinearOperator) -> tuple[float, float] | None:
    r"""Return :math:`\min_i (a_{ii} - r_i), \max_i (a_{ii} + r_i)`, or ``None`` if not explicit.

    :math:`r_i = \sum_{j \ne i} |a_{ij}|`: every eigenvalue lies between the two. Where as much is
    known with closer ends, as for the normalised matrices of a graph, it is these.
    """
    return None


@exact_diagonal.register
def _(op: DenseOperator) -> Tensor | None:
    return op.matrix.diagonal().clone()


@exact_diagonal.register
def _(op: SparseOperator) -> Tensor | None:
    return op.rows.diagonal()


@exact_diagonal.register
def _(op: LaplacianOperator) -> Tensor | None:
    loops, d = op.rows.diagonal().double(), op.degrees
    walk = torch.where(d > 0, loops / d, 0.0)
    values = {
        "adjacency": loops,
        "laplacian": d - loops,
        "normalized": torch.where(d > 0, 1 - walk, 0.0),
        "modularity": loops - d.square() / (op.total or 1.0),
    }
    return values.get(op.matrix, walk).to(op.dtype)


@exact_diagonal.register
def _(op: DiagonalOperator) -> Tensor | None:
    return op.entries.clone()


@exact_diagonal.register
def _(op: LowRankOperator) -> Tensor | None:
    return torch.einsum("nr,r,nr->n", op.factors, op.scales, op.factors) + op.entries


@exact_diagonal.register
def _(op: KernelOperator) -> Tensor | None:
    return torch.full((op.shape[0],), op.outputscale + op.noise, dtype=op.dtype, device=op.device)


@exact_diagonal.register
def _(op: KroneckerOperator) -> Tensor | None:
    left, right = exact_diagonal(op.left), exact_diagonal(op.right)
    return None if left is None or right is None else torch.kron(left, right)


@exact_diagonal.register
def _(op: ScaledOperator) -> Tensor | None:
    inner = exact_diagonal(op.op)
    return None if inner is None else op.factor * inner


@exact_diagonal.register
def _(op: ShiftedOperator) -> Tensor | None:
    inner = exact_diagonal(op.op)
    return None if inner is None else inner + op.shift


@exact_diagonal.register
def _(op: RestrictedOperator) -> Tensor | None:
    inner = exact_diagonal(op.op)
    return None if inner is None else inner[op.indices]


@exact_diagonal.register
def _(op: SumOperator) -> Tensor | None:
    parts = [part for part in map(exact_diagonal, op.terms) if part is not None]
    return torch.stack(parts).sum(0) if len(parts) == len(op.terms) else None


@exact_diagonal.register
def _(op: BlockDiagonalOperator) -> Tensor | None:
    parts = [part for part in map(exact_diagonal, op.ops) if part is not None]
    return torch.cat(parts) if len(parts) == len(op.ops) else None


@exact_trace.register
def _(op: BlockDiagonalOperator) -> float | None:
    # The trace of a block may be known at a lower price than its diagonal.
    parts = [part for part in map(exact_trace, op.ops) if part is not None]
    return sum(parts) if len(parts) == len(op.ops) else None


@structure_note.register
def _(op: BlockDiagonalOperator) -> str:
    return "; ".join(dict.fromkeys(map(structure_note, op.ops)))


@structure_gap.register
def _(op: BlockDiagonalOperator) -> str:
    return "; ".join(gap for gap in dict.fromkeys(map(structure_gap, op.ops)) if gap)


@gershgorin.register
def _(op: DenseOperator) -> tuple[float, float] | None:
    return _discs(op.matrix.diagonal(), op.matrix.abs().sum(1, dtype=torch.float64))


@gershgorin.register
def _(op: SparseOperator) -> tuple[float, float] | None:
    return _discs(op.rows.diagonal(), op.rows.sums())


@gershgorin.register
def _(op: LaplacianOperator) -> tuple[float, float] | None:
    if op.matrix == "normalized":
        return 0.0, 2.0
    if op.matrix in ("normalized_adjacency", "random_walk"):
        return -1.0, 1.0
    loops, d = op.rows.diagonal().double(), op.degrees
    if op.matrix == "laplacian":
        return 0.0, float(2 * (d - loops).max())
    low, high = float((2 * loops - d).min()), float(d.max())
    if op.matrix == "modularity":  # less a matrix of rank one with this eigenvalue
        low -= float(d.square().sum()) / (op.total or 1.0)
    return low, high


@gershgorin.register
def _(op: DiagonalOperator) -> tuple[float, float] | None:
    return float(op.entries.min()), float(op.entries.max())


def _discs(diagonal: Tensor, absolute_row_sums: Tensor) -> tuple[float, float]:
    diagonal = diagonal.double()  # a radius may be far below the entry it is subtracted from
    radius = absolute_row_sums - diagonal.abs()
    return float((diagonal - radius).min()), float((diagonal + radius).max())
