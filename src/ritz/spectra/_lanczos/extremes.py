"""Extreme eigenvalues: pairs to a tolerance in bounded memory, bounds, and the spectral norm."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, HasStatus, Status
from ritz._core.storage import storable
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.operators._shared import gershgorin
from ritz.spectra._lanczos.recurrence import TUNING, Placement, Reorthogonalization, step
from ritz.spectra._lanczos.run import (
    LanczosResult,
    SavedRuns,
    invariant_status,
    random_start,
    start_vector,
)

BoundsMethod = Literal["auto", "gershgorin", "lanczos"]

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

    def __str__(self) -> str:
        lines = [
            f"{len(self.values)} extreme eigenvalues of {self.operator}",
            f"  {self.num_products} products; {self.status}",
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
    reorthogonalize: Reorthogonalization = "full",
    placement: Placement = "device",
    group: Group | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Eigenpairs:
    r"""Return extreme eigenvalues and eigenvectors to a tolerance, by Lanczos with thick restarts.

    Compare :func:`scipy.sparse.linalg.eigsh`. A repeated eigenvalue counts once, unless the Krylov
    space is invariant and the run continues in a fresh direction.

    Cost: one product per step, and ``2 j`` vector reads of re-orthogonalisation in step ``j``.
    Memory beyond the operator: ``max_vectors + 5`` vectors.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; anything that :func:`ritz.as_operator` accepts.
        largest: Number of algebraically largest eigenpairs.
        smallest: Number of algebraically smallest eigenpairs.
        rtol: A pair has converged when its residual is below ``rtol`` times the norm of :math:`A`.
            The error of the eigenvalue is of the order of the square. Defaults to the square root
            of machine precision.
        max_steps: Maximum number of products. Defaults to 100 per wanted pair, at least 1000.
        max_vectors: Maximum number of basis vectors; beyond it the run restarts from the best Ritz
            vectors. Defaults to ``2 k + 4`` for ``k`` wanted pairs, at least 20.
        vectors: Return the eigenvectors. They overwrite the basis, so they need no more memory.
        start: Start vector ``(n,)``. Defaults to a random one.
        reorthogonalize: ``full``, or ``partial``, which is cheaper per step but cannot restart: its
            ``max_vectors`` defaults to ``max_steps``. See :func:`ritz.lanczos`.
        placement: Where the basis is stored: ``device``, ``host``, or ``spread`` over processes.
        group: Processes for ``spread``.
        state: File to resume from, and to save to every ``save_interval`` seconds; see
            :func:`ritz.lanczos`. After a restart all vectors are written.
        save_interval: Seconds between saves.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Raises:
        ValueError: As :func:`ritz.lanczos` does.

    Reference: Wu and Simon (2000).

    Example:
        >>> import torch, ritz
        >>> pairs = ritz.eigenpairs(torch.diag(torch.arange(1.0, 101.0)), largest=2)
        >>> [round(value, 3) for value in pairs.values.tolist()], pairs.vectors.shape
        ([99.0, 100.0], torch.Size([100, 2]))
    """
    op = as_operator(op)
    goal = _Goal(op, largest, smallest, rtol, max_steps, max_vectors, reorthogonalize)
    check_choice("placement", placement, get_args(Placement))
    generator = resolve_generator(generator)
    # A restart needs room for the residual vector beside the basis.
    capacity = goal.max_vectors + goal.restarts
    settings = goal.settings | {"placement": placement}
    starts = [start_vector(op, start, generator)]
    saved = SavedRuns(op, starts, capacity, settings, state, save_interval, group)
    starts.clear()  # the basis has a copy
    search = _Search(goal, saved, generator.initial_seed())
    with tracking(progress, "Lanczos", goal.max_steps) as bar:
        status = search.advance(bar)
    run = search.run
    values, coefficients, residuals = run.ritz_pairs()
    chosen = goal.extremes(len(values))
    roundoff = run.roundoff(search.progress["restarts"])
    return Eigenpairs(
        values=values[chosen],
        residuals=residuals[chosen] + roundoff,
        roundoff=roundoff,
        vectors=run.basis.combine(coefficients[:, chosen]).T if vectors else None,
        num_products=search.progress["spent"],
        seed=search.seed if start is None else None,
        status=status,
        **saved.facts,
    )


class _Goal:
    """The wanted pairs and the limits of a search, checked and with defaults filled in."""

    def __init__(
        self,
        op: LinearOperator,
        largest: int,
        smallest: int,
        rtol: float | None,
        max_steps: int | None,
        max_vectors: int | None,
        mode: Reorthogonalization,
    ) -> None:
        n, eps = op.shape[0], torch.finfo(op.dtype).eps
        check_count("largest", largest, low=0, high=n)
        check_count("smallest", smallest, low=0, high=n - largest)
        self.largest, self.smallest, self.wanted = largest, smallest, largest + smallest
        if not self.wanted:
            raise ValueError("largest or smallest must be at least 1, got 0 for both")
        self.max_steps = max(1000, 100 * self.wanted) if max_steps is None else max_steps
        check_count("max_steps", self.max_steps)
        self.rtol = eps**0.5 if rtol is None else rtol
        check_range("rtol", self.rtol, low=eps, high=1.0)
        check_choice("reorthogonalize", mode, ("full", "partial"))
        if max_vectors is None:
            max_vectors = max(2 * self.wanted + 4, 20) if mode == "full" else self.max_steps
        else:
            check_count("max_vectors", max_vectors, low=self.wanted + 2)
        self.max_vectors = min(max_vectors, self.max_steps, n)
        self.restarts = self.max_vectors < min(self.max_steps, n)
        if self.restarts and mode != "full":
            raise ValueError(f"a restart needs reorthogonalize='full', got {mode!r}")
        names = ("largest", "smallest", "rtol", "max_steps", "max_vectors")
        self.settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        self.settings["reorthogonalize"] = mode

    def extremes(self, size: int, *, below: int = 0, above: int = 0) -> Tensor:
        """Return the indices of the wanted ones of ``size`` ascending values, and of some more.

        ``below`` more at the lower end and ``above`` more at the upper end.
        """
        low, high = min(self.smallest + below, size), min(self.largest + above, size)
        if low + high >= size:
            return torch.arange(size)
        return torch.cat([torch.arange(low), torch.arange(size - high, size)])


class _Search:
    """One run in progress: step, check, restart, continue in a fresh direction, save."""

    def __init__(self, goal: _Goal, saved: SavedRuns, seed: int) -> None:
        self.op, self.goal, self.saved, self.seed = saved.op, goal, saved, seed
        self.run = saved.runs[0]
        # "closed" is the step at which the space first became invariant, or 0.
        self.progress = {"spent": 0, "restarts": 0, "closed": 0}
        self.progress["next_check"] = goal.wanted + TUNING.patience

    def advance(self, bar: Progress) -> Status:
        self.progress = self.saved.load() or self.progress
        while True:
            last = self.run.size + 1 == self.goal.max_vectors and not self.goal.restarts
            step(self.op, [self.run], last=last)
            self.progress["spent"] += 1
            bar.update(self.progress["spent"])
            status = self._check()
            if status is not None:
                return status
            self._prepare()

    def _prepare(self) -> None:
        """Before the next step: restart if the basis is full, find a vector, save."""
        run, closed = self.run, self.run.exhausted
        if run.size == self.goal.max_vectors:
            self._restart()
        if closed:  # wanted pairs may lie in the complement of the invariant subspace
            fresh = torch.Generator().manual_seed((self.seed + self.progress["spent"]) % 2**63)
            run.begin(random_start(self.op, fresh))
            self.progress["closed"] = self.progress["closed"] or self.progress["spent"]
        self.saved.save(self.progress)

    def _restart(self) -> None:
        """Keep the wanted pairs and, in half of the room left, their neighbours."""
        goal = self.goal
        values, coefficients, _ = self.run.ritz_pairs()
        extra = (goal.max_vectors - goal.wanted) // 2
        below = round(extra * goal.smallest / goal.wanted)
        keep = goal.extremes(len(values), below=below, above=extra - below)
        self.run.restart(values[keep], coefficients[:, keep])
        self.progress["restarts"] += 1
        self.progress["next_check"] = goal.max_vectors

    def _check(self) -> Status | None:
        """Return the status if the run is over, ``None`` if it continues."""
        run, goal, spent = self.run, self.goal, self.progress["spent"]
        if run.size == self.op.shape[0]:
            return invariant_status(run.size, run.size)
        final = spent == goal.max_steps
        if not (final or run.size == goal.max_vectors or run.size >= self.progress["next_check"]):
            return None
        # A check costs O(size^3), so checks become rarer as the basis grows.
        self.progress["next_check"] = run.size + max(5, run.size // 10)
        _, _, residuals = run.ritz_pairs()
        chosen = residuals[goal.extremes(len(residuals))]
        tolerance = goal.rtol * run.scale
        met = int((chosen <= tolerance).sum())
        closed = self.progress["closed"] or (spent if run.exhausted else 0)
        if met == goal.wanted and (not closed or spent >= closed + TUNING.patience):
            message = f"{met} pairs to rtol {goal.rtol:.1g} in {spent} products"
            return Status(outcome="converged", message=message)
        if not final:
            return None
        return Status(
            outcome="max_steps",
            message=f"{met} of {goal.wanted} pairs reached rtol {goal.rtol:.1g} in {spent} "
            f"products; the largest residual is {float(chosen.max()):.1g}, "
            f"the goal {tolerance:.1g}",
            advice="raise max_steps, max_vectors or rtol",
        )


# ------------------------------------------------------------------------------------------
# Bounds of the spectrum, and its norm.


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(HasStatus):
    """An interval that contains a spectrum; ``low, high = bounds`` unpacks it.

    Attributes:
        low: Lower end.
        high: Upper end.
        rigorous: Whether the interval certainly contains all eigenvalues. Bounds by Lanczos do so
            with probability near one over the start vector.
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
        interval = f"[{self.low:.6g}, {self.high:.6g}] {kind} holds the spectrum"
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

    ``gershgorin`` needs an explicit matrix and no product. It is certain but wide. ``lanczos``
    computes the extreme Ritz values until their residuals are below ``rtol`` times the norm, and
    widens the interval by as much, for eigenvalues to which the start vector is nearly orthogonal.
    ``auto`` intersects the two.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        rtol: Margin, relative to the norm.
        max_steps: Maximum number of products; 20 to 60 are usual.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    check_choice("method", method, get_args(BoundsMethod))
    discs = gershgorin(op) if method != "lanczos" else None
    if method == "gershgorin":
        if discs is None:
            raise ValueError(f"method='gershgorin' needs an explicit matrix, got {op!r}")
        exact = Status(outcome="completed", message="no product")
        return Bounds(
            low=discs[0], high=discs[1], rigorous=True, num_products=0, method=method, status=exact
        )
    pairs = _ends(op, rtol=rtol, max_steps=max_steps, generator=generator, progress=progress)
    values, margin = pairs.values, float(pairs.residuals.max())
    if pairs.status.outcome != "breakdown":
        margin = max(margin, rtol * float(values.abs().max()))
    low, high = float(values[0]) - margin, float(values[-1]) + margin
    if discs is not None:
        low, high = max(low, discs[0]), min(high, discs[1])
    return Bounds(
        low=low,
        high=high,
        rigorous=False,
        num_products=pairs.num_products,
        method="Lanczos" if discs is None else "Lanczos within Gershgorin",
        status=pairs.status,
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

    Lanczos computes both ends of the spectrum until their residuals are below ``rtol`` times the
    norm. The error of the value is of the order of the square of that. ``truncation`` is the
    residual: an eigenvalue lies within it. Nothing is sampled, so ``stderr`` is zero.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        rtol: Residual to reach, relative to the norm.
        max_steps: Maximum number of products.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    pairs = _ends(op, rtol=rtol, max_steps=max_steps, generator=generator, progress=progress)
    largest = int(pairs.values.abs().argmax())
    return Estimate.exact(
        pairs.values[largest].abs(),
        truncation=pairs.residuals[largest],
        num_products=pairs.num_products,
        method="Lanczos",
        status=pairs.status,
        seed=pairs.seed,
    )


def _ends(op: LinearOperator, **options: Any) -> Eigenpairs:
    smallest = min(1, op.shape[0] - 1)  # a number has one eigenvalue only
    return eigenpairs(op, largest=1, smallest=smallest, vectors=False, **options)
