"""The number of clusters of a graph, counted in two ways that check each other."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Status, format_uncertain
from ritz._core.storage import storable
from ritz.graphs._density import moments
from ritz.graphs._gaps import (
    CROWD,
    Found,
    Gap,
    NoGap,
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
from ritz.spectra import (
    Density,
    EntropicDensity,
    PolynomialDensity,
    SmoothedDensity,
    density,
    maxent,
)

# ------------------------------------------------------------------------------------------
# How many eigenvalues of a graph lie below a threshold, by sampling; and what is made of it.

LARGEST_GRID = 2**16
NOTHING = 0.25  # eigenvalues between two low stretches: fewer are noise, and the two are one
LADDER = 0.67  # of its width: a stretch with another one as wide above it divides nothing


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCount:
    r"""The number of clusters of a graph: eigenvalues left of the gap of its spectrum.

    Attributes:
        count: Their number, that of the components where nothing beyond them could be told;
            ``None`` where a connected graph has no gap, or none could be trusted.
        stderr: Standard error of the count; zero where eigenvalues were found one by one and none
            is missing.
        threshold: :math:`\lambda_*`, in the gap.
        gap: Its ends.
        mass: Share of the eigenvalues left of the threshold, as sampled.
        estimate: Their number as sampled, ``n`` times the mass.
        estimate_stderr: Standard error of that.
        found: Number found by block Krylov, a lower bound; ``None`` where it was not asked.
        missed: Number that fresh probes say it missed.
        certified: Whether both ways agree and nothing was missed.
        reason: Why there is no count, or none but that of the components.
        num_nodes: Vertices of the graph.
        num_components: Connected components, isolated vertices among them: eigenvalues 0.
        method: How it was counted.
        num_products: Products with single vectors that were spent.
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
        low, high = self.gap
        lines = []
        if self.count is None:
            lines.append(f"no count: {self.reason}")
        elif self.stderr == 0:
            lines.append(f"{self.count:,} clusters")
        else:
            lines.append(f"{self.count:,} clusters ({_uncertain(self.estimate, self.stderr)})")
        if self.count is not None and self.reason:
            lines.append(f"  {self.reason}")
        if not math.isnan(self.threshold) and self.reason.startswith("no gap"):
            lines.append(f"  nothing between {low:.4g} and {high:.4g}; mass below {self.mass:.4g}")
        elif not math.isnan(self.threshold):
            lines.append(
                f"  threshold {self.threshold:.4g} in the gap {low:.4g} to {high:.4g}; "
                f"mass below {self.mass:.4g}"
            )
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled density of a graph, its gap, and the numbers of eigenvalues below points.

    Attributes:
        density: Entropic or smoothed.
        gap: Of it, or why there is none.
        stretches: All its low stretches, ascending.
        num_nodes: Vertices.
        num_moments: What it was made of.
        num_products: Products spent.
        spread: The same from polynomials or kernels, one a probe: its spread is the error.
    """

    density: Density
    gap: Gap | NoGap
    stretches: list[Gap]
    num_nodes: int
    num_moments: int
    num_products: int
    spread: PolynomialDensity | SmoothedDensity

    def below(self, threshold: float) -> tuple[float, float]:
        """Number of eigenvalues below a point, and its standard error."""
        point = torch.tensor([threshold], dtype=torch.float64)
        mean = self.num_nodes * float(self.density.cdf(point))
        low, high = self.spread.cdf_band(point, sigmas=1.0)
        return mean, self.num_nodes * float(high - low) / 2

    def next_gap(self, first: Gap) -> Gap | None:
        """The widest low stretch right of a first one; none where others are about as wide."""
        joined: list[Gap] = []
        for one in self.stretches:
            between = self.below(one.low)[0] - self.below(joined[-1].high)[0] if joined else 1.0
            if between < NOTHING:
                low = joined.pop().low
                one = Gap(low=low, high=one.high, threshold=one.threshold)
            joined.append(Gap(low=one.low, high=one.high, threshold=one.middle))
        after = sorted((gap for gap in joined if gap.low > first.high), key=lambda gap: gap.width)
        if not after or after[-1].width < math.pi / self.num_moments:
            return None
        higher = [gap.width for gap in after if gap.low > after[-1].high]
        return None if max(higher, default=0.0) > LADDER * after[-1].width else after[-1]

    def crowd(self, gap: Gap) -> float:
        """Number of eigenvalues in a stretch above a gap that is as wide as that."""
        # Half of what is resolved is lost to the density of either side.
        end = point(angle(gap.high) + gap.width + math.pi / self.num_moments)
        return self.below(end)[0] - self.below(gap.high)[0]

    def beyond(self, gap: Gap) -> Gap:
        """The stretch that begins some eigenvalues above a gap, enough to know their spacings."""
        resolved = math.pi / self.num_moments
        angles = torch.linspace(angle(gap.high), math.pi, 4001, dtype=torch.float64)
        counts = self.num_nodes * self.density.cdf(1 - angles.cos())
        wanted = counts[0] + CROWD * torch.tensor([2.0, 4.0], dtype=torch.float64)
        low, high = angles[torch.searchsorted(counts, wanted).clamp_max(4000)].tolist()
        # A polynomial needs room to fall, wherever an atom may be.
        low = min(low, math.pi - resolved)
        high = min(max(high, low + resolved / 4), math.pi - resolved / 2)
        return Gap(low=point(low), high=point(high), threshold=point((low + high) / 2))


def sample_entropic(
    graph: Graph,
    *,
    num_moments: int,
    num_probes: int,
    bulk: float,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Sampled:
    """Return the entropic spectrum with its gap (Algorithm 5)."""
    found = moments(
        graph,
        num_moments=num_moments,
        num_probes=num_probes,
        exact=False,
        generator=generator,
        progress=progress,
    )
    # The peak of many equal eigenvalues 0 is as narrow as the square of what moments resolve.
    grid = min(LARGEST_GRID, max(4096, 2 * num_moments**2))
    entropic: EntropicDensity = maxent(found, grid_size=grid)
    spread = PolynomialDensity(moments=found, dimension=graph.num_nodes)
    return _sampled(entropic, graph, num_moments, bulk, found.num_products, spread)


def sample_lanczos(
    graph: Graph,
    *,
    num_moments: int,
    num_probes: int,
    bulk: float,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Sampled:
    """Return the smoothed Lanczos density with its gap; a step a moment, as in the paper."""
    steps = min(num_moments, graph.num_nodes)
    discrete = density(
        laplacian(graph),
        num_probes=num_probes,
        num_steps=steps,
        reorthogonalize="none",
        generator=generator,
        progress=progress,
    )
    smoothed = discrete.smoothed()  # type: ignore[union-attr]  # no width was given
    return _sampled(smoothed, graph, num_moments, bulk, discrete.num_products, smoothed)  # type: ignore[union-attr]


def _sampled(
    density: Density,
    graph: Graph,
    num_moments: int,
    bulk: float,
    num_products: int,
    spread: PolynomialDensity | SmoothedDensity,
) -> Sampled:
    gap = find_gap(density, num_moments=num_moments, bulk=bulk)
    stretches = low_stretches(density, num_moments=num_moments, bulk=bulk)
    return Sampled(
        density=density,
        gap=gap,
        stretches=[] if isinstance(stretches, NoGap) else stretches,
        num_nodes=graph.num_nodes,
        num_moments=num_moments,
        num_products=num_products,
        spread=spread,
    )


def _uncertain(mean: float, stderr: float) -> str:
    return f"{mean:.4g}" if math.isnan(stderr) else format_uncertain(mean, stderr)


# ------------------------------------------------------------------------------------------
# The number of clusters of a graph, counted in two ways that check each other.

CountMethod = Literal["auto", "krylov", "entropic", "lanczos"]
COUNT_METHODS: tuple[CountMethod, ...] = ("auto", "krylov", "entropic", "lanczos")
MEMORY = 2**32  # bytes of a block, unless told otherwise
LARGE = 2**30  # bytes of a block of float64: beyond, float32
LOCATING = 10  # probes that find the gap where they need not count
MISSED = 0.25  # eigenvalues: a missed one leaves one, none leaves next to nothing
AGREEMENT = 4.0  # standard errors
FEW = 32  # eigenvalues but 0: Lanczos finds them all, maximum entropy has no density to find
SURE = 4 * CROWD  # sampled eigenvalues close above a gap: their spacings need not be known


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
    r"""Return the number of clusters: eigenvalues of the normalised Laplacian left of its gap.

    .. math:: N_c = \#\{i : \lambda_i < \lambda_*\} \approx n \int_0^{\lambda_*} p(\lambda)\,
        d\lambda

    with :math:`\lambda_*` in the widest low stretch of the density left of the bulk. Where nothing
    is left of that but the single eigenvalue 0 of a connected graph, the next stretch is tried: it
    counts if it is wide beside the spacings above it, and no other above is about as wide. Where a
    connected graph has no gap (a path, a grid), or none but that above 0 (a random graph, a
    complete one: the whole is one cluster), ``count`` is ``None`` and ``reason`` says so.

    Each connected component, and so each isolated vertex, has an eigenvalue 0 and counts. Of
    several components the gap above 0 may be the widest, or there may be none (cycles): ``count``
    is then their number, which is exact, and ``reason`` says if no gap was found. What the largest
    is made of, :meth:`ritz.graphs.Graph.largest_component` alone tells.

    ``entropic``: the mass of the entropic spectrum (Algorithm 5), with standard deviation
    :math:`\sqrt{2 N_c / d}` at most. ``lanczos``: that of Lanczos quadrature, smoothed by a
    Gaussian. ``krylov``: eigenvalues found one by one in a block that Chebyshev polynomials have
    filtered, a lower bound, and fresh probes that say what it missed. ``auto``: ``entropic`` and
    ``krylov``; where they differ by more than four standard errors, or something was missed,
    ``status`` says so: nothing is averaged.

    Cost: ``num_probes * num_moments / 2`` products for ``entropic``, twice that for ``lanczos``,
    about 10 products an eigenvalue for ``krylov``, more where the gap is narrow. Memory beyond the
    graph: five vectors a probe of a block, and for ``krylov`` 1.1 vectors an eigenvalue.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes, with an edge at least.
        method: ``auto``, ``krylov``, ``entropic`` or ``lanczos``.
        num_moments: Moments ``m``, or Lanczos steps: a gap narrower than :math:`\pi / m` in
            :math:`\arccos(1 - \lambda)` is not seen.
        num_probes: Probes ``d``.
        max_vectors: Most vectors for ``krylov``; as many as 4 GiB hold by default. Where these are
            too few ``auto`` is as ``entropic``, and says so.
        generator: Source of all randomness.
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
    num_probes = min(num_probes, LOCATING) if method == "krylov" else num_probes
    zeros = null.dimension / graph.num_nodes
    few = method != "entropic" and graph.num_nodes - null.dimension <= FEW
    sampled = (sample_lanczos if method == "lanczos" or few else sample_entropic)(
        graph,
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
    if not isinstance(sampled.gap, Gap):
        return _components_alone(f"no gap: {sampled.gap.reason}", facts)
    if method in ("entropic", "lanczos"):
        return _sampled_count(sampled, _sampled_gap(sampled, sampled.gap, null), facts)
    width = _width(sampled, sampled.gap, null)
    most = MEMORY // (4 * graph.num_nodes) if max_vectors is None else max_vectors
    if width > most and method == "auto":
        short = f"not certified: block Krylov would need {width:,} vectors, max_vectors is {most:,}"
        return _sampled_count(sampled, _sampled_gap(sampled, sampled.gap, null), facts, short)
    found = _found(graph, null, sampled.gap, width, max(1, most), generator, progress)
    facts["num_products"] += found.num_products
    if found.count == 1 and found.missed <= MISSED:
        further = _found_further(graph, null, sampled, max(1, most), generator, progress)
        facts["num_products"] += further.num_products if further else 0
        found = further if further and _real(further, sampled) else found
    return reconciled(found, sampled, facts, trusted=method == "auto")


def reconciled(
    found: Found, sampled: Sampled, facts: dict[str, Any], *, trusted: bool
) -> ClusterCount:
    """Return the count that two ways agree on, or what each of them says.

    Args:
        found: Of block Krylov.
        sampled: Of the density.
        facts: Other fields of the result.
        trusted: Whether the density has probes enough to be counted by.
    """
    threshold = found.gap.threshold
    mean, stderr = sampled.below(threshold)
    facts = facts | {
        "threshold": threshold,
        "gap": (found.gap.low, found.gap.high),
        "mass": mean / sampled.num_nodes,
        "estimate": mean,
        "estimate_stderr": stderr,
        "found": found.count,
        "missed": found.missed,
    }
    both = f"{found.count:,} found, {format_uncertain(mean, stderr)} sampled"
    if found.full or found.missed > MISSED:
        why = f"block Krylov was under-run, {found.missed:.3g} missed: {both}"
        status = _doubtful(why, "raise max_vectors or num_moments")
        if not trusted:
            return _without(f"at least {found.count:,}: {why}", facts, status)
        return ClusterCount(count=round(mean), stderr=stderr, status=status, **facts)
    if found.count == 1:
        return _whole(facts)
    if trusted and abs(found.count - mean) > AGREEMENT * stderr + 0.5:
        why = f"the two ways disagree: {both}"
        status = _doubtful(why, "raise num_moments: the gap is barely resolved")
        return ClusterCount(count=found.count, stderr=0.0, status=status, **facts)
    status = Status(outcome="converged", message=f"{both}, none missed")
    return ClusterCount(count=found.count, stderr=0.0, certified=trusted, status=status, **facts)


def _sampled_count(
    sampled: Sampled, gap: Gap, facts: dict[str, Any], short: str = ""
) -> ClusterCount:
    mean = sampled.below(gap.threshold)[0]
    # A single probe resolves an atom less sharply than the density does: its spread is seen whole
    # in the middle of the stretch, not at the foot of the atom.
    stderr = sampled.below(gap.middle)[1]
    # Mass that lies in the stretch may belong to either side.
    unsure = sampled.below(gap.high)[0] - sampled.below(gap.low)[0]
    facts = facts | {
        "threshold": gap.threshold,
        "gap": (gap.low, gap.high),
        "mass": mean / sampled.num_nodes,
        "estimate": mean,
        "estimate_stderr": math.hypot(stderr, unsure),
    }
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
    """The gap that counts: the first, unless it has but one zero on its left and a next is real."""
    if null.dimension > 1 or round(sampled.below(first.threshold)[0]) > 1:
        return first
    further = sampled.next_gap(first)
    return first if further is None or sampled.crowd(further) < CROWD else further


def _found_further(
    graph: Graph,
    null: NullSpace,
    sampled: Sampled,
    most: int,
    generator: torch.Generator,
    progress: bool | Progress,
) -> Found | None:
    """What block Krylov finds at the next stretch, and above it where that is needed."""
    if not isinstance(sampled.gap, Gap) or (gap := sampled.next_gap(sampled.gap)) is None:
        return None
    sure = sampled.crowd(gap) >= SURE
    gap = gap if sure else sampled.beyond(gap)
    width = _width(sampled, gap, null)
    if width > most:
        return None
    pick = widest_between if sure else widest_crowded
    return _found(graph, null, gap, width, most, generator, progress, pick)


def _real(found: Found, sampled: Sampled) -> bool:
    """Whether a gap divides a connected graph, and is wide beside the spacings above it."""
    if found.count == 1:
        return False
    return sampled.crowd(found.gap) >= SURE or stands_out(found.gap, found.above)


def _found(
    graph: Graph,
    null: NullSpace,
    gap: Gap,
    width: int,
    most: int,
    generator: torch.Generator,
    progress: bool | Progress,
    pick: Callable[[Tensor, Gap], Gap] = widest_between,
) -> Found:
    """What block Krylov finds, with twice the vectors as long as these are too few."""
    spent, width = 0, min(width, most)
    while True:
        large = graph.num_nodes * width * 8 > LARGE
        op = laplacian(graph, dtype=torch.float32 if large else torch.float64)
        own = NullSpace(null.labels, null.entries.to(op.dtype), null.dimension)
        with tracking(progress, "eigenvalues", width) as bar:
            found = count_below(op, own, gap, width=width, generator=generator, bar=bar, pick=pick)
        spent += found.num_products
        enough = not found.full and found.missed <= MISSED
        if enough or width >= min(most, graph.num_nodes - null.dimension):
            return replace(found, num_products=spent)
        width = min(2 * width, most, graph.num_nodes - null.dimension)


def _width(sampled: Sampled, gap: Gap, null: NullSpace) -> int:
    """Vectors that hold all eigenvalues below the end of a gap, most likely."""
    mean, stderr = sampled.below(gap.high)
    wanted = max(0.0, mean + AGREEMENT * stderr - null.dimension)
    return min(math.ceil(1.1 * wanted) + 10, sampled.num_nodes - null.dimension)


def _doubtful(message: str, advice: str) -> Status:
    return Status(outcome="max_steps", message=message, advice=advice)


def _whole(facts: dict[str, Any]) -> ClusterCount:
    high = facts["gap"][1]
    reason = (
        "no gap between clusters: the whole graph is one, connected; beyond the eigenvalue 0 that "
        f"it must have, those from {high:.3g} on have no gap that stands out"
    )
    return _without(reason, facts, Status(outcome="completed", message="one cluster, the whole"))


def _components_alone(reason: str, facts: dict[str, Any]) -> ClusterCount:
    count = facts["num_components"]
    if count == 1:
        return _without(reason, facts)
    reason = f"{reason}; counted are the {count:,} components, as many as eigenvalues 0"
    status = Status(outcome="completed", message="the components alone, no gap beyond them")
    return ClusterCount(count=count, stderr=0.0, reason=reason, status=status, **facts)


def _without(reason: str, facts: dict[str, Any], status: Status | None = None) -> ClusterCount:
    done = Status(outcome="completed", message="there is no gap")
    return ClusterCount(count=None, reason=reason, status=status or done, **facts)
