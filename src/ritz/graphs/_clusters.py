"""The number of clusters of a graph, counted in two ways that check each other."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Status, format_uncertain
from ritz._core.storage import storable
from ritz.graphs._density import moments
from ritz.graphs._gaps import (
    TUNING,
    Found,
    Gap,
    NullSpace,
    angle,
    count_below,
    find_gap,
    low_stretches,
    point,
    stands_out,
    widest_between,
    widest_crowded,
)
from ritz.graphs._graph import Graph
from ritz.graphs._io import GraphLike
from ritz.graphs._matrices import laplacian, with_edges
from ritz.spectra import Density, PolynomialDensity, SmoothedDensity, density, maxent

CountMethod = Literal["auto", "krylov", "entropic", "lanczos"]
COUNT_METHODS: tuple[CountMethod, ...] = ("auto", "krylov", "entropic", "lanczos")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCount:
    r"""The number of clusters of a graph: eigenvalues left of the gap of its spectrum.

    Attributes:
        count: Number of clusters. It is the number of components if nothing beyond them was
            found, and ``None`` if a connected graph has no gap, or none that can be trusted.
        stderr: Standard error of the count; zero if eigenvalues were counted one by one and none
            was missed.
        threshold: :math:`\lambda_*`, in the gap.
        gap: Ends of the gap.
        mass: Sampled fraction of the eigenvalues left of the threshold.
        estimate: Their sampled number, ``n`` times the mass.
        estimate_stderr: Standard error of the estimate.
        found: Number found by block Krylov, a lower bound; ``None`` if that was not used.
        missed: Sampled number of eigenvalues that block Krylov missed.
        certified: Both ways agree and nothing was missed.
        reason: Why there is no count, or only that of the components.
        num_nodes: Vertices of the graph.
        num_components: Connected components, including isolated vertices: eigenvalues 0.
        method: How it was counted.
        num_products: Matrix-vector products.
        status: Whether the count can be trusted, and what to do if not.
        seed: Seed of the generator.
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

    def raise_if_failed(self) -> None:
        """Raise :class:`ritz.NotConvergedError` unless the count can be trusted."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        if self.count is None:
            lines = [f"no count: {self.reason}"]
        else:
            error = f" ({_uncertain(self.estimate, self.stderr)})" if self.stderr != 0 else ""
            lines = [f"{self.count:,} clusters{error}"]
            lines += [f"  {self.reason}"] if self.reason else []
        if not math.isnan(self.threshold):
            ends = f"{self.gap[0]:.4g} {{}} {self.gap[1]:.4g}; mass below {self.mass:.4g}"
            if self.reason.startswith("no gap"):
                lines.append(f"  nothing between {ends.format('and')}")
            else:
                lines.append(f"  threshold {self.threshold:.4g} in the gap {ends.format('to')}")
        if self.found is not None:
            lines.append(
                f"  found {self.found:,} one by one, {self.missed:.2g} missed; "
                f"sampled {_uncertain(self.estimate, self.estimate_stderr)}"
            )
        lines.append(
            f"  {self.num_nodes:,} vertices, {self.num_components:,} components; {self.method}, "
            f"{self.num_products:,} products"
        )
        return "\n".join([*lines, f"  {self.status}"])


def _uncertain(mean: float, stderr: float) -> str:
    return f"{mean:.4g}" if math.isnan(stderr) else format_uncertain(mean, stderr)


# ------------------------------------------------------------------------------------------
# Counting by sampling: N(lambda) = n F(lambda), with F the distribution function of a density.


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled density of a graph with its gap.

    Attributes:
        density: Entropic or smoothed.
        gap: The widest gap, or why there is none.
        stretches: All low stretches, ascending.
        num_nodes: Vertices.
        num_moments: Moments of the density, or Lanczos steps.
        num_products: Matrix-vector products.
        spread: A density with one sample per probe, which gives the error.
    """

    density: Density
    gap: Gap | str
    stretches: list[Gap]
    num_nodes: int
    num_moments: int
    num_products: int
    spread: PolynomialDensity | SmoothedDensity

    def below(self, threshold: float) -> tuple[float, float]:
        """Number of eigenvalues below a point, and its standard error."""
        at = torch.tensor([threshold], dtype=torch.float64)
        # A band of one standard deviation either way is two standard errors wide.
        low, high = self.spread.cdf_band(at, sigmas=1.0)
        return self.num_nodes * float(self.density.cdf(at)), self.num_nodes * float(high - low) / 2

    def next_gap(self, first: Gap) -> Gap | None:
        """The widest low stretch right of a first one; none if others are about as wide."""
        joined: list[Gap] = []
        for one in self.stretches:
            between = self.below(one.low)[0] - self.below(joined[-1].high)[0] if joined else 1.0
            if between < TUNING.noise:
                one = replace(one, low=joined.pop().low)
            joined.append(replace(one, threshold=one.middle))
        after = sorted((gap for gap in joined if gap.low > first.high), key=lambda gap: gap.width)
        if not after or after[-1].width < math.pi / self.num_moments:
            return None
        higher = [gap.width for gap in after if gap.low > after[-1].high]
        ladder = max(higher, default=0.0) > TUNING.ladder * after[-1].width
        return None if ladder else after[-1]

    def crowd(self, gap: Gap) -> float:
        """Number of eigenvalues in a stretch above a gap that is equally wide."""
        # The density blurs both ends by half of what is resolved.
        end = point(angle(gap.high) + gap.width + math.pi / self.num_moments)
        return self.below(end)[0] - self.below(gap.high)[0]

    def beyond(self, gap: Gap) -> Gap:
        """The stretch that begins some eigenvalues above a gap, enough to know their spacings."""
        resolved = math.pi / self.num_moments
        angles = torch.linspace(angle(gap.high), math.pi, 4001, dtype=torch.float64)
        counts = self.num_nodes * self.density.cdf(1 - angles.cos())
        wanted = counts[0] + TUNING.crowd * torch.tensor([2.0, 4.0], dtype=torch.float64)
        low, high = angles[torch.searchsorted(counts, wanted).clamp_max(4000)].tolist()
        # A polynomial needs room to fall, even where many eigenvalues coincide.
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
    shape: Density
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
    stretches = low_stretches(shape, num_moments=num_moments, bulk=bulk)
    return Sampled(
        density=shape,
        gap=find_gap(stretches, num_moments=num_moments),
        stretches=[] if isinstance(stretches, str) else stretches,
        num_nodes=graph.num_nodes,
        num_moments=num_moments,
        num_products=num_products,
        spread=spread,
    )


# ------------------------------------------------------------------------------------------
# The number of clusters of a graph, counted in two ways that check each other.


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
    r"""Count the clusters of a graph: eigenvalues of its normalised Laplacian left of the gap.

    .. math:: N_c = \#\{i : \lambda_i < \lambda_*\} \approx n \int_0^{\lambda_*} p(\lambda)\,
        d\lambda

    :math:`\lambda_*` lies in the widest low stretch of the density left of the bulk. If only the
    single eigenvalue 0 of a connected graph is left of it, the next stretch is tried: it counts if
    it is wide beside the spacings above it and no other above is about as wide. ``count`` is
    ``None`` with a ``reason`` if a connected graph has no gap (a path, a grid), or only the one
    above 0 (a random graph, a complete one: the whole is one cluster).

    Each connected component, and so each isolated vertex, has an eigenvalue 0 and counts. With
    several components the gap above 0 may be the widest, or there may be none (cycles). ``count``
    is then the number of components, which is exact, and ``reason`` says if no gap was found. To
    count clusters within the largest component, pass
    :meth:`ritz.graphs.Graph.largest_component`.

    ================  ===================================================================
    method            count
    ================  ===================================================================
    ``entropic``      mass of the entropic spectrum (Algorithm 5), with standard deviation
                      at most :math:`\sqrt{2 N_c / d}`
    ``lanczos``       mass of Lanczos quadrature, smoothed by a Gaussian
    ``krylov``        eigenvalues found one by one in a block filtered by Chebyshev
                      polynomials, a lower bound; fresh probes say how many it missed
    ``auto``          ``entropic`` and ``krylov``; ``status`` says if they differ by more
                      than four standard errors, or something was missed
    ================  ===================================================================

    Cost: ``num_probes * num_moments / 2`` products for ``entropic``, twice that for ``lanczos``,
    about 10 products per eigenvalue for ``krylov``, more if the gap is narrow. Memory beyond the
    graph: five vectors per probe of a block, and 1.1 vectors per eigenvalue for ``krylov``.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts, with at least one edge.
        method: One of the table.
        num_moments: Moments ``m``, or Lanczos steps. A gap narrower than :math:`\pi / m` in
            :math:`\arccos(1 - \lambda)` is not seen.
        num_probes: Probes ``d``.
        max_vectors: Maximum number of vectors for ``krylov``. Defaults to as many as 4 GiB hold.
            If these are too few, ``auto`` counts as ``entropic`` does, and says so.
        generator: Source of randomness. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Section 3.7 of *Spectral Machine Learning*.

    Example:
        >>> from ritz import graphs
        >>> blocks = graphs.cluster_graph([30] * 9, degree=12, num_links=18)
        >>> graphs.count_clusters(blocks).count
        9
    """
    graph = with_edges(graph)
    check_choice("method", method, COUNT_METHODS)
    check_count("num_moments", num_moments, low=4)
    check_count("num_probes", num_probes, low=2)
    if max_vectors is not None:
        check_count("max_vectors", max_vectors)
    generator = resolve_generator(generator)
    null = NullSpace.of(graph, torch.float64)
    num_probes = min(num_probes, TUNING.locating) if method == "krylov" else num_probes
    # The middle of the bulk is the median of the eigenvalues that are not 0.
    zeros = null.dimension / graph.num_nodes
    few = method != "entropic" and graph.num_nodes - null.dimension <= TUNING.few
    sampled = sample_density(
        graph,
        lanczos=method == "lanczos" or few,
        num_moments=num_moments,
        num_probes=num_probes,
        bulk=zeros + (1 - zeros) / 2,
        generator=generator,
        progress=progress,
    )
    facts: dict[str, Any] = {
        "num_nodes": graph.num_nodes,
        "num_components": null.dimension,
        "num_products": sampled.num_products,
        "method": f"{method}, {num_moments} moments x {num_probes} probes",
        "seed": generator.initial_seed(),
    }
    if isinstance(sampled.gap, str):
        return _components_only(f"no gap: {sampled.gap}", facts)
    # Blocks that fill the memory are float32, four bytes per entry.
    most = TUNING.memory // (4 * graph.num_nodes) if max_vectors is None else max_vectors
    width = _width(sampled, sampled.gap, null)
    short = ""
    if method == "auto" and width > most:
        short = f"not certified: block Krylov would need {width:,} vectors, max_vectors is {most:,}"
    if short or method in ("entropic", "lanczos"):
        return _sampled_count(sampled, _sampled_gap(sampled, sampled.gap, null), facts, short)
    # Each way certifies the other: sampling has an error but misses nothing, block Krylov is exact
    # but may miss eigenvalues.
    krylov = _BlockKrylov(graph, null, max(1, most), generator, progress)
    found = krylov.find(sampled.gap, width)
    facts["num_products"] += found.num_products
    if found.count == 1 and found.missed <= TUNING.missed:
        further = krylov.find_further(sampled, sampled.gap)
        facts["num_products"] += further.num_products if further else 0
        found = further if further and _is_real(further, sampled) else found
    return reconciled(found, sampled, facts, trusted=method == "auto")


@dataclass(frozen=True, slots=True)
class _BlockKrylov:
    graph: Graph
    null: NullSpace
    max_vectors: int
    generator: torch.Generator
    progress: bool | Progress

    def find(
        self, gap: Gap, width: int, pick: Callable[[Tensor, Gap], Gap] = widest_between
    ) -> Found:
        """Count below a gap, and double the number of vectors until they are enough."""
        num_products, n = 0, self.graph.num_nodes
        most = min(self.max_vectors, n - self.null.dimension)
        width = min(width, self.max_vectors)
        while True:
            large = n * width * 8 > TUNING.large
            op = laplacian(self.graph, dtype=torch.float32 if large else torch.float64)
            null = replace(self.null, entries=self.null.entries.to(op.dtype))
            with tracking(self.progress, "eigenvalues", width) as bar:
                found = count_below(
                    op, null, gap, width=width, generator=self.generator, bar=bar, pick=pick
                )
            num_products += found.num_products
            enough = not found.full and found.missed <= TUNING.missed
            if enough or width >= most:
                return replace(found, num_products=num_products)
            width = min(2 * width, most)

    def find_further(self, sampled: Sampled, first: Gap) -> Found | None:
        """Count below the next stretch, or somewhat above it if its spacings must be known."""
        gap = sampled.next_gap(first)
        if gap is None:
            return None
        sure = sampled.crowd(gap) >= TUNING.sure
        gap = gap if sure else sampled.beyond(gap)
        width = _width(sampled, gap, self.null)
        if width > self.max_vectors:
            return None
        return self.find(gap, width, widest_between if sure else widest_crowded)


def _width(sampled: Sampled, gap: Gap, null: NullSpace) -> int:
    """Vectors that most likely hold all eigenvalues below the end of a gap."""
    mean, stderr = sampled.below(gap.high)
    wanted = max(0.0, mean + TUNING.agreement * stderr - null.dimension)
    # A tenth and ten more: the smallest Ritz values converge first.
    return min(math.ceil(1.1 * wanted) + 10, sampled.num_nodes - null.dimension)


def _is_real(found: Found, sampled: Sampled) -> bool:
    """Whether a gap divides a connected graph, and is wide beside the spacings above it."""
    if found.count == 1:
        return False
    return sampled.crowd(found.gap) >= TUNING.sure or stands_out(found.gap, found.above)


def reconciled(
    found: Found, sampled: Sampled, facts: dict[str, Any], *, trusted: bool
) -> ClusterCount:
    """Return the count that two ways agree on, or what each of them says; nothing is averaged.

    Args:
        found: Result of block Krylov.
        sampled: The density.
        facts: Other fields of the result.
        trusted: The density has enough probes to count by it.
    """
    mean, stderr = sampled.below(found.gap.threshold)
    facts = facts | _gap_facts(sampled, found.gap, mean, stderr)
    facts |= {"found": found.count, "missed": found.missed}
    both = f"{found.count:,} found, {format_uncertain(mean, stderr)} sampled"
    if found.full or found.missed > TUNING.missed:
        why = f"block Krylov was under-run, {found.missed:.3g} missed: {both}"
        advice = "raise max_vectors or num_moments"
        status = Status(outcome="max_steps", message=why, advice=advice)
        if not trusted:
            return _no_count(f"at least {found.count:,}: {why}", facts, status)
        return ClusterCount(count=round(mean), stderr=stderr, status=status, **facts)
    if found.count == 1:
        return _whole(facts)
    # Half an eigenvalue more than the error: the sampled number is not whole.
    if trusted and not is_below(abs(found.count - mean), TUNING.agreement * stderr + 0.5):
        status = Status(
            outcome="max_steps",
            message=f"the two ways disagree: {both}",
            advice="raise num_moments: the gap is barely resolved",
        )
        return ClusterCount(count=found.count, stderr=0.0, status=status, **facts)
    status = Status(outcome="converged", message=f"{both}, none missed")
    return ClusterCount(count=found.count, stderr=0.0, certified=trusted, status=status, **facts)


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
    # A single probe resolves an atom less sharply than the density does: its whole spread shows
    # in the middle of the stretch, not at the foot of the atom.
    stderr = sampled.below(gap.middle)[1]
    # Mass inside the stretch may belong to either side.
    unsure = sampled.below(gap.high)[0] - sampled.below(gap.low)[0]
    facts = facts | _gap_facts(sampled, gap, mean, math.hypot(stderr, unsure))
    count = max(round(mean), facts["num_components"])
    if count <= 1:
        return _whole(facts)
    status = Status(
        outcome="completed",
        message=short or f"sampled, {unsure:.2g} eigenvalues in the gap itself",
        advice="raise max_vectors" if short else "",
    )
    return ClusterCount(count=count, stderr=facts["estimate_stderr"], status=status, **facts)


def _sampled_gap(sampled: Sampled, first: Gap, null: NullSpace) -> Gap:
    """The first gap, or the next if only one zero is left of the first and the next is real."""
    if null.dimension > 1 or round(sampled.below(first.threshold)[0]) > 1:
        return first
    further = sampled.next_gap(first)
    return first if further is None or sampled.crowd(further) < TUNING.crowd else further


def _whole(facts: dict[str, Any]) -> ClusterCount:
    high = facts["gap"][1]
    reason = (
        "no gap between clusters: the whole graph is one, connected; beyond the eigenvalue 0 that "
        f"it must have, those from {high:.3g} on have no gap that stands out"
    )
    return _no_count(reason, facts, Status(outcome="completed", message="one cluster, the whole"))


def _components_only(reason: str, facts: dict[str, Any]) -> ClusterCount:
    count = facts["num_components"]
    if count == 1:
        return _no_count(reason, facts, Status(outcome="completed", message="there is no gap"))
    reason = f"{reason}; counted are the {count:,} components, as many as eigenvalues 0"
    status = Status(outcome="completed", message="the components alone, no gap beyond them")
    return ClusterCount(count=count, stderr=0.0, reason=reason, status=status, **facts)


def _no_count(reason: str, facts: dict[str, Any], status: Status) -> ClusterCount:
    return ClusterCount(count=None, reason=reason, status=status, **facts)
