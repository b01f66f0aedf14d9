"""Training: a loop that is resumed bit for bit, its log and checkpoints, and what watches it."""

from ritz.training._config import (
    create_optimizer,
    optimizer_names,
    register_optimizer,
)
from ritz.training._evaluate import TrainingResult, evaluate
from ritz.training._fit import fit
from ritz.training._folder import (
    CheckpointError,
    load_weights,
    read_log,
    read_weights,
    save_weights,
)
from ritz.training._monitor import CurvatureMonitor

__all__ = [
    "CheckpointError",
    "CurvatureMonitor",
    "TrainingResult",
    "create_optimizer",
    "evaluate",
    "fit",
    "load_weights",
    "optimizer_names",
    "read_log",
    "read_weights",
    "register_optimizer",
    "save_weights",
]
