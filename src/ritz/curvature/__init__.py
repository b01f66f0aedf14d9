"""Curvature of networks: a risk at a point, and its Hessian, Gauss-Newton and Fisher matrices."""

from ritz.curvature.fishers import FisherOperator, fisher, gradient_covariance
from ritz.curvature.ggns import GGNOperator, ggn
from ritz.curvature.hessians import HessianOperator, hessian
from ritz.curvature.kronecker import KroneckerFactors, LayerOperator, kfac
from ritz.curvature.layers import block_diagonal
from ritz.curvature.piecewise import piecewise_gap
from ritz.curvature.points import Context
from ritz.curvature.products import CurvatureOperator, Products
from ritz.curvature.risk import Risk
from ritz.curvature.samples import batch_products, curvature_operator, fluctuation
from ritz.curvature.statistics import (
    Distance,
    GradientStatistics,
    Summary,
    distance,
    gradient_statistics,
    summary,
)
from ritz.curvature.structured import ggn_diagonal, ggn_trace

__all__ = [
    "Context",
    "CurvatureOperator",
    "Distance",
    "FisherOperator",
    "GGNOperator",
    "GradientStatistics",
    "HessianOperator",
    "KroneckerFactors",
    "LayerOperator",
    "Products",
    "Risk",
    "Summary",
    "batch_products",
    "block_diagonal",
    "curvature_operator",
    "distance",
    "fisher",
    "fluctuation",
    "ggn",
    "ggn_diagonal",
    "ggn_trace",
    "gradient_covariance",
    "gradient_statistics",
    "hessian",
    "kfac",
    "piecewise_gap",
    "summary",
]
