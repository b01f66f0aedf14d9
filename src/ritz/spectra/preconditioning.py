"""Low-rank approximations of kernel matrices, for solving systems with them."""

from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz.operators.kernel import KernelOperator

EXHAUSTED = 1e-10  # share of the output scale below which a pivot is roundoff


@final
class LowRankPreconditioner:
    r"""The approximation :math:`P = L L^\top + \delta I` of a kernel matrix, inverted.

    :math:`L` is the Cholesky factor with the largest diagonal entry that is left as pivot, stopped
    after ``rank`` columns; :math:`\delta` is the noise and the mean of the diagonal it leaves.
    With :math:`L = U \Sigma V^\top` every power of :math:`P` is known. As
    :math:`L L^\top + \sigma^2 I \le K`, no eigenvalue of :math:`P^{-1/2} K P^{-1/2}` is below
    :math:`\sigma^2/\delta`.

    Cost: ``rank`` columns of the matrix and O(n rank²). Memory: two blocks ``(n, rank)``.

    Args:
        op: The kernel matrix, with noise.
        rank: Columns, at most ``n``.

    Attributes:
        pivots: The points that were chosen, in their order.

    Reference: Harbrecht, Peters and Schneider (2012); Gardner et al. (2018), Section 4.1.
    """

    def __init__(self, op: KernelOperator, *, rank: int) -> None:
        check_count("rank", rank)
        if not op.noise > 0:
            raise ValueError("noise of the kernel operator must be positive, got 0")
        factor, left, self.pivots = _pivoted(op, min(rank, op.shape[0]))
        self._basis, values, _ = torch.linalg.svd(factor, full_matrices=False)
        self._shift = op.noise + max(0.0, float(left.mean()))
        self._values = values.square() + self._shift

    def inverse(self, block: Tensor) -> Tensor:
        r"""Return :math:`P^{-1} X`, like ``block`` ``(n, k)``."""
        return self._power(block, -1.0)

    def inverse_root(self, block: Tensor) -> Tensor:
        r"""Return :math:`P^{-1/2} X`, like ``block`` ``(n, k)``."""
        return self._power(block, -0.5)

    def _power(self, block: Tensor, exponent: float) -> Tensor:
        outside = self._shift**exponent
        change = (self._values**exponent - outside)[:, None] * (self._basis.T @ block)
        return torch.addmm(outside * block, self._basis, change)


@torch.no_grad()
def _pivoted(op: KernelOperator, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Columns of the factor of the matrix without noise, the diagonal left, and the pivots."""
    n = op.shape[0]
    factor = torch.zeros(n, rank, dtype=op.dtype, device=op.device)
    left = torch.full((n,), op.outputscale, dtype=op.dtype, device=op.device)
    pivots: list[int] = []
    for done in range(rank):
        pivot = int(left.argmax())
        largest = float(left[pivot])
        if largest <= EXHAUSTED * op.outputscale:
            break
        column = op.cross(op.points[pivot : pivot + 1])[:, 0]
        column = column - factor[:, :done] @ factor[pivot, :done]
        factor[:, done] = column / largest**0.5
        left = left - factor[:, done].square()
        pivots.append(pivot)
    return factor[:, : len(pivots)], left, pivots
