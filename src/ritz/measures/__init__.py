"""Measures of networks: sharpness, noise of mini-batches, landscapes, calibration."""

from ritz.measures._advice import advice_cost, advise
from ritz.measures._advice_result import Advice
from ritz.measures._batch_models import BatchCurve
from ritz.measures._batch_prediction import BatchPrediction, batch_prediction, measured_batches
from ritz.measures._bulk_edge import BulkEdge, bulk_edge
from ritz.measures._calibration import (
    CalibratedSharpness,
    ExcessRisk,
    Temperature,
    calibrated_sharpness,
    excess_risk,
    scaled,
    temperature,
)
from ritz.measures._critical_sharpness import critical_sharpness
from ritz.measures._curvature_noise import batch_variance, curvature_variance, shrinkage
from ritz.measures._damping import curvature_ratio, least_damping
from ritz.measures._degeneracy import Degeneracy, rank_bound, rank_degeneracy
from ritz.measures._folding import fold_batch_norm
from ritz.measures._gradients import (
    GradientNoise,
    GradientOverlap,
    gradient_noise,
    gradient_overlap,
)
from ritz.measures._landscape import (
    Landscape,
    Landscape2d,
    filter_normalized,
    landscape,
    landscape2d,
    random_direction,
    ritz_directions,
)
from ritz.measures._learning_rates import stable_rate, trainable_rate
from ritz.measures._sharpness import Sharpness, sharpness

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
