"""Names that other packages of ritz need and users do not."""

from ritz.optim._averaging import attached_to as attached_to
from ritz.optim._covariance_noise import NoiseReplay as NoiseReplay
from ritz.optim._edge import Edge as Edge
from ritz.optim._edge import edge as edge
from ritz.optim._edge import update_settings as update_settings
from ritz.optim._group_settings import learning_rate as learning_rate
from ritz.optim._kfac import curvature_of as curvature_of
