"""The spectral gap of ``count_clusters``: intervals of low density, and the widest of them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz.spectra import Density

TOP = 2.0  # largest possible eigenvalue of a normalised Laplacian


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Thresholds of ``count_clusters``.

    They were set on the graphs of ``tests/graphs/test_clusters.py`` and ``test_cluster_gaps.py``:
    planted clusters with few and with moderate links, and random graphs, grids, paths and cycles,
    which have no clusters.
    """

    # The density is low in a stretch if it is below this fraction of its mean on either side. Half
    # of this threshold gives the same counts for eleven of these graphs.
    low_density: float = 0.05
    # Number of grid points per resolved angle.
    points_per_angle: int = 32
    # Stretches wider than `equal_width` times the widest count as equally wide. More of them than
    # `most_equal` are the spacings of a short cycle (such as one of 50 vertices).
    equal_width: float = 0.95
    most_equal: int = 3
    # A gap stands out if an equally wide stretch above it has this many eigenvalues. In the bulks
    # of sparse random graphs there are up to six.
    fewest_above: int = 8
    # With this many sampled eigenvalues above a gap, their spacings need not be computed.
    many_above: int = 32
    # Fewer eigenvalues than this between two low stretches are noise, and the stretches are joined.
    fewest_between: float = 0.25
    # A stretch is not a gap if another stretch above it is wider than this fraction of its width.
    # Grids and paths have gaps of about the same width everywhere.
    widest_above: float = 0.67
    # Largest grid of the maximum entropy problem. The peak of many eigenvalues 0 is as narrow as
    # the square of the resolution, so the grid grows as 2 m^2.
    largest_grid: int = 2**16
    # The filter amplifies each eigenvector below a gap by this factor over all others together.
    amplification: float = 100.0
    # Number of probes for missed eigenvalues. One missed eigenvalue gives a mean square of
    # 1 +- sqrt(2/16).
    check_probes: int = 16
    # Up to this mean square, no eigenvalue counts as missed. It is 1 / amplification^2 = 1e-4 if
    # none was missed, and about 1 per missed eigenvalue.
    most_missed: float = 0.25
    # Number of standard errors by which the two counts may differ.
    agreement: float = 4.0
    # Number of probes with which the method `krylov` locates the gap.
    locating_probes: int = 10
    # If at most this many eigenvalues are not 0, use Lanczos, which computes all of them. No smooth
    # density has their moments.
    few_nonzero: int = 32
    # Largest mean of the eigenvalues of clusters. On the span of the indicators of k clusters, the
    # trace of L is sum(phi_i), so the k smallest eigenvalues sum to at most this (Ky Fan). If the
    # conductance phi_i exceeds one half, most edges leave the cluster.
    conductance: float = 0.5
    # Maximum size of a filtered block in bytes, and the size above which it is float32.
    most_bytes: int = 2**32
    float32_bytes: int = 2**30
    # Number of columns of the block that are multiplied at once.
    columns: int = 128


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# The gaps of a spectral density: low stretches left of the bulk.
#
# With lambda = 1 - cos(theta), the Chebyshev polynomial T_j(lambda - 1) is (-1)^j cos(j theta), so
# the first m moments have the resolution pi / m in the angle theta everywhere. Widths of stretches
# are therefore measured in angles, and densities are per angle.


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
        """Midpoint, in the angle."""
        return point((angle(self.low) + angle(self.high)) / 2)

    @property
    def width(self) -> float:
        """Width, in the angle."""
        return angle(self.high) - angle(self.low)


def angle(value: float) -> float:
    r"""Return :math:`\theta` with :math:`\lambda = 1 - \cos\theta`."""
    return math.acos(1 - min(max(value, 0.0), TOP))


def point(theta: float) -> float:
    r"""Return :math:`1 - \cos\theta`, and 2 for angles above :math:`\pi`."""
    return 1 - math.cos(min(theta, math.pi))


def _angles(values: Tensor) -> Tensor:
    return (1 - values.clamp(0, TOP)).acos()


def find_gap(stretches: list[Gap] | str, *, num_moments: int) -> Gap | str:
    """Return the widest of :func:`low_stretches`, or why none is a gap.

    Args:
        stretches: All low stretches, or why there are none.
        num_moments: Number of moments of the density. A gap must be wider than their resolution.
    """
    if isinstance(stretches, str):
        return stretches
    widest = max(stretches, key=lambda gap: gap.width)
    if widest.width < math.pi / num_moments:
        return (
            f"the widest gap, {widest.low:.2g} to {widest.high:.2g}, is narrower than "
            f"{num_moments} moments resolve; raise num_moments"
        )
    alike = sum(gap.width > TUNING.equal_width * widest.width for gap in stretches)
    if alike > TUNING.most_equal:
        return f"{alike} gaps have about the same width, as in a cycle, so none can be chosen"
    return widest


def low_stretches(density: Density, *, num_moments: int, bulk: float) -> list[Gap] | str:
    r"""Return the stretches in which the density is low, or why there are none.

    The density is low at a point if it is below 5 % of its mean to the left of the point, and below
    5 % of its mean from there to the middle of the bulk. Means are used because the height of an
    atom depends on the resolution. The first minimum of the density (Algorithm 5) is not used,
    because it may lie within the band of the clusters.

    Args:
        density: Density of the normalised Laplacian.
        num_moments: Number of moments of the density.
        bulk: Fraction of the eigenvalues left of the middle of the bulk.
    """
    resolved = math.pi / num_moments
    grid = torch.arange(TUNING.points_per_angle * num_moments, dtype=torch.float64) + 0.5
    angles = grid * resolved / TUNING.points_per_angle
    values = 1 - angles.cos()
    below = density.cdf(values)
    inside = below < bulk
    if not bool(inside.any()):
        return "the density has no bulk: nearly all eigenvalues are zero"
    angles, values, below = angles[inside], values[inside], below[inside]
    # d lambda = sin(theta) d theta: the density per angle.
    heights = density.pdf(values) * angles.sin()
    end = angles[-1] + resolved / TUNING.points_per_angle
    left, right = below / angles, (bulk - below) / (end - angles)
    runs = _runs(heights < TUNING.low_density * torch.minimum(left, right))
    if not len(runs):
        return (
            f"the density left of the bulk nowhere falls below {TUNING.low_density:.0%} of its "
            "mean on either side; more num_moments may resolve a gap"
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
    """Return the stretches between neighbouring eigenvalues, or why there are none.

    Args:
        values: All eigenvalues left of the middle of the bulk and the next one, ascending.
        num_moments: A stretch must be at least as wide as the resolution of this many moments.
    """
    wide = (_angles(values).diff() >= math.pi / num_moments).nonzero()[:, 0]
    if not len(wide):
        return "the eigenvalues left of the bulk are too close together"
    ends = [(float(values[i]), float(values[i + 1])) for i in wide.tolist()]
    gaps = [Gap(low=low, high=high, threshold=low) for low, high in ends]
    return [replace(gap, threshold=gap.middle) for gap in gaps]


def _runs(flags: Tensor) -> Tensor:
    """Return the first and last index of each run of true flags that begins after 0, ``(r, 2)``."""
    steps = torch.nn.functional.pad(flags.int(), (1, 1)).diff()
    runs = torch.stack([(steps == 1).nonzero()[:, 0], (steps == -1).nonzero()[:, 0] - 1], dim=1)
    return runs[runs[:, 0] > 0]


def widest_between(values: Tensor, gap: Gap) -> Gap:
    """Return the widest gap between the eigenvalues of a stretch.

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

    If there are too few eigenvalues, return the gap from 0 to the smallest of them.

    Args:
        values: Eigenvalues except 0, ascending, ``(k,)``.
        gap: A gap below whose upper end all eigenvalues are known.
    """
    ends = values[values < gap.high]
    if len(ends) < TUNING.fewest_above + 2:
        high = float(ends[0]) if len(ends) else gap.high
        return Gap(low=0.0, high=high, threshold=high / 2)
    return _widest(ends, len(ends) - TUNING.fewest_above)


def _widest(ends: Tensor, count: int) -> Gap:
    """Return the widest gap between the first ``count`` of some ascending values."""
    angles = _angles(ends)
    i = int(angles[:count].diff().argmax())
    middle = point(0.5 * float(angles[i] + angles[i + 1]))
    return Gap(low=float(ends[i]), high=float(ends[i + 1]), threshold=middle)


def stands_out(gap: Gap, above: Tensor) -> bool:
    """Return whether a gap is wide compared with the spacings of eigenvalues ``above``, ``(k,)``.

    The nine next eigenvalues must lie in an interval as wide as the gap, and no spacing may exceed
    half of its width. In a grid or a path, all gaps have about the same width.
    """
    angles = _angles(above[: TUNING.fewest_above + 1])
    if len(angles) <= TUNING.fewest_above:
        return False
    near = float(angles[-1] - angles[0]) <= gap.width
    return near and float(angles.diff().max()) <= gap.width / 2
