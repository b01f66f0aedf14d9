"""Matrices of single groups of samples in a small subspace, and batches drawn from them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.progress import Progress, tracking
from ritz._core.sampling import check_samples
from ritz.curvature import Risk
from ritz.curvature._shared import CurvatureMatrix, batch_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    r"""Matrices :math:`H_j` of random groups of samples, seen from a subspace :math:`U`.

    Everything is without the L2 term, in float64 on the CPU.

    Attributes:
        small: :math:`M_j = U^\top H_j U`, ``(m, k, k)``.
        leak: :math:`\frac{1}{m} \sum_j U^\top H_j (I - U U^\top) H_j U`, ``(k, k)``: what leaves
            the subspace, for a batch of one group.
        quadratic: :math:`z^\top H_j z` of random unit vectors, ``(m, p)``.
        squares: :math:`\|H_j z\|^2` of the same vectors, ``(m, p)``.
        group_size: Samples ``g`` per group.
        num_samples: Number ``N`` of all samples.
    """

    small: Tensor
    leak: Tensor
    quadratic: Tensor
    squares: Tensor
    group_size: int
    num_samples: int

    @property
    def num_groups(self) -> int:
        """Number ``m`` of groups."""
        return len(self.small)

    @property
    def unseen(self) -> float:
        """Fraction of the differences between samples that the groups do not show."""
        return (self.num_samples - self.num_groups) / max(1, self.num_samples - 1)

    def leading(self, count: int) -> "Projections":
        """Return the projections on the first ``count`` vectors of the basis."""
        # What stays inside of U but leaves its first vectors leaks as well.
        inside = self.small[:, :count, count:]
        leak = self.leak[:count, :count] + (inside @ inside.mT).mean(0)
        return Projections(
            small=self.small[:, :count, :count],
            leak=leak,
            quadratic=self.quadratic,
            squares=self.squares,
            group_size=self.group_size,
            num_samples=self.num_samples,
        )


def project(
    groups: Risk,
    basis: Tensor,
    probes: Tensor,
    *,
    matrix: CurvatureMatrix,
    num_samples: int,
    progress: bool | Progress,
) -> Projections:
    """Return the projections of every batch of ``groups``, in one pass over them.

    Cost: one product per vector. Memory: three blocks ``(P, k + p)``.

    Args:
        groups: Risk with one batch per group, all of one size.
        basis: Orthonormal columns :math:`U`, ``(P, k)``.
        probes: Random unit vectors ``(P, p)``.
        matrix: ``hessian`` or ``ggn``.
        num_samples: Number of all samples.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    k = basis.shape[1]
    columns = torch.cat([basis, probes], 1)
    parts: dict[str, list[Tensor]] = {"small": [], "quadratic": [], "squares": []}
    leak = torch.zeros(k, k, dtype=torch.float64)
    with tracking(progress, "curvature of groups", groups.num_batches) as bar:
        for done, (_, product) in enumerate(batch_products(groups, columns, matrix=matrix), 1):
            inside, outside = product[:, :k], product[:, k:]
            small = basis.T @ inside
            # Y'Y - M'M with Y = H U would cancel: the part outside of U is formed first.
            rest = inside - basis @ small
            leak += (rest.T @ rest).double().cpu()
            parts["small"].append(((small + small.T) / 2).double().cpu())
            parts["quadratic"].append((probes * outside).double().sum(0).cpu())
            parts["squares"].append(outside.double().square().sum(0).cpu())
            bar.update(done)
    small, quadratic, squares = (torch.stack(values) for values in parts.values())
    check_samples(small, 0)
    return Projections(
        small=small,
        leak=leak / groups.num_batches,
        quadratic=quadratic,
        squares=squares,
        group_size=groups.batch_sizes[0],
        num_samples=num_samples,
    )


def without_replacement(size: int, num_samples: int) -> float:
    r"""Return the variance of the mean of a batch over that of a sample, for distinct samples.

    .. math:: \frac{1}{b} = \Big(\frac{1}{B} - \frac{1}{N}\Big) \frac{N}{N - 1}
    """
    if num_samples < 2:
        return 0.0
    return (1 / size - 1 / num_samples) * num_samples / (num_samples - 1)


def drawn_means(
    small: Tensor, count: int, num_draws: int, generator: torch.Generator
) -> Tensor:
    """Return means ``(d, k, k)`` of ``count`` matrices each, chosen without replacement."""
    total = len(small)
    keys = torch.rand(num_draws, total, generator=generator, dtype=torch.float64)
    chosen = torch.zeros(num_draws, total, dtype=torch.float64)
    chosen.scatter_(1, keys.argsort(1)[:, :count], 1 / count)
    return torch.einsum("dm,mij->dij", chosen, small)


def outlier(means: Tensor, leak: Tensor, bulk: float) -> tuple[Tensor, Tensor]:
    r"""Return the largest eigenvalues ``(d,)`` with the leak, and the overlaps ``(d,)``.

    .. math:: \lambda' = \lambda_\text{max}\Big(T + \frac{R}{\lambda' - s}\Big), \quad
        |\langle \varphi', \varphi_1 \rangle|^2 = \frac{v_1^2}{1 + v^\top R v / (\lambda' - s)^2}

    Eliminating the part outside of the subspace from the eigenvalue equation, where the matrix is
    the bulk :math:`s I`, gives this equation. Its right side falls with :math:`\lambda'`, so it has
    one solution above the largest eigenvalue of :math:`T`.

    Args:
        means: :math:`T`, ``(d, k, k)``.
        leak: :math:`R` of a batch of this size, ``(k, k)`` or ``(d, k, k)``.
        bulk: The bulk :math:`s`.
    """
    scale = float(means.abs().max()) or 1.0
    value = torch.linalg.eigvalsh(means)[:, -1].clamp_min(bulk + 1e-12 * scale)
    vector = torch.zeros_like(means[:, 0])
    for _ in range(50):
        gap = value - bulk
        values, vectors = torch.linalg.eigh(means + leak / gap[:, None, None])
        vector = vectors[..., -1]
        leaving = ((leak @ vector[..., None])[..., 0] * vector).sum(-1) / gap.square()
        # Newton for f(x) = lambda_max(T + R / (x - s)) - x with f' = -v'Rv/(x - s)^2 - 1. f is
        # convex and falls, so the steps approach the solution from below.
        step = (values[:, -1] - value) / (1 + leaving)
        value = (value + step).clamp_min(bulk + 1e-12 * scale)
        if is_below(step.abs().max(), 1e-10 * scale):
            break
    leaving = ((leak @ vector[..., None])[..., 0] * vector).sum(-1) / (value - bulk).square()
    return value, vector[:, 0].square() / (1 + leaving)


def rounded_groups(size: int, projections: Projections) -> int:
    """Return the number of groups in a batch of ``size`` samples, at least one."""
    count = round(size / projections.group_size)
    return min(max(1, count), projections.num_groups)


def relative_error(samples: Tensor) -> float:
    """Return the standard error of a positive mean, relative to it."""
    mean = float(samples.mean())
    if not mean > 0 or len(samples) < 2:
        return math.nan if len(samples) < 2 else 0.0
    return float(samples.std()) / math.sqrt(len(samples)) / mean
