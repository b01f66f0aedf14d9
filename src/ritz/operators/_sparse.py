"""Symmetric sparse matrices: compressed rows, and their product with a block of vectors."""

import os
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, TypeAlias, Union, final

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ritz._core.checks import check_finite, check_real_floating
from ritz.operators._base import LinearOperator, check_symmetric
from ritz.operators._native import LINE, Loop, compilable, pack_loop, product_loop

# ------------------------------------------------------------------------------------------
# Compressed rows of a sparse matrix, and their product with a block at the speed of memory.

PLAIN_COLUMNS = 4  # of a block, at which torch's own product is cheapest a column on the CPU
SMALL = 2**15  # entries: below, torch's own product is done before a loop would be compiled
PIECE = 2**16  # numbers to multiply: less is not worth another thread
PIECES = 4  # a thread, so that one that is held up leaves its share to the others
CHUNK = 2**22  # entries looked at together where a whole pass would need as much memory again


@final
class CompressedRows:
    r"""A square sparse matrix :math:`W` by rows: what the sparse operators multiply with.

    Row ``i`` has the entries ``pointers[i]:pointers[i + 1]``. Repeated entries add up. The tensors
    are shared, not copied, and not to be changed. Nothing is assumed of the order of the columns.

    On the CPU a block is multiplied in strips of one cache line, packed side by side, by a
    loop compiled for the processor (see ``native``) on as many threads as torch has; where
    llvmlite is not installed, on other devices and for small matrices, by torch. The two agree to
    roundoff. A compiled product is the same bit for bit whatever the number of threads, and its
    columns are what they would be alone.

    Args:
        pointers: ``(n + 1,)``, int32 or int64.
        columns: ``(num_entries,)``, int32 or int64.
        values: ``(num_entries,)``; ``None`` where all are one, which need not be stored.
        dtype: Of the matrix; that of the values by default, float64 without.

    Memory: the tensors, and one strip of ``n`` cache lines once a product was packed. Without
    values, torch's own product makes them.
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
        self._spare: deque[Tensor] = deque(maxlen=1)  # a strip not in use
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self._check()

    @property
    def width(self) -> int:
        """Columns of a block at which a product is cheapest a column."""
        return LINE // self.dtype.itemsize if self.device.type == "cpu" else 32

    def multiply(
        self,
        block: Tensor,
        *,
        inner: Tensor | None = None,
        outer: Tensor | None = None,
        diagonal: Tensor | None = None,
    ) -> Tensor:
        r"""Return :math:`a \circ W u + b \circ u`, ``(n, k)``, :math:`u = s \circ x`, in one pass.

        Args:
            block: :math:`x`, ``(n, k)``.
            inner: :math:`s`, ``(n,)``; ones by default.
            outer: :math:`a`, ``(n,)``; ones by default.
            diagonal: :math:`b`, ``(n,)``; zeros by default. Given with ``outer`` or not at all.
        """
        watched = block.requires_grad and torch.is_grad_enabled()
        large = self.device.type == "cpu" and self.num_entries >= SMALL
        by = self._compiled if large and not watched and compilable(self.dtype) else self._plain
        return by(block, inner, outer, diagonal)

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
        found = torch.zeros(self.num_rows, dtype=self.dtype, device=self.device)
        numbers, counts = torch.arange(self.num_rows, device=self.device), self.pointers.diff()
        for rows, part in self._chunks():
            columns = self.columns[part]
            own = numbers[rows].repeat_interleave(counts[rows].long()) == columns
            place = columns[own].long()
            values = (
                self.values[part][own] if self.values is not None else found.new_ones(len(place))
            )
            found.index_add_(0, place, values)
        return found

    def row_of(self, entry: int) -> int:
        """Return the row in which the entry of this number stands."""
        number = torch.tensor(entry, dtype=self.pointers.dtype, device=self.device)
        return int(torch.searchsorted(self.pointers, number, right=True)) - 1

    @cached_property
    def tensor(self) -> Tensor:
        """The matrix as a torch CSR tensor ``(n, n)``, where both indices have one type."""
        index = self.pointers.dtype if self.pointers.dtype == self.columns.dtype else torch.int64
        values = self.values
        if values is None:
            values = torch.ones(self.num_entries, dtype=self.dtype, device=self.device)
        with warnings.catch_warnings():
            # Neither tells a user of ours anything: the invariants were checked.
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
            warnings.filterwarnings("ignore", message=".*Sparse invariant checks are implicitly.*")
            return torch.sparse_csr_tensor(
                self.pointers.to(index),
                self.columns.to(index),
                values,
                size=(self.num_rows, self.num_rows),
                check_invariants=False,
            )

    def _compiled(
        self, block: Tensor, inner: Tensor | None, outer: Tensor | None, diagonal: Tensor | None
    ) -> Tensor:
        block = block if block.stride(1) == 1 else block.contiguous()
        out = _lines(block.numel() * self.dtype.itemsize).view(self.dtype).view(block.shape)
        for x, y in zip(block.split(self.width, 1), out.split(self.width, 1), strict=True):
            loop = self._loop(x.shape[1], outer is not None)
            lent = None
            if inner is not None or not x.is_contiguous() or x.data_ptr() % LINE:
                lent = self._borrow()
                x = self._pack(x, inner, lent)
            arrays = (self.pointers, self.columns, self.values, outer, diagonal, x, y)
            self._spread(
                loop, x.shape[1], self.num_entries - 1, y.stride(0), *map(_address, arrays)
            )
            if lent is not None:
                self._spare.append(lent)
        return out

    def _pack(self, x: Tensor, inner: Tensor | None, lines: Tensor) -> Tensor:
        packed = lines.view(self.dtype)[: x.numel()].view(x.shape)
        loop = pack_loop(x.shape[1], self.dtype, scaled=inner is not None)
        self._spread(loop, x.shape[1], x.stride(0), *map(_address, (inner, x, packed)))
        return packed

    def _borrow(self) -> Tensor:
        try:
            return self._spare.pop()
        except IndexError:  # the first product, or one of several at a time
            return _lines(self.num_rows * LINE)

    def _loop(self, width: int, affine: bool) -> Loop:
        return product_loop(
            width,
            self.dtype,
            pointer=self.pointers.dtype,
            column=self.columns.dtype,
            weighted=self.values is not None,
            affine=affine,
        )

    def _spread(self, loop: Loop, width: int, *arguments: int) -> None:
        # All rows through a loop, on all threads.
        threads = torch.get_num_threads()
        num_pieces = min(threads * PIECES, self.num_entries * width // PIECE)
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
            if not other.cancel():  # on a busy machine it may not have begun: nothing is left
                other.result()

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        # Whole rows and their entries, of which there are few enough to be copied.
        targets = torch.arange(0, self.num_entries + 1, CHUNK, device=self.device)
        cuts = torch.searchsorted(self.pointers, targets.to(self.pointers.dtype)).tolist()
        for first, last in pairwise(dict.fromkeys([*cuts, self.num_rows])):
            yield slice(first, last), slice(int(self.pointers[first]), int(self.pointers[last]))

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        if number not in self._cuts:
            # A row costs about two entries beside its own.
            cost = self.pointers + 2 * torch.arange(self.num_rows + 1)
            shares = torch.arange(1, number) * int(cost[-1]) // number
            cuts = [0, *torch.searchsorted(cost, shares).tolist(), self.num_rows]
            self._cuts[number] = list(pairwise(cuts))
        return self._cuts[number]

    def _plain(
        self, block: Tensor, inner: Tensor | None, outer: Tensor | None, diagonal: Tensor | None
    ) -> Tensor:
        u = block if inner is None else inner[:, None] * block
        if u.shape[1] == 1:
            product = torch.mv(self.tensor, u[:, 0])[:, None]
        elif self.device.type != "cpu" or u.shape[1] <= PLAIN_COLUMNS:
            product = torch.mm(self.tensor, u)
        else:
            strips = u.split(PLAIN_COLUMNS, 1)
            product = torch.cat([torch.mm(self.tensor, strip.contiguous()) for strip in strips], 1)
        if outer is None or diagonal is None:
            return product
        return outer[:, None] * product + diagonal[:, None] * u

    def _check(self) -> None:
        for name, array in (("pointers", self.pointers), ("columns", self.columns)):
            if array.ndim != 1 or array.dtype not in (torch.int32, torch.int64):
                kind = f"{array.dtype} of shape {tuple(array.shape)}"
                raise TypeError(f"{name} must be a vector of int32 or int64, got {kind}")
        if self.num_rows < 1:
            raise ValueError(
                f"pointers must be (n + 1,) with n at least 1, got {self.num_rows + 1}"
            )
        first, last = int(self.pointers[0]), int(self.pointers[-1])
        if (first, last) != (0, self.num_entries) or bool((self.pointers.diff() < 0).any()):
            raise ValueError(
                f"pointers must rise from 0 to the number of entries, {self.num_entries}, "
                f"got {first} to {last}"
            )
        if self.num_entries:
            low, high = (int(end) for end in self.columns.aminmax())
            if low < 0 or high >= self.num_rows:
                raise ValueError(
                    f"columns must be between 0 and {self.num_rows - 1}, got {low} to {high}"
                )
        if self.values is not None and self.values.shape != self.columns.shape:
            raise ValueError(
                f"values must be ({self.num_entries},), got {tuple(self.values.shape)}"
            )


def _lines(num_bytes: int) -> Tensor:
    # Bytes from the start of a line. NumPy asks for huge pages where there are many: a new page
    # and the address of a line then cost little.
    raw = np.empty(num_bytes + LINE, dtype=np.uint8)
    start = -raw.ctypes.data % LINE
    return torch.from_numpy(raw[start : start + num_bytes])


def _address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # Of this process: a child by fork has none of its parent's threads. They wait when idle.
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="ritz")


# ------------------------------------------------------------------------------------------
# Symmetric sparse matrices.


# Types in quotes are generic for type checkers alone.
SparseLike: TypeAlias = Union[
    Tensor, "scipy.sparse.sparray[Any, Any]", "scipy.sparse.spmatrix[Any]"
]


@final
class SparseOperator(LinearOperator):
    """A symmetric sparse matrix with both triangles stored; symmetry is checked by two products.

    Args:
        matrix: SciPy sparse matrix or array of any format, torch sparse tensor (CSR, COO), or
            :class:`CompressedRows`. Repeated entries are summed, as SciPy and torch do.

    Indices are kept in 32 bits where they fit, which halves what a product reads of them.
    Memory: 12 bytes an entry in float64, 8 in float32; 4 where ``CompressedRows`` has no values.
    """

    def __init__(self, matrix: SparseLike | CompressedRows) -> None:
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
