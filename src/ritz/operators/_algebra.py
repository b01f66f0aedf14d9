"""Operators made of operators: sums, multiples, shifts, deflations, restrictions."""

import math
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_range, check_tensor
from ritz._core.distributed import Group, all_sum, world_size
from ritz.operators._base import LinearOperator

# ------------------------------------------------------------------------------------------
# New operators from old: sums, multiples, shifts, deflations, restrictions.


@final
class SumOperator(LinearOperator):
    r"""The sum :math:`\sum_i A_i` of operators of one shape, dtype and device."""

    def __init__(self, *terms: LinearOperator) -> None:
        if not terms:
            raise ValueError("terms must hold at least one operator, got none")
        first = terms[0]
        for term in terms[1:]:
            if (term.shape, term.dtype, term.device) != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"terms must agree in shape, dtype and device: {first!r}, {term!r}"
                )
        width = min(term.block_size for term in terms)
        super().__init__(first.shape[0], dtype=first.dtype, device=first.device, block_size=width)
        self.terms = terms

    def _matmat(self, block: Tensor) -> Tensor:
        # Out of place at first: a user's operator may return a tensor that it still owns.
        total = self.terms[0].matmat(block)
        for term in self.terms[1:]:
            total = total + term.matmat(block)
        return total

    def _detail(self) -> str:
        return " + ".join(type(term).__name__ for term in self.terms)


@final
class ScaledOperator(LinearOperator):
    r"""The multiple :math:`c A`."""

    def __init__(self, op: LinearOperator, factor: float) -> None:
        _check_number("factor", factor)
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.factor = op, float(factor)

    def _matmat(self, block: Tensor) -> Tensor:
        return self.op.matmat(block) * self.factor

    def _detail(self) -> str:
        return f"{self.factor:g} * {type(self.op).__name__}"


@final
class ShiftedOperator(LinearOperator):
    r"""The shift :math:`A + \mu I`."""

    def __init__(self, op: LinearOperator, shift: float) -> None:
        _check_number("shift", shift)
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.shift = op, float(shift)

    def _matmat(self, block: Tensor) -> Tensor:
        return torch.add(self.op.matmat(block), block, alpha=self.shift)

    def _detail(self) -> str:
        return f"{type(self.op).__name__} {self.shift:+g} I"


@final
class DeflatedOperator(LinearOperator):
    r"""The projection :math:`(I - Q Q^\top) A (I - Q Q^\top)`: ``A`` with a subspace removed.

    Args:
        op: :math:`A`.
        vectors: :math:`Q` of shape ``(n, r)`` with orthonormal columns, such as Ritz vectors.
    """

    def __init__(self, op: LinearOperator, vectors: Tensor) -> None:
        check_tensor("vectors", vectors, dtype=op.dtype, device=op.device, rows=op.shape[0])
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.vectors = op, (vectors if vectors.ndim == 2 else vectors[:, None]).detach()
        gram = self.vectors.double().T @ self.vectors.double()
        error = float(
            (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max()
        )
        if not error <= torch.finfo(op.dtype).eps ** 0.5:
            raise ValueError(f"vectors must have orthonormal columns, got |Q'Q - I| = {error:.2g}")

    def _matmat(self, block: Tensor) -> Tensor:
        return self._project(self.op.matmat(self._project(block)))

    def _project(self, block: Tensor) -> Tensor:
        return block - self.vectors @ (self.vectors.T @ block)

    def _detail(self) -> str:
        return f"{type(self.op).__name__} without {self.vectors.shape[1]} directions"


@final
class RestrictedOperator(LinearOperator):
    r"""The principal submatrix :math:`A_{SS}` on a subset of coordinates.

    Args:
        op: :math:`A`.
        indices: The subset :math:`S`, distinct integers in ``[0, n)``, ``(s,)``.
    """

    def __init__(self, op: LinearOperator, indices: Tensor) -> None:
        indices = torch.as_tensor(indices, device=op.device)
        if indices.ndim != 1 or indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise TypeError(
                f"indices must be a vector of integers, got {indices.dtype} {tuple(indices.shape)}"
            )
        if len(indices):
            check_range("indices", int(indices.min()), low=0, high=op.shape[0] - 1)
            check_range("indices", int(indices.max()), low=0, high=op.shape[0] - 1)
        if len(indices.unique()) != len(indices):
            raise ValueError("indices must be distinct, got repeated ones")
        super().__init__(len(indices), dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.indices = op, indices

    def _matmat(self, block: Tensor) -> Tensor:
        embedded = block.new_zeros(self.op.shape[0], block.shape[1])
        embedded[self.indices] = block
        return self.op.matmat(embedded)[self.indices]

    def _detail(self) -> str:
        return f"{len(self.indices):,} coordinates of {type(self.op).__name__}"


def _check_number(name: str, value: float) -> None:
    check_range(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


# ------------------------------------------------------------------------------------------
# The sum of one operator per process.


@final
class ShardedOperator(LinearOperator):
    r"""The sum :math:`\sum_r A_r` over processes, each of which holds its own :math:`A_r`.

    Every process calls with the same block and gets the same product: one all-reduce of it. Parts
    of different size need no care, since parts are summed, not averaged.

    Args:
        op: This process's :math:`A_r`.
        group: The processes; all of them by default. Without torch.distributed, just this one.
    """

    def __init__(self, op: LinearOperator, *, group: Group | None = None) -> None:
        super().__init__(op.shape[0], dtype=op.dtype, device=op.device, block_size=op.block_size)
        self.op, self.group = op, group

    def _matmat(self, block: Tensor) -> Tensor:
        # A copy, since the sum is in place and the local operator may still own its result.
        product = self.op.matmat(block).clone(memory_format=torch.contiguous_format)
        return all_sum(product, self.group)

    def _detail(self) -> str:
        return f"sum over {world_size(self.group)} processes of {type(self.op).__name__}"
