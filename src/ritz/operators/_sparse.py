"""`SparseOperator`; `CompressedRows`, whose block product is limited by memory bandwidth alone."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, TypeAlias, Union, final

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from typing_extensions import TypeAliasType

from ritz._core.checks import check_finite, check_range, check_real_floating
from ritz.operators._base import LinearOperator, check_symmetric

# ------------------------------------------------------------------------------------------
# Compressed rows of a sparse matrix, and their product with a block at the speed of memory.

LINE = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes that decide how a sparse product is computed, measured with ``benchmarks/graphs.py``.

    Attributes:
        min_entries: Number of entries from which the compiled loop is used. For a smaller matrix
            torch takes less than 0.1 ms.
        plain_columns: Columns per call of torch's product on the CPU. In float64 a column takes
            4.7 ms alone, 1.65 ms in blocks of 4, 1.75 ms of 8 and 4.4 ms of 32.
        numbers_per_piece: Number of multiplications per piece of work: about 0.1 ms.
        pieces_per_thread: Number of pieces per thread. With more than one, other threads take over
            the work of a thread that the operating system has suspended.
        chunk: Number of entries that :meth:`CompressedRows.sums` and ``diagonal`` copy at once.
    """

    min_entries: int = 2**15
    plain_columns: int = 4
    numbers_per_piece: int = 2**16
    pieces_per_thread: int = 4
    chunk: int = 2**22


TUNING = Tuning()

# Vectors ``(n,)`` that are applied during a product: s to the block, and a and b to the rows.
Scaling: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


@final
class CompressedRows:
    r"""A square sparse matrix :math:`W`, stored by rows.

    Row ``i`` has the entries ``pointers[i]:pointers[i + 1]``. Repeated entries add up, and columns
    may be in any order. The tensors are shared, not copied, and must not be changed.

    On the CPU a loop compiled by numba (see ``_native``) multiplies strips of the block that are
    one cache line wide, with as many threads as torch uses. Torch computes the product without
    numba, on other devices and for small matrices. The two agree to roundoff. The compiled product
    is reproducible bit for bit for any number of threads, and each of its columns equals the
    product with that column alone.

    Args:
        pointers: ``(n + 1,)``, int32 or int64.
        columns: ``(num_entries,)``, int32 or int64.
        values: ``(num_entries,)``. ``None`` means that all values are one.
        dtype: Data type of the matrix. Defaults to that of the values, or float64 without values.

    Memory: the tensors, and one strip of ``n`` cache lines after the first product that copies a
    strip of the block. Without values, torch's product allocates a vector of ones.
    """

    def __init__(
        self,
        pointers: Tensor,
        columns: Tensor,
        values: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is None:
            dtype = torch.float64 if values is None else values.dtype
        check_real_floating("values", dtype)
        self.pointers, self.columns = pointers.contiguous(), columns.contiguous()
        self.values = None if values is None else values.detach().to(dtype).contiguous()
        self.dtype, self.device = dtype, columns.device
        self.num_rows, self.num_entries = len(pointers) - 1, len(columns)
        self._spare: deque[Tensor] = deque(maxlen=1)  # a strip that no product is using
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self._check()

    @property
    def width(self) -> int:
        """Number of columns of a block at which a product is cheapest per column."""
        return LINE // self.dtype.itemsize if self.device.type == "cpu" else 32

    def multiply(self, block: Tensor, scaling: Scaling = (None, None, None)) -> Tensor:
        r"""Return :math:`a \circ W u + b \circ u`, ``(n, k)``, with :math:`u = s \circ x`.

        Args:
            block: :math:`x`, ``(n, k)``.
            scaling: :math:`s, a, b`, each ``(n,)``. ``None`` means ones, ones and zeros. If
                :math:`a` is passed, :math:`b` must be passed too.
        """
        compiled = (
            self.device.type == "cpu"
            and self.num_entries >= TUNING.min_entries
            and self.dtype in (torch.float32, torch.float64)
            and not (block.requires_grad and torch.is_grad_enabled())
            and native_loops() is not None
        )
        return (self._compiled if compiled else self._plain)(block, scaling)

    def sums(self) -> Tensor:
        """Return the sum of the absolute values of each row, ``(n,)``, in float64."""
        counts = self.pointers.diff().long()
        if self.values is None:
            return counts.double()
        parts = [
            torch.segment_reduce(self.values[part].abs().double(), "sum", lengths=counts[rows])
            for rows, part in self._chunks()
        ]
        return torch.cat(parts)

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``(n,)``."""
        if self.device.type == "cpu" and self.values is not None:  # 25 times as fast
            parts = (self.values.numpy(), self.columns.numpy(), self.pointers.numpy())
            square = (self.num_rows, self.num_rows)
            return torch.from_numpy(scipy.sparse.csr_array(parts, shape=square).diagonal())
        diagonal = torch.zeros(self.num_rows, dtype=self.dtype, device=self.device)
        numbers, counts = torch.arange(self.num_rows, device=self.device), self.pointers.diff()
        for rows, part in self._chunks():
            columns = self.columns[part]
            on_diagonal = numbers[rows].repeat_interleave(counts[rows].long()) == columns
            index = columns[on_diagonal].long()
            ones = diagonal.new_ones(len(index))
            values = ones if self.values is None else self.values[part][on_diagonal]
            diagonal.index_add_(0, index, values)
        return diagonal

    @cached_property
    def tensor(self) -> Tensor:
        """The matrix as a torch CSR tensor ``(n, n)``, with indices of one type."""
        index = torch.promote_types(self.pointers.dtype, self.columns.dtype)
        values = self.values
        if values is None:
            values = torch.ones(self.num_entries, dtype=self.dtype, device=self.device)
        with warnings.catch_warnings():
            # Users of ritz do not need these warnings. The invariants are checked in __init__.
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
            warnings.filterwarnings("ignore", message=".*Sparse invariant checks are implicitly.*")
            return torch.sparse_csr_tensor(
                self.pointers.to(index),
                self.columns.to(index),
                values,
                size=(self.num_rows, self.num_rows),
                check_invariants=False,
            )

    def _compiled(self, block: Tensor, scaling: Scaling) -> Tensor:
        (n, k), (inner, *rest) = block.shape, scaling
        block = block.detach() if block.stride(1) == 1 else block.detach().contiguous()
        out = _lines(block.numel() * self.dtype.itemsize).view(self.dtype)
        matrix = [_array(x) for x in (self.pointers, self.columns, self.values, *rest)]
        loops = native_loops()
        # One pass over the matrix per strip. All columns of a strip share the entries.
        for first in range(0, k, self.width):
            x, strip = block[:, first : first + self.width], None
            width = x.shape[1]
            if inner is not None or not x.is_contiguous() or x.data_ptr() % LINE:
                strip = self._borrow()
                packed = strip.view(self.dtype)[: n * width].view(n, width)
                self._spread(loops.pack_loop, width, _array(inner), x.numpy(), packed.numpy())
                x = packed
            arrays = (*matrix, x.view(-1).numpy(), out.numpy())
            self._spread(loops.product_loop(width), width, *arrays, first, k)
            if strip is not None:
                self._spare.append(strip)
        return out.view(n, k)

    def _borrow(self) -> Tensor:
        try:
            return self._spare.pop()
        except IndexError:  # the first product, or another thread is multiplying too
            return _lines(self.num_rows * LINE)

    def _spread(self, loop: Callable[..., None], width: int, *arguments: Any) -> None:
        # Run a loop over all rows, on as many threads as torch uses. numba's parallel=True takes
        # 1.3 to 1.5 times as long (benchmarks/loops.py). It also crashes a forked process and,
        # without OpenMP, a process in which two threads multiply.
        threads = torch.get_num_threads()
        num_pieces = min(
            threads * TUNING.pieces_per_thread,
            self.num_entries * width // TUNING.numbers_per_piece,
        )
        if threads == 1 or num_pieces < 2:
            loop(0, self.num_rows, *arguments)
            return
        pieces = deque(self._pieces(num_pieces))

        def work() -> None:
            while pieces:
                try:
                    piece = pieces.popleft()
                except IndexError:  # another thread was faster
                    return
                loop(*piece, *arguments)

        helpers = min(threads, num_pieces) - 1
        others = [_pool(os.getpid(), threads).submit(work) for _ in range(helpers)]
        work()
        for other in others:
            if not other.cancel():  # a helper that has not begun has nothing left to do
                other.result()

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        # Whole rows and their entries, few enough to be copied.
        targets = torch.arange(0, self.num_entries + 1, TUNING.chunk, device=self.device)
        cuts = torch.searchsorted(self.pointers, targets.to(self.pointers.dtype)).tolist()
        for first, last in pairwise(dict.fromkeys([*cuts, self.num_rows])):
            yield slice(first, last), slice(int(self.pointers[first]), int(self.pointers[last]))

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        if number not in self._cuts:
            # Cost of a row: its entries, and about two more for its start and its end.
            cost = self.pointers + 2 * torch.arange(self.num_rows + 1)
            shares = torch.arange(1, number) * int(cost[-1]) // number
            cuts = [0, *torch.searchsorted(cost, shares).tolist(), self.num_rows]
            self._cuts[number] = list(pairwise(cuts))
        return self._cuts[number]

    def _plain(self, block: Tensor, scaling: Scaling = (None, None, None)) -> Tensor:
        inner, outer, diagonal = scaling
        u = block if inner is None else inner[:, None] * block
        if u.shape[1] == 1:
            product = torch.mv(self.tensor, u[:, 0])[:, None]
        elif self.device.type != "cpu":
            product = torch.mm(self.tensor, u)
        else:
            strips = u.split(TUNING.plain_columns, 1)
            product = torch.cat([torch.mm(self.tensor, strip.contiguous()) for strip in strips], 1)
        if outer is None or diagonal is None:
            return product
        return outer[:, None] * product + diagonal[:, None] * u

    def _check(self) -> None:
        for name, array in (("pointers", self.pointers), ("columns", self.columns)):
            if array.ndim != 1 or array.dtype not in (torch.int32, torch.int64):
                kind = f"{array.dtype} of shape {tuple(array.shape)}"
                raise TypeError(f"{name} must be a vector of int32 or int64, got {kind}")
        first, last = int(self.pointers[0]), int(self.pointers[-1])
        if (first, last) != (0, self.num_entries) or bool((self.pointers.diff() < 0).any()):
            raise ValueError(
                f"pointers must not decrease, from 0 to {self.num_entries} entries, "
                f"got {first} to {last}"
            )
        # The compiled loop does not check bounds.
        for end in self.columns.aminmax() if self.num_entries else ():
            check_range("columns", int(end), low=0, high=self.num_rows - 1)
        if self.values is not None and self.values.shape != self.columns.shape:
            shape = tuple(self.values.shape)
            raise ValueError(f"values must be ({self.num_entries},), got {shape}")


@cache
def native_loops() -> Any:
    """Return the module of compiled loops, or ``None`` without numba or a writable cache."""
    try:
        from ritz.operators import _native
    except (ImportError, RuntimeError):
        return None
    return _native


def _lines(num_bytes: int) -> Tensor:
    # Memory that begins at a cache line. Allocated by NumPy, which requests huge pages for large
    # arrays, so that page faults and address translation cost little.
    raw = np.empty(num_bytes + LINE, dtype=np.uint8)
    start = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[start : start + num_bytes])


def _array(tensor: Tensor | None) -> "np.ndarray[Any, Any] | None":
    return None if tensor is None else tensor.numpy()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # One per process: a forked child has none of the threads of its parent.
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="ritz")


# ------------------------------------------------------------------------------------------
# Symmetric sparse matrices.


# An alias that signatures show by its name. Types in quotes are generic for type checkers alone.
SparseLike = TypeAliasType(
    "SparseLike", Union[Tensor, "scipy.sparse.sparray[Any, Any]", "scipy.sparse.spmatrix[Any]"]
)


@final
class SparseOperator(LinearOperator):
    """A symmetric sparse matrix with both triangles stored.

    Symmetry is checked with two products, so a matrix with a single triangle raises.

    Args:
        matrix: SciPy sparse matrix or array of any format, torch sparse tensor (CSR, COO), or
            :class:`CompressedRows`. Repeated entries are summed, as SciPy and torch do.

    Indices are stored in 32 bits if they fit, since a product is limited by memory bandwidth.
    Memory: 12 bytes per entry in float64, 8 in float32, 4 if ``CompressedRows`` has no values.
    """

    def __init__(self, matrix: SparseLike | CompressedRows) -> None:
        rows = as_rows(matrix, name="matrix")
        super().__init__(rows.num_rows, dtype=rows.dtype, device=rows.device, block_size=rows.width)
        if rows.values is not None:
            check_finite("matrix", rows.values)
        self.rows, self._detail = rows, f"{rows.num_entries:,} entries"
        check_symmetric(self)

    @property
    def matrix(self) -> Tensor:
        """The matrix as a torch CSR tensor ``(n, n)``."""
        return self.rows.tensor

    def _matmat(self, block: Tensor) -> Tensor:
        return self.rows.multiply(block)


def as_rows(matrix: Any, *, name: str, dtype: torch.dtype | None = None) -> CompressedRows:
    """Return any sparse matrix as compressed rows, sharing memory if possible.

    Args:
        matrix: See :class:`SparseOperator`.
        name: Name of the argument, for errors.
        dtype: Of the values, which may then be integers. Defaults to their dtype.
    """
    if isinstance(matrix, CompressedRows):
        if dtype in (None, matrix.dtype):
            return matrix
        return CompressedRows(matrix.pointers, matrix.columns, matrix.values, dtype=dtype)
    pointers, columns, values = _parts(matrix, name, dtype)
    shape = matrix.shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} must be square, got {tuple(shape)}")
    pointers, columns = (
        index.to(torch.int32 if bound < 2**31 else torch.int64)
        for index, bound in ((pointers, len(values)), (columns, shape[0]))
    )
    return CompressedRows(pointers, columns, values, dtype=dtype)


def _parts(matrix: Any, name: str, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(matrix, Tensor):
        matrix = matrix.detach()
        if matrix.layout == torch.strided:
            raise TypeError(f"{name} must be sparse (SciPy or torch), got a dense tensor")
        if matrix.layout in (torch.sparse_bsr, torch.sparse_bsc):
            raise TypeError(f"{name} must be in COO, CSR or CSC format, got {matrix.layout}")
        matrix = matrix if dtype is None else matrix.to(dtype)
        matrix = matrix.to_sparse_csr()  # which sums repeated entries
        return matrix.crow_indices(), matrix.col_indices(), matrix.values()
    if not scipy.sparse.issparse(matrix):
        raise TypeError(f"{name} must be sparse (SciPy or torch), got {type(matrix).__name__}")
    csr: Any = matrix
    if dtype is not None:  # before duplicates are summed: the sum of two booleans is one
        csr = csr.astype(torch.empty(0, dtype=dtype).numpy().dtype, copy=False)
    csr = scipy.sparse.csr_array(csr)
    if not csr.has_canonical_format:
        csr = csr.copy()
        csr.sum_duplicates()
    if csr.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must be float32 or float64, got {csr.dtype}: convert with astype")
    # Read-only arrays, such as those of a memory-mapped file, are copied.
    pointers, columns, values = (
        torch.from_numpy(np.require(part, requirements="W"))
        for part in (csr.indptr, csr.indices, csr.data)
    )
    return pointers, columns, values
