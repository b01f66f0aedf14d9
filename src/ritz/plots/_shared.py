"""Names that other packages of ritz need and users do not."""

from ritz.plots._plot import check_picture
from ritz.plots._scales import direction_title, titled
from ritz.plots._spectra import BLUE, GREEN, GREY, LEGEND, PALETTE, VERMILION, share_legend

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "LEGEND",
    "PALETTE",
    "VERMILION",
    "check_picture",
    "direction_title",
    "share_legend",
    "titled",
]
