"""The Lanczos recurrence: from the product with the newest vector to the next vector."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ritz._core.distributed import Group
from ritz._core.progress import Progress
from ritz.operators.base import LinearOperator
from ritz.spectra.basis import Basis, Placement

Reorthogonalization = Literal["full", "partial", "none"]
REORTHOGONALIZATIONS = ("full", "partial", "none")
Array = np.ndarray[Any, np.dtype[np.float64]]

# A remainder below this many units of roundoff in the norm of the matrix is nothing but roundoff.
BREAKDOWN = 10.0
# Roundoff in the residual of a Ritz pair, in units of eps ||A||: products, assembly, norm.
ROUNDOFF = 8.0


_REMEMBERED = ("kept", "couplings", "alphas", "betas", "removed", "scale", "again", "newest")


class AsymmetryError(ValueError):
    """Products that no symmetric matrix gives."""


class Recurrence:
    r"""One run: basis :math:`V`, diagonal :math:`\alpha`, off-diagonal :math:`\beta`.

    .. math:: \beta_j v_{j+1} = A v_j - \alpha_j v_j - \beta_{j-1} v_{j-1}

    ``full`` subtracts the whole basis twice, as matrix products: four reads of it a step.
    ``partial`` (Simon 1984) follows a bound :math:`\omega` of the lost orthogonality and subtracts
    the basis once, in two consecutive steps, when it passes the root of machine precision, which
    keeps the tridiagonal matrix exact to roundoff. ``none`` keeps two vectors only; converged
    values then return as ghosts, though quadrature stays accurate (Greenbaum 1989).

    After a thick restart (Wu and Simon 2000) the first rows of the basis are Ritz vectors with
    values ``kept`` that couple to the next row by ``couplings``.
    """

    def __init__(
        self,
        start: Tensor,
        *,
        capacity: int,
        mode: Reorthogonalization,
        placement: Placement = "device",
        group: Group | None = None,
    ) -> None:
        self.mode = mode
        self.eps = torch.finfo(start.dtype).eps
        self.basis = Basis(
            capacity if mode != "none" else 2, start, placement=placement, group=group
        )
        self.kept = np.empty(0)
        self.couplings = np.empty(0)
        self.newest = 0  # index of the row to be multiplied
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.scale = 0.0  # the norm of the matrix, as far as seen
        self.omega = (np.empty(0), np.empty(0))  # bounds for the last two rows ("partial")
        self.again = False  # whether the next step must be reorthogonalised too ("partial")
        self.removed: list[
            float
        ] = []  # what re-orthogonalising took that T does not know ("partial")
        self.begin(start)

    @property
    def size(self) -> int:
        """Order of the projected matrix."""
        return len(self.kept) + len(self.alphas)

    @property
    def exhausted(self) -> bool:
        """Whether the space is invariant: nothing follows."""
        return bool(self.betas) and self.betas[-1] == 0

    def begin(self, start: Tensor) -> None:
        """Take ``start``, made orthonormal to the basis, as the next vector."""
        vector = self.basis.local(start).clone()
        for _ in range(2):
            vector /= self.basis.norm(vector)
            if self.basis.size:
                self.basis.subtract(vector, self.basis.project(vector))
        self._push(vector, self.basis.norm(vector))
        bounds = np.full(self.basis.size, self.eps)
        bounds[-1] = 1.0
        self.omega = (bounds[1:], bounds)

    def vector(self) -> Tensor:
        """The newest vector ``(n,)``, to be multiplied."""
        return self.basis.whole(self.basis.rows[self.newest])

    def absorb(self, product: Tensor, *, last: bool = False) -> None:
        """Take in the product ``(n,)`` with the newest vector, overwriting it.

        Args:
            product: Of the operator with :meth:`vector`.
            last: Do not store the next vector, which nobody will multiply.
        """
        vector = self.basis.local(product)
        alpha = (
            self._orthogonalize_full(vector) if self.mode == "full" else self._three_terms(vector)
        )
        beta = self.basis.norm(vector)
        self.scale = max(self.scale, abs(alpha) + (self.betas[-1] if self.betas else 0.0) + beta)
        self.alphas.append(alpha)
        if self.mode == "partial":
            beta = self._orthogonalize_partial(vector, beta)
        if beta <= BREAKDOWN * self.eps * self.scale:
            self.betas.append(0.0)
            return
        self.betas.append(beta)
        if not last:
            self._push(vector, beta)

    def projected(self) -> Tensor:
        r"""The projected matrix :math:`T = V A V^\top`, ``(size, size)``, float64 on the CPU."""
        diagonal = np.concatenate([self.kept, self.alphas])
        matrix = np.diag(diagonal)
        count = len(self.kept)
        if self.alphas:
            matrix[count, :count] = matrix[:count, count] = self.couplings
        rows = np.arange(count, len(diagonal) - 1)
        matrix[rows, rows + 1] = matrix[rows + 1, rows] = self.betas[: len(rows)]
        return torch.from_numpy(matrix)

    def residuals(self, coefficients: Tensor) -> Tensor:
        r"""Residuals, without roundoff, of Ritz vectors :math:`V^\top e_k`, ``e`` ``(size, r)``.

        :math:`|\beta_m (e_k)_m|`, and for ``partial`` what re-orthogonalising removed beside.
        """
        removed = torch.tensor(self.removed or [0.0], dtype=torch.float64)
        beside = removed @ coefficients[: len(removed)].abs()
        return (self.betas[-1] * coefficients[-1]).abs() + beside

    def restart(self, values: Tensor, coefficients: Tensor) -> None:
        """Keep the Ritz pairs ``values (r,)``, ``coefficients (size, r)`` and go on from them."""
        beta, residual = self.betas[-1], self.basis.rows[self.basis.size - 1]
        self.couplings = beta * coefficients[-1].numpy()
        self.kept = values.numpy().copy()
        self.basis.combine(coefficients)
        self.alphas, self.betas = [], []
        if beta:
            self._push(residual)  # from a row beyond those that were just overwritten

    def memory(self) -> dict[str, Tensor]:
        """All that the run knows beside the rows of its basis, for :meth:`recall`."""
        numbers = {
            name: np.atleast_1d(np.array(getattr(self, name), float)) for name in _REMEMBERED
        }
        return {
            name: torch.from_numpy(value.copy())
            for name, value in (numbers | {"older": self.omega[0], "newer": self.omega[1]}).items()
        }

    def recall(self, memory: dict[str, Tensor], rows: Tensor) -> None:
        """Go back to where :meth:`memory` was taken, with the rows the basis had."""
        arrays = {name: tensor.numpy().copy() for name, tensor in memory.items()}
        self.kept, self.couplings = arrays["kept"], arrays["couplings"]
        self.alphas, self.betas = arrays["alphas"].tolist(), arrays["betas"].tolist()
        self.removed = arrays["removed"].tolist()
        self.scale, self.again = float(arrays["scale"][0]), bool(arrays["again"][0])
        self.omega = (arrays["older"], arrays["newer"])
        self.newest = int(arrays["newest"][0])
        self.basis.size = len(rows)
        self.basis.rows[: len(rows)] = rows

    def _push(self, vector: Tensor, norm: float = 1.0) -> None:
        if self.mode == "none" and self.basis.size == 2:
            self.newest = 1 - self.newest  # the two rows take turns
            torch.div(vector, norm, out=self.basis.rows[self.newest])
        else:
            self.basis.append(vector, norm)
            self.newest = self.basis.size - 1

    def _orthogonalize_full(self, vector: Tensor) -> float:
        first = self.basis.project(vector)
        self._check(vector, first.double().cpu().numpy(), self._expected())
        self.basis.subtract(vector, first)
        second = self.basis.project(vector)
        self.basis.subtract(vector, second)
        return float(first[-1]) + float(second[-1])

    def _three_terms(self, vector: Tensor) -> float:
        if self.basis.size > 1:
            older = 1 - self.newest if self.mode == "none" else self.newest - 1
            before, found = self.betas[-1], self.basis.dot(older, vector)
            # Near rows are orthogonal to eps (||A|| / beta)^2 only, which small betas make large.
            least = min(beta for beta in self.betas[-3:] if beta) if before else self.scale
            slack = BREAKDOWN * self.eps * (self.scale / least) ** 2
            self._check(vector, np.array([found]), np.array([before]), slack)
            vector.sub_(self.basis.rows[older], alpha=before)
        # After the subtraction, not before: the stable order of Paige (1972).
        alpha = self.basis.dot(self.newest, vector)
        self._check(vector, np.array([alpha]), np.empty(0))
        vector.sub_(self.basis.rows[self.newest], alpha=alpha)
        return alpha

    def _expected(self) -> Array:
        # Symmetry says what the products with the earlier rows are: zero but for the last of them,
        # or, in the first step after a restart, the couplings.
        if not self.alphas:
            return self.couplings
        expected = np.zeros(self.size)
        expected[-1] = self.betas[-1]
        return expected

    def _orthogonalize_partial(self, vector: Tensor, beta: float) -> float:
        self.omega = (self.omega[1], self._next_omega(beta))
        if self.again or np.abs(self.omega[1][:-1]).max(initial=0.0) > self.eps**0.5:
            self.again = not self.again
            overlap = self.basis.project(vector)
            self.basis.subtract(vector, overlap)
            self.removed.append(float(overlap.norm()))
            self.omega[1][:-1] = self.eps
            return self.basis.norm(vector)
        self.removed.append(0.0)
        return beta

    def _next_omega(self, beta: float) -> Array:
        r"""Bound :math:`\omega_{j+1,k}` of :math:`|v_{j+1}^\top v_k|` by Simon's recurrence."""
        older, newer = self.omega
        alpha, betas = np.array(self.alphas), np.array(self.betas)
        j = len(newer) - 1
        following = np.empty(j + 2)
        following[j], following[j + 1] = self.eps, 1.0
        if j:
            grown = betas[:j] * newer[1:] + (alpha[:j] - alpha[j]) * newer[:j]
            grown[1:] += betas[: j - 1] * newer[: j - 1]
            grown -= betas[j - 1] * older
            roundoff = self.eps * self.scale
            following[:j] = (grown + np.copysign(roundoff, grown)) / max(beta, roundoff)
        return following

    def _check(self, vector: Tensor, found: Array, expected: Array, slack: float = 0.0) -> None:
        """Judge a product, still untouched, by what it has in common with rows of the basis.

        ``found`` may have more entries than are ``expected``; ``slack`` is how far from orthogonal
        the rows may be.
        """
        if not np.isfinite(found).all():
            self._raise_nonfinite(vector)
        gap = float(np.linalg.norm(found[: len(expected)] - expected))
        size = max(self.scale, float(np.abs(found).max()))
        if gap > (self.eps**0.5 + slack) * size:
            raise AsymmetryError(
                f"at step {self.size + 1} products differ by {gap:.2g} (norm {size:.2g}) from "
                "those of any symmetric matrix"
            )

    def _raise_nonfinite(self, vector: Tensor) -> None:
        bad = (~torch.isfinite(vector)).nonzero()
        what = f"{len(bad)} NaN or Inf entries" if len(bad) else "entries that overflow"
        where = f", the first in row {int(bad[0]) + self.basis.part.start}" if len(bad) else ""
        raise ValueError(
            f"op must give finite products; at step {self.size + 1} it gave {what}{where}"
        )


def step(op: LinearOperator, runs: Sequence[Recurrence], *, last: bool = False) -> None:
    """Advance runs side by side by one step: one product with a block of their vectors."""
    vectors = [run.vector() for run in runs]
    block = vectors[0][:, None] if len(runs) == 1 else torch.stack(vectors, dim=1)
    products = op.matmat(block).T.contiguous()
    for run, vector, product in zip(runs, vectors, products, strict=True):
        try:
            run.absorb(product, last=last)
        except AsymmetryError as error:
            raise ValueError(_diagnosis(op, vector, error)) from error


def advance(
    op: LinearOperator, runs: Sequence[Recurrence], num_steps: int, bar: Progress | None = None
) -> None:
    """Advance runs side by side until each has made ``num_steps`` steps or its space is closed."""
    for done in range(num_steps):
        active = [run for run in runs if not run.exhausted]
        if not active:
            break
        step(op, active, last=done == num_steps - 1)
        if bar is not None:
            bar.update(done + 1)


def _diagnosis(op: LinearOperator, vector: Tensor, error: AsymmetryError) -> str:
    first, second = op.matmat(vector), op.matmat(vector)
    if not torch.equal(first, second):
        gap = float((first - second).norm())
        return f"op must not change between calls: two products of one vector differ by {gap:.2g}"
    return f"op must be symmetric: {error}"
