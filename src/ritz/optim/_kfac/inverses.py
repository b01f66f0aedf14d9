"""Inverses and eigenbases of factors, and products with them that are fast on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Streams on which a GPU computes inverses, as a Cholesky decomposition alone uses a part of it. The
# inverses of VGG-16 took 73 ms on 1 stream, 57 on 4, 54 on 8 and 53 on 12 (H200). With larger
# matrices there are fewer streams: at most so many bytes, of which each needs five matrices.
LANES = 8
TEMPORARY = 2**32
# Strips in which an inverse is computed on a GPU.
STRIPS = 4
# Rows of a matrix on a GPU begin at multiples of so many numbers, 16 bytes in float32. Layers with
# a bias have odd orders, for which cuBLAS chose a kernel for unaligned rows (TF32, H200).
ALIGNED = 4


def inverses_of(
    matrices: Sequence[Callable[[], Tensor]], device: torch.device, *, largest: int
) -> list[Tensor]:
    """Return the inverses of positive definite matrices, by Cholesky factors if they exist.

    Args:
        matrices: Functions that compute the matrices, so that only a few exist at the same time.
        device: Device of the matrices.
        largest: Size of the largest matrix in bytes.
    """
    inverses, infos = [], []
    with _side_by_side(device, max(1, TEMPORARY // (5 * largest))) as lane:
        for number, matrix in enumerate(matrices):
            with lane(number):
                inverse, info = _inverse_by_cholesky(matrix())
            inverses.append(inverse)
            infos.append(info)
    # Read together, so that a GPU is waited for once.
    failed = torch.stack([info.to(device) for info in infos]).tolist() if infos else []
    for number, matrix in enumerate(matrices):
        if failed[number]:
            inverses[number] = _inverse_by_eigen(matrix())
    if device.type == "cuda":
        for inverse in inverses:
            inverse.record_stream(torch.cuda.current_stream(device))
    return inverses


@contextmanager
def _side_by_side(
    device: torch.device, limit: int
) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
    """Context manager for independent operations, of which a GPU runs some at the same time.

    Yields a function of the number of an operation, which returns the context manager of the
    operation.
    """
    if device.type != "cuda":
        yield lambda number: nullcontext()
        return
    main, lanes = torch.cuda.current_stream(device), _lanes(device)[:limit]
    for lane in lanes:
        lane.wait_stream(main)
    try:
        yield lambda number: torch.cuda.stream(lanes[number % len(lanes)])
    finally:
        for lane in lanes:
            main.wait_stream(lane)


@cache
def _lanes(device: torch.device) -> list[torch.cuda.Stream]:
    # Always the same streams: cuBLAS keeps a workspace for each.
    return [torch.cuda.Stream(device) for _ in range(LANES)]


def _inverse_by_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse, and a number that is zero if there is a Cholesky factor."""
    root, info = torch.linalg.cholesky_ex(matrix)
    failed = info.amax()
    if root.is_cuda:
        return _inverse_by_products(root), failed
    if bool(failed):
        return matrix, failed
    # The symmetric result is stored by columns, so its transpose is contiguous without a copy.
    return torch.cholesky_inverse(root).mT.contiguous(), failed


def _inverse_by_eigen(matrix: Tensor) -> Tensor:
    # An eigenvalue is negative by roundoff: the damping is below eps times the largest eigenvalue.
    values, basis = eigen(matrix)
    floor = torch.finfo(matrix.dtype).eps * values[..., -1:]
    inverse: Tensor = (basis / values.maximum(floor).unsqueeze(-2)) @ basis.mT
    return inverse.contiguous()


def _inverse_by_products(root: Tensor) -> Tensor:
    r"""Return :math:`(L L^\top)^{-1} = X^\top X` with :math:`X = L^{-1}`, both ``(..., n, n)``.

    A GPU is faster at products than at the second triangular system of ``cholesky_inverse``.
    """
    n = root.shape[-1]
    identity = torch.eye(n, dtype=root.dtype, device=root.device).expand_as(root)
    X = torch.linalg.solve_triangular(root, identity, upper=False)
    inverse, size = torch.empty_like(X), -(-n // STRIPS)
    for start in range(0, n, size):
        # X is lower triangular, so columns from `start` on are zero in the rows above. The part
        # below the diagonal is a copy: 0.47 of the operations of X'X.
        columns = X[..., start:, start:]
        strip = columns[..., :size].mT @ columns
        inverse[..., start : start + size, start:] = strip
        inverse[..., start:, start : start + size] = strip.mT
    return inverse


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric matrix that may be nearly singular."""
    # Scaled, because squares of derivatives may be subnormal near the end of training.
    scale = matrix.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = matrix / scale
    try:
        values, basis = torch.linalg.eigh(scaled)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Divide and conquer may fail in float32 for thousands of eigenvalues at zero.
        values, basis = (part.to(matrix) for part in torch.linalg.eigh(scaled.double()))
    return values * scale[..., 0], basis


def eigenbasis(factor: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    """Return ``basis`` and ``values`` of a factor.

    Without an earlier basis they are computed by ``eigh``. Otherwise one step of orthogonal
    iteration starts from the earlier basis. If the factor has changed little, the result is close
    to the eigenbasis. The step costs two products and a QR factorisation, which on the CPU is not
    less than ``eigh``.
    """
    # QR of F U is one step of orthogonal iteration. It converges over several updates.
    if before is None:
        values, basis = eigen(factor)
    else:
        basis = torch.linalg.qr(factor @ before).Q
        values = (basis * (factor @ basis)).sum(-2)
    # Zero eigenvalues may be negative by roundoff. Contiguous, as after loading from a file, since
    # the last bits of products depend on strides.
    return {"basis": basis.contiguous(), "values": values.clamp_min(0)}


def aligned(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows on a GPU are followed by zeros, so that :func:`times` is fast."""
    n = matrix.shape[-1]
    width = -(-n // ALIGNED) * ALIGNED
    if not matrix.is_cuda or matrix.shape != (n, n) or width == n or n == 1:
        return matrix
    wide = matrix.new_zeros(width, width)
    wide[:n, :n] = matrix
    return wide[:n, :n]


def num_zeros(matrix: Tensor) -> int:
    """Return how many zeros follow each row of a matrix from :func:`aligned`."""
    # The stride of a single row means nothing.
    rows = matrix.ndim == 2 and len(matrix) > 1
    return max(0, matrix.stride(0) - matrix.shape[1]) if rows else 0


def times(rows: Tensor, matrix: Tensor, *, transposed: bool = False) -> Tensor:
    """Return the product of rows with a matrix ``(..., i, i)``, or with its transpose.

    Args:
        rows: ``(..., i)``, with or without :func:`num_zeros` zeros behind each.
        matrix: The matrix.
        transposed: Multiply by the transpose.
    """
    n, zeros = matrix.shape[-1], num_zeros(matrix)
    if not zeros:
        return rows @ (matrix.mT if transposed else matrix)
    wide = matrix.as_strided((n + zeros, n + zeros), (n + zeros, 1))
    if rows.shape[-1] == n:
        rows = pad(rows, (0, zeros))
    return (rows @ (wide.T if transposed else wide))[..., :n]
