"""Training: a loop that is resumed bit for bit, its log and checkpoints, and what watches it."""

from ritz.training.checkpoints import CheckpointError
from ritz.training.evaluation import evaluate
from ritz.training.logs import LogError, read_log
from ritz.training.loop import fit
from ritz.training.monitors import CurvatureMonitor
from ritz.training.optimizers import create_optimizer, optimizer_names, register_optimizer
from ritz.training.rates import create_schedule
from ritz.training.results import TrainingResult
from ritz.training.settings import TrainingStatus
from ritz.training.weights import load_weights, read_weights, save_weights

__all__ = [
    "CheckpointError",
    "CurvatureMonitor",
    "LogError",
    "TrainingResult",
    "TrainingStatus",
    "create_optimizer",
    "create_schedule",
    "evaluate",
    "fit",
    "load_weights",
    "optimizer_names",
    "read_log",
    "read_weights",
    "register_optimizer",
    "save_weights",
]
