"""Gradients of log determinants of kernel matrices, sampled, with error bars."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Estimate, Status, stderr
from ritz.operators import FunctionOperator, KernelOperator, LinearOperator
from ritz.spectra._cg import NotPositiveDefiniteError
from ritz.spectra._lanczos import Recurrence, step

# ------------------------------------------------------------------------------------------
# Low-rank approximations of kernel matrices, for solving systems with them.

EXHAUSTED = 1e-10  # share of the output scale below which a pivot is roundoff


@final
class LowRankPreconditioner:
    r"""The approximation :math:`P = L L^\top + \delta I` of a kernel matrix, inverted.

    :math:`L` is the Cholesky factor with the largest diagonal entry that is left as pivot, stopped
    after ``rank`` columns; :math:`\delta` is the noise and the mean of the diagonal it leaves.
    With :math:`L = U \Sigma V^\top` every power of :math:`P` is known. As
    :math:`L L^\top + \sigma^2 I \le K`, no eigenvalue of :math:`P^{-1/2} K P^{-1/2}` is below
    :math:`\sigma^2/\delta`.

    Cost: ``rank`` columns of the matrix and O(n rank²). Memory: two blocks ``(n, rank)``.

    Args:
        op: The kernel matrix, with noise.
        rank: Columns, at most ``n``.

    Attributes:
        pivots: The points that were chosen, in their order.

    Reference: Harbrecht, Peters and Schneider (2012); Gardner et al. (2018), Section 4.1.
    """

    def __init__(self, op: KernelOperator, *, rank: int) -> None:
        check_count("rank", rank)
        if not op.noise > 0:
            raise ValueError("noise of the kernel operator must be positive, got 0")
        factor, left, self.pivots = _pivoted(op, min(rank, op.shape[0]))
        self._basis, values, _ = torch.linalg.svd(factor, full_matrices=False)
        self._shift = op.noise + max(0.0, float(left.mean()))
        self._values = values.square() + self._shift

    def inverse(self, block: Tensor) -> Tensor:
        r"""Return :math:`P^{-1} X`, like ``block`` ``(n, k)``."""
        return self._power(block, -1.0)

    def inverse_root(self, block: Tensor) -> Tensor:
        r"""Return :math:`P^{-1/2} X`, like ``block`` ``(n, k)``."""
        return self._power(block, -0.5)

    def _power(self, block: Tensor, exponent: float) -> Tensor:
        outside = self._shift**exponent
        change = (self._values**exponent - outside)[:, None] * (self._basis.T @ block)
        return torch.addmm(outside * block, self._basis, change)


@torch.no_grad()
def _pivoted(op: KernelOperator, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Columns of the factor of the matrix without noise, the diagonal left, and the pivots."""
    n = op.shape[0]
    factor = torch.zeros(n, rank, dtype=op.dtype, device=op.device)
    left = torch.full((n,), op.outputscale, dtype=op.dtype, device=op.device)
    pivots: list[int] = []
    for done in range(rank):
        pivot = int(left.argmax())
        largest = float(left[pivot])
        if largest <= EXHAUSTED * op.outputscale:
            break
        column = op.cross(op.points[pivot : pivot + 1])[:, 0]
        column = column - factor[:, :done] @ factor[pivot, :done]
        factor[:, done] = column / largest**0.5
        left = left - factor[:, done].square()
        pivots.append(pivot)
    return factor[:, : len(pivots)], left, pivots


# ------------------------------------------------------------------------------------------
# Vectors with the inverse of a matrix as their covariance, by the Lanczos recurrence.

Root = Callable[[Tensor], Tensor]
GROWTH = 64  # rows by which a basis grows


@dataclass(frozen=True, slots=True)
class Roots:
    r"""Vectors :math:`u = R (R A R)^{-1/2} z`.

    Attributes:
        vectors: :math:`u`, ``(n, k)``.
        residuals: Bounds of the relative error, ``(k,)``.
        num_products: Products with single vectors.
        status: Whether the bounds are as small as asked for.
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
    bar: Progress | None = None,
) -> Roots:
    r"""Return :math:`u = R (R A R)^{-1/2} z`, whose covariance is :math:`A^{-1}` for white z.

    Any symmetric :math:`R` will do, and a good one saves steps. After :math:`m` steps with basis
    :math:`V` and projection :math:`T`, :math:`u_m = \|z\| R V T^{-1/2} e_1`. As
    :math:`x^{-1/2}` is a mean of :math:`(x + t)^{-1}` over :math:`t > 0`, and the residual
    :math:`\rho_m` of conjugate gradients only falls with the shift,
    :math:`\|u_m - u\|_A \le \rho_m`, where :math:`\|u\|_A = \|z\|`: the rule to stop is that of
    conjugate gradients, and a bound.

    Cost: one product a step and vector. Memory: a basis of as many vectors as steps for each.

    Args:
        op: Positive definite :math:`A`, ``(n, n)``.
        block: :math:`z`, ``(n, k)``.
        rtol: Relative error to reach in the norm of :math:`A`.
        max_steps: Most steps.
        root: :math:`R`, a function of blocks; the identity by default.
        bar: Told of steps.

    Reference: Ilić, Turner and Simpson (2010); Pleiss et al. (2020).
    """
    system = op if root is None else _preconditioned(op, root)
    limit = min(max_steps, op.shape[0])
    runs = [_Run(start.contiguous(), limit) for start in block.T]
    for done in range(limit):
        active = [run for run in runs if run.residual > rtol]
        if not active:
            break
        for run in active:
            run.make_room()
        step(system, [run.recurrence for run in active])
        for run in active:
            run.follow()
        if bar is not None:
            bar.update(done + 1, f"residual {max(run.residual for run in runs):.1e}")
    vectors = torch.stack([run.combination() for run in runs], dim=1) * block.norm(dim=0)
    residuals = torch.tensor([run.residual for run in runs], dtype=torch.float64)
    return Roots(
        vectors=vectors if root is None else root(vectors),
        residuals=residuals,
        num_products=sum(run.recurrence.size for run in runs),
        status=_status(residuals, rtol, max(run.recurrence.size for run in runs)),
    )


@final
class _Run:
    """A recurrence, and the residual that conjugate gradients would have."""

    def __init__(self, start: Tensor, limit: int) -> None:
        self.recurrence = Recurrence(start, capacity=min(limit, GROWTH) + 1, mode="full")
        self.residual = 1.0
        self._pivot = 0.0

    def make_room(self) -> None:
        """Lengthen a basis that is full: nobody knows beforehand how many steps it takes."""
        basis = self.recurrence.basis
        if basis.size == len(basis.rows):
            more = basis.rows.new_empty(GROWTH, basis.rows.shape[1])
            basis.rows = torch.cat([basis.rows, more])

    def follow(self) -> None:
        # T = L D L': each step adds a pivot, and the residual is the product of beta / pivot.
        run = self.recurrence
        before = run.betas[-2] ** 2 / self._pivot if run.size > 1 else 0.0
        self._pivot = run.alphas[-1] - before
        if not self._pivot > 0:
            smallest = float(torch.linalg.eigvalsh(run.projected())[0])
            raise NotPositiveDefiniteError(
                f"op must be positive definite, got a Ritz value of {smallest:.6g}"
            )
        self.residual *= run.betas[-1] / self._pivot

    def combination(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self.recurrence.projected())
        coefficients = vectors @ (vectors[0] * values.clamp_min(0.0) ** -0.5)
        rows = self.recurrence.basis.rows[: len(coefficients)]
        combined: Tensor = coefficients.to(rows) @ rows
        return combined


def _preconditioned(op: LinearOperator, root: Root) -> LinearOperator:
    return FunctionOperator(
        lambda block: root(op.matmat(root(block))),
        n=op.shape[0],
        dtype=op.dtype,
        device=op.device,
        name="op",
    )


def _status(residuals: Tensor, rtol: float, steps: int) -> Status:
    worst = float(residuals.max())
    if worst <= rtol:
        return Status(outcome="converged", message=f"{len(residuals)} roots in {steps} steps")
    return Status(
        outcome="max_steps",
        message=f"{int((residuals > rtol).sum())} of {len(residuals)} roots not found after "
        f"{steps} steps; relative error {worst:.2g} where {rtol:.2g} was asked for",
        advice="raise max_steps, rank or rtol, or use float64",
    )


# ------------------------------------------------------------------------------------------
# Gradients of log determinants of kernel matrices, sampled, with their error bars.

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
        max_steps: Most steps for one.
        rank: Of the preconditioner.
    """

    method: GradientMethod = "auto"
    num_probes: int = 16
    rtol: float = 1e-3
    max_steps: int = 1000
    rank: int = 200

    def __post_init__(self) -> None:
        check_choice("method", self.method, GRADIENT_METHODS)
        check_count("num_probes", self.num_probes, low=2)
        check_range("rtol", self.rtol, low=0.0, high=1.0)
        check_count("max_steps", self.max_steps)
        check_count("rank", self.rank)


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
        max_steps: Most steps.
        rank: Of the preconditioner.
        generator: Source of the vectors.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Returns:
        An estimate for each of ``op.parameters``, of the shape of the parameter.

    Raises:
        NotPositiveDefiniteError: A pivot or a Ritz value is not positive.

    Reference: Gardner et al. (2018), Section 4, for the usual estimate.
    """
    settings = GradientSettings(
        method=method, num_probes=num_probes, rtol=rtol, max_steps=max_steps, rank=rank
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
                op, block, rtol=settings.rtol, max_steps=settings.max_steps, root=root
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
