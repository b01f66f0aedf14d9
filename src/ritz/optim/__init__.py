"""Optimisers that generalise, averages of their iterates, and schedules."""

from ritz.optim.averaging import IterateAverage
from ritz.optim.damping import AdamW, delta_to_shrinkage, shrinkage_to_delta
from ritz.optim.diversity import Diversity, solution_diversity
from ritz.optim.gadam import Gadam, GadamX
from ritz.optim.lookahead import Lookahead
from ritz.optim.padam import Padam, PadamW
from ritz.optim.patience import AutoAverage
from ritz.optim.presets import Preset, from_preset, preset, preset_names
from ritz.optim.rates import WeightNorms, effective_rates, scale_invariant_weights, weight_norms
from ritz.optim.schedules import (
    GroupSchedule,
    Schedule,
    averaging_decay,
    linear_decay,
    step_decay,
    warmup,
)

__all__ = [
    "AdamW",
    "AutoAverage",
    "Diversity",
    "Gadam",
    "GadamX",
    "GroupSchedule",
    "IterateAverage",
    "Lookahead",
    "Padam",
    "PadamW",
    "Preset",
    "Schedule",
    "WeightNorms",
    "averaging_decay",
    "delta_to_shrinkage",
    "effective_rates",
    "from_preset",
    "linear_decay",
    "preset",
    "preset_names",
    "scale_invariant_weights",
    "shrinkage_to_delta",
    "solution_diversity",
    "step_decay",
    "warmup",
    "weight_norms",
]
