"""Lanczos: whole spectra, extreme eigenpairs, bounds, and the recurrence that they use."""

from ritz.spectra._lanczos.extremes import Bounds, Eigenpairs, bounds, eigenpairs, spectral_norm
from ritz.spectra._lanczos.recurrence import TUNING, Recurrence, Reorthogonalization
from ritz.spectra._lanczos.spectrum import (
    Spectrum,
    lanczos,
    lanczos_block,
    least_frobenius_norm,
    negative_values,
)
from ritz.spectra._lanczos.steps import advance, start_runs, step

__all__ = [
    "TUNING",
    "Bounds",
    "Eigenpairs",
    "Recurrence",
    "Reorthogonalization",
    "Spectrum",
    "advance",
    "bounds",
    "eigenpairs",
    "lanczos",
    "lanczos_block",
    "least_frobenius_norm",
    "negative_values",
    "spectral_norm",
    "start_runs",
    "step",
]
