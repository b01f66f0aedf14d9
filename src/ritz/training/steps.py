"""One step: forward, backward, update, with the loss added up on the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ritz._core.distributed import all_sum
from ritz.curvature.adapters import Adapter
from ritz.training.feeds import num_rows
from ritz.training.states import keep, meet

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Piece(NamedTuple):
    """A batch, its share of the gradient of the step, and its weight among those of an epoch.

    With a state, which the batch begins with and leaves its own in.
    """

    batch: Any
    share: float
    weight: int
    state: Any = None


@final
class Totals:
    """Loss, right answers and samples of many batches, added up where they are computed.

    Nothing is read from the device before :meth:`means`.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._loss, self._right = self.sums.unbind()  # views: adding takes no indexing
        self.count, self.answered = 0, False

    def add(self, loss: Tensor, outputs: Any, target: Any, weight: int) -> None:
        """Add a batch of mean loss ``loss``; what is counted on the host is :meth:`note` d."""
        self._loss.add_(loss.detach(), alpha=weight)
        if is_classification(outputs, target):
            self._right.add_((outputs.detach().argmax(1) == target).sum())
            self.answered = True

    def note(self, weight: int) -> None:
        """Count the weight of a batch."""
        self.count += weight

    def reset(self) -> None:
        """Begin anew, in the same memory."""
        self.sums.zero_()
        self.count = 0

    def means(self) -> dict[str, float]:
        """Mean loss and, for classes, accuracy over all processes; one wait for the device."""
        own = torch.tensor([float(self.count)], dtype=torch.float64, device=self.sums.device)
        loss, right, count = all_sum(torch.cat([self.sums, own])).tolist()
        found = {"loss": loss / max(count, 1)}
        return found | ({"accuracy": right / max(count, 1)} if self.answered else {})


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
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
        self._half, self._device, self._cached = HALF.get(precision), device, cached

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step and count its samples."""
        self.run(pieces)
        self.note(pieces)

    def run(self, pieces: Sequence[Piece]) -> None:
        """What happens on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        for number, piece in enumerate(pieces, start=1):
            with self._quiet(last=number == len(pieces)):
                self._backward(piece)
        self._update()

    def note(self, pieces: Sequence[Piece]) -> None:
        """What happens on the host."""
        for piece in pieces:
            self.totals.note(piece.weight)

    def _backward(self, piece: Piece) -> None:
        with autocast(self._half, self._device, cached=self._cached):
            outputs, target, after = meet(self.adapter, piece.batch, piece.state)
            loss = self.adapter.loss(outputs, target)
        self.scaler.scale(loss if piece.share == 1 else loss * piece.share).backward()
        keep(piece.state, after)  # not before: the backward pass reads what was there
        self.totals.add(loss, outputs, target, piece.weight)

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


def batch_weight(adapter: Adapter, batch: Any) -> int:
    """How much a batch counts in means: its targets, or its rows where these are not seen."""
    target = adapter.target(batch)
    return target.numel() if isinstance(target, Tensor) else num_rows(batch)


def autocast(
    half: torch.dtype | None, device: torch.device, *, cached: bool = True
) -> AbstractContextManager[Any]:
    """Half precision where that is safe, for the block; ``None``: as it is."""
    if half is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=half, cache_enabled=cached)
