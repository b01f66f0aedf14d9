"""The Lanczos recurrence and the orthonormal basis that it builds."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ritz._core.distributed import Group, all_gather_rows, all_sum, shard
from ritz._core.progress import Progress
from ritz.operators import LinearOperator

# ------------------------------------------------------------------------------------------
# An orthonormal basis that grows by one vector a step and lives where it was asked to.

Placement = Literal["device", "host", "spread"]
PLACEMENTS = ("device", "host", "spread")
CHUNK = 2**20  # entries that are mixed at a time
PIECE = 2**16  # entries of a vector that are summed in its own precision


class Basis:
    r"""Rows :math:`v_1, \dots, v_j` of length ``n``, orthonormal to roundoff.

    ``device`` keeps the rows beside the operator, ``host`` in the host's memory, and ``spread``
    gives every process the coordinates of its :func:`shard`, so that its share of the memory
    falls with the number of processes. Vectors that go in and out are whole and on the device.

    Args:
        capacity: Most rows there will be; memory is ``capacity`` vectors, taken at once.
        like: A vector ``(n,)`` whose length, dtype and device are those of the rows.
        placement: Where the rows live.
        group: The processes, for ``spread``.
    """

    def __init__(
        self, capacity: int, like: Tensor, *, placement: Placement, group: Group | None = None
    ) -> None:
        self.n, self.device, self.group = len(like), like.device, group
        self.spread = placement == "spread"
        self.part = shard(self.n, group) if self.spread else slice(0, self.n)
        home = torch.device("cpu") if placement == "host" else like.device
        width = self.part.stop - self.part.start
        self.rows = torch.empty(capacity, width, dtype=like.dtype, device=home)
        # Float64 has digits to spare, and devices sum in trees: neither needs pieces.
        pieces = home.type == "cpu" and like.dtype != torch.float64
        self.width = PIECE if pieces else max(1, width)
        self.size = 0

    def append(self, vector: Tensor, norm: float = 1.0) -> None:
        """Add a row, a vector in :meth:`local` form over its norm."""
        torch.div(vector, norm, out=self.rows[self.size])
        self.size += 1

    def extend(self, rows: Tensor) -> None:
        """Add rows ``(k, width)`` as another basis of this placement had them."""
        self.rows[self.size : self.size + len(rows)] = rows
        self.size += len(rows)

    def local(self, vector: Tensor) -> Tensor:
        """The part of a whole vector ``(n,)`` that the rows have, on the rows' device."""
        return vector[self.part].to(self.rows.device)

    def whole(self, vector: Tensor) -> Tensor:
        """The inverse of :meth:`local`: the vector ``(n,)`` on the operator's device."""
        if self.spread:
            vector = all_gather_rows(vector, self.n, self.group)
        return vector.to(self.device)

    def project(self, vector: Tensor, *, first: int = 0, last: int | None = None) -> Tensor:
        r"""Return :math:`h = V v` in float64, for a local vector and all rows or a stretch of them.

        One read of the rows.
        """
        rows = self._stretch(first, last)
        pieces = zip(rows.split(self.width, 1), vector.split(self.width), strict=True)
        # In pieces: a float32 sum over millions of entries has lost half its digits.
        return self._sum(_total([torch.mv(*piece).double() for piece in pieces]))

    def subtract(
        self, vector: Tensor, coefficients: Tensor, *, first: int = 0, last: int | None = None
    ) -> None:
        r"""Do :math:`v \leftarrow v - V^\top h` in place, with all rows or a stretch of them.

        One read of the rows.
        """
        rows = self._stretch(first, last)
        vector.addmv_(rows.T, coefficients.to(rows.dtype), alpha=-1)

    def dot(self, index: int, vector: Tensor) -> float:
        """Inner product of one row with a local vector, in float64."""
        pieces = zip(self.rows[index].split(self.width), vector.split(self.width), strict=True)
        # Converted before they are multiplied: what is lost here the recurrence magnifies.
        products = [torch.dot(x.double(), y.double()) for x, y in pieces]
        return float(self._sum(_total(products)))

    def norm(self, vector: Tensor) -> float:
        """Norm of a local vector, summed in float64: no overflow, no loss over many entries."""
        pieces = vector.split(self.width)
        parts = [torch.linalg.vector_norm(c, dtype=torch.float64).square() for c in pieces]
        return float(self._sum(_total(parts)).sqrt())

    def combine(self, coefficients: Tensor) -> Tensor:
        r"""Overwrite the first ``r`` rows by :math:`C^\top V`, ``C`` of shape ``(j, r)``.

        Done in place, some columns at a time: no second basis is needed. Returns the rows.
        """
        size, count = coefficients.shape
        mix = coefficients.T.to(self.rows.dtype).to(self.rows.device)
        step = max(1, CHUNK // size)
        for start in range(0, self.rows.shape[1], step):
            piece = self.rows[:size, start : start + step]
            self.rows[:count, start : start + step] = mix @ piece
        self.size = count
        return self.rows[:count]

    def _stretch(self, first: int, last: int | None) -> Tensor:
        return self.rows[first : self.size if last is None else last]

    def _sum(self, partial: Tensor) -> Tensor:
        return all_sum(partial, self.group) if self.spread else partial


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


# ------------------------------------------------------------------------------------------
# The Lanczos recurrence: from the product with the newest vector to the next vector.

Reorthogonalization = Literal["full", "partial", "none"]
REORTHOGONALIZATIONS = ("full", "partial", "none")
Array = np.ndarray[Any, np.dtype[np.float64]]

# A remainder below this many units of roundoff in the norm of the matrix is nothing but roundoff.
BREAKDOWN = 10.0
# Roots of roundoff by which products may differ from those of a symmetric matrix: single precision
# sums over millions of entries, and matrix units that round their factors, need some room.
ASYMMETRY = 10.0
CHECKED = 8  # steps in which a run without a basis looks for such products
# Roundoff in the residual of a Ritz pair, in units of eps ||A||: products, assembly, norm.
ROUNDOFF = 8.0
# Most units of roundoff that a freshly orthogonalised vector is taken to be from orthogonal.
LOUDEST = 100.0

_REMEMBERED = ("kept", "couplings", "alphas", "betas", "removed", "scale", "noise", "newest")


class AsymmetryError(ValueError):
    """Products that no symmetric matrix gives."""


class Recurrence:
    r"""One run: basis :math:`V`, diagonal :math:`\alpha`, off-diagonal :math:`\beta`.

    .. math:: \beta_j v_{j+1} = A v_j - \alpha_j v_j - \beta_{j-1} v_{j-1}

    ``full`` subtracts the whole basis from what the recurrence leaves, as matrix products: with the
    recurrence itself that is orthogonalising twice, for two reads of the basis a step, not four.
    ``partial`` (Simon 1984) follows a bound :math:`\omega` of the lost orthogonality and, where it
    passes the root of machine precision, subtracts the rows concerned in two consecutive steps,
    which keeps the tridiagonal matrix exact to roundoff. ``none`` keeps two vectors only; converged
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
        magnitude: float = 0.0,
    ) -> None:
        self.mode = mode
        self.magnitude = magnitude  # of numbers whose differences products are, if larger
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
        self.again: list[tuple[int, int]] = []  # rows that the next step must subtract ("partial")
        self.noise = 1.0  # what orthogonality starts from, in units of roundoff ("partial")
        # What re-orthogonalising took away that the projected matrix does not know ("partial").
        self.removed: list[float] = []
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
        # The first step after a restart has as many terms as rows were kept.
        restarted = len(self.kept) > 0 and not self.alphas
        alpha = 0.0 if restarted else self._three_terms(vector)
        if self.mode == "full":
            missing, beta = self._orthogonalize_full(vector, self.couplings if restarted else None)
            alpha += missing
        else:
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
        partial = {"older": self.omega[0], "newer": self.omega[1], "again": np.ravel(self.again)}
        numbers = {
            name: np.atleast_1d(np.array(getattr(self, name), float)) for name in _REMEMBERED
        }
        return {name: torch.from_numpy(value.copy()) for name, value in (numbers | partial).items()}

    def recall(self, memory: dict[str, Tensor]) -> None:
        """Go back to where :meth:`memory` was taken, with a basis that is yet to be filled."""
        arrays = {name: tensor.numpy().copy() for name, tensor in memory.items()}
        self.kept, self.couplings = arrays["kept"], arrays["couplings"]
        self.alphas, self.betas = arrays["alphas"].tolist(), arrays["betas"].tolist()
        self.removed = arrays["removed"].tolist()
        self.scale, self.noise = float(arrays["scale"][0]), float(arrays["noise"][0])
        self.again = [(int(a), int(b)) for a, b in arrays["again"].reshape(-1, 2)]
        self.omega = (arrays["older"], arrays["newer"])
        self.newest = int(arrays["newest"][0])
        self.basis.size = 0

    def _push(self, vector: Tensor, norm: float = 1.0) -> None:
        if self.mode == "none" and self.basis.size == 2:
            self.newest = 1 - self.newest  # the two rows take turns
            torch.div(vector, norm, out=self.basis.rows[self.newest])
        else:
            self.basis.append(vector, norm)
            self.newest = self.basis.size - 1

    def _orthogonalize_full(self, vector: Tensor, couplings: Array | None) -> tuple[float, float]:
        """Subtract the basis; return what ``alpha`` lacked, and the norm of what is left.

        The recurrence has done the first subtraction, of all but roundoff, so one of the whole
        basis is the second. Only where that takes away more than it leaves is there need for
        another: after a restart, or where next to nothing is left.
        """
        nothing = np.zeros(self.basis.size - 1)
        missing, expected = 0.0, nothing if couplings is None else couplings
        for _ in range(2):
            overlap = self.basis.project(vector)
            self._check(vector, overlap.cpu().numpy(), expected)
            self.basis.subtract(vector, overlap)
            missing += float(overlap[-1])
            norm, expected = self.basis.norm(vector), nothing
            if float(overlap.norm()) <= norm:
                break
        return missing, norm

    def _three_terms(self, vector: Tensor) -> float:
        if self.basis.size > 1:
            older = 1 - self.newest if self.mode == "none" else self.newest - 1
            before = self.betas[-1]
            self._check_neighbour(vector, older, before)
            vector.sub_(self.basis.rows[older], alpha=before)
        # After the subtraction, not before: the stable order of Paige (1972).
        alpha = self.basis.dot(self.newest, vector)
        self._check(vector, np.array([alpha]), np.empty(0))
        vector.sub_(self.basis.rows[self.newest], alpha=alpha)
        return alpha

    def _check_neighbour(self, vector: Tensor, older: int, before: float) -> None:
        # "full" has all its rows to judge by. Where there are but two, the first steps must do: a
        # pass over both is a tenth of what a sparse product costs.
        if self.mode == "partial" or (self.mode == "none" and self.size < CHECKED):
            found = self.basis.dot(older, vector)
            # Near rows are orthogonal to eps (||A|| / beta)^2 only, which small betas make large.
            least = min((beta for beta in self.betas[-3:] if beta), default=self.scale)
            slack = BREAKDOWN * self.eps * (self.scale / least) ** 2 if least else 0.0
            self._check(vector, np.array([found]), np.array([before]), slack)

    def _orthogonalize_partial(self, vector: Tensor, beta: float) -> float:
        self.omega = (self.omega[1], self._next_omega(beta))
        # In single precision roundoff and its root leave no room between: all rows, or none.
        low = self.eps**0.75 if self.eps < 1e-10 else 0.0
        lost = _stretches(np.abs(self.omega[1][:-1]), self.eps**0.5, low)
        # In two steps running: subtracted from one row alone, it would come back from the other.
        stretches, self.again = [*self.again, *lost], lost
        total = 0.0
        for _ in range(2 if stretches else 0):
            removed = float(
                np.linalg.norm([self._subtract(vector, beta, *rows) for rows in stretches])
            )
            total, beta = total + removed, self.basis.norm(vector)
            if removed <= 0.01 * beta:  # less than this even a half-orthogonal basis takes away
                break
        self.removed.append(total)
        return beta

    def _subtract(self, vector: Tensor, norm: float, first: int, last: int) -> float:
        overlap = self.basis.project(vector, first=first, last=last)
        self.basis.subtract(vector, overlap, first=first, last=last)
        removed, bounds = float(overlap.norm()), self.omega[1][first:last]
        # Where the bound was too low, what it starts from next time is raised by as much.
        guess = float(np.linalg.norm(bounds)) * norm
        if removed > guess > 0:
            self.noise = min(self.noise * removed / guess, LOUDEST)
        bounds[:] = self.eps * self.noise
        return removed

    def _next_omega(self, beta: float) -> Array:
        r"""Bound :math:`\omega_{j+1,k}` of :math:`|v_{j+1}^\top v_k|` by Simon's recurrence."""
        older, newer = self.omega
        alpha, betas = np.array(self.alphas), np.array(self.betas)
        j = len(newer) - 1
        roundoff = self.eps * self.scale
        least = max(beta, roundoff) or 1.0
        following = np.empty(j + 2)
        following[j], following[j + 1] = roundoff / least, 1.0
        if j:
            grown = betas[:j] * newer[1:] + (alpha[:j] - alpha[j]) * newer[:j]
            grown[1:] += betas[: j - 1] * newer[: j - 1]
            grown -= betas[j - 1] * older
            following[:j] = (grown + np.copysign(roundoff, grown)) / least
        return following

    def _check(self, vector: Tensor, found: Array, expected: Array, slack: float = 0.0) -> None:
        """Judge a product, still untouched, by what it has in common with rows of the basis.

        ``found`` may have more entries than are ``expected``; ``slack`` is how far from orthogonal
        the rows may be.
        """
        if not np.isfinite(found).all():
            self._raise_nonfinite(vector)
        gap = float(np.linalg.norm(found[: len(expected)] - expected))
        size = max(self.scale, self.magnitude, float(np.abs(found).max()))
        if gap > (ASYMMETRY * self.eps**0.5 + slack) * size:
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
    block = vectors[0][:, None]
    if len(runs) > 1:
        block = torch.empty(len(vectors[0]), len(runs), dtype=op.dtype, device=op.device)
        for column, vector in zip(block.T, vectors, strict=True):
            column.copy_(vector)  # one by one: three times as fast as torch.stack
    products = op.matmat(block)
    for run, vector, product in zip(runs, vectors, products.T, strict=True):
        try:
            run.absorb(product.contiguous(), last=last)
        except AsymmetryError as error:
            raise ValueError(_diagnosis(op, vector, error)) from error


def advance(
    op: LinearOperator,
    runs: Sequence[Recurrence],
    num_steps: int,
    bar: Progress | None = None,
    *,
    first: int = 0,
    between: Callable[[int], None] | None = None,
) -> None:
    """Advance runs side by side until each has made ``num_steps`` steps or its space is closed.

    Args:
        op: What multiplies.
        runs: The runs, of which those go on that can.
        num_steps: Steps to make in all.
        bar: What to tell.
        first: Steps made before.
        between: Called between steps with the number of those made.
    """
    for done in range(first, num_steps):
        active = [run for run in runs if not run.exhausted]
        if not active:
            break
        last = done == num_steps - 1
        step(op, active, last=last)
        if bar is not None:
            bar.update(done + 1)
        if between is not None and not last:
            between(done + 1)


def _diagnosis(op: LinearOperator, vector: Tensor, error: AsymmetryError) -> str:
    first, second = op.matmat(vector), op.matmat(vector)
    if not torch.equal(first, second):
        gap = float((first - second).norm())
        return f"op must not change between calls: two products of one vector differ by {gap:.2g}"
    return f"op must be symmetric: {error}"


def _stretches(bounds: Array, high: float, low: float) -> list[tuple[int, int]]:
    """Stretches ``[first, last)`` of entries above ``low`` that reach above ``high`` somewhere.

    A converged Ritz vector lives in the first rows, and it is there that orthogonality is lost.
    """
    above = np.concatenate([[False], bounds > low, [False]])
    first, last = np.flatnonzero(above[1:] & ~above[:-1]), np.flatnonzero(~above[1:] & above[:-1])
    pairs = zip(first.tolist(), last.tolist(), strict=True)
    return [(a, b) for a, b in pairs if bounds[a:b].max() > high]
