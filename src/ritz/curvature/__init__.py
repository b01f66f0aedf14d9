"""Curvature of networks: a risk at a point, and its Hessian, Gauss-Newton and Fisher matrices."""

from ritz.curvature.ggns import GGNOperator, ggn
from ritz.curvature.hessians import HessianOperator, hessian
from ritz.curvature.points import Context
from ritz.curvature.products import Products
from ritz.curvature.risk import Risk

__all__ = ["Context", "GGNOperator", "HessianOperator", "Products", "Risk", "ggn", "hessian"]
