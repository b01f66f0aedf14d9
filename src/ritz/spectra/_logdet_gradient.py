"""``logdet_gradient``: gradients of log determinants of kernel matrices, with error bars."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ritz._core.blocks import power_of_two
from ritz._core.checks import check_choice, check_count, check_rtol, check_type, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import draw_probes, resolve_generator
from ritz._core.results import Estimate, Status
from ritz._core.sampling import ROUNDOFF, doubt_equal_samples
from ritz.operators import FunctionOperator, KernelOperator, LinearOperator
from ritz.spectra._cg import LowRankPreconditioner
from ritz.spectra._lanczos import TUNING as LANCZOS
from ritz.spectra._lanczos import Recurrence, step
from ritz.spectra._positive_definite import (
    cholesky_factor,
    largest_entry,
    not_positive,
    roundoff_probes,
)

GradientMethod = Literal["auto", "cholesky", "lanczos"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the gradients."""

    # A matrix of up to 32 MiB, which is 2048 rows in float64, is factored: a second on one thread.
    dense: int = 2**25


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# Vectors whose covariance is the inverse of a matrix, by the Lanczos recurrence.

Root = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Roots:
    r"""Vectors :math:`u = R (R A R)^{-1/2} z`.

    Attributes:
        vectors: :math:`u`, ``(n, k)``.
        residuals: Bounds of the relative error, ``(k,)``.
        num_products: Matrix-vector products.
        status: Whether the bounds reached the tolerance.
    """

    vectors: Tensor
    residuals: Tensor
    num_products: int
    status: Status


def inverse_roots(
    op: LinearOperator,
    block: Tensor,
    *,
    rtol: float,
    max_steps: int,
    root: Root | None = None,
) -> Roots:
    r"""Return :math:`u = R (R A R)^{-1/2} z`, whose covariance is :math:`A^{-1}` for white z.

    :math:`R` may be any symmetric matrix; one close to :math:`A^{-1/2}` saves steps. After
    :math:`m` steps with basis :math:`V` and projection :math:`T`,
    :math:`u_m = \|z\| R V T^{-1/2} e_1`. The residual :math:`\rho_m` of conjugate gradients bounds
    the error, :math:`\|u_m - u\|_A \le \rho_m` with :math:`\|u\|_A = \|z\|`, because
    :math:`x^{-1/2}` is a mean of :math:`(x + t)^{-1}` over :math:`t > 0` and the residual falls
    with the shift :math:`t`.

    Cost: one product per step and vector. Memory: ``k`` times as many vectors as steps.

    Args:
        op: Positive definite :math:`A`, ``(n, n)``.
        block: :math:`z`, ``(n, k)``.
        rtol: Relative error to reach in the norm of :math:`A`.
        max_steps: Maximum number of steps.
        root: :math:`R`, a function of blocks. Defaults to the identity.

    Reference: Ilić, Turner and Simpson (2010); Pleiss et al. (2020).
    """
    n, system = op.shape[0], op
    if root is not None:
        system = FunctionOperator(
            lambda x: root(op.matmat(root(x))), n=n, dtype=op.dtype, device=op.device, name="op"
        )
    limit = min(max_steps, n)
    capacity = min(limit, LANCZOS.growth) + 1
    runs = [Recurrence(z.contiguous(), capacity=capacity, mode="full") for z in block.T]
    pivots, residuals = [0.0] * len(runs), [1.0] * len(runs)
    for _ in range(limit):
        active = [k for k, residual in enumerate(residuals) if not is_below(residual, rtol)]
        if not active:
            break
        step(system, [runs[k] for k in active])
        for k in active:
            run = runs[k]
            # T = L D L' with pivots d_j = alpha_j - beta_{j-1}^2 / d_{j-1}
            before = run.betas[-2] * (run.betas[-2] / pivots[k]) if run.size > 1 else 0.0
            pivots[k] = run.alphas[-1] - before
            if not pivots[k] > 0:
                raise not_positive("a Ritz value", float(torch.linalg.eigvalsh(run.projected())[0]))
            # The residual of conjugate gradients is prod_j beta_j / d_j.
            residuals[k] *= run.betas[-1] / pivots[k]
    vectors = torch.stack([_root(run) for run in runs], dim=1) * block.norm(dim=0)
    errors, steps = torch.tensor(residuals, dtype=torch.float64), max(run.size for run in runs)
    status = Status(outcome="converged", message=f"{len(runs)} roots in {steps} steps")
    if not is_below(errors, rtol):
        status = Status(
            outcome="max_steps",
            message=f"{int((~(errors <= rtol)).sum())} of {len(runs)} roots not found after "
            f"{steps} steps; relative error {float(errors.max()):.2g}, above rtol {rtol:.2g}",
            advice="increase max_steps, rank or rtol, or use float64",
        )
    return Roots(
        vectors=vectors if root is None else root(vectors),
        residuals=errors,
        num_products=sum(run.size for run in runs),
        status=status,
    )


def _root(run: Recurrence) -> Tensor:
    # V T^{-1/2} e_1
    values, vectors = torch.linalg.eigh(run.projected())
    coefficients = vectors @ (vectors[0] * values.clamp_min(0.0) ** -0.5)
    rows = run.basis.rows[: len(coefficients)]
    combined: Tensor = coefficients.to(rows) @ rows
    return combined


# ------------------------------------------------------------------------------------------
# Gradients of log determinants.


def logdet_gradient(
    op: KernelOperator,
    *,
    method: GradientMethod = "auto",
    num_probes: int = 16,
    rtol: float = 1e-3,
    max_steps: int = 1000,
    rank: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> dict[str, Estimate]:
    r"""Estimate :math:`\partial \log \det K / \partial \theta` for the parameters of a kernel.

    .. math:: \operatorname{tr} K^{-1} \partial K = \mathbb{E}[u^\top (\partial K) u],
        \quad u = K^{-1/2} z

    with random signs :math:`z`. The usual estimator :math:`z^\top K^{-1} (\partial K) z` has the
    same mean and a larger error: 70 times larger at a condition number of 4e10. Lanczos runs with a
    low-rank preconditioner apply :math:`K^{-1/2}`. The preconditioner changes the number of steps,
    but not the distribution of :math:`u`. ``cholesky`` forms and factors the matrix in float64,
    which is exact to roundoff; ``auto`` does so up to 2048 rows.

    Cost: for each probe the steps of conjugate gradients, and a product for each length scale.
    Memory: ``block_size`` times as many vectors as steps, and ``2 rank`` vectors.

    Args:
        op: Kernel matrix, some of whose parameters require gradients.
        method: See above.
        num_probes: Number of random vectors.
        rtol: Relative error of :math:`u` to reach in the norm of :math:`K`. Twice that is about the
            relative error of the gradient, and its ``truncation``.
        max_steps: Maximum number of steps.
        rank: Rank of the preconditioner.
        generator: Source of the vectors. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Returns:
        An estimate for each of ``op.parameters``, of the shape of the parameter.

    Raises:
        NotPositiveDefiniteError: A pivot or a Ritz value is not positive.

    Reference: Gardner et al. (2018), Section 4, for the usual estimate.
    """
    check_choice("method", method, get_args(GradientMethod))
    num_probes = check_count("num_probes", num_probes, low=2)
    check_rtol(rtol)
    max_steps = check_count("max_steps", max_steps)
    rank = check_count("rank", rank)
    generator = resolve_generator(generator)
    check_type("op", op, KernelOperator, "a KernelOperator")
    if not op.parameters:
        raise ValueError(f"no parameter of {op!r} requires a gradient")
    if method == "cholesky" or (method == "auto" and fits(op)):
        op = op.double()
        return factor_gradient(op, cholesky_factor(op.matrix().detach()))
    # Without noise there is no lower bound for the complement of the low-rank part.
    root = LowRankPreconditioner(op, rank=rank).inverse_root if op.noise else None
    samples: dict[str, list[Tensor]] = {name: [] for name in op.parameters}
    blocks: list[Roots] = []
    with tracking(progress, "gradient", num_probes) as bar:
        for start in range(0, num_probes, op.block_size):
            width = min(op.block_size, num_probes - start)
            block = draw_probes(op, width, generator=generator)
            blocks.append(inverse_roots(op, block, rtol=rtol, max_steps=max_steps, root=root))
            # u'(dK)u for each parameter, one row per probe
            for name, slope in op.slopes(blocks[-1].vectors).items():
                samples[name].append(slope)
            bar.update(start + width)
    # |u'(dK)u| changes by 2 |du| |dK u| to first order.
    worst = 2 * float(torch.cat([roots.residuals for roots in blocks]).max())
    failed = [roots.status for roots in blocks if not roots.status.ok]
    gradient = {}
    for name, parts in samples.items():
        values = torch.cat(parts)
        size = values.abs().mean(0)  # the terms of u'(dK)u may cancel, and then the mean is small
        estimate = Estimate.of(
            values,
            truncation=ROUNDOFF * torch.finfo(op.dtype).eps * size,
            num_products=sum(roots.num_products for roots in blocks),
            method=f"{len(values)} inverse roots by Lanczos",
            status=failed[0] if failed else blocks[0].status,
            seed=generator.initial_seed(),
        )
        estimate = doubt_equal_samples(estimate)
        truncation = estimate.truncation + worst * size
        gradient[name] = replace(estimate, truncation=truncation).with_status(None)
    return gradient


def differentiable(
    estimate: Estimate, parameters: dict[str, Tensor], gradient: Callable[[], dict[str, Estimate]]
) -> Estimate:
    """Return a scalar estimate whose mean is differentiable in parameters.

    The backward pass calls ``gradient``, and raises if one of its estimates has not converged.
    """
    if not (parameters and torch.is_grad_enabled()):
        return estimate
    value, names = estimate.mean.detach(), list(parameters)
    attached = _Attached.apply(value, gradient, names, *parameters.values())  # type: ignore[no-untyped-call]
    return replace(estimate, mean=attached)


def backward_gradient(value: Tensor | Estimate) -> dict[str, Estimate]:
    """Return the gradient, with error bars, that the last backward pass computed.

    Args:
        value: A differentiable log determinant or likelihood itself, not a function of it.
    """
    node = value.mean.grad_fn if isinstance(value, Estimate) else value.grad_fn
    estimates: dict[str, Estimate] | None = getattr(node, "estimates", None)
    if estimates is None:
        raise ValueError("value has no gradient: call value.backward() first")
    return estimates


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Any, names: Any, *parameters: Tensor) -> Tensor:
        ctx.gradient, ctx.names, ctx.parameters = gradient, names, parameters
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.estimates = ctx.gradient()
        for estimate in ctx.estimates.values():
            estimate.raise_if_failed()
        pairs = zip(ctx.names, ctx.parameters, strict=True)
        gradients = [(upstream.cpu() * ctx.estimates[name].mean).to(like) for name, like in pairs]
        return None, None, None, *gradients


def fits(op: KernelOperator) -> bool:
    """Return whether the matrix is small enough to be formed and factored."""
    return op.shape[0] ** 2 * 8 <= TUNING.dense


def factor_gradient(op: KernelOperator, factor: Tensor) -> dict[str, Estimate]:
    """Return the gradient of the log determinant from the Cholesky factor of the matrix.

    Args:
        op: The kernel matrix, in float64.
        factor: Its lower Cholesky factor.
    """
    # K^{-1} = U U' with U = L^{-T}, so tr K^{-1} dK = sum_l u_l' dK u_l
    eye = torch.eye(op.shape[0], dtype=op.dtype, device=op.device)
    slopes = op.slopes(torch.linalg.solve_triangular(factor.mT, eye, upper=True))
    # K + E has the gradient tr K^{-1} dK - tr K^{-1} E K^{-1} dK. For E = z z' with random z, whose
    # entries have the size of one, this changes by u' dK u with u = K^{-1} z. With dK + z z' it
    # changes by z' K^{-1} z.
    probes, scaled, unit = roundoff_probes(op, lambda block: torch.cholesky_solve(block, factor))
    moved, forms = op.slopes(scaled), (probes * scaled).sum(0).cpu()
    largest, sizes, gradient = largest_entry(op), slope_sizes(op), {}
    for name, terms in slopes.items():
        # The products of `scaled` have the square of the largest entry as a factor, forms have it.
        shift = root_mean_square(moved[name]) + sizes[name] * root_mean_square(forms)
        gradient[name] = exact_by_factor(op, terms.sum(0), truncation=unit * shift / largest)
    return gradient


def root_mean_square(samples: Tensor) -> Tensor:
    """Return the root mean square over the first axis, without overflow or underflow."""
    return samples.div(unit := power_of_two(samples)).square().mean(0).sqrt() * unit


def slope_sizes(op: KernelOperator) -> dict[str, float | Tensor]:
    """Return the largest rounded entry of the derivative of the matrix in each parameter."""
    # The derivative in the noise is the identity, without roundoff. For all kernels
    # l |dk/dl| = r |k'(r)| < 1.
    scales = op.outputscale / op.lengthscale.cpu()
    return {"noise": 0.0, "outputscale": 1.0, "lengthscale": scales}


def exact_by_factor(op: KernelOperator, value: Tensor, *, truncation: Tensor) -> Estimate:
    """Return a value that was computed from a Cholesky factor, with its roundoff and status."""
    method = f"exact, by the factor of a matrix of order {op.shape[0]:,}"
    estimate = Estimate.exact(value.cpu(), method=method, truncation=truncation.cpu())
    return estimate.with_status(None, "increase the noise: the matrix is singular to roundoff")
