"""The result of a training run, and how it ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ritz._core.storage import storable
from ritz.training._log import Record


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """How a training run ended, with advice.

    Attributes:
        outcome: ``completed`` (all epochs), ``stopped`` (early stopping by patience, a normal end),
            ``interrupted`` (by a signal, after saving), ``diverged`` (the loss is not finite).
        message: What happened, in one sentence.
        advice: What to do; empty if nothing needs to be done.
    """

    outcome: Literal["completed", "stopped", "interrupted", "diverged"]
    message: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether training reached its end."""
        return self.outcome in ("completed", "stopped")

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}" + (f" ({self.advice})" if self.advice else "")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
        history: Logged quantities by name. Each is a float64 tensor ``(num_epochs,)``, with NaN
            for epochs in which it was not measured. Names: ``learning_rate``, ``train_loss``,
            ``train_accuracy``, ``validation_loss``, ``average_validation_loss`` and so on; for text
            also ``train_perplexity`` and so on.
        metrics: The last value of each quantity, including those measured at the end of the run.
        num_epochs: Completed epochs.
        num_steps: Completed steps.
        log: Path of the log, or ``None``.
        checkpoint: Path of the checkpoint folder, or ``None``.
        seconds: Duration of this call, without the run that it resumed.
        seed: Seed of the run.
        settings: Options in plain values.
        status: How the run ended.
    """

    history: dict[str, Tensor]
    metrics: dict[str, float]
    num_epochs: int
    num_steps: int
    log: str | None
    checkpoint: str | None
    seconds: float
    seed: int
    settings: dict[str, Any]
    status: TrainingStatus

    def __str__(self) -> str:
        status, done = self.status, f"{self.num_epochs} epochs, {self.num_steps} steps"
        # The message of a completed run is the number of its epochs and steps.
        why = "" if status.outcome == "completed" else str(status).removeprefix(status.outcome)
        lines = [f"Training {status.outcome}: {done} in {self.seconds:.1f} s{why}"]
        width = max((len(name) for name in self.metrics), default=0)
        lines += [f"  {name:<{width}}  {value:.6g}" for name, value in self.metrics.items()]
        return "\n".join(lines)


def history_of(records: Sequence[Record]) -> dict[str, Tensor]:
    """Return the numbers of the records of epochs, by name."""
    epochs = [record for record in records if record["kind"] == "epoch"]
    # In the order of first appearance in the log; a set would have a random order.
    names = dict.fromkeys(name for record in epochs for name in record if name != "kind")
    return {
        name: torch.tensor([each.get(name, math.nan) for each in epochs], dtype=torch.float64)
        for name in names
    }


def diverged(number: int) -> TrainingStatus:
    """Return the status of a run whose loss is not finite in an epoch."""
    return TrainingStatus(
        outcome="diverged",
        message=f"the loss of epoch {number} is not finite",
        advice="lower the learning rate, warm it up, clip the gradient, or check the data for NaN",
    )
