"""Symmetric matrices as products with blocks of vectors."""

from ritz.operators.algebra import (
    DeflatedOperator,
    RestrictedOperator,
    ScaledOperator,
    ShiftedOperator,
    SumOperator,
)
from ritz.operators.base import LinearOperator, check_symmetric
from ritz.operators.blocks import BlockDiagonalOperator
from ritz.operators.compressed import CompressedRows
from ritz.operators.dense import DenseOperator
from ritz.operators.diagonal import DiagonalOperator, LowRankOperator
from ritz.operators.function import FunctionOperator
from ritz.operators.interop import as_operator
from ritz.operators.kernel import KernelOperator
from ritz.operators.kronecker import KroneckerOperator
from ritz.operators.laplacian import LaplacianOperator
from ritz.operators.sharded import ShardedOperator
from ritz.operators.sparse import SparseOperator
from ritz.operators.structure import (
    exact_diagonal,
    exact_trace,
    gershgorin,
    structure_gap,
    structure_note,
)

__all__ = [
    "BlockDiagonalOperator",
    "CompressedRows",
    "DeflatedOperator",
    "DenseOperator",
    "DiagonalOperator",
    "FunctionOperator",
    "KernelOperator",
    "KroneckerOperator",
    "LaplacianOperator",
    "LinearOperator",
    "LowRankOperator",
    "RestrictedOperator",
    "ScaledOperator",
    "ShardedOperator",
    "ShiftedOperator",
    "SparseOperator",
    "SumOperator",
    "as_operator",
    "check_symmetric",
    "exact_diagonal",
    "exact_trace",
    "gershgorin",
    "structure_gap",
    "structure_note",
]
