"""`WandbWriter` and `MlflowWriter`: logs and monitors to Weights & Biases and MLflow."""

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol, final

from torch import Tensor

PLACE = ("epoch", "step")  # entries of a record that say where in the run it was made


class Writer(Protocol):
    """Receives numbers over time, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Receive one number."""


def check_writer(writer: Any) -> None:
    """Raise unless ``writer`` has the method of a :class:`Writer`, or is ``None``."""
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            "writer must have a method add_scalar, such as a SummaryWriter of TensorBoard, a "
            f"WandbWriter or an MlflowWriter; got {type(writer).__name__}"
        )


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record, without its epoch and step."""
    numbers = {}
    for name, value in record.items():
        # User-defined quantities and monitors return numbers of Python, NumPy or torch.
        number = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
        if name not in PLACE and isinstance(number, Real) and not isinstance(number, bool):
            numbers[name] = float(number)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def write_scalars(writer: Writer, record: Mapping[str, Any], count: int) -> None:
    """Write the numbers of a record of a log: ``train/loss``, ``curvature/lambda_max``."""
    watched = record["kind"] == "curvature"
    for name, value in scalars(record).items():
        tag = f"curvature/{name}" if watched else _tag(name)
        writer.add_scalar(tag, value, count)


def _tag(name: str) -> str:
    """Return the tag of a metric. Tools group metrics by the part before the slash."""
    # average_test_top5_accuracy is top5_accuracy of average_test.
    return re.sub(r"^((?:average_)?(?:train|validation|test))_", r"\1/", name)


@final
class WandbWriter:
    """Writes the numbers of a monitor to a Weights & Biases run, online or offline.

    An instance is a ``writer=`` of :func:`fit` or, in your own loop, of :class:`CurvatureMonitor`.
    Steps must not decrease within a run, so pass ``step=`` as well where you log your own numbers.

    Args:
        run: What ``wandb.init(...)`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one number. Numbers of the same step become one row."""
        self._run.log({tag: scalar_value}, step=global_step)


@final
class MlflowWriter:
    """Writes the numbers of a monitor to an MLflow run.

    An instance is a ``writer=`` of :func:`fit` or, in your own loop, of :class:`CurvatureMonitor`.

    Args:
        run: What ``mlflow.start_run(...)`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._id = run.info.run_id

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Log one number, even if another run is active."""
        # An optional library: importing ritz must not need it.
        from mlflow import log_metric

        log_metric(tag, scalar_value, step=global_step, run_id=self._id)
