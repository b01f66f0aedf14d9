"""``solve``: conjugate gradients for several right-hand sides; a preconditioner of kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ritz._core.batches import as_tensor
from ritz._core.blocks import column_dots, column_norms, power_of_two
from ritz._core.checks import (
    check_count,
    check_finite,
    check_positive,
    check_rtol,
    check_tensor,
    check_type,
    is_below,
)
from ritz._core.progress import Progress, tracking
from ritz._core.results import AsymmetryError, HasStatus, Status
from ritz._core.storage import storable
from ritz.operators import (
    FunctionOperator,
    KernelOperator,
    LinearOperator,
    OperatorLike,
    as_operator,
)
from ritz.spectra._positive_definite import NotPositiveDefiniteError

Preconditioner = LinearOperator | Callable[[Tensor], Tensor]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(HasStatus):
    r"""Solutions of :math:`A x = b`.

    Attributes:
        x: The solutions, of the shape of ``b``: ``(n,)`` or ``(n, k)``.
        residuals: :math:`\|b - A x\|`, computed from ``x`` at the end, ``(k,)``, float64.
        history: :math:`\|r_j\|` of the recurrence, ``(steps + 1, k)``, float64.
        num_products: Matrix-vector products, including those of ``residuals``.
        status: Whether the residuals reached the tolerance.
    """

    x: Tensor
    residuals: Tensor
    history: Tensor
    num_products: int
    status: Status

    def __str__(self) -> str:
        return (
            f"Solution of shape {tuple(self.x.shape)}, largest residual "
            f"{float(self.residuals.max()):.2g}, {self.num_products} products; {self.status}"
        )


def solve(
    op: OperatorLike,
    b: "Tensor | np.ndarray[Any, Any]",
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    max_steps: int | None = None,
    preconditioner: Preconditioner | None = None,
    initial: Tensor | None = None,
    stop: Callable[[Tensor], bool] | None = None,
    progress: bool | Progress = False,
) -> Solution:
    r"""Solve :math:`A x = b` by conjugate gradients; compare :func:`scipy.sparse.linalg.cg`.

    .. math:: \|b - A x\| \le \max(\text{rtol} \|b\|, \text{atol})

    The columns of ``b`` are solved together, with separate step lengths. A column that has
    converged is no longer multiplied. Cost: one product per step and active column, and one per
    column at the end. Memory: 6 blocks like ``b``, 7 with a preconditioner.

    Args:
        op: Symmetric positive definite :math:`A`, ``(n, n)``.
        b: Right-hand sides, ``(n,)`` or ``(n, k)``, a tensor or NumPy array.
        rtol: Residual to reach, relative to the norm of ``b``. Defaults to the square root of
            machine precision.
        atol: Absolute residual to reach.
        max_steps: Maximum number of steps. Defaults to ``max(n, 1000)``.
        preconditioner: Symmetric positive definite approximation of :math:`A^{-1}`: an operator
            or a function of blocks.
        initial: Start, of the shape of ``b``. Defaults to zero.
        stop: Called after each step with :math:`\frac12 x^\top A x - b^\top x` of every column,
            ``(k,)``. The run ends when it returns ``True``.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        NotPositiveDefiniteError: A direction ``p`` has :math:`p^\top A p \le 0`.

    Reference: Hestenes and Stiefel (1952).
    """
    op = as_operator(op)
    n = op.shape[0]
    b = as_tensor(b)
    check_tensor("b", b, dtype=op.dtype, device=op.device, rows=n)
    check_finite("b", b)
    rtol = torch.finfo(op.dtype).eps ** 0.5 if rtol is None else rtol
    check_rtol(rtol)
    check_positive("atol", atol, zero=True)
    max_steps = max(n, 1000) if max_steps is None else max_steps
    max_steps = check_count("max_steps", max_steps)
    # Norms are sums of squares, which leave the range where b does not: divide each column by a
    # power of two.
    rhs = b if b.ndim == 2 else b[:, None]
    exponents = torch.frexp(rhs.abs().amax(0)).exponent - 1
    unit = torch.ldexp(torch.ones_like(rhs[0]), exponents)
    rhs = rhs / unit
    x, residual, spent = torch.zeros_like(rhs), rhs.clone(), 0
    if initial is not None:
        check_tensor("initial", initial, dtype=op.dtype, device=op.device, rows=n)
        if initial.shape != b.shape:
            raise ValueError(
                f"initial must be of shape {tuple(b.shape)}, as b is, got {tuple(initial.shape)}"
            )
        check_finite("initial", initial)
        x = initial.reshape(rhs.shape) / unit
        residual, spent = rhs - op.matmat(x), rhs.shape[1]
    goal = (rtol * column_norms(rhs)).clamp_min(atol / unit)
    if callable(preconditioner):
        preconditioner = FunctionOperator(
            preconditioner, n=n, dtype=op.dtype, device=op.device, name="preconditioner"
        )
    apply = None if preconditioner is None else as_operator(preconditioner).matmat
    with tracking(progress, "conjugate gradients", max_steps) as bar:
        # By roundoff the residual of the recurrence differs from b - A x, which is reported. So the
        # recurrence stops 10 % below the goal.
        watch = None if stop is None else _Stop(stop, x, rhs, unit)
        history, products = _iterate(op, x, residual, 0.9 * goal, max_steps, apply, bar, watch)
    residuals = column_norms(rhs - op.matmat(x))
    x *= unit
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"the solution leaves the range of {op.dtype}: scale the system")
    return Solution(
        x=x if b.ndim == 2 else x[:, 0],
        residuals=(residuals * unit).cpu(),
        history=(torch.stack(history) * unit).cpu(),
        num_products=spent + products + rhs.shape[1],
        status=_status(residuals, goal, len(history) - 1, watch is not None and watch.reached),
    )


def _iterate(
    op: LinearOperator,
    x: Tensor,
    residual: Tensor,
    goal: Tensor,
    max_steps: int,
    apply: Callable[[Tensor], Tensor] | None,
    bar: Progress,
    stop: "_Stop | None",
) -> tuple[list[Tensor], int]:
    """Improve ``x`` in place; return the residual norms of each step and the number of products."""
    norms = column_norms(residual)
    history, products = [norms], 0
    active = (~(norms <= goal)).nonzero()[:, 0]
    r = residual if len(active) == len(goal) else residual[:, active]
    z = r if apply is None else apply(r)
    direction, rho = z.clone(), column_dots(r, z)
    first: tuple[Tensor, Tensor] | None = None
    for done in range(max_steps):
        if not len(active):
            break
        product = op.matmat(direction)
        products += len(active)
        if first is not None:
            _check_conjugate(*first, direction[:, :1], product[:, :1])
        # alpha = r'z / p'Ap;  x <- x + alpha p;  r <- r - alpha A p
        step = _step_lengths(rho, column_dots(direction, product), direction, done)
        if len(active) == len(goal):
            x.addcmul_(direction, step)
        else:
            x[:, active] = torch.addcmul(x[:, active], direction, step)
        r.addcmul_(product, step, value=-1)
        norms = norms.clone()
        norms[active] = column_norms(r)
        history.append(norms)
        bar.update(done + 1, f"residual {float(norms.max()):.1e}")
        if stop is not None and stop(r, active):
            break
        keep = (~(norms[active] <= goal[active])).nonzero()[:, 0]
        if len(keep) < len(active):
            active, r, direction, rho = active[keep], r[:, keep], direction[:, keep], rho[keep]
            product = product[:, keep]
        # One column shows an unsymmetric matrix as well as all of them do.
        first = (direction[:, :1].clone(), product[:, :1].clone()) if done == 0 else None
        # beta = r_new'z_new / r'z;  p <- z + beta p
        z = r if apply is None else apply(r)
        before, rho = rho, column_dots(r, z)
        torch.addcmul(z, direction, (rho / before).to(r.dtype), out=direction)
    return history, products


@dataclass(eq=False)
class _Stop:
    """The user-defined stopping rule, which is called with the quadratic forms of all columns."""

    rule: Callable[[Tensor], bool]
    x: Tensor
    rhs: Tensor
    unit: Tensor
    reached: bool = False

    def __post_init__(self) -> None:
        self.forms = torch.zeros_like(self.unit, dtype=torch.float64)

    def __call__(self, residual: Tensor, active: Tensor) -> bool:
        # phi(x) = x'Ax / 2 - b'x = -x'(b + r) / 2 with r = b - Ax, in the units of b.
        form = -0.5 * column_dots(self.x[:, active], self.rhs[:, active] + residual)
        self.forms[active] = form.double() * self.unit[active].double().square()
        self.reached = self.rule(self.forms.clone())
        return self.reached


def _step_lengths(rho: Tensor, curvature: Tensor, direction: Tensor, done: int) -> Tensor:
    if not bool(torch.isfinite(curvature).all()):
        if not bool(torch.isfinite(direction).all()):
            raise ValueError(
                f"at step {done + 1} the recurrence left the range of {direction.dtype}: "
                "scale the system, precondition, or use float64"
            )
        raise ValueError(f"op must give finite products; at step {done + 1} it gave NaN or Inf")
    if bool((curvature <= 0).any()):
        worst = int(curvature.argmin())
        value = float(curvature[worst] / column_dots(direction, direction)[worst])
        raise NotPositiveDefiniteError(
            f"op must be positive definite: at step {done + 1} a direction p has "
            f"p'Ap/p'p = {value:.3g}"
        )
    if bool((rho <= 0).any()):
        raise NotPositiveDefiniteError(
            f"preconditioner must be positive definite: r'Mr = {float(rho.min()):.3g}"
        )
    return (rho / curvature).to(direction.dtype)


def _check_conjugate(p: Tensor, image: Tensor, q: Tensor, image_of_q: Tensor) -> None:
    # q is computed such that q'(A p) = 0. If A is symmetric, p'(A q) = 0 as well, to roundoff
    # relative to the larger of |p| |A q| and |q| |A p|: A q may be tiny if A is ill-conditioned.
    # Both images are divided by the same power of two, so that their squares stay in range.
    unit = power_of_two(image)
    image, image_of_q = image / unit, image_of_q / unit
    gap = column_dots(p, image_of_q).abs()
    sizes = [column_dots(p, p) * column_dots(image_of_q, image_of_q)]
    sizes += [column_dots(q, q) * column_dots(image, image)]
    size = torch.stack(sizes).amax(0).sqrt()
    if not is_below(gap, torch.finfo(q.dtype).eps ** 0.5 * size):
        raise AsymmetryError(
            "op must be symmetric and the same in every call: for the first two directions p and "
            f"q, q'(Ap) is 0 but p'(Aq) is {float((gap / size).max()):.2g}, relative to the norms"
        )


def _status(residuals: Tensor, goal: Tensor, steps: int, stopped: bool) -> Status:
    missed = int((~(residuals <= goal)).sum())
    if not missed:
        return Status(outcome="converged", message=f"{len(goal)} systems in {steps} steps")
    if stopped:
        return Status(outcome="completed", message=f"stopped by the caller after {steps} steps")
    return Status(
        outcome="max_steps",
        message=f"{missed} of {len(goal)} systems not solved after {steps} steps; "
        f"largest residual {float(residuals.max()):.1g}",
        advice="raise max_steps or rtol, precondition, or use float64",
    )


# ------------------------------------------------------------------------------------------
# A preconditioner for kernel matrices.

# A pivot below this fraction of the output scale is roundoff, because it is a difference of numbers
# as large as the output scale.
SMALLEST_PIVOT = 1e-10


@final
class LowRankPreconditioner:
    r"""Inverse powers of the approximation :math:`P = L L^\top + \delta I` of a kernel matrix.

    :math:`L` is the Cholesky factor with diagonal pivoting, stopped after ``rank`` columns, and
    :math:`\delta` is the noise plus the mean of the diagonal that the factor leaves. With
    :math:`L = U \Sigma V^\top`, any power of :math:`P` follows. As
    :math:`L L^\top + \sigma^2 I \le K`, the eigenvalues of :math:`P^{-1/2} K P^{-1/2}` are at least
    :math:`\sigma^2/\delta`.

    Cost: ``rank`` columns of the matrix and O(n rank²). Memory: two blocks ``(n, rank)``.

    Args:
        op: The kernel matrix, with noise.
        rank: Number of columns, at most ``n``.

    Attributes:
        pivots: The chosen points, in order.

    Reference: Harbrecht, Peters and Schneider (2012); Gardner et al. (2018), Section 4.1.
    """

    def __init__(self, op: KernelOperator, *, rank: int) -> None:
        check_type("op", op, KernelOperator, "a KernelOperator")
        rank = check_count("rank", rank)
        if not op.noise > 0:
            raise ValueError("noise of the kernel operator must be positive, got 0")
        factor, left, self.pivots = _pivoted_cholesky(op, min(rank, op.shape[0]))
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
        # P^a = delta^a I + U [(Sigma^2 + delta)^a - delta^a] U'
        outside = self._shift**exponent
        change = (self._values**exponent - outside)[:, None] * (self._basis.T @ block)
        return torch.addmm(outside * block, self._basis, change)


@torch.no_grad()
def _pivoted_cholesky(op: KernelOperator, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return columns of the factor of the matrix without noise, the diagonal left, the pivots."""
    factor = torch.zeros(op.shape[0], rank, dtype=op.dtype, device=op.device)
    left = torch.full_like(factor[:, 0], op.outputscale)
    pivots: list[int] = []
    for done in range(rank):
        pivot = int(left.argmax())
        largest = float(left[pivot])
        if largest <= SMALLEST_PIVOT * op.outputscale:
            break
        # L_j = (K e_p - L L' e_p) / sqrt(d_p),  d <- d - L_j^2
        column = op.cross(op.points[pivot : pivot + 1])[:, 0]
        column = column - factor[:, :done] @ factor[pivot, :done]
        factor[:, done] = column / largest**0.5
        left = left - factor[:, done].square()
        pivots.append(pivot)
    return factor[:, : len(pivots)], left, pivots
