"""Results as pictures; needs the ``plots`` extra, which nothing else does."""

from ritz.plots.figures import against_exact, density, panels, share_legend, spectra, spectrum
from ritz.plots.landscapes import landscape, landscape2d

__all__ = [
    "against_exact",
    "density",
    "landscape",
    "landscape2d",
    "panels",
    "share_legend",
    "spectra",
    "spectrum",
]
