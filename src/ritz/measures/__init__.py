"""Measures of networks: sharpness, noise of mini-batches, landscapes, calibration."""

from ritz.measures._advice import Advice, advice_cost, advise
from ritz.measures._batch_models import BatchCurve
from ritz.measures._batch_prediction import BatchPrediction, batch_prediction, measured_batches
from ritz.measures._calibrated import (
    CalibratedSharpness,
    ExcessRisk,
    calibrated_sharpness,
    excess_risk,
)
from ritz.measures._calibration import Temperature, scaled, temperature
from ritz.measures._curvature_noise import batch_variance, curvature_variance, shrinkage
from ritz.measures._degeneracy import Degeneracy, rank_bound, rank_degeneracy
from ritz.measures._folding import fold_batch_norm
from ritz.measures._gradient_noise import GradientNoise, gradient_noise
from ritz.measures._landscape import (
    Landscape,
    Landscape2d,
    filter_normalized,
    landscape,
    landscape2d,
    random_direction,
    ritz_directions,
)
from ritz.measures._outliers import BulkEdge, GradientOverlap, bulk_edge, gradient_overlap
from ritz.measures._sharpness import Sharpness, sharpness
from ritz.measures._stability import curvature_ratio, least_damping, stable_rate
from ritz.measures._trials import critical_sharpness, trainable_rate

__all__ = [
    "Advice",
    "BatchCurve",
    "BatchPrediction",
    "BulkEdge",
    "CalibratedSharpness",
    "Degeneracy",
    "ExcessRisk",
    "GradientNoise",
    "GradientOverlap",
    "Landscape",
    "Landscape2d",
    "Sharpness",
    "Temperature",
    "advice_cost",
    "advise",
    "batch_prediction",
    "batch_variance",
    "bulk_edge",
    "calibrated_sharpness",
    "critical_sharpness",
    "curvature_ratio",
    "curvature_variance",
    "excess_risk",
    "filter_normalized",
    "fold_batch_norm",
    "gradient_noise",
    "gradient_overlap",
    "landscape",
    "landscape2d",
    "least_damping",
    "measured_batches",
    "random_direction",
    "rank_bound",
    "rank_degeneracy",
    "ritz_directions",
    "scaled",
    "sharpness",
    "shrinkage",
    "stable_rate",
    "temperature",
    "trainable_rate",
]
