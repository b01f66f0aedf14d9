"""Results as pictures; needs the ``plots`` extra, which nothing else does."""

from ritz.plots.figures import against_exact, density, panels, share_legend, spectrum

__all__ = ["against_exact", "density", "panels", "share_legend", "spectrum"]
