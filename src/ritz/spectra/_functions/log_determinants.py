"""``logdet``: log determinants by a Cholesky factor, or from matrix-vector products alone."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu

from ritz._core.checks import check_choice, check_count, check_positive, check_rtol, is_below
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
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
from ritz.spectra._functions.block_krylov import Deflation, block_krylov, krylov_size
from ritz.spectra._functions.floors import certain_floor, likely_floor
from ritz.spectra._functions.quadrature import Budget, Known, Sampler, is_sparse
from ritz.spectra._functions.trace_functions import (
    by_chebyshev,
    by_maxent,
    unit_probes,
    with_seed_and_status,
)
from ritz.spectra._logdet_gradient import differentiable, logdet_gradient
from ritz.spectra._positive_definite import (
    NotPositiveDefiniteError,
    cholesky_factor,
    factor_roundoff,
    not_positive,
)

Solve = Callable[[Any], Any]
LogdetMethod = Literal["auto", "cholesky", "krylov", "lanczos", "maxent", "chebyshev"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the choice between a factor and quadrature."""

    # A dense factor of up to 4 GiB, which is 23,000 rows in float64, is always computed.
    dense: int = 2**32
    # A sparse matrix with at most this many rows is always factored: even with complete fill-in its
    # factor is no larger than the dense one above.
    rows: int = 20_000
    # Operations of an elimination within the envelope: about ten seconds at 20 Gflop/s.
    envelope: float = 2e11
    # Default of rtol for `auto`.
    rtol: float = 1e-3
    # With at most this many rows each run would span the whole space, so it is treated exactly.
    few: int = 10
    # `auto` spends one in this many products on a pilot, and continues with quadrature if the pilot
    # predicts that it reaches the tolerance. A sparse matrix has no better method to save them for.
    pilot: int = 6
    sparse_pilot: int = 3
    # `auto` spends at most one in this many products on the search for a lower bound. A product
    # with a single vector costs up to three times a column of a block.
    search: int = 3


TUNING = Tuning()


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
    r"""Estimate :math:`\log \det A` of a positive definite matrix, with error bars.

    ==============  =======================================================  =================
    method          algorithm                                                use it if
    ==============  =======================================================  =================
    ``cholesky``    factors a dense or sparse matrix: exact                  the factor fits
    ``lanczos``     quadrature with random probes                            well conditioned
    ``krylov``      a block Krylov space exactly, quadrature for the rest    eigenvalues decay
    ``chebyshev``   interpolates the logarithm above ``floor``               for comparison
    ``maxent``      mean under the density of maximum entropy                for comparison
    ==============  =======================================================  =================

    ``lanczos``: the quadratic form of a probe lies between a Gauss rule and, with a ``floor``, a
    Gauss-Radau rule. The estimate is a combination of both, and ``truncation`` is the larger of its
    distances to the two rules. Without a floor, ``truncation`` is an estimate as in
    :func:`ritz.trace_function`; it is infinite if the smallest Ritz value and its residual do not
    exclude zero. The number of steps is increased until the truncation error is small, and the
    remaining products are used for more probes. If the exact trace is known, it is used as a
    control variate.

    If you pass no floor, ``logdet`` looks for one. Even a floor far below the spectrum is good,
    because the error depends on its logarithm. The entries of a diagonally dominant matrix
    give one (by Gershgorin's discs, also after a scaling of rows and columns, or if only some rows
    are strictly dominant). The structure gives one for kernels with noise, shifted Laplacians, and
    sums and products of such operators. Otherwise ``auto`` excludes eigenvalues near zero with
    probability 0.999 by Lanczos steps from a random vector, which takes up to a third of the
    products. The ``method`` of the result names the floor.

    ``krylov`` uses 60 % of the products for a block Krylov space, which it splits off exactly,
    :math:`\det A = \det T \det S`, and the rest for quadrature of the Schur complement :math:`S`.
    With as many products as rows it is exact.

    ``chebyshev`` and ``maxent`` (up to 60 moments) get two moments per product. They are far less
    accurate if the condition number is large.

    ``auto`` is ``cholesky`` for a dense matrix that fits and for a sparse one of up to 20,000 rows;
    otherwise ``lanczos`` if it finds a floor, and a few probes show that it reaches ``rtol``;
    otherwise ``cholesky`` for a sparse matrix of small bandwidth; otherwise ``krylov`` with the
    products that are left. The ``method`` of the result says which one was used, and why. A matrix
    of up to ten rows, or of no more than ``num_probes``, is always treated exactly.

    Memory: ``lanczos`` stores as many vectors as steps for each probe of a block. If that exceeds
    256 MiB, it stores 6 vectors per probe, does not re-orthogonalise and needs more steps.
    ``krylov`` stores 0.6 ``num_products`` vectors more, up to 4 GiB. The others need a few vectors
    per probe. The ``truncation`` of ``chebyshev`` is the largest error of the interpolation. That
    of ``maxent`` is twice this error, which bounds the difference between two densities with the
    same moments, plus the effect of moments that were matched approximately.

    The mean is differentiable in the parameters of a kernel operator that require gradients:
    ``backward()`` estimates the gradient with random probes; see
    :func:`ritz.spectra.logdet_gradient`.

    Args:
        op: Positive definite :math:`A`, ``(n, n)``.
        method: See above.
        num_products: Maximum number of products.
        num_probes: Number of probes, at most ``num_products / 2``. Defaults to 32 for ``chebyshev``
            and ``maxent``; otherwise it is chosen from the error bars.
        floor: Positive lower bound of the eigenvalues, such as the noise variance of a Gaussian
            process. By default ``logdet`` looks for one; see above.
        rtol: Stop when the 95 % interval is within this fraction of the value. The status says
            whether it is. Defaults to 1e-3 for ``auto``; a value without sampling is then
            ``completed`` if its roundoff is above that.
        generator: Source of the probes. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        NotPositiveDefiniteError: A Ritz value or pivot is not positive; the message shows it.

    Reference: Section 2.6 of *Spectral Machine Learning*; Golub and Meurant (1994); Ubaru, Chen
    and Saad (2017).

    Example:
        >>> import torch, ritz
        >>> round(float(ritz.logdet(torch.diag(torch.arange(1.0, 6.0)))), 4)
        4.7875
    """
    op = as_operator(op)
    check_choice("method", method, tuple(_METHODS))
    num_products = check_count("num_products", num_products, low=10)
    if num_probes is not None:
        num_probes = check_count("num_probes", num_probes, low=2, high=num_products // 2)
    if rtol is not None:
        check_rtol(rtol)
    if floor is not None:
        check_positive("floor", floor)
    generator = resolve_generator(generator)
    is_default = rtol is None
    if method == "auto":
        rtol = TUNING.rtol if rtol is None else rtol
        method = "cholesky" if is_small(op) else "auto"
    # A whole basis costs no more than as many random probes, and is exact.
    if method != "cholesky" and op.shape[0] <= (num_probes or TUNING.few):
        method = "krylov"
    budget = Budget(num_products, num_probes, num_probes or 0, floor, rtol, generator, progress)
    spent = 0
    if floor is None and method != "cholesky":
        # A Krylov space that becomes the whole space needs no floor.
        most = num_products // TUNING.search if op.shape[0] > num_products else 0
        known = certain_floor(op, most)
        budget, spent = budget.above(known), known.num_products
    value = _METHODS[method](op, budget)
    estimate = with_seed_and_status(value, budget)
    # log det I = 0 is exact, but its roundoff is not below a default fraction of it.
    if is_default and not value.degrees and not estimate.status.ok:
        estimate = with_seed_and_status(value, replace(budget, rtol=None))
    estimate = replace(estimate, num_products=estimate.num_products + spent)
    if not isinstance(op, KernelOperator):
        return estimate
    # Every backward pass draws the same probes.
    state = generator.clone_state()
    return differentiable(
        estimate, op.parameters, lambda: logdet_gradient(op, generator=state.clone_state())
    )


# ------------------------------------------------------------------------------------------
# From products: quadrature, a block Krylov space, and the choice between them.


def _by_auto(op: LinearOperator, budget: Budget) -> Estimate:
    """Use quadrature if a pilot predicts that it reaches ``rtol``, otherwise another method."""
    if budget.num_probes is not None or op.shape[0] <= budget.num_products:
        return _by_krylov(op, budget)
    with tracking(budget.progress, "log determinant", budget.num_products) as bar:
        spent, why = 0, ""
        if budget.floor is None:
            most = budget.num_products // TUNING.search
            floor = likely_floor(op, max_products=most, generator=budget.generator, bar=bar)
            budget, spent = budget.above(floor), floor.num_products
            why = f"{spent} Lanczos steps do not exclude eigenvalues near zero"
        if budget.floor is not None:
            sampler = _whole(op, budget, bar, "Lanczos quadrature, which reaches rtol: ", spent)
            left = budget.num_products
            share = TUNING.sparse_pilot if is_sparse(op) else TUNING.pilot
            pilot, used = sampler.pilot(left // share, left)
            first, num_steps = sampler.scaled(pilot, used, final=False), pilot.matrices.shape[1]
            looks = sampler.looks(left, pilot, used)
            wanted = (budget.rtol or 0.0) * float(first)
            # With all probes the standard error is stderr sqrt(probes / most); 95 % is two of them.
            sampling = 2 * float(first.stderr) * math.sqrt(len(pilot.matrices) / looks[-1])
            if is_below(float(first.truncation) + sampling, abs(wanted)):
                return sampler.extended([pilot], num_steps, looks, used)
            why = f"Lanczos quadrature would not reach rtol, by {num_steps} steps"
            budget, spent = replace(budget, num_products=left - used), spent + used
    estimate = logdet_by_factor(op) if is_narrow(op) else _by_krylov(op, budget)
    spent += estimate.num_products
    return replace(estimate, method=f"{estimate.method} ({why})", num_products=spent)


def _by_krylov(op: LinearOperator, budget: Budget) -> Estimate:
    n = op.shape[0]
    size, width = krylov_size(n, budget.num_products, op.dtype.itemsize)
    if budget.num_probes is not None and size < n:  # leave at least one product per probe
        size = min(size, budget.num_products - budget.num_probes)
    with tracking(budget.progress, "log determinant", min(n, budget.num_products)) as bar:
        space = block_krylov(op, dimension=size, width=width, generator=budget.generator, bar=bar)
        split = Deflation(op, space)
        if split.complement is None:
            roundoff = torch.tensor(split.roundoff, dtype=torch.float64)
            method = "block Krylov: the whole space"
            return Estimate.exact(split.logdet, method=method, num_products=n, truncation=roundoff)
        # log det A = log det T + tr log S, and tr S = tr A - split.trace is known with tr A.
        sampler = Sampler(
            op=split.complement,
            draw=lambda count: space.draw(count, budget.generator),
            function=torch.log,
            budget=budget,
            dimension=split.dimension,
            bar=bar,
            label=f"block Krylov: {size} directions split off, ",
            spent=size,
            inside=split.logdet,
            error=split.roundoff,
            known=lambda: _known(op, split.trace, split.dimension),
            magnitude=split.magnitude,
        )
        return sampler.estimate(budget.num_products - size, budget.num_probes)


def _by_lanczos(op: LinearOperator, budget: Budget) -> Estimate:
    with tracking(budget.progress, "log determinant", budget.num_products) as bar:
        sampler = _whole(op, budget, bar, "Lanczos quadrature: ")
        return sampler.estimate(budget.num_products, budget.num_probes)


def _whole(
    op: LinearOperator, budget: Budget, bar: Progress, label: str, spent: int = 0
) -> Sampler:
    """Return the sampler of tr log A by probes in the whole space."""
    n = op.shape[0]
    return Sampler(
        op=op,
        draw=lambda count: unit_probes(op, count, "rademacher", budget.generator),
        function=torch.log,
        budget=budget,
        dimension=n,
        bar=bar,
        label=label,
        spent=spent,
        known=lambda: _known(op, 0.0, n),
    )


def _known(op: LinearOperator, less: float, dimension: int) -> Known | None:
    if (trace := exact(op, "trace").value) is None:
        return None
    noise = 100 * torch.finfo(op.dtype).eps * abs(trace)
    return Known((trace - less) / dimension, noise / dimension)


# ------------------------------------------------------------------------------------------
# By factors of matrices that are dense, or sparse and cheap to factor.


def is_small(op: LinearOperator) -> bool:
    """Return whether factoring is always fast: a dense matrix that fits, or few sparse rows."""
    if isinstance(op, DenseOperator):
        return op.shape[0] ** 2 * 8 <= TUNING.dense
    return isinstance(op, SparseOperator) and op.shape[0] <= TUNING.rows


def is_narrow(op: LinearOperator) -> bool:
    """Return whether a sparse matrix has a small envelope, and so little fill-in."""
    return isinstance(op, SparseOperator) and _envelope(_columns(op)) <= TUNING.envelope


def logdet_by_factor(op: LinearOperator) -> Estimate:
    """Return the log determinant of a matrix by its Cholesky or LU factor."""
    size = f"of order {op.shape[0]:,}"
    if isinstance(op, DenseOperator):
        # A = L L', so log det A = 2 sum_i log L_ii
        factor = cholesky_factor(op.matrix.double())
        value = float(2 * factor.diagonal().log().sum())
        error = factor_roundoff(op, lambda block: torch.cholesky_solve(block, factor))
        method = f"exact, by the factor of a dense matrix {size}"
        return Estimate.exact(value, method=method, truncation=error)
    if not isinstance(op, SparseOperator):
        raise ValueError(f"method='cholesky' needs a dense or sparse matrix, got {op!r}")
    matrix, installed = _columns(op), find_spec("sksparse") is not None
    value, solve = _cholmod(matrix) if installed else _superlu(matrix)
    name = "CHOLMOD's factor" if installed else "the factor"
    error = factor_roundoff(op, lambda block: torch.from_numpy(solve(block.cpu().numpy())))
    method = f"exact, by {name} of a sparse matrix {size}"
    return Estimate.exact(value, method=method, truncation=error)


def _columns(op: SparseOperator) -> Any:
    rows, columns, values = (
        part.cpu().numpy()
        for part in (op.matrix.crow_indices(), op.matrix.col_indices(), op.matrix.values().double())
    )
    # The matrix is symmetric, so its compressed rows are its compressed columns.
    return csc_array((values, columns, rows), shape=op.shape)


def _envelope(matrix: Any) -> float:
    """Return an upper bound of the operations of an elimination within the envelope."""
    order = reverse_cuthill_mckee(matrix.tocsr(), symmetric_mode=True)
    place = np.empty_like(order)
    place[order] = np.arange(len(order), dtype=order.dtype)
    # Row i fills from its first entry f_i to the diagonal: sum_i (i - f_i)^2 operations
    # (George and Liu 1981, Section 4.2).
    reach, used = place.copy(), np.diff(matrix.indptr) > 0
    reach[used] = np.minimum.reduceat(place[matrix.indices], matrix.indptr[:-1][used])
    widths = np.maximum(place - reach, 0).astype(float)
    return float((widths**2).sum())


def _cholmod(matrix: Any) -> tuple[float, Solve]:
    cholmod: Any = importlib.import_module("sksparse.cholmod")
    try:
        if hasattr(cholmod, "cho_factor"):  # from version 0.5 on
            factor = cholmod.cho_factor(matrix)
            return float(factor.logdet()), factor.solve
        factor = cholmod.cholesky(matrix, mode="supernodal")
        return float(factor.logdet()), factor.solve_A
    except cholmod.CholmodNotPositiveDefiniteError as error:
        _superlu(matrix)  # raises with the pivot, which CHOLMOD does not report
        raise NotPositiveDefiniteError(
            "op must be positive definite, got a pivot at the level of roundoff: the matrix is "
            "singular, so add a small multiple of the identity"
        ) from error


def _superlu(matrix: Any) -> tuple[float, Solve]:
    options = {"SymmetricMode": True}
    try:
        factor = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
    except RuntimeError:  # the matrix is singular
        factor = None
    # Rows are exchanged only if a pivot on the diagonal is zero.
    if factor is None or not np.array_equal(factor.perm_r, factor.perm_c):
        raise NotPositiveDefiniteError("op must be positive definite, got a zero pivot")
    # P A P' = L U with unit diagonal of L, so log det A = sum_i log U_ii
    pivots = torch.from_numpy(factor.U.diagonal())
    if not bool((pivots > 0).all()):
        raise not_positive("a pivot", float(pivots.min()))
    return float(pivots.log().sum()), factor.solve


_METHODS: dict[str, Callable[[LinearOperator, Budget], Estimate]] = {
    "auto": _by_auto,
    "cholesky": lambda op, budget: logdet_by_factor(op),
    "krylov": _by_krylov,
    "lanczos": _by_lanczos,
    "maxent": lambda op, budget: by_maxent(op, budget, torch.log),
    "chebyshev": lambda op, budget: by_chebyshev(op, budget, torch.log),
}
