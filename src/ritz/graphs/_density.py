"""The spectral density of a graph, its moments, entropy and heat trace."""

import math
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, short
from ritz._core.density import as_points
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status
from ritz._core.sampling import ROUNDOFF, doubt_equal_samples
from ritz.graphs._io import GraphLike, as_graph
from ritz.graphs._jackknife import jackknife, leave_out
from ritz.graphs._matrices import check_place, eigenvalues, laplacian, with_edges
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
# Up to this number of vertices, moments and counts are computed from all eigenvalues, without
# sampling error. This costs as much as the moments of 64 probes at 1,000 vertices, and 2.6 times as
# much at 2,000.
SMALL = 2000
# Up to this number of vertices, all probes are in one block, because the overhead of calls
# dominates.
_NARROW = 4096
# Matching moments only within their errors changes an entropy. The change is at most this multiple
# of the further change if the errors are doubled: 3.9 on a ring lattice of 60 vertices, and below 2
# on most of 21 graphs.
_RELAXED = 4.0
DensityMethod = Literal["maxent", "lanczos", "kpm"]

# ------------------------------------------------------------------------------------------
# The density of the eigenvalues of a graph's matrix, and its moments.


class MomentOptions(TypedDict, total=False):
    """The keywords of moments of the normalised Laplacian."""

    num_moments: int
    num_probes: int
    exact: bool | None
    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator | None
    progress: bool | Progress


class DensityOptions(MomentOptions, total=False):
    """The keywords that every method of :func:`density` takes."""

    matrix: GraphMatrix


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

    for the normalised Laplacian, whose eigenvalues lie in ``[0, 2]`` for every graph. For other
    matrices the interval comes from Gershgorin's theorem, which needs no matrix-vector products.
    Cost: :math:`d m / 2` products. Memory: about 32 vectors.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts.
        matrix: ``normalized`` (the normalised Laplacian), ``laplacian``, ``adjacency`` or another
            of :class:`ritz.operators.LaplacianOperator`.
        num_moments: Highest degree ``m``.
        num_probes: Number of probes ``d``. Errors fall as :math:`1 / \sqrt{n d}`.
        exact: Compute the moments exactly from all eigenvalues. Defaults to ``True`` for at most
            2,000 vertices.
        dtype: Data type of the products.
        device: Device of the products.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Algorithms 2 and 4 of *Spectral Machine Learning*.
    """
    graph = as_graph(graph)
    num_moments = check_count("num_moments", num_moments)
    num_probes = check_count("num_probes", num_probes, low=2)
    generator = resolve_generator(generator)
    place: Any = {"matrix": matrix, "dtype": dtype, "device": device}
    check_place(dtype, device)
    interval = INTERVAL if matrix == "normalized" else _interval(laplacian(graph, **place))
    if graph.num_nodes <= SMALL if exact is None else exact:
        mean = chebyshev_means(eigenvalues(graph, matrix=matrix), num_moments, interval)
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
        laplacian(graph, **place),
        num_moments=num_moments,
        interval=interval,
        num_probes=num_probes,
        block_size=num_probes if graph.num_nodes <= _NARROW else None,
        generator=generator,
        progress=progress,
    )


def _interval(op: LaplacianOperator) -> tuple[float, float]:
    """Return an interval that contains the eigenvalues, without products."""
    discs = gershgorin(op)
    if discs is None:
        raise ValueError(f"matrix must have bounds from its degrees, got {op.matrix!r}")
    # A graph without edges has only the eigenvalue 0, and any interval around it will do.
    return discs if discs[0] < discs[1] else (-1.0, 1.0)


def chebyshev_means(values: Tensor, num_moments: int, interval: tuple[float, float]) -> Tensor:
    """Return the means of ``T_j`` over eigenvalues in an interval, ``(num_moments + 1,)``."""
    low, high = interval
    # T_j(cos a) = cos(j a). Clamp, because roundoff may move an eigenvalue out of the interval.
    angles = torch.arccos(((2 * values.double() - low - high) / (high - low)).clamp(-1.0, 1.0))
    degrees = torch.arange(num_moments + 1, dtype=torch.float64)
    # One degree at a time, to save memory.
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

    ===========  =====================================================================
    method       density
    ===========  =====================================================================
    ``maxent``   entropic spectrum: the density of largest entropy with given moments
    ``lanczos``  Gauss rules of Lanczos runs: points, or a smooth density with ``width``
    ``kpm``      kernel polynomial method
    ===========  =====================================================================

    The entropic spectrum of the normalised Laplacian is

    .. math:: p(\lambda) = \frac1Z \exp\Big(-\sum_{i=1}^m \alpha_i T_i(\lambda - 1)\Big),
        \qquad \int_0^2 p(\lambda)\, T_i(\lambda - 1)\, d\lambda = \mu_i

    Its moments match those of the graph to within their standard errors. If many eigenvalues
    coincide, no smooth density has their moments. The moments are then matched approximately, and
    ``status`` reports the tolerance. Smoothing biases the moment of degree ``m`` by
    :math:`\sum_{j \ge 1} \binom{m}{2j} \sigma^{2j} (2j - 1)!!\, \mu_{m-2j}` (Theorem 2).

    Cost: ``num_moments / 2`` products per probe. Memory: that of :func:`moments`, or
    ``num_moments / 2 + 5`` vectors per probe of a block for ``lanczos``.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts; ``maxent`` needs at least one edge.
        method: One of the table.
        matrix: Which matrix, as for :func:`moments`.
        num_moments: Number of moments ``m``. Details finer than :math:`2 \pi / m` times the
            length of the interval are not resolved. Lanczos makes ``m / 2`` steps, at most as many
            as there are vertices.
        num_probes: Number of random probes.
        width: Standard deviation of the Gaussian, for ``lanczos``; see :func:`ritz.density`.
        exact: Whether ``maxent`` computes exact moments from all eigenvalues. Defaults to ``True``
            for at most 2,000 vertices.
        dtype: Data type of the products.
        device: Device of the products.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        GraphError: The graph has no edge. All its eigenvalues are 0, which have no density.

    Reference: Algorithm 4 and section 3.3 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> ring = graphs.watts_strogatz(200, num_neighbors=4, p=0.1)
        >>> round(graphs.density(ring, num_moments=20).moment(1), 6)
        1.0
    """
    check_choice("method", method, get_args(DensityMethod))
    if width is not None and method != "lanczos":
        raise ValueError(f"width is only used with method='lanczos', got method={method!r}")
    place: Any = {"matrix": matrix, "dtype": dtype, "device": device}
    sampling: Any = {"num_probes": num_probes, "generator": generator, "progress": progress}
    if method == "maxent":
        graph = with_edges(graph)
        entropic: EntropicDensity = maxent(
            moments(graph, num_moments=num_moments, exact=exact, **place, **sampling)
        )
        return entropic
    if exact is not None:
        raise ValueError(f"exact is only used with method='maxent', got method={method!r}")
    num_moments = check_count("num_moments", num_moments, low=2)
    op = laplacian(graph, **place)
    # A step of Lanczos, like a product in the recurrence of T_j, gives two moments.
    steps = min(num_moments // 2, op.shape[0]) if method == "lanczos" else num_moments // 2
    return sampled_density(op, method=method, num_steps=steps, width=width, **sampling)


def entropy(graph: GraphLike, **options: Unpack[MomentOptions]) -> Estimate:
    r"""Estimate the entropy :math:`-\int p \log p` of the spectrum of a graph.

    The entropy is :math:`\log 2` for a flat spectrum, and smaller for every other spectrum. The
    standard error comes from the jackknife over groups of probes. Sampled moments are matched only
    within their errors, which increases the entropy; ``truncation`` is an estimate of this bias.
    Arguments and cost are those of :func:`density` with ``method="maxent"``.

    Reference: Equation 3.10 of *Spectral Machine Learning*.
    """
    sampled = moments(with_edges(graph), **options)
    whole: EntropicDensity = maxent(sampled)
    method = f"maximum entropy, {len(sampled.mean) - 1} moments"
    estimate = Estimate.exact(
        whole.entropy, method=method, num_products=sampled.num_products, status=whole.status
    )
    left = leave_out(sampled.samples)
    if not len(left):
        return estimate
    # Use one ridge for all parts, because different ridges would look like a sampling error. The
    # last row has all probes and twice the errors, to estimate the effect of the ridge.
    errors = matched_within(whole).expand(len(left) + 1, -1).clone()
    errors[-1] *= 2
    parts = maxent(torch.cat([left, sampled.mean[None]]), interval=INTERVAL, stderr=errors)
    entropies = torch.tensor([part.entropy for part in parts], dtype=torch.float64)
    values, change = entropies[:-1], (entropies[-1] - whole.entropy).abs()
    return replace(
        estimate,
        stderr=jackknife(values),
        truncation=_RELAXED * change,
        degrees=len(values) - 1,
        samples=values,
        seed=sampled.seed,
    )


def matched_within(density: EntropicDensity) -> Tensor:
    """Return the errors within which the moments of a density were matched, ``(m + 1,)``."""
    # The zeroth moment is exact. The ridge has the variances of the others.
    return torch.cat([torch.zeros(1, dtype=torch.float64), density.ridge.sqrt()])


# ------------------------------------------------------------------------------------------
# Heat traces of a graph, from its moments.


def heat_trace(
    graph: GraphLike | Moments,
    *,
    times: Tensor | None = None,
    num_moments: int = NUM_MOMENTS,
    num_probes: int = NUM_PROBES,
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""Estimate the heat trace of the normalised Laplacian per vertex, at several times.

    .. math:: h(t) = \frac1n \operatorname{tr} e^{-t L} = e^{-t} \Big(I_0(t) +
        2 \sum_{k \ge 1} (-1)^k I_k(t)\, \mu_k\Big)

    with the Chebyshev moments :math:`\mu_k` on ``[0, 2]`` and modified Bessel functions
    :math:`I_k`. The sum ends at degree ``m``. ``truncation`` is the bound
    :math:`2 e^{-t} \sum_{k > m} I_k(t)` on the remainder, which is negligible for :math:`t` below
    about :math:`m^2 / 50`.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts, or its moments.
        times: Times ``(T,)``, not negative. Defaults to 250 logarithmically spaced times from 0.01
            to 100.
        num_moments: Highest degree of the moments.
        num_probes: Number of random probes.
        generator: Source of the probes. Defaults to a new generator with seed 0.

    Cost: that of the moments. The mean is ``(T,)``, samples are ``(num_probes, T)``.

    Reference: Tsitsulin et al., *NetLSD* (2018). The division by ``n`` is their normalisation by
    the empty graph.
    """
    times = default_times() if times is None else as_points(times, "times")
    if times.ndim != 1 or not len(times) or not bool(((times >= 0) & times.isfinite()).all()):
        raise ValueError(f"times must be finite numbers (T,), at least 0, got {short(times)}")
    if not isinstance(graph, Moments):
        generator = resolve_generator(generator)
        graph = moments(graph, num_moments=num_moments, num_probes=num_probes, generator=generator)
    check_moments("graph", graph)
    degree = len(graph.mean) - 1
    weights = heat_weights(times, degree)
    # e^-t (I_0(t) + 2 sum_k I_k(t)) = 1, so the missing weights are the truncation.
    truncation = (1.0 - weights.abs().sum(1)).clamp_min(0.0) + ROUNDOFF * math.ulp(1.0)
    samples = graph.samples @ weights.T
    about: Any = {
        "truncation": truncation,
        "num_products": graph.num_products,
        "method": f"{degree} Chebyshev moments",
        "seed": graph.seed,
    }
    if len(samples) == 1:  # exact moments have one sample and no error
        return Estimate.exact(samples[0], status=graph.status, **about)
    return doubt_equal_samples(Estimate.of(samples, **about)).with_status(None)


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
