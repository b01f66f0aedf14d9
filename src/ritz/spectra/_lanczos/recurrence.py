"""The Lanczos recurrence, its basis, re-orthogonalisation, Ritz pairs and their residuals."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ritz._core.blocks import power_of_two, row_products, summed_length
from ritz._core.checks import is_below
from ritz._core.distributed import Group, all_gather_rows, all_sum, shard
from ritz._core.results import AsymmetryError

Placement = Literal["device", "host", "spread"]
Reorthogonalization = Literal["full", "partial", "none"]
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the recurrence, in units of machine precision eps unless stated otherwise."""

    # A remainder beta below this many eps |A| is roundoff, so the space is invariant. Matrices with
    # 2, 3 and 5 distinct eigenvalues leave 1.5, 2 and 4. With 20 distinct eigenvalues roundoff has
    # grown to 5e4. The run then continues in an arbitrary direction, which does no harm.
    breakdown: float = 10.0
    # Products of a symmetric matrix may violate v_i'A v_j = v_j'A v_i by this many sqrt(eps) |A|.
    # Float32 with a million rows reaches 7e-4; TF32 rounds its factors to 2^-11 = 1.4 sqrt(eps).
    asymmetry: float = 10.0
    # Number of steps in which a run without a basis makes this check. Each check reads two more
    # vectors, which costs a tenth of a sparse product.
    checked_steps: int = 8
    # Roundoff in the residual of a Ritz pair: products, assembly of the vector, and the norm. The
    # largest value after 60 steps was 2.1 in float32 and 6.7 in float64 (200,000 rows).
    residual: float = 8.0
    # Upper limit of the starting value of the bounds of "partial", in eps. The value reaches 17 in
    # float32 with 100,000 rows and stays 1 elsewhere; the limit is for noisy products.
    noise: float = 100.0
    # "partial" repeats a subtraction that removes more than this fraction of the vector. With a
    # half-orthogonal basis it removes less. To repeat it always would double the reads of the
    # basis.
    repeat: float = 0.01
    # A number that a resumed run computes again may differ by this many eps |A|, because the order
    # of summation may differ.
    repeated: float = 100.0
    # Products are scaled if their magnitude is outside of (largest number)^(-0.3) to
    # (largest number)^0.3. Inside, the squares of their entries and of their roundoff are in range.
    ordinary: float = 0.3
    # Runs with a full basis of up to this many rows, and on other devices runs without a basis,
    # advance by batched operations, which take half the time at 500 rows. For more rows, vectors
    # leave the cache between two operations: the time of "full" is 1.15 times that of single runs
    # at 4,000 rows (8 probes, 30 steps).
    together: int = 2000
    # Number of rows added to a basis that is full, if the number of steps is not known beforehand.
    growth: int = 64
    # Entries of the basis that are combined at a time: 8 MiB of float64, the size of a cache. On a
    # GPU, 1 GiB, because 300 products of small pieces are 12 ms of launches (15 million rows).
    chunk: int = 2**20
    chunk_on_gpu: int = 2**27


TUNING = Tuning()


# ------------------------------------------------------------------------------------------
# The basis, which grows by one vector per step.


class Basis:
    r"""Rows :math:`v_1, \dots, v_j` of length ``n``, orthonormal to roundoff.

    ``device`` stores the rows on the device of the operator, and ``host`` in host memory. With
    ``spread`` each process stores the coordinates of its :func:`shard`, so the memory per process
    falls with the number of processes. :meth:`local` and :meth:`whole` convert vectors between the
    operator and the basis.

    Args:
        capacity: Number of rows to allocate. More rows need a copy of the basis.
        like: A vector ``(n,)`` with the length, dtype and device of the rows.
        placement: Where the rows are stored.
        group: The processes, for ``spread``.
        rows: Memory for the rows, if it is part of a larger tensor.
    """

    def __init__(
        self,
        capacity: int,
        like: Tensor,
        *,
        placement: Placement,
        group: Group | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.n, self.device, self.group = len(like), like.device, group
        self.spread = placement == "spread"
        self.part = shard(self.n, group) if self.spread else slice(0, self.n)
        home = torch.device("cpu") if placement == "host" else like.device
        width = self.part.stop - self.part.start
        self.rows = like.new_empty(capacity, width, device=home) if rows is None else rows
        self.width = summed_length(self.rows[0])
        self.size = 0

    def append(self, vector: Tensor, norm: float = 1.0) -> None:
        """Add a row: a vector in :meth:`local` form, divided by its norm."""
        if self.size == len(self.rows):
            more = self.rows.new_empty(TUNING.growth, self.rows.shape[1])
            self.rows = torch.cat([self.rows, more])
        torch.div(vector, norm, out=self.rows[self.size])
        self.size += 1

    def extend(self, rows: Tensor) -> None:
        """Add rows ``(k, width)`` of another basis with the same placement."""
        self.rows[self.size : self.size + len(rows)] = rows
        self.size += len(rows)

    def local(self, vector: Tensor) -> Tensor:
        """Return the coordinates of a vector ``(n,)`` that this process stores."""
        return vector[self.part].to(self.rows.device)

    def whole(self, vector: Tensor) -> Tensor:
        """Return the vector ``(n,)`` of a :meth:`local` one, on the device of the operator."""
        if self.spread:
            vector = all_gather_rows(vector, self.n, self.group)
        return vector.to(self.device)

    def project(self, vector: Tensor, *, first: int = 0, last: int | None = None) -> Tensor:
        r"""Return :math:`h = V v` in float64 for a local vector, with rows ``first`` to ``last``.

        Cost: one read of the rows.
        """
        rows = self.rows[first : self.size if last is None else last]
        return self._sum([row_products(rows, vector, length=self.width)])

    def subtract(
        self, vector: Tensor, coefficients: Tensor, *, first: int = 0, last: int | None = None
    ) -> None:
        r"""Compute :math:`v \leftarrow v - V^\top h` in place, with rows ``first`` to ``last``.

        Cost: one read of the rows.
        """
        rows = self.rows[first : self.size if last is None else last]
        vector.addmv_(rows.T, coefficients.to(rows.dtype), alpha=-1)

    def dot(self, index: int, vector: Tensor) -> float:
        """Return the inner product of one row with a local vector, in float64."""
        row = self.rows[index]
        # Convert to float64 before the multiplication: the recurrence magnifies errors of alpha.
        if len(vector) <= self.width:
            return float(self._sum([torch.dot(row.double(), vector.double())]))
        pieces = zip(row.split(self.width), vector.split(self.width), strict=True)
        return float(self._sum([torch.dot(x.double(), y.double()) for x, y in pieces]))

    def norm(self, vector: Tensor) -> float:
        """Return the norm of a local vector, summed in float64 so that it cannot overflow."""
        pieces = [vector] if len(vector) <= self.width else vector.split(self.width)
        parts = [torch.linalg.vector_norm(c, dtype=torch.float64).square() for c in pieces]
        return float(self._sum(parts).sqrt())

    def combine(self, coefficients: Tensor) -> Tensor:
        r"""Overwrite the first ``r`` rows by :math:`C^\top V`, ``C (j, r)``, and return them.

        In place, some columns at a time, so that no second basis is needed.
        """
        size, count = coefficients.shape
        mix = coefficients.T.to(self.rows.dtype).to(self.rows.device)
        chunk = TUNING.chunk_on_gpu if self.rows.is_cuda else TUNING.chunk
        step = max(1, chunk // size)
        for start in range(0, self.rows.shape[1], step):
            piece = self.rows[:size, start : start + step]
            self.rows[:count, start : start + step] = mix @ piece
        self.size = count
        return self.rows[:count]

    def _sum(self, parts: list[Tensor]) -> Tensor:
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return all_sum(total, self.group) if self.spread else total


# ------------------------------------------------------------------------------------------
# The recurrence: from the product with the newest vector to the next vector.


class Recurrence:
    r"""One Lanczos run: basis :math:`V`, diagonal :math:`\alpha`, off-diagonal :math:`\beta`.

    .. math:: \beta_j v_{j+1} = A v_j - \alpha_j v_j - \beta_{j-1} v_{j-1}

    ``full`` subtracts the whole basis from the remainder of the recurrence. The recurrence itself
    is a first orthogonalisation, so this is the second, with two reads of the basis per step and
    not four. ``partial`` (Simon 1984) updates bounds :math:`\omega` of the loss of orthogonality.
    Rows whose bound exceeds the square root of machine precision are subtracted in two consecutive
    steps, which keeps the tridiagonal matrix exact to roundoff. ``none`` stores two vectors only.
    Converged values then repeat, but quadrature stays accurate (Greenbaum 1989).

    After a thick restart (Wu and Simon 2000) the first rows of the basis are Ritz vectors with
    values ``kept``, and ``couplings`` are their entries in the next row of :math:`T`. The first
    Ritz vectors may be locked: they count as eigenvectors, and the run continues from a new start
    vector in their orthogonal complement.

    If the products are far from 1 in magnitude, they are divided by a power of two, ``unit``,
    because the squares of their entries would overflow or underflow. All stored numbers are those
    of the matrix itself.

    Args:
        start: Start vector ``(n,)``.
        capacity: Number of rows of the basis to allocate.
        mode: Kind of re-orthogonalisation.
        placement: Where the basis is stored.
        group: The processes, for ``spread``.
        magnitude: Magnitude of the numbers whose differences the products are, if these are larger
            than the products. Roundoff is relative to them.
        rows: Memory for the basis, of ``capacity`` rows (two for ``none``).
    """

    # The state between two steps, besides the basis and ``omega``.
    STATE = (
        "mode", "unit", "kept", "couplings", "alphas", "betas", "locked", "neglected", "roots",
        "log_betas", "removed", "again", "scale", "noise", "newest",
    )  # fmt: skip

    def __init__(
        self,
        start: Tensor,
        *,
        capacity: int,
        mode: Reorthogonalization,
        placement: Placement = "device",
        group: Group | None = None,
        magnitude: float = 0.0,
        rows: Tensor | None = None,
    ) -> None:
        self.mode, self.magnitude, self.unit = mode, magnitude, 1.0
        self.eps = torch.finfo(start.dtype).eps
        # The bases of all runs that advance together, ``(k, capacity, n)``, if they share a tensor.
        self.shared: Tensor | None = None
        size = capacity if mode != "none" else 2
        self.basis = Basis(size, start, placement=placement, group=group, rows=rows)
        self.kept: list[float] = []
        self.couplings: list[float] = []
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.locked: list[float] = []  # residuals of the locked rows
        self.neglected = 0.0  # norm of the matrix that locking neglects
        self.roots: list[float] = []  # Ritz values discarded since the last start vector
        self.log_betas = 0.0  # sum of log beta up to the last restart
        self._active: tuple[Tensor, Tensor] | None = None  # cache of active_pairs
        self.newest = 0  # index of the row that is multiplied next
        self.scale = 0.0  # lower bound of the norm of the matrix
        # For "partial" only.
        self.omega = (np.empty(0), np.empty(0))  # bounds of |v_j'v_k| for the last two rows j
        self.again: list[tuple[int, int]] = []  # rows that the next step must subtract as well
        self.noise = 1.0  # starting value of the bounds, in eps
        # Norms of what re-orthogonalisation removed in each step, which T does not contain.
        self.removed: list[float] = []
        self.begin(start)

    @property
    def size(self) -> int:
        """Order of the projected matrix."""
        return len(self.kept) + len(self.alphas)

    @property
    def exhausted(self) -> bool:
        """Whether the space is invariant, so that there is no next vector."""
        return bool(self.betas) and self.betas[-1] == 0

    def begin(self, start: Tensor) -> None:
        """Continue with ``start``, made orthonormal to the basis."""
        vector = self.basis.local(start) / power_of_two(start)
        for _ in range(2):
            vector /= self.basis.norm(vector)
            if self.basis.size:
                self.basis.subtract(vector, self.basis.project(vector))
        self._push(vector, self.basis.norm(vector))
        bounds = np.full(self.basis.size, self.eps)
        bounds[-1] = 1.0
        self.omega = (bounds[1:], bounds)

    def vector(self) -> Tensor:
        """Return the newest vector ``(n,)``, which is multiplied next."""
        return self.basis.whole(self.basis.rows[self.newest])

    def absorb(self, product: Tensor, *, last: bool = False) -> None:
        """Take the product ``(n,)`` of the operator with :meth:`vector`, and overwrite it.

        Args:
            product: The product.
            last: Do not store the next vector, because this step is the last one.
        """
        self._active = None
        if not self.scale:
            self.unit = _unit(product)
        vector = self.basis.local(product)
        if self.unit != 1:
            vector /= self.unit
        # After a restart the row of T is full: A v = sum_i c_i u_i + alpha v + beta v_next.
        restarted = bool(self.kept) and not self.alphas
        alpha = 0.0 if restarted else self._three_terms(vector)
        if self.mode == "full":
            couplings = np.array(self.couplings) / self.unit if restarted else None
            missing, beta = self._orthogonalize_full(vector, couplings)
            alpha += missing
        else:
            beta = self.basis.norm(vector)
        alpha, beta = alpha * self.unit, beta * self.unit
        # A row of T has at most the norm of A, and the sum of its three entries is at most sqrt(3)
        # times that. The factor does not matter here.
        self.scale = max(self.scale, abs(alpha) + (self.betas[-1] if self.betas else 0.0) + beta)
        if not math.isfinite(self.scale):
            self._raise_nonfinite(vector)
        self.alphas.append(alpha)
        if self.mode == "partial":
            beta = self._orthogonalize_partial(vector, beta)
        if is_below(beta, TUNING.breakdown * self.eps * self.scale):
            self.betas.append(0.0)
            return
        self.betas.append(beta)
        if not last:
            self._push(vector, beta / self.unit)

    def is_noise(self, norm: float) -> bool:
        """Return whether all products so far are roundoff; if so, end the run after its first step.

        This happens if the start vector is in the kernel of an operator with this norm.
        """
        noise = not self.kept and is_below(self.scale, TUNING.breakdown * self.eps * norm)
        if noise:
            self.alphas, self.betas, self.basis.size = self.alphas[:1], [0.0], 1
        return noise

    def projected(self) -> Tensor:
        r"""Return :math:`T = V A V^\top`, ``(size, size)``, float64 on the CPU."""
        diagonal = np.concatenate([self.kept, self.alphas])
        matrix = np.diag(diagonal)
        count = len(self.kept)
        if self.alphas:
            matrix[count, :count] = matrix[:count, count] = self.couplings
        rows = np.arange(count, len(diagonal) - 1)
        matrix[rows, rows + 1] = matrix[rows + 1, rows] = self.betas[: len(rows)]
        return torch.from_numpy(matrix)

    def active_pairs(self) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors of the part of ``T`` that is not locked."""
        if self._active is None:
            first = len(self.locked)
            values, vectors = torch.linalg.eigh(self.projected()[first:, first:])
            self._active = values, vectors
        return self._active

    def ritz_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return Ritz values, eigenvectors :math:`e` of :math:`T`, and residuals without roundoff.

        The residual of the Ritz vector :math:`V^\top e_k` is :math:`|\beta_m (e_k)_m|`, and for
        ``partial`` the part that re-orthogonalisation removed.
        """
        first = len(self.locked)
        values, coefficients = self.active_pairs()
        # The part of the matrix that locking neglected adds to later residuals.
        residuals = self._outside().hypot(torch.tensor(self.neglected, dtype=torch.float64))
        if not first:
            return values, coefficients, residuals
        # T is block diagonal. Solve the blocks one by one: if both have the same eigenvalue, eigh
        # would return mixtures of their eigenvectors, with wrong residuals.
        values = torch.cat([torch.tensor(self.kept[:first], dtype=torch.float64), values])
        coefficients = torch.block_diag(torch.eye(first, dtype=torch.float64), coefficients)
        residuals = torch.cat([torch.tensor(self.locked, dtype=torch.float64), residuals])
        order = values.argsort()
        return values[order], coefficients[:, order], residuals[order]

    def _outside(self) -> Tensor:
        """Return the norms of ``A u`` outside of the basis, for all active Ritz vectors ``u``."""
        _, coefficients = self.active_pairs()
        removed = torch.tensor(self.removed or [0.0], dtype=torch.float64)
        beside = removed @ coefficients[: len(removed)].abs()
        return (self.betas[-1] * coefficients[-1]).abs() + beside

    def log_christoffel(self) -> Callable[[float], float]:
        r"""Return :math:`\log \sum_{j=0}^m p_j(x)^2` as a function outside of the Ritz values.

        The rows of the basis are :math:`v_{j+1} = p_j(A) z` of the start vector :math:`z`. A unit
        eigenvector :math:`u` of the eigenvalue :math:`x` has :math:`u^\top v_{j+1} = p_j(x)\,
        u^\top z`, and the rows are orthonormal, so that

        .. math:: (u^\top z)^2 \le 1 \Big/ \sum_{j=0}^m p_j(x)^2 .

        This also holds after restarts: :math:`p_m(x) = \prod_i (x - \mu_i) / \prod_j \beta_j` with
        the current Ritz values and all that were discarded. The other polynomials follow from
        :math:`(x - T) p = \beta_m p_m e_m`.

        Reference: Van Dorsselaer, Hochstenbach and Van der Vorst (2000), with the sum over all
        polynomials in place of the last one.
        """
        values, vectors = (part.numpy() for part in self.active_pairs())
        # A beta below roundoff carries no information.
        last = max(self.betas[-1], TUNING.breakdown * self.eps * self.scale)
        roots = np.concatenate([self.roots, values])
        betas = float(np.log([*self.betas[:-1], last]).sum()) + self.log_betas

        def log_sum(point: float) -> float:
            # At a Ritz value the result is minus infinity, so that no bound is derived from it.
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                ratios = last * vectors[-1] / (point - values)
                log_last = float(np.log(np.abs(point - roots)).sum()) - betas
                return 2 * log_last + float(np.log1p(ratios @ ratios))

        return log_sum

    def roundoff(self, restarts: int = 0) -> float:
        """Return the part of each residual that is roundoff."""
        # Each restart combines the basis once more. Without re-orthogonalisation each step adds
        # roundoff. Both grow as a random walk. With 1 + restarts in place of 1 + 4 restarts, 2 of
        # 699 random runs (of 2000 products) had residuals of 1.1 and 1.4 times the stated ones.
        growth = 1 + 4 * restarts + (self.size if self.mode == "none" else 0)
        return TUNING.residual * self.eps * self.scale * float(np.sqrt(growth))

    def restart(self, low: int, high: int) -> None:
        """Restart from the locked pairs, and the ``low`` smallest and ``high`` largest others."""
        first = len(self.locked)
        values, coefficients = self.active_pairs()
        kept = extremes(len(values), low, high)
        discarded = torch.ones(len(values), dtype=torch.bool)
        discarded[kept] = False
        self.roots += values[discarded].tolist()
        beta, residual = self.betas[-1], self.basis.rows[self.basis.size - 1]
        self.log_betas += float(np.log(self.betas).sum())
        # A u_k = theta_k u_k + beta_m (e_k)_m v_{m+1}
        self.couplings = [0.0] * first + (beta * coefficients[-1, kept]).tolist()
        self.kept = self.kept[:first] + values[kept].tolist()
        mix = torch.block_diag(torch.eye(first, dtype=torch.float64), coefficients[:, kept])
        self.basis.combine(mix)
        self.alphas, self.betas, self._active = [], [], None
        self._push(residual)  # a row beyond those that were overwritten

    def neglect(self, chosen: Tensor) -> float:
        r"""Return a norm of the matrix that would be neglected if the chosen pairs were locked.

        It is the root of the sum of their squared residuals.
        """
        first = len(self.locked)
        kept = torch.tensor(self.kept[:first], dtype=torch.float64)
        order = torch.cat([kept, self.active_pairs()[0]]).argsort()
        parts = torch.cat([torch.zeros(first, dtype=torch.float64), self._outside()])
        return math.hypot(self.neglected, *parts[order][chosen].tolist())

    def lock(self, chosen: Tensor) -> None:
        """Lock the chosen pairs of :meth:`ritz_pairs` as eigenvectors, and discard all others.

        :meth:`begin` must be called next.
        """
        values, coefficients, residuals = self.ritz_pairs()
        self.neglected = self.neglect(chosen)
        self.locked, self.kept = residuals[chosen].tolist(), values[chosen].tolist()
        self.couplings = [0.0] * len(self.kept)
        self.basis.combine(coefficients[:, chosen])
        self.alphas, self.betas, self.removed, self.again = [], [], [], []
        self.roots, self.log_betas, self._active = [], 0.0, None
        # "partial" cannot continue from Ritz vectors, and the basis is small again.
        self.mode = "full"

    def memory(self) -> dict[str, Any]:
        """Return the state of the run, apart from the rows of its basis, for :meth:`recall`."""
        omega = [torch.from_numpy(bounds.copy()) for bounds in self.omega]
        return {name: getattr(self, name) for name in self.STATE} | {"omega": omega}

    def recall(self, memory: dict[str, Any]) -> None:
        """Restore the state of :meth:`memory`, with an empty basis, to be filled by the caller."""
        for name in self.STATE:
            setattr(self, name, memory[name])
        self._active = None
        older, newer = (bounds.numpy() for bounds in memory["omega"])
        self.omega = (older, newer)
        self.basis.size = 0

    def _push(self, vector: Tensor, norm: float = 1.0) -> None:
        if self.mode == "none" and self.basis.size == 2:
            self.newest = 1 - self.newest  # the two rows alternate
            torch.div(vector, norm, out=self.basis.rows[self.newest])
        else:
            self.basis.append(vector, norm)
            self.newest = self.basis.size - 1

    def _three_terms(self, vector: Tensor) -> float:
        if self.basis.size > 1:
            older = 1 - self.newest if self.mode == "none" else self.newest - 1
            before = self.betas[-1] / self.unit
            self._check_neighbour(vector, older, before)
            vector.sub_(self.basis.rows[older], alpha=before)
        # Compute alpha after subtracting beta v_{j-1}: the stable order (Paige 1972).
        alpha = self.basis.dot(self.newest, vector)
        self._check(vector, np.array([alpha]), np.empty(0))
        vector.sub_(self.basis.rows[self.newest], alpha=alpha)
        return alpha

    def _orthogonalize_full(self, vector: Tensor, couplings: Array | None) -> tuple[float, float]:
        """Subtract the basis; return the correction of ``alpha`` and the norm of the remainder.

        The recurrence is a first orthogonalisation, so this is the second one. It is repeated only
        if it removes more than it leaves, which happens after a restart or near a breakdown.
        """
        nothing = np.zeros(self.basis.size - 1)
        missing, expected = 0.0, nothing if couplings is None else couplings
        for _ in range(2):
            overlap = self.basis.project(vector)
            self.basis.subtract(vector, overlap)
            # On the host, so that a GPU is waited for once, and after it has got its next work.
            numbers = overlap.cpu()
            self._check(vector, numbers.numpy(), expected)
            missing += float(numbers[-1])
            norm, expected = self.basis.norm(vector), nothing
            if is_below(float(numbers.norm()), norm):
                break
        return missing, norm

    def _orthogonalize_partial(self, vector: Tensor, beta: float) -> float:
        self.omega = (self.omega[1], self._next_omega(beta))
        # Rows above eps^(3/4) near a row above sqrt(eps) are subtracted with it (Simon 1984). In
        # float32 the two are too close: subtract all rows or none.
        low = self.eps**0.75 if self.eps < 1e-10 else 0.0
        lost = _stretches(np.abs(self.omega[1][:-1]), self.eps**0.5, low)
        # In two consecutive steps: otherwise v_{j+1} would inherit the loss from v_j.
        stretches, self.again = [*self.again, *lost], lost
        total = 0.0
        for _ in range(2 if stretches else 0):
            parts = [self._subtract(vector, beta, *rows) for rows in stretches]
            removed = math.hypot(*parts)
            total, beta = total + removed, self.basis.norm(vector) * self.unit
            if is_below(removed, TUNING.repeat * beta):
                break
        self.removed.append(total)
        return beta

    def _subtract(self, vector: Tensor, norm: float, first: int, last: int) -> float:
        overlap = self.basis.project(vector, first=first, last=last)
        self.basis.subtract(vector, overlap, first=first, last=last)
        removed, bounds = float(overlap.norm()) * self.unit, self.omega[1][first:last]
        # If the bound was too low, raise its starting value in proportion.
        guess = float(np.linalg.norm(bounds)) * norm
        if removed > guess > 0:
            self.noise = min(self.noise * removed / guess, TUNING.noise)
        bounds[:] = self.eps * self.noise
        return removed

    def _next_omega(self, beta: float) -> Array:
        r"""Return the bounds :math:`\omega_{j+1,k}` of :math:`|v_{j+1}^\top v_k|`."""
        older, newer = self.omega
        alpha, betas = np.array(self.alphas), np.array(self.betas)
        j = len(newer) - 1
        roundoff = self.eps * self.scale
        least = max(beta, roundoff) or 1.0
        following = np.empty(j + 2)
        following[j], following[j + 1] = roundoff / least, 1.0
        if j:
            # Simon's recurrence: beta_{j+1} omega_{j+1,k} = beta_{k+1} omega_{j,k+1}
            #   + (alpha_k - alpha_j) omega_{j,k} + beta_k omega_{j,k-1} - beta_j omega_{j-1,k}
            grown = betas[:j] * newer[1:] + (alpha[:j] - alpha[j]) * newer[:j]
            grown[1:] += betas[: j - 1] * newer[: j - 1]
            grown -= betas[j - 1] * older
            following[:j] = (grown + np.copysign(roundoff, grown)) / least
        return following

    def _check_neighbour(self, vector: Tensor, older: int, before: float) -> None:
        # v_{j-1}'A v_j = beta_{j-1} for symmetric A. "full" compares all rows later.
        if self.mode == "partial" or (self.mode == "none" and self.size < TUNING.checked_steps):
            overlap = self.basis.dot(older, vector)
            # Neighbouring rows are orthogonal to eps (|A| / beta)^2 only.
            least = min((beta for beta in self.betas[-3:] if beta), default=self.scale)
            slack = TUNING.breakdown * self.eps * (self.scale / least) ** 2 if least else 0.0
            self._check(vector, np.array([overlap]), np.array([before]), slack)

    def _check(self, vector: Tensor, overlap: Array, expected: Array, slack: float = 0.0) -> None:
        """Check a product by its overlap with rows of the basis.

        ``overlap`` may have more entries than ``expected``. ``slack`` bounds the inner products of
        different rows, which are not exactly orthogonal.
        """
        if not np.isfinite(overlap).all():
            self._raise_nonfinite(vector)
        gap = float(np.linalg.norm(overlap[: len(expected)] - expected))
        size = max(max(self.scale, self.magnitude) / self.unit, float(np.abs(overlap).max()))
        # A locked vector is an eigenvector only up to its residual.
        slack += self.neglected / self.unit / (size or 1.0)
        if not is_below(gap, (TUNING.asymmetry * self.eps**0.5 + slack) * size):
            raise AsymmetryError(
                f"at step {self.size + 1} products differ by {gap * self.unit:.2g} "
                f"(norm {size * self.unit:.2g}) from those of any symmetric matrix"
            )

    def _raise_nonfinite(self, vector: Tensor) -> None:
        bad = (~torch.isfinite(vector)).nonzero()
        entries = f"{len(bad)} NaN or Inf entries" if len(bad) else "entries that overflow"
        where = f", the first in row {int(bad[0]) + self.basis.part.start}" if len(bad) else ""
        raise ValueError(
            f"op must give finite products; at step {self.size + 1} it gave {entries}{where}"
        )


def extremes(size: int, low: int, high: int) -> Tensor:
    """Return the ``low`` first and ``high`` last indices below ``size``; all if there are fewer."""
    if low + high >= size:
        return torch.arange(size)
    return torch.cat([torch.arange(low), torch.arange(size - high, size)])


def _unit(product: Tensor) -> float:
    """Return a power of two near the entries of a product, or 1 if their squares are in range."""
    unit, limit = power_of_two(product), torch.finfo(product.dtype).max ** TUNING.ordinary
    return 1.0 if 1 / limit <= unit <= limit else unit


def _stretches(bounds: Array, high: float, low: float) -> list[tuple[int, int]]:
    """Return stretches ``[first, last)`` of entries above ``low`` with a maximum above ``high``.

    Orthogonality is lost along converged Ritz vectors, which lie mostly in the first rows.
    """
    above = np.concatenate([[False], bounds > low, [False]])
    first, last = np.flatnonzero(above[1:] & ~above[:-1]), np.flatnonzero(~above[1:] & above[:-1])
    pairs = zip(first.tolist(), last.tolist(), strict=True)
    return [(a, b) for a, b in pairs if bounds[a:b].max() > high]
