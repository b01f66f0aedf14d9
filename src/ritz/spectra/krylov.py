"""Lanczos: the spectrum of a symmetric operator, or a few of its extreme eigenpairs."""

import hashlib
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_tensor
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.results import Status
from ritz.operators.base import LinearOperator
from ritz.operators.interop import as_operator
from ritz.spectra.basis import PLACEMENTS, Placement
from ritz.spectra.driver import Driver, Plan, closing, random_start
from ritz.spectra.recurrence import ROUNDOFF, Recurrence, Reorthogonalization, advance
from ritz.spectra.resume import Journal
from ritz.spectra.spectrum import Spectrum


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
