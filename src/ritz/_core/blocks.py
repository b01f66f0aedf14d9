"""Inner products, norms and orthonormal bases of long blocks of vectors, accurate in float32."""

import math

import torch
from torch import Tensor

# Entries per step of column_dots: small enough that the elementwise product stays in cache.
CHUNK = 2**17
# torch sums a product of fewer than 12 columns row by row: in float32, the squared norm of 15
# million random entries is 2.6 % too small, and that of 40 million equal ones 34 %. In pieces of
# 256 rows these errors are 1e-6. For a million rows the pieces of two blocks of equal width take
# 0.6 to 0.9 times as long as one product, and those of 20 columns and a vector 6 times (20 ms).
ROWS = 2**8  # rows of a piece of inner_products
PIECES = 2**10  # pieces that are multiplied at once
WIDE = 16  # columns of both blocks from which on torch sums in blocks, so that pieces may be longer
LONG_ROWS = 2**13  # rows of these pieces, whose error is 3e-8, and 1e-6 if all entries are equal
TALL = 2**12  # rows of a piece of orthonormalize
# Entries that are summed in float32; the partial sums are added in float64. The error is then about
# eps sqrt(65536) = 3e-5. A sum of millions of entries in float32 loses half the digits.
SUMMED = 2**16


def column_dots(left: Tensor, right: Tensor) -> Tensor:
    r"""Return the inner products of columns :math:`\sum_i x_{il} y_{il}`, ``(k,)``, in float64."""
    rows = max(1, CHUNK // max(1, left.shape[1]))
    # In float64, because the rounding error of a float32 sum would look like sampling error.
    total = torch.zeros(left.shape[1], dtype=torch.float64, device=left.device)
    for x, y in zip(left.split(rows), right.split(rows), strict=True):
        total += (x.double() * y).sum(0)
    return total


def column_norms(block: Tensor) -> Tensor:
    """Return the norms of columns, ``(k,)``, in float64."""
    return column_dots(block, block).sqrt()


def power_of_two(tensor: Tensor) -> float:
    """Return the largest power of two up to the largest magnitude of an entry; 1 for zeros."""
    largest = float(tensor.abs().max())
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > 0 else 1.0


def euclidean_norm(tensor: Tensor) -> float:
    """Return the norm of all entries, whose squares may leave the range of the dtype."""
    unit = power_of_two(tensor)
    return unit * float((tensor / unit).norm())


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``X'Y`` of ``X``, ``(n, k)``, and ``Y``, ``(n, l)`` or ``(n,)``, in float64."""
    if right.ndim == 1:
        return inner_products(left, right[:, None])[:, 0]
    if left.dtype == torch.float64:
        return left.T @ right
    if min(left.shape[1], right.shape[1]) >= WIDE:
        total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
        for x, y in zip(left.split(LONG_ROWS), right.split(LONG_ROWS), strict=True):
            total += x.T @ y
        return total
    whole = len(left) - len(left) % ROWS
    total = left[whole:].double().T @ right[whole:].double()
    for start in range(0, whole, ROWS * PIECES):
        stop = min(whole, start + ROWS * PIECES)
        x, y = (block[start:stop].unflatten(0, (-1, ROWS)) for block in (left, right))
        total += (x.mT @ y).sum(0, dtype=torch.float64)
    return total


def row_products(rows: Tensor, vector: Tensor, *, length: int | None = None) -> Tensor:
    """Return ``V v`` of rows ``V``, ``(k, n)``, and ``v``, ``(n,)``, in float64.

    Args:
        rows: The rows.
        vector: The vector.
        length: Entries that are summed in the dtype of the rows. Defaults to
            :func:`summed_length`.
    """
    length = summed_length(vector) if length is None else length
    if len(vector) <= length:
        return torch.mv(rows, vector).double()
    pieces = zip(rows.split(length, 1), vector.split(length), strict=True)
    return torch.stack([torch.mv(*piece).double() for piece in pieces]).sum(0)


def summed_length(vector: Tensor) -> int:
    """Return how many entries of a vector can be summed in its dtype, and keep their digits."""
    # Float64 is accurate enough, and GPUs sum pairwise: neither needs sums of pieces.
    pieces = vector.device.type == "cpu" and vector.dtype != torch.float64
    return SUMMED if pieces else max(1, len(vector))


def orthonormalize(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``Q`` with orthonormal columns, and upper triangular ``R``, of block = QR."""
    basis: Tensor
    factor: Tensor
    if block.dtype in (torch.float16, torch.bfloat16):  # LAPACK has no half precision
        basis, factor = torch.linalg.qr(block.float())
        return basis.to(block), factor.to(block)
    if block.dtype == torch.float64 or len(block) < 2 * TALL or block.shape[1] > TALL:
        basis, factor = torch.linalg.qr(block)
        return basis, factor
    # LAPACK sums row by row as well: in float32, the columns of Q have norms of 1.0002 if they have
    # 4 million rows. So decompose pieces, and then their triangles: [Q_i R_i] = [Q_i] Q R.
    pieces = [torch.linalg.qr(piece) for piece in block.tensor_split(len(block) // TALL)]
    top, factor = torch.linalg.qr(torch.cat([triangle for _, triangle in pieces]).double())
    turns = top.to(block).split(block.shape[1])
    basis = torch.cat([piece @ turn for (piece, _), turn in zip(pieces, turns, strict=True)])
    return basis, factor.to(block)
