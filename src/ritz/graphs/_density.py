"""The spectral density of a graph, its moments, entropy and heat trace."""

import math
from typing import Literal, TypedDict, Unpack, overload

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status, stderr
from ritz.graphs._graph import Graph
from ritz.graphs._io import GraphLike, as_graph
from ritz.graphs._matrices import eigenvalues, exact_moments, laplacian, with_edges
from ritz.operators import LaplacianOperator
from ritz.operators._shared import GraphMatrix, gershgorin
from ritz.spectra import (
    DiscreteDensity,
    EntropicDensity,
    Moments,
    PolynomialDensity,
    SmoothedDensity,
    maxent,
)
from ritz.spectra import density as sampled_density
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
# The density of the eigenvalues of a graph's matrix, and its moments.

INTERVAL = (0.0, 2.0)  # holds the spectrum of every normalised Laplacian
NUM_MOMENTS = 100
NUM_PROBES = 64
SMALL = 256  # vertices up to which all eigenvalues cost less than the probes
NARROW = 4096  # vertices up to which calls cost more than products: all probes at once
DensityMethod = Literal["maxent", "lanczos", "kpm"]
METHODS: tuple[DensityMethod, ...] = ("maxent", "lanczos", "kpm")


class DensityOptions(TypedDict, total=False):
    """The keywords that every method of :func:`density` takes."""

    matrix: GraphMatrix
    num_moments: int
    num_probes: int
    exact: bool | None
    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator | None
    progress: bool | Progress


def moments(
    graph: GraphLike,
    *,
    matrix: GraphMatrix = "normalized",
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    exact: bool | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Moments:
    r"""Return Chebyshev moments of a matrix of a graph with their errors.

    .. math:: \mu_j = \frac1n \operatorname{tr} T_j(L - I), \qquad j = 0, \dots, m

    for the normalised Laplacian, whose eigenvalues lie in ``[0, 2]`` whatever the graph. Other
    matrices are mapped from the interval that Gershgorin's discs give, which the degrees bound. No
    product is spent on bounds. Cost: :math:`d m / 2` products. Memory: 4 vectors per probe of a
    block, which is one cache line wide, eight probes in float64, unless the graph is small.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes.
        matrix: ``normalized`` (the normalised Laplacian), ``laplacian``, ``adjacency`` or another
            of :class:`ritz.operators.LaplacianOperator`.
        num_moments: Highest degree ``m``.
        num_probes: Probes ``d``; errors fall as :math:`1 / \sqrt{n d}`.
        exact: Compute the moments from all eigenvalues, without an error. Defaults to doing so for
            at most 256 vertices.
        dtype: Of the products.
        device: Where products are made.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Algorithms 2 and 4 of *Spectral Machine Learning*.
    """
    graph = as_graph(graph)
    check_count("num_moments", num_moments)
    check_count("num_probes", num_probes, low=2)
    generator = resolve_generator(generator)
    op = laplacian(graph, matrix=matrix, dtype=dtype, device=device)
    interval = _interval(op)
    if graph.num_nodes <= SMALL if exact is None else exact:
        return _exact_moments(graph, matrix, interval, num_moments, generator)
    return sampled_moments(
        op,
        num_moments=num_moments,
        interval=interval,
        num_probes=num_probes,
        block_size=num_probes if graph.num_nodes <= NARROW else None,
        generator=generator,
        progress=progress,
    )


@overload
def density(
    graph: GraphLike, *, method: Literal["maxent"] = "maxent", **options: Unpack[DensityOptions]
) -> EntropicDensity: ...
@overload
def density(
    graph: GraphLike,
    *,
    method: Literal["lanczos"],
    width: float,
    **options: Unpack[DensityOptions],
) -> SmoothedDensity: ...
@overload
def density(
    graph: GraphLike, *, method: Literal["lanczos"], **options: Unpack[DensityOptions]
) -> DiscreteDensity: ...
@overload
def density(
    graph: GraphLike, *, method: Literal["kpm"], **options: Unpack[DensityOptions]
) -> PolynomialDensity: ...
def density(
    graph: GraphLike,
    *,
    method: DensityMethod = "maxent",
    matrix: GraphMatrix = "normalized",
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    width: float | None = None,
    exact: bool | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> EntropicDensity | DiscreteDensity | SmoothedDensity | PolynomialDensity:
    r"""Return the density of the eigenvalues of a matrix of a graph.

    ``maxent`` is the entropic spectrum, the density of largest entropy with given moments,

    .. math:: p(\lambda) = \frac1Z \exp\Big(-\sum_{i=1}^m \alpha_i T_i(\lambda - 1)\Big),
        \qquad \int_0^2 p(\lambda)\, T_i(\lambda - 1)\, d\lambda = \mu_i

    for the normalised Laplacian. Moments are matched to within their standard errors. Where many
    eigenvalues are equal (isolated vertices, leaves of one vertex), no density has their moments,
    and ``status`` says how far they were relaxed. ``lanczos`` gives the Gauss rules of Lanczos
    runs, which are points without a ``width`` and smoothed by a Gaussian with one; smoothing
    biases the moment of degree ``m`` by :math:`\sum_{j \ge 1} \binom{m}{2j} \sigma^{2j}
    (2j - 1)!!\, \mu_{m-2j}` (Theorem 2). ``kpm`` is the kernel polynomial method.

    All of them spend ``num_moments / 2`` products per probe. Memory: that of :func:`moments`, or
    ``num_moments / 2 + 5`` vectors per probe of a block for ``lanczos``.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes; ``maxent`` needs an edge at least.
        method: ``maxent``, ``lanczos`` or ``kpm``.
        matrix: As for :func:`moments`.
        num_moments: Moments ``m`` that are matched: what is finer than :math:`2 \pi / m` of the
            interval is not resolved. Lanczos makes ``m / 2`` steps, at most as many as there are
            vertices.
        num_probes: As for :func:`moments`.
        width: Standard deviation of the Gaussian, for ``lanczos``; see :func:`ritz.density`.
        exact: As for :func:`moments`, for ``maxent``.
        dtype: As for :func:`moments`.
        device: As for :func:`moments`.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Raises:
        GraphError: The graph has no edge: all its eigenvalues are 0, which is no density.

    Reference: Algorithm 4 and section 3.3 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> ring = graphs.watts_strogatz(200, num_neighbors=4, p=0.1)
        >>> round(graphs.density(ring, num_moments=20).moment(1), 6)
        1.0
    """
    check_choice("method", method, METHODS)
    if width is not None and method != "lanczos":
        raise ValueError(f"width belongs to method='lanczos', got method={method!r}")
    if method == "maxent":
        found = moments(
            with_edges(graph),
            matrix=matrix,
            num_moments=num_moments,
            num_probes=num_probes,
            exact=exact,
            dtype=dtype,
            device=device,
            generator=generator,
            progress=progress,
        )
        entropic: EntropicDensity = maxent(found)
        return entropic
    if exact is not None:
        raise ValueError(f"exact belongs to method='maxent', got method={method!r}")
    check_count("num_moments", num_moments, low=2)
    op = laplacian(graph, matrix=matrix, dtype=dtype, device=device)
    return sampled_density(
        op,
        method=method,
        num_steps=min(num_moments // 2, op.shape[0]) if method == "lanczos" else num_moments // 2,
        num_probes=num_probes,
        width=width,
        generator=generator,
        progress=progress,
    )


def entropy(
    graph: GraphLike,
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
    :func:`density` by ``maxent``.

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


def _interval(op: LaplacianOperator) -> tuple[float, float]:
    """An interval that holds the eigenvalues, without a product."""
    if op.matrix == "normalized":
        return INTERVAL
    discs = gershgorin(op)
    if discs is None:
        raise ValueError(f"matrix must have bounds from its degrees, got {op.matrix!r}")
    # A graph without edges has the eigenvalue 0 alone: any interval around it will do.
    return discs if discs[0] < discs[1] else (-1.0, 1.0)


def _exact_moments(
    graph: Graph,
    matrix: GraphMatrix,
    interval: tuple[float, float],
    num_moments: int,
    generator: torch.Generator,
) -> Moments:
    mean = exact_moments(eigenvalues(graph, matrix=matrix), num_moments, interval=interval)
    return Moments(
        mean=mean,
        stderr=torch.zeros_like(mean),
        samples=mean[None],
        basis="chebyshev",
        interval=interval,
        num_products=graph.num_nodes,
        status=Status(outcome="completed", message="exact, from all eigenvalues"),
        seed=generator.initial_seed(),
        matrix=matrix,
    )


# ------------------------------------------------------------------------------------------
# Heat traces of a graph: its spectrum at every scale of time, from moments.

NUM_TIMES = 250
TIMES = (1e-2, 1e2)


def heat_trace(
    graph: GraphLike | Moments,
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
    if isinstance(graph, Moments):
        found = graph
    else:
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
