"""One step: forward, backward, update, with the loss added up on the device."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ritz._core.distributed import all_sum
from ritz.curvature.adapters import Adapter
from ritz.curvature.losses import check_labels, is_kept, term_mass
from ritz.training.feeds import num_rows
from ritz.training.states import keep, meet

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Piece(NamedTuple):
    """A batch and its share of the gradient of the step.

    A batch that is not ``real`` stands in where a process has no rows, and counts for nothing. With
    a state, which the batch begins with and leaves its own in.
    """

    batch: Any
    share: float | Tensor = 1.0
    real: bool = True
    state: Any = None


@final
class Totals:
    """Loss, right answers and labels of many batches, added up where they are computed.

    Nothing is read from the device before :meth:`means`. The mean is over what the loss itself
    averages over: labels that are not ignored, with their weights where classes have some.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        # Views: adding takes no indexing.
        self._loss, self._mass, self._right, self._labels = self.sums.unbind()

    def add(self, adapter: Adapter, batch: Any, loss: Tensor, outputs: Any, target: Any) -> None:
        """Add a batch of mean loss ``loss``."""
        mass = batch_mass(adapter, batch, target)
        if isinstance(mass, Tensor):
            # Where all labels are ignored the mean is none.
            self._loss.add_((loss.detach().double() * mass).masked_fill(mass == 0, 0.0))
        else:
            self._loss.add_(loss.detach(), alpha=mass)
        self._mass.add_(mass)
        if is_classification(outputs, target):
            kept = is_kept(adapter.loss_fn.call, target)
            self._right.add_(((outputs.detach().argmax(1) == target) & kept).sum())
            self._labels.add_(kept.sum())

    def reset(self) -> None:
        """Begin anew, in the same memory."""
        self.sums.zero_()

    def means(self) -> dict[str, float]:
        """Mean loss and, for classes, accuracy over all processes; one wait for the device."""
        loss, mass, right, labels = all_sum(self.sums).tolist()
        found = {"loss": loss / mass if mass else math.nan}
        return found | ({"accuracy": right / labels} if labels else {})


def is_classification(outputs: Any, target: Any) -> bool:
    """Whether outputs are scores of classes, in dimension 1, and targets their numbers."""
    return (isinstance(outputs, Tensor) and isinstance(target, Tensor)
            and not target.is_floating_point() and outputs.ndim == target.ndim + 1
            and outputs.ndim > 1)  # fmt: skip


@final
class Step:
    """Forward and backward over the pieces of a step, and the update.

    Args:
        adapter: The model, perhaps wrapped, with its loss.
        optimizer: Takes the step.
        precision: ``bfloat16`` and ``float16`` run the forward pass in it where that is safe.
        clip_norm: Largest norm of the gradient.
        device: Where.
        cached: Whether casts of weights are kept within a forward pass; not in a CUDA graph.
    """

    def __init__(
        self,
        adapter: Adapter,
        optimizer: Optimizer,
        *,
        precision: str,
        clip_norm: float | None,
        device: torch.device,
        cached: bool = True,
    ) -> None:
        self.adapter, self.optimizer, self.clip_norm = adapter, optimizer, clip_norm
        self.totals = Totals(device)
        self.num_classes: int | None = None  # of the outputs, once there were some
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
        self._half, self._device, self._cached = HALF.get(precision), device, cached

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        self.optimizer.zero_grad(set_to_none=True)
        for number, piece in enumerate(pieces, start=1):
            with self._quiet(last=number == len(pieces)):
                self._backward(piece)
        self._update()

    def _backward(self, piece: Piece) -> None:
        with autocast(self._half, self._device, cached=self._cached):
            outputs, target, after = meet(self.adapter, piece.batch, piece.state)
            if self.num_classes is None:
                self.num_classes = self._checked(outputs, target)
            loss = self.adapter.loss(outputs, target)
        self.scaler.scale(_part(loss, piece.share)).backward()
        keep(piece.state, after)  # not before: the backward pass reads what was there
        if piece.real:
            self.totals.add(self.adapter, piece.batch, loss, outputs, target)

    def _checked(self, outputs: Any, target: Any) -> int:
        """Classes of the outputs, 0 where there are none; the labels are among them."""
        check_labels(self.adapter.loss_fn.call, outputs, target, "the first batch", some=False)
        return outputs.shape[1] if is_classification(outputs, target) else 0

    def _update(self) -> None:
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _quiet(self, *, last: bool) -> AbstractContextManager[Any]:
        """Let processes exchange gradients after the last piece alone."""
        model = self.adapter.model
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()


def _part(loss: Tensor, share: float | Tensor) -> Tensor:
    if isinstance(share, Tensor):
        return loss * share.to(loss.dtype)
    return loss if share == 1 else loss * share


def batch_mass(adapter: Adapter, batch: Any, target: Any) -> int | Tensor:
    """How much a batch counts in means: what its loss divides by, or its rows where that is unseen.

    A tensor where labels may be ignored: nobody waits for how many are.
    """
    mass = term_mass(adapter.loss_fn.call, target)
    if mass is not None:
        return mass
    return target.numel() if isinstance(target, Tensor) else num_rows(batch)


def autocast(
    half: torch.dtype | None, device: torch.device, *, cached: bool = True
) -> AbstractContextManager[Any]:
    """Half precision where that is safe, for the block; ``None``: as it is."""
    if half is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=half, cache_enabled=cached)
