"""Spectra from products alone: Lanczos, traces, moments, densities, systems."""

from ritz.spectra.conjugate import NotPositiveDefiniteError, Solution, solve
from ritz.spectra.densities import density
from ritz.spectra.determinants import logdet
from ritz.spectra.diagonals import diagonal
from ritz.spectra.discrete import DiscreteDensity, SmoothedDensity
from ritz.spectra.entropic import EntropicDensity
from ritz.spectra.entropy import maxent
from ritz.spectra.extremes import Bounds, bounds, spectral_norm
from ritz.spectra.gradients import backward_gradient, logdet_gradient
from ritz.spectra.jackson import PolynomialDensity
from ritz.spectra.krylov import lanczos, lanczos_block
from ritz.spectra.likelihood import inverse_form, log_likelihood
from ritz.spectra.polynomials import Moments, moments
from ritz.spectra.protocol import Density
from ritz.spectra.quadrature import trace_function
from ritz.spectra.spectrum import Spectrum
from ritz.spectra.traces import frobenius_norm, trace

__all__ = [
    "Bounds",
    "Density",
    "DiscreteDensity",
    "EntropicDensity",
    "Moments",
    "NotPositiveDefiniteError",
    "PolynomialDensity",
    "SmoothedDensity",
    "Solution",
    "Spectrum",
    "backward_gradient",
    "bounds",
    "density",
    "diagonal",
    "frobenius_norm",
    "inverse_form",
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
