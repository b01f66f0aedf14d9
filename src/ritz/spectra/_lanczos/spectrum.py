"""``lanczos`` and ``lanczos_block``: Ritz values and weights from products (``Spectrum``)."""

import os
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_finite, check_tensor
from ritz._core.distributed import Group
from ritz._core.progress import Progress, tracking
from ritz._core.random import draw_probes, resolve_generator
from ritz._core.results import HasStatus, Status, format_uncertain
from ritz._core.storage import storable
from ritz.operators import LinearOperator, OperatorLike, as_operator
from ritz.spectra._lanczos.recurrence import (
    Placement,
    Recurrence,
    Reorthogonalization,
)
from ritz.spectra._lanczos.saved_runs import SavedRuns
from ritz.spectra._lanczos.steps import advance

# ------------------------------------------------------------------------------------------
# The result.


@dataclass(frozen=True, slots=True, kw_only=True)
class LanczosResult(HasStatus):
    """Base class of results of Lanczos runs; :class:`Spectrum` documents the attributes."""

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


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum(LanczosResult):
    r"""Ritz values with Gauss weights and residuals: a picture of the whole spectrum.

    The weighted values are a discrete density that matches the moments
    :math:`z^\top A^j z`, :math:`j \le 2m - 1`, of the unit start vector :math:`z`.
    They are *not* the ``m`` largest eigenvalues. A value with a small residual is an eigenvalue.

    Attributes:
        values: Ritz values :math:`\theta_k`, ascending, ``(m,)``, float64.
        weights: Gauss weights :math:`\tau_k`, ``(m,)``, with sum 1.
        residuals: :math:`\|A u_k - \theta_k u_k\|` including roundoff, ``(m,)``. An eigenvalue lies
            within this distance of each value.
        roundoff: The part of each residual that is roundoff. Values this close to zero may be zero.
        cosines: Cosines between the Ritz vectors and the vectors ``against``, ``(c, m)``, or
            ``None``.
        vectors: Ritz vectors :math:`u_k` as columns, ``(n, m)``, or ``None``. With a spread basis:
            the rows of this process.
        diagonal: Diagonal of the tridiagonal matrix, ``(m,)``.
        off_diagonal: Its off-diagonal, ``(m - 1,)``.
        dimension: Order ``n`` of the operator.
        num_products: Number of products.
        operator: ``repr`` of the operator.
        matrix: Which matrix of a network or graph it is, such as ``hessian``; ``None`` if unknown.
        batch_norm: Batch-norm mode of the network; ``None`` without batch norm.
        settings: Settings of the run.
        seed: Seed of the start vector, ``None`` if the caller gave one.
        status: How the run ended.
    """

    weights: Tensor
    roundoff: float = field(repr=False)
    vectors: Tensor | None = field(repr=False)
    diagonal: Tensor = field(repr=False)
    off_diagonal: Tensor = field(repr=False)
    cosines: Tensor | None = field(default=None, repr=False)

    def __str__(self) -> str:
        values, residuals, count = self.values, self.residuals, len(self.values)
        lines = [
            f"Spectrum of {self.operator}",
            f"  {count} Ritz values from {self.num_products} products; {self.status}",
            f"  {'value':>14}  {'residual':>9}  {'weight':>9}",
        ]
        for i in reversed(range(count)):  # the five largest and the five smallest
            if 5 <= i < count - 5:
                if i == 5:
                    lines.append(f"  {'...':>14}")
                continue
            weight = float(self.weights[i])
            lines.append(f"  {float(values[i]):14.8g}  {float(residuals[i]):9.1g}  {weight:9.2g}")
        return "\n".join([*lines, *_totals(self)])


# ------------------------------------------------------------------------------------------
# The runs.


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

    The ``m`` Ritz values are a discrete picture of the density of all eigenvalues, not the ``m``
    largest eigenvalues. For those see :func:`ritz.eigenpairs`.

    Cost: one product per step, and ``2 j`` vector reads of re-orthogonalisation in step ``j``.
    Memory beyond the operator: ``num_steps + 4`` vectors, or 6 for ``reorthogonalize="none"``.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``; anything that :func:`ritz.as_operator` accepts.
        num_steps: Number of steps :math:`m`, at most ``n``.
        start: Start vector ``(n,)``. Defaults to a random one.
        vectors: Return Ritz vectors. They overwrite the basis, so they need no more memory.
        reorthogonalize: ``full`` (in each step, to machine precision), ``partial`` (if needed, to
            its square root; several times cheaper) or ``none`` (two vectors of memory; converged
            values repeat).
        placement: Where the basis is stored: ``device``, ``host``, or ``spread`` over processes.
        group: Processes for ``spread``.
        state: File to resume from, and to save to every ``save_interval`` seconds. The result of a
            resumed run is bit for bit that of an uninterrupted one (on the CPU). A save writes the
            vectors that are new since the last one. The files take as much room as the basis and
            remain when the run ends; their names begin with that of ``state``. Resuming costs one
            additional product, which is not counted: it detects a state of another operator.
        save_interval: Seconds between saves.
        generator: Source of the start vector. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        ValueError: The products contain NaN or Inf, are not those of a symmetric matrix, or change
            from call to call; the run detects all three at no cost. It cannot detect a change by a
            multiple of the identity, which :func:`ritz.testing.check_operator` finds with a
            repeated product. Or the state belongs to other settings or to another operator.

    Reference: Algorithm 7 and section 4.4 of *Spectral Machine Learning*; Simon (1984) for partial
    re-orthogonalisation.

    Example:
        >>> import torch, ritz
        >>> spectrum = ritz.lanczos(torch.diag(torch.arange(1.0, 101.0)), num_steps=30)
        >>> spectrum.values.shape, round(float(spectrum.weights.sum()), 6)
        (torch.Size([30]), 1.0)
    """
    op = as_operator(op)
    num_steps = _check_settings(op, num_steps, vectors, reorthogonalize)
    check_choice("placement", placement, get_args(Placement))
    generator = resolve_generator(generator)
    settings = {"num_steps": num_steps, "reorthogonalize": reorthogonalize, "placement": placement}
    starts = [start_vector(op, start, generator)]
    saved = SavedRuns(op, starts, num_steps, settings, state, save_interval, group)
    starts.clear()  # the basis has a copy
    _advance(saved, num_steps, progress)
    seed = generator.initial_seed() if start is None else None
    return _spectrum(saved, saved.runs[0], seed, vectors, None)


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
    r"""Return one spectrum per start vector, from runs that advance together.

    A step is one product with a block of all their vectors, which is cheaper than single products.
    Each run gives the same numbers as alone, to roundoff. Memory: ``num_steps + 4`` vectors per
    probe.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        num_steps: Number of steps, at most ``n``.
        num_probes: Number of runs. Ignored if ``start`` is passed.
        start: Start vectors ``(n, k)``. Defaults to random ones.
        against: Vectors ``(n, c)``. Their cosines with the Ritz vectors are returned as
            ``cosines``. Each vector costs one read of the basis; the Ritz vectors are not formed.
        vectors: Return Ritz vectors.
        reorthogonalize: ``full``, ``partial`` or ``none``; see :func:`lanczos`.
        group: Processes that run together, for ``state``.
        state: File to resume from, and to save to; see :func:`lanczos`.
        save_interval: Seconds between saves.
        generator: Source of the start vectors. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    op = as_operator(op)
    num_steps = _check_settings(op, num_steps, vectors, reorthogonalize)
    num_probes = check_count("num_probes", num_probes)
    if against is not None:
        _check_against(op, against, reorthogonalize)
    generator = resolve_generator(generator)
    columns: list[Tensor | None] = [None] * num_probes
    if start is not None:
        check_tensor("start", start, dtype=op.dtype, device=op.device, rows=op.shape[0], ndim=2)
        if not start.shape[1]:
            raise ValueError("start must have at least one column, got none")
        columns = [column.contiguous() for column in start.T]
    starts = [start_vector(op, column, generator) for column in columns]
    settings = {"num_steps": num_steps, "reorthogonalize": reorthogonalize, "placement": "device"}
    saved = SavedRuns(op, starts, num_steps, settings, state, save_interval, group)
    _advance(saved, num_steps, progress)
    seed = generator.initial_seed() if start is None else None
    return tuple(_spectrum(saved, run, seed, vectors, against) for run in saved.runs)


def random_start(op: LinearOperator, generator: torch.Generator) -> Tensor:
    """Return a Gaussian start vector ``(n,)``."""
    return draw_probes(op, 1, kind="gaussian", generator=generator)[:, 0]


def start_vector(op: LinearOperator, start: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return ``start``, checked, or a random vector."""
    if start is None:
        return random_start(op, generator)
    check_tensor("start", start, dtype=op.dtype, device=op.device, rows=op.shape[0], ndim=1)
    check_finite("start", start)
    if not bool(start.any()):
        raise ValueError("start must not be zero")
    return start.detach()


def invariant_status(size: int, n: int) -> Status:
    """Return the status of a run whose space of dimension ``size`` is invariant."""
    space = "the whole space" if size == n else "an invariant subspace"
    message = f"{space} of dimension {size} was found: its values are exact to roundoff"
    return Status(outcome="breakdown", message=message)


def _advance(saved: SavedRuns, num_steps: int, progress: bool | Progress) -> None:
    first = (saved.load() or {"spent": 0})["spent"]

    def save(done: int) -> None:
        saved.save({"spent": done})

    with tracking(progress, "Lanczos", num_steps) as bar:
        advance(saved.op, saved.runs, num_steps, first=first, bar=bar, between=save)


def _spectrum(
    saved: SavedRuns, run: Recurrence, seed: int | None, vectors: bool, against: Tensor | None
) -> Spectrum:
    values, coefficients, residuals = run.ritz_pairs()
    completed = Status(outcome="completed", message=f"{run.size} steps")
    roundoff = run.roundoff()
    return Spectrum(
        values=values,
        weights=coefficients[0].square(),
        residuals=residuals + roundoff,
        roundoff=roundoff,
        cosines=None if against is None else _cosines(run, against) @ coefficients,
        vectors=run.basis.combine(coefficients).T if vectors else None,
        diagonal=torch.tensor(run.alphas, dtype=torch.float64),
        off_diagonal=torch.tensor(run.betas[:-1], dtype=torch.float64),
        num_products=run.size,
        seed=seed,
        status=invariant_status(run.size, saved.op.shape[0]) if run.exhausted else completed,
        **saved.facts,
    )


def _cosines(run: Recurrence, against: Tensor) -> Tensor:
    """Return the coordinates ``(c, size)`` of unit vectors along the rows of the basis."""
    basis = run.basis
    columns = [basis.local(column.contiguous()) for column in against.T]
    rows = [basis.project(column, last=run.size).cpu() / basis.norm(column) for column in columns]
    return torch.stack(rows)


def _check_against(op: LinearOperator, against: Tensor, mode: Reorthogonalization) -> None:
    check_tensor("against", against, dtype=op.dtype, device=op.device, rows=op.shape[0], ndim=2)
    if mode == "none":
        raise ValueError("against needs a basis, which reorthogonalize='none' does not store")
    if not (against.shape[1] and bool(against.any(0).all())):
        raise ValueError("against must have at least one column, and no column of zeros")


def _check_settings(
    op: LinearOperator, num_steps: int, vectors: bool, mode: Reorthogonalization
) -> int:
    check_choice("reorthogonalize", mode, get_args(Reorthogonalization))
    if vectors and mode == "none":
        raise ValueError("vectors need a basis, which reorthogonalize='none' does not store")
    return check_count("num_steps", num_steps, high=op.shape[0])


# ------------------------------------------------------------------------------------------
# Quantities of a spectrum.


def _totals(spectrum: Spectrum) -> list[str]:
    weights, values, n = spectrum.weights, spectrum.values, spectrum.dimension
    bound = f"spectral norm >= {float(values.abs().max()):.6g}"
    if spectrum.seed is None:  # estimates of the trace and so on need a random start vector
        return [f"  {bound}"]
    # One probe: tr A ~ n sum_k tau_k theta_k and |A|_F^2 ~ n sum_k tau_k theta_k^2. A quadratic
    # form z'Mz of random signs has at most the variance 2 |M|_F^2, taken from the same probe for
    # M = A, A^2 and the projectors P of the masses, |P|_F^2 = tr P.
    first, second, fourth = (float(weights @ values**power) for power in (1, 2, 4))
    norm = max((n * second) ** 0.5, least_frobenius_norm(spectrum))
    spread = (2 * n * fourth) ** 0.5 / (2 * norm) if norm else 0.0  # of the root of |A|_F^2

    def mass(chosen: Any) -> str:
        share = float(weights[chosen].sum())
        return format_uncertain(share, (2 * share / n) ** 0.5)

    nearest = float(values[values.abs().argmin()])
    # Values within roundoff of each other are one: a closed Krylov space repeats them.
    at_nearest = (values - nearest).abs() <= 2 * spectrum.roundoff
    low, high = negative_values(spectrum)
    undecided = f", sign undecided {mass(high & ~low)}" if bool((high & ~low).any()) else ""
    return [
        # The Frobenius norm is not rounded to its error: it could then be below the lower bound.
        f"  trace {format_uncertain(n * first, 2**0.5 * norm)}, "
        f"Frobenius norm {norm:.5g} ± {spread:.2g}, {bound}",
        f"  negative mass {mass(low)}{undecided}, mass nearest to zero {mass(at_nearest)} "
        f"at {nearest:.2g}",
        "  ± is the standard error of an estimate from one start vector",
    ]


def least_frobenius_norm(spectrum: Spectrum) -> float:
    r"""Return a lower bound of the Frobenius norm, up to roundoff.

    .. math:: \|A\|_F \ge \|V^\top A V\|_F = \Bigl(\sum_k \theta_k^2\Bigr)^{1/2}

    for an orthonormal basis, whether or not the Ritz values have converged. Without
    re-orthogonalisation values repeat, and only the largest one counts.
    """
    if spectrum.settings.get("reorthogonalize") == "none":
        return float(spectrum.values.abs().max())
    return float(spectrum.values.norm())


def negative_values(spectrum: Spectrum) -> tuple[Tensor, Tensor]:
    """Return masks ``(m,)`` of the values that are certainly negative and that may be negative.

    A value within its residual of zero may stand for eigenvalues of either sign. A value within
    roundoff of zero, whose residual is no larger, is zero.
    """
    error = spectrum.residuals.clamp(min=spectrum.roundoff)
    undecided = (spectrum.values.abs() <= error) & (spectrum.residuals > spectrum.roundoff)
    certain = spectrum.values < -error
    return certain, certain | undecided
