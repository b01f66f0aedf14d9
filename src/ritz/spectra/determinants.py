"""Log determinants, with one error bar for sampling and one for truncation."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from scipy.sparse import csc_array
from scipy.sparse.linalg import splu
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.random import probes, resolve_generator
from ritz._core.results import Estimate, Status
from ritz.operators.base import LinearOperator
from ritz.operators.dense import DenseOperator
from ritz.operators.interop import as_operator
from ritz.operators.kernel import KernelOperator
from ritz.operators.sparse import SparseOperator
from ritz.operators.structure import exact_trace
from ritz.spectra.budget import Budget
from ritz.spectra.conjugate import NotPositiveDefiniteError
from ritz.spectra.deflation import Deflation
from ritz.spectra.expansions import Expansion, by_chebyshev, by_maxent
from ritz.spectra.radau import Brackets, log_brackets
from ritz.spectra.recurrence import Recurrence, advance
from ritz.spectra.sampling import stderr

LogdetMethod = Literal["auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev"]
METHODS = ("auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev")
WIDTH = 25  # vectors a block of the Krylov space
DENSE = 2**32  # bytes of a dense factor that is not thought twice about
SPARSE = 20_000  # rows of a sparse matrix that is factored rather than sampled
BASIS = 2**32  # bytes of Krylov basis


def logdet(
    op: Any,
    *,
    method: LogdetMethod = "auto",
    num_products: int = 1500,
    num_probes: int = 15,
    floor: float | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`\log \det A` of a positive definite matrix.

    ``cholesky`` factors a dense or sparse matrix: exact. ``krylov`` needs products alone: a block
    Krylov space takes six tenths of them and is split off exactly, :math:`\det A = \det T \det S`;
    quadrature with ``num_probes`` random vectors takes the rest for the Schur complement
    :math:`S`. Each quadratic form lies between a Gauss and, with a ``floor``, a Gauss-Radau rule;
    the mix of them that was stationary over the last steps is the estimate, and the larger distance
    to either the ``truncation``. A trace that the structure of the operator knows is a control
    variate. As many products as rows give the determinant itself. ``lanczos`` is the same with no
    space split off. ``chebyshev`` interpolates the logarithm between ``floor`` and the norm, and
    ``maxent`` takes its mean under the density of maximum entropy with up to 60 moments, both two
    moments a product: simpler, and far less accurate where the condition number is large. ``auto``
    is ``cholesky`` where the factor fits easily, else ``krylov``; ``method`` of the result says
    which.

    Memory of ``krylov``: 0.6 ``num_products`` vectors, or 4 GiB of them, and as many again as steps
    for each probe of a block; of ``lanczos`` the latter alone, of the others a few vectors a probe.
    The truncation of ``maxent`` is what half the moments would change: an estimate.

    Args:
        op: Positive definite :math:`A`, ``(n, n)``.
        method: See above.
        num_products: Products to spend.
        num_probes: Random vectors for what the space leaves; the steps follow.
        floor: A positive number below the spectrum, such as the noise of a Gaussian process, which
            a kernel operator knows by itself.
        rtol: Error, both bars together, that is asked for, relative to the value; the status says
            whether it was reached.
        generator: Source of the vectors.
        progress: Whether to show a bar, or what to tell.

    Raises:
        NotPositiveDefiniteError: A Ritz value or pivot is not positive; the message has it.

    Reference: Section 2.6 of *Spectral Machine Learning*; Golub and Meurant (1994); Ubaru, Chen
    and Saad (2017).

    Example:
        >>> import torch, ritz
        >>> round(float(ritz.logdet(torch.diag(torch.arange(1.0, 6.0)))), 4)
        4.7875
    """
    op = as_operator(op)
    check_choice("method", method, METHODS)
    check_count("num_products", num_products, low=2)
    check_count("num_probes", num_probes, low=2)
    if rtol is not None:
        check_range("rtol", rtol, low=0.0)
    if floor is not None and not (math.isfinite(floor) and floor > 0):
        raise ValueError(f"floor must be positive, got {floor}")
    if method == "cholesky" or (method == "auto" and _factored(op)):
        return _by_factor(op)
    if floor is None and isinstance(op, KernelOperator) and op.noise > 0:
        floor = op.noise
    budget = Budget(num_products, num_probes, floor, resolve_generator(generator), progress)
    by = {"lanczos": _by_lanczos, "chebyshev": by_chebyshev, "maxent": by_maxent}
    found = by.get(method, _by_krylov)(op, budget)
    return _estimate(found, rtol, budget.generator)


def _factored(op: LinearOperator) -> bool:
    if isinstance(op, DenseOperator):
        return op.shape[0] ** 2 * 8 <= DENSE
    return isinstance(op, SparseOperator) and op.shape[0] <= SPARSE


def _by_factor(op: LinearOperator) -> Estimate:
    if isinstance(op, DenseOperator):
        value, kind = _dense(op.matrix), "dense"
    elif isinstance(op, SparseOperator):
        value, kind = _sparse(op), "sparse"
    else:
        raise ValueError(f"method='cholesky' needs a dense or sparse matrix, got {op!r}")
    return Estimate(
        mean=torch.tensor(value, dtype=torch.float64),
        stderr=torch.zeros((), dtype=torch.float64),
        num_products=0,
        method=f"exact, by the factor of a {kind} matrix of order {op.shape[0]:,}",
        status=Status(outcome="completed", message="no sampling"),
    )


def _dense(matrix: Tensor) -> float:
    factor, failed = torch.linalg.cholesky_ex(matrix.double())
    if int(failed):
        smallest = float(torch.linalg.eigvalsh(matrix.double())[0])
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got an eigenvalue of {smallest:.6g}"
        )
    return float(2 * factor.diagonal().log().sum())


def _sparse(op: SparseOperator) -> float:
    rows, columns, values = (
        part.cpu().numpy()
        for part in (op.matrix.crow_indices(), op.matrix.col_indices(), op.matrix.values().double())
    )
    # Symmetric, so rows are as good as columns.
    matrix = csc_array((values, columns, rows), shape=op.shape)
    options = {"SymmetricMode": True}
    try:
        factor = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    except RuntimeError as error:
        raise NotPositiveDefiniteError("op must be positive definite, got a zero pivot") from error
    pivots = torch.from_numpy(factor.U.diagonal())
    if not bool((pivots > 0).all()):
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got a pivot of {float(pivots.min()):.6g}"
        )
    return float(pivots.log().sum())


def _by_krylov(op: LinearOperator, budget: Budget) -> Expansion:
    n, generator = op.shape[0], budget.generator
    dimension = _dimension(n, budget.num_products, op.dtype.itemsize)
    label, total = "log determinant", min(n, budget.num_products)
    with tracking(budget.progress, label, total) as bar:
        space = Deflation(
            op, width=min(WIDTH, n), dimension=dimension, generator=generator, bar=bar
        )
        if space.complement is None:
            whole = torch.tensor([space.logdet], dtype=torch.float64)
            return Expansion(whole, torch.zeros_like(whole[0]), n, "block Krylov: the whole space")
        steps = (budget.num_products - dimension) // budget.num_probes
        forms = _forms(
            space.complement,
            lambda count: space.probes(count, generator),
            budget,
            steps=min(max(1, steps), space.dimension),
            bar=bar,
            spent=dimension,
        )
    trace = exact_trace(op)
    known = None if trace is None else (trace - sum(space.traces), trace)
    found = _quadrature(forms, space.dimension, known, torch.finfo(op.dtype).eps)
    how = f"block Krylov: {dimension} directions split off, {found.how}"
    spent = dimension + found.num_products
    return Expansion(space.logdet + found.samples, found.truncation, spent, how)


def _by_lanczos(op: LinearOperator, budget: Budget) -> Expansion:
    n = op.shape[0]
    steps = min(max(1, budget.num_products // budget.num_probes), n)

    def drawn(count: int) -> Tensor:
        source = budget.generator
        signs = probes((n, count), generator=source, dtype=op.dtype, device=op.device)
        return signs / math.sqrt(n)

    with tracking(budget.progress, "log determinant", steps * budget.num_probes) as bar:
        forms = _forms(op, drawn, budget, steps=steps, bar=bar, spent=0)
    trace = exact_trace(op)
    known = None if trace is None else (trace, trace)
    found = _quadrature(forms, n, known, torch.finfo(op.dtype).eps)
    return replace(found, how=f"Lanczos quadrature: {found.how}")


@dataclass(frozen=True, slots=True)
class _Forms:
    """Quadratic forms of probes of norm one: bounds of the logarithm, values, and their cost."""

    brackets: Brackets
    plain: Tensor
    steps: int
    num_products: int


def _forms(
    op: LinearOperator,
    drawn: Callable[[int], Tensor],
    budget: Budget,
    *,
    steps: int,
    bar: Progress,
    spent: int,
) -> _Forms:
    found, plain, products = [], [], 0
    for start in range(0, budget.num_probes, op.block_size):
        starts = drawn(min(op.block_size, budget.num_probes - start))
        runs = [Recurrence(z.contiguous(), capacity=steps, mode="full") for z in starts.T]
        advance(op, runs, steps)
        found.append(log_brackets(runs, budget.floor))
        plain += [run.alphas[0] for run in runs]
        products += sum(run.size for run in runs)
        bar.update(spent + products)
    columns = ("upper", "lower", "mixed")
    joined = Brackets(*(torch.cat([getattr(part, name) for part in found]) for name in columns))
    return _Forms(joined, torch.tensor(plain, dtype=torch.float64), steps, products)


def _quadrature(
    forms: _Forms, dimension: int, known: tuple[float, float] | None, eps: float
) -> Expansion:
    r"""Samples of :math:`\operatorname{tr} \log S`, their truncation, and what was done to them.

    Args:
        forms: Of probes.
        dimension: Of the space they are in.
        known: The trace of :math:`S`, and the larger one it was subtracted from.
        eps: Roundoff.
    """
    found = forms.brackets
    above, below = found.upper - found.mixed, found.mixed - found.lower
    truncation = dimension * torch.maximum(above.mean(), below.mean()).clamp_min(0.0)
    samples, how = dimension * found.mixed, ""
    if known is not None and len(samples) >= 5:
        samples, how = _controlled(samples, dimension * forms.plain, *known, eps)
    how = f"{len(samples)} probes x {forms.steps} steps{how}"
    return Expansion(samples, truncation, forms.num_products, how)


def _dimension(n: int, num_products: int, itemsize: int) -> int:
    if num_products >= n and n * n * itemsize <= BASIS:
        return n
    wanted = min(int(0.6 * num_products), BASIS // (n * itemsize), n - 1)
    return max(1, wanted // WIDTH) * min(WIDTH, max(1, wanted))


def _controlled(
    samples: Tensor, traces: Tensor, known: float, whole: float, eps: float
) -> tuple[Tensor, str]:
    r"""Samples less what those of the trace, known exactly, explain of them."""
    spread = traces - traces.mean()
    # What is left of the trace may be less than the roundoff of what was subtracted.
    if not 100 * eps * abs(whole) < 0.01 * float(stderr(traces)):
        return samples, ""
    slope = float((spread * (samples - samples.mean())).sum() / spread.square().sum())
    controlled = samples - slope * (traces - known)
    if float(controlled.std()) > 0.9 * float(samples.std()):
        return samples, ""
    return controlled, ", controlled by the trace"


def _estimate(found: Expansion, rtol: float | None, generator: torch.Generator) -> Estimate:
    sampled = len(found.samples) > 1
    mean = found.samples.mean()
    error = stderr(found.samples) if sampled else torch.zeros_like(mean)
    return Estimate(
        mean=mean,
        stderr=error,
        truncation=found.truncation,
        samples=found.samples if sampled else None,
        num_products=found.num_products,
        method=found.how,
        status=_status(float(mean), float(error), float(found.truncation), rtol),
        seed=generator.initial_seed(),
    )


def _status(mean: float, error: float, truncation: float, rtol: float | None) -> Status:
    both = math.hypot(error, truncation)
    if rtol is None:
        return Status(outcome="completed", message=f"error bars {error:.2g} and {truncation:.2g}")
    if both <= rtol * abs(mean):
        return Status(outcome="converged", message=f"relative error below {rtol:.2g}")
    advice = "more probes" if error > truncation else "more products, or a floor of the spectrum"
    return Status(
        outcome="max_steps",
        message=f"relative error {both / abs(mean):.2g} where {rtol:.2g} was asked for",
        advice=f"{advice} would lower the larger error bar",
    )
