"""Names that other packages of ritz need and users do not."""

from ritz.training._data import DataParts, as_parts, first_batch
from ritz.training._files import LOG, NAME, WEIGHTS
from ritz.training._optimizers import create_optimizer
from ritz.training._quantities import QUANTITIES
from ritz.training._run_folder import (
    CONFIG,
    RunConfig,
    advised_settings,
    measured_risk,
    read_run,
    run_files,
    run_weights,
    train_run,
)
from ritz.training._sweep import outcome, plan_sweep, run_plan
from ritz.training._weights import tensor_state
from ritz.training._workers import available_cores
