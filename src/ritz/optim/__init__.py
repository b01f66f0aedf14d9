"""Adaptive and second-order optimisers, weight averaging, and schedules of the learning rate."""

from ritz.optim._adaptive import DampedAdamW, Gadam, GadamX, Padam, PadamW
from ritz.optim._averaging import AutoAverage, IterateAverage, swa
from ritz.optim._covariance_noise import CovarianceNoise, NoisySGD
from ritz.optim._curvature_optimizer import CurvatureOptimizer
from ritz.optim._damping import Damping, delta_to_shrinkage, shrinkage_to_delta
from ritz.optim._diagnostics import (
    effective_rates,
    scale_invariant_weights,
    solution_diversity,
    weight_norms,
)
from ritz.optim._hessian_free import HessianFree
from ritz.optim._kfac import KFAC, KFACPreconditioner
from ritz.optim._lookahead import Lookahead
from ritz.optim._newton import LanczosNewton
from ritz.optim._presets import from_preset, preset, preset_names
from ritz.optim._schedules import (
    GroupSchedule,
    Schedule,
    averaging_decay,
    held_from,
    linear_decay,
    step_decay,
    warmup,
)
from ritz.optim._spectral import SpectralRates, SpectralSGD, spectral_rates
from ritz.optim._step_reader import StepReader, StepReading, read_step

__all__ = [
    "KFAC",
    "AutoAverage",
    "CovarianceNoise",
    "CurvatureOptimizer",
    "DampedAdamW",
    "Damping",
    "Gadam",
    "GadamX",
    "GroupSchedule",
    "HessianFree",
    "IterateAverage",
    "KFACPreconditioner",
    "LanczosNewton",
    "Lookahead",
    "NoisySGD",
    "Padam",
    "PadamW",
    "Schedule",
    "SpectralRates",
    "SpectralSGD",
    "StepReader",
    "StepReading",
    "averaging_decay",
    "delta_to_shrinkage",
    "effective_rates",
    "from_preset",
    "held_from",
    "linear_decay",
    "preset",
    "preset_names",
    "read_step",
    "scale_invariant_weights",
    "shrinkage_to_delta",
    "solution_diversity",
    "spectral_rates",
    "step_decay",
    "swa",
    "warmup",
    "weight_norms",
]
