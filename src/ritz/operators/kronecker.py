"""Kronecker products."""

from typing import final

from torch import Tensor

from ritz.operators.base import LinearOperator


@final
class KroneckerOperator(LinearOperator):
    r"""The Kronecker product :math:`A \otimes B`; three factors are ``A ⊗ (B ⊗ C)``.

    Args:
        left: :math:`A`, of order ``p``.
        right: :math:`B`, of order ``q``; the product has order ``p q``. A product with ``k``
            columns is one of ``B`` with ``p k`` columns and one of ``A`` with ``q k``.
    """

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        if (left.dtype, left.device) != (right.dtype, right.device):
            raise ValueError(f"factors must agree in dtype and device: {left!r}, {right!r}")
        super().__init__(left.shape[0] * right.shape[0], dtype=left.dtype, device=left.device)
        self.left, self.right = left, right

    def _matmat(self, block: Tensor) -> Tensor:
        p, q, k = self.left.shape[0], self.right.shape[0], block.shape[1]
        inner = block.reshape(p, q, k).transpose(0, 1).reshape(q, p * k)
        inner = self.right.matmat(inner).reshape(q, p, k).transpose(0, 1).reshape(p, q * k)
        return self.left.matmat(inner).reshape(p * q, k)

    def _detail(self) -> str:
        return f"{type(self.left).__name__} ⊗ {type(self.right).__name__}"
