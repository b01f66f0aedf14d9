"""The subspace bootstrap: samples in groups, projected on a subspace; batches drawn from them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ritz._core.blocks import column_dots, inner_products
from ritz._core.checks import is_below
from ritz._core.progress import Progress, tracking
from ritz._core.sampling import check_samples
from ritz.curvature import Risk
from ritz.curvature._shared import CurvatureMatrix, batch_products
from ritz.measures._groups import Groups, share_of_variance


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the outlier equation."""

    # Eigenvalues of a group below this fraction of its largest count as zero in the pseudo-inverse.
    # Between 1e-3 and 1e-1, the predictions of the study `batch_spectra` differ by less than 1 %.
    rank: float = 1e-2
    # Maximum number of Newton steps, and the relative step at which to stop. At most twelve steps
    # were observed.
    max_steps: int = 60
    rtol: float = 1e-9


TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    r"""Matrices :math:`H_j` of random groups of samples, projected on a subspace :math:`U`.

    All tensors are in float64 on the CPU and do not include the L2 term. Probes :math:`z` are
    random unit vectors orthogonal to the subspace.

    Attributes:
        small: :math:`M_j = U^\top H_j U`, ``(m, k, k)``.
        leak: :math:`S_j = U^\top H_j (I - U U^\top) H_j U`, ``(m, k, k)``: the part of
            :math:`U^\top H_j^2 U` that leaves the subspace.
        curvature: :math:`z^\top H z` for each probe, ``(p,)``, with the mean :math:`H` of all
            groups.
        gaps: :math:`\|(H_j - H) z\|^2` for each group and probe, ``(m, p)``.
        mean_leak: :math:`U^\top H (I - U U^\top) H U`, ``(k, k)``; zero for exact eigenvectors.
        sizes: :math:`\|H v\|^2` for each vector of the basis and each probe, ``(k + p,)``.
        groups: The groups.
        num_parameters: Number ``P`` of parameters.
        curved: Whether :func:`draw_batches` uses the curvature of groups along their leaks.
    """

    small: Tensor
    leak: Tensor
    curvature: Tensor
    gaps: Tensor
    mean_leak: Tensor
    sizes: Tensor
    groups: Groups
    num_parameters: int
    curved: bool = True

    @property
    def factor(self) -> float:
        """Variance of the matrix of a sample, divided by the variance of the matrix of a group."""
        return 1 / share_of_variance(self.groups.size, self.groups.total)

    @property
    def columns(self) -> int:
        """Number of products with the matrix of all data that the projections took."""
        return self.small.shape[1] + self.gaps.shape[1]

    def roundoff(self, unit: float) -> Tensor:
        r"""Return the roundoff of the means over groups of `along` and ``gaps``, ``(k + p,)``.

        Args:
            unit: Relative error of the products :math:`H_j v`.
        """
        spread = torch.cat([self.along(), self.gaps], 1).mean(0).clamp_min(0.0)
        # mean |H_j v|^2 = mean |(H_j - H) v|^2 + |H v|^2; see contrast_roundoff()
        off = unit * (spread + self.sizes).sqrt()
        return 2 * spread.sqrt() * off + off.square()

    def leading(self, count: int) -> "Projections":
        """Return the projections on the first ``count`` vectors of the basis."""
        # What leaves the first vectors but stays inside of U becomes part of the leak.
        inside = self.small[:, :count, count:]
        mean = inside.mean(0)
        return replace(
            self,
            small=self.small[:, :count, :count],
            leak=self.leak[:, :count, :count] + inside @ inside.mT,
            mean_leak=self.mean_leak[:count, :count] + mean @ mean.T,
            sizes=torch.cat([self.sizes[:count], self.sizes[len(self.mean_leak) :]]),
        )

    def along(self) -> Tensor:
        r"""Return :math:`\|(H_j - H) u_a\|^2` for each vector of the basis, ``(m, k)``."""
        off = self.small - self.small.mean(0)
        leaving = self.leak.diagonal(dim1=1, dim2=2) - self.mean_leak.diagonal()
        return off.square().sum(1) + leaving


def project(
    groups: Groups,
    basis: Tensor,
    probes: Tensor,
    *,
    matrix: CurvatureMatrix,
    progress: bool | Progress,
) -> Projections:
    """Return the projections of all groups, in one pass over them.

    Cost: one product per vector. Memory: four blocks ``(P, k + p)``.

    Args:
        groups: The groups.
        basis: Orthonormal columns :math:`U`, ``(P, k)``.
        probes: Random unit vectors orthogonal to the basis, ``(P, p)``.
        matrix: ``hessian`` or ``ggn``.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    k, m = basis.shape[1], groups.count
    columns = torch.cat([basis, probes], 1)
    small, leak, squares = [], [], []
    mean = torch.zeros_like(columns, dtype=torch.float64)
    with tracking(progress, "curvature of groups", m) as bar:
        products = batch_products(groups.risk, columns, matrix=matrix)
        for done, (_, product) in enumerate(products, start=1):
            mean.add_(product, alpha=1 / m)
            inside, rest = _split(basis, product[:, :k])
            small.append(inside)
            leak.append(rest)
            squares.append(column_dots(product[:, k:], product[:, k:]).cpu())
            check_samples(rest.diagonal()[:, None], 0)
            bar.update(done)
    curved = mean[:, k:]
    # mean |H_j z - H z|^2 = mean |H_j z|^2 - |H z|^2
    sizes = column_dots(mean, mean).cpu()
    gaps = torch.stack(squares) - sizes[k:]
    return Projections(
        small=torch.stack(small),
        leak=torch.stack(leak),
        curvature=column_dots(probes, curved).cpu(),
        gaps=gaps,
        mean_leak=_split(basis.double(), mean[:, :k])[1],
        sizes=sizes,
        groups=groups,
        num_parameters=len(basis),
    )


def _split(basis: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``U'Y`` and ``Y'(I - UU')Y`` of ``Y = H U``, ``(k, k)`` each, in float64."""
    small = inner_products(basis, product)
    if basis.shape[0] == basis.shape[1]:  # the complement is empty; avoid roundoff in its place
        return ((small + small.T) / 2).cpu(), torch.zeros_like(small, device="cpu")
    # Y'Y - M'M would cancel, so compute the part of Y outside of the subspace first.
    rest = product - basis @ small.to(basis)
    return ((small + small.T) / 2).cpu(), inner_products(rest, rest).cpu()


# ------------------------------------------------------------------------------------------
# Batches drawn from the groups.


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    r"""Largest eigenvalues of drawn batches.

    Attributes:
        values: Largest eigenvalues :math:`\lambda'` without the L2 term, ``(d,)``.
        overlaps: :math:`|\langle \varphi', \varphi_1 \rangle|^2`, ``(d,)``.
        first: First-order changes :math:`\varphi_1^\top (H_B - H) \varphi_1`, whose mean over all
            batches is zero, ``(d,)``.
    """

    values: Tensor
    overlaps: Tensor
    first: Tensor


def draw_batches(projections: Projections, size: int, weights: Tensor, bulk: float) -> Draws:
    r"""Return the largest eigenvalues of batches of ``size`` samples that consist of groups.

    Args:
        projections: Projections of the groups on eigenvectors, the leading one first.
        size: Number ``B`` of samples per batch.
        weights: Groups in each batch, from :func:`choose_groups`, ``(d, m)``.
        bulk: Mean ``s`` of the eigenvalues outside of the subspace.
    """
    p, m = projections, projections.groups.count
    count = round(1 / float(weights.max()))
    # If the batch is not a whole number of groups, use the nearest whole number and rescale the
    # deviations to the variance of the batch.
    ratio = share_of_variance(size, p.groups.total)
    nearest = share_of_variance(count * p.groups.size, m * p.groups.size)
    scale = ratio / nearest if nearest else 0.0
    mean = p.small.mean(0)
    off = (weights @ (p.small - mean).flatten(1)).view(-1, *mean.shape) * scale**0.5
    # A batch has m of M distinct groups. Compared with drawing with replacement, the mean square of
    # a sum of m deviations is smaller by the factor (M - m)/(M - 1).
    left = (m - count) / max(1, m - 1) * scale
    eye = bulk * torch.eye(len(mean), dtype=torch.float64)
    poles = self_curvatures(p.small - eye, p.leak) / count if p.curved else torch.zeros(m)
    values, overlaps = outliers(mean + off - eye, weights.square() * left, p.leak, poles)
    return Draws(values=values + bulk, overlaps=overlaps, first=off[:, 0, 0])


def choose_groups(
    projections: Projections, size: int, num_draws: int, generator: torch.Generator
) -> Tensor:
    """Return weights ``(d, m)``: ``1/c`` for the ``c`` distinct groups of a batch, otherwise 0."""
    total = projections.groups.count
    count = min(max(1, round(size / projections.groups.size)), total)
    # The groups with the smallest random keys are a uniform choice of distinct groups.
    keys = torch.rand(num_draws, total, generator=generator, device=generator.device)
    chosen = keys.argsort(1)[:, :count].cpu()
    weights = torch.zeros(num_draws, total, dtype=torch.float64)
    return weights.scatter_(1, chosen, 1 / count)


def self_curvatures(small: Tensor, leak: Tensor) -> Tensor:
    r"""Return the mean curvature :math:`\kappa_j` of each group along its leak, ``(m,)``.

    .. math:: \kappa_j = \frac{\operatorname{tr} S_j M_j^+ S_j}{\operatorname{tr} S_j}

    The matrix of a group of few samples has low rank, so its products with ``k`` vectors determine
    the matrix. With :math:`Y = (I - U U^\top) H_j U`, the part outside of the subspace is
    :math:`Y M_j^+ Y^\top` (Nyström), and :math:`\kappa_j` is its mean Rayleigh quotient along
    :math:`Y`. Negative eigenvalues of :math:`M_j` count as zero.
    """
    values, vectors = torch.linalg.eigh(small)
    kept = values > TUNING.rank * values[:, -1:].clamp_min(0)
    inverse = torch.where(kept & (values > 0), 1 / values, torch.zeros_like(values))
    # tr S M^+ S = sum_a |S q_a|^2 / mu_a
    squares = (leak @ vectors).square().sum(1)
    traces = leak.diagonal(dim1=1, dim2=2).sum(1)
    tiny = torch.finfo(torch.float64).tiny
    kappa: Tensor = (squares * inverse).sum(1) / traces.clamp_min(tiny)
    return kappa


def outliers(means: Tensor, weights: Tensor, leak: Tensor, poles: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the largest eigenvalues ``(d,)`` of batches, and the overlaps ``(d,)``.

    .. math:: \lambda' = \lambda_\text{max}\Big(T + \sum_j w_j \frac{S_j}{\lambda' - p_j}\Big),
        \quad |\langle \varphi', \varphi_1 \rangle|^2 = \frac{v_1^2}
        {1 + \sum_j w_j v^\top S_j v / (\lambda' - p_j)^2}

    This is the eigenvalue equation of a batch after elimination of the complement of the subspace.
    The approximation is that the leaks of different groups are orthogonal eigenvectors, with
    eigenvalues :math:`p_j`. The right side decreases in :math:`\lambda'`, from infinity at the
    largest pole of the batch.

    Args:
        means: :math:`T`, ``(d, k, k)``.
        weights: :math:`w_j`, ``(d, m)``; zero for groups outside of the batch.
        leak: :math:`S_j`, ``(m, k, k)``.
        poles: :math:`p_j`, ``(m,)``.
    """
    flat, shape = leak.flatten(1), means.shape
    # Groups outside of the batch and groups without a leak have no pole. Put it at minus infinity,
    # where their terms vanish.
    leaks = leak.diagonal(dim1=1, dim2=2).sum(1) > 0
    inside = torch.where((weights > 0) & leaks, poles, -math.inf)
    top, largest = torch.linalg.eigvalsh(means)[:, -1], inside.amax(1)
    scale = float(torch.maximum(top.abs(), largest).max()) or 1.0
    # The solution is at least the largest eigenvalue of T, and above the largest pole.
    floor = torch.maximum(top, largest + 1e-9 * scale)
    value = floor
    for _ in range(TUNING.max_steps):
        near = weights / (value[:, None] - inside)
        eigenvalues, vectors = torch.linalg.eigh(means + (near @ flat).view(shape))
        vector = vectors[..., -1]
        slopes = (near / (value[:, None] - inside) @ flat).view(shape)
        leaving = torch.einsum("da,dab,db->d", vector, slopes, vector)
        # Newton's method for f(x) = lambda_max(...) - x with f' = -(leaving + 1). f is convex and
        # decreasing, so steps from below do not overshoot.
        last, value = (
            value,
            torch.maximum(value + (eigenvalues[:, -1] - value) / (1 + leaving), floor),
        )
        if is_below((value - last).abs().max(), TUNING.rtol * scale):
            break
    return value, vector[:, 0].square() / (1 + leaving)


def small_batches(
    risk: Risk, size: int, num_batches: int, generator: torch.Generator
) -> Iterator[Risk]:
    """Yield risks on random batches of distinct samples."""
    total = sum(risk.batch_rows)
    for _ in range(num_batches):
        order = torch.randperm(total, generator=generator, device=generator.device)
        yield risk.samples(order[:size].to(risk.theta.device), batch_size=size)
