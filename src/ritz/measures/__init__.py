"""Measures of networks: sharpness, noise of mini-batches, landscapes, calibration."""

from ritz.measures._calibrated import (
    CalibratedSharpness,
    ExcessRisk,
    calibrated_sharpness,
    excess_risk,
)
from ritz.measures._calibration import Temperature, scaled, temperature
from ritz.measures._degeneracy import Degeneracy, rank_bound, rank_degeneracy
from ritz.measures._folding import fold_batch_norm
from ritz.measures._landscape import (
    Landscape,
    Landscape2d,
    filter_normalized,
    landscape,
    landscape2d,
    random_direction,
    ritz_directions,
)
from ritz.measures._noise import curvature_variance, shrinkage
from ritz.measures._sharpness import Sharpness, sharpness

__all__ = [
    "CalibratedSharpness",
    "Degeneracy",
    "ExcessRisk",
    "Landscape",
    "Landscape2d",
    "Sharpness",
    "Temperature",
    "calibrated_sharpness",
    "curvature_variance",
    "excess_risk",
    "filter_normalized",
    "fold_batch_norm",
    "landscape",
    "landscape2d",
    "random_direction",
    "rank_bound",
    "rank_degeneracy",
    "ritz_directions",
    "scaled",
    "sharpness",
    "shrinkage",
    "temperature",
]
