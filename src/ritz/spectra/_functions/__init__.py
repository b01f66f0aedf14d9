"""Traces of functions and log determinants."""

from ritz.spectra._functions.log_determinants import logdet
from ritz.spectra._functions.quadrature import christoffel, ritz_rules
from ritz.spectra._functions.trace_functions import trace_function

__all__ = ["christoffel", "logdet", "ritz_rules", "trace_function"]
