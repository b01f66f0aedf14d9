"""``count_clusters``: the number of clusters, by all eigenvalues, density or block Krylov."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import HasStatus, Status, format_uncertain, stderr
from ritz._core.storage import storable
from ritz.graphs._count_below import Below, NullSpace, all_below, count_below
from ritz.graphs._density import SMALL, moments
from ritz.graphs._gaps import (
    TUNING,
    Gap,
    angle,
    find_gap,
    low_stretches,
    point,
    resolved_spacings,
    stands_out,
    widest_between,
    widest_crowded,
)
from ritz.graphs._graph import Graph
from ritz.graphs._io import GraphLike
from ritz.graphs._matrices import eigenvalues, laplacian, with_edges
from ritz.spectra import (
    DiscreteDensity,
    EntropicDensity,
    PolynomialDensity,
    SmoothedDensity,
    density,
    maxent,
)

CountMethod = Literal["auto", "krylov", "entropic", "lanczos"]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCount(HasStatus):
    r"""The number of clusters of a graph: the eigenvalues below the gap of its spectrum.

    Attributes:
        count: Number of clusters. If the components have no further gap, the number of components.
            ``None`` if a connected graph has no gap, or if the count could not be certified.
        stderr: Standard error of the count; zero if eigenvalues were counted one by one and none
            was missed.
        threshold: Threshold :math:`\lambda_*` inside of the gap.
        gap: Lower and upper end of the gap.
        mass: Estimated fraction of eigenvalues below the threshold.
        estimate: Estimated number of eigenvalues below the threshold, ``n`` times the mass.
        estimate_stderr: Standard error of the estimate.
        found: Number of eigenvalues that block Krylov found, a lower bound; ``None`` if it was not
            used.
        missed: Estimated number of eigenvalues that block Krylov missed.
        certified: Whether the count is exact: either the entropic and the Krylov count agree and no
            eigenvalue was missed, or all eigenvalues were computed.
        reason: Why there is no count, or why the count is the number of components.
        num_nodes: Number of vertices of the graph.
        num_components: Number of connected components, including isolated vertices; the
            multiplicity of the eigenvalue 0.
        method: How the clusters were counted.
        num_products: Number of matrix-vector products.
        status: Whether the count can be trusted, and what to change if not.
        seed: Seed of the generator.
        density: Density of the eigenvalues from which the gap was chosen.
    """

    count: int | None
    stderr: float = math.nan
    threshold: float = math.nan
    gap: tuple[float, float] = (math.nan, math.nan)
    mass: float = math.nan
    estimate: float = math.nan
    estimate_stderr: float = math.nan
    found: int | None = None
    missed: float = math.nan
    certified: bool = False
    reason: str = ""
    num_nodes: int
    num_components: int
    method: str
    num_products: int
    status: Status
    seed: int
    density: EntropicDensity | SmoothedDensity | DiscreteDensity | None = field(
        default=None, repr=False, compare=False
    )

    def __str__(self) -> str:
        if self.count is None:
            lines = [f"No count: {self.reason}"]
        else:
            error = f" ({_uncertain(self.estimate, self.stderr)})" if self.stderr != 0 else ""
            lines = [f"{self.count:,} clusters{error}"]
            lines += [f"  {self.reason}"] if self.reason else []
        if not math.isnan(self.threshold):
            ends = f"{self.gap[0]:.4g} {{}} {self.gap[1]:.4g}; fraction below it {self.mass:.4g}"
            if self.reason.startswith("no gap"):
                lines.append(f"  no eigenvalues between {ends.format('and')}")
            else:
                lines.append(f"  threshold {self.threshold:.4g} in the gap {ends.format('to')}")
        if self.found is not None:
            lines.append(
                f"  eigenvalues below it: {self.found:,} found by block Krylov, about "
                f"{self.missed:.2g} missed; {_uncertain(self.estimate, self.estimate_stderr)} by "
                "density"
            )
        lines.append(
            f"  {self.num_nodes:,} vertices, {self.num_components:,} component"
            f"{'s' * (self.num_components != 1)}; {self.method}, "
            f"{self.num_products:,} products"
        )
        return "\n".join([*lines, f"  {self.status}"])


def count_clusters(
    graph: GraphLike,
    *,
    method: CountMethod = "auto",
    num_moments: int = 80,
    num_probes: int = 100,
    max_vectors: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> ClusterCount:
    r"""Count the clusters of a graph: the small eigenvalues of its normalised Laplacian.

    .. math:: N_c = \#\{i : \lambda_i < \lambda_*\} \approx n \int_0^{\lambda_*} p(\lambda)\,
        d\lambda

    The threshold :math:`\lambda_*` lies in the spectral gap: the widest interval left of the bulk
    in which the density is close to zero. The bulk is the main part of the spectrum. If only the
    eigenvalue 0 of a connected graph lies below this interval, the next interval is tried. That one
    is accepted if it is much wider than the spacings of the eigenvalues above it, and if no
    interval above it has a similar width.

    A connected graph may have no gap (paths, grids), or only the gap above the eigenvalue 0 (random
    graphs, complete graphs). Its spectrum does not show whether it is one cluster or has none.
    ``count`` is then ``None``, and ``reason`` says why.

    Every connected component, including an isolated vertex, adds one eigenvalue 0 and counts as one
    cluster. If several components have no further gap, ``count`` is the number of components. It is
    exact, and ``reason`` says so. To count clusters within the largest component, pass
    :meth:`ritz.graphs.Graph.largest_component`.

    ================  ===================================================================
    method            count
    ================  ===================================================================
    ``entropic``      mass of the entropic spectrum (Algorithm 5 of the reference), with a
                      standard deviation of at most :math:`\sqrt{2 N_c / d}`
    ``lanczos``       mass of Lanczos quadrature, smoothed by a Gaussian
    ``krylov``        eigenvalues found one by one in a block filtered by Chebyshev
                      polynomials, a lower bound; further probes estimate how many it
                      missed
    ``auto``          all eigenvalues of a graph with at most 2,000 vertices; otherwise
                      ``entropic`` and ``krylov``, and no count if they differ by more than
                      four standard errors or if eigenvalues were missed
    ================  ===================================================================

    Clusters with more edges inside than outside have a conductance :math:`\phi_i` below one half.
    The mean of the eigenvalues left of the gap is then below one half as well, because
    :math:`\sum_{i \le k} \lambda_i \le \sum_{i \le k} \phi_i` (Ky Fan). If the mean is larger,
    there is no count. For example, a random bipartite graph has a gap left of 1 but no clusters.

    Cost: ``num_probes * num_moments / 2`` products for ``entropic``, twice as many for ``lanczos``,
    and about 10 products per eigenvalue for ``krylov``, more if the gap is narrow. Memory beyond
    the graph: about 40 vectors, and 1.1 vectors per eigenvalue for ``krylov``.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts, with at least one edge.
        method: One of the table.
        num_moments: Number of moments ``m``, or of Lanczos steps. Gaps narrower than
            :math:`\pi / m` in :math:`\arccos(1 - \lambda)` are not resolved.
        num_probes: Number of probes ``d``.
        max_vectors: Maximum number of vectors for ``krylov``. Defaults to as many as fit in 4 GiB.
            If these are too few, ``auto`` returns no count, only the sampled ``estimate``.
        generator: Source of randomness. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Section 3.7 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> blocks = graphs.cluster_graph([30] * 9, degree=12, num_links=18)
        >>> graphs.count_clusters(blocks).count
        9
    """
    graph = with_edges(graph)
    check_choice("method", method, get_args(CountMethod))
    num_moments = check_count("num_moments", num_moments, low=4)
    num_probes = check_count("num_probes", num_probes, low=2)
    if max_vectors is not None:
        max_vectors = check_count("max_vectors", max_vectors)
    generator = resolve_generator(generator)
    null = NullSpace.of(graph, torch.float64)
    sampled, description = _find_density(
        graph, null, method, num_moments, num_probes, generator, progress
    )
    facts: dict[str, Any] = {
        "num_nodes": graph.num_nodes,
        "num_components": null.dimension,
        "num_products": sampled.num_products,
        "method": description,
        "seed": generator.initial_seed(),
        "density": sampled.density,
    }
    # Without a gap, only the eigenvalues 0 of the components can be counted.
    if isinstance(sampled.gap, str):
        return _components_only(f"no gap: {sampled.gap}", facts)
    # Blocks that fill the memory are float32, four bytes per entry.
    most = TUNING.most_bytes // (4 * graph.num_nodes) if max_vectors is None else max_vectors
    width = _width(sampled, sampled.gap, null)
    short = ""
    if method == "auto" and width > most and sampled.spread is not None:
        short = f"block Krylov would need {width:,} vectors, max_vectors is {most:,}"
    if short or method in ("entropic", "lanczos"):
        return _sampled_count(sampled, _sampled_gap(sampled, sampled.gap, null), facts, short)
    # The two counts check each other. Sampling has an error but misses no eigenvalue. Block Krylov
    # is exact but may miss eigenvalues.
    krylov = _BlockKrylov(graph, null, max(1, most), sampled, generator, progress)
    below = krylov.count(sampled.gap, width)
    facts["num_products"] += below.num_products
    if below.count == 1 and below.missed <= TUNING.most_missed:
        further = krylov.count_further(sampled.gap)
        facts["num_products"] += further.num_products if further else 0
        below = further if further and _is_real(further, sampled) else below
    return reconciled(below, sampled, facts, trusted=method == "auto")


def _find_density(
    graph: Graph,
    null: NullSpace,
    method: CountMethod,
    num_moments: int,
    num_probes: int,
    generator: torch.Generator,
    progress: bool | Progress,
) -> tuple["Sampled", str]:
    """Return the density in which to look for the gap, and how it was computed."""
    num_probes = min(num_probes, TUNING.locating_probes) if method == "krylov" else num_probes
    # The middle of the bulk is the median of the eigenvalues that are not 0.
    zeros = null.dimension / graph.num_nodes
    place: dict[str, Any] = {"num_moments": num_moments, "bulk": zeros + (1 - zeros) / 2}
    few = method in ("auto", "krylov") and graph.num_nodes - null.dimension <= TUNING.few_nonzero
    if (method == "auto" or few) and graph.num_nodes <= SMALL:
        exact = exact_density(graph, num_zeros=null.dimension, **place)
        return exact, f"all eigenvalues, gaps at the resolution of {num_moments} moments"
    sampled = sample_density(
        graph,
        lanczos=method == "lanczos" or few,
        num_probes=num_probes,
        generator=generator,
        progress=progress,
        **place,
    )
    return sampled, f"{method}, {num_moments} moments x {num_probes} probes"


# ------------------------------------------------------------------------------------------
# Counting by sampling: N(lambda) = n F(lambda) with the distribution function F of a density.


@dataclass(frozen=True, slots=True)
class Sampled:
    """The density of a graph, sampled or exact, and its gap.

    Attributes:
        density: Entropic density, smoothed density, or all eigenvalues.
        stretches: All intervals in which the density is low, ascending, or why there are none.
        num_nodes: Number of vertices.
        num_moments: Number of moments of the density, or of Lanczos steps.
        num_products: Number of matrix-vector products.
        spread: A density with one sample per probe, for the standard error; ``None`` if the density
            is exact.
    """

    density: EntropicDensity | SmoothedDensity | DiscreteDensity
    stretches: list[Gap] | str
    num_nodes: int
    num_moments: int
    num_products: int
    spread: PolynomialDensity | SmoothedDensity | None = None

    @property
    def gap(self) -> Gap | str:
        """The widest gap, or why there is none."""
        return find_gap(self.stretches, num_moments=self.num_moments)

    def below(self, threshold: float) -> tuple[float, float]:
        """Number of eigenvalues below a point, and its standard error."""
        at = torch.tensor([threshold], dtype=torch.float64)
        count = self.num_nodes * float(self.density.cdf(at))
        if self.spread is None:
            return float(round(count)), 0.0
        return count, self.num_nodes * float(stderr(self.spread.cdf_samples(at)))

    def mean_below(self, threshold: float) -> float:
        """Mean of the eigenvalues below a point."""
        # Integration by parts: int_0^t x dF = t F(t) - int_0^t F.
        x = torch.linspace(0, threshold, 2001, dtype=torch.float64)
        cdf = self.density.cdf(x)
        return threshold - float(torch.trapezoid(cdf, x) / cdf[-1].clamp_min(1e-300))

    def next_gap(self, first: Gap) -> Gap | None:
        """The widest low stretch right of ``first``; ``None`` if others are about as wide."""
        joined: list[Gap] = []
        for gap in self.stretches if isinstance(self.stretches, list) else ():
            # Evaluate just below the upper end, at which an exact density has an eigenvalue.
            end = math.nextafter(joined[-1].high, 0.0) if joined else 0.0
            if joined and self.below(gap.low)[0] - self.below(end)[0] < TUNING.fewest_between:
                gap = replace(gap, low=joined.pop().low)
            joined.append(replace(gap, threshold=gap.middle))
        after = sorted((gap for gap in joined if gap.low >= first.high), key=lambda gap: gap.width)
        if not after or after[-1].width < math.pi / self.num_moments:
            return None
        higher = [gap.width for gap in after if gap.low > after[-1].high]
        ladder = max(higher, default=0.0) > TUNING.widest_above * after[-1].width
        return None if ladder else after[-1]

    def crowd(self, gap: Gap) -> float:
        """Number of eigenvalues above a gap, in an interval of the same width."""
        # The density blurs both ends by half of the resolution.
        end = point(angle(gap.high) + gap.width + math.pi / self.num_moments)
        return self.below(end)[0] - self.below(gap.high)[0]

    def beyond(self, gap: Gap) -> Gap:
        """A stretch high enough above a gap that the spacings of eigenvalues between are known."""
        resolved = math.pi / self.num_moments
        angles = torch.linspace(angle(gap.high), math.pi, 4001, dtype=torch.float64)
        counts = self.num_nodes * self.density.cdf(1 - angles.cos())
        wanted = counts[0] + TUNING.fewest_above * torch.tensor([2.0, 4.0], dtype=torch.float64)
        low, high = angles[torch.searchsorted(counts, wanted).clamp_max(4000)].tolist()
        # The filter needs a stretch of positive width, even if many eigenvalues coincide.
        low = min(low, math.pi - resolved)
        high = min(max(high, low + resolved / 4), math.pi - resolved / 2)
        return Gap(low=point(low), high=point(high), threshold=point((low + high) / 2))


def sample_density(
    graph: Graph,
    *,
    lanczos: bool,
    num_moments: int,
    num_probes: int,
    bulk: float,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Sampled:
    """Return the entropic spectrum (Algorithm 5) or a smoothed Lanczos density, with its gap."""
    options: dict[str, Any] = {
        "num_probes": num_probes,
        "generator": generator,
        "progress": progress,
    }
    spread: PolynomialDensity | SmoothedDensity
    shape: EntropicDensity | SmoothedDensity
    if lanczos:
        # One step per moment, as in the paper.
        steps = min(num_moments, graph.num_nodes)
        discrete: Any = density(
            laplacian(graph), num_steps=steps, reorthogonalize="none", **options
        )
        shape = spread = discrete.smoothed()
        num_products = discrete.num_products
    else:
        sampled = moments(graph, num_moments=num_moments, exact=False, **options)
        grid = min(TUNING.largest_grid, max(4096, 2 * num_moments**2))
        shape = maxent(sampled, grid_size=grid)
        spread = PolynomialDensity(moments=sampled, dimension=graph.num_nodes)
        num_products = sampled.num_products
    return Sampled(
        density=shape,
        stretches=low_stretches(shape, num_moments=num_moments, bulk=bulk),
        num_nodes=graph.num_nodes,
        num_moments=num_moments,
        num_products=num_products,
        spread=spread,
    )


def exact_density(graph: Graph, *, num_moments: int, bulk: float, num_zeros: int) -> Sampled:
    """Return all eigenvalues as a density. Its gap is the widest spacing of the eigenvalues."""
    values = eigenvalues(graph)
    # The multiplicity of 0 is the number of components.
    values[:num_zeros] = 0.0
    # Each eigenvalue has the mass 1 / n. The solver is backward stable, with errors of n eps |A|.
    n = len(values)
    exact = DiscreteDensity(
        nodes=values[None],
        weights=torch.full((1, n), 1 / n, dtype=torch.float64),
        roundoff=n * torch.finfo(torch.float64).eps,
        dimension=n,
        num_products=n,
        seed=0,
        matrix="normalized",
    )
    left = values[: math.ceil(bulk * n)]
    return Sampled(
        density=exact,
        stretches=resolved_spacings(left, num_moments=num_moments),
        num_nodes=n,
        num_moments=num_moments,
        num_products=n,
    )


# ------------------------------------------------------------------------------------------
# Counting one by one: block Krylov below the gap.


@dataclass(frozen=True, slots=True)
class _BlockKrylov:
    graph: Graph
    null: NullSpace
    max_vectors: int
    sampled: Sampled
    generator: torch.Generator
    progress: bool | Progress

    def count(
        self, gap: Gap, width: int, pick: Callable[[Tensor, Gap], Gap] = widest_between
    ) -> Below:
        """Count the eigenvalues below a gap. Double the number of vectors until they suffice."""
        if isinstance(self.sampled.density, DiscreteDensity):
            return all_below(self.sampled.density.nodes[0], self.null.dimension, gap, pick)
        num_products, n = 0, self.graph.num_nodes
        most = min(self.max_vectors, n - self.null.dimension)
        width = min(width, self.max_vectors)
        while True:
            large = n * width * 8 > TUNING.float32_bytes
            op = laplacian(self.graph, dtype=torch.float32 if large else torch.float64)
            null = replace(self.null, entries=self.null.entries.to(op.dtype))
            with tracking(self.progress, "eigenvalues", width) as bar:
                below = count_below(
                    op, null, gap, width=width, generator=self.generator, bar=bar, pick=pick
                )
            num_products += below.num_products
            enough = not below.full and below.missed <= TUNING.most_missed
            if enough or width >= most:
                return replace(below, num_products=num_products)
            width = min(2 * width, most)

    def count_further(self, first: Gap) -> Below | None:
        """Count below the next stretch, or further up if the spacings above it are needed."""
        gap = self.sampled.next_gap(first)
        if gap is None:
            return None
        sure = self.sampled.crowd(gap) >= TUNING.many_above
        gap = gap if sure else self.sampled.beyond(gap)
        width = _width(self.sampled, gap, self.null)
        if width > self.max_vectors:
            return None
        return self.count(gap, width, widest_between if sure else widest_crowded)


def _width(sampled: Sampled, gap: Gap, null: NullSpace) -> int:
    """Return a number of vectors that most likely suffices for all eigenvalues below the gap."""
    mean, stderr = sampled.below(gap.high)
    wanted = max(0.0, mean + TUNING.agreement * stderr - null.dimension)
    # Add 10 % and ten vectors, because the largest Ritz values converge last.
    return min(math.ceil(1.1 * wanted) + 10, sampled.num_nodes - null.dimension)


def _is_real(below: Below, sampled: Sampled) -> bool:
    """Return whether a gap divides a connected graph and is wider than the spacings above it."""
    if below.count == 1:
        return False
    return sampled.crowd(below.gap) >= TUNING.many_above or stands_out(below.gap, below.above)


# ------------------------------------------------------------------------------------------
# Results, with or without a count.


def reconciled(
    below: Below, sampled: Sampled, facts: dict[str, Any], *, trusted: bool
) -> ClusterCount:
    """Return the count if both methods agree, otherwise no count but the results of both.

    Args:
        below: Result of block Krylov.
        sampled: The sampled density.
        facts: Other fields of the result.
        trusted: Whether the density has enough probes to compare the counts.
    """
    mean, stderr = sampled.below(below.gap.threshold)
    facts = facts | _gap_facts(sampled, below.gap, mean, stderr)
    exact = sampled.spread is None
    facts |= {} if exact else {"found": below.count, "missed": below.missed}
    both = f"Krylov {below.count:,}, density {format_uncertain(mean, stderr)}"
    if below.full or below.missed > TUNING.most_missed:
        why = f"block Krylov had too few vectors and missed about {below.missed:.2g} ({both})"
        advice = "increase max_vectors or num_moments"
        return _failed(f"at least {below.count:,} clusters, but {why}", advice, facts)
    if below.count == 1:
        return _whole(facts)
    # Allow half an eigenvalue more than the error, because the estimate is not an integer.
    if trusted and not is_below(abs(below.count - mean), TUNING.agreement * stderr + 0.5):
        advice = "increase num_moments, because the gap is barely resolved"
        return _failed(f"the two counts disagree: {both}", advice, facts)
    if below.mean > TUNING.conductance:
        return _not_clusters(below.count, below.mean, facts)
    message = "all eigenvalues were computed" if exact else f"{both}, none missed"
    status = Status(outcome="converged", message=message)
    return ClusterCount(count=below.count, stderr=0.0, certified=trusted, status=status, **facts)


def _gap_facts(sampled: Sampled, gap: Gap, mean: float, stderr: float) -> dict[str, Any]:
    return {
        "threshold": gap.threshold,
        "gap": (gap.low, gap.high),
        "mass": mean / sampled.num_nodes,
        "estimate": mean,
        "estimate_stderr": stderr,
    }


def _sampled_count(sampled: Sampled, gap: Gap, facts: dict[str, Any], short: str) -> ClusterCount:
    mean = sampled.below(gap.threshold)[0]
    # The densities of single probes resolve an atom less sharply. Their spread is correct in the
    # middle of the stretch, but too large next to the atom.
    stderr = sampled.below(gap.middle)[1]
    # The mass inside of the stretch may belong to either side.
    unsure = sampled.below(gap.high)[0] - sampled.below(gap.low)[0]
    facts = facts | _gap_facts(sampled, gap, mean, math.hypot(stderr, unsure))
    count = max(round(mean), facts["num_components"])
    if count <= 1:
        return _whole(facts)
    if (average := sampled.mean_below(gap.threshold)) > TUNING.conductance:
        return _not_clusters(count, average, facts)
    stderr = facts["estimate_stderr"]
    if short:
        reason = f"not certified: {short}; the density gives {format_uncertain(mean, stderr)}"
        return _failed(reason, "increase max_vectors, or use method='entropic'", facts)
    message = f"estimated from the density; about {unsure:.2g} eigenvalues lie inside of the gap"
    status = Status(outcome="completed", message=message)
    return ClusterCount(count=count, stderr=stderr, status=status, **facts)


def _sampled_gap(sampled: Sampled, first: Gap, null: NullSpace) -> Gap:
    """Return the first gap, or the next one if only one eigenvalue lies left of the first."""
    if null.dimension > 1 or round(sampled.below(first.threshold)[0]) > 1:
        return first
    further = sampled.next_gap(first)
    return first if further is None or sampled.crowd(further) < TUNING.fewest_above else further


def _whole(facts: dict[str, Any]) -> ClusterCount:
    high = facts["gap"][1]
    reason = (
        "no gap between clusters: the graph is connected, and no clear gap separates its smallest "
        f"eigenvalues above 0 (the first is {high:.3g}) from the others"
    )
    return _no_count(reason, "the graph is one cluster", facts)


def _components_only(reason: str, facts: dict[str, Any]) -> ClusterCount:
    count = facts["num_components"]
    if count == 1:
        return _no_count(reason, "there is no gap", facts)
    reason = f"{reason}; the count is the number of connected components"
    status = Status(outcome="completed", message="no clusters inside the components were found")
    return ClusterCount(count=count, stderr=0.0, reason=reason, status=status, **facts)


def _not_clusters(count: int, mean: float, facts: dict[str, Any]) -> ClusterCount:
    reason = (
        f"no clusters: the mean of the {count:,} eigenvalues left of the gap is {mean:.2g}, but "
        f"clusters with more edges inside than outside have a mean below {TUNING.conductance}"
    )
    return _no_count(reason, "no clusters", facts)


def _failed(reason: str, advice: str, facts: dict[str, Any]) -> ClusterCount:
    status = Status(outcome="max_steps", message=reason, advice=advice)
    return ClusterCount(count=None, reason=reason, status=status, **facts)


def _no_count(reason: str, message: str, facts: dict[str, Any]) -> ClusterCount:
    status = Status(outcome="completed", message=message)
    return ClusterCount(count=None, reason=reason, status=status, **facts)


def _uncertain(mean: float, stderr: float) -> str:
    return f"{mean:.4g}" if math.isnan(stderr) else format_uncertain(mean, stderr)
