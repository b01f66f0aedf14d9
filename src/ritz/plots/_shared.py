"""Names that other packages of ritz need and users do not."""

from ritz.plots import _style as style
from ritz.plots._plot import check_picture
from ritz.plots._watched import watched_names
