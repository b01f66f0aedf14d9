"""Loss and accuracy of a model on data, and the result of a training run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz._core.modes import evaluating
from ritz._core.storage import storable
from ritz.curvature._shared import Adapter, Forward, check_labels, recognised
from ritz.training._data import Feed, own_rows
from ritz.training._step import HALF, Totals, autocast, carried_state, keep, meet

# ------------------------------------------------------------------------------------------
# What training returns.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """How a training run ended, and what to do about it.

    Attributes:
        outcome: ``completed`` (all epochs), ``stopped`` (patience ran out, as it should),
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


# ------------------------------------------------------------------------------------------
# Loss and accuracy of a model on data, as it is or with averaged weights.


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss_fn: Callable[..., Any] | None = cross_entropy,
    forward: Forward | None = None,
    precision: str = "float32",
    carry_state: bool | None = None,
) -> dict[str, float]:
    """Return the mean ``loss`` of a model in eval mode and, for classes as targets, ``accuracy``.

    The mean is over targets that the loss does not ignore, so that batches of different lengths
    count as they should. The model
    keeps its mode. With several processes each is given all batches, computes its rows of them, and
    returns the same numbers.

    Args:
        model: Any module.
        batches: Batches on the model's device, each ``(*inputs, target)`` or a dictionary.
        loss_fn: Mean loss of outputs and target; ``None`` where the model returns its own.
        forward: Takes the model and a batch, returns ``(outputs, target)``; for other batches.
        precision: ``bfloat16`` or ``float16`` computes in it where that is safe.
        carry_state: Whether a model that has a state hands it on from batch to batch, see
            ``CarriedState``; by default where ``batches.consecutive``,
            as those of a text are. It begins anew with every call, without ``forward`` alone.
    """
    adapter = Adapter(model, loss_fn, forward)
    wanted = getattr(batches, "consecutive", False) if carry_state is None else carry_state
    carried, totals = carried_state(adapter, wanted=wanted), None
    with evaluating(model, batch_statistics=False):
        for batch in batches:
            own, count, real = own_rows(batch)
            totals = totals or Totals(_device_of(model, own))
            if real:
                state = None if carried is None else carried.of(count)
                _add(adapter, own, totals, precision, state)
    if totals is None:
        raise ValueError("batches must hold at least one batch, got none")
    return totals.means()


def _add(adapter: Adapter, batch: Any, totals: Totals, precision: str, state: Any) -> None:
    with autocast(HALF.get(precision), totals.sums.device):
        outputs, target, after = meet(adapter, batch, state)
        check_labels(adapter.loss_fn.call, outputs, target, "batches", some=False)
        loss = adapter.loss(outputs, target)
    keep(state, after)
    totals.add(adapter, batch, loss, outputs, target)


def _device_of(model: nn.Module, batch: Any) -> torch.device:
    first = next(model.parameters(), None)
    if first is not None:
        return first.device
    return next((x.device for x in batch if isinstance(x, torch.Tensor)), torch.device("cpu"))
