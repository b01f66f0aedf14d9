"""Names that other packages of ritz need and users do not."""

from ritz.plots._plot import check_picture
from ritz.plots._style import STYLE, Axes, Figure, direction_title, share_legend, titled
