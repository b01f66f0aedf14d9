r"""The gap of a spectral density: the widest low stretch left of the bulk.

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
        angles = [math.acos(1 - min(max(end, 0.0), 2.0)) for end in (self.low, self.high)]
        return 1 - math.cos(sum(angles) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGap:
    """That there is none, and why."""

    reason: str


def find_gap(density: Density, *, num_moments: int, bulk: float) -> Gap | NoGap:
    r"""Return the widest stretch where the density is low beside both its sides.

    The first minimum (THESIS Algorithm 5) may lie within the band of the clusters: what is low is
    below ``LOW`` times the mean on the left and the mean between it and the middle of the bulk.
    Means, as the height of an atom says nothing.

    Args:
        density: Of the normalised Laplacian.
        num_moments: What it was made of: a stretch that these do not resolve is none.
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
    widths = angles[runs[:, 1]] - angles[runs[:, 0]]
    first, last = runs[int(widths.argmax())].tolist()
    if float(widths.max()) < resolved:
        return NoGap(
            reason=f"the widest low stretch, {float(values[first]):.2g} to "
            f"{float(values[last]):.2g}, is narrower than {num_moments} moments resolve"
        )
    lowest = first + int(heights[first : last + 1].argmin())
    return Gap(low=float(values[first]), high=float(values[last]), threshold=float(values[lowest]))


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
    middle = 1 - math.cos(0.5 * float(angles[i] + angles[i + 1]))
    return Gap(low=float(ends[i]), high=float(ends[i + 1]), threshold=middle)


def _runs(flags: Tensor) -> Tensor:
    """First and last index of each run of true flags that has a side on its left, ``(r, 2)``."""
    padded = torch.nn.functional.pad(flags.int(), (1, 1))
    steps = padded.diff()
    runs = torch.stack([(steps == 1).nonzero()[:, 0], (steps == -1).nonzero()[:, 0] - 1], dim=1)
    return runs[runs[:, 0] > 0]
