"""Writers of monitors: Weights & Biases and MLflow, by the method that TensorBoard has."""

from typing import Any, final


@final
class WandbWriter:
    """Writes the numbers of a monitor to a Weights & Biases run, online or offline.

    An instance is a ``writer=`` of :class:`CurvatureMonitor`. Steps must not decrease within a run,
    so pass ``step=`` as well where you log your own numbers.

    Args:
        run: What ``wandb.init(...)`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one number; those of the same step become one row."""
        self._run.log({tag: scalar_value}, step=global_step)


@final
class MlflowWriter:
    """Writes the numbers of a monitor to an MLflow run.

    An instance is a ``writer=`` of :class:`CurvatureMonitor`.

    Args:
        run: What ``mlflow.start_run(...)`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._id = run.info.run_id

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one number, also if the run is no longer the active one."""
        # An optional library: importing ritz must not need it.
        from mlflow import log_metric

        log_metric(tag, scalar_value, step=global_step, run_id=self._id)
