"""Lanczos: the spectrum of a symmetric operator, or a few of its extreme eigenpairs."""

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_range, check_tensor
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Status
from ritz.operators.base import LinearOperator
from ritz.operators.interop import as_operator
from ritz.spectra.basis import PLACEMENTS, Placement
from ritz.spectra.recurrence import (
    REORTHOGONALIZATIONS,
    Recurrence,
    Reorthogonalization,
    step,
)
from ritz.spectra.resume import Journal
from ritz.spectra.spectrum import Spectrum

# Roundoff in the residual of a Ritz pair, in units of eps ||A||: products, assembly, norm.
ROUNDOFF = 8.0
# Steps in a fresh direction before a found invariant subspace is believed to hold what is wanted.
FRESH_STEPS = 10


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

    Cost: one product a step, and ``4 j`` vector reads of re-orthogonalisation in step ``j``.
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
            vectors (thick restart). Default: ``2 k + 20`` for ``k`` wanted pairs.
        vectors: Whether to return Ritz vectors; they overwrite the basis, so they need no more
            memory than it did.
        reorthogonalize: ``full`` (twice, every step), ``partial`` (when needed; several times
            cheaper, orthogonal to the root of machine precision) or ``none`` (two vectors of
            memory; converged values repeat).
        basis: Where the basis lives: ``device``, ``host``, or ``spread`` over the processes.
        group: Processes for ``spread``.
        state: File to resume from, and to save to every ``save_interval`` seconds. The result is
            bit for bit that of an uninterrupted run (on the CPU). The files stay when the run
            ends; their names begin with that of the file.
        save_interval: Seconds between saves.
        generator: Source of the start vector.
        progress: Whether to show a bar, or what to tell.

    Raises:
        ValueError: The products hold NaN or Inf, are not those of a symmetric matrix, or change
            from call to call. All three are seen in the course of the run, at no cost.

    Reference: Algorithm 7 and section 4.4 of *Spectral Machine Learning*; Wu and Simon (2000)
    for the thick restart; Simon (1984) for partial re-orthogonalisation.

    Example:
        >>> import torch, ritz
        >>> spectrum = ritz.lanczos(torch.diag(torch.arange(1.0, 101.0)), num_steps=30)
        >>> spectrum.values.shape, round(float(spectrum.weights.sum()), 6)
        (torch.Size([30]), 1.0)
    """
    op = as_operator(op)
    plan = _Plan.make(op, num_steps, largest, smallest, rtol, max_vectors, vectors, reorthogonalize)
    check_choice("basis", basis, PLACEMENTS)
    generator = resolve_generator(generator)
    seed = generator.initial_seed() if start is None else None
    first = _start_vector(op, start, generator)
    run = Recurrence(
        first, capacity=plan.capacity, mode=reorthogonalize, placement=basis, group=group
    )
    journal = None
    if state is not None:
        settings = plan.settings() | {"basis": basis, "n": op.shape[0], "dtype": str(op.dtype)}
        settings["start"] = _digest(first)
        journal = Journal.open(state, settings, save_interval, group)
    del first
    with tracking(progress, "Lanczos", plan.num_steps) as bar:
        driver = _Driver(op, plan, run, journal, generator.initial_seed())
        status = driver.advance(bar)
    return _spectrum(driver, status, seed=seed, placement=basis)


@dataclass(frozen=True, slots=True)
class _Plan:
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
    ) -> "_Plan":
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
            max_vectors = 2 * wanted + 20 if wanted and mode == "full" else num_steps
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


class _Driver:
    def __init__(
        self, op: LinearOperator, plan: _Plan, run: Recurrence, journal: Journal | None, seed: int
    ) -> None:
        self.op, self.plan, self.run, self.journal, self.seed = op, plan, run, journal, seed
        self.progress = {"spent": 0, "restarts": 0, "closed": 0, "next_check": plan.wanted}

    def advance(self, bar: Progress) -> Status:
        if self.journal is not None:
            self.progress = self.journal.load(self.run) or self.progress
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
            run.begin(_random_start(self.op, fresh))
            self.progress["closed"] = self.progress["closed"] or self.progress["spent"]
        if self.journal is not None and self.journal.due():
            self.journal.save(run, self.progress)

    def _judge(self) -> Status | None:
        """The status if the run is over, ``None`` if it goes on."""
        run, plan, spent = self.run, self.plan, self.progress["spent"]
        if not plan.wanted:
            if run.exhausted:
                return Status(outcome="breakdown", message=_invariant(run.size, self.op.shape[0]))
            done = Status(outcome="completed", message=f"{spent} steps")
            return done if spent == plan.num_steps else None
        if run.size == self.op.shape[0]:
            return Status(outcome="breakdown", message=_invariant(run.size, run.size))
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


def _spectrum(driver: _Driver, status: Status, *, seed: int | None, placement: str) -> Spectrum:
    plan, run, op = driver.plan, driver.run, driver.op
    values, coefficients, residuals = driver.ritz()
    chosen = torch.arange(len(values))
    if plan.wanted:
        chosen = plan.extremes(len(values), plan.smallest, plan.largest)
    columns = coefficients[:, chosen]
    restarted = driver.progress["restarts"] > 0
    roundoff = ROUNDOFF * run.eps * run.scale * math.sqrt(1 + driver.progress["restarts"])
    return Spectrum(
        values=values[chosen],
        weights=None if restarted else columns[0].square(),
        residuals=residuals[chosen] + roundoff,
        vectors=run.basis.combine(columns).T if plan.vectors else None,
        diagonal=None if restarted else torch.tensor(run.alphas, dtype=torch.float64),
        off_diagonal=None if restarted else torch.tensor(run.betas[:-1], dtype=torch.float64),
        dimension=op.shape[0],
        num_products=driver.progress["spent"],
        operator=repr(op),
        settings=plan.settings() | {"basis": placement},
        seed=seed,
        status=status,
    )


def _start_vector(op: LinearOperator, start: Tensor | None, generator: torch.Generator) -> Tensor:
    if start is None:
        return _random_start(op, generator)
    check_tensor("start", start, dtype=op.dtype, device=op.device, rows=op.shape[0])
    if start.ndim != 1:
        raise ValueError(f"start must be a vector ({op.shape[0]},), got {tuple(start.shape)}")
    check_finite("start", start)
    if not bool(start.any()):
        raise ValueError("start must not be zero")
    return start


def _random_start(op: LinearOperator, generator: torch.Generator) -> Tensor:
    shape = (op.shape[0], 1)
    return probes(shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device)[
        :, 0
    ]


def _digest(vector: Tensor) -> str:
    data = vector.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def _invariant(size: int, n: int) -> str:
    if size == n:
        return f"the whole space of dimension {n} is spanned: the values are exact to roundoff"
    return f"an invariant subspace of dimension {size} was found: its values are exact to roundoff"
