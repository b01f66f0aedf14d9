"""Inner products of the columns of two blocks."""

import torch
from torch import Tensor

CHUNK = 2**17  # entries: small enough that the elementwise product stays in cache


def column_dots(left: Tensor, right: Tensor) -> Tensor:
    r"""Return :math:`\sum_i x_{il} y_{il}`, ``(k,)``, summed in float64."""
    rows = max(1, CHUNK // max(1, left.shape[1]))
    total = torch.zeros(left.shape[1], dtype=torch.float64, device=left.device)
    for x, y in zip(left.split(rows), right.split(rows), strict=True):
        total += (x.double() * y).sum(0)
    return total
