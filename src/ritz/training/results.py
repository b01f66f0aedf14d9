"""What training returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ritz._core.storage import storable
from ritz.curvature.losses import recognised
from ritz.training.feeds import Feed
from ritz.training.settings import TrainingStatus

storable(TrainingStatus)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """How a run went.

    Attributes:
        history: Every number that was logged of the epochs, by name, each ``(num_epochs,)``,
            float64, NaN where it was not measured: ``rate``, ``train_loss``, ``train_accuracy``,
            ``validation_loss``, ``average_validation_loss`` and so on; for a text
            ``train_perplexity`` and so on too.
        metrics: The last value of each, with those of the end of the run.
        num_epochs: Epochs done.
        num_steps: Steps done.
        log: Path of the log, or ``None``.
        checkpoint: Path of the checkpoint folder, or ``None``.
        seconds: Time of this call, without what was resumed from.
        seed: Of the run.
        settings: What was asked for, in plain values.
        status: How it ended.
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
        lines = [f"{self.num_epochs} epochs, {self.num_steps} steps in {self.seconds:.1f} s; "
                 f"{self.status}"]  # fmt: skip
        width = max((len(name) for name in self.metrics), default=0)
        lines += [f"  {name:<{width}}  {value:.6g}" for name, value in self.metrics.items()]
        return "\n".join(lines)


def with_perplexity(means: dict[str, float], feed: Feed, loss_fn: Any) -> dict[str, float]:
    """Mean loss and the rest, and for the cross entropy of a text its exponential."""
    known = recognised(loss_fn)
    if not feed.is_text or known is None or known.kind != "cross_entropy" or known.smoothing:
        return means
    loss = torch.tensor(means["loss"], dtype=torch.float64)
    return means | {"perplexity": float(loss.exp())}  # infinite, not an error, for a huge loss


def history_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The numbers of the records of epochs, by name."""
    records = [record for record in records if record["kind"] == "epoch"]
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    return {
        name: torch.tensor([_number(record.get(name)) for record in records], dtype=torch.float64)
        for name in names
    }


def last_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of every number in records, without places and times."""
    found: dict[str, float] = {}
    for record in records:
        found |= {name: _number(value) for name, value in record.items()
                  if name not in ("kind", "epoch", "step")}  # fmt: skip
    return found


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
