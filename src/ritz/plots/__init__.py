"""Results as pictures; needs the ``plots`` extra, which nothing else does."""

from ritz.plots.figures import against_exact, density, panels, share_legend, spectra, spectrum
from ritz.plots.graphs import over_histogram, similarity
from ritz.plots.landscapes import landscape, landscape2d
from ritz.plots.pictures import picture
from ritz.plots.saving import check_picture, save_figure
from ritz.plots.titles import direction_title, titled
from ritz.plots.training import batch_scaling, curvature_over_time, degeneracy, training_curves

__all__ = [
    "against_exact",
    "batch_scaling",
    "check_picture",
    "curvature_over_time",
    "degeneracy",
    "density",
    "direction_title",
    "landscape",
    "landscape2d",
    "over_histogram",
    "panels",
    "picture",
    "save_figure",
    "share_legend",
    "similarity",
    "spectra",
    "spectrum",
    "titled",
    "training_curves",
]
