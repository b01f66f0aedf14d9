"""Names that other packages of ritz need and users do not."""

from ritz.training._checkpoint import CHECKPOINT, WEIGHTS
from ritz.training._data import PARTS, DataParts, as_parts, check_batch_size, first_batch
from ritz.training._jobs import available_cores
from ritz.training._log import LOG
from ritz.training._optimizers import check_patience, create_optimizer
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
from ritz.training._sweep import outcome, run_plan
from ritz.training._sweep_plan import Point, SweepOptions, check_metric, plan_sweep
from ritz.training._weights import tensor_state
