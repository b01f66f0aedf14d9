"""Symmetric sparse matrices."""

from typing import Any, final

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_finite
from ritz.operators.base import LinearOperator, check_symmetric
from ritz.operators.compressed import CompressedRows


@final
class SparseOperator(LinearOperator):
    """A symmetric sparse matrix with both triangles stored; symmetry is checked by two products.

    Args:
        matrix: SciPy sparse matrix or array of any format, torch sparse tensor (CSR, COO), or
            :class:`CompressedRows`. Repeated entries are summed, as SciPy and torch do.

    Indices are kept in 32 bits where they fit, which halves what a product reads of them.
    Memory: 12 bytes an entry in float64, 8 in float32; 4 where ``CompressedRows`` has no values.
    """

    def __init__(self, matrix: Any) -> None:
        rows = compressed_rows(matrix, name="matrix")
        super().__init__(rows.num_rows, dtype=rows.dtype, device=rows.device, block_size=rows.width)
        if rows.values is not None:
            check_finite("matrix", rows.values)
        self.rows = rows
        check_symmetric(self)

    @property
    def matrix(self) -> Tensor:
        """The matrix as a torch CSR tensor ``(n, n)``."""
        return self.rows.tensor

    def _matmat(self, block: Tensor) -> Tensor:
        return self.rows.multiply(block)

    def _detail(self) -> str:
        return f"{self.rows.num_entries:,} entries"


def compressed_rows(matrix: Any, *, name: str, dtype: torch.dtype | None = None) -> CompressedRows:
    """Return any sparse matrix as compressed rows, sharing its memory where it can.

    Args:
        matrix: See :class:`SparseOperator`.
        name: What errors call it.
        dtype: Of the values, which may then be integers; their own by default.
    """
    if isinstance(matrix, CompressedRows):
        if dtype in (None, matrix.dtype):
            return matrix
        return CompressedRows(matrix.pointers, matrix.columns, matrix.values, dtype=dtype)
    pointers, columns, values, shape = _parts(matrix, name, dtype)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} must be square, got {tuple(shape)}")
    if shape[0] < 1:
        raise ValueError("an operator must have at least one row, got 0")
    return CompressedRows(
        pointers.to(_index(len(values))), columns.to(_index(shape[0])), values, dtype=dtype
    )


def _index(bound: int) -> torch.dtype:
    return torch.int32 if bound < 2**31 else torch.int64


def _parts(
    matrix: Any, name: str, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    if isinstance(matrix, Tensor):
        matrix = matrix.detach()
        if matrix.layout == torch.strided:
            raise TypeError(f"{name} must be sparse (SciPy or torch), got a dense tensor")
        matrix = matrix if dtype is None else matrix.to(dtype)
        if matrix.layout == torch.sparse_coo:
            matrix = matrix.coalesce()
        matrix = matrix.to_sparse_csr()
        return matrix.crow_indices(), matrix.col_indices(), matrix.values(), tuple(matrix.shape)
    if not scipy.sparse.issparse(matrix):
        raise TypeError(f"{name} must be sparse (SciPy or torch), got {type(matrix).__name__}")
    csr: Any = matrix
    if dtype is not None:  # before anything is summed: the sum of two booleans is one
        csr = csr.astype(torch.empty(0, dtype=dtype).numpy().dtype, copy=False)
    csr = scipy.sparse.csr_array(csr)
    if not csr.has_canonical_format:
        csr = csr.copy()
        csr.sum_duplicates()
    if csr.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, got {csr.dtype}: convert with astype")
    # Copied where read-only, as the arrays of a memory-mapped file are.
    pointers, columns, values = (
        torch.from_numpy(np.require(part, requirements="W"))
        for part in (csr.indptr, csr.indices, csr.data)
    )
    return pointers, columns, values, csr.shape
