"""Cholesky factors and their roundoff, and the error for a matrix that is not positive definite."""

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


def roundoff_probes(
    op: LinearOperator, solve: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, float]:
    r"""Return random vectors :math:`z`, :math:`a A^{-1} z`, and the relative size of roundoff.

    Here :math:`a = \max_k A_{kk}`. The size is infinite if the matrix may be singular.

    Args:
        op: The matrix.
        solve: Solves systems with its factor, for a block of right-hand sides.
    """
    probes = draw_probes(op, 8, kind="gaussian", generator=resolve_generator(None)).double()
    eps, largest = torch.finfo(op.dtype).eps, largest_entry(op)
    scaled = largest * solve(probes).to(probes)
    # |A^{-1} z|^2 has mean |A^{-1}|_F^2. If |E| |A^{-1}| < 1, then A + E is not singular.
    regular = is_below(eps * float(scaled.norm()) / 8**0.5, 1.0)
    return probes, scaled, ROUNDOFF * eps if regular else math.inf


def largest_entry(op: LinearOperator) -> float:
    """Return the largest entry of a positive definite matrix, which is on its diagonal."""
    return float(torch.as_tensor(exact(op, "diagonal").value).abs().max())


def factor_roundoff(op: LinearOperator, solve: Callable[[Tensor], Tensor]) -> float:
    """Return the roundoff of a log determinant that was computed from a factor.

    Args:
        op: The matrix.
        solve: Solves systems with the factor, for a block of right-hand sides.

    Returns:
        The error, which is infinite if the matrix may be singular.
    """
    # The factor is that of A + E with |E_ij| of the order of eps max_k A_kk (Higham 2002, Theorem
    # 10.3), and d log det A = tr(A^{-1} E). For random vectors z, z'A^{-1}z has mean tr A^{-1}. The
    # sum of n logarithms rounds as well.
    probes, scaled, unit = roundoff_probes(op, solve)
    summed = ROUNDOFF * torch.finfo(torch.float64).eps * len(probes)
    return unit * float((probes * scaled).sum(0).abs().mean()) + summed
