"""Heat traces of a graph: its spectrum at every scale of time, from moments."""

import math
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ritz._core.random import resolve_generator
from ritz._core.results import Estimate
from ritz.graphs.entropic import INTERVAL, NUM_MOMENTS, NUM_PROBES, moments
from ritz.spectra import Moments
from ritz.spectra.sampling import stderr

NUM_TIMES = 250
TIMES = (1e-2, 1e2)


def heat_trace(
    graph: Any,
    *,
    times: Tensor | None = None,
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""Return the heat trace of the normalised Laplacian, a share of the vertices, over time.

    .. math:: h(t) = \frac1n \operatorname{tr} e^{-t L} = e^{-t} \Big(I_0(t) +
        2 \sum_{k \ge 1} (-1)^k I_k(t)\, \mu_k\Big)

    with the Chebyshev moments :math:`\mu_k` on ``[0, 2]`` and modified Bessel functions. What the
    sum leaves out is below :math:`2 e^{-t} \sum_{k > m} I_k(t)`, which is ``truncation``: nothing
    for :math:`t` below about :math:`m^2 / 50`.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes, or its moments.
        times: ``(T,)``, not negative; 250 from 0.01 to 100 in equal ratios by default.
        num_moments: As for :func:`ritz.graphs.moments`.
        num_probes: As for :func:`ritz.graphs.moments`.
        generator: Source of the probes.

    Cost: that of the moments. The mean is ``(T,)``, samples are ``(num_probes, T)``.

    Reference: Tsitsulin et al., *NetLSD* (2018), normalised by the empty graph.
    """
    times = default_times() if times is None else torch.as_tensor(times, dtype=torch.float64)
    if times.ndim != 1 or not len(times) or not bool(((times >= 0) & times.isfinite()).all()):
        raise ValueError("times must be a vector of finite numbers, none negative")
    found = graph
    if not isinstance(graph, Moments):
        generator = resolve_generator(generator)
        found = moments(graph, num_moments=num_moments, num_probes=num_probes, generator=generator)
    check_moments("graph", found)
    weights = heat_weights(times, len(found.mean) - 1)
    sampled = len(found.samples) > 1
    samples = found.samples @ weights.T
    return Estimate(
        mean=weights @ found.mean,
        stderr=stderr(samples) if sampled else torch.zeros_like(times),
        truncation=_left_out(times, weights),
        samples=samples if sampled else None,
        num_products=found.num_products,
        method=f"{len(found.mean) - 1} Chebyshev moments",
        status=found.status,
        seed=found.seed,
    )


def default_times() -> Tensor:
    """Return 250 times from 0.01 to 100 in equal ratios."""
    return torch.from_numpy(np.geomspace(*TIMES, NUM_TIMES))


def heat_weights(times: Tensor, num_moments: int) -> Tensor:
    """Return what each moment is worth to the heat trace, ``(T, num_moments + 1)``."""
    degrees = np.arange(num_moments + 1)
    # The scaled function is e^-t I_k(t): neither overflows nor underflows at large times.
    bessel = scipy.special.ive(degrees, times.numpy()[:, None])
    signs = np.where(degrees % 2, -2.0, 2.0)
    signs[0] = 1.0
    return torch.from_numpy(bessel * signs)


def check_moments(name: str, found: Moments) -> None:
    """Raise unless moments are Chebyshev's on ``[0, 2]``, as those of a graph are."""
    if found.basis != "chebyshev" or found.interval != INTERVAL:
        raise ValueError(
            f"{name} must be moments of a normalised Laplacian, chebyshev on {INTERVAL}, "
            f"got {found.basis} on {found.interval}"
        )


def _left_out(times: Tensor, weights: Tensor) -> Tensor:
    # All weights without their signs add up to one.
    rest = 1.0 - weights.abs().sum(1)
    return rest.clamp_min(math.ulp(1.0))
