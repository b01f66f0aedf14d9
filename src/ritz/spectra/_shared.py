"""Names that other packages of ritz need and users do not."""

from ritz.spectra._cg import Solution
from ritz.spectra._functions import christoffel
from ritz.spectra._lanczos import least_frobenius_norm, negative_values
from ritz.spectra._maxent import chebyshev
