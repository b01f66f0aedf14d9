"""Operators with a structure: dense, diagonal, low-rank, block-diagonal and Kronecker."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_finite, check_tensor
from ritz.operators._base import LinearOperator, check_alike, check_symmetric

# ------------------------------------------------------------------------------------------
# Dense matrices.


@final
class DenseOperator(LinearOperator):
    """A symmetric matrix stored as a tensor. Two products check its symmetry.

    Args:
        matrix: ``(n, n)``, not copied.
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


# ------------------------------------------------------------------------------------------
# Diagonal matrices, and low-rank matrices plus a diagonal.


@final
class DiagonalOperator(LinearOperator):
    """The diagonal matrix with the entries ``(n,)``."""

    def __init__(self, entries: Tensor) -> None:
        if entries.ndim != 1:
            raise ValueError(f"entries must be a vector, got {tuple(entries.shape)}")
        super().__init__(len(entries), dtype=entries.dtype, device=entries.device)
        check_finite("entries", entries)
        self.entries = entries.detach()

    def _matmat(self, block: Tensor) -> Tensor:
        return self.entries[:, None] * block


@final
class LowRankOperator(LinearOperator):
    r"""The matrix :math:`U \operatorname{diag}(s) U^\top + \operatorname{diag}(d)`.

    Args:
        factors: :math:`U` of shape ``(n, r)``. Its columns need not be orthogonal.
        scales: :math:`s` of shape ``(r,)``, of either sign. Defaults to ones.
        entries: :math:`d` of shape ``(n,)``. Defaults to zeros.
    """

    def __init__(
        self, factors: Tensor, *, scales: Tensor | None = None, entries: Tensor | None = None
    ) -> None:
        if factors.ndim != 2:
            raise ValueError(f"factors must be (n, r), got {tuple(factors.shape)}")
        n, r = factors.shape
        super().__init__(n, dtype=factors.dtype, device=factors.device)
        self.factors = factors.detach()
        self.scales = factors.new_ones(r) if scales is None else scales.detach()
        self.entries = factors.new_zeros(n) if entries is None else entries.detach()
        for name, vector, rows in (("scales", self.scales, r), ("entries", self.entries, n)):
            check_tensor(name, vector, dtype=self.dtype, device=self.device, rows=rows)
            if vector.ndim != 1:
                raise ValueError(f"{name} must be ({rows},), got {tuple(vector.shape)}")
        for name in ("factors", "scales", "entries"):
            check_finite(name, getattr(self, name))
        self._detail = f"rank {r} plus diagonal"

    def _matmat(self, block: Tensor) -> Tensor:
        # U (s * (U' B)) + d * B, associated so that nothing larger than (n, k) is formed.
        inner = self.scales[:, None] * (self.factors.T @ block)
        return torch.addmm(self.entries[:, None] * block, self.factors, inner)


# ------------------------------------------------------------------------------------------
# Block-diagonal matrices.


@final
class BlockDiagonalOperator(LinearOperator):
    r"""The matrix :math:`\operatorname{diag}(A_1, \dots, A_m)`.

    A product costs one product with each block.

    Args:
        ops: The blocks, in order, of one dtype and device.
    """

    def __init__(self, ops: Sequence[LinearOperator]) -> None:
        self.ops = tuple(ops)
        first = check_alike("ops", self.ops)
        self.sizes = [op.shape[0] for op in ops]
        width = min(op.block_size for op in ops)
        super().__init__(sum(self.sizes), dtype=first.dtype, device=first.device, block_size=width)
        self._detail = f"{len(self.ops)} blocks"

    def _matmat(self, block: Tensor) -> Tensor:
        parts = block.split(self.sizes)
        return torch.cat([op.matmat(part) for op, part in zip(self.ops, parts, strict=True)])


# ------------------------------------------------------------------------------------------
# Kronecker products.


@final
class KroneckerOperator(LinearOperator):
    r"""The Kronecker product :math:`A \otimes B`; three factors are ``A ⊗ (B ⊗ C)``.

    Args:
        left: :math:`A`, of order ``p``.
        right: :math:`B`, of order ``q``. The Kronecker product has order ``p q``.

    A product with ``k`` columns costs one product of ``B`` with ``p k`` columns and one of ``A``
    with ``q k`` columns.
    """

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        check_alike("factors", (left, right))
        super().__init__(left.shape[0] * right.shape[0], dtype=left.dtype, device=left.device)
        self.left, self.right = left, right
        self._detail = f"{type(left).__name__} ⊗ {type(right).__name__}"

    def _matmat(self, block: Tensor) -> Tensor:
        # (A x B) vec(X) = vec(B X A') for X of shape (q, p): first B, then A, by reshaping.
        p, q, k = self.left.shape[0], self.right.shape[0], block.shape[1]
        inner = block.reshape(p, q, k).transpose(0, 1).reshape(q, p * k)
        inner = self.right.matmat(inner).reshape(q, p, k).transpose(0, 1).reshape(p, q * k)
        return self.left.matmat(inner).reshape(p * q, k)
