"""Symmetric matrices from files."""

import gzip
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse

from ritz.operators.base import LinearOperator
from ritz.operators.interop import as_operator

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
