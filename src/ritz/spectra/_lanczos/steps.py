"""Steps of one or several Lanczos runs, with one product of a block of their vectors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.progress import Progress
from ritz._core.random import draw_probes, resolve_generator
from ritz._core.results import AsymmetryError
from ritz.operators import LinearOperator
from ritz.spectra._lanczos.recurrence import (
    TUNING,
    Recurrence,
    Reorthogonalization,
)


def start_runs(
    starts: Sequence[Tensor],
    *,
    capacity: int,
    mode: Reorthogonalization,
    magnitude: float = 0.0,
) -> list[Recurrence]:
    """Return runs from start vectors, each ``(n,)``, whose bases lie in one tensor.

    :func:`step` then advances all runs by batched operations. Otherwise runs with a few thousand
    rows spend most of their time on the overhead of calls. For longer vectors each run has a
    tensor.
    """
    like, shape = starts[0], (len(starts), 2 if mode == "none" else capacity, len(starts[0]))
    # "partial" decides for each vector what to subtract.
    limit = {"partial": 0, "full": TUNING.together_full, "none": TUNING.together_none}[mode]
    alone = len(like) > limit
    shared = None if alone else like.new_empty(shape)
    runs = []
    for index, start in enumerate(starts):
        rows = None if shared is None else shared[index]
        run = Recurrence(start, capacity=capacity, mode=mode, magnitude=magnitude, rows=rows)
        run.shared = shared
        runs.append(run)
    return runs


def advance(
    op: LinearOperator,
    runs: Sequence[Recurrence],
    num_steps: int,
    *,
    first: int = 0,
    bar: Progress | None = None,
    between: Callable[[int], None] | None = None,
) -> None:
    """Advance runs together until each has done ``num_steps`` steps or its space is invariant.

    Args:
        op: The operator.
        runs: The runs.
        num_steps: Total number of steps.
        first: Number of steps done before.
        bar: Progress bar, which counts steps.
        between: Called between two steps with the number of steps done.
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


def step(op: LinearOperator, runs: Sequence[Recurrence], *, last: bool = False) -> None:
    """Advance runs by one step, with one product of a block of their vectors."""
    shared = _shared(runs)
    products = op.matmat(_block(op, runs, shared))
    if shared is not None and _absorb_together(runs, products, last=last):
        return
    for run, product in zip(runs, products.T, strict=True):
        try:
            run.absorb(product.contiguous(), last=last)
        except AsymmetryError as error:
            if not run.is_noise(_norm(op)):
                raise _diagnosis(op, run.vector(), error) from error


def _block(op: LinearOperator, runs: Sequence[Recurrence], shared: Tensor | None) -> Tensor:
    """Return the newest vectors of runs, ``(n, k)``."""
    if shared is not None:
        return shared[:, runs[0].newest].T.contiguous()
    vectors = [run.vector() for run in runs]
    if len(runs) == 1:
        return vectors[0][:, None]
    block = torch.empty(len(vectors[0]), len(runs), dtype=op.dtype, device=op.device)
    for column, vector in zip(block.T, vectors, strict=True):
        column.copy_(vector)  # three times as fast as torch.stack
    return block


def _shared(runs: Sequence[Recurrence]) -> Tensor | None:
    """Return the bases of all runs, ``(k, capacity, n)``, if they are one tensor and in step."""
    first, shared = runs[0], runs[0].shared
    if shared is None or len(runs) != len(shared) or first.newest >= shared.shape[1]:
        return None
    # A run that took a step alone may have another basis, and continues alone.
    alike = all(run.shared is shared and run.newest == first.newest for run in runs)
    return shared if alike else None


def _absorb_together(runs: Sequence[Recurrence], products: Tensor, *, last: bool) -> bool:
    """Do :meth:`Recurrence.absorb` for all runs at once; return whether that was possible.

    The operations on the products ``(n, k)`` are the same, in the same order. In a first step, near
    a breakdown, and if a check fails, nothing is changed and each run must take its step alone.
    """
    first, shared = runs[0], runs[0].shared
    if shared is None or not first.alphas or any(run.unit != 1 for run in runs):
        return False
    size, full, width = first.size, first.mode == "full", first.basis.width
    older, newest = (first.newest - 1) % shared.shape[1], first.newest
    following = newest + 1 if full else older
    if following >= shared.shape[1] and not last:
        return False
    vectors = products.T.clone(memory_format=torch.contiguous_format)
    before = torch.tensor([run.betas[-1] for run in runs], dtype=torch.float64)
    scale = torch.tensor([max(run.scale, run.magnitude) for run in runs], dtype=torch.float64)
    allowed = TUNING.asymmetry * first.eps**0.5 * scale
    if not full and size < TUNING.checked_steps:
        overlap = _dots(shared[:, older, None], vectors, width)[:, 0]
        if not is_below((overlap - before).abs(), allowed):
            return False
    _subtract(vectors, before[:, None], shared[:, older, None])
    alpha = _dots(shared[:, newest, None], vectors, width)
    _subtract(vectors, alpha, shared[:, newest, None])
    alpha = alpha[:, 0]
    if full:
        overlap = _dots(shared[:, : size + 1], vectors, width, precise=False)
        if not is_below(overlap[:, :-1].norm(dim=1), allowed):
            return False
        _subtract(vectors, overlap, shared[:, : size + 1])
        alpha = alpha + overlap[:, -1]
    beta = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64).cpu()
    scale = scale.maximum(alpha.abs() + before + beta)
    regular = is_below(TUNING.breakdown * first.eps * scale, beta) and bool(scale.isfinite().all())
    if not regular or (full and not is_below(overlap.norm(dim=1), beta)):
        return False
    if not last:
        torch.div(vectors, beta.to(vectors)[:, None], out=shared[:, following])
    for run, a, b, c in zip(runs, alpha.tolist(), before.tolist(), beta.tolist(), strict=True):
        run.alphas.append(a)
        run.betas.append(c)
        run.scale, run._active = max(run.scale, abs(a) + b + c), None
        if not last:
            run.newest, run.basis.size = following, run.basis.size + full
    return True


def _dots(rows: Tensor, vectors: Tensor, width: int, *, precise: bool = True) -> Tensor:
    """Return the inner products of rows ``(k, j, n)`` with vectors ``(k, n)``, float64 on the CPU.

    With ``precise`` the factors are converted to float64 before the multiplication.
    """
    total = torch.zeros(rows.shape[:2], dtype=torch.float64, device=rows.device)
    for left, right in zip(rows.split(width, 2), vectors[:, :, None].split(width, 1), strict=True):
        if precise:
            left, right = left.double(), right.double()
        total += torch.bmm(left, right)[:, :, 0]
    return total.cpu()


def _subtract(vectors: Tensor, coefficients: Tensor, rows: Tensor) -> None:
    """Do :math:`v_k -= c_k^T R_k` in place, with coefficients ``(k, j)`` and rows ``(k, j, n)``."""
    torch.baddbmm(
        vectors[:, None], coefficients.to(vectors)[:, None], rows, alpha=-1, out=vectors[:, None]
    )


def _norm(op: LinearOperator) -> float:
    """Return a lower bound of the norm, by a random vector."""
    probe = draw_probes(op, 1, kind="gaussian", generator=resolve_generator(None))
    return float(op.matmat(probe).norm() / probe.norm())


def _diagnosis(op: LinearOperator, vector: Tensor, error: AsymmetryError) -> ValueError:
    first, second = op.matmat(vector), op.matmat(vector)
    if not torch.equal(first, second):
        gap = float((first - second).norm())
        return ValueError(
            f"op must not change between calls: two products of one vector differ by {gap:.2g}"
        )
    return AsymmetryError(f"op must be symmetric: {error}")
