"""Dense, diagonal, low-rank, block-diagonal, Kronecker, shifted, deflated, restricted operators."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ritz._core.blocks import inner_products
from ritz._core.checks import (
    check_finite,
    check_number,
    check_range,
    check_tensor,
    check_type,
    is_below,
)
from ritz._core.distributed import Group, all_sum, world_size
from ritz.operators._base import (
    LinearOperator,
    WrappingOperator,
    check_alike,
    check_symmetric,
)

# ------------------------------------------------------------------------------------------
# Dense matrices.


@final
class DenseOperator(LinearOperator):
    """A symmetric matrix stored as a tensor. Its symmetry is checked with two products.

    Args:
        matrix: ``(n, n)``, not copied.
    """

    def __init__(self, matrix: Tensor) -> None:
        check_type("matrix", matrix, Tensor, "a torch.Tensor (ritz.as_operator takes others)")
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
        check_type("entries", entries, Tensor, "a torch.Tensor")
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
        check_type("factors", factors, Tensor, "a torch.Tensor")
        if factors.ndim != 2:
            raise ValueError(f"factors must be (n, r), got {tuple(factors.shape)}")
        n, r = factors.shape
        super().__init__(n, dtype=factors.dtype, device=factors.device)
        check_finite("factors", factors)
        scales = factors.new_ones(r) if scales is None else scales
        entries = factors.new_zeros(n) if entries is None else entries
        for name, vector, rows in (("scales", scales, r), ("entries", entries, n)):
            check_tensor(name, vector, dtype=self.dtype, device=self.device, rows=rows, ndim=1)
            check_finite(name, vector)
        self.factors, self.scales = factors.detach(), scales.detach()
        self.entries = entries.detach()
        self._detail = f"rank {r} plus diagonal"

    def _matmat(self, block: Tensor) -> Tensor:
        # U (s * (U' B)) + d * B, associated so that nothing larger than (n, k) is formed.
        inner = self.scales[:, None] * inner_products(self.factors, block).to(block)
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


# ------------------------------------------------------------------------------------------
# Operators made of another operator: shifts, projections, parts, sums over processes.


@final
class ShiftedOperator(WrappingOperator):
    r"""The shift :math:`A + \mu I`."""

    def __init__(self, op: LinearOperator, shift: float) -> None:
        check_number("shift", shift)
        super().__init__(op, f"{type(op).__name__} {shift:+g} I")
        self.shift = float(shift)

    def _matmat(self, block: Tensor) -> Tensor:
        return torch.add(self.op.matmat(block), block, alpha=self.shift)


@final
class DeflatedOperator(WrappingOperator):
    r"""The matrix :math:`(I - Q Q^\top) A (I - Q Q^\top)`: :math:`A` with a subspace removed.

    Args:
        op: :math:`A`.
        vectors: :math:`Q` of shape ``(n, r)`` with orthonormal columns, such as Ritz vectors.
    """

    def __init__(self, op: LinearOperator, vectors: Tensor) -> None:
        check_tensor("vectors", vectors, dtype=op.dtype, device=op.device, rows=op.shape[0])
        self.vectors = vectors.detach().reshape(op.shape[0], -1)
        super().__init__(op, f"{type(op).__name__} without {self.vectors.shape[1]} directions")
        gram = inner_products(self.vectors, self.vectors)
        error = float((gram - torch.eye(len(gram)).to(gram)).abs().max())
        # Q'Q = I to half of the digits of the dtype.
        if not is_below(error, torch.finfo(op.dtype).eps ** 0.5):
            raise ValueError(f"vectors must have orthonormal columns, got |Q'Q - I| = {error:.2g}")

    def _matmat(self, block: Tensor) -> Tensor:
        return self._project(self.op.matmat(self._project(block)))

    def _project(self, block: Tensor) -> Tensor:
        # (I - Q Q') B, associated so that Q Q', (n, n), is not formed.
        return block - self.vectors @ inner_products(self.vectors, block).to(block)


@final
class RestrictedOperator(WrappingOperator):
    r"""The principal submatrix :math:`A_{SS}` on a subset of coordinates.

    Args:
        op: :math:`A`.
        indices: The subset :math:`S`, distinct integers in ``[0, n)``, ``(s,)``.
    """

    def __init__(self, op: LinearOperator, indices: Tensor) -> None:
        self.indices = indices = torch.as_tensor(indices, device=op.device)
        if indices.ndim != 1 or indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise TypeError(
                f"indices must be a vector of integers, got {indices.dtype} {tuple(indices.shape)}"
            )
        for end in indices.aminmax() if len(indices) else ():
            check_range("indices", int(end), low=0, high=op.shape[0] - 1)
        if len(indices.unique()) != len(indices):
            raise ValueError("indices must be distinct, got repeated ones")
        super().__init__(op, f"{len(indices):,} coordinates of {type(op).__name__}", n=len(indices))

    def _matmat(self, block: Tensor) -> Tensor:
        # A_SS = P A P', where P' embeds the coordinates S among zeros.
        embedded = block.new_zeros(self.op.shape[0], block.shape[1])
        embedded[self.indices] = block
        return self.op.matmat(embedded)[self.indices]


@final
class ShardedOperator(WrappingOperator):
    r"""The sum :math:`\sum_r A_r` over processes, where process :math:`r` has :math:`A_r`.

    All processes pass the same block and get the same product, by one all-reduce. The parts are
    summed and not averaged, so they may be of different sizes.

    Args:
        op: :math:`A_r` of this process.
        group: The processes. Defaults to all of them.
    """

    def __init__(self, op: LinearOperator, *, group: Group | None = None) -> None:
        super().__init__(op, f"sum over {world_size(group)} processes of {type(op).__name__}")
        self.group = group

    def _matmat(self, block: Tensor) -> Tensor:
        # A copy, since the sum is in place and the local operator may still use its result.
        product = self.op.matmat(block).clone(memory_format=torch.contiguous_format)
        return all_sum(product, self.group)
