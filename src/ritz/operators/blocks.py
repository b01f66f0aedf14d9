"""Block-diagonal matrices."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ritz.operators.base import LinearOperator


@final
class BlockDiagonalOperator(LinearOperator):
    r"""The matrix :math:`\operatorname{diag}(A_1, \dots, A_m)` of blocks on coordinates in order.

    Args:
        ops: The blocks, in order; of one dtype and device. A product is one with each of them.
    """

    def __init__(self, ops: Sequence[LinearOperator]) -> None:
        ops = tuple(ops)
        if not ops:
            raise ValueError("ops must hold at least one operator, got none")
        for op in ops[1:]:
            if (op.dtype, op.device) != (ops[0].dtype, ops[0].device):
                raise ValueError(f"ops must agree in dtype and device: {ops[0]!r}, {op!r}")
        self.sizes = [op.shape[0] for op in ops]
        super().__init__(
            sum(self.sizes),
            dtype=ops[0].dtype,
            device=ops[0].device,
            block_size=min(op.block_size for op in ops),
        )
        self.ops = ops

    def _matmat(self, block: Tensor) -> Tensor:
        parts = block.split(self.sizes)
        return torch.cat([op.matmat(part) for op, part in zip(self.ops, parts, strict=True)])

    def _detail(self) -> str:
        return f"{len(self.ops)} blocks"
