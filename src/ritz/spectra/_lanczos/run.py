"""Lanczos: the spectrum of a symmetric operator, or a few of its extreme eigenpairs."""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_range, check_tensor
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Status
from ritz.operators import LinearOperator, as_operator
from ritz.spectra._lanczos.recurrence import (
    PLACEMENTS,
    REORTHOGONALIZATIONS,
    ROUNDOFF,
    Placement,
    Recurrence,
    Reorthogonalization,
    advance,
    step,
)
from ritz.spectra._lanczos.spectrum import Spectrum
from ritz.spectra._lanczos.state import Journal

# ------------------------------------------------------------------------------------------
# What a Lanczos run is to do, and the loop that does it: judge, restart, begin afresh, save.

# Steps in a fresh direction before a found invariant subspace is believed to hold what is wanted.
FRESH_STEPS = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a run, checked and with its defaults filled in."""

    num_steps: int
    largest: int
    smallest: int
    rtol: float
    max_vectors: int
    vectors: bool
    mode: Reorthogonalization
    restarts: bool

    @classmethod
    def make(
        cls,
        op: LinearOperator,
        num_steps: int | None,
        largest: int,
        smallest: int,
        rtol: float | None,
        max_vectors: int | None,
        vectors: bool,
        mode: Reorthogonalization,
    ) -> "Plan":
        n, eps = op.shape[0], torch.finfo(op.dtype).eps
        check_choice("reorthogonalize", mode, REORTHOGONALIZATIONS)
        check_count("largest", largest, low=0, high=n)
        check_count("smallest", smallest, low=0, high=n - largest)
        wanted = largest + smallest
        if num_steps is None:
            if not wanted:
                raise TypeError("num_steps must be given unless largest or smallest is")
            num_steps = max(1000, 100 * wanted)
        check_count("num_steps", num_steps, high=None if wanted else n)
        rtol = eps**0.5 if rtol is None else rtol
        check_range("rtol", rtol, low=eps, high=1.0)
        if max_vectors is None:
            max_vectors = max(2 * wanted + 4, 20) if wanted and mode == "full" else num_steps
        else:
            check_count("max_vectors", max_vectors, low=wanted + 2)
        max_vectors = min(max_vectors, num_steps, n)
        restarts = bool(wanted) and max_vectors < min(num_steps, n)
        if not wanted and max_vectors < num_steps:
            raise ValueError(
                f"max_vectors={max_vectors} is below num_steps={num_steps}, and a restart keeps "
                "wanted pairs only: ask for some with largest or smallest"
            )
        if restarts and mode != "full":
            raise ValueError(f"a restart needs reorthogonalize='full', got {mode!r}")
        if wanted and mode == "none":
            raise ValueError("wanted pairs would repeat with reorthogonalize='none': use another")
        if vectors and mode == "none":
            raise ValueError("vectors need a basis, which reorthogonalize='none' does not keep")
        return cls(num_steps, largest, smallest, rtol, max_vectors, vectors, mode, restarts)

    @property
    def wanted(self) -> int:
        return self.largest + self.smallest

    @property
    def capacity(self) -> int:
        return self.max_vectors + self.restarts

    def settings(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "largest": self.largest,
            "smallest": self.smallest,
            "rtol": self.rtol,
            "max_vectors": self.max_vectors,
            "reorthogonalize": self.mode,
        }

    def extremes(self, size: int, count_low: int, count_high: int) -> Tensor:
        """Indices of that many values at either end of ``size`` ascending ones."""
        low, high = min(count_low, size), min(count_high, size)
        if low + high >= size:
            return torch.arange(size)
        return torch.cat([torch.arange(low), torch.arange(size - high, size)])


class Driver:
    """One run on its way: the recurrence, what it is to do, and how far it is."""

    def __init__(
        self, op: LinearOperator, plan: Plan, run: Recurrence, journal: Journal | None, seed: int
    ) -> None:
        self.op, self.plan, self.run, self.journal, self.seed = op, plan, run, journal, seed
        # Two or three steps meet the bulk alone: an outlier needs some more to show.
        first = plan.wanted + FRESH_STEPS
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
        last = self.run.size + 1 == self.plan.max_vectors and not self.plan.restarts
        step(self.op, [self.run], last=last)
        self.progress["spent"] += 1

    def _make_ready(self) -> None:
        """Make room for the next step, find it a vector, and save, where these are due."""
        run, closed = self.run, self.run.exhausted
        if run.size == self.plan.max_vectors:
            self._restart()
        if closed:  # wanted pairs may hide in the complement of the space found so far
            fresh = torch.Generator().manual_seed((self.seed + self.progress["spent"]) % 2**63)
            run.begin(random_start(self.op, fresh))
            self.progress["closed"] = self.progress["closed"] or self.progress["spent"]
        if self.journal is not None and self.journal.due():
            self.journal.save([run], self.progress)

    def _judge(self) -> Status | None:
        """The status if the run is over, ``None`` if it goes on."""
        run, plan, spent = self.run, self.plan, self.progress["spent"]
        if not plan.wanted:
            if run.exhausted:
                return closing(run.size, self.op.shape[0])
            done = Status(outcome="completed", message=f"{spent} steps")
            return done if spent == plan.num_steps else None
        if run.size == self.op.shape[0]:
            return closing(run.size, run.size)
        full = spent == plan.num_steps or run.size == plan.max_vectors
        if not (full or run.size >= self.progress["next_check"]):
            return None
        self.progress["next_check"] = run.size + max(5, run.size // 10)
        return self._convergence(final=spent == plan.num_steps)

    def _convergence(self, *, final: bool) -> Status | None:
        plan, run, spent = self.plan, self.run, self.progress["spent"]
        _, _, residuals = self.ritz()
        chosen = residuals[plan.extremes(len(residuals), plan.smallest, plan.largest)]
        goal = plan.rtol * run.scale
        met = int((chosen <= goal).sum())
        closed = self.progress["closed"] or (spent if run.exhausted else 0)
        settled = not closed or spent >= closed + FRESH_STEPS
        if met == plan.wanted and settled:
            return Status(
                outcome="converged",
                message=f"{met} pairs to rtol {plan.rtol:.1g} in {spent} products",
            )
        if not final:
            return None
        return Status(
            outcome="max_steps",
            message=f"{met} of {plan.wanted} pairs reached rtol {plan.rtol:.1g} in {spent} "
            f"products; the largest residual is {float(chosen.max()):.1g}, the goal {goal:.1g}",
            advice="raise num_steps, max_vectors or rtol",
        )

    def _restart(self) -> None:
        """Keep the wanted pairs and half of what room is left, nearest to them."""
        plan, run = self.plan, self.run
        values, coefficients, _ = self.ritz()
        extra = (plan.max_vectors - plan.wanted) // 2
        low = round(extra * plan.smallest / plan.wanted)
        keep = plan.extremes(len(values), plan.smallest + low, plan.largest + extra - low)
        run.restart(values[keep], coefficients[:, keep])
        self.progress["restarts"] += 1
        self.progress["next_check"] = plan.max_vectors


def random_start(op: LinearOperator, generator: torch.Generator) -> Tensor:
    """A Gaussian start vector ``(n,)``."""
    shape = (op.shape[0], 1)
    return probes(shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device)[
        :, 0
    ]


def closing(size: int, n: int) -> Status:
    """The status of a run whose space of that dimension is invariant."""
    what = "the whole space" if size == n else "an invariant subspace"
    message = f"{what} of dimension {size} was found: its values are exact to roundoff"
    return Status(outcome="breakdown", message=message)


# ------------------------------------------------------------------------------------------
# Lanczos: the spectrum of a symmetric operator, or a few of its extreme eigenpairs.


def lanczos(
    op: Any,
    *,
    num_steps: int | None = None,
    start: Tensor | None = None,
    largest: int = 0,
    smallest: int = 0,
    rtol: float | None = None,
    max_vectors: int | None = None,
    vectors: bool = False,
    reorthogonalize: Reorthogonalization = "full",
    basis: Placement = "device",
    group: Group | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Spectrum:
    r"""Return Ritz values, Gauss weights and residuals of a symmetric operator.

    .. math:: A V = V T + \beta_m v_{m+1} e_m^\top, \quad T e_k = \theta_k e_k, \quad
        u_k = V e_k, \quad \tau_k = (e_k)_1^2

    Without ``largest`` or ``smallest`` it makes ``num_steps`` steps and returns all ``m`` Ritz
    values, a discrete picture of the whole density. With them it returns those extreme pairs
    and stops once they have converged; a repeated eigenvalue then counts once, unless the space
    closes and the run goes on in a fresh direction.

    Cost: one product a step, and ``2 j`` vector reads of re-orthogonalisation in step ``j``.
    Memory beyond the operator: ``num_steps + 4`` vectors, or ``max_vectors + 5``, or 6 for
    ``reorthogonalize="none"``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; anything :func:`ritz.as_operator` takes.
        num_steps: Steps to make, at most ``n``; with wanted pairs, the most products to spend
            (default: 100 a wanted pair, at least 1000).
        start: Start vector ``(n,)``; random by default.
        largest: Number of algebraically largest eigenpairs wanted.
        smallest: Number of algebraically smallest eigenpairs wanted.
        rtol: Wanted pairs have converged when their residuals are below ``rtol`` times the norm
            of :math:`A`; the eigenvalue error is of the order of its square. Default: root of
            machine precision.
        max_vectors: Most basis vectors to keep: beyond it the run restarts from the best Ritz
            vectors (thick restart). Default: ``2 k + 4`` for ``k`` wanted pairs, at least 20.
        vectors: Whether to return Ritz vectors; they overwrite the basis, so they need no more
            memory than it did.
        reorthogonalize: ``full`` (every step, to machine precision), ``partial`` (where needed,
            to its root; several times cheaper) or ``none`` (two vectors of
            memory; converged values repeat).
        basis: Where the basis lives: ``device``, ``host``, or ``spread`` over the processes.
        group: Processes for ``spread``.
        state: File to resume from, and to save to every ``save_interval`` seconds. The result is
            bit for bit that of an uninterrupted run (on the CPU). A save writes the vectors that
            are new since the last one, all of them after a restart; the files take as much room as
            the basis. They stay when the run ends; their names begin with that of the file. Going
            on costs one product more, which is not counted: one that the state knows is made again,
            and a state of another operator is refused.
        save_interval: Seconds between saves.
        generator: Source of the start vector.
        progress: Whether to show a bar, or what to tell.

    Raises:
        ValueError: The products hold NaN or Inf, are not those of a symmetric matrix, or change
            from call to call. All three are seen in the course of the run, at no cost. Or the
            state is of other settings or of another operator.

    Reference: Algorithm 7 and section 4.4 of *Spectral Machine Learning*; Wu and Simon (2000)
    for the thick restart; Simon (1984) for partial re-orthogonalisation.

    Example:
        >>> import torch, ritz
        >>> spectrum = ritz.lanczos(torch.diag(torch.arange(1.0, 101.0)), num_steps=30)
        >>> spectrum.values.shape, round(float(spectrum.weights.sum()), 6)
        (torch.Size([30]), 1.0)
    """
    op = as_operator(op)
    plan = Plan.make(op, num_steps, largest, smallest, rtol, max_vectors, vectors, reorthogonalize)
    check_choice("basis", basis, PLACEMENTS)
    generator = resolve_generator(generator)
    seed = generator.initial_seed() if start is None else None
    first = random_start(op, generator) if start is None else _checked(op, start)
    run = Recurrence(
        first, capacity=plan.capacity, mode=reorthogonalize, placement=basis, group=group
    )
    journal = None
    if state is not None:
        settings = _state_settings(op, plan, [first]) | {"basis": basis}
        journal = Journal.open(state, settings, save_interval, group)
    del first
    with tracking(progress, "Lanczos", plan.num_steps) as bar:
        driver = Driver(op, plan, run, journal, generator.initial_seed())
        status = driver.advance(bar)
    return _spectrum(op, run, plan, seed=seed, placement=basis, driver=driver, status=status)


def lanczos_block(
    op: Any,
    *,
    num_steps: int,
    num_probes: int = 8,
    start: Tensor | None = None,
    against: Tensor | None = None,
    vectors: bool = False,
    reorthogonalize: Reorthogonalization = "full",
    group: Group | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> tuple[Spectrum, ...]:
    r"""Return one spectrum a probe, of runs that advance side by side.

    A step is one product with a block of all their vectors, which is where blocks save: each run
    has the numbers it would have alone, to roundoff. Memory: ``num_steps + 4`` vectors a probe.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_steps: Steps to make, at most ``n``.
        num_probes: Number of runs, unless ``start`` says it.
        start: Start vectors ``(n, k)``; random by default.
        against: Vectors ``(n, c)`` whose cosines with the Ritz vectors to return: one read of the
            basis each, and no Ritz vector is formed.
        vectors: Whether to return Ritz vectors.
        reorthogonalize: ``full``, ``partial`` or ``none``; see :func:`lanczos`.
        group: Processes that make the runs together, for ``state``.
        state: File to resume from, and to save to; see :func:`lanczos`.
        save_interval: Seconds between saves.
        generator: Source of the start vectors.
        progress: Whether to show a bar, or what to tell.
    """
    op = as_operator(op)
    plan = Plan.make(op, num_steps, 0, 0, None, None, vectors, reorthogonalize)
    check_count("num_probes", num_probes)
    if against is not None:
        _check_against(op, against, reorthogonalize)
    generator = resolve_generator(generator)
    seed = generator.initial_seed() if start is None else None
    if start is None:
        columns = [random_start(op, generator) for _ in range(num_probes)]
    elif start.ndim == 2 and start.shape[1]:
        columns = [_checked(op, column.contiguous()) for column in start.T]
    else:
        raise ValueError(f"start must be ({op.shape[0]}, k), got {tuple(start.shape)}")
    runs = [Recurrence(column, capacity=num_steps, mode=reorthogonalize) for column in columns]
    first, between = 0, None
    if state is not None:
        settings = _state_settings(op, plan, columns)
        journal = Journal.open(state, settings, save_interval, group)
        first, between = journal.begin(runs, op), partial(journal.keep, runs)
    with tracking(progress, "Lanczos", num_steps) as bar:
        advance(op, runs, num_steps, bar, first=first, between=between)
    return tuple(_spectrum(op, run, plan, seed=seed, against=against) for run in runs)


def _spectrum(
    op: LinearOperator,
    run: Recurrence,
    plan: Plan,
    *,
    seed: int | None,
    against: Tensor | None = None,
    placement: Placement = "device",
    driver: Driver | None = None,
    status: Status | None = None,
) -> Spectrum:
    """What a run has found; a driver, where it had one, knows of products and restarts."""
    values, coefficients = torch.linalg.eigh(run.projected())
    chosen = torch.arange(len(values))
    if plan.wanted:
        chosen = plan.extremes(len(values), plan.smallest, plan.largest)
    columns = coefficients[:, chosen]
    restarts = 0 if driver is None else driver.progress["restarts"]
    if status is None:
        done = Status(outcome="completed", message=f"{run.size} steps")
        status = closing(run.size, op.shape[0]) if run.exhausted else done
    # Every restart mixes the basis anew; without re-orthogonalisation every step adds its own.
    growth = 1 + restarts + (run.size if run.mode == "none" else 0)
    roundoff = ROUNDOFF * run.eps * run.scale * math.sqrt(growth)
    return Spectrum(
        values=values[chosen],
        weights=None if restarts else columns[0].square(),
        residuals=run.residuals(columns) + roundoff,
        roundoff=roundoff,
        cosines=None if against is None else _cosines(run, against) @ columns,
        vectors=run.basis.combine(columns).T if plan.vectors else None,
        diagonal=None if restarts else torch.tensor(run.alphas, dtype=torch.float64),
        off_diagonal=None if restarts else torch.tensor(run.betas[:-1], dtype=torch.float64),
        dimension=op.shape[0],
        num_products=run.size if driver is None else driver.progress["spent"],
        operator=repr(op),
        settings=plan.settings() | {"basis": placement},
        seed=seed,
        status=status,
    )


def _cosines(run: Recurrence, against: Tensor) -> Tensor:
    """Parts ``(c, size)`` of unit vectors along the rows of the basis."""
    found = []
    for column in against.T:
        local = run.basis.local(column.contiguous())
        found.append(run.basis.project(local, last=run.size).cpu() / run.basis.norm(local))
    return torch.stack(found)


def _check_against(op: LinearOperator, against: Tensor, mode: Reorthogonalization) -> None:
    check_tensor("against", against, dtype=op.dtype, device=op.device, rows=op.shape[0])
    if mode == "none":
        raise ValueError("against needs a basis, which reorthogonalize='none' does not keep")
    if against.ndim != 2 or not against.shape[1]:
        raise ValueError(f"against must be ({op.shape[0]}, c), got {tuple(against.shape)}")
    if not bool(against.any(0).all()):
        raise ValueError("against must not have a column of zeros")


def _checked(op: LinearOperator, start: Tensor) -> Tensor:
    check_tensor("start", start, dtype=op.dtype, device=op.device, rows=op.shape[0])
    if start.ndim != 1:
        raise ValueError(f"start must be a vector ({op.shape[0]},), got {tuple(start.shape)}")
    check_finite("start", start)
    if not bool(start.any()):
        raise ValueError("start must not be zero")
    return start


def _state_settings(op: LinearOperator, plan: Plan, starts: Sequence[Tensor]) -> dict[str, Any]:
    """What a state must have been made with to be continued."""
    sha = hashlib.sha256()
    for start in starts:
        sha.update(start.contiguous().cpu().view(torch.uint8).numpy().data)
    own = {"n": op.shape[0], "dtype": str(op.dtype), "probes": len(starts)}
    return plan.settings() | own | {"start": sha.hexdigest()[:16]}
