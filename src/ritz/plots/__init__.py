"""Results as Matplotlib figures. Needs the ``plots`` extra.

:func:`plot` draws any result. The other functions can draw on axes that you pass: spectra and
densities (``spectrum``, ``spectra``, ``density``), also over exact eigenvalues (``against_exact``,
``over_histogram``); ``landscape``, ``landscape2d``; ``similarity`` of graphs; training logs
(``training_curves``, ``watched``, ``curvature_over_time``, ``degeneracy``); and quantities over
batch sizes (``batch_scaling``, ``advice``). ``panels`` makes a figure, and ``save_figure`` writes
it.
"""

from ritz.plots import _networks  # noqa: F401  (it registers plots)
from ritz.plots._batches import advice, batch_scaling
from ritz.plots._graphs import similarity
from ritz.plots._landscapes import landscape, landscape2d
from ritz.plots._monitors import curvature_over_time, degeneracy, watched
from ritz.plots._plot import plot, save_figure
from ritz.plots._spectra import against_exact, density, over_histogram, spectra, spectrum
from ritz.plots._style import panels
from ritz.plots._training import training_curves

__all__ = [
    "advice",
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
    "watched",
]
