"""Random matrix theory and models of noisy training, in closed form."""

from ritz.rmt import quadratic

__all__ = ["quadratic"]
