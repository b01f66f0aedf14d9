"""Traces (Hutchinson, Hutch++, XTrace), diagonals and Frobenius norms, exact or estimated."""

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ritz._core.blocks import (
    column_dots,
    column_norms,
    inner_products,
    orthonormalize,
    power_of_two,
)
from ritz._core.checks import check_choice
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, draw_probes, resolve_generator
from ritz._core.results import Estimate, Status
from ritz._core.sampling import (
    FEWEST,
    ROUNDOFF,
    Samples,
    Sampling,
    check_samples,
    doubt_equal_samples,
    is_settled,
)
from ritz.operators import LinearOperator, OperatorLike, as_operator, exact

# ------------------------------------------------------------------------------------------
# Traces and the Frobenius norm.

# Norms in this interval need no scaling: their squares are normal numbers of single precision.
EASY = (1e-15, 1e15)

TraceMethod = Literal["auto", "exact", "hutchinson", "hutch++", "xtrace"]


def trace(
    op: OperatorLike,
    *,
    method: TraceMethod = "auto",
    num_probes: int = 32,
    rtol: float | None = None,
    max_probes: int = 1000,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Estimate the trace :math:`\operatorname{tr} A = \mathbb{E}[z^\top A z]`, with an error bar.

    ===============  ==================  ==================  ====================================
    method           products per probe  vectors in memory   use it if
    ===============  ==================  ==================  ====================================
    ``exact``        0                   0                   an exact trace is available
    ``hutchinson``   1                   one block           eigenvalues do not decay
    ``hutch++``      3                   ``2 num_probes``    eigenvalues decay
    ``xtrace``       2                   ``5 num_probes``    eigenvalues decay fast
    ===============  ==================  ==================  ====================================

    The variance of ``hutchinson`` with Rademacher probes is
    :math:`2 (\|A\|_F^2 - \sum_i A_{ii}^2)`. ``hutch++`` computes the trace on the range of a random
    sketch exactly and estimates the rest by sampling. ``xtrace`` uses all probes but one for the
    sketch and samples with the remaining one, and averages over all choices of it. Its samples
    share probes, so its standard error is multiplied by :math:`\sqrt 2`. If ``n`` products are no
    more than the method would use, products with unit vectors give the exact trace.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: One of the table. ``auto`` is ``exact`` if possible, otherwise ``xtrace``.
        num_probes: Number of probes. If ``rtol`` is given, the minimum number.
        rtol: Add probes until the 95 % interval is within this fraction of the trace. Without it,
            ``num_probes`` probes are used.
        max_probes: Maximum number of probes with ``rtol``; the status says if they did not suffice.
        probe: ``rademacher`` or ``gaussian``, for ``hutchinson`` and ``hutch++``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Hutchinson (1990); Meyer, Musco, Musco and Woodruff (2021); Epperly, Tropp and
    Webber (2024).

    Example:
        >>> import torch, ritz
        >>> ritz.trace(torch.eye(5, dtype=torch.float64)).mean
        tensor(5., dtype=torch.float64)
    """
    op = as_operator(op)
    check_choice("method", method, get_args(TraceMethod))
    plan = Sampling(num_probes, rtol, max_probes, probe=probe)
    generator = resolve_generator(generator)
    known, reason = _by_structure(op, "trace", method)
    if known is not None:
        return known
    if method in ("hutchinson", "hutch++"):
        rank = min(num_probes, op.shape[0]) if method == "hutch++" else 0
        return _hutchinson(op, plan, generator, progress, rank)
    estimate = _xtrace(op, plan, generator, progress)
    return replace(estimate, method=estimate.method + reason)


def frobenius_norm(
    op: OperatorLike,
    *,
    num_probes: int = 32,
    rtol: float | None = None,
    max_probes: int = 1000,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Estimate the Frobenius norm, from :math:`\|A\|_F^2 = \mathbb{E} \|A z\|^2`.

    Cost: one product per probe. ``samples`` holds :math:`\|A z\|^2` divided by the estimate, which
    is their mean. If ``num_probes`` is at least ``n``, products with unit vectors give the exact
    norm.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_probes: Number of probes. If ``rtol`` is given, the minimum number.
        rtol: Add probes until the 95 % interval is within this fraction of the norm.
        max_probes: Maximum number of probes with ``rtol``.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    op, generator = as_operator(op), resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, probe=probe)

    def measure(block: Tensor) -> Tensor:
        return _norms(op.matmat(block))

    def finish(samples: Samples) -> Estimate:
        unit, seed = power_of_two(samples.values), generator.initial_seed()
        squares = replace(samples, values=(samples.values / unit).square())
        estimate = squares.estimate(
            method="root of the mean of |A z|^2", num_products=len(squares.values), truncation=0.0,
            seed=seed,
        )  # fmt: skip
        # d sqrt(s) = ds / (2 sqrt(s)). The samples s_l / sqrt(s), whose mean is sqrt(s), are as
        # skewed as the squares; norms are not, and their intervals would be too short.
        mean = estimate.mean.sqrt()
        error = estimate.stderr / (2 * mean) if mean > 0 else torch.zeros_like(mean)
        root = replace(estimate, mean=mean, stderr=error, truncation=_eps(op) * mean)
        if not samples.complete:
            parts = squares.values / mean if mean > 0 else squares.values
            root = doubt_equal_samples(replace(root, samples=parts))
        return root.scaled(unit)

    return plan.run(op, measure, finish, generator=generator, progress=progress, label="norm")


def _by_structure(
    op: LinearOperator, quantity: Literal["trace", "diagonal"], method: str
) -> tuple[Estimate | None, str]:
    """Return the exact value if the operator knows it, otherwise ``None`` and the reason."""
    value, note = exact(op, quantity) if method in ("auto", "exact") else (None, "")
    if value is not None:
        size = torch.as_tensor(value).abs()
        return Estimate.exact(value, method=f"exact, by {note}", truncation=_eps(op) * size), ""
    if method == "exact":
        message = f"method='exact': no exact {quantity} is available for {op!r}"
        raise ValueError(f"{message}: {note}" if note else message)
    return None, f"; no closed form: {note}" if note else ""


def _eps(op: LinearOperator) -> float:
    """Return the relative error of a sum of products: a few units of roundoff."""
    # Within a network much more may cancel than in a sum.
    return max(ROUNDOFF * torch.finfo(op.dtype).eps, op.roundoff)


def _norms(block: Tensor) -> Tensor:
    """Return the norms of columns ``(k,)``, in float64."""
    # vector_norm sums a column sequentially, so its error would grow with the length.
    norms = column_norms(block)
    if EASY[0] < float(norms.norm()) < EASY[1]:
        return norms
    unit = power_of_two(block)  # the squares of small norms are zero
    return unit * column_norms(block / unit)


def _forms(block: Tensor, product: Tensor) -> Tensor:
    r"""Return :math:`z^\top A z` and :math:`|z| |A z|`, which bounds its roundoff, ``(k, 2)``."""
    unit, norm = 1.0, float(product.norm())
    # Scale, because sums of very small numbers would underflow and those of large ones overflow.
    if not EASY[0] < norm < EASY[1]:
        unit = power_of_two(product)
        product = product / unit
        norm = float(product.norm())
    forms = column_dots(block, product)
    # |z|^2 is close to n; the mean over the block stands for each |A z|.
    n, count = block.shape
    size = norm if math.isfinite(norm) else 0.0  # check_samples raises if it is not
    magnitudes = torch.full_like(forms, size * math.sqrt(n / count))
    return unit * torch.stack([forms, magnitudes], 1)


def _hutchinson(
    op: LinearOperator,
    plan: Sampling,
    generator: torch.Generator,
    progress: bool | Progress,
    rank: int,
) -> Estimate:
    """Estimate the trace by Hutchinson, or by Hutch++ with a sketch of rank ``rank``."""
    method = f"Hutch++, sketch of rank {rank}" if rank else "Hutchinson"
    basis, inside, magnitude = None, 0.0, 0.0
    if rank and 2 * rank + plan.num_probes >= op.shape[0]:
        return _by_unit_vectors(op).with_status(plan.rtol)
    if rank:
        image = op.matmat(draw_probes(op, rank, kind=plan.probe, generator=generator))
        check_samples(image.T, 0)
        basis, _ = orthonormalize(image)
        product = op.matmat(basis)
        inside = float(column_dots(basis, product).sum())
        magnitude = float(_norms(product).sum())  # larger than the sum, whose terms may cancel

    def measure(block: Tensor) -> Tensor:
        # tr A = tr Q'AQ + tr PAP with P = I - QQ': the first term exactly, the second by probes P z
        rest = block if basis is None else block - basis @ inner_products(basis, block).to(block)
        return _forms(rest, op.matmat(rest))

    def finish(samples: Samples) -> Estimate:
        forms, magnitudes = samples.values.unbind(1)
        return replace(samples, values=forms + inside).estimate(
            method=method,
            num_products=len(forms) + 2 * rank,
            truncation=_eps(op) * (magnitudes.mean() + magnitude),
            seed=generator.initial_seed(),
        )

    return plan.run(op, measure, finish, generator=generator, progress=progress, label="trace")


def _xtrace(
    op: LinearOperator, plan: Sampling, generator: torch.Generator, progress: bool | Progress
) -> Estimate:
    omega = image = torch.empty(op.shape[0], 0, dtype=op.dtype, device=op.device)
    spent, looks = 0, plan.looks(op.shape[0], products=2)
    with tracking(progress, "trace", looks[-1]) as bar:
        for count in looks:
            if count == op.shape[0]:
                known = _by_unit_vectors(op)
                return replace(known, num_products=spent + count).with_status(plan.rtol)
            fresh = draw_probes(op, count - omega.shape[1], kind="gaussian", generator=generator)
            omega, image = torch.cat([omega, fresh], 1), torch.cat([image, op.matmat(fresh)], 1)
            check_samples(image.T, 0)
            samples, magnitude = _leave_one_out(op, omega, image)
            spent += fresh.shape[1] + count
            seed, roundoff = generator.initial_seed(), _eps(op) * magnitude
            estimate = Estimate.of(
                samples, method="XTrace", num_products=spent, truncation=roundoff, seed=seed
            )
            # Samples that share probes are correlated. Given the other probes each sample has mean
            # zero, so two samples covary only through terms in pairs of probes or more. Terms in
            # pairs at most double the variance: hence the factor sqrt(2). On flat, power-law and
            # exponential spectra the error without it is too small by a factor of 1 to 1.6.
            estimate = replace(estimate, stderr=2**0.5 * estimate.stderr).with_status(plan.rtol)
            bar.update(count)
            if is_settled(estimate, plan.rtol):
                break
    return estimate


def _by_unit_vectors(
    op: LinearOperator, quantity: Literal["trace", "diagonal"] = "trace"
) -> Estimate:
    n, method = op.shape[0], "exact, by products with unit vectors"
    matrix = op.dense(max_bytes=n * n * op.dtype.itemsize)
    check_samples(matrix.T, 0)
    entries = matrix.diagonal().double()
    size = entries.abs()
    if quantity == "diagonal":
        eps, entries = _eps(op), entries.to(op.dtype)
        return Estimate.exact(entries, method=method, num_products=n, truncation=eps * size)
    roundoff = _eps(op) * size.sum()
    return Estimate.exact(float(entries.sum()), method=method, num_products=n, truncation=roundoff)


def _leave_one_out(op: LinearOperator, omega: Tensor, image: Tensor) -> tuple[Tensor, float]:
    r"""Return one estimate per probe, and the magnitude of the numbers that are summed.

    Each estimate is exact on the range of ``A`` times the other probes, and sampled elsewhere.

    Epperly, Tropp and Webber (2024), Section 2: with :math:`Y = A \Omega = Q R`, leaving column
    ``i`` out removes from the range of ``Q`` the direction :math:`Q s_i`,
    :math:`s_i \propto R^{-\top} e_i`.
    """
    n, count = omega.shape
    basis: Tensor
    factor: Tensor
    basis, factor = orthonormalize(image)
    # Only directions matter, so R is scaled: then neither R nor its inverse overflows.
    factor = factor.double() / factor.abs().max().double().clamp_min(1e-300)
    # If A has low rank, R has zeros on its diagonal. Replace them: any direction in the kernel will
    # do.
    floor = torch.finfo(op.dtype).eps
    tiny = factor.diagonal().abs() <= floor
    factor = factor + torch.diag(torch.where(tiny, floor, 0.0).double())
    identity = torch.eye(count, dtype=torch.float64, device=op.device)
    # S = R^{-T}, columns normalised.
    left_out = torch.linalg.solve_triangular(factor.T, identity, upper=False)
    left_out = (left_out / left_out.norm(dim=0)).to(op.dtype)
    product = op.matmat(basis)
    inner = inner_products(basis, product).to(op.dtype)
    # (I - Q_i Q_i') omega_i with Q_i Q_i' = Q (I - s_i s_i') Q', and A times it without a product.
    overlap = inner_products(basis, omega).to(op.dtype)
    overlap = overlap - left_out * (left_out * overlap).sum(0)
    rest, rest_image = omega - basis @ overlap, image - product @ overlap
    # Gaussian probes are rescaled to the sphere of the complement, of dimension n - (count - 1).
    squared = column_dots(rest, rest)
    sampled = column_dots(rest, rest_image) * (n - count + 1) / squared
    # tr Q_i'AQ_i = tr Q'AQ - s_i'(Q'AQ)s_i
    diagonal = inner.double().diagonal()
    inside = diagonal.sum() - column_dots(left_out, inner @ left_out)
    samples = (inside + torch.where(squared > 0, sampled, 0)).cpu()
    # |q'Aq| may be small where |Aq| is not, and roundoff is relative to |Aq|.
    size = float(_norms(product).sum() + _norms(image).mean())
    return samples, size + float(samples.abs().mean())


# ------------------------------------------------------------------------------------------
# Diagonals.

DiagonalMethod = Literal["auto", "exact", "probes"]


def diagonal(
    op: OperatorLike,
    *,
    method: DiagonalMethod = "auto",
    num_probes: int = 32,
    rtol: float | None = None,
    max_probes: int = 1000,
    block_size: int | None = None,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Estimate the diagonal ``(n,)``, from :math:`A_{ii} = \mathbb{E}[z_i (A z)_i]`.

    ``exact`` uses the entries that the operator has and needs no product. ``probes`` is a random
    estimate: one product per probe, with variance :math:`\sum_{j \ne i} A_{ij}^2` for Rademacher
    probes. Gaussian probes are averaged with weights, :math:`\sum_l z_{il} (A z_l)_i / \sum_l
    z_{il}^2`, so that :math:`A_{ii}` itself adds no error. ``auto`` is ``exact`` if possible. If
    ``num_probes`` is at least ``n``, products with unit vectors give the exact diagonal. Memory: 6
    blocks of ``block_size`` vectors and 4 vectors, half of them in float64. The samples are not
    stored.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        num_probes: Number of probes. If ``rtol`` is given, the minimum number.
        rtol: Add probes until the norm of the half-widths of the 95 % intervals is below this
            fraction of the norm of the diagonal.
        max_probes: Maximum number of probes with ``rtol``; the status says if they did not suffice.
        block_size: Number of probes that are multiplied together. Defaults to the block size of the
            operator.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Bekas, Kokiopoulou and Saad (2007).
    """
    op = as_operator(op)
    check_choice("method", method, get_args(DiagonalMethod))
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)
    generator = resolve_generator(generator)
    known, reason = _by_structure(op, "diagonal", method)
    if known is not None:
        return known
    looks, seed = plan.looks(op.shape[0]), generator.initial_seed()
    running = _Running(op)
    with tracking(progress, "diagonal", looks[-1]) as bar:
        for goal in looks:
            if goal == op.shape[0]:
                known = _by_unit_vectors(op, "diagonal")
                return replace(known, num_products=running.count + goal).with_status(rtol)
            while running.count < goal:
                width = min(plan.width(op), goal - running.count)
                block = draw_probes(op, width, kind=probe, generator=generator)
                product = op.matmat(block)
                check_samples(product.T, running.count)
                running.add(block, product)
                bar.update(running.count)
            estimate = running.estimate("mean of z * (A z)" + reason, seed)
            # z_i (A z)_i is linear in the other signs: it is constant, or no value has a
            # probability above 1/2.
            estimate = doubt_equal_samples(estimate, alike=FEWEST).with_status(rtol)
            if is_settled(estimate, plan.rtol):
                break
    return estimate


class _Running:
    r"""Running regression of :math:`y_i = (A z)_i` on :math:`z_i` without an intercept, by rows.

    The slope :math:`b = \sum z y / \sum z^2` estimates the diagonal, from sums that are merged as
    Chan, Golub and LeVeque (1983) merge means. Given :math:`z_i`, :math:`y_i - A_{ii} z_i` has mean
    zero and a variance that does not depend on :math:`z_i`. So the interval of the slope with
    :math:`d - 1` degrees of freedom is exact for Gaussian probes. For random signs the slope is the
    mean of :math:`z y`.

    In float64 and in units of a power of two, because squares of small or large numbers leave the
    range.
    """

    def __init__(self, op: LinearOperator) -> None:
        self.op, self.count, self.unit = op, 0, 1.0
        self.mean = torch.zeros(op.shape[0], dtype=torch.float64, device=op.device)
        self.weight, self.deviations, self.magnitude = (
            torch.zeros_like(self.mean) for _ in range(3)
        )

    def add(self, block: Tensor, product: Tensor) -> None:
        """Add probes ``(n, k)`` and their products."""
        if not self.count:
            self.unit = power_of_two(product)
        z, y = block.double(), product.double() / self.unit
        weight = z.square().sum(1)
        mean = (z * y).sum(1) / weight
        total = self.weight + weight
        gap = mean - self.mean
        # M2 = M2_a + M2_b + (mean_b - mean_a)^2 w_a w_b / (w_a + w_b)
        self.deviations += (y - mean[:, None] * z).square_().sum(1)
        self.deviations += gap.square() * (self.weight * weight / total)
        self.mean = self.mean + gap * (weight / total)
        self.magnitude = torch.maximum(self.magnitude, y.abs().amax(1))
        self.weight, self.count = total, self.count + block.shape[1]

    def estimate(self, method: str, seed: int) -> Estimate:
        dtype = self.op.dtype
        error = (self.deviations / (self.count - 1) / self.weight).sqrt()
        return Estimate(
            mean=(self.unit * self.mean).to(dtype),
            stderr=(self.unit * error).to(dtype),
            truncation=(self.unit * _eps(self.op) * self.magnitude).to(dtype),
            degrees=self.count - 1,
            num_products=self.count,
            method=method,
            status=Status(outcome="completed", message=f"{self.count} probes"),
            seed=seed,
        )
