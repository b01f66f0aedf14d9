"""Gaps of a spectral density, and the eigenvalues below one counted by a polynomial filter."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ritz._core.progress import Progress
from ritz._core.random import probes
from ritz.graphs._graph import Graph
from ritz.operators import LinearOperator
from ritz.spectra import Density

# ------------------------------------------------------------------------------------------
# The gaps of a spectral density: low stretches left of the bulk.
#
# Eigenvalues of the normalised Laplacian are written :math:`\lambda = 1 - \cos\theta`: the
# first ``m`` moments resolve :math:`\pi / m` in the angle, wherever that is, so that
# stretches are compared and the density is taken by angles.

LOW = 0.05  # of the mean density on either side: less is a low stretch
POINTS = 32  # of the grid to what is resolved
ALIKE = 0.95  # of the width of the widest: a stretch that is as wide
RUNGS = 3  # stretches of the same width: more are the spacings of a short cycle
CROWD = 8  # eigenvalues in an equal stretch above a gap that stands out: random bulks have six


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    r"""A stretch that holds hardly an eigenvalue.

    Attributes:
        low: Where it begins.
        high: Where it ends.
        threshold: Where the density is least, :math:`\lambda_*`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGap:
    """That there is none, and why."""

    reason: str


def angle(value: float) -> float:
    r"""Return :math:`\theta` with :math:`\lambda = 1 - \cos\theta`."""
    return math.acos(1 - min(max(value, 0.0), 2.0))


def point(theta: float) -> float:
    r"""Return :math:`1 - \cos\theta`, 2 for what is beyond :math:`\pi`."""
    return 1 - math.cos(min(theta, math.pi))


def find_gap(density: Density, *, num_moments: int, bulk: float) -> Gap | NoGap:
    """Return the widest of :func:`low_stretches`, or why it is none.

    Args:
        density: Of the normalised Laplacian.
        num_moments: What it was made of: a stretch that these do not resolve is none.
        bulk: Share of the eigenvalues left of the middle of the bulk.
    """
    found = low_stretches(density, num_moments=num_moments, bulk=bulk)
    if isinstance(found, NoGap):
        return found
    widest = max(found, key=lambda gap: gap.width)
    if widest.width < math.pi / num_moments:
        return NoGap(
            reason=f"the widest low stretch, {widest.low:.2g} to {widest.high:.2g}, is narrower "
            f"than {num_moments} moments resolve"
        )
    alike = sum(gap.width > ALIKE * widest.width for gap in found)
    if alike > RUNGS:
        return NoGap(
            reason=f"{alike} low stretches are as wide as each other, as between the eigenvalues "
            "of a cycle: none stands out"
        )
    return widest


def low_stretches(density: Density, *, num_moments: int, bulk: float) -> list[Gap] | NoGap:
    r"""Return the stretches where the density is low beside both its sides, ascending.

    The first minimum (Algorithm 5) may lie within the band of the clusters: what is low is
    below ``LOW`` times the mean on the left and the mean between it and the middle of the bulk.
    Means, as the height of an atom says nothing.

    Args:
        density: Of the normalised Laplacian.
        num_moments: What it was made of.
        bulk: Share of the eigenvalues left of the middle of the bulk.
    """
    resolved = math.pi / num_moments
    angles = (torch.arange(POINTS * num_moments, dtype=torch.float64) + 0.5) * resolved / POINTS
    values = 1 - angles.cos()
    below = density.cdf(values)
    inside = below < bulk
    if not bool(inside.any()):
        return NoGap(reason="the density has no bulk: nearly all eigenvalues are zero")
    angles, values, below = angles[inside], values[inside], below[inside]
    heights = density.pdf(values) * angles.sin()
    left, right = below / angles, (bulk - below) / (angles[-1] + resolved / POINTS - angles)
    runs = _runs(heights < LOW * torch.minimum(left, right))
    if not len(runs):
        return NoGap(
            reason=f"the density has no minimum left of the bulk that is below {LOW:.0%} of the "
            "mean on either side"
        )
    return [
        Gap(
            low=float(values[first]),
            high=float(values[last]),
            threshold=float(values[first + int(heights[first : last + 1].argmin())]),
        )
        for first, last in runs.tolist()
    ]


def widest_between(values: Tensor, gap: Gap) -> Gap:
    """Return the widest gap between eigenvalues of a stretch, by angles.

    Args:
        values: Eigenvalues, ascending, all those below ``gap.high``, ``(k,)``.
        gap: The stretch.
    """
    before = float(values[values <= gap.low].max()) if bool((values <= gap.low).any()) else 0.0
    within = values[(values > gap.low) & (values < gap.high)]
    ends = torch.cat([values.new_tensor([before]), within, values.new_tensor([gap.high])])
    angles = (1 - ends.clamp(0, 2)).acos()
    i = int(angles.diff().argmax())
    middle = point(0.5 * float(angles[i] + angles[i + 1]))
    return Gap(low=float(ends[i]), high=float(ends[i + 1]), threshold=middle)


def widest_crowded(values: Tensor, gap: Gap) -> Gap:
    """Return the widest gap between eigenvalues that has ``CROWD`` of them and one more above.

    The gap from 0 to the least of them is none of these, unless there are too few.

    Args:
        values: Eigenvalues but 0, ascending, ``(k,)``.
        gap: Those up to its upper end are all there.
    """
    ends = values[values < gap.high]
    if len(ends) < CROWD + 2:
        high = float(ends[0]) if len(ends) else gap.high
        return Gap(low=0.0, high=high, threshold=high / 2)
    angles = (1 - ends.clamp(0, 2)).acos()
    i = int(angles[: len(ends) - CROWD].diff().argmax())
    middle = point(0.5 * float(angles[i] + angles[i + 1]))
    return Gap(low=float(ends[i]), high=float(ends[i + 1]), threshold=middle)


def stands_out(gap: Gap, above: Tensor) -> bool:
    """Return whether a gap is wide beside the spacings of the eigenvalues above it, ``(k,)``.

    ``CROWD`` of them and one more must lie in a stretch as wide as the gap, with no gap between
    them that is half as wide: a grid and a path have gaps of much the same width everywhere.
    """
    angles = (1 - above[: CROWD + 1].clamp(0, 2)).acos()
    if len(angles) <= CROWD:
        return False
    near = float(angles[-1] - angles[0]) <= gap.width
    return near and float(angles.diff().max()) <= gap.width / 2


def _runs(flags: Tensor) -> Tensor:
    """First and last index of each run of true flags that has a side on its left, ``(r, 2)``."""
    padded = torch.nn.functional.pad(flags.int(), (1, 1))
    steps = padded.diff()
    runs = torch.stack([(steps == 1).nonzero()[:, 0], (steps == -1).nonzero()[:, 0] - 1], dim=1)
    return runs[runs[:, 0] > 0]


# ------------------------------------------------------------------------------------------
# Eigenvalues of a graph below a gap, counted in a block that a polynomial has filtered.
#
# A random block of more vectors than there are eigenvalues to find is multiplied by a
# polynomial of the normalised Laplacian :math:`L` that is small above the gap; by Rayleigh
# and Ritz it holds all eigenvectors below. Each Ritz value below a threshold stands for an
# eigenvalue below it: what is found is a lower bound, whatever was done. What was missed is
# sampled: fresh probes, projected off what was found, must have nothing left below the gap.

TOP = 2.0  # largest possible eigenvalue
STRENGTH = 100.0  # of what is below a gap to all that is above, in a filtered vector
NUM_CHECKS = 16  # probes for what was missed
COLUMNS = 128  # multiplied at once for the projected matrices
ROWS = 8192  # summed in the operator's precision


@dataclass(frozen=True, slots=True)
class NullSpace:
    r"""The eigenvalue 0: :math:`D^{1/2} 1_C` for each component :math:`C`, unit vectors.

    Attributes:
        labels: Component of each vertex, ``(n,)``.
        entries: Of the vector of its component, for each vertex, ``(n,)``.
        dimension: Number of components, isolated vertices among them.
    """

    labels: Tensor
    entries: Tensor
    dimension: int

    @classmethod
    def of(cls, graph: Graph, dtype: torch.dtype) -> "NullSpace":
        count, labels = graph.components()
        labels, degrees = labels.long(), graph.degrees
        degrees = torch.where(degrees > 0, degrees, 1.0)
        volumes = torch.zeros(count, dtype=torch.float64).index_add_(0, labels, degrees)
        return cls(labels, (degrees / volumes[labels]).sqrt().to(dtype), count)

    def project_off(self, block: Tensor) -> Tensor:
        """Take the space out of a block ``(n, k)``, in place."""
        entries = self.entries[:, None]
        shares = block.new_zeros(self.dimension, block.shape[1])
        shares.index_add_(0, self.labels, entries * block)
        return block.sub_(entries * shares[self.labels])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a filtered block holds.

    Attributes:
        count: Eigenvalues below the gap, those of the null space among them: a lower bound.
        gap: Between Ritz values.
        missed: Eigenvalues below the gap that it has not, as sampled; about zero if there are none.
        full: Whether all vectors were needed, so that more would find more.
        num_products: Products spent.
        above: Ritz values above the gap, up to the end of the stretch that was asked for.
    """

    count: int
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
) -> Found:
    r"""Return the number of eigenvalues left of a gap, and what was missed.

    Args:
        op: The normalised Laplacian, ``(n, n)``.
        null: Its null space.
        gap: A stretch: what is below it is found, what is above is filtered out.
        width: Vectors of the block. Memory: as many vectors, and ``COLUMNS`` more.
        generator: Source of the block.
        bar: Told of columns.
        pick: Which gap between the eigenvalues that were found counts; the widest of the stretch
            by default.
    """
    degree = filter_degree(gap, op.shape[0])
    block = _filtered(op, null, gap, degree, width, generator, bar)
    values, coefficients = _rayleigh_ritz(op, block)
    near = pick(values, gap)
    below = values < near.threshold
    coefficients = coefficients[:, below].to(block)
    again = filter_degree(near, op.shape[0])
    fresh = null.project_off(_gaussian(op, NUM_CHECKS, generator))
    for _ in range(2):
        fresh -= block @ (coefficients @ (coefficients.T @ (block.T @ fresh)))
    left = polynomial(op, fresh, near, again).double().square().sum(0)
    return Found(
        count=null.dimension + int(below.sum()),
        gap=near,
        missed=float(left.mean()),
        full=int((values < gap.high).sum()) >= width < op.shape[0] - null.dimension,
        num_products=width * (degree + 1) + NUM_CHECKS * again,
        above=values[~below & (values < gap.high)],
    )


def filter_degree(gap: Gap, n: int) -> int:
    """Return the degree at which a filtered random vector is all but free of what is above."""
    return math.ceil(math.acosh(STRENGTH * math.sqrt(n)) / _growth(gap))


def polynomial(op: LinearOperator, block: Tensor, gap: Gap, degree: int) -> Tensor:
    r"""Return :math:`T_k(\tilde L) x / |T_k(\tilde\lambda)|`, a Chebyshev polynomial.

    It is bounded above the gap, where :math:`\tilde L` has its spectrum in ``[-1, 1]``, and at
    least one in size below; :math:`\lambda` is the lower end of the gap.
    """
    high = gap.high
    before, current = block, _mapped(op, block, high)
    for _ in range(degree - 1):
        before, current = current, _mapped(op, current, high).mul_(2).sub_(before)
    return current / math.cosh(degree * _growth(gap))


def _growth(gap: Gap) -> float:
    """Rate a degree at which what lies at the lower end of a gap outgrows what lies above."""
    return math.acosh(1 + 2 * (gap.high - gap.low) / (TOP - gap.high))


def _mapped(op: LinearOperator, block: Tensor, low: float) -> Tensor:
    scale = 2 / (TOP - low)
    return op.matmat(block).mul_(scale).sub_(block, alpha=scale * (TOP + low) / 2)


def _gaussian(op: LinearOperator, count: int, generator: torch.Generator) -> Tensor:
    shape = (op.shape[0], count)
    return probes(shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device)


def _filtered(
    op: LinearOperator,
    null: NullSpace,
    gap: Gap,
    degree: int,
    width: int,
    generator: torch.Generator,
    bar: Progress,
) -> Tensor:
    block = torch.empty(op.shape[0], width, dtype=op.dtype, device=op.device)
    for columns in torch.arange(width).split(op.block_size):
        part = null.project_off(_gaussian(op, len(columns), generator))
        part = null.project_off(polynomial(op, part, gap, degree))
        block[:, columns[0] : columns[-1] + 1] = part
        bar.update(int(columns[-1]) + 1)
    return block


def _rayleigh_ritz(op: LinearOperator, block: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, ascending, ``(r,)``, and coefficients ``(k, r)`` of orthonormal Ritz vectors."""
    k = block.shape[1]
    gram = torch.zeros(k, k, dtype=torch.float64)
    projected = torch.zeros(k, k, dtype=torch.float64)
    for first in range(0, k, COLUMNS):
        part = slice(first, min(k, first + COLUMNS))
        product = op.matmat(block[:, part])
        # Only the half that stands on and below the diagonal.
        gram[first:, part] = _inner(block[:, first:], block[:, part])
        projected[first:, part] = _inner(block[:, first:], product)
    scale = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    gram = _symmetric(gram) * scale[:, None] * scale
    sizes, directions = torch.linalg.eigh(gram)
    # What is below the roundoff of the block has no direction of its own.
    kept = sizes > 10 * math.sqrt(k) * torch.finfo(block.dtype).eps * float(sizes[-1])
    basis = scale[:, None] * directions[:, kept] * sizes[kept].rsqrt()
    values, rotation = torch.linalg.eigh(basis.T @ _symmetric(projected) @ basis)
    return values, basis @ rotation


def _inner(left: Tensor, right: Tensor) -> Tensor:
    # Long sums of single precision lose digits that the eigenvalues need.
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
    for a, b in zip(left.split(ROWS), right.split(ROWS), strict=True):
        total += (a.T @ b).double().cpu()
    return total


def _symmetric(lower: Tensor) -> Tensor:
    half = lower.tril()
    return half + half.tril(-1).T
