"""Training: a loop that resumes bit for bit, its log and checkpoints, monitors and sweeps.

``LightningCallback`` needs Lightning, and ``TrainerCallback`` needs the transformers library of
Hugging Face. Each library is imported when its callback is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ritz._core.training_config import TrainingConfig
from ritz.training._checkpoint import CheckpointError
from ritz.training._evaluate import evaluate
from ritz.training._fit import fit
from ritz.training._log import read_log
from ritz.training._monitor import CurvatureMonitor
from ritz.training._optimizers import optimizer_names, preset_config, register_optimizer
from ritz.training._quantities import quantity_names, register_quantity
from ritz.training._result import TrainingResult
from ritz.training._sweep import SweepResult, sweep
from ritz.training._weights import load_weights, read_weights, save_weights
from ritz.training._writers import MlflowWriter, WandbWriter, scalars

if TYPE_CHECKING:
    from ritz.training._lightning import LightningCallback as LightningCallback
    from ritz.training._transformers import TrainerCallback as TrainerCallback

__all__ = [
    "CheckpointError",
    "CurvatureMonitor",
    "MlflowWriter",
    "SweepResult",
    "TrainingConfig",
    "TrainingResult",
    "WandbWriter",
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

# Not in __all__, because `from ritz.training import *` would fail without these libraries.
_OPTIONAL = {"LightningCallback": "_lightning", "TrainerCallback": "_transformers"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _OPTIONAL:
            raise AttributeError(f"module 'ritz.training' has no attribute {name!r}")
        value = getattr(import_module(f"ritz.training.{_OPTIONAL[name]}"), name)
        globals()[name] = value  # the next use does not call this function
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_OPTIONAL])
