"""Curvature of networks: the Hessian, Gauss-Newton and Fisher matrices of a :class:`Risk`."""

import ritz.curvature._exact  # noqa: F401 - registers the rules of exact diagonals and traces
from ritz.curvature._kfac import kfac
from ritz.curvature._matrices import (
    CurvatureOperator,
    block_diagonal,
    curvature_operator,
    fisher,
    fluctuation,
    ggn,
    gradient_covariance,
    hessian,
)
from ritz.curvature._noise_sample import noise_sample
from ritz.curvature._risk import Risk
from ritz.curvature._statistics import distance, gradient_statistics, summary

__all__ = [
    "CurvatureOperator",
    "Risk",
    "block_diagonal",
    "curvature_operator",
    "distance",
    "fisher",
    "fluctuation",
    "ggn",
    "gradient_covariance",
    "gradient_statistics",
    "hessian",
    "kfac",
    "noise_sample",
    "summary",
]
