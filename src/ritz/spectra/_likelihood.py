"""``log_likelihood`` of a Gaussian process, and the inverse quadratic form in it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ritz._core.batches import as_tensor
from ritz._core.blocks import column_dots, euclidean_norm, power_of_two
from ritz._core.checks import check_choice, check_finite, check_rtol, check_tensor
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status
from ritz._core.sampling import ROUNDOFF
from ritz.operators import KernelOperator, LinearOperator, OperatorLike, as_operator
from ritz.spectra._cg import LowRankPreconditioner, solve
from ritz.spectra._functions import logdet
from ritz.spectra._logdet_gradient import (
    differentiable,
    exact_by_factor,
    factor_gradient,
    fits,
    logdet_gradient,
    root_mean_square,
    slope_sizes,
)
from ritz.spectra._positive_definite import (
    cholesky_factor,
    factor_roundoff,
    largest_entry,
    roundoff_probes,
)

LikelihoodMethod = Literal["auto", "cholesky", "krylov", "lanczos"]


def log_likelihood(
    op: OperatorLike,
    y: "Tensor | np.ndarray[Any, Any]",
    *,
    method: LikelihoodMethod = "auto",
    num_products: int = 1500,
    num_probes: int = 16,
    rtol: float | None = None,
    rank: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Estimate :math:`\log p(y)` of a Gaussian :math:`y` of mean zero and covariance :math:`K`.

    .. math:: -2 \log p = y^\top K^{-1} y + \log \det K + n \log 2 \pi

    The log determinant is that of :func:`ritz.logdet`. Conjugate gradients compute the quadratic
    term as :math:`y^\top x + x^\top r` with :math:`x \approx K^{-1} y` and :math:`r = y - K x`. The
    error is :math:`r^\top K^{-1} r`, at most :math:`\|r\|^2` divided by the noise variance.
    ``stderr`` and ``truncation`` are half the sums of the errors of the two terms.

    The mean is differentiable in the parameters of a kernel operator and in ``y``. The backward
    pass estimates the gradient as :func:`ritz.spectra.logdet_gradient` does, and
    :func:`ritz.spectra.backward_gradient` returns it with its error bars. A kernel matrix of up to
    2048 rows is formed and factored, as with ``method="cholesky"``, which is exact.

    Args:
        op: Positive definite :math:`K`, ``(n, n)``.
        y: Observations ``(n,)``, a tensor or NumPy array.
        method: Method for the log determinant; ``cholesky`` factors the matrix for all terms.
        num_products: Maximum number of products for the log determinant.
        num_probes: Number of random vectors, for the log determinant and for its gradient.
        rtol: Residual of conjugate gradients, relative to the norm of ``y``. For a kernel matrix
            the default makes the truncation at most :math:`10^{-6} \|y\|^2/K_{11}`; otherwise the
            default is the square root of machine precision.
        rank: Rank of the preconditioner.
        generator: Source of the vectors. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Rasmussen and Williams (2006), equation 2.30.

    Example:
        >>> import torch
        >>> from ritz.operators import KernelOperator
        >>> from ritz.spectra import log_likelihood
        >>> points = torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
        >>> noise = torch.tensor(0.1, requires_grad=True)
        >>> op = KernelOperator(points, lengthscale=0.2, noise=noise)
        >>> value = log_likelihood(op, torch.sin(9 * points[:, 0]))
        >>> value.mean.backward()
        >>> bool(noise.grad < 0)  # the data have no noise
        True
    """
    op = as_operator(op)
    check_choice("method", method, get_args(LikelihoodMethod))
    y = as_tensor(y)
    check_tensor("y", y, dtype=op.dtype, device=op.device, rows=op.shape[0], ndim=1)
    check_finite("y", y)
    if rtol is not None:
        check_rtol(rtol)
    parameters = op.parameters if isinstance(op, KernelOperator) else {}
    parameters = parameters | ({"y": y} if y.requires_grad else {})
    if isinstance(op, KernelOperator) and (method == "cholesky" or (method == "auto" and fits(op))):
        return _by_factor(op, y, parameters)
    source = resolve_generator(generator)
    form, x = inverse_form(op, y, rtol=rtol, rank=rank, progress=progress)
    with torch.no_grad():
        volume = logdet(
            op,
            method=method,
            num_products=num_products,
            num_probes=num_probes,
            generator=source,
            progress=progress,
        )
    estimate = Estimate(
        mean=_log_density(form.mean, volume.mean, len(y)),
        stderr=volume.stderr / 2,
        truncation=(form.truncation + volume.truncation) / 2,
        degrees=volume.degrees,
        samples=None if volume.samples is None else _log_density(form.mean, volume.samples, len(y)),
        num_products=form.num_products + volume.num_products,
        method=f"{volume.method}; {form.method}",
        status=_joint_status(form, volume),
        seed=volume.seed,
    )
    estimate = estimate.with_status(None, "use more products or probes")
    state = source.clone_state()

    def gradient() -> dict[str, Estimate]:
        gradients = form_gradient(op, y, x, parameters, form, rank=rank)
        if isinstance(op, KernelOperator) and op.parameters:
            again = state.clone_state()
            volumes = logdet_gradient(
                op, method="lanczos", num_probes=num_probes, rank=rank, generator=again
            )
            for name, part in volumes.items():
                slope, samples = gradients[name].mean, part.samples
                total = None if samples is None else slope + samples
                truncation = gradients[name].truncation + part.truncation
                gradients[name] = replace(
                    part, mean=slope + part.mean, truncation=truncation, samples=total
                )
        # d log p = -1/2 (d form + d log det K)
        return {name: part.scaled(-0.5) for name, part in gradients.items()}

    return differentiable(estimate, parameters, gradient)


def _by_factor(op: KernelOperator, y: Tensor, parameters: dict[str, Tensor]) -> Estimate:
    op, right = op.double(), y.detach().double()[:, None]
    factor = cholesky_factor(op.matrix().detach())

    def solve(block: Tensor) -> Tensor:
        return torch.cholesky_solve(block, factor)

    # K = L L':  y'K^{-1}y = |L^{-1} y|^2 and log det K = 2 sum_i log L_ii
    white = torch.linalg.solve_triangular(factor, right, upper=False)
    x = torch.linalg.solve_triangular(factor.mT, white, upper=True)
    mean = _log_density(white.square().sum(), 2 * factor.diagonal().log().sum(), len(y))
    # d(y'K^{-1}y) = -x'dK x with x = K^{-1} y, and |dK| of the order of eps K_11.
    size = (largest_entry(op) ** 0.5 * x).square().sum().cpu()
    error = ROUNDOFF * torch.finfo(op.dtype).eps * size + factor_roundoff(op, solve)
    estimate = exact_by_factor(op, mean, truncation=error / 2)

    def gradient() -> dict[str, Estimate]:
        gradients = _form_gradient_by_factor(op, solve, x)
        for name, part in (factor_gradient(op, factor) if op.parameters else {}).items():
            form = gradients[name]
            mean, truncation = form.mean + part.mean, form.truncation + part.truncation
            gradients[name] = replace(part, mean=mean, truncation=truncation)
        # d log p = -1/2 (d form + d log det K)
        return {name: gradients[name].scaled(-0.5) for name in parameters}

    return differentiable(estimate, parameters, gradient)


def _form_gradient_by_factor(
    op: KernelOperator, solve: Callable[[Tensor], Tensor], x: Tensor
) -> dict[str, Estimate]:
    """Return the gradient of the form, with the roundoff of a factor, for the columns ``x``."""
    # K + E moves x by K^{-1} E x: for E = z z' by v = K^{-1} z (z'x), and x'(dK)x by 2 x'(dK)v,
    # which is half the difference of the forms of x + v and x - v.
    probes, scaled, unit = roundoff_probes(op, solve)
    along = probes.mT @ x
    moved = scaled * along[:, 0]
    gradient = {}
    if op.parameters:
        sizes, square = slope_sizes(op), along.square().mean().cpu()
        slopes, plus, minus = (op.slopes(block) for block in (x, x + moved, x - moved))
        for name, slope in slopes.items():
            shift = root_mean_square((plus[name] - minus[name]) / 2) + sizes[name] * square
            gradient[name] = exact_by_factor(op, -slope[0], truncation=unit * shift)
    error = 2 * unit * root_mean_square(moved.mT)
    gradient["y"] = exact_by_factor(op, 2 * x[:, 0], truncation=error)
    return gradient


def _joint_status(form: Estimate, volume: Estimate) -> Status:
    """Return the status of the term that failed. A tolerance of the terms is not one of the sum."""
    for term in (form, volume):
        if not term.status.ok:
            return term.status
    return Status(outcome="completed", message="log determinant and quadratic form completed")


def _log_density(form: Tensor, volume: Tensor, n: int) -> Tensor:
    return -0.5 * (form + volume + n * math.log(2 * math.pi))


def inverse_form(
    op: LinearOperator,
    y: Tensor,
    *,
    rtol: float | None = None,
    rank: int = 200,
    progress: bool | Progress = False,
) -> tuple[Estimate, Tensor]:
    r"""Return :math:`y^\top A^{-1} y` and :math:`x \approx A^{-1} y`, by conjugate gradients.

    With :math:`r = y - A x`,

    .. math:: y^\top A^{-1} y = y^\top x + x^\top r + r^\top A^{-1} r.

    The last term is at most :math:`\|r\|^2` divided by the noise of a kernel matrix. This bound is
    the ``truncation``.
    """
    y = y.detach()
    noise = op.noise if isinstance(op, KernelOperator) else 0.0
    if isinstance(op, KernelOperator) and noise:
        # |r|^2 / noise = 1e-6 |y|^2 / K_11 with K_11 = noise + outputscale
        rtol = 1e-3 * math.sqrt(noise / (noise + op.outputscale)) if rtol is None else rtol
    solution = solve(
        op,
        y,
        rtol=rtol,
        preconditioner=_preconditioner(op, rank),
        progress=progress,
    )
    x, right = solution.x[:, None], y[:, None]
    unit = right / power_of_two(right)  # A y may leave the range
    products = op.matmat(torch.cat([x, unit], 1))
    residual = right - products[:, :1]
    # Roundoff in A moves x'Ax by eps |A| |x|^2; |A y| / |y| stands for |A|.
    scale = euclidean_norm(products[:, 1]) / max(1.0, euclidean_norm(unit))
    roundoff = ROUNDOFF * torch.finfo(op.dtype).eps * scale * float(column_dots(x, x))
    if noise:
        error = float(column_dots(residual, residual)) / noise
    else:
        # Without a bound of A^{-1}, solve for r'A^{-1}r, to a relative accuracy of 0.01.
        rest = solve(op, residual[:, 0], rtol=0.01)
        known = rest.status.ok
        error = 2 * abs(float(column_dots(residual, rest.x[:, None]))) if known else math.inf
    estimate = Estimate.exact(
        (column_dots(y[:, None], x) + column_dots(x, residual))[0].cpu(),
        truncation=error + roundoff,
        num_products=solution.num_products + 2,
        method=f"conjugate gradients, {len(solution.history) - 1} steps",
        status=solution.status,
    )
    return estimate, solution.x


def form_gradient(
    op: LinearOperator,
    y: Tensor,
    x: Tensor,
    parameters: dict[str, Tensor],
    form: Estimate,
    *,
    rank: int = 200,
) -> dict[str, Estimate]:
    r"""Return :math:`2 x^\top \partial y - x^\top (\partial A) x`, the gradient of the form.

    The error of the form is of second order in that of ``x``, but the error of its gradient is of
    first order. So ``x`` is refined by a solution for its residual, to a relative accuracy of 0.01.
    The ``truncation`` is the change by this step.
    """
    form.raise_if_failed()
    residual = y.detach() - op @ x
    rest = solve(op, residual, rtol=0.01, preconditioner=_preconditioner(op, rank))
    step = rest.x if rest.status.ok else torch.zeros_like(x)
    gradients = {}
    if isinstance(op, KernelOperator) and op.parameters:
        slopes = op.slopes(torch.stack([x, x + step], 1))  # x'(dK)x
        gradients = {name: (-slope[1], slope[1] - slope[0]) for name, slope in slopes.items()}
    if "y" in parameters:
        size = step.double().abs().max().cpu()
        gradients["y"] = (2 * (x + step).double().cpu(), 2 * size)
    return {
        name: Estimate.exact(
            mean,
            method=form.method,
            truncation=change.abs() if rest.status.ok else math.inf,
        )
        for name, (mean, change) in gradients.items()
    }


def _preconditioner(op: LinearOperator, rank: int) -> Callable[[Tensor], Tensor] | None:
    """Return the low-rank preconditioner of a kernel matrix with noise, ``None`` for others."""
    if isinstance(op, KernelOperator) and op.noise:
        return LowRankPreconditioner(op, rank=rank).inverse
    return None
