"""Operators from what people have."""

from typing import Any

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from ritz.operators.base import LinearOperator
from ritz.operators.dense import DenseOperator
from ritz.operators.function import FunctionOperator
from ritz.operators.laplacian import is_networkx
from ritz.operators.sparse import SparseOperator


def as_operator(x: Any) -> LinearOperator:
    """Return ``x`` as an operator: every function that takes an operator calls this.

    Args:
        x: A :class:`LinearOperator` (returned as it is); a symmetric matrix as a torch tensor
            (dense, CSR, COO), NumPy array or SciPy sparse matrix; or a SciPy ``LinearOperator``.
    """
    if isinstance(x, LinearOperator):
        return x
    if isinstance(x, Tensor):
        return DenseOperator(x) if x.layout == torch.strided else SparseOperator(x)
    if scipy.sparse.issparse(x):
        return SparseOperator(x)
    if isinstance(x, np.ndarray):
        return DenseOperator(torch.from_numpy(np.require(x, requirements=["C", "W"])))
    if isinstance(x, ScipyOperator):
        return _from_scipy(x)
    if is_networkx(x):
        raise TypeError(
            "op must be one matrix, and a graph has several: "
            "choose one with ritz.operators.LaplacianOperator(graph, kind=...)"
        )
    raise TypeError(
        "op must be a ritz operator, a symmetric tensor or array, a SciPy sparse matrix or a SciPy "
        f"LinearOperator, got {type(x).__name__}"
    )


def _from_scipy(x: Any) -> FunctionOperator:
    if x.shape[0] != x.shape[1]:
        raise ValueError(f"op must be square, got {x.shape}")
    dtype = torch.from_numpy(np.empty(0, dtype=x.dtype or np.float64)).dtype

    def scipy_product(block: Tensor) -> Tensor:
        # A copy: what SciPy's operator returns may be its argument, or read-only.
        return torch.tensor(x.matmat(block.numpy()), dtype=dtype)

    return FunctionOperator(scipy_product, n=x.shape[0], dtype=dtype, name=type(x).__name__)
