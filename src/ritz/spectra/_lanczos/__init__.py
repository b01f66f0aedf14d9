"""Lanczos: the recurrence, its saved state, whole spectra, extreme eigenpairs and bounds."""

from ritz.spectra._lanczos.extremes import Bounds, bounds, spectral_norm
from ritz.spectra._lanczos.recurrence import (
    REORTHOGONALIZATIONS,
    ROUNDOFF,
    Recurrence,
    Reorthogonalization,
    advance,
    step,
)
from ritz.spectra._lanczos.run import lanczos, lanczos_block
from ritz.spectra._lanczos.spectrum import Spectrum, least_frobenius_norm, negative_values

__all__ = [
    "REORTHOGONALIZATIONS",
    "ROUNDOFF",
    "Bounds",
    "Recurrence",
    "Reorthogonalization",
    "Spectrum",
    "advance",
    "bounds",
    "lanczos",
    "lanczos_block",
    "least_frobenius_norm",
    "negative_values",
    "spectral_norm",
    "step",
]
