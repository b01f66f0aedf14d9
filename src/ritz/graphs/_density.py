"""The spectral density of a graph, its moments, entropy and heat trace."""

import math
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status
from ritz._core.sampling import stderr
from ritz.graphs._graph import Graph
from ritz.graphs._io import as_graph
from ritz.graphs._matrices import check_place, eigenvalues, exact_moments, laplacian, with_edges
from ritz.spectra import DiscreteDensity, EntropicDensity, Moments, SmoothedDensity, maxent
from ritz.spectra import density as lanczos_density
from ritz.spectra import moments as sampled_moments

# ------------------------------------------------------------------------------------------
# Errors of what follows from moments: the jackknife over groups of probes.

NUM_GROUPS = 10  # of probes, each left out in turn


def leave_out(samples: Tensor) -> Tensor:
    """Return means of samples ``(d, m)`` with a group left out in turn, ``(g, m)``.

    There are as many groups as probes, ten at the most, and none of a single sample.
    """
    groups = min(NUM_GROUPS, len(samples))
    if groups < 2:
        return samples[:0]
    total = samples.sum(0)
    parts = torch.tensor_split(samples, groups)
    return torch.stack([(total - part.sum(0)) / (len(samples) - len(part)) for part in parts])


def jackknife(values: Tensor) -> Tensor:
    r"""Return the standard error :math:`\sqrt{\frac{g-1}{g} \sum_k (v_k - \bar v)^2}`.

    Args:
        values: Of samples with a group left out, ``(g, *s)``; zero for none.
    """
    if not len(values):
        return torch.zeros(values.shape[1:], dtype=torch.float64)
    spread = (values - values.mean(0)).square().sum(0)
    return (spread * (len(values) - 1) / len(values)).sqrt()


def bias(values: Tensor, whole: Tensor) -> Tensor:
    r"""Return the bias :math:`(g - 1)(\bar v - v)` of a statistic, by the jackknife.

    Args:
        values: Of samples with a group left out, ``(g, *s)``; zero for none.
        whole: Of all samples, ``(*s)``.
    """
    if not len(values):
        return torch.zeros_like(whole)
    return (len(values) - 1) * (values.mean(0) - whole)


def matched_within(density: EntropicDensity) -> Tensor:
    """Return the errors within which the moments of a density were matched, ``(m + 1,)``."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), density.ridge.sqrt()])


# ------------------------------------------------------------------------------------------
# The spectrum of a graph: the density of the eigenvalues of its normalised Laplacian.

INTERVAL = (0.0, 2.0)  # holds the spectrum of every normalised Laplacian
NUM_MOMENTS = 100
NUM_PROBES = 64
SMALL = 256  # vertices up to which all eigenvalues cost less than the probes
NARROW = 4096  # vertices up to which calls cost more than products: all probes at once


def moments(
    graph: Any,
    *,
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    exact: bool | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Moments:
    r"""Return Chebyshev moments of the normalised Laplacian with their errors.

    .. math:: \mu_j = \frac1n \operatorname{tr} T_j(L - I), \qquad j = 0, \dots, m

    The eigenvalues of :math:`L` lie in ``[0, 2]``, whatever the graph, so that no bounds are
    needed; :math:`T_j(L - I)` are the shifted polynomials of :math:`L / 2` on ``[0, 1]``. Cost:
    :math:`d m / 2` products. Memory: 4 vectors a probe of a block, which is one
    cache line wide, eight probes in float64, unless the graph is small.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes.
        num_moments: Highest degree ``m``.
        num_probes: Probes ``d``; errors fall as :math:`1 / \sqrt{n d}`.
        exact: Moments from all eigenvalues, without an error; by default where there are at most
            256 vertices.
        dtype: Of the products.
        device: Where products are made.
        generator: Source of the probes.
        progress: Whether to show a bar, or what to tell.

    Reference: Algorithms 2 and 4 of *Spectral Machine Learning*.
    """
    graph = as_graph(graph)
    check_count("num_moments", num_moments)
    check_count("num_probes", num_probes, low=2)
    check_place(dtype, device)
    generator = resolve_generator(generator)
    if graph.num_nodes <= SMALL if exact is None else exact:
        return _exact_moments(graph, num_moments, generator)
    return sampled_moments(
        laplacian(graph, dtype=dtype, device=device),
        num_moments=num_moments,
        interval=INTERVAL,
        num_probes=num_probes,
        block_size=num_probes if graph.num_nodes <= NARROW else None,
        generator=generator,
        progress=progress,
    )


def spectrum(
    graph: Any,
    *,
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    exact: bool | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> EntropicDensity:
    r"""Return the entropic spectrum of a graph: the density of largest entropy with its moments.

    .. math:: p(\lambda) = \frac1Z \exp\Big(-\sum_{i=1}^m \alpha_i T_i(\lambda - 1)\Big),
        \qquad \int_0^2 p(\lambda)\, T_i(\lambda - 1)\, d\lambda = \mu_i

    Moments are matched to within their standard errors. Where many eigenvalues are equal (isolated
    vertices, leaves of one vertex), no density has their moments, and ``status`` says how far
    they were relaxed. Cost and memory: those of :func:`moments`, and a few hundredths of a second.

    Args:
        graph: As for :func:`moments`, with an edge at least.
        num_moments: Moments ``m``: what is finer than :math:`2 \pi / m` is not resolved.
        num_probes: As for :func:`moments`.
        exact: As for :func:`moments`.
        dtype: As for :func:`moments`.
        device: As for :func:`moments`.
        generator: Source of the probes.
        progress: Whether to show a bar, or what to tell.

    Raises:
        GraphError: The graph has no edge: all its eigenvalues are 0, which is no density.

    Reference: Algorithm 4 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> ring = graphs.watts_strogatz(200, num_neighbors=4, p=0.1)
        >>> round(graphs.spectrum(ring, num_moments=20).moment(1), 6)
        1.0
    """
    graph = with_edges(graph)
    found = moments(
        graph,
        num_moments=num_moments,
        num_probes=num_probes,
        exact=exact,
        dtype=dtype,
        device=device,
        generator=generator,
        progress=progress,
    )
    density: EntropicDensity = maxent(found)
    return density


def density(
    graph: Any,
    *,
    num_steps: int = NUM_MOMENTS // 2,
    num_probes: int = NUM_PROBES,
    width: float | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> SmoothedDensity:
    r"""Return the density of the normalised Laplacian by Lanczos, smoothed by a Gaussian.

    What :func:`spectrum` is measured against. Smoothing biases the moment of degree ``m`` by
    :math:`\sum_{j \ge 1} \binom{m}{2j} \sigma^{2j} (2j - 1)!!\, \mu_{m-2j}` (Theorem 2).
    Cost: ``num_steps`` products a probe. Memory: ``num_steps + 5`` vectors a probe of a block.

    Args:
        graph: As for :func:`moments`.
        num_steps: Steps a probe, as many as there are vertices at most; two moments each.
        num_probes: Probes; their spread is the band of ``pdf_band``.
        width: Standard deviation of the Gaussian; the distance between Ritz values by default.
        dtype: As for :func:`moments`.
        device: As for :func:`moments`.
        generator: Source of the probes.
        progress: Whether to show a bar, or what to tell.

    Reference: Section 3.3 of *Spectral Machine Learning*.
    """
    op = laplacian(graph, dtype=dtype, device=device)
    check_count("num_steps", num_steps)
    found = lanczos_density(
        op,
        num_steps=min(num_steps, op.shape[0]),
        num_probes=num_probes,
        generator=generator,
        progress=progress,
    )
    if not isinstance(found, DiscreteDensity):
        raise TypeError(f"Lanczos must give a discrete density, got {type(found).__name__}")
    return found.smoothed(width)


def entropy(
    graph: Any,
    *,
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    exact: bool | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return the entropy :math:`-\int p \log p` of the spectrum of a graph.

    It is :math:`\log 2` for a flat spectrum and less for every other. The standard error is the
    jackknife's: groups of probes are left out in turn. Arguments and cost are those of
    :func:`spectrum`.

    Reference: Equation 3.10 of *Spectral Machine Learning*.
    """
    graph = with_edges(graph)
    found = moments(
        graph,
        num_moments=num_moments,
        num_probes=num_probes,
        exact=exact,
        dtype=dtype,
        device=device,
        generator=generator,
        progress=progress,
    )
    whole: EntropicDensity = maxent(found)
    left = leave_out(found.samples)
    # All with the variances of the whole, lest a different ridge should look like a sampling error.
    errors = matched_within(whole).expand(len(left), -1)
    parts = maxent(left, interval=INTERVAL, stderr=errors) if len(left) else ()
    values = torch.tensor([part.entropy for part in parts], dtype=torch.float64)
    return Estimate(
        mean=torch.tensor(whole.entropy, dtype=torch.float64),
        stderr=jackknife(values),
        samples=values if len(values) else None,
        num_products=found.num_products,
        method=f"maximum entropy, {num_moments} moments",
        status=whole.status,
        seed=found.seed if len(values) else None,
    )


def _exact_moments(graph: Graph, num_moments: int, generator: torch.Generator) -> Moments:
    mean = exact_moments(eigenvalues(graph), num_moments)
    return Moments(
        mean=mean,
        stderr=torch.zeros_like(mean),
        samples=mean[None],
        basis="chebyshev",
        interval=INTERVAL,
        num_products=graph.num_nodes,
        status=Status(outcome="completed", message="exact, from all eigenvalues"),
        seed=generator.initial_seed(),
    )


# ------------------------------------------------------------------------------------------
# Heat traces of a graph: its spectrum at every scale of time, from moments.

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
