"""Vectors with the inverse of a matrix as their covariance, by the Lanczos recurrence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ritz._core.progress import Progress
from ritz._core.results import Status
from ritz.operators.base import LinearOperator
from ritz.operators.function import FunctionOperator
from ritz.spectra.conjugate import NotPositiveDefiniteError
from ritz.spectra.recurrence import Recurrence, step

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
    num_steps: int,
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
        num_steps: Most steps.
        root: :math:`R`, a function of blocks; the identity by default.
        bar: Told of steps.

    Reference: Ilić, Turner and Simpson (2010); Pleiss et al. (2020).
    """
    system = op if root is None else _preconditioned(op, root)
    limit = min(num_steps, op.shape[0])
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
        advice="raise num_steps, rank or rtol, or use float64",
    )
