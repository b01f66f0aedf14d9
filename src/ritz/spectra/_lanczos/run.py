"""Lanczos runs: the spectrum of a symmetric operator, from one start vector or from several."""

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
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Status
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.spectra._lanczos.recurrence import (
    PLACEMENTS,
    REORTHOGONALIZATIONS,
    ROUNDOFF,
    Placement,
    Recurrence,
    Reorthogonalization,
    advance,
)
from ritz.spectra._lanczos.spectrum import Spectrum
from ritz.spectra._lanczos.state import Journal


def lanczos(
    op: OperatorLike,
    *,
    num_steps: int,
    start: Tensor | None = None,
    vectors: bool = False,
    reorthogonalize: Reorthogonalization = "full",
    placement: Placement = "device",
    group: Group | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Spectrum:
    r"""Return Ritz values, Gauss weights and residuals of a symmetric operator.

    .. math:: A V = V T + \beta_m v_{m+1} e_m^\top, \quad T e_k = \theta_k e_k, \quad
        u_k = V e_k, \quad \tau_k = (e_k)_1^2

    The ``m`` Ritz values are a discrete picture of the whole density of eigenvalues, not the ``m``
    largest eigenvalues: for those see :func:`ritz.eigenpairs`.

    Cost: one product per step, and ``2 j`` vector reads of re-orthogonalisation in step ``j``.
    Memory beyond the operator: ``num_steps + 4`` vectors, or 6 for ``reorthogonalize="none"``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; anything :func:`ritz.as_operator` takes.
        num_steps: Number of steps :math:`m`, at most ``n``.
        start: Start vector ``(n,)``. Defaults to a random one.
        vectors: Whether to return Ritz vectors. They overwrite the basis, so they need no more
            memory than it did.
        reorthogonalize: ``full`` (every step, to machine precision), ``partial`` (where needed,
            to its root; several times cheaper) or ``none`` (two vectors of
            memory; converged values repeat).
        placement: Where the basis is stored: ``device``, ``host``, or ``spread`` over processes.
        group: Processes for ``spread``.
        state: File to resume from, and to save to every ``save_interval`` seconds. The result is
            bit for bit that of an uninterrupted run (on the CPU). A save writes the vectors that
            are new since the last one; the files take as much room as the basis. They stay when
            the run ends; their names begin with that of the file. Resuming costs one product more,
            which is not counted: one that the state knows is made again, and a state of another
            operator is refused.
        save_interval: Seconds between saves.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Raises:
        ValueError: The products hold NaN or Inf, are not those of a symmetric matrix, or change
            from call to call. All three are noticed during the run, at no cost. Or the
            state is of other settings or of another operator.

    Reference: Algorithm 7 and section 4.4 of *Spectral Machine Learning*; Simon (1984) for partial
    re-orthogonalisation.

    Example:
        >>> import torch, ritz
        >>> spectrum = ritz.lanczos(torch.diag(torch.arange(1.0, 101.0)), num_steps=30)
        >>> spectrum.values.shape, round(float(spectrum.weights.sum()), 6)
        (torch.Size([30]), 1.0)
    """
    op = as_operator(op)
    _check_settings(op, num_steps, vectors, reorthogonalize)
    check_choice("placement", placement, PLACEMENTS)
    generator = resolve_generator(generator)
    seed = generator.initial_seed() if start is None else None
    first = random_start(op, generator) if start is None else check_start(op, start)
    run = Recurrence(
        first, capacity=num_steps, mode=reorthogonalize, placement=placement, group=group
    )
    settings = {"num_steps": num_steps, "reorthogonalize": reorthogonalize, "placement": placement}
    journal = open_journal(op, state, settings, [first], save_interval, group)
    del first
    _advance(op, [run], num_steps, journal, progress)
    return _spectrum(op, run, settings, seed, vectors=vectors)


def lanczos_block(
    op: OperatorLike,
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
    r"""Return one spectrum per start vector, of runs that advance side by side.

    A step is one product with a block of all their vectors, which is where blocks save: each run
    has the numbers it would have alone, to roundoff. Memory: ``num_steps + 4`` vectors per probe.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_steps: Number of steps, at most ``n``.
        num_probes: Number of runs, unless ``start`` says it.
        start: Start vectors ``(n, k)``. Defaults to random ones.
        against: Vectors ``(n, c)`` whose cosines with the Ritz vectors to return: one read of the
            basis each, and no Ritz vector is formed.
        vectors: Whether to return Ritz vectors.
        reorthogonalize: ``full``, ``partial`` or ``none``; see :func:`lanczos`.
        group: Processes that make the runs together, for ``state``.
        state: File to resume from, and to save to; see :func:`lanczos`.
        save_interval: Seconds between saves.
        generator: Source of the start vectors. Defaults to a new generator with seed 0.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    op = as_operator(op)
    _check_settings(op, num_steps, vectors, reorthogonalize)
    check_count("num_probes", num_probes)
    if against is not None:
        _check_against(op, against, reorthogonalize)
    generator = resolve_generator(generator)
    seed = generator.initial_seed() if start is None else None
    if start is None:
        columns = [random_start(op, generator) for _ in range(num_probes)]
    elif start.ndim == 2 and start.shape[1]:
        columns = [check_start(op, column.contiguous()) for column in start.T]
    else:
        raise ValueError(f"start must be ({op.shape[0]}, k), got {tuple(start.shape)}")
    runs = [Recurrence(column, capacity=num_steps, mode=reorthogonalize) for column in columns]
    settings = {"num_steps": num_steps, "reorthogonalize": reorthogonalize, "placement": "device"}
    journal = open_journal(op, state, settings, columns, save_interval, group)
    _advance(op, runs, num_steps, journal, progress)
    return tuple(
        _spectrum(op, run, settings, seed, vectors=vectors, against=against) for run in runs
    )


def random_start(op: LinearOperator, generator: torch.Generator) -> Tensor:
    """A Gaussian start vector ``(n,)``."""
    shape = (op.shape[0], 1)
    return probes(shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device)[
        :, 0
    ]


def check_start(op: LinearOperator, start: Tensor) -> Tensor:
    """Return a start vector that was given, or raise if it is none."""
    check_tensor("start", start, dtype=op.dtype, device=op.device, rows=op.shape[0])
    if start.ndim != 1:
        raise ValueError(f"start must be a vector ({op.shape[0]},), got {tuple(start.shape)}")
    check_finite("start", start)
    if not bool(start.any()):
        raise ValueError("start must not be zero")
    return start


def open_journal(
    op: LinearOperator,
    state: str | os.PathLike[str] | None,
    settings: dict[str, Any],
    starts: Sequence[Tensor],
    save_interval: float,
    group: Group | None,
) -> Journal | None:
    """Return the journal of a run that is saved, with what a state must have in common with it."""
    if state is None:
        return None
    sha = hashlib.sha256()
    for start in starts:
        sha.update(start.contiguous().cpu().view(torch.uint8).numpy().data)
    own = {"n": op.shape[0], "dtype": str(op.dtype), "probes": len(starts)}
    return Journal.open(
        state, settings | own | {"start": sha.hexdigest()[:16]}, save_interval, group
    )


def closing(size: int, n: int) -> Status:
    """The status of a run whose space of that dimension is invariant."""
    what = "the whole space" if size == n else "an invariant subspace"
    message = f"{what} of dimension {size} was found: its values are exact to roundoff"
    return Status(outcome="breakdown", message=message)


def roundoff_of(run: Recurrence, *, restarts: int = 0) -> float:
    """The part of every residual that is roundoff."""
    # Every restart mixes the basis anew; without re-orthogonalisation every step adds its own.
    growth = 1 + restarts + (run.size if run.mode == "none" else 0)
    return ROUNDOFF * run.eps * run.scale * math.sqrt(growth)


def _advance(
    op: LinearOperator,
    runs: Sequence[Recurrence],
    num_steps: int,
    journal: Journal | None,
    progress: bool | Progress,
) -> None:
    first, between = 0, None
    if journal is not None:
        first, between = journal.begin(runs, op), partial(journal.keep, runs)
    with tracking(progress, "Lanczos", num_steps) as bar:
        advance(op, runs, num_steps, bar, first=first, between=between)


def _spectrum(
    op: LinearOperator,
    run: Recurrence,
    settings: dict[str, Any],
    seed: int | None,
    *,
    vectors: bool,
    against: Tensor | None = None,
) -> Spectrum:
    values, coefficients = torch.linalg.eigh(run.projected())
    done = Status(outcome="completed", message=f"{run.size} steps")
    roundoff = roundoff_of(run)
    return Spectrum(
        values=values,
        weights=coefficients[0].square(),
        residuals=run.residuals(coefficients) + roundoff,
        roundoff=roundoff,
        cosines=None if against is None else _cosines(run, against) @ coefficients,
        vectors=run.basis.combine(coefficients).T if vectors else None,
        diagonal=torch.tensor(run.alphas, dtype=torch.float64),
        off_diagonal=torch.tensor(run.betas[:-1], dtype=torch.float64),
        dimension=op.shape[0],
        num_products=run.size,
        operator=repr(op),
        matrix=op.origin.get("matrix"),
        batch_norm=op.origin.get("batch_norm"),
        settings=settings,
        seed=seed,
        status=closing(run.size, op.shape[0]) if run.exhausted else done,
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


def _check_settings(
    op: LinearOperator, num_steps: int, vectors: bool, mode: Reorthogonalization
) -> None:
    check_choice("reorthogonalize", mode, REORTHOGONALIZATIONS)
    check_count("num_steps", num_steps, high=op.shape[0])
    if vectors and mode == "none":
        raise ValueError("vectors need a basis, which reorthogonalize='none' does not keep")
