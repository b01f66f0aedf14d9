"""How many eigenvalues of a graph lie below a threshold, by sampling; and what is made of it."""

import math
from dataclasses import dataclass

import torch

from ritz._core.progress import Progress
from ritz._core.results import Status, format_uncertain
from ritz._core.storage import storable
from ritz.graphs.entropic import moments
from ritz.graphs.gaps import CROWD, Gap, NoGap, angle, find_gap, low_stretches, point
from ritz.graphs.matrices import laplacian
from ritz.graphs.structures import Graph
from ritz.spectra import (
    Density,
    EntropicDensity,
    PolynomialDensity,
    SmoothedDensity,
    density,
    maxent,
)

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
    """Return the entropic spectrum with its gap (THESIS Algorithm 5)."""
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
