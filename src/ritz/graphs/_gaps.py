"""Gaps of a spectral density, and the eigenvalues below one counted by a polynomial filter."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ritz._core.progress import Progress
from ritz._core.random import probes
from ritz.graphs._graph import Graph
from ritz.operators import LinearOperator
from ritz.spectra import Density

TOP = 2.0  # largest possible eigenvalue of a normalised Laplacian


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Thresholds of ``count_clusters``.

    The graphs of ``tests/graphs/test_clusters.py`` and ``test_cluster_gaps.py`` decide: planted
    clusters with few and with moderate links, and random graphs, grids, paths and cycles, which
    have none.
    """

    # A stretch is low if the density is below this fraction of the mean on either side. Half of it
    # gives the same counts for eleven of these graphs.
    low: float = 0.05
    # Grid points per resolved angle.
    points: int = 32
    # Stretches within this fraction of the widest count as equally wide; more than `rungs` of them
    # are the spacings of a short cycle (a cycle of 50 vertices).
    alike: float = 0.95
    rungs: int = 3
    # A gap stands out if an equally wide stretch above it holds this many eigenvalues. The bulks of
    # sparse random graphs have up to six there.
    crowd: int = 8
    # With this many sampled eigenvalues above a gap, their spacings need not be computed.
    sure: int = 32
    # Fewer eigenvalues between two low stretches are noise, and the stretches are one.
    noise: float = 0.25
    # A stretch with another above it, wider than this fraction of its width, divides nothing: the
    # gaps of grids and paths have about the same width everywhere.
    ladder: float = 0.67
    # Grid of the maximum entropy problem. The peak of many eigenvalues 0 is as narrow as the
    # square of the resolution, so that the grid grows as 2 m^2 up to here.
    largest_grid: int = 2**16
    # Amplification of the eigenvectors below a gap over all others together.
    strength: float = 100.0
    # Probes for missed eigenvalues: one missed leaves 1 +- sqrt(2/16) in their mean square.
    num_checks: int = 16
    # A missed eigenvalue leaves about one, none leaves 1 / strength^2 = 1e-4: anything between will
    # do.
    missed: float = 0.25
    # Standard errors by which the two counts may differ.
    agreement: float = 4.0
    # Probes that find the gap, where they need not count.
    locating: int = 10
    # If at most this many eigenvalues are not 0, Lanczos finds them all, and maximum entropy has no
    # density.
    few: int = 32
    # Largest mean of the eigenvalues of clusters. On the span of the indicators of k clusters L has
    # the trace sum(phi_i), so that the k smallest eigenvalues sum to no more (Ky Fan). A
    # conductance phi_i above one half means that most edges leave the cluster.
    conductance: float = 0.5
    # Bytes of a filtered block: the maximum, and the size from which on it is float32.
    memory: int = 2**32
    large: int = 2**30
    # Columns multiplied at once, and rows summed in the precision of the operator: sums of 8192
    # products in float32 keep five digits, enough for a gap.
    columns: int = 128
    rows: int = 8192


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# The gaps of a spectral density: low stretches left of the bulk.
#
# With lambda = 1 - cos(theta), the Chebyshev polynomial T_j(lambda - 1) is (-1)^j cos(j theta):
# the first m moments resolve pi / m in the angle, at every angle. Stretches are therefore compared
# by angles, and the density is taken per angle.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    r"""An interval with hardly any eigenvalues.

    Attributes:
        low: Lower end.
        high: Upper end.
        threshold: Point where the density is smallest, :math:`\lambda_*`.
    """

    low: float
    high: float
    threshold: float

    @property
    def middle(self) -> float:
        """The point halfway between the ends, by angles."""
        return point((angle(self.low) + angle(self.high)) / 2)

    @property
    def width(self) -> float:
        """The difference of the ends, by angles."""
        return angle(self.high) - angle(self.low)


def angle(value: float) -> float:
    r"""Return :math:`\theta` with :math:`\lambda = 1 - \cos\theta`."""
    return math.acos(1 - min(max(value, 0.0), TOP))


def point(theta: float) -> float:
    r"""Return :math:`1 - \cos\theta`, 2 beyond :math:`\pi`."""
    return 1 - math.cos(min(theta, math.pi))


def _angles(values: Tensor) -> Tensor:
    return (1 - values.clamp(0, TOP)).acos()


def find_gap(stretches: list[Gap] | str, *, num_moments: int) -> Gap | str:
    """Return the widest of :func:`low_stretches`, or why none is a gap.

    Args:
        stretches: All low stretches, or why there are none.
        num_moments: Moments of the density; a stretch that these do not resolve is no gap.
    """
    if isinstance(stretches, str):
        return stretches
    widest = max(stretches, key=lambda gap: gap.width)
    if widest.width < math.pi / num_moments:
        return (
            f"the widest gap, {widest.low:.2g} to {widest.high:.2g}, is narrower than "
            f"{num_moments} moments resolve; raise num_moments"
        )
    alike = sum(gap.width > TUNING.alike * widest.width for gap in stretches)
    if alike > TUNING.rungs:
        return f"{alike} gaps have about the same width, as in a cycle, so that none can be chosen"
    return widest


def low_stretches(density: Density, *, num_moments: int, bulk: float) -> list[Gap] | str:
    r"""Return the stretches where the density is low beside both sides, or why there are none.

    The first minimum (Algorithm 5) may lie within the band of the clusters. Here a stretch is low
    if it is below 5 % of the mean density on its left, and of the mean between it and the middle
    of the bulk. Means, because the height of an atom depends on the resolution.

    Args:
        density: Density of the normalised Laplacian.
        num_moments: Moments it was made of.
        bulk: Fraction of the eigenvalues left of the middle of the bulk.
    """
    resolved = math.pi / num_moments
    grid = torch.arange(TUNING.points * num_moments, dtype=torch.float64) + 0.5
    angles = grid * resolved / TUNING.points
    values = 1 - angles.cos()
    below = density.cdf(values)
    inside = below < bulk
    if not bool(inside.any()):
        return "the density has no bulk: nearly all eigenvalues are zero"
    angles, values, below = angles[inside], values[inside], below[inside]
    # d lambda = sin(theta) d theta: the density per angle.
    heights = density.pdf(values) * angles.sin()
    end = angles[-1] + resolved / TUNING.points
    left, right = below / angles, (bulk - below) / (end - angles)
    runs = _runs(heights < TUNING.low * torch.minimum(left, right))
    if not len(runs):
        return (
            f"the density left of the bulk nowhere falls below {TUNING.low:.0%} of its mean on "
            "either side; more num_moments may resolve a gap"
        )
    return [
        Gap(
            low=float(values[first]),
            high=float(values[last]),
            threshold=float(values[first + int(heights[first : last + 1].argmin())]),
        )
        for first, last in runs.tolist()
    ]


def resolved_spacings(values: Tensor, *, num_moments: int) -> list[Gap] | str:
    """Return the stretches between neighbouring eigenvalues that are wide enough, or why none is.

    Args:
        values: All eigenvalues left of the middle of the bulk and the next one, ascending.
        num_moments: A stretch must be at least as wide as so many moments resolve.
    """
    wide = (_angles(values).diff() >= math.pi / num_moments).nonzero()[:, 0]
    if not len(wide):
        return "the eigenvalues left of the bulk are too close together"
    ends = [(float(values[i]), float(values[i + 1])) for i in wide.tolist()]
    gaps = [Gap(low=low, high=high, threshold=low) for low, high in ends]
    return [replace(gap, threshold=gap.middle) for gap in gaps]


def _runs(flags: Tensor) -> Tensor:
    """First and last index of each run of true flags that does not begin at 0, ``(r, 2)``."""
    steps = torch.nn.functional.pad(flags.int(), (1, 1)).diff()
    runs = torch.stack([(steps == 1).nonzero()[:, 0], (steps == -1).nonzero()[:, 0] - 1], dim=1)
    return runs[runs[:, 0] > 0]


def widest_between(values: Tensor, gap: Gap) -> Gap:
    """Return the widest gap between the eigenvalues of a stretch, by angles.

    Args:
        values: All eigenvalues below ``gap.high``, ascending, ``(k,)``.
        gap: The stretch.
    """
    before = float(values[values <= gap.low].max()) if bool((values <= gap.low).any()) else 0.0
    within = values[(values > gap.low) & (values < gap.high)]
    ends = torch.cat([values.new_tensor([before]), within, values.new_tensor([gap.high])])
    return _widest(ends, len(ends))


def widest_crowded(values: Tensor, gap: Gap) -> Gap:
    """Return the widest gap with enough eigenvalues above it to know their spacings.

    The gap from 0 to the smallest one is not among these, unless there are too few.

    Args:
        values: Eigenvalues except 0, ascending, ``(k,)``.
        gap: All eigenvalues below its upper end are known.
    """
    ends = values[values < gap.high]
    if len(ends) < TUNING.crowd + 2:
        high = float(ends[0]) if len(ends) else gap.high
        return Gap(low=0.0, high=high, threshold=high / 2)
    return _widest(ends, len(ends) - TUNING.crowd)


def _widest(ends: Tensor, count: int) -> Gap:
    """The widest gap between the first ``count`` of some values, by angles."""
    angles = _angles(ends)
    i = int(angles[:count].diff().argmax())
    middle = point(0.5 * float(angles[i] + angles[i + 1]))
    return Gap(low=float(ends[i]), high=float(ends[i + 1]), threshold=middle)


def stands_out(gap: Gap, above: Tensor) -> bool:
    """Return whether a gap is wide beside the spacings of the eigenvalues above it, ``(k,)``.

    Nine of them must lie in a stretch as wide as the gap, and no gap between them may be half as
    wide. The gaps of a grid and of a path have about the same width everywhere.
    """
    angles = _angles(above[: TUNING.crowd + 1])
    if len(angles) <= TUNING.crowd:
        return False
    near = float(angles[-1] - angles[0]) <= gap.width
    return near and float(angles.diff().max()) <= gap.width / 2


# ------------------------------------------------------------------------------------------
# Eigenvalues of a graph below a gap, counted in a block that a polynomial has filtered.
#
# A random block with more columns than there are eigenvalues below the gap is multiplied by a
# polynomial of the normalised Laplacian L that is small above the gap; its span then contains the
# eigenvectors below. By Courant and Fischer the i-th Ritz value is at least the i-th eigenvalue, so
# that the number of Ritz values below a threshold is a lower bound of the number of eigenvalues.
# Missed ones are sampled: fresh probes, projected off the Ritz vectors, must have nothing left
# below the gap.


@dataclass(frozen=True, slots=True)
class NullSpace:
    r"""The null space of L, spanned by unit vectors :math:`D^{1/2} 1_C`, one per component.

    Attributes:
        labels: Component of each vertex, ``(n,)``.
        entries: Entry of each vertex in the vector of its component, ``(n,)``.
        dimension: Number of components, including isolated vertices.
    """

    labels: Tensor
    entries: Tensor
    dimension: int

    @classmethod
    def of(cls, graph: Graph, dtype: torch.dtype) -> "NullSpace":
        count, labels = graph.components()
        labels, degrees = labels.long(), graph.degrees
        # An isolated vertex is its own unit vector.
        degrees = torch.where(degrees > 0, degrees, 1.0)
        volumes = torch.zeros(count, dtype=torch.float64).index_add_(0, labels, degrees)
        return cls(labels, (degrees / volumes[labels]).sqrt().to(dtype), count)

    def project_off(self, block: Tensor) -> Tensor:
        """Project a block ``(n, k)`` onto the orthogonal complement, in place."""
        # B - sum_C v_C (v_C' B); the vectors v_C have disjoint supports.
        entries = self.entries[:, None]
        products = block.new_zeros(self.dimension, block.shape[1])
        products.index_add_(0, self.labels, entries * block)
        return block.sub_(entries * products[self.labels])


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """Eigenvalues below a gap, as a filtered block has them.

    Attributes:
        count: Eigenvalues below the gap, including the null space: a lower bound.
        mean: Their mean.
        gap: The gap between Ritz values.
        missed: Sampled number of eigenvalues below the gap that the block lacks.
        full: Whether all columns were needed, so that more columns would find more eigenvalues.
        num_products: Matrix-vector products.
        above: Ritz values above the gap, up to the end of the stretch.
    """

    count: int
    mean: float
    gap: Gap
    missed: float
    full: bool
    num_products: int
    above: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


def count_below(
    op: LinearOperator,
    null: NullSpace,
    gap: Gap,
    *,
    width: int,
    generator: torch.Generator,
    bar: Progress,
    pick: Callable[[Tensor, Gap], Gap] = widest_between,
) -> Below:
    r"""Count the eigenvalues left of a gap.

    Args:
        op: The normalised Laplacian, ``(n, n)``.
        null: Its null space.
        gap: A stretch; eigenvectors below it are amplified, those above are filtered out.
        width: Columns of the block. Memory: as many vectors and 128 more.
        generator: Source of randomness.
        bar: Receives the number of filtered columns.
        pick: Chooses the gap between Ritz values, by default the widest of the stretch.
    """
    degree = filter_degree(gap, op.shape[0])
    block = torch.empty(op.shape[0], width, dtype=op.dtype, device=op.device)
    for start in range(0, width, op.block_size):
        stop = min(start + op.block_size, width)
        part = null.project_off(_gaussian(op, stop - start, generator))
        # Once more after filtering: rounding brings back the eigenvalue 0, the most amplified.
        block[:, start:stop] = null.project_off(polynomial(op, part, gap, degree))
        bar.update(stop)
    values, coefficients = _rayleigh_ritz(op, block)
    near = pick(values, gap)
    below = values < near.threshold
    coefficients = coefficients[:, below].to(block)
    fresh = null.project_off(_gaussian(op, TUNING.num_checks, generator))
    # z - Q Q' z with Q = block @ coefficients, twice, as in Gram-Schmidt.
    for _ in range(2):
        fresh -= block @ (coefficients @ (coefficients.T @ (block.T @ fresh)))
    check_degree = filter_degree(near, op.shape[0])
    # The filter is at least 1 below the gap, so that E ||p(L) z||^2 is at least the number missed.
    left = polynomial(op, fresh, near, check_degree).double().square().sum(0)
    count = null.dimension + int(below.sum())
    return Below(
        count=count,
        mean=float(values[below].sum()) / count,
        gap=near,
        missed=float(left.mean()),
        full=int((values < gap.high).sum()) >= width < op.shape[0] - null.dimension,
        num_products=width * (degree + 1) + TUNING.num_checks * check_degree,
        above=values[~below & (values < gap.high)],
    )


def all_below(
    values: Tensor, num_zeros: int, gap: Gap, pick: Callable[[Tensor, Gap], Gap]
) -> Below:
    """Return what :func:`count_below` does, from all eigenvalues ``(n,)``, ascending."""
    near = pick(values[num_zeros:], gap)
    below = values < near.threshold
    return Below(
        count=int(below.sum()),
        mean=float(values[below].mean()),
        gap=near,
        missed=0.0,
        full=False,
        num_products=0,
        above=values[~below & (values < gap.high)],
    )


def filter_degree(gap: Gap, n: int) -> int:
    """Return the degree at which a filtered random vector is nearly free of what is above."""
    # cosh(k growth) = strength sqrt(n): what is above has norm sqrt(n) at most.
    return math.ceil(math.acosh(TUNING.strength * math.sqrt(n)) / _growth(gap))


def polynomial(op: LinearOperator, block: Tensor, gap: Gap, degree: int) -> Tensor:
    r"""Return :math:`T_k(\tilde L) x / |T_k(\tilde\lambda)|`, a Chebyshev polynomial.

    :math:`\tilde L` maps the spectrum above the gap to ``[-1, 1]``, where the polynomial is at
    most one over the denominator; at the lower end :math:`\lambda` of the gap it is one, and more
    below.
    """

    def mapped(x: Tensor) -> Tensor:
        # (2 L - (2 + high)) / (2 - high), in place in the product.
        scale = 2 / (TOP - gap.high)
        return op.matmat(x).mul_(scale).sub_(x, alpha=scale * (TOP + gap.high) / 2)

    before, current = block, mapped(block)
    for _ in range(degree - 1):
        # T_{k+1}(x) = 2 x T_k(x) - T_{k-1}(x)
        before, current = current, mapped(current).mul_(2).sub_(before)
    return current / math.cosh(degree * _growth(gap))


def _growth(gap: Gap) -> float:
    """Growth rate per degree at the lower end of a gap: |T_k(x)| = cosh(k arccosh |x|)."""
    return math.acosh(1 + 2 * (gap.high - gap.low) / (TOP - gap.high))


def _gaussian(op: LinearOperator, count: int, generator: torch.Generator) -> Tensor:
    shape = (op.shape[0], count)
    return probes(shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device)


def _rayleigh_ritz(op: LinearOperator, block: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, ascending, ``(r,)``, and coefficients ``(k, r)`` of orthonormal Ritz vectors."""
    k = block.shape[1]
    gram, projected = torch.zeros(2, k, k, dtype=torch.float64)
    for first in range(0, k, TUNING.columns):
        part = slice(first, min(k, first + TUNING.columns))
        product = op.matmat(block[:, part])
        # B' B and B' L B are symmetric: only on and below the diagonal.
        gram[first:, part] = _inner(block[:, first:], block[:, part])
        projected[first:, part] = _inner(block[:, first:], product)
    # Columns of length one, since filtered columns differ in length by orders of magnitude.
    scale = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    sizes, directions = torch.linalg.eigh(gram * scale[:, None] * scale)  # reads the lower half
    # Directions below the rounding error of the block are noise.
    real = sizes > 10 * math.sqrt(k) * torch.finfo(block.dtype).eps * float(sizes[-1])
    basis = scale[:, None] * directions[:, real] * sizes[real].rsqrt()
    lower = projected.tril()
    values, rotation = torch.linalg.eigh(basis.T @ (lower + lower.tril(-1).T) @ basis)
    return values, basis @ rotation


def _inner(left: Tensor, right: Tensor) -> Tensor:
    # Long sums in single precision lose digits that the eigenvalues need.
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for a, b in zip(left.split(TUNING.rows), right.split(TUNING.rows), strict=True):
        total += (a.T @ b).double().cpu()
    return total
