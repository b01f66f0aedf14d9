"""Diagonal matrices, alone and with a low-rank part."""

from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_finite, check_tensor
from ritz.operators.base import LinearOperator


@final
class DiagonalOperator(LinearOperator):
    """The matrix with the entries ``(n,)`` on its diagonal."""

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
        factors: :math:`U` of shape ``(n, r)``; its columns need not be orthogonal.
        scales: :math:`s` of shape ``(r,)``, of either sign; ones if not given.
        entries: :math:`d` of shape ``(n,)``; zeros if not given.
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

    def _matmat(self, block: Tensor) -> Tensor:
        inner = self.scales[:, None] * (self.factors.T @ block)
        return torch.addmm(self.entries[:, None] * block, self.factors, inner)

    def _detail(self) -> str:
        return f"rank {self.factors.shape[1]} plus diagonal"
