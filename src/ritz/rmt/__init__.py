"""Random matrix theory: laws, free sums and products, spiked models; SGD on noisy quadratics."""

from ritz.rmt import bounds, diffusion, quadratic
from ritz.rmt._free import FreeDensity, free_product, free_sum, generalized_marchenko_pastur
from ritz.rmt._laws import Law, MarchenkoPastur, Normal, Semicircle
from ritz.rmt._spikes import Spikes, additive_spikes, multiplicative_spikes
from ritz.rmt._tracy_widom import TracyWidom
from ritz.rmt._transforms import blue, r_transform, s_transform, stieltjes

__all__ = [
    "FreeDensity",
    "Law",
    "MarchenkoPastur",
    "Normal",
    "Semicircle",
    "Spikes",
    "TracyWidom",
    "additive_spikes",
    "blue",
    "bounds",
    "diffusion",
    "free_product",
    "free_sum",
    "generalized_marchenko_pastur",
    "multiplicative_spikes",
    "quadratic",
    "r_transform",
    "s_transform",
    "stieltjes",
]
