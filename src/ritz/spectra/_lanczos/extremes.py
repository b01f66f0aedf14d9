"""Extreme eigenvalues: ``eigenpairs``, ``bounds`` and ``spectral_norm``, and when they stop."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_rtol, is_below
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, HasStatus, Status
from ritz._core.storage import storable
from ritz.operators import (
    DenseOperator,
    LinearOperator,
    OperatorLike,
    SparseOperator,
    as_operator,
)
from ritz.operators._shared import gershgorin
from ritz.spectra._lanczos.recurrence import (
    Placement,
    Reorthogonalization,
    extremes,
)
from ritz.spectra._lanczos.saved_runs import SavedRuns
from ritz.spectra._lanczos.spectrum import (
    LanczosResult,
    invariant_status,
    random_start,
    start_vector,
)
from ritz.spectra._lanczos.steps import step

BoundsMethod = Literal["auto", "gershgorin", "lanczos"]
Certificate = Literal["random", "inertia", "none"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the search for extreme eigenvalues."""

    # Probability that an eigenvalue outside of the bounds, or a wanted pair, is missed. The number
    # of steps grows with its logarithm: 0.001 costs a fifth more steps than 0.01. With 0.01 the
    # norm of a 7 x 7 x 7 grid was outside of its interval in 1 of 20 runs, with 0.001 in none of
    # 40.
    missed: float = 0.001
    # Number of steps before the first check, in addition to the number of wanted pairs. After two
    # or three steps a Krylov space represents the bulk only.
    patience: int = 10
    # Number of steps between two checks, of pairs and of bounds.
    spacing_pairs: int = 5
    spacing_bounds: int = 2
    # Smallest default of max_vectors, and the number of bytes up to which it is the long one. With
    # 20 and 40 vectors the six smallest pairs of a grid of 10,000 rows take 678 and 431 products;
    # of 160,000 rows more than 20,000 and 2,233 (benchmarks/multiplicity.py, rtol 1e-6). For easy
    # matrices both take the same number.
    short_basis: int = 20
    long_basis: int = 40
    basis: int = 2**28
    # Roundoff of a Ritz value by the sums over rows of products, in eps |A| sqrt(n sum_i u_i^4):
    # three standard deviations for an arrow matrix of 300 rows, whose eigenvector has one entry.
    sums: float = 0.75


TUNING = Tuning()
CERTAINTY = {
    "random": f"none is missed, with probability {1 - TUNING.missed:g}",
    "inertia": "none is missed, by inertia",
    "none": "repeated eigenvalues count once, and others may be missed",
}

# ------------------------------------------------------------------------------------------
# Extreme eigenpairs.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Eigenpairs(LanczosResult):
    r"""Extreme eigenvalues of a symmetric matrix with residuals and eigenvectors.

    Attributes:
        values: Eigenvalues :math:`\theta_k`, first the smallest and then the largest, ascending,
            ``(k,)``, float64.
        residuals: :math:`\|A u_k - \theta_k u_k\|` including roundoff, ``(k,)``. An eigenvalue lies
            within this distance of each value.
        roundoff: The part of each residual that is roundoff.
        gaps: Distances to the nearest other eigenvalue, ``(k,)``, as far as the Ritz values of the
            run and their residuals show: zero if they overlap. A run may not see copies of an
            eigenvalue, or others that its start vector hardly contains. ``None`` in older files.
        vectors: Eigenvectors :math:`u_k` as columns, ``(n, k)``, or ``None``. With a spread basis:
            the rows of this process.
        dimension: Order ``n`` of the operator.
        num_products: Number of products.
        operator: ``repr`` of the operator.
        matrix: Which matrix of a network or graph it is, such as ``hessian``; ``None`` if unknown.
        batch_norm: Batch-norm mode of the network; ``None`` without batch norm.
        settings: Settings of the run.
        seed: Seed of the start vector, ``None`` if the caller gave one.
        status: Whether all wanted pairs have converged.
    """

    gaps: Tensor | None = None

    def __str__(self) -> str:
        lines = [
            f"{len(self.values)} extreme eigenvalues of {self.operator}",
            f"  {self.status}",
            f"  {'value':>14}  {'residual':>9}",
        ]
        pairs = zip(self.values.flip(0), self.residuals.flip(0), strict=True)
        lines += [f"  {float(value):14.8g}  {float(error):9.1g}" for value, error in pairs]
        return "\n".join(lines)


def eigenpairs(
    op: OperatorLike,
    *,
    largest: int = 0,
    smallest: int = 0,
    rtol: float | None = None,
    max_steps: int | None = None,
    max_vectors: int | None = None,
    vectors: bool = True,
    start: Tensor | None = None,
    certify: Certificate = "random",
    reorthogonalize: Reorthogonalization = "full",
    placement: Placement = "device",
    group: Group | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Eigenpairs:
    r"""Return extreme eigenvalues and eigenvectors to a tolerance, by Lanczos with thick restarts.

    Compare :func:`scipy.sparse.linalg.eigsh`. Eigenvalues are repeated as often as in the matrix.
    A Krylov space contains one eigenvector of each eigenvalue. So converged pairs are locked, and
    the run continues from a new random vector in their orthogonal complement, until no further
    pair is as extreme.

    ============  =======================================  =========================================
    ``certify``   may be missed                            cost
    ============  =======================================  =========================================
    ``random``    nothing, with probability 0.999 over     1.3 times the products of ``none``; twice
                  the random starts                        as many with repeated eigenvalues
    ``inertia``   nothing, apart from roundoff             the products of ``none``, and a
                                                           factorisation for each end
    ``none``      copies of repeated eigenvalues           about the products of ``eigsh``
    ============  =======================================  =========================================

    An eigenvalue counts as missed if it is more extreme than a returned one by more than ``rtol``
    times the norm. A single pair at an end needs no second run. ``inertia`` counts the eigenvalues
    beyond the returned ones by the signs of the pivots of :math:`A - \sigma I`. It needs a dense or
    sparse matrix, whose factors have to fit into memory.

    Cost: one product per step, and ``2 j`` vector reads of re-orthogonalisation in step ``j``.
    Memory beyond the operator: ``max_vectors + 5`` vectors.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; anything that :func:`ritz.as_operator` accepts.
        largest: Number of algebraically largest eigenpairs.
        smallest: Number of algebraically smallest eigenpairs.
        rtol: A pair has converged when its residual is below ``rtol`` times the norm of :math:`A`.
            The error of the eigenvalue is of the order of the square. Defaults to the square root
            of machine precision.
        max_steps: Maximum number of products. Defaults to 200 per wanted pair, at least 2000.
        max_vectors: Maximum number of basis vectors; beyond it the run restarts from the best Ritz
            vectors. Defaults to ``2 k + 4`` for ``k`` wanted pairs, at least 20, and at least 40
            if 40 vectors take less than 256 MB.
        vectors: Return the eigenvectors. They overwrite the basis, so they need no more memory.
        start: Start vector ``(n,)``. Defaults to a random one.
        certify: How to verify that no pair was missed; see the table.
        reorthogonalize: ``full``, or ``partial``, which is cheaper per step but cannot restart: its
            ``max_vectors`` defaults to ``max_steps``. See :func:`ritz.lanczos`.
        placement: Where the basis is stored: ``device``, ``host``, or ``spread`` over processes.
        group: Processes for ``spread``.
        state: File to resume from, and to save to every ``save_interval`` seconds; see
            :func:`ritz.lanczos`. After a restart all vectors are written.
        save_interval: Seconds between saves.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        ValueError: As :func:`ritz.lanczos` does.

    Reference: Wu and Simon (2000) for restarts; Van Dorsselaer, Hochstenbach and Van der Vorst
    (2000) for the probability.

    Example:
        >>> import torch, ritz
        >>> pairs = ritz.eigenpairs(torch.diag(torch.arange(1.0, 101.0)), largest=2)
        >>> [round(value, 3) for value in pairs.values.tolist()], pairs.vectors.shape
        ([99.0, 100.0], torch.Size([100, 2]))
    """
    op = as_operator(op)
    goal = _Goal(op, largest, smallest, rtol, max_steps, max_vectors, reorthogonalize, certify)
    check_choice("placement", placement, get_args(Placement))
    generator = resolve_generator(generator)
    settings = goal.settings | {"placement": placement}
    starts = [start_vector(op, start, generator)]
    saved = SavedRuns(op, starts, goal.capacity, settings, state, save_interval, group)
    starts.clear()  # the basis has a copy
    search = _Search(goal, saved, generator.initial_seed(), random=start is None)
    status = search.advance(progress)
    values, coefficients, residuals = search.run.ritz_pairs()
    chosen = goal.extremes(len(values))
    roundoff = search.roundoff
    return Eigenpairs(
        values=values[chosen],
        residuals=residuals[chosen] + roundoff,
        roundoff=roundoff,
        gaps=_gaps(values, residuals + roundoff)[chosen],
        vectors=search.run.basis.combine(coefficients[:, chosen]).T if vectors else None,
        num_products=search.spent,
        seed=search.seed if start is None else None,
        status=status,
        **saved.facts,
    )


def _gaps(values: Tensor, residuals: Tensor) -> Tensor:
    """Return distances from Ritz values to the nearest eigenvalue that another one stands for."""
    # There is an eigenvalue within the residual of each Ritz value.
    distances = (values[:, None] - values).abs() - residuals - residuals[:, None]
    return distances.fill_diagonal_(math.inf).amin(1).clamp_min(0.0)


# ------------------------------------------------------------------------------------------
# Bounds of the spectrum, and its norm.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(HasStatus):
    """An interval that contains a spectrum; ``low, high = bounds`` unpacks it.

    Attributes:
        low: Lower end.
        high: Upper end.
        rigorous: Whether the interval certainly contains all eigenvalues. Bounds by Lanczos contain
            them with probability 0.999 over the start vector.
        num_products: Number of products.
        method: How the ends were computed.
        status: Whether the ends reached the tolerance.
        ritz: Smallest and largest Ritz value, which lie within the spectrum; ``None`` if no product
            was computed.
    """

    low: float
    high: float
    rigorous: bool
    num_products: int
    method: str
    status: Status
    ritz: tuple[float, float] | None = None

    def __iter__(self) -> Iterator[float]:
        return iter((self.low, self.high))

    def __str__(self) -> str:
        kind = "certainly" if self.rigorous else "almost certainly"
        interval = f"[{self.low:.6g}, {self.high:.6g}] {kind} contains the spectrum"
        return f"{interval} ({self.method}; {self.status})"


def bounds(
    op: OperatorLike,
    *,
    method: BoundsMethod = "auto",
    rtol: float = 0.01,
    max_steps: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Bounds:
    r"""Return an interval that contains the spectrum.

    ``gershgorin`` needs an explicit matrix and no product. Its interval is certain but wide.
    ``lanczos`` takes steps until the interval exceeds the extreme Ritz values by at most ``rtol``
    times the norm at each end. Its interval contains the spectrum with probability 0.999. ``auto``
    intersects the two.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        rtol: Margin, relative to the norm.
        max_steps: Maximum number of products; 20 to 60 are usual. If it is reached, the interval
            still contains the spectrum with this probability, but may be wide.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Van Dorsselaer, Hochstenbach and Van der Vorst (2000).
    """
    op = as_operator(op)
    check_choice("method", method, get_args(BoundsMethod))
    check_rtol(rtol, low=torch.finfo(op.dtype).eps)
    discs = gershgorin(op) if method != "lanczos" else None
    if method == "gershgorin":
        if discs is None:
            raise ValueError(f"method='gershgorin' needs an explicit matrix, got {op!r}")
        exact = Status(outcome="completed", message="no product")
        return Bounds(
            low=discs[0],
            high=discs[1],
            rigorous=True,
            num_products=0,
            method="Gershgorin",
            status=exact,
        )
    search, status = _ends(op, "bounds", discs, rtol, max_steps, generator, progress)
    values = search.run.ritz_pairs()[0]
    return Bounds(
        low=search.bound(-1),
        high=search.bound(1),
        rigorous=False,
        num_products=search.spent,
        method="Lanczos" if discs is None else "Lanczos within Gershgorin",
        status=status,
        ritz=(float(values[0]), float(values[-1])),
    )


def spectral_norm(
    op: OperatorLike,
    *,
    rtol: float = 1e-3,
    max_steps: int = 1000,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return the spectral norm :math:`\max_i |\lambda_i|`.

    The largest modulus of a Ritz value is a lower bound of the norm. ``truncation`` is the distance
    to an upper bound, which holds with probability 0.999 over the start vector; see :func:`bounds`.
    The error is usually far smaller. ``stderr`` is zero, since nothing is averaged.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        rtol: Truncation to reach, relative to the norm.
        max_steps: Maximum number of products.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    op = as_operator(op)
    discs = gershgorin(op)
    search, status = _ends(op, "norm", discs, rtol, max_steps, generator, progress)
    value = float(search.run.ritz_pairs()[0].abs().max())
    # The spectrum holds the Ritz values, and nothing beyond the bounds.
    low, high = search.bound(-1), search.bound(1)
    error = max(high, -low) - value
    return Estimate.exact(
        value,
        truncation=max(error, search.roundoff),
        num_products=search.spent,
        method="Lanczos",
        status=status,
        seed=search.seed,
    )


# ------------------------------------------------------------------------------------------
# The search for extreme pairs: its goal, and the run with its stopping rule.


class _Goal:
    """The wanted pairs and the limits of a search, checked and with defaults filled in."""

    def __init__(
        self,
        op: LinearOperator,
        largest: int,
        smallest: int,
        rtol: float | None,
        max_steps: int | None,
        max_vectors: int | None = None,
        mode: Reorthogonalization = "full",
        certify: Certificate = "random",
        ends: Literal["bounds", "norm"] | None = None,
        discs: tuple[float, float] | None = None,
    ) -> None:
        n, eps = op.shape[0], torch.finfo(op.dtype).eps
        largest = check_count("largest", largest, low=0, high=n)
        smallest = check_count("smallest", smallest, low=0, high=n - largest)
        self.largest, self.smallest, self.wanted = largest, smallest, largest + smallest
        if not self.wanted:
            raise ValueError("largest or smallest must be at least 1, got 0 for both")
        self.max_steps = max(2000, 200 * self.wanted) if max_steps is None else max_steps
        self.max_steps = check_count("max_steps", self.max_steps)
        self.rtol = eps**0.5 if rtol is None else rtol
        check_rtol(self.rtol, low=eps)
        check_choice("certify", certify, get_args(Certificate))
        # For "bounds" or "norm" only the end values must be accurate, and no vectors.
        self.certify, self.ends = certify, ends
        low, high = discs or (-math.inf, math.inf)
        self.discs = {-1: low, 1: high}
        if certify == "inertia" and not isinstance(op, DenseOperator | SparseOperator):
            raise ValueError(f"certify='inertia' needs a dense or sparse matrix, got {op!r}")
        check_choice("reorthogonalize", mode, ("full", "partial"))
        if max_vectors is None:
            small = TUNING.long_basis * n * op.dtype.itemsize <= TUNING.basis
            least = TUNING.long_basis if small else TUNING.short_basis
            max_vectors = max(2 * self.wanted + 4, least) if mode == "full" else self.max_steps
        else:
            max_vectors = check_count("max_vectors", max_vectors, low=self.wanted + 2)
        self.max_vectors = min(max_vectors, self.max_steps, n)
        self.restarts = self.max_vectors < min(self.max_steps, n)
        if self.restarts and mode != "full":
            raise ValueError(f"a restart needs reorthogonalize='full', got {mode!r}")
        # A restart needs room for the residual vector beside the basis.
        self.capacity = self.max_vectors + self.restarts
        names = ("largest", "smallest", "rtol", "max_steps", "max_vectors", "certify")
        self.settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        self.settings["reorthogonalize"] = mode

    def extremes(self, size: int) -> Tensor:
        """Return the indices of the wanted ones of ``size`` ascending values."""
        return extremes(size, self.smallest, self.largest)

    def success(self, spent: int) -> Status:
        """Return the status of a run that has reached the goal."""
        if self.ends:
            message = f"{self.ends} to rtol {self.rtol:.1g} in {spent} products"
        else:
            message = f"{self.wanted} pairs to rtol {self.rtol:.1g} in {spent} products; "
            message += CERTAINTY[self.certify]
        return Status(outcome="converged", message=message)

    def failure(self, spent: int, met: int, error: float, tolerance: float) -> Status:
        """Return the status of a run of ``max_steps`` that found ``met`` pairs."""
        pairs = f"{met} of {self.wanted} pairs reached rtol {self.rtol:.1g} in {spent} products; "
        if self.ends:
            message = f"{self.ends} did not reach rtol {self.rtol:.1g} in {spent} products"
        elif met < self.wanted:
            message = pairs + f"the largest residual is {error:.1g}, the goal {tolerance:.1g}"
        else:
            message = pairs + "repeated ones may be missing"
        missing = met == self.wanted and not self.ends
        return Status(
            outcome="uncertain" if missing else "max_steps",
            message=message,
            advice="raise max_steps, max_vectors or rtol",
        )


class _Search:
    """One run in progress: step, check, restart, lock, begin with a new start vector, save.

    Args:
        goal: The wanted pairs and the limits.
        saved: The run and its journal.
        seed: Seed of further start vectors.
        random: Whether the start vector is random. Only then the probability of missing an
            eigenvalue is known.
    """

    def __init__(self, goal: _Goal, saved: SavedRuns, seed: int, *, random: bool = True) -> None:
        self.op, self.goal, self.saved, self.seed = saved.op, goal, saved, seed
        self.run = saved.runs[0]
        # "doubt" is the logarithm of the probability that the start vectors before the current one
        # all missed an eigenvalue.
        self.progress: dict[str, Any] = {
            "spent": 0,
            "restarts": 0,
            "random": random,
            "doubt": 0.0,
            "next_check": goal.wanted + TUNING.patience,
        }

    @property
    def spent(self) -> int:
        """Number of products."""
        return int(self.progress["spent"])

    @property
    def roundoff(self) -> float:
        """The part of each residual that is roundoff."""
        return self.run.roundoff(self.progress["restarts"])

    @property
    def tolerance(self) -> float:
        """Largest residual of a pair that has converged."""
        return max(self.goal.rtol * self.run.scale, self.roundoff)

    def advance(self, progress: bool | Progress) -> Status:
        """Take steps until the goal or ``max_steps`` is reached; return the status."""
        self.progress = self.saved.load() or self.progress
        with tracking(progress, "Lanczos", self.goal.max_steps) as bar:
            while True:
                last = self.run.size + 1 == self.goal.max_vectors and not self.goal.restarts
                step(self.op, [self.run], last=last)
                self.progress["spent"] += 1
                bar.update(self.spent)
                status = self._check()
                if status is not None:
                    return status
                self.saved.save(self.progress)

    def bound(self, side: int) -> float:
        """Return the bound of the spectrum on one side (-1 or 1).

        An eigenvalue beyond it is missed with probability ``missed``. If Gershgorin's discs end
        nearer, their end is the bound. The bound exceeds the extreme Ritz value by its roundoff at
        least.
        """
        (values, coefficients, _), log_missed = self.run.ritz_pairs(), self._log_missed()
        limit = math.log(TUNING.missed / 2)
        index = 0 if side < 0 else -1
        end = float(values[index])
        # Each of n additions rounds to the size of the sum, and the errors of the rows average out
        # in u'Au unless the vector has few large entries.
        rows = self.run.basis.rows[: len(coefficients)]
        vector = (coefficients[:, index].to(rows) @ rows).double()
        spread = float((self.op.shape[0] * vector.pow(4).sum()).sqrt())
        inside = outside = self.roundoff + TUNING.sums * self.run.eps * self.run.scale * spread
        whole = self.run.size == self.op.shape[0]  # no eigenvalue is missed
        while not (whole or is_below(log_missed(end + side * outside), limit)):
            inside, outside = outside, max(2 * outside, math.ulp(0.0))
        for _ in range(0 if whole else 10):
            middle = (inside + outside) / 2
            if is_below(log_missed(end + side * middle), limit):
                outside = middle
            else:
                inside = middle
        bound, disc = end + side * outside, self.goal.discs[side]
        return bound if side * bound <= side * disc else disc

    def _check(self) -> Status | None:
        """Return the status if the run is over; otherwise restart or lock if that is due."""
        run, goal, n = self.run, self.goal, self.op.shape[0]
        if run.size == n and not run.locked:
            return invariant_status(n, n)
        final = self.spent == goal.max_steps
        full = run.size in (goal.max_vectors, n)
        if not (final or full or run.exhausted or run.size >= self.progress["next_check"]):
            return None
        # A check costs O(size^3), so checks become rarer as the basis grows.
        spacing = TUNING.spacing_bounds if goal.ends else TUNING.spacing_pairs
        self.progress["next_check"] = run.size + max(spacing, run.size // 10)
        values, _, residuals = run.ritz_pairs()
        chosen = goal.extremes(len(values))
        errors = residuals[chosen]
        met = int((errors <= self.tolerance).sum())
        reached = run.size >= goal.wanted if goal.ends else met == goal.wanted
        edges = self._edges(values) if run.size >= goal.wanted else {}
        hidden = not edges or self._hidden(edges)
        if reached and self._certain(values, edges, hidden):
            return goal.success(self.spent)
        if final:
            return goal.failure(self.spent, met, float(errors.max()), self.tolerance)
        if run.exhausted:
            doubts = map(self._log_missed(), edges.values())
            self._begin(doubt=0.0 if hidden else max(doubts))
        elif reached and hidden and is_below(2**0.5 * run.neglect(chosen), self.tolerance):
            # Half of the squared tolerance remains for pairs that are locked later.
            self._begin(doubt=0.0)
        elif run.size == goal.max_vectors:
            self._restart()
        return None

    def _edges(self, values: Tensor) -> dict[int, float]:
        """Return, by side, the innermost wanted value, moved outwards by the tolerance."""
        goal, norm = self.goal, float(values.abs().max())
        if goal.ends == "norm":
            return {side: side * norm * (1 + goal.rtol) for side in (-1, 1)}
        margin = goal.rtol * norm if goal.ends else self.tolerance
        edges = {}
        if goal.smallest:
            edges[-1] = float(values[goal.smallest - 1]) - margin
        if goal.largest:
            edges[1] = float(values[-goal.largest]) + margin
        return edges

    def _hidden(self, edges: dict[int, float]) -> bool:
        """Return whether pairs beyond the edges may be hidden from the current start vector.

        Its Krylov space contains one eigenvector of each eigenvalue, so it hides copies. Copies of
        the value at the edge itself do not matter.
        """
        active = self.run.active_pairs()[0]
        ends = {-1: float(active[0]), 1: float(active[-1])}
        beyond = any(side * ends[side] > side * edge for side, edge in edges.items())
        counted = self.goal.certify == "inertia" and not self.run.locked
        return beyond or counted or not self.progress["random"]

    def _certain(self, values: Tensor, edges: dict[int, float], hidden: bool) -> bool:
        """Return whether no eigenvalue beyond the edges is missing."""
        if self.goal.certify == "none" or self.run.size == self.op.shape[0]:
            return True
        if self.goal.certify == "random":
            # Each end gets half of the probability. No eigenvalue lies beyond Gershgorin's discs.
            limit, log_missed = math.log(TUNING.missed / 2), self._log_missed()
            return not hidden and all(
                side * edge >= side * self.goal.discs[side] or is_below(log_missed(edge), limit)
                for side, edge in edges.items()
            )
        n = self.op.shape[0]
        for side, edge in edges.items():
            below = _count_below(cast("SparseOperator", self.op), edge)
            beyond = int((side * values > side * edge).sum())
            if beyond != (below if side < 0 else n - below):
                return False
        return True

    def _log_missed(self) -> Callable[[float], float]:
        """Return a function of a point: the log probability of missing an eigenvalue beyond it."""
        # The component of a random unit vector along an eigenvector is below sqrt(w) with
        # probability at most sqrt(2 n w / pi), and w <= 1 / sum_j p_j^2.
        if not self.run.scale:  # the product of a random vector is zero only for the zero matrix
            return lambda point: -math.inf
        doubt, christoffel = self.progress["doubt"], self.run.log_christoffel()
        log_n = math.log(2 * self.op.shape[0] / math.pi)
        return lambda point: doubt + min(0.0, (log_n - christoffel(point)) / 2)

    def _restart(self) -> None:
        """Restart with the wanted pairs and their neighbours in half of the remaining basis."""
        goal, locked = self.goal, len(self.run.locked)
        wanted = 0 if locked else goal.wanted
        count = wanted + (goal.max_vectors - locked - wanted) // 2
        low = round(count * goal.smallest / goal.wanted)
        self.run.restart(low, count - low)
        self.progress["restarts"] += 1
        self.progress["next_check"] = (
            self.run.size + TUNING.spacing_bounds if goal.ends else goal.max_vectors
        )

    def _begin(self, *, doubt: float) -> None:
        """Lock the wanted pairs, and begin with a random vector in their orthogonal complement."""
        self.run.lock(self.goal.extremes(self.run.size))
        fresh = torch.Generator().manual_seed((self.seed + self.spent) % 2**63)
        self.run.begin(random_start(self.op, fresh))
        self.progress["restarts"] += 1
        self.progress |= {"random": True, "doubt": doubt}
        self.progress["next_check"] = self.run.size + TUNING.patience


def _ends(
    op: LinearOperator,
    kind: Literal["bounds", "norm"],
    discs: tuple[float, float] | None,
    rtol: float,
    max_steps: int,
    generator: torch.Generator | None,
    progress: bool | Progress,
) -> tuple[_Search, Status]:
    smallest = min(1, op.shape[0] - 1)  # a number has one eigenvalue only
    goal = _Goal(op, 1, smallest, rtol, max_steps, ends=kind, discs=discs)
    generator = resolve_generator(generator)
    starts = [random_start(op, generator)]
    settings = goal.settings | {"placement": "device"}
    saved = SavedRuns(op, starts, goal.capacity, settings, None, 0.0, None)
    search = _Search(goal, saved, generator.initial_seed())
    return search, search.advance(progress)


def _count_below(op: DenseOperator | SparseOperator, shift: float) -> int:
    """Return the number of eigenvalues below a shift, which is the number of negative pivots."""
    # Sylvester: A - s I = L D L' has as many negative eigenvalues as D.
    if isinstance(op, DenseOperator):
        matrix = op.matrix.detach().cpu().double() - shift * torch.eye(op.shape[0]).double()
        _, pivots, _ = scipy.linalg.ldl(matrix.numpy())
        # D has blocks of order 1 and 2.
        signs = scipy.linalg.eigvalsh_tridiagonal(pivots.diagonal(), pivots.diagonal(1))
        return int((signs < 0).sum())
    rows = op.matrix.cpu().double()
    parts = (rows.values().numpy(), rows.col_indices().numpy(), rows.crow_indices().numpy())
    shifted = scipy.sparse.csc_array(parts, shape=op.shape) - shift * scipy.sparse.eye_array(
        op.shape[0], format="csc"
    )
    # Pivots on the diagonal keep the matrix symmetric: then U = D L'.
    options = {"SymmetricMode": True}
    factors = scipy.sparse.linalg.splu(
        shifted.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options
    )
    if (factors.perm_r != factors.perm_c).any():
        raise ValueError(f"certify='inertia' fails: {op!r} has no stable factors without pivoting")
    return int((factors.U.diagonal() < 0).sum())
