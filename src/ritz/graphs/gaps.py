r"""The gaps of a spectral density: low stretches left of the bulk.

Eigenvalues of the normalised Laplacian are written :math:`\lambda = 1 - \cos\theta`: the first
``m`` moments resolve :math:`\pi / m` in the angle, wherever that is, so that stretches are compared
and the density is taken by angles.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz.spectra import Density

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

    The first minimum (THESIS Algorithm 5) may lie within the band of the clusters: what is low is
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
