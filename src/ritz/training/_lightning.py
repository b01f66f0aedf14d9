"""``LightningCallback``: a curvature monitor as a callback of Lightning, which is imported here."""

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the older name of the same library
    from pytorch_lightning import Callback

from ritz.training._monitor import CurvatureMonitor
from ritz.training._writers import scalars


class LightningCallback(Callback):
    """Measures curvature during a training by Lightning, and logs it where Lightning logs.

    The numbers go to all loggers of the trainer, with tags that begin with ``curvature/``. Training
    is bit for bit the same as without the callback. Lightning's checkpoints include the state of
    the monitor. With several processes, the first one measures::

        monitor = CurvatureMonitor((inputs, targets), every=100, unit="step")
        trainer = Trainer(callbacks=[LightningCallback(monitor)])

    Args:
        monitor: Measures the LightningModule, as the model. If its ``forward`` takes no inputs, the
            source of the monitor is a function that takes the module and returns a
            :class:`ritz.Risk`.
    """

    def __init__(self, monitor: CurvatureMonitor) -> None:
        self.monitor = monitor
        self._last = 0
        self._state: Mapping[str, Any] | None = None

    @property
    def state_key(self) -> str:
        # Callbacks with the same key may not be in one trainer.
        return f"LightningCallback{self.monitor.names, self.monitor.unit, self.monitor.every}"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = trainer.global_step
        if trainer.optimizers:
            # Before the state is loaded: attach forgets what was noted in an earlier training.
            self.monitor.attach(trainer.optimizers[0])
        if self._state is not None:
            self.monitor.load_state_dict(self._state)
            self._state = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With accumulated gradients, several batches make one step.
        if self.monitor.unit == "step" and trainer.global_step > self._last:
            self._last = trainer.global_step
            self._measure(trainer, pl_module, trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor.unit == "epoch":
            self._measure(trainer, pl_module, trainer.current_epoch + 1)

    def _measure(self, trainer: Any, module: Any, count: int) -> None:
        # The other processes do not wait: a measurement needs no communication.
        if not trainer.is_global_zero:
            return
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        record = self.monitor(count, module, optimizer)
        if record is not None:
            numbers = {f"curvature/{name}": value for name, value in scalars(record).items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.monitor.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state = state_dict  # the monitor takes it when it knows the optimiser
