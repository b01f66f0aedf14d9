"""Densities of maximum entropy from moments."""

from ritz.spectra._maxent.dual import Grid, chebyshev, in_interval
from ritz.spectra._maxent.entropic import EntropicDensity
from ritz.spectra._maxent.solver import maxent

__all__ = ["EntropicDensity", "Grid", "chebyshev", "in_interval", "maxent"]
