"""Networks by name, with the parameter counts and first weights of the papers they come from."""

from ritz.models import convolutional, dense, gpt, lstm, preactivated, resnets, resnexts, vgg
from ritz.models.catalogue import available, create, options
from ritz.models.ghost import GhostBatchNorm1d, GhostBatchNorm2d, with_ghost_batch_norm

__all__ = [
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "available",
    "convolutional",
    "create",
    "dense",
    "gpt",
    "lstm",
    "options",
    "preactivated",
    "resnets",
    "resnexts",
    "vgg",
    "with_ghost_batch_norm",
]
