"""Log determinants by factors of matrices that are dense, or sparse and cheap to factor."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu
from torch import Tensor

from ritz.operators.base import LinearOperator
from ritz.operators.dense import DenseOperator
from ritz.operators.sparse import SparseOperator
from ritz.spectra.conjugate import NotPositiveDefiniteError

DENSE = 2**32  # bytes of a dense factor that is not thought twice about
ROWS = 20_000  # of a sparse matrix that is factored whatever its graph
ENVELOPE = 2e11  # operations, some ten seconds, of an elimination within the envelope


def is_small(op: LinearOperator) -> bool:
    """Whether a factor is sure to be quick: dense that fits, or sparse with few rows."""
    if isinstance(op, DenseOperator):
        return op.shape[0] ** 2 * 8 <= DENSE
    return isinstance(op, SparseOperator) and op.shape[0] <= ROWS


def is_narrow(op: LinearOperator) -> bool:
    """Whether a sparse matrix fills little when it is factored: the graph is like a chain."""
    return isinstance(op, SparseOperator) and _envelope(_columns(op)) <= ENVELOPE


def logdet_by_factor(op: LinearOperator) -> tuple[float, str]:
    """Return the log determinant of a matrix, and how it was found."""
    size = f"of order {op.shape[0]:,}"
    if isinstance(op, DenseOperator):
        return _dense(op.matrix), f"exact, by the factor of a dense matrix {size}"
    if not isinstance(op, SparseOperator):
        raise ValueError(f"method='cholesky' needs a dense or sparse matrix, got {op!r}")
    matrix = _columns(op)
    if importlib.util.find_spec("sksparse") is not None:
        return _cholmod(matrix), f"exact, by CHOLMOD's factor of a sparse matrix {size}"
    return _superlu(matrix), f"exact, by the factor of a sparse matrix {size}"


def _dense(matrix: Tensor) -> float:
    factor, failed = torch.linalg.cholesky_ex(matrix.double())
    if int(failed):
        smallest = float(torch.linalg.eigvalsh(matrix.double())[0])
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got an eigenvalue of {smallest:.6g}"
        )
    return float(2 * factor.diagonal().log().sum())


def _columns(op: SparseOperator) -> Any:
    rows, columns, values = (
        part.cpu().numpy()
        for part in (op.matrix.crow_indices(), op.matrix.col_indices(), op.matrix.values().double())
    )
    # Symmetric, so rows are as good as columns.
    return csc_array((values, columns, rows), shape=op.shape)


def _envelope(matrix: Any) -> float:
    """Operations of an elimination that fills every row up to its first entry: a bound."""
    order = reverse_cuthill_mckee(matrix.tocsr(), symmetric_mode=True)
    place = np.empty_like(order)
    place[order] = np.arange(len(order), dtype=order.dtype)
    reach, used = place.copy(), np.diff(matrix.indptr) > 0
    reach[used] = np.minimum.reduceat(place[matrix.indices], matrix.indptr[:-1][used])
    widths = np.maximum(place - reach, 0).astype(float)
    return float((widths**2).sum())


def _cholmod(matrix: Any) -> float:
    cholmod: Any = importlib.import_module("sksparse.cholmod")
    try:
        if hasattr(cholmod, "cho_factor"):  # from version 0.5 on
            return float(cholmod.cho_factor(matrix).logdet())
        return float(cholmod.cholesky(matrix, mode="supernodal").logdet())
    except cholmod.CholmodNotPositiveDefiniteError as error:
        _superlu(matrix)  # which has the pivot, that CHOLMOD keeps to itself
        raise NotPositiveDefiniteError(
            "op must be positive definite, got a pivot that is roundoff"
        ) from error


def _superlu(matrix: Any) -> float:
    options = {"SymmetricMode": True}
    try:
        factor = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    except RuntimeError as error:
        raise NotPositiveDefiniteError("op must be positive definite, got a zero pivot") from error
    if not np.array_equal(factor.perm_r, factor.perm_c):
        raise NotPositiveDefiniteError("op must be positive definite, got a zero pivot")
    pivots = torch.from_numpy(factor.U.diagonal())
    if not bool((pivots > 0).all()):
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got a pivot of {float(pivots.min()):.6g}"
        )
    return float(pivots.log().sum())
