"""Symmetric matrices, represented by their matrix-vector products."""

from ritz.operators._base import LinearOperator, check_symmetric
from ritz.operators._exact import Exact, exact
from ritz.operators._interop import FunctionOperator, OperatorLike, as_operator, read_matrix
from ritz.operators._kernel import KernelOperator
from ritz.operators._laplacian import LaplacianOperator
from ritz.operators._sparse import SparseOperator
from ritz.operators._structured import (
    BlockDiagonalOperator,
    DeflatedOperator,
    DenseOperator,
    DiagonalOperator,
    KroneckerOperator,
    LowRankOperator,
    RestrictedOperator,
    ShardedOperator,
    ShiftedOperator,
)

__all__ = [
    "BlockDiagonalOperator",
    "DeflatedOperator",
    "DenseOperator",
    "DiagonalOperator",
    "Exact",
    "FunctionOperator",
    "KernelOperator",
    "KroneckerOperator",
    "LaplacianOperator",
    "LinearOperator",
    "LowRankOperator",
    "OperatorLike",
    "RestrictedOperator",
    "ShardedOperator",
    "ShiftedOperator",
    "SparseOperator",
    "as_operator",
    "check_symmetric",
    "exact",
    "read_matrix",
]
