"""Operators from tensors, arrays, SciPy matrices and files."""

import gzip
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeAlias, Union

import numpy as np
import scipy.io
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from ritz.operators._base import LinearOperator
from ritz.operators._function import FunctionOperator
from ritz.operators._laplacian import is_networkx
from ritz.operators._sparse import SparseOperator
from ritz.operators._structured import DenseOperator

# ------------------------------------------------------------------------------------------
# Operators from what people have.


# Types in quotes are generic for type checkers alone.
OperatorLike: TypeAlias = Union[
    LinearOperator,
    Tensor,
    "np.ndarray[Any, Any]",
    "scipy.sparse.sparray[Any, Any]",
    "scipy.sparse.spmatrix[Any]",
    "ScipyOperator[Any]",
]


def as_operator(x: OperatorLike) -> LinearOperator:
    """Return ``x`` as an operator: every function that takes an operator calls this.

    Args:
        x: A :class:`LinearOperator` (returned as it is); a symmetric matrix as a torch tensor
            (dense, CSR, COO), NumPy array or SciPy sparse matrix; or a SciPy ``LinearOperator``.
    """
    if isinstance(x, LinearOperator):
        return x
    if isinstance(x, Tensor):
        return DenseOperator(x) if x.layout == torch.strided else SparseOperator(x)
    if isinstance(x, scipy.sparse.sparray | scipy.sparse.spmatrix):
        return SparseOperator(x)
    if isinstance(x, np.ndarray):
        return DenseOperator(torch.from_numpy(np.require(x, requirements=["C", "W"])))
    if isinstance(x, ScipyOperator):
        return _from_scipy(x)
    if is_networkx(x) or type(x).__module__.startswith("ritz.graphs"):
        raise TypeError(
            "op must be one matrix, and a graph has several: "
            "choose one with ritz.graphs.laplacian(graph, matrix=...)"
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


# ------------------------------------------------------------------------------------------
# Symmetric matrices from files.

# What decompressing raises; a file cut short is no end of input, which stops a command in silence.
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def read_matrix(path: str | os.PathLike[str]) -> LinearOperator:
    """Return the symmetric matrix of a file; nothing in it is executed.

    Args:
        path: Matrix Market (``.mtx``, ``.mtx.gz``), or ``.npz`` as ``scipy.sparse.save_npz`` writes
            it.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no matrix file {str(file)!r}")
    if file.suffix == ".npz":
        return as_operator(_sparse(file))
    if file.name.endswith((".mtx", ".mtx.gz")):
        try:
            return as_operator(_real(scipy.io.mmread(file), file))
        except (ValueError, TypeError, OverflowError, MemoryError, *_DAMAGED) as error:
            raise ValueError(f"{str(file)!r} must hold a symmetric matrix: {error}") from error
    raise ValueError(f"a matrix file must end in .mtx, .mtx.gz or .npz, got {str(file)!r}")


def _sparse(file: Path) -> Any:
    try:
        return _real(scipy.sparse.load_npz(file), file)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile, *_DAMAGED) as error:
        raise ValueError(
            f"{str(file)!r} must be a sparse matrix saved by scipy.sparse.save_npz, with no "
            f"objects in it: {error}"
        ) from error


def _real(matrix: Any, file: Path) -> Any:
    if np.issubdtype(matrix.dtype, np.complexfloating):
        raise ValueError(f"{str(file)!r} must hold real numbers, got {matrix.dtype}")
    return matrix.astype(np.float64)
