"""Gradients of log determinants of kernel matrices, sampled, with their error bars."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Estimate, Status
from ritz.operators.base import LinearOperator
from ritz.operators.kernel import KernelOperator
from ritz.spectra.conjugate import NotPositiveDefiniteError
from ritz.spectra.preconditioning import LowRankPreconditioner
from ritz.spectra.roots import inverse_roots
from ritz.spectra.sampling import stderr

GradientMethod = Literal["auto", "cholesky", "lanczos"]
GRADIENT_METHODS = ("auto", "cholesky", "lanczos")
DENSE = 2**25  # bytes of a matrix that is formed and factored rather than sampled: 2048 rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSettings:
    """How a gradient is sampled; see :func:`logdet_gradient`.

    Attributes:
        method: ``cholesky``, ``lanczos`` or ``auto``.
        num_probes: Random vectors.
        rtol: Relative error of each inverse root.
        num_steps: Most steps for one.
        rank: Of the preconditioner.
    """

    method: GradientMethod = "auto"
    num_probes: int = 16
    rtol: float = 1e-3
    num_steps: int = 1000
    rank: int = 200

    def __post_init__(self) -> None:
        check_choice("method", self.method, GRADIENT_METHODS)
        check_count("num_probes", self.num_probes, low=2)
        check_range("rtol", self.rtol, low=0.0, high=1.0)
        check_count("num_steps", self.num_steps)
        check_count("rank", self.rank)


def logdet_gradient(
    op: KernelOperator,
    *,
    method: GradientMethod = "auto",
    num_probes: int = 16,
    rtol: float = 1e-3,
    num_steps: int = 1000,
    rank: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> dict[str, Estimate]:
    r"""Return :math:`\partial \log \det K / \partial \theta` for each parameter of a kernel matrix.

    .. math:: \operatorname{tr} K^{-1} \partial K = \mathbb{E}[u^\top (\partial K) u],
        \quad u = K^{-1/2} z

    with random signs :math:`z`. The usual :math:`z^\top K^{-1} (\partial K) z` has the same mean,
    but the variance of a matrix far from symmetric: seventy times the error where the condition
    number is 4e10. :math:`K^{-1/2}` is applied by Lanczos runs with a low-rank
    preconditioner, which changes the steps and not the distribution of :math:`u`. ``cholesky``
    forms and factors the matrix: exact, and what ``auto`` does up to 2048 rows in float64.

    Cost: for each probe the steps of conjugate gradients, and a product for each length scale.
    Memory: as many vectors as steps for each probe of a block, and two blocks ``(n, rank)``.

    Args:
        op: Kernel matrix, some of whose parameters require gradients.
        method: See above.
        num_probes: Random vectors; the error falls as the root.
        rtol: Relative error of :math:`u` in the norm of :math:`K` to reach, which twice is about
            the relative error of the gradient, and its ``truncation``.
        num_steps: Most steps.
        rank: Of the preconditioner.
        generator: Source of the vectors.
        progress: Whether to show a bar, or what to tell.

    Returns:
        An estimate for each of ``op.parameters``, of the shape of the parameter.

    Raises:
        NotPositiveDefiniteError: A pivot or a Ritz value is not positive.

    Reference: Gardner et al. (2018), Section 4, for the usual estimate.
    """
    settings = GradientSettings(
        method=method, num_probes=num_probes, rtol=rtol, num_steps=num_steps, rank=rank
    )
    return sampled_gradient(op, settings, resolve_generator(generator), progress)


def sampled_gradient(
    op: KernelOperator,
    settings: GradientSettings,
    generator: torch.Generator,
    progress: bool | Progress = False,
) -> dict[str, Estimate]:
    """The gradient of :func:`logdet_gradient`, with its arguments in one."""
    if not isinstance(op, KernelOperator):
        raise TypeError(f"op must be a KernelOperator, got {type(op).__name__}")
    if not op.parameters:
        raise ValueError(f"no parameter of {op!r} requires a gradient")
    if settings.method == "cholesky" or (settings.method == "auto" and fits(op)):
        return exact_gradient(op, lambda factor: 2 * factor.diagonal().log().sum())
    return _sampled(op, settings, generator, progress)


def attach_gradient(
    estimate: Estimate,
    op: LinearOperator,
    *,
    settings: GradientSettings | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return a log determinant whose mean has a graph to the parameters of a kernel operator.

    The gradient is sampled in the backward pass, from the state the generator has now, and costs
    nothing before. Where there is no parameter to differentiate, the estimate itself is returned.

    Args:
        estimate: Of the log determinant.
        op: What it is of.
        settings: How to sample.
        generator: Source of the vectors.
    """
    if not (isinstance(op, KernelOperator) and op.parameters and torch.is_grad_enabled()):
        return estimate
    settings = settings or GradientSettings()
    source = copied(resolve_generator(generator))
    mean = differentiable(
        estimate.mean.detach(),
        op.parameters,
        lambda: sampled_gradient(op, settings, copied(source)),
    )
    return replace(estimate, mean=mean)


def differentiable(
    value: Tensor, parameters: dict[str, Tensor], gradient: Callable[[], dict[str, Estimate]]
) -> Tensor:
    """Return ``value``, scalar, with a graph to parameters whose gradient is computed when asked.

    A gradient that was not computed as accurately as asked for raises in the backward pass.
    """
    attached: Tensor = _Attached.apply(value, gradient, list(parameters), *parameters.values())  # type: ignore[no-untyped-call]
    return attached


def backward_gradient(value: Tensor | Estimate) -> dict[str, Estimate]:
    """Return the gradient, with its error bars, that the last backward pass through it found.

    Args:
        value: A differentiable log determinant or likelihood, itself and not a function of it.
    """
    node = value.mean.grad_fn if isinstance(value, Estimate) else value.grad_fn
    found: dict[str, Estimate] | None = getattr(node, "found", None)
    if found is None:
        raise ValueError("value must be one that backward() went through, got one without")
    return found


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Any, names: Any, *parameters: Tensor) -> Tensor:
        ctx.gradient, ctx.names, ctx.parameters = gradient, names, parameters
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.found = ctx.gradient()
        for estimate in ctx.found.values():
            estimate.raise_if_failed()
        pairs = zip(ctx.names, ctx.parameters, strict=True)
        gradients = [(upstream.cpu() * ctx.found[name].mean).to(like) for name, like in pairs]
        return None, None, None, *gradients


def fits(op: KernelOperator) -> bool:
    """Whether the matrix is so small that it is formed and factored."""
    return op.shape[0] ** 2 * 8 <= DENSE


def exact_gradient(
    op: KernelOperator,
    function: Callable[[Tensor], Tensor],
    parameters: dict[str, Tensor] | None = None,
) -> dict[str, Estimate]:
    """The gradient of a function of the Cholesky factor, by automatic differentiation."""
    parameters = op.parameters if parameters is None else parameters
    with torch.enable_grad():
        value = function(cholesky(op))
    found = torch.autograd.grad(value, tuple(parameters.values()))
    how = f"exact, by the factor of a matrix of order {op.shape[0]:,}"
    return {
        name: certain(mean.double().cpu(), how)
        for name, mean in zip(parameters, found, strict=True)
    }


def certain(mean: Tensor, how: str) -> Estimate:
    """An estimate that nothing was sampled for."""
    return Estimate(
        mean=mean,
        stderr=torch.zeros_like(mean),
        num_products=0,
        method=how,
        status=Status(outcome="completed", message="no sampling"),
    )


def cholesky(op: KernelOperator) -> Tensor:
    """The lower factor of a kernel matrix, ``(n, n)``, float64, with a graph to the parameters."""
    matrix = op.matrix().double()
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        smallest = float(torch.linalg.eigvalsh(matrix.detach())[0])
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got an eigenvalue of {smallest:.6g}"
        )
    return factor


def _sampled(
    op: KernelOperator,
    settings: GradientSettings,
    generator: torch.Generator,
    progress: bool | Progress,
) -> dict[str, Estimate]:
    # Without noise nothing is known of what the low rank leaves.
    root = LowRankPreconditioner(op, rank=settings.rank).inverse_root if op.noise else None
    samples: dict[str, list[Tensor]] = {name: [] for name in op.parameters}
    residuals, products, statuses = [], 0, []
    with tracking(progress, "gradient", settings.num_probes) as bar:
        for start in range(0, settings.num_probes, op.block_size):
            shape = (op.shape[0], min(op.block_size, settings.num_probes - start))
            block = probes(shape, generator=generator, dtype=op.dtype, device=op.device)
            roots = inverse_roots(
                op, block, rtol=settings.rtol, num_steps=settings.num_steps, root=root
            )
            for name, slope in op.slopes(roots.vectors, roots.vectors).items():
                samples[name].append(slope)
            residuals.append(roots.residuals)
            statuses.append(roots.status)
            products += roots.num_products
            bar.update(start + shape[1])
    failed = [status for status in statuses if not status.ok]
    worst = 2 * float(torch.cat(residuals).max())
    status = failed[0] if failed else statuses[0]
    return {
        name: _estimate(torch.cat(parts), worst, products, status, generator)
        for name, parts in samples.items()
    }


def _estimate(
    samples: Tensor, relative: float, products: int, status: Status, generator: torch.Generator
) -> Estimate:
    mean = samples.mean(0)
    return Estimate(
        mean=mean,
        stderr=stderr(samples),
        truncation=relative * mean.abs(),
        samples=samples,
        num_products=products,
        method=f"{len(samples)} inverse roots by Lanczos",
        status=status,
        seed=generator.initial_seed(),
    )


def copied(generator: torch.Generator) -> torch.Generator:
    """A generator that goes on as this one would."""
    copy = torch.Generator(device=generator.device)
    copy.manual_seed(generator.initial_seed())
    copy.set_state(generator.get_state())
    return copy
