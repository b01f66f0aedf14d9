"""Traces, diagonals and the Frobenius norm by random probes."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, resolve_generator
from ritz._core.results import Estimate, Status, stderr
from ritz._core.sampling import Sampling, accuracy, check_samples, column_dots, draw_probes
from ritz.operators import LinearOperator, OperatorLike, as_operator, exact

# ------------------------------------------------------------------------------------------
# Traces and the Frobenius norm.

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
    ``exact``        0                   0                   the operator knows its trace
    ``hutchinson``   1                   one block           eigenvalues do not decay
    ``hutch++``      3                   ``2 num_probes``    eigenvalues decay
    ``xtrace``       2                   ``5 num_probes``    eigenvalues decay fast
    ===============  ==================  ==================  ====================================

    The variance of ``hutchinson`` with Rademacher probes is
    :math:`2 (\|A\|_F^2 - \sum_i A_{ii}^2)`. ``hutch++`` takes the trace on the range of a sketch
    exactly and samples the complement. ``xtrace`` does so with each probe left out in turn. Its
    samples share probes, so its standard error is multiplied by :math:`\sqrt 2`. With as many
    probes as rows it multiplies the unit vectors instead, which is exact.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: One of the table. ``auto`` is ``exact`` if possible, otherwise ``xtrace``.
        num_probes: Number of probes. With ``rtol``, the smallest number.
        rtol: Add probes until the standard error is below this fraction of the trace.
        max_probes: Maximum number of probes with ``rtol``; the status says if they did not suffice.
        probe: ``rademacher`` or ``gaussian``, for ``hutchinson`` and ``hutch++``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Hutchinson (1990); Meyer, Musco, Musco and Woodruff (2021); Epperly, Tropp and
    Webber (2024).

    Example:
        >>> import torch, ritz
        >>> ritz.trace(torch.eye(5, dtype=torch.float64)).mean
        tensor(5., dtype=torch.float64)
    """
    op = as_operator(op)
    check_choice("method", method, ("auto", "exact", "hutchinson", "hutch++", "xtrace"))
    known, reason = _by_structure(op, "trace", method)
    if known is not None:
        return known
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, probe=probe)
    if method in ("hutchinson", "hutch++"):
        rank = min(num_probes, op.shape[0]) if method == "hutch++" else 0
        return _hutchinson(op, plan, generator, progress, rank)
    if num_probes >= op.shape[0]:
        return _by_unit_vectors(op)
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

    Cost: one product per probe. ``samples`` holds the *squared* norms.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_probes: Number of probes. With ``rtol``, the smallest number.
        rtol: Add probes until the standard error is below this fraction of the norm.
        max_probes: Maximum number of probes with ``rtol``.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    generator = resolve_generator(generator)
    # d sqrt(s) = ds / (2 sqrt(s)): the square root halves a relative error.
    squared_rtol = None if rtol is None else min(1.0, 2 * rtol)
    plan = Sampling(num_probes, squared_rtol, max_probes, probe=probe)

    def measure(block: Tensor) -> Tensor:
        product = op.matmat(block)
        return column_dots(product, product)

    samples, status = plan.run(op, measure, generator=generator, progress=progress, label="norm")
    mean = samples.mean().sqrt()
    error = stderr(samples) / (2 * mean) if mean > 0 else torch.zeros_like(mean)
    if rtol is not None:
        status = accuracy(float(mean), float(error), rtol)
    method, seed = "root of the mean of |A z|^2", generator.initial_seed()
    estimate = Estimate.of(
        samples, method=method, num_products=len(samples), status=status, seed=seed
    )
    return replace(estimate, mean=mean, stderr=error)


def _by_structure(
    op: LinearOperator, quantity: Literal["trace", "diagonal"], method: str
) -> tuple[Estimate | None, str]:
    """Return the exact value if the structure of the operator knows it, and otherwise why not."""
    value, note = exact(op, quantity) if method in ("auto", "exact") else (None, "")
    if value is not None:
        return Estimate.exact(value, method=f"exact, by {note}"), ""
    if method == "exact":
        message = f"method='exact' needs a structure that knows its {quantity}, got {op!r}"
        raise ValueError(f"{message}: {note}" if note else message)
    return None, f"; the structure does not know: {note}" if note else ""


def _by_unit_vectors(op: LinearOperator) -> Estimate:
    n = op.shape[0]
    matrix = op.dense(max_bytes=n * n * op.dtype.itemsize)
    check_samples(matrix.T, 0)
    method = "exact, by products with unit vectors"
    return Estimate.exact(float(matrix.double().trace()), method=method, num_products=n)


def _hutchinson(
    op: LinearOperator,
    plan: Sampling,
    generator: torch.Generator,
    progress: bool | Progress,
    rank: int,
) -> Estimate:
    """Sample the trace, after a part of rank ``rank`` that is treated exactly (Hutch++)."""
    method = f"Hutch++, sketch of rank {rank}" if rank else "Hutchinson"
    basis, inside = None, torch.zeros((), dtype=torch.float64, device=op.device)
    if rank:
        image = op.matmat(draw_probes(op, rank, kind=plan.probe, generator=generator))
        check_samples(image.T, 0)
        basis = torch.linalg.qr(image).Q
        inside = column_dots(basis, op.matmat(basis)).sum()

    def measure(block: Tensor) -> Tensor:
        # tr A = tr Q'AQ + tr PAP with P = I - QQ': the first term exactly, the second by probes P z
        rest = block if basis is None else block - basis @ (basis.T @ block)
        return inside + column_dots(rest, op.matmat(rest))

    samples, status = plan.run(op, measure, generator=generator, progress=progress, label="trace")
    spent, seed = len(samples) + 2 * rank, generator.initial_seed()
    return Estimate.of(samples, method=method, num_products=spent, status=status, seed=seed)


def _xtrace(
    op: LinearOperator, plan: Sampling, generator: torch.Generator, progress: bool | Progress
) -> Estimate:
    n = op.shape[0]
    limit = min(plan.num_probes if plan.rtol is None else plan.max_probes, n)
    omega = torch.empty(n, 0, dtype=op.dtype, device=op.device)
    image = omega
    count, spent = plan.num_probes, 0
    with tracking(progress, "trace", limit) as bar:
        while True:
            fresh = draw_probes(op, count - omega.shape[1], kind="gaussian", generator=generator)
            omega, image = torch.cat([omega, fresh], 1), torch.cat([image, op.matmat(fresh)], 1)
            check_samples(image.T, 0)
            samples = _leave_one_out(op, omega, image)
            spent += fresh.shape[1] + count
            # Samples that share probes are correlated. Each has mean zero given the other probes,
            # so two of them covary through pairs of probes at least. If pairs were all, the
            # variance would at most double: hence the factor sqrt(2). Measured on flat, power-law
            # and exponential spectra, the naive error is too small by 1 to 1.6.
            error = 2**0.5 * stderr(samples)
            status = plan.judge(samples.mean(), error, count)
            bar.update(count)
            if plan.rtol is None or status.ok or count == limit:
                break
            count = min(2 * count, limit)
    seed = generator.initial_seed()
    estimate = Estimate.of(samples, method="XTrace", num_products=spent, status=status, seed=seed)
    return replace(estimate, stderr=error)


def _leave_one_out(op: LinearOperator, omega: Tensor, image: Tensor) -> Tensor:
    r"""Return one estimate per probe: exact on the range of the others, sampled by it elsewhere.

    Epperly, Tropp and Webber (2024), Section 2: with :math:`Y = A \Omega = Q R`, leaving column
    ``i`` out removes from the range of ``Q`` the direction :math:`Q s_i`,
    :math:`s_i \propto R^{-\top} e_i`.
    """
    n, count = omega.shape
    basis: Tensor
    factor: Tensor
    basis, factor = torch.linalg.qr(image)
    # Only directions matter, so R is scaled: then neither R nor its inverse overflows.
    factor = factor.double() / factor.abs().max().double().clamp_min(1e-300)
    # If A has low rank, R has zeros on its diagonal; any direction of the kernel serves.
    floor = torch.finfo(op.dtype).eps
    tiny = factor.diagonal().abs() <= floor
    factor = factor + torch.diag(torch.where(tiny, floor, 0.0).double())
    identity = torch.eye(count, dtype=torch.float64, device=op.device)
    # S = R^{-T}, columns normalised.
    left_out = torch.linalg.solve_triangular(factor.T, identity, upper=False)
    left_out = (left_out / left_out.norm(dim=0)).to(op.dtype)
    product = op.matmat(basis)
    inner = basis.T @ product
    # (I - Q_i Q_i') omega_i with Q_i Q_i' = Q (I - s_i s_i') Q', and A times it without a product.
    overlap = basis.T @ omega
    overlap = overlap - left_out * (left_out * overlap).sum(0)
    rest, rest_image = omega - basis @ overlap, image - product @ overlap
    # Gaussian probes are rescaled to the sphere of the complement, of dimension n - (count - 1).
    squared = column_dots(rest, rest)
    sampled = column_dots(rest, rest_image) * (n - count + 1) / squared
    # tr Q_i'AQ_i = tr Q'AQ - s_i'(Q'AQ)s_i
    inside = inner.double().trace() - column_dots(left_out, inner @ left_out)
    return (inside + torch.where(squared > 0, sampled, 0)).cpu()


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

    ``exact`` asks the structure of the operator and needs no product. ``probes`` samples: one
    product per probe, with variance :math:`\sum_{j \ne i} A_{ij}^2` for Rademacher probes. ``auto``
    is ``exact`` if possible. Memory: 4 blocks and 3 vectors, half of them in float64. The samples
    are not stored.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        num_probes: Number of probes. With ``rtol``, the smallest number.
        rtol: Add probes until the norm of the standard errors is below this fraction of the norm
            of the diagonal.
        max_probes: Maximum number of probes with ``rtol``; the status says if they did not suffice.
        block_size: Probes per product. Defaults to the block size of the operator.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Bekas, Kokiopoulou and Saad (2007).
    """
    op = as_operator(op)
    check_choice("method", method, ("auto", "exact", "probes"))
    known, reason = _by_structure(op, "diagonal", method)
    if known is not None:
        return known
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)
    running = _Running(torch.zeros(op.shape[0], dtype=torch.float64, device=op.device))
    limit = num_probes if rtol is None else max_probes
    with tracking(progress, "diagonal", limit) as bar:
        while running.count < num_probes or (running.count < limit and not running.status(rtol).ok):
            goal = num_probes if running.count < num_probes else limit
            width = min(plan.width(op), goal - running.count)
            block = draw_probes(op, width, kind=probe, generator=generator)
            samples = block * op.matmat(block)
            check_samples(samples.T, running.count)
            running.add(samples.double())
            bar.update(running.count)
    return Estimate(
        mean=running.mean.to(op.dtype),
        stderr=running.stderr().to(op.dtype),
        num_products=running.count,
        method="mean of z * (A z)" + reason,
        status=running.status(rtol),
        seed=generator.initial_seed(),
    )


class _Running:
    """Running mean and squared deviations of columns (Chan, Golub and LeVeque 1983).

    In float64: the square of a float32 number may overflow float32.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.mean, self.deviations, self.count = zeros, zeros.clone(), 0

    def add(self, samples: Tensor) -> None:
        new = samples.shape[1]
        mean = samples.mean(1)
        total = self.count + new
        gap = mean - self.mean
        # M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / (n_a + n_b)
        self.deviations += (samples - mean[:, None]).square_().sum(1)
        self.deviations += gap.square() * (self.count * new / total)
        self.mean = self.mean + gap * (new / total)
        self.count = total

    def stderr(self) -> Tensor:
        return (self.deviations / (self.count - 1) / self.count).sqrt()

    def status(self, rtol: float | None) -> Status:
        if rtol is None:
            return Status(outcome="completed", message=f"{self.count} probes")
        return accuracy(float(self.mean.norm()), float(self.stderr().norm()), rtol)
