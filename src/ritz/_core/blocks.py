"""Inner products, norms and orthonormal bases of long blocks of vectors, accurate in float32."""

import torch
from torch import Tensor

# Entries per step of column_dots: small enough that the elementwise product stays in cache.
CHUNK = 2**17
# Rows per product of inner_products, products per step, and columns from which on one product
# serves. torch sums products of fewer than 12 columns row by row: in float32, the squared norm of
# 15 million random entries is 2.6 % too small, and that of 40 million equal ones 34 %. With 256
# rows the error of these is 1e-6. Of a million rows, blocks of equal width take 0.6 to 0.9 times as
# long as one product, and 20 columns with a single vector 6 times (20 ms).
ROWS, PRODUCTS, WIDE = 2**8, 2**10, 16
TALL = 2**12  # rows of a piece of orthonormalize


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


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``X'Y`` of ``X``, ``(n, k)``, and ``Y``, ``(n, l)`` or ``(n,)``, in float64."""
    if right.ndim == 1:
        return inner_products(left, right[:, None])[:, 0]
    if left.dtype == torch.float64 or min(left.shape[1], right.shape[1]) >= WIDE:
        return (left.T @ right).double()
    whole = len(left) - len(left) % ROWS
    total = left[whole:].double().T @ right[whole:].double()
    for start in range(0, whole, ROWS * PRODUCTS):
        stop = min(whole, start + ROWS * PRODUCTS)
        x, y = (block[start:stop].unflatten(0, (-1, ROWS)) for block in (left, right))
        total += (x.mT @ y).sum(0, dtype=torch.float64)
    return total


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
