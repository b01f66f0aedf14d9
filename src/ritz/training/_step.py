"""One training step: forward pass, backward pass, update, and sums of losses and accuracies."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ritz._core.batch_norm import batch_norms
from ritz._core.batches import num_rows
from ritz._core.distributed import all_sum, world_size
from ritz._core.params import parameters
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import Adapter, check_labels, check_scores, is_kept, term_mass
from ritz.models import with_ghost_batch_norm
from ritz.optim import CovarianceNoise
from ritz.optim._shared import curvature_of
from ritz.training._recurrent import ActivationPenalty, call_model, overwrite

# ------------------------------------------------------------------------------------------
# One step: forward pass, backward pass and update, with losses summed on the device.


class Piece(NamedTuple):
    """The rows of a batch for this process, and their share of the gradient of a step.

    A piece that is not ``real`` has no weight: it lets a process without rows take part in a step.
    A recurrent model starts from ``state``, which is overwritten by the state after the batch.
    """

    batch: Any
    share: float | Tensor = 1.0
    real: bool = True
    state: Any = None


@final
@dataclass(eq=False)
class Step:
    """Forward and backward pass over the pieces of a step, and the update.

    Attributes:
        adapter: The model, perhaps wrapped, with its loss.
        optimizer: Updates the weights.
        config: Precision and ``clip_norm``; half precisions run the forward pass under autocast.
        device: Device of model and batches.
        cached: Cache casts of weights within a forward pass; not possible in a CUDA graph.
        noise: Gradient noise, if the run has any.
        penalty: Penalty on activations, if the run has any; not part of the logged loss.
    """

    adapter: Adapter
    optimizer: Optimizer
    config: TrainingConfig
    device: torch.device
    cached: bool = True
    noise: CovarianceNoise | None = None
    penalty: ActivationPenalty | None = None

    def __post_init__(self) -> None:
        self.totals = Totals(self.device, self.config.top_k)
        self.num_classes: int | None = None  # known after the first forward pass
        half = self.config.precision == "float16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        # K-FAC captures curvature in the passes of the step.
        self.curvature = curvature_of(self.optimizer)
        if self.curvature is not None:
            self.curvature.scaler = self.scaler

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        self.optimizer.zero_grad(set_to_none=True)
        model, noise = self.adapter.model, self.noise
        if noise is not None:
            noise.begin()
        for number, piece in enumerate(pieces, start=1):
            # Processes exchange gradients after the last piece only.
            quiet: AbstractContextManager[Any] = nullcontext()
            if number < len(pieces) and isinstance(model, DistributedDataParallel):
                quiet = model.no_sync()
            with quiet, self._captured(piece):
                self._backward(piece)
        if noise is not None:
            # The noise must carry the factor of the gradient scaler that the gradient carries.
            noise.collect(self._factor())
        if self.config.clip_norm is not None:
            # The limit is on the gradient itself, not on its multiple by the scaler.
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters(self.optimizer), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _scale(self, value: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(value)
        return scaled

    def _factor(self) -> float | Tensor:
        """Return the factor of the scaler: a tensor, so that the step does not wait for it."""
        enabled = self.scaler.is_enabled()
        return self._scale(torch.ones((), device=self.device)) if enabled else 1.0

    def _captured(self, piece: Piece) -> AbstractContextManager[None]:
        hidden = self.curvature is not None and not piece.real
        return self.curvature.paused() if self.curvature and hidden else nullcontext()

    def _backward(self, piece: Piece) -> None:
        adapter, noise, penalty = self.adapter, self.noise, self.penalty
        with (
            nullcontext() if noise is None else noise.observing(piece.batch),
            nullcontext() if penalty is None else penalty.observing(),
            autocast(self.config.precision, self.device, cached=self.cached),
        ):
            outputs, target, after = call_model(adapter, piece.batch, piece.state)
            if self.num_classes is None:
                check_scores(adapter.loss_fn.call, outputs, target, "the first batch")
                check_labels(adapter.loss_fn.call, outputs, target, "the first batch", some=False)
                self.num_classes = num_classes(outputs, target)
            # `loss` is logged, and `part` is differentiated: it has the penalty and the share.
            loss = part = adapter.loss(outputs, target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = (
                    f"shape {tuple(loss.shape)}"
                    if isinstance(loss, Tensor)
                    else type(loss).__name__
                )
                raise ValueError(f"the loss must be a number, the mean over a batch, got {got}")
        if penalty is not None:
            part = loss + penalty.take().to(loss.dtype)
        if isinstance(piece.share, Tensor):
            part = part * piece.share.to(loss.dtype)
        elif piece.share != 1:
            part = part * piece.share
        if self.curvature is not None:
            self.curvature.observe(outputs, target, adapter.loss_fn.call)
        if noise is None or not piece.real:
            self._scale(part).backward()
        else:
            share = piece.share
            noise.pull(self._scale(part), outputs, target, piece.batch, self._factor(), share)
        overwrite(piece.state, after)  # only now: the backward pass reads the old state
        if piece.real:
            self.totals.add(adapter, piece.batch, loss, outputs, target)


def autocast(
    precision: str, device: torch.device, *, cached: bool = True
) -> AbstractContextManager[Any]:
    """Context manager of autocast for half precisions; it does nothing for float32 and tf32."""
    if precision not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision), cache_enabled=cached)


@contextmanager
def scaled_learning_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Context manager that multiplies the learning rates of all groups for the block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            # Not in place: if a learning rate is a tensor, the same object must be restored.
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


# ------------------------------------------------------------------------------------------
# Sums over batches, from which the means follow.


@final
class Totals:
    """Sums of losses, correct answers and labels over batches, on the device.

    Nothing is read from the device before :meth:`means`. The mean is over what the loss averages
    over: labels that are not ignored, by the weights of their classes.
    """

    def __init__(self, device: torch.device, top_k: int | None = None) -> None:
        self.top_k = top_k
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        # Views, so that adding needs no indexing.
        self._loss, self._mass, self._right, self._labels, self._near = self.sums.unbind()

    def add(self, adapter: Adapter, batch: Any, loss: Tensor, outputs: Any, target: Any) -> None:
        """Add a batch with mean loss ``loss``."""
        mass = batch_mass(adapter, batch, target)
        if isinstance(mass, Tensor):
            # If all labels are ignored, the mean loss is 0/0, but the sum is 0.
            self._loss.add_((loss.detach().double() * mass).masked_fill(mass == 0, 0.0))
        else:
            # The sum of a batch is its mean times its mass, so batches of any sizes add up.
            self._loss.add_(loss.detach(), alpha=mass)
        self._mass.add_(mass)
        # Accuracy leaves out the labels that the loss ignores.
        if classes := num_classes(outputs, target):
            counted = is_kept(adapter.loss_fn.call, target)
            self._right.add_(((outputs.detach().argmax(1) == target) & counted).sum())
            self._labels.add_(counted.sum())
            if self.top_k is not None:
                first = outputs.detach().topk(min(self.top_k, classes), dim=1).indices
                self._near.add_(((first == target.unsqueeze(1)).any(1) & counted).sum())

    def means(self) -> dict[str, float]:
        """Return mean loss and, for classes, accuracy over all processes; waits for the device."""
        loss, mass, right, labels, near = all_sum(self.sums).tolist()
        means = {"loss": loss / mass if mass else math.nan}
        if labels:
            means["accuracy"] = right / labels
            if self.top_k is not None:
                means[f"top{self.top_k}_accuracy"] = near / labels
        return means


def num_classes(outputs: Any, target: Any) -> int:
    """Return the number of classes if outputs are scores of classes in dimension 1, else 0."""
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
        return 0
    # The layout of cross_entropy: outputs (n, classes, ...) and targets (n, ...).
    classes = not target.is_floating_point() and outputs.ndim == target.ndim + 1 > 1
    return outputs.shape[1] if classes else 0


def batch_mass(adapter: Adapter, batch: Any, target: Any) -> int | Tensor:
    """Return the weight of a batch in means: what its loss divides by, or its rows if unknown.

    This is a tensor if labels may be ignored, because counting them would wait for the device.
    """
    mass = term_mass(adapter.loss_fn.call, target)
    if mass is not None:
        return mass
    return target.numel() if isinstance(target, Tensor) else num_rows(batch)


# ------------------------------------------------------------------------------------------
# Batch norm in a step: ghost batches, and batches of one row.


def use_ghosts(model: nn.Module, config: TrainingConfig, largest: int | None) -> None:
    """Let batch norms use the statistics of ghost batches, if the options have any.

    Args:
        model: The model.
        config: The options.
        largest: The largest batch size of the run, if it is known.
    """
    if config.ghost_batch is None:
        return
    check_ghosts(config, largest)
    if not batch_norms(model):
        kind = type(model).__name__
        raise ValueError(f"ghost_batch needs a model with batch norm, got {kind} without it")
    with_ghost_batch_norm(model, config.ghost_batch)


def check_ghosts(config: TrainingConfig, largest: int | None) -> None:
    """Raise if no batch has as many samples as a ghost batch, which then would have no effect.

    Args:
        config: The options.
        largest: The largest batch size of the run, if it is known.
    """
    if config.ghost_batch is None or largest is None:
        return
    # Each process divides its own rows. Smaller batches, such as the last one of an epoch or the
    # first ones of a batch schedule, are ghost batches as a whole.
    rows, count = math.ceil(largest / world_size()), world_size()
    if config.ghost_batch > rows:
        shared = f" per process ({largest} in {count} processes)" if count > 1 else ""
        raise ValueError(
            f"ghost_batch must be at most the batch size, got {config.ghost_batch} and batches of "
            f"at most {rows} samples{shared}"
        )


def explain_step(error: ValueError, rows: int, config: TrainingConfig) -> ValueError:
    """Return an error of a step in terms of the options of training, with advice on one row."""
    if config.has_noise:
        # The noise names its own arguments, which the options call otherwise.
        text = re.sub(r"\bkind=(?=')", "noise=", re.sub(r"^small\b", "noise_batch", str(error)))
        error = error if text == str(error) else ValueError(text)
    if "Expected more than 1 value per channel" not in str(error):  # torch
        return error
    return ValueError(
        f"batch norm needs at least two samples per process to train on, got a batch of {rows} in "
        f"{world_size()} process{'es' * (world_size() > 1)}: use drop_last=True (--drop-last) or "
        f"a batch size (--batch-size) other than {config.batch_size or 'that of the loader'}, and "
        "start again with resume=False (--restart)"
    )
