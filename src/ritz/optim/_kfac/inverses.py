"""Inverses and eigenbases of factors, and products with them that are fast on a GPU."""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Strips in which an inverse is computed on a GPU.
STRIPS = 4
# Rows of a matrix on a GPU begin at multiples of so many numbers, 16 bytes in float32. Layers with
# a bias have odd orders, for which cuBLAS chose a kernel for unaligned rows (TF32, H200).
ALIGNED = 4


def inverse_of(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive definite matrix, by Cholesky factors if they exist."""
    root, info = torch.linalg.cholesky_ex(matrix)
    if not bool(info.any()):
        if root.is_cuda:
            return _inverse_by_products(root)
        # The symmetric result is stored by columns, so its transpose is contiguous without a copy.
        return torch.cholesky_inverse(root).mT.contiguous()
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
    if not matrix.is_cuda or matrix.shape != (n, n) or width == n:
        return matrix
    wide = matrix.new_zeros(width, width)
    wide[:n, :n] = matrix
    return wide[:n, :n]


def times(rows: Tensor, matrix: Tensor, *, transposed: bool = False) -> Tensor:
    """Return the product of rows ``(..., i)`` with a matrix ``(..., i, i)``, or its transpose."""
    n, width = matrix.shape[-1], matrix.stride(0)
    if matrix.ndim > 2 or width <= n:
        return rows @ (matrix.mT if transposed else matrix)
    # As many zeros behind each row as behind those of an `aligned` matrix.
    wide = matrix.as_strided((width, width), (width, 1))
    return (pad(rows, (0, width - n)) @ (wide.T if transposed else wide))[..., :n]
