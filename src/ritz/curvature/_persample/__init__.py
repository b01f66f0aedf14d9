"""Gradients of single samples by the structure of a network, and exact curvature from them."""

from ritz.curvature._persample.exact import ggn_diagonal, ggn_trace, piecewise_gap
from ritz.curvature._persample.layers import KroneckerFactors, LayerOperator, block_diagonal, kfac

__all__ = [
    "KroneckerFactors",
    "LayerOperator",
    "block_diagonal",
    "ggn_diagonal",
    "ggn_trace",
    "kfac",
    "piecewise_gap",
]
