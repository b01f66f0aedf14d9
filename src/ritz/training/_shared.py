"""Names that other packages of ritz need and users do not."""

from ritz.training._data import DataParts, as_parts, first_batch, sample
from ritz.training._folder import AVERAGE, NAME, WEIGHTS, tensor_state, times_path
from ritz.training._monitor import QUANTITIES
from ritz.training._workflow import (
    CONFIG,
    LOG,
    RunConfig,
    measured_risk,
    read_run,
    run_weights,
    train_run,
)

__all__ = [
    "AVERAGE",
    "CONFIG",
    "LOG",
    "NAME",
    "QUANTITIES",
    "WEIGHTS",
    "DataParts",
    "RunConfig",
    "as_parts",
    "first_batch",
    "measured_risk",
    "read_run",
    "run_weights",
    "sample",
    "tensor_state",
    "times_path",
    "train_run",
]
