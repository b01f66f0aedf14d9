"""Cholesky factors of positive definite matrices, and the error that other matrices raise."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.random import draw_probes, resolve_generator
from ritz._core.sampling import ROUNDOFF
from ritz.operators import LinearOperator, exact


class NotPositiveDefiniteError(ValueError):
    """A matrix that must be positive definite has a direction of zero or negative curvature."""


def not_positive(kind: str, value: float) -> NotPositiveDefiniteError:
    """Return the error for an eigenvalue, Ritz value or pivot that is not positive."""
    return NotPositiveDefiniteError(f"op must be positive definite, got {kind} of {value:.6g}")


def cholesky_factor(matrix: Tensor, *, kind: str = "an eigenvalue") -> Tensor:
    """Return the lower Cholesky factor. The error describes the smallest eigenvalue as ``kind``."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise not_positive(kind, float(torch.linalg.eigvalsh(matrix.detach())[0]))
    return factor


def factor_roundoff(op: LinearOperator, solve: Callable[[Tensor], Tensor]) -> float:
    """Return the roundoff of a log determinant that was computed from a factor.

    Args:
        op: The matrix.
        solve: Solves systems with the factor, for a block of right-hand sides.

    Returns:
        The error, which is infinite if the matrix may be singular.
    """
    # The factor is that of A + E with |E_ij| of the order of eps max_k A_kk (Higham 2002, Theorem
    # 10.3), and d log det A = tr(A^{-1} E). For random vectors z, z'A^{-1}z has mean tr A^{-1}, and
    # |A^{-1}z|^2 has mean |A^{-1}|_F^2. The sum of n logarithms rounds as well.
    probes = draw_probes(op, 8, kind="gaussian", generator=resolve_generator(None)).double()
    inverse = solve(probes).to(probes)
    unit = torch.finfo(op.dtype).eps * float(
        torch.as_tensor(exact(op, "diagonal").value).abs().max()
    )
    if not is_below(unit * float(inverse.norm()) / 8**0.5, 1.0):
        return math.inf
    summed = torch.finfo(torch.float64).eps * len(probes)
    return ROUNDOFF * (unit * float((probes * inverse).sum(0).abs().mean()) + summed)
