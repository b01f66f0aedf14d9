"""Traces, diagonals and the Frobenius norm by random probes."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes, resolve_generator
from ritz._core.results import Estimate, Status, stderr
from ritz._core.sampling import Sampling, accuracy, check_samples, column_dots
from ritz.operators import LinearOperator, OperatorLike, as_operator, exact

# ------------------------------------------------------------------------------------------
# Traces, diagonals and norms by random probes.

TraceMethod = Literal["auto", "exact", "hutchinson", "hutch++", "xtrace"]
METHODS = ("auto", "exact", "hutchinson", "hutch++", "xtrace")


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
    r"""Return the trace :math:`\operatorname{tr} A = \mathbb{E}[z^\top A z]` with its error.

    ``exact`` asks the structure of the operator (no product). ``hutchinson`` averages
    :math:`z^\top A z`: one product a probe, memory of a block, and for Rademacher probes a variance
    of :math:`2 (\|A\|_F^2 - \sum_i A_{ii}^2)`. ``hutch++`` takes the trace on the range of a sketch
    exactly and averages on the complement (three products a probe, ``2 num_probes`` vectors).
    ``xtrace`` does so with every probe left out in turn (two products a probe,
    ``5 num_probes`` vectors): far more accurate where eigenvalues decay; as many probes as rows
    are replaced by the unit vectors, which give the trace itself. Its samples share probes, for
    which the standard error is raised by the root of two. ``auto`` is ``exact`` where the structure
    knows, else ``xtrace``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        num_probes: Probes; with ``rtol``, the least number.
        rtol: Go on until the standard error is below this share of the trace.
        max_probes: Most probes for that; the status says if they were not enough.
        probe: ``rademacher`` or ``gaussian``, for ``hutchinson`` and ``hutch++``.
        generator: Source of the probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Hutchinson (1990); Meyer, Musco, Musco and Woodruff (2021); Epperly, Tropp and
    Webber (2024).

    Example:
        >>> import torch, ritz
        >>> ritz.trace(torch.eye(5, dtype=torch.float64)).mean
        tensor(5., dtype=torch.float64)
    """
    op = as_operator(op)
    check_choice("method", method, METHODS)
    known, note = exact(op, "trace") if method in ("auto", "exact") else (None, "")
    if known is not None:
        return Estimate.exact(known, method=f"exact, by {note}")
    if method == "exact":
        raise ValueError(f"method='exact' needs a structure that knows its trace, got {op!r}"
                         + (f": {note}" if note else ""))  # fmt: skip
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, probe=probe)
    if method == "hutchinson":
        return _hutchinson(op, plan, generator, progress)
    if method == "hutch++":
        return _hutch_plus_plus(op, plan, generator, progress)
    if num_probes >= op.shape[0]:
        return _by_unit_vectors(op)
    found = _xtrace(op, plan, generator, progress)
    why = f"; the structure does not know: {note}" if note else ""
    return replace(found, method=found.method + why)


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
    r"""Return the Frobenius norm, from :math:`\|A\|_F^2 = \mathbb{E} \|A z\|^2`.

    One product a probe. The samples are those of the *squared* norm; the standard error is carried
    through the root.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_probes: Probes; with ``rtol``, the least number.
        rtol: Go on until the standard error is below this share of the norm.
        max_probes: Most probes for that.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    generator = resolve_generator(generator)
    # The root halves a relative error.
    plan = Sampling(
        num_probes, None if rtol is None else min(1.0, 2 * rtol), max_probes, probe=probe
    )

    def measure(block: Tensor) -> Tensor:
        product = op.matmat(block)
        return column_dots(product, product)

    samples, _ = plan.run(op, measure, generator=generator, progress=progress, label="norm")
    mean = samples.mean().sqrt()
    error = stderr(samples) / (2 * mean) if mean > 0 else torch.zeros_like(mean)
    return Estimate(
        mean=mean,
        stderr=error,
        samples=samples,
        num_products=len(samples),
        method="root of the mean of |A z|^2",
        status=plan.status(samples) if rtol is None else accuracy(float(mean), float(error), rtol),
        seed=generator.initial_seed(),
    )


def _by_unit_vectors(op: LinearOperator) -> Estimate:
    n = op.shape[0]
    matrix = op.dense(max_bytes=n * n * op.dtype.itemsize)
    check_samples(matrix.T, 0)
    return Estimate.exact(
        float(matrix.double().trace()),
        method="exact, by products with unit vectors",
        num_products=n,
    )


def _hutchinson(
    op: LinearOperator, plan: Sampling, generator: torch.Generator, progress: bool | Progress
) -> Estimate:
    def measure(block: Tensor) -> Tensor:
        return column_dots(block, op.matmat(block))

    samples, status = plan.run(op, measure, generator=generator, progress=progress, label="trace")
    return Estimate(
        mean=samples.mean(),
        stderr=stderr(samples),
        samples=samples,
        num_products=len(samples),
        method="Hutchinson",
        status=status,
        seed=generator.initial_seed(),
    )


def _hutch_plus_plus(
    op: LinearOperator, plan: Sampling, generator: torch.Generator, progress: bool | Progress
) -> Estimate:
    n = op.shape[0]
    rank = min(plan.num_probes, n)
    sketch = probes(
        (n, rank), kind=plan.probe, generator=generator, dtype=op.dtype, device=op.device
    )
    image = op.matmat(sketch)
    check_samples(image.T, 0)
    basis = torch.linalg.qr(image).Q
    known = column_dots(basis, op.matmat(basis)).sum()

    def measure(block: Tensor) -> Tensor:
        rest = block - basis @ (basis.T @ block)
        return known + column_dots(rest, op.matmat(rest))

    samples, status = plan.run(op, measure, generator=generator, progress=progress, label="trace")
    return Estimate(
        mean=samples.mean(),
        stderr=stderr(samples),
        samples=samples,
        num_products=len(samples) + 2 * rank,
        method=f"Hutch++, sketch of rank {rank}",
        status=status,
        seed=generator.initial_seed(),
    )


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
            shape = (n, count - omega.shape[1])
            fresh = probes(
                shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device
            )
            omega, image = torch.cat([omega, fresh], 1), torch.cat([image, op.matmat(fresh)], 1)
            check_samples(image.T, 0)
            samples = _leave_one_out(op, omega, image)
            spent += shape[1] + count
            # Estimates that share probes are correlated. Each has mean zero over its own probe, so
            # two share pairs of probes at least; were pairs all, the variance would double at most.
            # Measured on flat, power and exponential spectra, the root is short by 1 to 1.6.
            error = 2**0.5 * stderr(samples)
            status = plan.judge(samples.mean(), error, count)
            bar.update(count)
            if plan.rtol is None or status.ok or count == limit:
                break
            count = min(2 * count, limit)
    return Estimate(
        mean=samples.mean(),
        stderr=error,
        samples=samples,
        num_products=spent,
        method="XTrace",
        status=status,
        seed=generator.initial_seed(),
    )


def _leave_one_out(op: LinearOperator, omega: Tensor, image: Tensor) -> Tensor:
    r"""One estimate a probe: exact on the range of the others, sampled by it on the rest.

    Leaving column ``i`` out of :math:`Y = A \Omega = Q R` removes from the range of ``Q`` the
    direction :math:`Q s_i`, :math:`s_i \propto R^{-\top} e_i`.
    """
    n, count = omega.shape
    basis: Tensor
    factor: Tensor
    basis, factor = torch.linalg.qr(image)
    # A range of lower dimension leaves zeros on the diagonal: any direction of the kernel serves.
    # Only directions matter, so R is scaled: neither it nor its inverse then leaves the range.
    factor = factor.double() / factor.abs().max().double().clamp_min(1e-300)
    floor = torch.finfo(op.dtype).eps
    tiny = factor.diagonal().abs() <= floor
    factor = factor + torch.diag(torch.where(tiny, floor, 0.0).double())
    identity = torch.eye(count, dtype=torch.float64, device=op.device)
    left_out = torch.linalg.solve_triangular(factor.T, identity, upper=False)
    left_out = (left_out / left_out.norm(dim=0)).to(op.dtype)
    product = op.matmat(basis)
    inner = basis.T @ product
    overlap = basis.T @ omega
    overlap = overlap - left_out * (left_out * overlap).sum(0)
    rest, rest_image = omega - basis @ overlap, image - product @ overlap
    squared = column_dots(rest, rest)
    sampled = column_dots(rest, rest_image) * (n - count + 1) / squared
    kept = inner.double().trace() - column_dots(left_out, inner @ left_out)
    return (kept + torch.where(squared > 0, sampled, 0)).cpu()


# ------------------------------------------------------------------------------------------
# Diagonals by random probes.

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
    r"""Return the diagonal ``(n,)``, from :math:`A_{ii} = \mathbb{E}[z_i (A z)_i]`.

    ``exact`` asks the structure of the operator (no product), ``probes`` samples: one product a
    probe, variance :math:`\sum_{j \ne i} A_{ij}^2` for Rademacher probes. ``auto`` is ``exact``
    where the structure knows. Memory: 4 blocks and 3 vectors, half of it in float64; samples are
    not kept.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        num_probes: Probes; with ``rtol``, the least number.
        rtol: Go on until the norm of the standard errors is below this share of the norm.
        max_probes: Most probes for that; the status says if they were not enough.
        block_size: Probes multiplied at once; what suits the operator by default.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Reference: Bekas, Kokiopoulou and Saad (2007).
    """
    op = as_operator(op)
    check_choice("method", method, ("auto", "exact", "probes"))
    known, note = exact(op, "diagonal") if method != "probes" else (None, "")
    if known is not None:
        return Estimate.exact(known, method=f"exact, by {note}")
    if method == "exact":
        raise ValueError(f"method='exact' needs a structure that knows its diagonal, got {op!r}"
                         + (f": {note}" if note else ""))  # fmt: skip
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)
    running = _Running(torch.zeros(op.shape[0], dtype=torch.float64, device=op.device))
    limit = num_probes if rtol is None else max_probes
    with tracking(progress, "diagonal", limit) as bar:
        while running.count < num_probes or (running.count < limit and not running.status(rtol).ok):
            goal = num_probes if running.count < num_probes else limit
            shape = (op.shape[0], min(plan.width(op), goal - running.count))
            block = probes(
                shape, kind=plan.probe, generator=generator, dtype=op.dtype, device=op.device
            )
            samples = block * op.matmat(block)
            check_samples(samples.T, running.count)
            running.add(samples.double())
            bar.update(running.count)
    return Estimate(
        mean=running.mean.to(op.dtype),
        stderr=running.stderr().to(op.dtype),
        num_products=running.count,
        method="mean of z * (A z)" + (f"; the structure does not know: {note}" if note else ""),
        status=running.status(rtol),
        seed=generator.initial_seed(),
    )


class _Running:
    """Mean and squared deviations of columns, merged block by block (Chan, Golub, LeVeque).

    In float64: the square of a float32 number may be out of its range.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.mean, self.deviations, self.count = zeros, zeros.clone(), 0

    def add(self, samples: Tensor) -> None:
        new = samples.shape[1]
        mean = samples.mean(1)
        total = self.count + new
        gap = mean - self.mean
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
