"""Results as pictures; needs the ``plots`` extra, which nothing else does."""

from ritz.plots._graphs import over_histogram, similarity
from ritz.plots._landscape import landscape, landscape2d
from ritz.plots._plot import plot, save_figure
from ritz.plots._spectra import (
    against_exact,
    density,
    panels,
    spectra,
    spectrum,
)
from ritz.plots._training import batch_scaling, curvature_over_time, degeneracy, training_curves

__all__ = [
    "against_exact",
    "batch_scaling",
    "curvature_over_time",
    "degeneracy",
    "density",
    "landscape",
    "landscape2d",
    "over_histogram",
    "panels",
    "plot",
    "save_figure",
    "similarity",
    "spectra",
    "spectrum",
    "training_curves",
]
