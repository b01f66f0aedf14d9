"""Training: a loop that resumes bit for bit, its log and checkpoints, and curvature monitors."""

from ritz._core.training_config import TrainingConfig
from ritz.training._assembly import optimizer_names, preset_config, register_optimizer
from ritz.training._fit import fit
from ritz.training._folder import (
    CheckpointError,
    load_weights,
    read_log,
    read_weights,
    save_weights,
)
from ritz.training._monitor import CurvatureMonitor, scalars
from ritz.training._quantities import quantity_names, register_quantity
from ritz.training._run import TrainingResult
from ritz.training._step import evaluate
from ritz.training._sweep import SweepResult, sweep

__all__ = [
    "CheckpointError",
    "CurvatureMonitor",
    "SweepResult",
    "TrainingConfig",
    "TrainingResult",
    "evaluate",
    "fit",
    "load_weights",
    "optimizer_names",
    "preset_config",
    "quantity_names",
    "read_log",
    "read_weights",
    "register_optimizer",
    "register_quantity",
    "save_weights",
    "scalars",
    "sweep",
]
