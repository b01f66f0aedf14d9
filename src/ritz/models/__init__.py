"""Networks by name, with the parameter counts and initial weights of their papers."""

from ritz.models import _feedforward, _language, _resnets  # noqa: F401  (they register models)
from ritz.models._catalogue import available, create, options
from ritz.models._ghost import GhostBatchNorm1d, GhostBatchNorm2d, with_ghost_batch_norm

__all__ = [
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "available",
    "create",
    "options",
    "with_ghost_batch_norm",
]
