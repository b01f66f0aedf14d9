"""Random matrices and noisy quadratics: what theory says before anything is measured."""

from ritz.rmt import quadratic

__all__ = ["quadratic"]
