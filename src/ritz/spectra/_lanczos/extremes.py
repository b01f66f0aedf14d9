"""Extreme eigenvalues: pairs to a tolerance in bounded memory, bounds, and the spectral norm."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Estimate, Status
from ritz._core.storage import storable
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.operators._shared import gershgorin
from ritz.spectra._lanczos.recurrence import (
    PLACEMENTS,
    Placement,
    Recurrence,
    Reorthogonalization,
    step,
)
from ritz.spectra._lanczos.run import (
    check_start,
    closing,
    open_journal,
    random_start,
    roundoff_of,
)
from ritz.spectra._lanczos.state import Journal

BoundsMethod = Literal["auto", "gershgorin", "lanczos"]
# Steps in a fresh direction before a found invariant subspace is believed to hold what is wanted.
FRESH_STEPS = 10


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Eigenpairs:
    r"""Extreme eigenvalues of a symmetric matrix with their residuals and eigenvectors.

    Attributes:
        values: Eigenvalues :math:`\theta_k`, the smallest wanted and then the largest, ascending,
            ``(k,)``, float64.
        residuals: :math:`\|A u_k - \theta_k u_k\|` with the part that roundoff adds, ``(k,)``: an
            eigenvalue lies within this distance of each value.
        roundoff: The part of every residual that is roundoff.
        vectors: Eigenvectors :math:`u_k` as columns, ``(n, k)``; ``None`` if not asked for. With
            a spread basis: this process's rows.
        dimension: The order ``n`` of the operator.
        num_products: Products spent.
        operator: What the operator said it was.
        matrix: Which matrix of a network or graph it is, such as ``hessian``; ``None`` if unknown.
        batch_norm: The batch-norm mode of the network; ``None`` without batch norm.
        settings: How the run was made.
        seed: Seed of the start vector, ``None`` if the start vector was given.
        status: Whether all wanted pairs have converged.
    """

    values: Tensor
    residuals: Tensor
    roundoff: float
    vectors: Tensor | None
    dimension: int
    num_products: int
    operator: str
    matrix: str | None = None
    batch_norm: str | None = None
    settings: dict[str, str | int | float | bool | None]
    seed: int | None
    status: Status

    def raise_if_failed(self) -> None:
        """Raise :class:`ritz.NotConvergedError` unless the wanted pairs have converged."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        lines = [
            f"{len(self.values)} extreme eigenvalues of {self.operator}",
            f"  {self.num_products} products; {self.status}",
            f"  {'value':>14}  {'residual':>9}",
        ]
        pairs = zip(self.values.flip(0), self.residuals.flip(0), strict=True)
        return "\n".join(
            lines + [f"  {float(value):14.8g}  {float(error):9.1g}" for value, error in pairs]
        )


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

    Compare :func:`scipy.sparse.linalg.eigsh`. A repeated eigenvalue counts once, unless the space
    closes and the run goes on in a fresh direction.

    Cost: one product per step, and ``2 j`` vector reads of re-orthogonalisation in step ``j``.
    Memory beyond the operator: ``max_vectors + 5`` vectors.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; anything :func:`ritz.as_operator` takes.
        largest: Number of algebraically largest eigenpairs wanted.
        smallest: Number of algebraically smallest eigenpairs wanted.
        rtol: Pairs have converged when their residuals are below ``rtol`` times the norm of
            :math:`A`; the eigenvalue error is of the order of its square. Defaults to the root of
            machine precision.
        max_steps: Most products to spend. Defaults to 100 per wanted pair, at least 1000.
        max_vectors: Most basis vectors to keep: beyond it the run restarts from the best Ritz
            vectors. Defaults to ``2 k + 4`` for ``k`` wanted pairs, at least 20.
        vectors: Whether to return the eigenvectors. They overwrite the basis, so they need no more
            memory than it did.
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
    goal = _Goal.make(op, largest, smallest, rtol, max_steps, max_vectors, reorthogonalize)
    check_choice("placement", placement, PLACEMENTS)
    generator = resolve_generator(generator)
    seed = generator.initial_seed() if start is None else None
    first = random_start(op, generator) if start is None else check_start(op, start)
    run = Recurrence(
        first, capacity=goal.capacity, mode=goal.mode, placement=placement, group=group
    )
    settings = goal.settings() | {"placement": placement}
    journal = open_journal(op, state, settings, [first], save_interval, group)
    del first
    driver = _Driver(op, goal, run, journal, generator.initial_seed())
    with tracking(progress, "Lanczos", goal.max_steps) as bar:
        status = driver.advance(bar)
    values, coefficients, residuals = driver.ritz()
    chosen = goal.extremes(len(values), goal.smallest, goal.largest)
    roundoff = roundoff_of(run, restarts=driver.progress["restarts"])
    return Eigenpairs(
        values=values[chosen],
        residuals=residuals[chosen] + roundoff,
        roundoff=roundoff,
        vectors=run.basis.combine(coefficients[:, chosen]).T if vectors else None,
        dimension=op.shape[0],
        num_products=driver.progress["spent"],
        operator=repr(op),
        matrix=op.origin.get("matrix"),
        batch_norm=op.origin.get("batch_norm"),
        settings=settings,
        seed=seed,
        status=status,
    )


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """An interval that holds a spectrum; ``low, high = bounds`` unpacks it.

    Attributes:
        low: Lower end.
        high: Upper end.
        rigorous: Whether every eigenvalue is certain to lie inside; from Lanczos it is so with
            probability near one over the start vector.
        num_products: Products spent.
        method: How the ends were found.
        status: Whether the ends are as close as asked for.
        ritz: Smallest and largest Ritz value, between which the spectrum reaches at least; ``None``
            where no product was spent.
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

    def raise_if_failed(self) -> None:
        """Raise :class:`ritz.NotConvergedError` unless the ends are as close as asked for."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        kind = "certainly" if self.rigorous else "almost certainly"
        where = f"[{self.low:.6g}, {self.high:.6g}] {kind} holds the spectrum"
        return f"{where} ({self.method}; {self.status})"


def bounds(
    op: OperatorLike,
    *,
    method: BoundsMethod = "auto",
    rtol: float = 0.01,
    max_steps: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Bounds:
    r"""Return an interval that holds the spectrum.

    ``gershgorin`` needs an explicit matrix, no product, and is certain but wide. ``lanczos`` takes
    the extreme Ritz values and moves them out by ``rtol`` times the norm once their residuals
    are below that, so an eigenvalue the start vector hardly met is still inside. ``auto`` takes
    what the two have in common.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        rtol: Margin, as a share of the norm.
        max_steps: Most products to spend; 20 to 60 are usual.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    check_choice("method", method, ("auto", "gershgorin", "lanczos"))
    discs = gershgorin(op) if method != "lanczos" else None
    if method == "gershgorin":
        if discs is None:
            raise ValueError(f"method='gershgorin' needs an explicit matrix, got {op!r}")
        exact = Status(outcome="completed", message="no product")
        return Bounds(
            low=discs[0], high=discs[1], rigorous=True, num_products=0, method=method, status=exact
        )
    found = _ends(op, rtol, max_steps, generator, progress)
    values, margin = found.values, float(found.residuals.max())
    if found.status.outcome != "breakdown":
        margin = max(margin, rtol * float(values.abs().max()))
    low, high = float(values[0]) - margin, float(values[-1]) + margin
    if discs is not None:
        low, high = max(low, discs[0]), min(high, discs[1])
    return Bounds(
        low=low,
        high=high,
        rigorous=False,
        num_products=found.num_products,
        method="Lanczos" if discs is None else "Lanczos within Gershgorin",
        status=found.status,
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

    Both ends of the spectrum by Lanczos until their residuals are below ``rtol`` times the norm;
    the error of the value is of the order of the square of that. ``truncation`` is the residual: an
    eigenvalue lies within it. Nothing is averaged, so ``stderr`` is zero.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        rtol: Residual to reach, relative to the norm.
        max_steps: Most products to spend.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    found = _ends(op, rtol, max_steps, generator, progress)
    largest = int(found.values.abs().argmax())
    return Estimate(
        mean=found.values[largest].abs(),
        stderr=torch.zeros((), dtype=torch.float64),
        truncation=found.residuals[largest],
        num_products=found.num_products,
        method="Lanczos",
        status=found.status,
        seed=found.seed,
    )


def _ends(
    op: LinearOperator,
    rtol: float,
    max_steps: int,
    generator: torch.Generator | None,
    progress: bool | Progress,
) -> Eigenpairs:
    return eigenpairs(
        op,
        largest=1,
        smallest=min(1, op.shape[0] - 1),
        rtol=rtol,
        max_steps=max_steps,
        vectors=False,
        generator=generator,
        progress=progress,
    )


@dataclass(frozen=True, slots=True)
class _Goal:
    """What is asked of a run, checked and with its defaults filled in."""

    largest: int
    smallest: int
    rtol: float
    max_steps: int
    max_vectors: int
    mode: Reorthogonalization
    restarts: bool

    @classmethod
    def make(
        cls,
        op: LinearOperator,
        largest: int,
        smallest: int,
        rtol: float | None,
        max_steps: int | None,
        max_vectors: int | None,
        mode: Reorthogonalization,
    ) -> "_Goal":
        n, eps = op.shape[0], torch.finfo(op.dtype).eps
        check_count("largest", largest, low=0, high=n)
        check_count("smallest", smallest, low=0, high=n - largest)
        wanted = largest + smallest
        if not wanted:
            raise ValueError("largest or smallest must be at least 1, got 0 for both")
        max_steps = max(1000, 100 * wanted) if max_steps is None else max_steps
        check_count("max_steps", max_steps)
        rtol = eps**0.5 if rtol is None else rtol
        check_range("rtol", rtol, low=eps, high=1.0)
        check_choice("reorthogonalize", mode, ("full", "partial"))
        if max_vectors is None:
            max_vectors = max(2 * wanted + 4, 20) if mode == "full" else max_steps
        else:
            check_count("max_vectors", max_vectors, low=wanted + 2)
        max_vectors = min(max_vectors, max_steps, n)
        restarts = max_vectors < min(max_steps, n)
        if restarts and mode != "full":
            raise ValueError(f"a restart needs reorthogonalize='full', got {mode!r}")
        return cls(largest, smallest, rtol, max_steps, max_vectors, mode, restarts)

    @property
    def wanted(self) -> int:
        return self.largest + self.smallest

    @property
    def capacity(self) -> int:
        return self.max_vectors + self.restarts

    def settings(self) -> dict[str, Any]:
        return {
            "largest": self.largest,
            "smallest": self.smallest,
            "rtol": self.rtol,
            "max_steps": self.max_steps,
            "max_vectors": self.max_vectors,
            "reorthogonalize": self.mode,
        }

    def extremes(self, size: int, count_low: int, count_high: int) -> Tensor:
        """Indices of that many values at either end of ``size`` ascending ones."""
        low, high = min(count_low, size), min(count_high, size)
        if low + high >= size:
            return torch.arange(size)
        return torch.cat([torch.arange(low), torch.arange(size - high, size)])


class _Driver:
    """One run in progress: step, judge, restart, begin afresh, save."""

    def __init__(
        self, op: LinearOperator, goal: _Goal, run: Recurrence, journal: Journal | None, seed: int
    ) -> None:
        self.op, self.goal, self.run, self.journal, self.seed = op, goal, run, journal, seed
        # Two or three steps meet the bulk alone: an outlier needs some more to show.
        first = goal.wanted + FRESH_STEPS
        self.progress = {"spent": 0, "restarts": 0, "closed": 0, "next_check": first}

    def advance(self, bar: Progress) -> Status:
        if self.journal is not None:
            self.progress = self.journal.load([self.run], self.op) or self.progress
        status = None
        while status is None:
            self._step()
            bar.update(self.progress["spent"])
            status = self._judge()
            if status is None:
                self._make_ready()
        return status

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, eigenvectors of the projected matrix, and residuals without roundoff."""
        values, coefficients = torch.linalg.eigh(self.run.projected())
        return values, coefficients, self.run.residuals(coefficients)

    def _step(self) -> None:
        last = self.run.size + 1 == self.goal.max_vectors and not self.goal.restarts
        step(self.op, [self.run], last=last)
        self.progress["spent"] += 1

    def _make_ready(self) -> None:
        """Make room for the next step, find it a vector, and save, where these are due."""
        run, closed = self.run, self.run.exhausted
        if run.size == self.goal.max_vectors:
            self._restart()
        if closed:  # wanted pairs may hide in the complement of the space found so far
            fresh = torch.Generator().manual_seed((self.seed + self.progress["spent"]) % 2**63)
            run.begin(random_start(self.op, fresh))
            self.progress["closed"] = self.progress["closed"] or self.progress["spent"]
        if self.journal is not None and self.journal.due():
            self.journal.save([run], self.progress)

    def _judge(self) -> Status | None:
        """The status if the run is over, ``None`` if it goes on."""
        run, goal, spent = self.run, self.goal, self.progress["spent"]
        if run.size == self.op.shape[0]:
            return closing(run.size, run.size)
        full = spent == goal.max_steps or run.size == goal.max_vectors
        if not (full or run.size >= self.progress["next_check"]):
            return None
        self.progress["next_check"] = run.size + max(5, run.size // 10)
        return self._convergence(final=spent == goal.max_steps)

    def _convergence(self, *, final: bool) -> Status | None:
        goal, run, spent = self.goal, self.run, self.progress["spent"]
        _, _, residuals = self.ritz()
        chosen = residuals[goal.extremes(len(residuals), goal.smallest, goal.largest)]
        tolerance = goal.rtol * run.scale
        met = int((chosen <= tolerance).sum())
        closed = self.progress["closed"] or (spent if run.exhausted else 0)
        settled = not closed or spent >= closed + FRESH_STEPS
        if met == goal.wanted and settled:
            return Status(
                outcome="converged",
                message=f"{met} pairs to rtol {goal.rtol:.1g} in {spent} products",
            )
        if not final:
            return None
        return Status(
            outcome="max_steps",
            message=f"{met} of {goal.wanted} pairs reached rtol {goal.rtol:.1g} in {spent} "
            f"products; the largest residual is {float(chosen.max()):.1g}, "
            f"the goal {tolerance:.1g}",
            advice="raise max_steps, max_vectors or rtol",
        )

    def _restart(self) -> None:
        """Keep the wanted pairs and half of what room is left, nearest to them."""
        goal, run = self.goal, self.run
        values, coefficients, _ = self.ritz()
        extra = (goal.max_vectors - goal.wanted) // 2
        low = round(extra * goal.smallest / goal.wanted)
        keep = goal.extremes(len(values), goal.smallest + low, goal.largest + extra - low)
        run.restart(values[keep], coefficients[:, keep])
        self.progress["restarts"] += 1
        self.progress["next_check"] = goal.max_vectors
