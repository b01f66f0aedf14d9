"""Outputs beside the classes they should have named."""

from typing import Any

import torch
from torch import Tensor

from ritz.curvature.losses import is_kept


def labelled(loss_fn: Any, outputs: Any, target: Any) -> tuple[Tensor, Tensor] | None:
    """Outputs ``(n, classes)`` and labels ``(n,)`` of the terms of a batch that are not ignored.

    ``None`` where targets are not class labels: integers, one for each vector of outputs along
    axis 1, as cross-entropy has them; and two classes or more.
    """
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or target.dtype == torch.bool or outputs.ndim < 2:
        return None
    if outputs.shape[1] < 2 or outputs.shape[:1] + outputs.shape[2:] != target.shape:
        return None
    rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
    labels = target.reshape(-1)
    kept = is_kept(loss_fn, labels)
    return rows[kept], labels[kept]


def num_correct(loss_fn: Any, outputs: Any, target: Any) -> tuple[int, int]:
    """Labels met by the largest output, and labels; none where the target does not hold labels."""
    found = labelled(loss_fn, outputs, target)
    if found is None:
        return 0, 0
    return int((found[0].argmax(1) == found[1]).sum()), len(found[1])
