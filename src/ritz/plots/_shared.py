"""Names that other packages of ritz need and users do not."""

from ritz.plots import _style as style
from ritz.plots._monitors import watched_names
from ritz.plots._plot import check_picture
