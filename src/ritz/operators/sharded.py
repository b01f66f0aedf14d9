"""The sum of one operator per process."""

from typing import final

import torch
from torch import Tensor

from ritz._core.distributed import Group, all_sum, world_size
from ritz.operators.base import LinearOperator


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
