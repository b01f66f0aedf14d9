"""The marginal likelihood of a Gaussian process, and the quadratic term of it."""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_finite, check_tensor
from ritz._core.progress import Progress
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate
from ritz._core.sampling import column_dots
from ritz.operators import KernelOperator, LinearOperator, OperatorLike, as_operator
from ritz.spectra._cg import solve
from ritz.spectra._functions import logdet
from ritz.spectra._gradients import (
    GradientSettings,
    LowRankPreconditioner,
    certain,
    cholesky,
    copied,
    differentiable,
    exact_gradient,
    fits,
    sampled_gradient,
)

LikelihoodMethod = Literal["auto", "cholesky", "krylov", "lanczos"]
LIKELIHOOD_METHODS = ("auto", "cholesky", "krylov", "lanczos")


def inverse_form(
    op: OperatorLike,
    y: Tensor,
    *,
    rtol: float | None = None,
    max_steps: int | None = None,
    rank: int = 200,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`y^\top A^{-1} y` of a positive definite matrix, by conjugate gradients.

    With :math:`x \approx A^{-1} y` and :math:`r = y - A x` it is :math:`y^\top x + x^\top r` but
    for :math:`r^\top A^{-1} r`, which :math:`\|r\|^2` over the noise of a kernel matrix bounds:
    the ``truncation``. The mean has a graph to ``y`` and to the parameters of a kernel operator,
    :math:`\partial = 2 x^\top \partial y - x^\top (\partial A) x`; a system that was not solved
    raises in the backward pass.

    Cost: the steps of conjugate gradients and two products; those of a kernel matrix are
    preconditioned, see :class:`ritz.spectra.LowRankPreconditioner`.

    Args:
        op: Positive definite :math:`A`, ``(n, n)``.
        y: ``(n,)``.
        rtol: Residual to reach, relative to the norm of ``y``. Default: for a kernel matrix what
            brings the truncation to a millionth of :math:`\|y\|^2/K_{11}`, else root of machine
            precision.
        max_steps: Most steps; ``n`` or 1000 by default, whichever is more.
        rank: Of the preconditioner.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    estimate, x = _solved(op, y, rtol, max_steps, rank, progress)
    parameters = _parameters(op, y)
    if not parameters:
        return estimate
    mean = differentiable(
        estimate.mean, parameters, lambda: _form_gradient(op, x, parameters, estimate)
    )
    return replace(estimate, mean=mean)


def log_likelihood(
    op: OperatorLike,
    y: Tensor,
    *,
    method: LikelihoodMethod = "auto",
    num_products: int = 1500,
    num_probes: int = 16,
    rtol: float | None = None,
    rank: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`\log p(y)` of a Gaussian :math:`y` of mean zero and covariance :math:`K`.

    .. math:: -2 \log p = y^\top K^{-1} y + \log \det K + n \log 2 \pi

    The log determinant is that of :func:`ritz.logdet`, the quadratic term that of
    :func:`inverse_form`; ``stderr`` and ``truncation`` are half the sums of theirs. The mean has
    a graph to the parameters of a kernel operator and to ``y``; the gradient is sampled in the
    backward pass as in :func:`ritz.spectra.logdet_gradient`, and
    :func:`ritz.spectra.backward_gradient` has its error bars. A kernel matrix of up to 2048 rows
    is formed and factored: exact, ``method="cholesky"``.

    Args:
        op: Positive definite :math:`K`, ``(n, n)``.
        y: ``(n,)``.
        method: For the log determinant; ``cholesky`` also for the rest.
        num_products: Products for the log determinant.
        num_probes: Random vectors, for the log determinant and for its gradient.
        rtol: Of :func:`inverse_form`.
        rank: Of the preconditioner.
        generator: Source of the vectors.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Example:
        >>> import torch
        >>> from ritz.operators import KernelOperator
        >>> from ritz.spectra import log_likelihood
        >>> points = torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
        >>> noise = torch.tensor(0.1, requires_grad=True)
        >>> op = KernelOperator(points, lengthscale=0.2, noise=noise)
        >>> found = log_likelihood(op, torch.sin(9 * points[:, 0]))
        >>> found.mean.backward()
        >>> bool(noise.grad < 0)  # there is none
        True
    """
    op = as_operator(op)
    check_choice("method", method, LIKELIHOOD_METHODS)
    _check_right_side(op, y)
    if isinstance(op, KernelOperator) and (method == "cholesky" or (method == "auto" and fits(op))):
        return _by_factor(op, y)
    source = resolve_generator(generator)
    form, x = _solved(op, y, rtol, None, rank, progress)
    with torch.no_grad():
        volume = logdet(
            op,
            method=method,
            num_products=num_products,
            num_probes=num_probes,
            generator=source,
            progress=progress,
        )
    estimate, parameters = _joined(form, volume, len(y)), _parameters(op, y)
    if not parameters:
        return estimate
    settings = GradientSettings(method="lanczos", num_probes=num_probes, rank=rank)
    probing = copied(source)

    def gradient() -> dict[str, Estimate]:
        forms = _form_gradient(op, x, parameters, form)
        volumes: dict[str, Estimate] = {}
        if isinstance(op, KernelOperator) and op.parameters:
            volumes = sampled_gradient(op, settings, copied(probing))
        return {name: _halved(part, volumes.get(name)) for name, part in forms.items()}

    return replace(estimate, mean=differentiable(estimate.mean, parameters, gradient))


def _by_factor(op: KernelOperator, y: Tensor) -> Estimate:
    def value(factor: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(factor, y.double()[:, None], upper=False)
        return _density(white.square().sum(), 2 * factor.diagonal().log().sum(), len(y))

    parameters = _parameters(op, y)
    with torch.no_grad():
        mean = value(cholesky(op)).cpu()
    estimate = certain(mean, f"exact, by the factor of a matrix of order {op.shape[0]:,}")
    if not parameters:
        return estimate
    attached = differentiable(mean, parameters, lambda: exact_gradient(op, value, parameters))
    return replace(estimate, mean=attached)


def _density(form: Tensor, volume: Tensor, n: int) -> Tensor:
    return -0.5 * (form + volume + n * math.log(2 * math.pi))


def _joined(form: Estimate, volume: Estimate, n: int) -> Estimate:
    errors = [part.truncation for part in (form, volume) if part.truncation is not None]
    return Estimate(
        mean=_density(form.mean, volume.mean, n),
        stderr=volume.stderr / 2,
        truncation=torch.stack(errors).sum(0) / 2 if errors else None,
        num_products=form.num_products + volume.num_products,
        method=f"{volume.method}; {form.method}",
        status=volume.status if form.status.ok else form.status,
        seed=volume.seed,
    )


def _halved(form: Estimate, volume: Estimate | None) -> Estimate:
    """Minus half the sum of the gradients of both terms."""
    if volume is None:
        return replace(form, mean=-0.5 * form.mean)
    return replace(
        volume,
        mean=-0.5 * (form.mean + volume.mean),
        stderr=volume.stderr / 2,
        truncation=None if volume.truncation is None else volume.truncation / 2,
        samples=None if volume.samples is None else -0.5 * (form.mean + volume.samples),
    )


def _solved(
    op: LinearOperator,
    y: Tensor,
    rtol: float | None,
    max_steps: int | None,
    rank: int,
    progress: bool | Progress,
) -> tuple[Estimate, Tensor]:
    r"""The form and :math:`A^{-1} y`, without a graph."""
    _check_right_side(op, y)
    y = y.detach()
    noise = op.noise if isinstance(op, KernelOperator) else 0.0
    preconditioner = None
    if isinstance(op, KernelOperator) and noise:
        preconditioner = LowRankPreconditioner(op, rank=rank).inverse
        rtol = 1e-3 * math.sqrt(noise / (noise + op.outputscale)) if rtol is None else rtol
    found = solve(
        op, y, rtol=rtol, max_steps=max_steps, preconditioner=preconditioner, progress=progress
    )
    x, residual = found.x[:, None], (y - op.matmat(found.x))[:, None]
    estimate = Estimate(
        mean=(column_dots(y[:, None], x) + column_dots(x, residual))[0].cpu(),
        stderr=torch.zeros((), dtype=torch.float64),
        truncation=column_dots(residual, residual)[0].cpu() / noise if noise else None,
        num_products=found.num_products + 1,
        method=f"conjugate gradients, {len(found.history) - 1} steps",
        status=found.status,
    )
    return estimate, found.x


def _form_gradient(
    op: LinearOperator, x: Tensor, parameters: dict[str, Tensor], form: Estimate
) -> dict[str, Estimate]:
    form.raise_if_failed()
    found = {}
    if isinstance(op, KernelOperator) and op.parameters:
        block = x[:, None]
        slopes = op.slopes(block, block)
        found = {name: certain(-slope[0], form.method) for name, slope in slopes.items()}
    if "y" in parameters:
        found["y"] = certain(2 * x.double().cpu(), form.method)
    return found


def _parameters(op: LinearOperator, y: Tensor) -> dict[str, Tensor]:
    if not torch.is_grad_enabled():
        return {}
    of_kernel = op.parameters if isinstance(op, KernelOperator) else {}
    return of_kernel | ({"y": y} if y.requires_grad else {})


def _check_right_side(op: LinearOperator, y: Tensor) -> None:
    check_tensor("y", y, dtype=op.dtype, device=op.device, rows=op.shape[0])
    check_finite("y", y)
    if y.ndim != 1:
        raise ValueError(f"y must be ({op.shape[0]},), got {tuple(y.shape)}")
