"""Steps of one or several Lanczos runs, with one product of a block of their vectors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ritz._core.blocks import column_dots, column_norms
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
    rows spend most of their time on the overhead of calls, and longer ones on copies of vectors to
    and from the columns of a block. Long bases have a tensor each.
    """
    like, n = starts[0], len(starts[0])
    shared: Tensor | None = None
    rows: Sequence[Tensor | None] = [None] * len(starts)
    if mode == "none" and len(starts) > 1 and (like.device.type == "cpu" or n <= TUNING.together):
        # The newest vectors of all runs are a block, which a product reads as it is: (n, k) for the
        # last two vectors, and for the next one.
        shared = like.new_empty(3, n, len(starts))
        rows = [shared[:2, :, index] for index in range(len(starts))]
    elif mode == "full" and n <= TUNING.together:
        shared = like.new_empty(len(starts), capacity, n)
        rows = list(shared)
    # "partial" decides for each vector what to subtract.
    runs = []
    for start, part in zip(starts, rows, strict=True):
        run = Recurrence(start, capacity=capacity, mode=mode, magnitude=magnitude, rows=part)
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
    if shared is not None:
        absorb = _absorb_block if runs[0].mode == "none" else _absorb_bases
        if absorb(runs, products, last=last):
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
        newest = runs[0].newest
        return shared[newest] if runs[0].mode == "none" else shared[:, newest].T.contiguous()
    vectors = [run.vector() for run in runs]
    if len(runs) == 1:
        return vectors[0][:, None]
    block = torch.empty(len(vectors[0]), len(runs), dtype=op.dtype, device=op.device)
    for column, vector in zip(block.T, vectors, strict=True):
        column.copy_(vector)  # three times as fast as torch.stack
    return block


def _shared(runs: Sequence[Recurrence]) -> Tensor | None:
    """Return the tensor of the bases of all runs, if there is one and they are in step."""
    first, shared = runs[0], runs[0].shared
    if shared is None:
        return None
    # (3, n, k) or (k, capacity, n); see start_runs.
    count, capacity = (shared.shape[2], 2) if first.mode == "none" else shared.shape[:2]
    if len(runs) != count or first.newest >= capacity:
        return None
    # A run that took a step alone may have another basis, and continues alone.
    alike = all(run.shared is shared and run.newest == first.newest for run in runs)
    return shared if alike else None


def _absorb_block(runs: Sequence[Recurrence], products: Tensor, *, last: bool) -> bool:
    """Do :meth:`Recurrence.absorb` for all runs without a basis; return whether it was possible.

    The operations on the products ``(n, k)`` are the same, in the same order. Near a breakdown, if
    products must be scaled, and if a check fails, the runs are not changed, and each must take its
    step alone.
    """
    first, shared = runs[0], runs[0].shared
    if shared is None or any(run.unit != 1 for run in runs):
        return False
    older, newest, vectors = shared[1 - first.newest], shared[first.newest], shared[2]
    previous = [run.betas[-1] if run.betas else 0.0 for run in runs]
    before = torch.tensor(previous, dtype=torch.float64)
    scale = torch.tensor([max(run.scale, run.magnitude) for run in runs], dtype=torch.float64)
    if not first.alphas:
        vectors.copy_(products)
    else:
        if first.size < TUNING.checked_steps:
            overlap = column_dots(older, products).cpu()
            allowed = TUNING.asymmetry * first.eps**0.5 * scale
            if not is_below((overlap - before).abs(), allowed):
                return False
        torch.addcmul(products, older, before.to(products), value=-1, out=vectors)
    alpha = column_dots(newest, vectors)
    vectors.addcmul_(newest, alpha.to(products), value=-1)
    alpha, beta = alpha.cpu(), column_norms(vectors).cpu()
    if not _regular(runs, alpha, before, beta):
        return False
    if not last:
        torch.div(vectors, beta.to(vectors), out=older)
    _record(runs, alpha, before, beta, following=None if last else 1 - first.newest)
    return True


def _absorb_bases(runs: Sequence[Recurrence], products: Tensor, *, last: bool) -> bool:
    """Do :meth:`Recurrence.absorb` for all runs with a full basis, as :func:`_absorb_block` does.

    A first step is not possible.
    """
    first, shared = runs[0], runs[0].shared
    if shared is None or not first.alphas or any(run.unit != 1 for run in runs):
        return False
    size, width, newest = first.size, first.basis.width, first.newest
    if newest + 1 >= shared.shape[1] and not last:
        return False
    vectors = products.T.clone(memory_format=torch.contiguous_format)
    before = torch.tensor([run.betas[-1] for run in runs], dtype=torch.float64)
    _subtract(vectors, before[:, None], shared[:, newest - 1, None])
    alpha = _dots(shared[:, newest, None], vectors, width)
    _subtract(vectors, alpha, shared[:, newest, None])
    overlap = _dots(shared[:, : size + 1], vectors, width, precise=False)
    scale = torch.tensor([max(run.scale, run.magnitude) for run in runs], dtype=torch.float64)
    if not is_below(overlap[:, :-1].norm(dim=1), TUNING.asymmetry * first.eps**0.5 * scale):
        return False
    _subtract(vectors, overlap, shared[:, : size + 1])
    alpha = alpha[:, 0] + overlap[:, -1]
    beta = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64).cpu()
    if not (_regular(runs, alpha, before, beta) and is_below(overlap.norm(dim=1), beta)):
        return False
    if not last:
        torch.div(vectors, beta.to(vectors)[:, None], out=shared[:, newest + 1])
    _record(runs, alpha, before, beta, following=None if last else newest + 1)
    return True


def _regular(runs: Sequence[Recurrence], alpha: Tensor, before: Tensor, beta: Tensor) -> bool:
    """Return whether no run breaks down, overflows, or has products that must be scaled."""
    first = runs[0]
    sizes = alpha.abs() + before + beta
    sizes_before = [max(run.scale, run.magnitude) for run in runs]
    scale = torch.tensor(sizes_before, dtype=torch.float64).maximum(sizes)
    if not first.alphas:
        # Entries of a product are at most its norm, and the largest is the norm over the root of n.
        limit = torch.finfo(first.basis.rows.dtype).max ** TUNING.ordinary
        if not (is_below(sizes, limit) and is_below(2 * first.basis.n**0.5 / limit, sizes)):
            return False
    above = is_below(TUNING.breakdown * first.eps * scale, beta)
    return above and bool(scale.isfinite().all())


def _record(
    runs: Sequence[Recurrence], alpha: Tensor, before: Tensor, beta: Tensor, following: int | None
) -> None:
    """Append the coefficients of a step; ``following`` is the index of the next vectors."""
    for run, a, b, c in zip(runs, alpha.tolist(), before.tolist(), beta.tolist(), strict=True):
        run.alphas.append(a)
        run.betas.append(c)
        run.scale, run._active = max(run.scale, abs(a) + b + c), None
        if following is not None:
            run.newest, run.basis.size = following, max(run.basis.size, following + 1)


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
