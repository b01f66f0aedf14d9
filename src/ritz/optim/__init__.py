"""Optimisers that generalise, averages of their iterates, and schedules."""

from ritz.optim.averaging import IterateAverage
from ritz.optim.damping import AdamW, delta_to_shrinkage, shrinkage_to_delta
from ritz.optim.gadam import Gadam, GadamX
from ritz.optim.lookahead import Lookahead
from ritz.optim.padam import Padam, PadamW
from ritz.optim.patience import AutoAverage

__all__ = [
    "AdamW",
    "AutoAverage",
    "Gadam",
    "GadamX",
    "IterateAverage",
    "Lookahead",
    "Padam",
    "PadamW",
    "delta_to_shrinkage",
    "shrinkage_to_delta",
]
