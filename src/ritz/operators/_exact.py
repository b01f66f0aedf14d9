"""Diagonals, traces and bounds of eigenvalues that an operator knows without products.

``exact`` dispatches on the class of the operator. A new operator registers its own rule:
``exact.register(MyOperator)(lambda op, quantity: Exact.of(op.entries, quantity))``.
"""

import operator
from collections.abc import Callable
from functools import singledispatch
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ritz.operators._base import LinearOperator, ScaledOperator, SumOperator, check_linear
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


UNKNOWN = Exact(None, "")


@singledispatch
def exact(op: LinearOperator, quantity: Quantity) -> Exact:
    """Return the diagonal or the trace of ``op`` if its structure gives it without products.

    Args:
        op: The operator.
        quantity: ``diagonal``, a tensor ``(n,)``, or ``trace``, a float.
    """
    check_linear("op", op)
    return UNKNOWN


@singledispatch
def gershgorin(op: LinearOperator) -> tuple[float, float] | None:
    r"""Return :math:`\min_i (a_{ii} - r_i), \max_i (a_{ii} + r_i)`, or ``None`` if not explicit.

    Here :math:`r_i = \sum_{j \ne i} |a_{ij}|`. All eigenvalues lie between the two bounds. If a
    smaller interval is known, such as [0, 2] for the normalised Laplacian, it is returned.
    """
    return None


@singledispatch
def lower_bound(op: LinearOperator) -> Exact:
    """Return a certain lower bound of the eigenvalues, a float of any sign, if one is known.

    Sums are rounded downwards, by a bound of their roundoff. So the bound holds for the matrix with
    exactly these entries, and not only to roundoff.
    """
    return UNKNOWN


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
def _(op: DenseOperator | SparseOperator) -> tuple[float, float] | None:
    diagonal, sums = _diagonal_and_sums(op)
    radius = sums - diagonal.abs()
    return float((diagonal - radius).min()), float((diagonal + radius).max())


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


def _diagonal_and_sums(op: DenseOperator | SparseOperator) -> tuple[Tensor, Tensor]:
    """Return the diagonal and the sums of the absolute values of the rows."""
    # In float64, since a radius may be far below the diagonal entry it is subtracted from.
    if isinstance(op, SparseOperator):
        return op.rows.diagonal().double(), op.rows.sums()
    sums = torch.linalg.vector_norm(op.matrix, 1, dim=1, dtype=torch.float64)
    return op.matrix.diagonal().double(), sums


# ------------------------------------------------------------------------------------------
# Certain lower bounds of the eigenvalues.


def row_excess(op: DenseOperator | SparseOperator) -> Tensor:
    r"""Return a lower bound of each :math:`a_{ii} - \sum_{j \ne i} |a_{ij}|`, ``(n,)``."""
    diagonal, sums = _diagonal_and_sums(op)
    lengths = op.rows.pointers.diff() if isinstance(op, SparseOperator) else op.shape[0]
    # A sum of m numbers has a relative error of at most (m - 1) u (Higham 2002, Section 4.2); the
    # three operations here add at most 3 u of all absolute values together.
    unit = torch.finfo(torch.float64).eps / 2
    return diagonal + diagonal.abs() - sums - (lengths + 4) * unit * (sums + diagonal.abs())


@lower_bound.register
def _(op: DenseOperator | SparseOperator) -> Exact:
    return _smallest(row_excess(op), "Gershgorin's discs")


@lower_bound.register
def _(op: DiagonalOperator) -> Exact:
    return _smallest(op.entries.double(), "the diagonal")


@lower_bound.register
def _(op: LaplacianOperator) -> Exact:
    # x'(D - W) x = sum_ij w_ij (x_i - x_j)^2 / 2 >= 0. The others are bounded by row sums.
    if op.matrix in ("laplacian", "normalized"):
        return Exact(0.0, "a Laplacian")
    return UNKNOWN


@lower_bound.register
def _(op: KernelOperator) -> Exact:
    return Exact(op.noise, "the noise")  # K = k(X, X) + noise I, and k(X, X) >= 0


@lower_bound.register
def _(op: LowRankOperator) -> Exact:
    if bool((op.scales < 0).any()):
        return UNKNOWN
    return _smallest(op.entries.double(), "the diagonal below the low rank")


@lower_bound.register
def _(op: ShiftedOperator) -> Exact:
    return _bounded(lambda bound: bound + op.shift, op.op)


@lower_bound.register
def _(op: ScaledOperator) -> Exact:
    return _bounded(lambda bound: op.factor * bound, op.op) if op.factor >= 0 else UNKNOWN


@lower_bound.register
def _(op: SumOperator) -> Exact:
    return _bounded(lambda *bounds: sum(bounds), *op.terms)  # Weyl's inequality


@lower_bound.register
def _(op: RestrictedOperator) -> Exact:
    return _bounded(lambda bound: bound, op.op)  # Cauchy's interlacing theorem


@lower_bound.register
def _(op: BlockDiagonalOperator) -> Exact:
    return _bounded(min, *op.ops)


@lower_bound.register
def _(op: KroneckerOperator) -> Exact:
    factors = [lower_bound(part) for part in (op.left, op.right)]
    if any(factor.value is None or factor.value < 0 for factor in factors):
        return UNKNOWN
    return _bounded(operator.mul, op.left, op.right)


def _smallest(values: Tensor, note: str) -> Exact:
    return Exact(float(values.min()), note)


def _bounded(rule: Callable[..., float], *ops: LinearOperator) -> Exact:
    """Apply a monotone rule to the bounds of several operators, and round downwards."""
    parts = [lower_bound(op) for op in ops]
    if any(part.value is None for part in parts):
        return UNKNOWN
    values = [part.value for part in parts]
    result = rule(*values) if len(values) > 1 else rule(values[0])
    unit = torch.finfo(torch.float64).eps * max(map(abs, (*values, result)))
    return Exact(result - len(values) * unit, " and ".join(dict.fromkeys(p.note for p in parts)))
