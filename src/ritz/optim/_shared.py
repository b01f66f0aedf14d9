"""Names for other packages of ritz."""

from ritz.optim._kfac import Curvature as Curvature
from ritz.optim._kfac import curvature_of as curvature_of
