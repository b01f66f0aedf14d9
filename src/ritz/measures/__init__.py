"""Measures of networks: sharpness, noise of mini-batches, landscapes, calibration."""

from ritz.measures._batch_models import BatchCurve
from ritz.measures._batches import BatchPrediction, batch_prediction, measured_batches
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
from ritz.measures._noise import batch_variance, curvature_variance, shrinkage
from ritz.measures._outliers import BulkEdge, GradientOverlap, bulk_edge, gradient_overlap
from ritz.measures._sharpness import Sharpness, sharpness

__all__ = [
    "BatchCurve",
    "BatchPrediction",
    "BulkEdge",
    "Degeneracy",
    "GradientOverlap",
    "Landscape",
    "Landscape2d",
    "Sharpness",
    "Temperature",
    "batch_prediction",
    "batch_variance",
    "bulk_edge",
    "curvature_variance",
    "filter_normalized",
    "fold_batch_norm",
    "gradient_overlap",
    "landscape",
    "landscape2d",
    "measured_batches",
    "random_direction",
    "rank_bound",
    "rank_degeneracy",
    "ritz_directions",
    "scaled",
    "sharpness",
    "shrinkage",
    "temperature",
]
