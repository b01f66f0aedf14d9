"""Measures of networks: sharpness, noise of mini-batches, landscapes, calibration."""

from ritz.measures.calibration import Reliability, Temperature, scaled, temperature
from ritz.measures.degeneracy import Degeneracy, RankBound, rank_bound, rank_degeneracy
from ritz.measures.directions import filter_normalized, random_direction, ritz_directions
from ritz.measures.flatness import Sharpness, SharpnessRow, sharpness
from ritz.measures.folding import fold_batch_norm
from ritz.measures.landscapes import Landscape, Landscape2d, landscape, landscape2d
from ritz.measures.noise import Shrinkage, curvature_variance, shrinkage

__all__ = [
    "Degeneracy",
    "Landscape",
    "Landscape2d",
    "RankBound",
    "Reliability",
    "Sharpness",
    "SharpnessRow",
    "Shrinkage",
    "Temperature",
    "curvature_variance",
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
