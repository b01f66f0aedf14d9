"""Symmetric sparse matrices, multiplied by torch's compressed rows."""

import warnings
from typing import Any, final

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_finite
from ritz.operators.base import LinearOperator, check_symmetric

# Columns at which a product is cheapest a column on the CPU, in either precision: gathered rows of
# the block are then short enough to be found in the cache, and long enough to share its lines.
BLOCK_COLUMNS = 4


@final
class SparseOperator(LinearOperator):
    """A symmetric sparse matrix with both triangles stored; symmetry is checked by two products.

    Args:
        matrix: SciPy sparse matrix or array of any format, or torch sparse tensor (CSR, COO).
            Repeated entries are summed, as SciPy and torch do.

    Indices are kept in 32 bits where they fit, which halves what a product reads of them.
    Memory: 12 bytes an entry in float64, 8 in float32.
    """

    def __init__(self, matrix: Any) -> None:
        rows, columns, values, shape = _compressed_rows(matrix)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"matrix must be square, got {tuple(shape)}")
        width = BLOCK_COLUMNS if values.device.type == "cpu" else 32
        super().__init__(shape[0], dtype=values.dtype, device=values.device, block_size=width)
        check_finite("matrix", values)
        index = torch.int32 if max(len(values), shape[0]) < 2**31 else torch.int64
        with warnings.catch_warnings():
            # Neither tells a user of ours anything: the invariants are checked right here.
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
            warnings.filterwarnings("ignore", message=".*Sparse invariant checks are implicitly.*")
            self.matrix = torch.sparse_csr_tensor(
                rows.to(index), columns.to(index), values, size=tuple(shape), check_invariants=True
            )
        check_symmetric(self)

    def _matmat(self, block: Tensor) -> Tensor:
        if block.shape[1] == 1:
            return torch.mv(self.matrix, block[:, 0])[:, None]
        width = self.block_size if self.device.type == "cpu" else block.shape[1]
        if block.shape[1] <= width:
            return torch.mm(self.matrix, block)
        out = torch.empty_like(block)
        for start in range(0, block.shape[1], width):
            columns = slice(start, start + width)
            out[:, columns] = torch.mm(self.matrix, block[:, columns].contiguous())
        return out

    def _detail(self) -> str:
        return f"{self.matrix.values().numel():,} entries"


def _compressed_rows(matrix: Any) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    if isinstance(matrix, Tensor):
        matrix = matrix.detach()
        if matrix.layout == torch.strided:
            raise TypeError("matrix must be sparse (SciPy or torch), got a dense tensor")
        if matrix.layout == torch.sparse_coo:
            matrix = matrix.coalesce()
        matrix = matrix.to_sparse_csr()
        return matrix.crow_indices(), matrix.col_indices(), matrix.values(), tuple(matrix.shape)
    if not scipy.sparse.issparse(matrix):
        raise TypeError(f"matrix must be sparse (SciPy or torch), got {type(matrix).__name__}")
    csr: Any = scipy.sparse.csr_array(matrix)  # type: ignore[call-overload]
    if not csr.has_canonical_format:
        csr = csr.copy()
        csr.sum_duplicates()
    if csr.dtype not in (np.float32, np.float64):
        raise TypeError(f"matrix must be float32 or float64, got {csr.dtype}: convert with astype")
    # Copied where read-only, as the arrays of a memory-mapped file are.
    rows, columns, values = (
        torch.from_numpy(np.require(part, requirements="W"))
        for part in (csr.indptr, csr.indices, csr.data)
    )
    return rows, columns, values, csr.shape
