"""`FunctionOperator`, `as_operator`, `read_matrix`: functions, matrices and files as operators."""

import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union, final

import numpy as np
import scipy.io
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor
from typing_extensions import TypeAliasType

from ritz._core.checks import check_device, check_type
from ritz.operators._base import LinearOperator
from ritz.operators._laplacian import is_networkx
from ritz.operators._sparse import SparseOperator
from ritz.operators._structured import DenseOperator

# ------------------------------------------------------------------------------------------
# User-defined products.


@final
class FunctionOperator(LinearOperator):
    """The matrix whose product with a block is computed by a function.

    Symmetry is not checked when the operator is created. :func:`ritz.operators.check_symmetric`
    checks it with two products, and every Lanczos run checks it without additional products.

    The function must be the same in every call. The same checks notice a matrix that changes
    within a run, but not if it changes by a multiple of the identity. Only
    :func:`ritz.eigenpairs`, :func:`ritz.solve`, :func:`ritz.spectra.moments`, runs that resume and
    :func:`ritz.testing.check_operator` compare two products of one vector. The other functions do
    not, because it would take an additional product in each run.

    Args:
        function: Takes a block ``(n, k)`` and returns the product ``(n, k)``. With
            ``columnwise`` it takes and returns a vector ``(n,)``.
        n: Number of rows of the matrix.
        dtype: Data type of the blocks. Defaults to ``torch.float32``.
        device: Device of the blocks. Defaults to the CPU.
        columnwise: The function takes one vector at a time. Defaults to ``False``.
        name: Name in ``repr``. Defaults to the name of the function.

    Example:
        >>> op = FunctionOperator(lambda block: 2 * block, n=3)
        >>> op @ torch.ones(3)
        tensor([2., 2., 2.])
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        n: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        columnwise: bool = False,
        name: str | None = None,
    ) -> None:
        check_type("function", function, Callable, "a function of a block")
        super().__init__(n, dtype=dtype, device=check_device(device))
        self.function, self.columnwise = function, columnwise
        default = getattr(function, "__name__", type(function).__name__)
        self._detail = default if name is None else name

    def _matmat(self, block: Tensor) -> Tensor:
        if not self.columnwise:
            product = self.function(block)
        else:
            product = torch.stack([self.function(column) for column in block.T], dim=1)
        if not isinstance(product, Tensor) or product.shape != block.shape:
            got = tuple(product.shape) if isinstance(product, Tensor) else type(product).__name__
            raise ValueError(f"{self._detail} must return a tensor {tuple(block.shape)}, got {got}")
        product = product.detach()  # a product by autograd may still have its graph
        # The function may return its argument, but callers may modify the product in place.
        shared = product.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
        return product.clone() if shared else product


# ------------------------------------------------------------------------------------------
# Matrices of other libraries.


# An alias that signatures show by its name. Types in quotes are generic for type checkers alone.
OperatorLike = TypeAliasType(
    "OperatorLike",
    Union[
        LinearOperator,
        Tensor,
        "np.ndarray[Any, Any]",
        "scipy.sparse.sparray[Any, Any]",
        "scipy.sparse.spmatrix[Any]",
        "ScipyOperator[Any]",
    ],
)


def as_operator(x: OperatorLike) -> LinearOperator:
    """Return ``x`` as an operator. Every function that takes an operator calls this.

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
        return DenseOperator(_from_numpy(x))
    if isinstance(x, ScipyOperator):
        return _from_scipy(x)
    if is_networkx(x) or type(x).__module__.startswith("ritz.graphs"):
        raise TypeError(
            "op must be one matrix, but a graph has several: "
            "pass ritz.graphs.laplacian(graph, matrix=...)"
        )
    raise TypeError(
        "op must be a symmetric matrix (tensor, NumPy array or SciPy sparse matrix), an operator "
        "of ritz or SciPy, or a function in ritz.operators.FunctionOperator(function, n=...), "
        f"got {type(x).__name__}"
    )


def _from_numpy(x: "np.ndarray[Any, Any]") -> Tensor:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("matrix must have no mask, got a masked array: use its method filled")
    if x.dtype.kind in "biu":
        raise TypeError(f"matrix must be float32 or float64, got {x.dtype}: convert with astype")
    native = x.astype(x.dtype.newbyteorder("="), copy=False)
    try:
        return torch.from_numpy(np.require(native, requirements=["C", "W"]))
    except TypeError as error:  # torch has no such type
        raise TypeError(
            f"matrix must be float32 or float64, got {x.dtype}: convert with astype"
        ) from error


def _from_scipy(x: Any) -> FunctionOperator:
    if x.shape[0] != x.shape[1]:
        raise ValueError(f"op must be square, got {x.shape}")
    dtype = torch.from_numpy(np.empty(0, dtype=x.dtype or np.float64)).dtype

    def scipy_product(block: Tensor) -> Tensor:
        # A copy, since SciPy may return its argument, or a read-only array.
        return torch.tensor(x.matmat(block.numpy()), dtype=dtype)

    return FunctionOperator(scipy_product, n=x.shape[0], dtype=dtype, name=type(x).__name__)


# ------------------------------------------------------------------------------------------
# Symmetric matrices from files.

MATRIX_FILES = (".mtx", ".mtx.gz", ".npz", ".npy")
_CONTENTS = {
    ".npz": "a symmetric matrix saved by scipy.sparse.save_npz",
    ".npy": "a symmetric matrix saved by numpy.save",
}


def read_matrix(path: str | os.PathLike[str]) -> LinearOperator:
    """Return the symmetric matrix of a file. Pickled objects are not loaded.

    Args:
        path: Matrix Market (``.mtx``, ``.mtx.gz``), ``.npz`` as written by
            ``scipy.sparse.save_npz``, or ``.npy`` as written by ``numpy.save``.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no matrix file {str(file)!r}")
    if not file.name.endswith(MATRIX_FILES):
        kinds = ", ".join(MATRIX_FILES)
        raise ValueError(f"a matrix file must end in one of {kinds}, got {str(file)!r}")
    readers: dict[str, Any] = {".npz": scipy.sparse.load_npz, ".npy": np.load}
    try:
        matrix = readers.get(file.suffix, scipy.io.mmread)(file)
        if np.issubdtype(matrix.dtype, np.complexfloating):
            raise ValueError(f"it must contain real numbers, got {matrix.dtype}")
        return as_operator(matrix.astype(np.float64))
    except (ValueError, TypeError, KeyError, OSError, OverflowError, MemoryError,
            EOFError, zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        kind = _CONTENTS.get(file.suffix, "a symmetric matrix")
        raise ValueError(f"{str(file)!r} must contain {kind}: {error}") from error
