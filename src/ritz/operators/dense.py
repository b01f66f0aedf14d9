"""A symmetric matrix that is written down."""

from typing import final

from torch import Tensor

from ritz._core.checks import check_finite
from ritz.operators.base import LinearOperator, check_symmetric


@final
class DenseOperator(LinearOperator):
    """A symmetric matrix given as a tensor; its symmetry is checked by two products.

    Args:
        matrix: ``(n, n)``, kept, not copied.
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix must be square, got {tuple(matrix.shape)}")
        super().__init__(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
        check_finite("matrix", matrix)
        self.matrix = matrix.detach()
        check_symmetric(self)

    def _matmat(self, block: Tensor) -> Tensor:
        return self.matrix @ block
