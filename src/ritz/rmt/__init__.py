"""Random matrix theory and models of noisy training, in closed form."""

from ritz.rmt import quadratic
from ritz.rmt._spikes import Spikes, additive_spikes, multiplicative_spikes

__all__ = ["Spikes", "additive_spikes", "multiplicative_spikes", "quadratic"]
