"""Spectra from matrix-vector products: eigenpairs, densities, traces, log determinants."""

from ritz._core.density import Density
from ritz.spectra._cg import LowRankPreconditioner, solve
from ritz.spectra._density import DiscreteDensity, PolynomialDensity, SmoothedDensity, density
from ritz.spectra._functions import logdet, trace_function
from ritz.spectra._lanczos import (
    Eigenpairs,
    Spectrum,
    bounds,
    eigenpairs,
    lanczos,
    lanczos_block,
    spectral_norm,
)
from ritz.spectra._likelihood import log_likelihood
from ritz.spectra._logdet_gradient import backward_gradient, logdet_gradient
from ritz.spectra._maxent import EntropicDensity, maxent
from ritz.spectra._moments import Moments, moments
from ritz.spectra._positive_definite import NotPositiveDefiniteError
from ritz.spectra._traces import diagonal, frobenius_norm, trace

__all__ = [
    "Density",
    "DiscreteDensity",
    "Eigenpairs",
    "EntropicDensity",
    "LowRankPreconditioner",
    "Moments",
    "NotPositiveDefiniteError",
    "PolynomialDensity",
    "SmoothedDensity",
    "Spectrum",
    "backward_gradient",
    "bounds",
    "density",
    "diagonal",
    "eigenpairs",
    "frobenius_norm",
    "lanczos",
    "lanczos_block",
    "log_likelihood",
    "logdet",
    "logdet_gradient",
    "maxent",
    "moments",
    "solve",
    "spectral_norm",
    "trace",
    "trace_function",
]
