"""``TrainerCallback``: a curvature monitor as a callback of the Hugging Face Trainer."""

from collections.abc import Callable
from typing import Any

from transformers import trainer_callback

from ritz.training._monitor import CurvatureMonitor
from ritz.training._writers import scalars


class TrainerCallback(trainer_callback.TrainerCallback):
    """Measures curvature during a training by the Trainer of Hugging Face.

    With ``log``, the numbers go to the tools in ``report_to`` and into the ``log_history`` of the
    trainer, with tags that begin with ``curvature/``. Without it, they go only to the writer and
    the log of the monitor. Training is bit for bit the same as without the callback. With several
    processes, the first one measures::

        monitor = CurvatureMonitor(batches, loss_fn=None, every=100, unit="step")
        trainer.add_callback(TrainerCallback(monitor, log=trainer.log))

    Args:
        monitor: With ``loss_fn=None`` its batches are dictionaries with ``labels``, and the loss is
            that of the model.
        log: The method ``log`` of the trainer.
    """

    def __init__(
        self, monitor: CurvatureMonitor, *, log: Callable[..., None] | None = None
    ) -> None:
        self.monitor = monitor
        self._log = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.attach(_plain(kwargs["optimizer"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor.unit == "step":
            self._measure(state, control, state.global_step, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor.unit == "epoch":
            self._measure(state, control, round(state.epoch), **kwargs)

    def _measure(
        self, state: Any, control: Any, count: int, *, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        # The other processes do not wait: a measurement needs no communication.
        if not state.is_world_process_zero:
            return
        record = self.monitor(count, model, _plain(optimizer))
        if record is None or self._log is None:
            return
        # `log` resets should_log, and the trainer would then not log the loss of this step.
        due = control.should_log
        self._log({f"curvature/{name}": value for name, value in scalars(record).items()})
        control.should_log = due


def _plain(optimizer: Any) -> Any:
    """Return an optimiser without the wrapper of accelerate, which has no hooks."""
    return getattr(optimizer, "optimizer", optimizer)
