"""Log determinants, by a factorisation or from products alone."""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes, resolve_generator
from ritz._core.results import Estimate
from ritz.operators import (
    DenseOperator,
    KernelOperator,
    LinearOperator,
    OperatorLike,
    SparseOperator,
    as_operator,
    exact,
)
from ritz.spectra._cg import NotPositiveDefiniteError
from ritz.spectra._functions.expansions import (
    Expansion,
    by_chebyshev,
    by_maxent,
    by_quadrature,
    estimated,
    of_forms,
)
from ritz.spectra._functions.forms import Budget, Known, Sampler
from ritz.spectra._functions.splitting import Deflation, block_krylov, krylov_dimension
from ritz.spectra._gradients import attach_gradient

# ------------------------------------------------------------------------------------------
# Log determinants by factors of matrices that are dense, or sparse and cheap to factor.

DENSE = 2**32  # bytes of a dense factor that is not thought twice about
ROWS = 20_000  # of a sparse matrix that is factored whatever its graph
ENVELOPE = 2e11  # operations, some ten seconds, of an elimination within the envelope


def is_small(op: LinearOperator) -> bool:
    """Whether a factor is sure to be quick: dense that fits, or sparse with few rows."""
    if isinstance(op, DenseOperator):
        return op.shape[0] ** 2 * 8 <= DENSE
    return isinstance(op, SparseOperator) and op.shape[0] <= ROWS


def is_narrow(op: LinearOperator) -> bool:
    """Whether a sparse matrix fills little when it is factored: the graph is like a chain."""
    return isinstance(op, SparseOperator) and _envelope(_columns(op)) <= ENVELOPE


def logdet_by_factor(op: LinearOperator) -> tuple[float, str]:
    """Return the log determinant of a matrix, and how it was found."""
    size = f"of order {op.shape[0]:,}"
    if isinstance(op, DenseOperator):
        return _dense(op.matrix), f"exact, by the factor of a dense matrix {size}"
    if not isinstance(op, SparseOperator):
        raise ValueError(f"method='cholesky' needs a dense or sparse matrix, got {op!r}")
    matrix = _columns(op)
    if importlib.util.find_spec("sksparse") is not None:
        return _cholmod(matrix), f"exact, by CHOLMOD's factor of a sparse matrix {size}"
    return _superlu(matrix), f"exact, by the factor of a sparse matrix {size}"


def _dense(matrix: Tensor) -> float:
    factor, failed = torch.linalg.cholesky_ex(matrix.double())
    if int(failed):
        smallest = float(torch.linalg.eigvalsh(matrix.double())[0])
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got an eigenvalue of {smallest:.6g}"
        )
    return float(2 * factor.diagonal().log().sum())


def _columns(op: SparseOperator) -> Any:
    rows, columns, values = (
        part.cpu().numpy()
        for part in (op.matrix.crow_indices(), op.matrix.col_indices(), op.matrix.values().double())
    )
    # Symmetric, so rows are as good as columns.
    return csc_array((values, columns, rows), shape=op.shape)


def _envelope(matrix: Any) -> float:
    """Operations of an elimination that fills every row up to its first entry: a bound."""
    order = reverse_cuthill_mckee(matrix.tocsr(), symmetric_mode=True)
    place = np.empty_like(order)
    place[order] = np.arange(len(order), dtype=order.dtype)
    reach, used = place.copy(), np.diff(matrix.indptr) > 0
    reach[used] = np.minimum.reduceat(place[matrix.indices], matrix.indptr[:-1][used])
    widths = np.maximum(place - reach, 0).astype(float)
    return float((widths**2).sum())


def _cholmod(matrix: Any) -> float:
    cholmod: Any = importlib.import_module("sksparse.cholmod")
    try:
        if hasattr(cholmod, "cho_factor"):  # from version 0.5 on
            return float(cholmod.cho_factor(matrix).logdet())
        return float(cholmod.cholesky(matrix, mode="supernodal").logdet())
    except cholmod.CholmodNotPositiveDefiniteError as error:
        _superlu(matrix)  # which has the pivot, that CHOLMOD keeps to itself
        raise NotPositiveDefiniteError(
            "op must be positive definite, got a pivot that is roundoff"
        ) from error


def _superlu(matrix: Any) -> float:
    options = {"SymmetricMode": True}
    try:
        factor = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    except RuntimeError as error:
        raise NotPositiveDefiniteError("op must be positive definite, got a zero pivot") from error
    if not np.array_equal(factor.perm_r, factor.perm_c):
        raise NotPositiveDefiniteError("op must be positive definite, got a zero pivot")
    pivots = torch.from_numpy(factor.U.diagonal())
    if not bool((pivots > 0).all()):
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got a pivot of {float(pivots.min()):.6g}"
        )
    return float(pivots.log().sum())


# ------------------------------------------------------------------------------------------
# Log determinants, with one error bar for sampling and one for truncation.

LogdetMethod = Literal["auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev"]
METHODS = ("auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev")
RTOL = 1e-3  # what auto asks for where nothing is asked for
FEW = 10  # rows below which random signs repeat themselves


def logdet(
    op: OperatorLike,
    *,
    method: LogdetMethod = "auto",
    num_products: int = 1500,
    num_probes: int | None = None,
    floor: float | None = None,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return :math:`\log \det A` of a positive definite matrix.

    ``cholesky`` factors a dense or sparse matrix: exact. ``lanczos`` needs products alone: Each
    quadratic form of a random vector lies between a Gauss and, with a ``floor``, a Gauss-Radau
    rule; the mix of them that was stationary over the last steps is the estimate, and the larger
    distance to either the ``truncation``. The products are split between vectors and steps by the
    two error bars: steps until truncation is no longer what counts, then vectors. A trace that the
    structure of the operator knows is a control variate. ``krylov`` gives six tenths of the
    products to a block Krylov space, which is split off exactly,
    :math:`\det A = \det T \det S`, and the rest to quadrature of the Schur complement
    :math:`S`; as many products as rows give the determinant itself. ``chebyshev`` interpolates the
    logarithm between ``floor`` and the norm, and ``maxent`` takes its mean under the density of
    maximum entropy with up to 60 moments, both two moments a product: simpler, and far less
    accurate where the condition number is large. ``auto`` is ``cholesky`` for a dense matrix that
    fits and a sparse one of up to 20,000 rows, else ``lanczos`` where a few vectors show that it
    will do, else ``cholesky`` for a sparse matrix of a narrow graph, else ``krylov`` with what is
    left; ``method`` of the result says which, and why.

    Memory of ``krylov``: 0.6 ``num_products`` vectors, or 4 GiB of them, and as many again as steps
    for each probe of a block; of ``lanczos`` the latter alone, or 6 a probe where that would be
    more than 256 MiB (there without re-orthogonalisation, which takes more steps); of the others a
    few vectors a probe. The truncation of ``chebyshev`` is the largest error of the interpolation,
    that of ``maxent`` twice it: no two densities with the same moments differ by more.

    The mean is differentiable in the parameters of a kernel operator that require gradients: the
    gradient is sampled in the backward pass (:func:`ritz.spectra.logdet_gradient`).

    Args:
        op: Positive definite :math:`A`, ``(n, n)``.
        method: See above.
        num_products: Products to spend, at most.
        num_probes: Random vectors, half as many as products at most. By default split by the error
            bars, and 32 for ``chebyshev`` and ``maxent``.
        floor: A positive number below the spectrum, such as the noise of a Gaussian process, which
            a kernel operator knows by itself.
        rtol: Error, both bars together, that is asked for, relative to the value: no more products
            are spent than it takes, and the status says whether it was reached. For ``auto`` 1e-3
            by default.
        generator: Source of the vectors.
        progress: Show a progress bar, or a :class:`Progress` to report to.

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
    check_count("num_products", num_products, low=10)
    if num_probes is not None:
        check_count("num_probes", num_probes, low=2, high=num_products // 2)
    if rtol is not None:
        check_range("rtol", rtol, low=0.0)
    if floor is not None and not (math.isfinite(floor) and floor > 0):
        raise ValueError(f"floor must be positive, got {floor}")
    generator = resolve_generator(generator)
    if floor is None and isinstance(op, KernelOperator) and op.noise > 0:
        floor = float(op.noise)
    if method == "auto":
        rtol = RTOL if rtol is None else rtol
        method = "cholesky" if is_small(op) else "auto"
    budget = Budget(num_products, num_probes, floor, rtol, generator, progress)
    found = estimated(_METHODS[method](op, budget), budget)
    return attach_gradient(found, op, generator=generator)


def _by_auto(op: LinearOperator, budget: Budget) -> Expansion:
    """Lanczos quadrature where a few vectors show that it will do; a factor; a Krylov space."""
    if budget.num_probes is not None or op.shape[0] <= budget.num_products:
        return _by_krylov(op, budget)
    with tracking(budget.progress, "log determinant", budget.num_products) as bar:
        sampler = _whole(op, budget, bar)
        pilot = sampler.pilot(budget.num_products // 6, budget.num_products)
        samples, _ = pilot.samples(sampler.known)
        wanted = sampler.target(float(samples.mean()))
        error, truncation = float(samples.std()), float(pilot.brackets.truncation)
        left = (budget.num_products - pilot.num_products) // pilot.num_steps
        probes = (error / (0.8 * wanted)) ** 2 if wanted else math.inf
        if truncation <= 0.6 * wanted and probes <= left + len(samples):
            found = of_forms(sampler, sampler.more(pilot, left))
            why = f"as the first {len(samples)} probes foretold"
            return replace(found, how=f"Lanczos quadrature, {why}: {found.how}")
    rest = replace(budget, num_products=budget.num_products - pilot.num_products)
    found = _by_factor(op) if is_narrow(op) else _by_krylov(op, rest)
    why = f"Lanczos quadrature would not do after {pilot.num_steps} steps"
    spent = found.num_products + pilot.num_products
    return replace(found, how=f"{found.how} ({why})", num_products=spent)


def _by_factor(op: LinearOperator) -> Expansion:
    value, how = logdet_by_factor(op)
    whole = torch.tensor([value], dtype=torch.float64)
    return Expansion(whole, torch.zeros_like(whole[0]), 0, how)


def _by_krylov(op: LinearOperator, budget: Budget) -> Expansion:
    n, generator = op.shape[0], budget.generator
    size = krylov_dimension(n, budget.num_products, op.dtype.itemsize)
    if budget.num_probes is not None and size < n:  # which get a product each, at least
        size = min(size, budget.num_products - budget.num_probes)
    with tracking(budget.progress, "log determinant", min(n, budget.num_products)) as bar:
        space = block_krylov(op, dimension=size, generator=generator, bar=bar)
        split = Deflation(op, space)
        if split.complement is None:
            whole, rounded = torch.tensor([[split.logdet], [split.roundoff]], dtype=torch.float64)
            return Expansion(whole, rounded[0], n, "block Krylov: the whole space")
        sampler = Sampler(
            split.complement,
            lambda count: space.probes(count, generator),
            _log,
            budget.floor,
            split.dimension,
            lambda: _known(op, split.trace, split.dimension),
            lambda mean: (budget.rtol or 0.0) * abs(split.logdet / split.dimension + mean),
            bar,
            spent=size,
            magnitude=split.magnitude,
        )
        left = budget.num_products - size
        found = by_quadrature(sampler, num_products=left, num_probes=budget.num_probes)
    how = f"block Krylov: {size} directions split off, {found.how}"
    spent = size + found.num_products
    truncation = found.truncation + split.roundoff
    return Expansion(split.logdet + found.samples, truncation, spent, how)


def _by_lanczos(op: LinearOperator, budget: Budget) -> Expansion:
    with tracking(budget.progress, "log determinant", budget.num_products) as bar:
        sampler = _whole(op, budget, bar)
        found = by_quadrature(
            sampler, num_products=budget.num_products, num_probes=budget.num_probes
        )
    return replace(found, how=f"Lanczos quadrature: {found.how}")


def _whole(op: LinearOperator, budget: Budget, bar: Progress) -> Sampler:
    n = op.shape[0]

    def units(count: int) -> Tensor:
        # Of few signs there are few patterns: probes that all have the same show no spread.
        kind: Probe = "gaussian" if n < FEW else "rademacher"
        source = budget.generator
        drawn = probes((n, count), kind=kind, generator=source, dtype=op.dtype, device=op.device)
        unit: Tensor = drawn / drawn.norm(dim=0)
        return unit

    return Sampler(
        op,
        units,
        _log,
        budget.floor,
        n,
        lambda: _known(op, 0.0, n),
        lambda mean: (budget.rtol or 0.0) * abs(mean),
        bar,
    )


def _known(op: LinearOperator, less: float, dimension: int) -> Known | None:
    if (trace := exact(op, "trace").value) is None:
        return None
    noise = 100 * torch.finfo(op.dtype).eps * abs(trace)
    return Known((trace - less) / dimension, noise / dimension)


def _log(values: Tensor) -> Tensor:
    smallest = float(values.min())
    if not smallest > 0:
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got a Ritz value of {smallest:.6g}"
        )
    return values.log()


_METHODS: dict[str, Callable[[LinearOperator, Budget], Expansion]] = {
    "auto": _by_auto,
    "cholesky": lambda op, budget: _by_factor(op),
    "krylov": _by_krylov,
    "lanczos": _by_lanczos,
    "chebyshev": lambda op, budget: by_chebyshev(op, budget, _log),
    "maxent": lambda op, budget: by_maxent(op, budget, _log),
}
