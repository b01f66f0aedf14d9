"""Curvature of networks: a risk at a point, and its Hessian, Gauss-Newton and Fisher matrices."""

from ritz.curvature.fishers import FisherOperator, fisher, gradient_covariance
from ritz.curvature.ggns import GGNOperator, ggn
from ritz.curvature.hessians import HessianOperator, hessian
from ritz.curvature.points import Context
from ritz.curvature.products import CurvatureOperator, Products
from ritz.curvature.risk import Risk
from ritz.curvature.samples import batch_products, curvature_operator, fluctuation

__all__ = [
    "Context",
    "CurvatureOperator",
    "FisherOperator",
    "GGNOperator",
    "HessianOperator",
    "Products",
    "Risk",
    "batch_products",
    "curvature_operator",
    "fisher",
    "fluctuation",
    "ggn",
    "gradient_covariance",
    "hessian",
]
