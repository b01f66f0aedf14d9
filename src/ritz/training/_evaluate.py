"""Loss and accuracy of a model on data, and the result of a training run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz._core.batches import tensors
from ritz._core.modes import evaluating
from ritz._core.storage import storable
from ritz.curvature._shared import Adapter, Forward, check_labels, known_loss
from ritz.training._data import Feed, own_rows
from ritz.training._step import HALF, Totals, autocast, call_model, carried_state, overwrite

# ------------------------------------------------------------------------------------------
# The result of a run.


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
        history: All numbers that were logged per epoch, by name, each ``(num_epochs,)``, float64,
            NaN where a number was not measured: ``rate`` (the learning rate), ``train_loss``,
            ``train_accuracy``, ``validation_loss``, ``average_validation_loss`` and so on; for text
            also ``train_perplexity`` and so on.
        metrics: The last value of each number, including those measured at the end of the run.
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
        lines = [f"{self.num_epochs} epochs, {self.num_steps} steps in {self.seconds:.1f} s; "
                 f"{self.status}"]  # fmt: skip
        width = max((len(name) for name in self.metrics), default=0)
        lines += [f"  {name:<{width}}  {value:.6g}" for name, value in self.metrics.items()]
        return "\n".join(lines)


def history_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the numbers of the records of epochs, by name."""
    records = [record for record in records if record["kind"] == "epoch"]
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    return {
        name: torch.tensor([_number(record.get(name)) for record in records], dtype=torch.float64)
        for name in names
    }


def last_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last value of each number in records."""
    metrics = {name: value for record in records for name, value in record.items()}
    places = ("kind", "epoch", "step")
    return {name: _number(value) for name, value in metrics.items() if name not in places}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


# ------------------------------------------------------------------------------------------
# Loss and accuracy of a model.


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
    """Return the mean ``loss`` of a model in eval mode and, for classes, its ``accuracy``.

    The mean is over targets that the loss does not ignore, so batches of different sizes count
    correctly. The mode of the model is restored. With several processes, each is given all batches
    and computes its rows; all return the same numbers.

    Args:
        model: Any module.
        batches: Batches on the device of the model, each ``(*inputs, target)`` or a dictionary.
        loss_fn: Mean loss of outputs and target; ``None`` if the model returns its loss.
        forward: Takes the model and a batch and returns ``(outputs, target)``, for other batches.
        precision: ``bfloat16`` or ``float16`` computes in half precision where this is safe.
        carry_state: Pass the state of a recurrent model from batch to batch; see ``CarriedState``.
            Defaults to ``batches.consecutive``, which is true for text. Each call starts with the
            initial state. Not possible with ``forward``.
    """
    adapter = Adapter(model, loss_fn, forward)
    wanted = getattr(batches, "consecutive", False) if carry_state is None else carry_state
    carried, totals = carried_state(adapter, wanted=wanted), None
    half = HALF.get(precision)
    with evaluating(model, batch_statistics=False):
        for batch in batches:
            rows, count, real = own_rows(batch)
            totals = totals or Totals(device_of(model, rows))
            if not real:
                continue
            state = None if carried is None else carried.of(count)
            with autocast(half, totals.sums.device):
                outputs, target, after = call_model(adapter, rows, state)
                check_labels(adapter.loss_fn.call, outputs, target, "batches", some=False)
                loss = adapter.loss(outputs, target)
            overwrite(state, after)
            totals.add(adapter, rows, loss, outputs, target)
    if totals is None:
        raise ValueError("batches must hold at least one batch, got none")
    return totals.means()


def with_perplexity(means: dict[str, float], feed: Feed, loss_fn: Any) -> dict[str, float]:
    """Return means with the perplexity, exp(loss), if the loss is the cross-entropy of a text."""
    known = known_loss(loss_fn)
    if not feed.is_text or known is None or known.kind != "cross_entropy" or known.smoothing:
        return means
    # As a tensor: for a huge loss math.exp raises, and this is infinite.
    return means | {"perplexity": float(torch.tensor(means["loss"], dtype=torch.float64).exp())}


def device_of(model: nn.Module, batch: Any = ()) -> torch.device:
    """Return the device of a model, or of a batch if the model has no parameters."""
    first = next(model.parameters(), next(iter(tensors(batch)), None))
    return torch.device("cpu") if first is None else first.device
