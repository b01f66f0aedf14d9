"""`exact`: diagonal and trace without products; `gershgorin`: bounds of the spectrum.

``exact`` dispatches on the class of the operator. A new operator registers its own rule:
``exact.register(MyOperator)(lambda op, quantity: Exact.of(op.entries, quantity))``.
"""

import operator
from collections.abc import Callable
from functools import singledispatch
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ritz.operators._base import LinearOperator, ScaledOperator, SumOperator
from ritz.operators._kernel import KernelOperator
from ritz.operators._laplacian import LaplacianOperator
from ritz.operators._sparse import SparseOperator
from ritz.operators._structured import (
    BlockDiagonalOperator,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    LowRankOperator,
    RestrictedOperator,
    ShiftedOperator,
)

Quantity = Literal["diagonal", "trace"]


class Exact(NamedTuple):
    """A value and how it is known, or ``None`` and why it is not known.

    Attributes:
        value: A diagonal ``(n,)``, a trace, or ``None``.
        note: How the value was computed. Without a value, the reason, or ``""``.
    """

    value: Any
    note: str = "structure"

    @classmethod
    def of(cls, diagonal: Tensor, quantity: Quantity) -> "Exact":
        """Return a diagonal, or its sum if the trace is wanted."""
        return cls(diagonal if quantity == "diagonal" else float(diagonal.double().sum()))


@singledispatch
def exact(op: LinearOperator, quantity: Quantity) -> Exact:
    """Return the diagonal or the trace of ``op`` if its structure gives it without products.

    Args:
        op: The operator.
        quantity: ``diagonal``, a tensor ``(n,)``, or ``trace``, a float.
    """
    return Exact(None, "")


@singledispatch
def gershgorin(op: LinearOperator) -> tuple[float, float] | None:
    r"""Return :math:`\min_i (a_{ii} - r_i), \max_i (a_{ii} + r_i)`, or ``None`` if not explicit.

    Here :math:`r_i = \sum_{j \ne i} |a_{ij}|`. All eigenvalues lie between the two bounds. If a
    smaller interval is known, such as [0, 2] for the normalised Laplacian, it is returned.
    """
    return None


# ------------------------------------------------------------------------------------------
# Diagonals and traces.

exact.register(DenseOperator)(lambda op, quantity: Exact.of(op.matrix.diagonal().clone(), quantity))
exact.register(SparseOperator)(lambda op, quantity: Exact.of(op.rows.diagonal(), quantity))
exact.register(DiagonalOperator)(lambda op, quantity: Exact.of(op.entries.clone(), quantity))


@exact.register
def _(op: LaplacianOperator, quantity: Quantity) -> Exact:
    loops, d = op.rows.diagonal().double(), op.degrees
    walk = torch.where(d > 0, loops / d, 0.0)
    values = {
        "adjacency": loops,
        # L = D - A
        "laplacian": d - loops,
        # 1 - a_ii / d_i, and 0 for an isolated node
        "normalized": torch.where(d > 0, 1 - walk, 0.0),
        # B = A - d d' / 2m
        "modularity": loops - d.square() / (op.total or 1.0),
    }
    return Exact.of(values.get(op.matrix, walk).to(op.dtype), quantity)


@exact.register
def _(op: LowRankOperator, quantity: Quantity) -> Exact:
    # (U S U' + D)_ii = sum_r s_r u_ir^2 + d_i
    squares = torch.einsum("nr,r,nr->n", op.factors, op.scales, op.factors)
    return Exact.of(squares + op.entries, quantity)


@exact.register
def _(op: KernelOperator, quantity: Quantity) -> Exact:
    # A stationary kernel is constant on the diagonal: k(x, x) = k(0).
    return Exact.of(op.points.new_full(op.shape[:1], op.outputscale + op.noise), quantity)


@exact.register
def _(op: RestrictedOperator, quantity: Quantity) -> Exact:
    inner = exact(op.op, "diagonal")
    if inner.value is None:
        return inner
    return Exact.of(inner.value[op.indices], quantity)._replace(note=inner.note)


@exact.register
def _(op: KroneckerOperator, quantity: Quantity) -> Exact:
    # tr (A (x) B) = tr A tr B, and diag (A (x) B) = diag A (x) diag B
    return _combine(
        quantity, operator.mul if quantity == "trace" else torch.kron, op.left, op.right
    )


@exact.register
def _(op: ScaledOperator, quantity: Quantity) -> Exact:
    return _combine(quantity, lambda value: op.factor * value, op.op)


@exact.register
def _(op: ShiftedOperator, quantity: Quantity) -> Exact:
    # tr (A + s I) = tr A + n s
    shift = op.shift * (op.shape[0] if quantity == "trace" else 1)
    return _combine(quantity, lambda value: value + shift, op.op)


@exact.register
def _(op: SumOperator, quantity: Quantity) -> Exact:
    return _combine(quantity, lambda *values: sum(values), *op.terms)


@exact.register
def _(op: BlockDiagonalOperator, quantity: Quantity) -> Exact:
    join = sum if quantity == "trace" else torch.cat
    return _combine(quantity, lambda *values: join(values), *op.ops)


def _combine(quantity: Quantity, rule: Callable[..., Any], *ops: LinearOperator) -> Exact:
    """Apply a rule to the values of several operators. The result is missing if one of them is."""
    parts = [exact(op, quantity) for op in ops]
    missing = [part for part in parts if part.value is None]
    notes = "; ".join(dict.fromkeys(part.note for part in missing or parts if part.note))
    return Exact(None if missing else rule(*(part.value for part in parts)), notes)


# ------------------------------------------------------------------------------------------
# Gershgorin discs: every eigenvalue lies in one of the intervals [a_ii - r_i, a_ii + r_i].


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
        # a_ii = r_i = d_i - w_ii
        return 0.0, float(2 * (d - loops).max())
    # a_ii = w_ii and r_i = d_i - w_ii
    low, high = float((2 * loops - d).min()), float(d.max())
    if op.matrix == "modularity":
        # d d' / sum(d), which is subtracted, has the eigenvalues 0 and d'd / sum(d).
        low -= float(d.square().sum()) / (op.total or 1.0)
    return low, high


@gershgorin.register
def _(op: DiagonalOperator) -> tuple[float, float] | None:
    return float(op.entries.min()), float(op.entries.max())


def _discs(diagonal: Tensor, absolute_row_sums: Tensor) -> tuple[float, float]:
    diagonal = diagonal.double()  # a radius may be far below the entry it is subtracted from
    radius = absolute_row_sums - diagonal.abs()
    return float((diagonal - radius).min()), float((diagonal + radius).max())
