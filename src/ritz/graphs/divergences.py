"""Distances between many spectra at once, each by what it needs of them."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ritz.graphs.heat import default_times, heat_weights
from ritz.spectra import EntropicDensity
from ritz.spectra.dual import chebyshev

POINTS = 4096  # at which densities are integrated, crowded towards both ends
Features = Callable[[Tensor, Sequence[EntropicDensity]], Tensor]
Distance = Callable[[Tensor, Tensor], Tensor]


def multipliers(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Multipliers and fitted moments of densities, ``(N, 2, m)``."""
    return torch.stack([torch.stack([one.alphas, one.fitted]) for one in densities])


def symmetric_kl(a: Tensor, b: Tensor) -> Tensor:
    r"""Half the sum of both divergences: :math:`\tfrac12 \sum (\alpha - \beta)(\mu^q - \mu^p)`.

    Differences are taken before they are multiplied: the multipliers may be large and alike.
    """
    difference = a[:, None] - b[None]
    # Rounding may take it below zero, and the sum of nothing is a negative zero.
    return (-0.5 * (difference[:, :, 0] * difference[:, :, 1]).sum(-1)).clamp_min(0.0) + 0.0


def shares(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Masses of densities at points of a quadrature, ``(N, POINTS)``; each row sums to one."""
    angles = _angles()
    table = chebyshev(torch.cos(angles), densities[0].alphas.shape[0])[:, 1:]
    alphas = torch.stack([one.alphas for one in densities])
    log_masses = torch.sin(angles).log() - alphas @ table.T
    return log_masses.softmax(1)


def jensen_shannon(a: Tensor, b: Tensor) -> Tensor:
    r"""Mean divergence of two densities from their mean, at most :math:`\log 2`."""
    rows = [
        0.5 * (_divergence(one, 0.5 * (one + b)) + _divergence(b, 0.5 * (one + b))) for one in a
    ]
    return torch.stack(rows)


def wasserstein(a: Tensor, b: Tensor) -> Tensor:
    r"""The area :math:`\int |F_p - F_q|` between distribution functions."""
    angles = _angles()
    steps = torch.sin(angles) * (math.pi / POINTS)
    below = [rows.cumsum(1) - 0.5 * rows for rows in (a, b)]
    return torch.stack([((one - below[1]).abs() * steps).sum(1) for one in below[0]])


def heat_traces(means: Tensor, densities: Sequence[EntropicDensity]) -> Tensor:
    """Heat traces at the default times, from moments alone, ``(N, T)``."""
    return means @ heat_weights(default_times(), means.shape[1] - 1).T


def root_mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square difference of rows."""
    return (a[:, None] - b[None]).square().mean(-1).sqrt()


def _angles() -> Tensor:
    """Midpoints in the angle whose cosine is the variable: from the upper end down."""
    return (torch.arange(POINTS, dtype=torch.float64) + 0.5).flip(0) * (math.pi / POINTS)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    # Where both underflow there is nothing to tell apart.
    terms: Tensor = torch.special.xlogy(p, p / q.clamp_min(1e-300))
    return terms.sum(-1)


FEATURES: dict[str, Features] = {
    "symmetric_kl": multipliers,
    "jensen_shannon": shares,
    "wasserstein": shares,
    "heat": heat_traces,
}
DISTANCES: dict[str, Distance] = {
    "symmetric_kl": symmetric_kl,
    "jensen_shannon": jensen_shannon,
    "wasserstein": wasserstein,
    "heat": root_mean_square,
}
