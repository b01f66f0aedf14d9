"""The spectral density of a graph, its moments, entropy and heat trace."""

import math
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status, stderr
from ritz.graphs._io import GraphLike, as_graph
from ritz.graphs._matrices import eigenvalues, laplacian, with_edges
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

INTERVAL = (0.0, 2.0)  # contains the spectrum of every normalised Laplacian
NUM_MOMENTS = 100
NUM_PROBES = 64
# Vertices up to which all eigenvalues cost less than the moments of 64 probes.
_SMALL = 256
# Vertices up to which calls cost more than products, so that all probes are in one block.
_NARROW = 4096
DensityMethod = Literal["maxent", "lanczos", "kpm"]

# ------------------------------------------------------------------------------------------
# Errors of functions of moments: the jackknife over groups of probes.

_NUM_GROUPS = 10  # ten densities per graph; their spread is known to 1 / sqrt(2 * 9) = 24 %


def leave_out(samples: Tensor) -> Tensor:
    """Return means of samples ``(d, m)`` without one group at a time, ``(g, m)``.

    There are as many groups as probes, but at most ten, and none for a single sample.
    """
    groups = min(_NUM_GROUPS, len(samples))
    if groups < 2:
        return samples[:0]
    total = samples.sum(0)
    parts = torch.tensor_split(samples, groups)
    return torch.stack([(total - part.sum(0)) / (len(samples) - len(part)) for part in parts])


def jackknife(values: Tensor) -> Tensor:
    r"""Return the standard error :math:`\sqrt{\frac{g-1}{g} \sum_k (v_k - \bar v)^2}`.

    Args:
        values: Values without one group at a time, ``(g, *s)``.
    """
    spread = (values - values.mean(0)).square().sum(0)
    return (spread * (len(values) - 1) / len(values)).sqrt()


def bias(values: Tensor, whole: Tensor) -> Tensor:
    r"""Return the bias :math:`(g - 1)(\bar v - v)` of a statistic, by the jackknife.

    Args:
        values: Values without one group at a time, ``(g, *s)``.
        whole: Value of all samples, ``(*s)``.
    """
    return (len(values) - 1) * (values.mean(0) - whole)


def matched_within(density: EntropicDensity) -> Tensor:
    """Return the errors within which the moments of a density were matched, ``(m + 1,)``."""
    # The zeroth moment is exact; the dual has a ridge of the variance of each of the others.
    return torch.cat([torch.zeros(1, dtype=torch.float64), density.ridge.sqrt()])


# ------------------------------------------------------------------------------------------
# The density of the eigenvalues of a graph's matrix, and its moments.


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
    r"""Estimate the Chebyshev moments of a matrix of a graph.

    .. math:: \mu_j = \frac1n \operatorname{tr} T_j(L - I), \qquad j = 0, \dots, m

    for the normalised Laplacian, whose eigenvalues lie in ``[0, 2]`` for every graph. Other
    matrices are mapped from the interval of Gershgorin's discs, which the degrees bound. Bounds
    cost no product. Cost: :math:`d m / 2` products. Memory: 4 vectors per probe of a block, which
    has eight probes in float64 unless the graph is small.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts.
        matrix: ``normalized`` (the normalised Laplacian), ``laplacian``, ``adjacency`` or another
            of :class:`ritz.operators.LaplacianOperator`.
        num_moments: Highest degree ``m``.
        num_probes: Probes ``d``; errors fall as :math:`1 / \sqrt{n d}`.
        exact: Compute the moments exactly from all eigenvalues. Defaults to ``True`` for at most
            256 vertices.
        dtype: Data type of the products.
        device: Device of the products.
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
    if graph.num_nodes <= _SMALL if exact is None else exact:
        mean = _chebyshev_means(eigenvalues(graph, matrix=matrix), num_moments, interval)
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
    return sampled_moments(
        op,
        num_moments=num_moments,
        interval=interval,
        num_probes=num_probes,
        block_size=num_probes if graph.num_nodes <= _NARROW else None,
        generator=generator,
        progress=progress,
    )


def _interval(op: LaplacianOperator) -> tuple[float, float]:
    """An interval that contains the eigenvalues, without a product."""
    if op.matrix == "normalized":
        return INTERVAL
    discs = gershgorin(op)
    if discs is None:
        raise ValueError(f"matrix must have bounds from its degrees, got {op.matrix!r}")
    # A graph without edges has only the eigenvalue 0: any interval around it will do.
    return discs if discs[0] < discs[1] else (-1.0, 1.0)


def _chebyshev_means(values: Tensor, num_moments: int, interval: tuple[float, float]) -> Tensor:
    """Means of ``T_j`` over eigenvalues in an interval, ``(num_moments + 1,)``."""
    low, high = interval
    # T_j(cos a) = cos(j a); rounding may put an eigenvalue beyond the ends.
    angles = torch.arccos(((2 * values.double() - low - high) / (high - low)).clamp(-1.0, 1.0))
    degrees = torch.arange(num_moments + 1, dtype=torch.float64)
    # One degree at a time: a table of all would be m times as large as the eigenvalues.
    return torch.stack([torch.cos(degree * angles).mean() for degree in degrees])


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
    r"""Estimate the density of the eigenvalues of a matrix of a graph.

    ===========  ====================================================================
    method       density
    ===========  ====================================================================
    ``maxent``   entropic spectrum, the density of largest entropy with given moments
    ``lanczos``  Gauss rules of Lanczos runs: points, or smoothed with a ``width``
    ``kpm``      kernel polynomial method
    ===========  ====================================================================

    The entropic spectrum of the normalised Laplacian is

    .. math:: p(\lambda) = \frac1Z \exp\Big(-\sum_{i=1}^m \alpha_i T_i(\lambda - 1)\Big),
        \qquad \int_0^2 p(\lambda)\, T_i(\lambda - 1)\, d\lambda = \mu_i

    with moments matched to within their standard errors. If many eigenvalues are equal (isolated
    vertices, leaves of one vertex), no density has their moments, and ``status`` says how far they
    were relaxed. Smoothing biases the moment of degree ``m`` by :math:`\sum_{j \ge 1} \binom{m}{2j}
    \sigma^{2j} (2j - 1)!!\, \mu_{m-2j}` (Theorem 2).

    Cost: ``num_moments / 2`` products per probe. Memory: that of :func:`moments`, or
    ``num_moments / 2 + 5`` vectors per probe of a block for ``lanczos``.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts; ``maxent`` needs at least one edge.
        method: One of the table.
        matrix: As for :func:`moments`.
        num_moments: Number of moments ``m``. Details finer than :math:`2 \pi / m` of the interval
            are not resolved. Lanczos makes ``m / 2`` steps, but no more than there are vertices.
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
    check_choice("method", method, ("maxent", "lanczos", "kpm"))
    if width is not None and method != "lanczos":
        raise ValueError(f"width belongs to method='lanczos', got method={method!r}")
    place: Any = {"matrix": matrix, "dtype": dtype, "device": device}
    sampling: Any = {"num_probes": num_probes, "generator": generator, "progress": progress}
    if method == "maxent":
        graph = with_edges(graph)
        entropic: EntropicDensity = maxent(
            moments(graph, num_moments=num_moments, exact=exact, **place, **sampling)
        )
        return entropic
    if exact is not None:
        raise ValueError(f"exact belongs to method='maxent', got method={method!r}")
    check_count("num_moments", num_moments, low=2)
    op = laplacian(graph, **place)
    # A step of Lanczos, like a product in the recurrence of T_j, gives two moments.
    steps = min(num_moments // 2, op.shape[0]) if method == "lanczos" else num_moments // 2
    return sampled_density(op, method=method, num_steps=steps, width=width, **sampling)


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
    r"""Estimate the entropy :math:`-\int p \log p` of the spectrum of a graph.

    It is :math:`\log 2` for a flat spectrum and less for every other. The standard error is from
    the jackknife over groups of probes. Arguments and cost are those of :func:`density` with
    ``maxent``.

    Reference: Equation 3.10 of *Spectral Machine Learning*.
    """
    sampled = moments(
        with_edges(graph),
        num_moments=num_moments,
        num_probes=num_probes,
        exact=exact,
        dtype=dtype,
        device=device,
        generator=generator,
        progress=progress,
    )
    whole: EntropicDensity = maxent(sampled)
    method = f"maximum entropy, {num_moments} moments"
    estimate = Estimate.exact(
        whole.entropy, method=method, num_products=sampled.num_products, status=whole.status
    )
    left = leave_out(sampled.samples)
    if not len(left):
        return estimate
    # The ridge of the whole for all parts: another ridge would look like a sampling error.
    errors = matched_within(whole).expand(len(left), -1)
    parts = maxent(left, interval=INTERVAL, stderr=errors)
    values = torch.tensor([part.entropy for part in parts], dtype=torch.float64)
    return replace(estimate, stderr=jackknife(values), samples=values, seed=sampled.seed)


# ------------------------------------------------------------------------------------------
# Heat traces of a graph: its spectrum at every scale of time, from moments.


def heat_trace(
    graph: GraphLike | Moments,
    *,
    times: Tensor | None = None,
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""Estimate the heat trace of the normalised Laplacian per vertex, over time.

    .. math:: h(t) = \frac1n \operatorname{tr} e^{-t L} = e^{-t} \Big(I_0(t) +
        2 \sum_{k \ge 1} (-1)^k I_k(t)\, \mu_k\Big)

    with the Chebyshev moments :math:`\mu_k` on ``[0, 2]`` and modified Bessel functions. The sum
    ends at degree ``m``; the rest is below :math:`2 e^{-t} \sum_{k > m} I_k(t)`, which is
    ``truncation``, and negligible for :math:`t` below about :math:`m^2 / 50`.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts, or its moments.
        times: Times ``(T,)``, not negative. Defaults to 250 from 0.01 to 100 in equal ratios.
        num_moments: As for :func:`ritz.graphs.moments`.
        num_probes: As for :func:`ritz.graphs.moments`.
        generator: Source of the probes. Defaults to a new generator with seed 0.

    Cost: that of the moments. The mean is ``(T,)``, samples are ``(num_probes, T)``.

    Reference: Tsitsulin et al., *NetLSD* (2018), normalised by the empty graph.
    """
    times = default_times() if times is None else torch.as_tensor(times, dtype=torch.float64)
    if times.ndim != 1 or not len(times) or not bool(((times >= 0) & times.isfinite()).all()):
        raise ValueError("times must be a vector of finite numbers, none negative")
    if not isinstance(graph, Moments):
        generator = resolve_generator(generator)
        graph = moments(graph, num_moments=num_moments, num_probes=num_probes, generator=generator)
    check_moments("graph", graph)
    degree = len(graph.mean) - 1
    weights = heat_weights(times, degree)
    # e^-t (I_0(t) + 2 sum_k I_k(t)) = 1: what the weights lack is the truncation.
    truncation = (1.0 - weights.abs().sum(1)).clamp_min(math.ulp(1.0))
    estimate = Estimate.exact(
        weights @ graph.mean,
        truncation=truncation,
        num_products=graph.num_products,
        method=f"{degree} Chebyshev moments",
        status=graph.status,
        seed=graph.seed,
    )
    samples = graph.samples @ weights.T
    return (
        replace(estimate, stderr=stderr(samples), samples=samples) if len(samples) > 1 else estimate
    )


def default_times() -> Tensor:
    """Return 250 times from 0.01 to 100 in equal ratios, as NetLSD does."""
    return torch.from_numpy(np.geomspace(1e-2, 1e2, 250))


def heat_weights(times: Tensor, num_moments: int) -> Tensor:
    """Return the weights of the moments in the heat trace, ``(T, num_moments + 1)``."""
    degrees = np.arange(num_moments + 1)
    # ive is e^-t I_k(t), which neither overflows nor underflows at large times.
    bessel = scipy.special.ive(degrees, times.numpy()[:, None])
    signs = np.where(degrees % 2, -2.0, 2.0)
    signs[0] = 1.0
    return torch.from_numpy(bessel * signs)


def check_moments(name: str, moments: Moments) -> None:
    """Raise unless moments are Chebyshev moments on ``[0, 2]``, as those of a graph."""
    if moments.basis != "chebyshev" or moments.interval != INTERVAL:
        raise ValueError(
            f"{name} must be moments of a normalised Laplacian, chebyshev on {INTERVAL}, "
            f"got {moments.basis} on {moments.interval}"
        )
