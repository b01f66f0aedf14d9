r"""Lower bounds of positive eigenvalues, certain ones from entries, likely ones from products.

With any positive bound, however small, Gauss and Gauss-Radau rules bracket the logarithm: a bound
of :math:`10^{-12}` instead of :math:`1` takes a few steps more.
"""

import math
from dataclasses import dataclass

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.progress import Progress
from ritz._core.random import draw_probes
from ritz.operators import LinearOperator, SparseOperator
from ritz.operators._shared import CompressedRows, lower_bound, row_excess
from ritz.spectra._cg import solve
from ritz.spectra._functions.quadrature import Floor
from ritz.spectra._lanczos import Recurrence, start_runs, step
from ritz.spectra._positive_definite import not_positive


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the bounds."""

    # Probability that a likely bound is above an eigenvalue; that of `bounds`.
    missed: float = 0.001
    # Number of steps before the first check. Ten are enough at a condition number of ten.
    first_check: int = 10
    # A run for a likely bound needs a certain log probability. It is given up after `patience`
    # steps if it has less than `least_share` of that: grids that succeed within 1,000 steps have
    # 0.28 or more by then, and a kernel matrix whose eigenvalues decay to 1e-8 has 0.02.
    patience: int = 50
    least_share: float = 0.2


TUNING = Tuning()


# ------------------------------------------------------------------------------------------
# Certain bounds, from the entries.


def certain_floor(op: LinearOperator, max_products: int = 0) -> Floor:
    """Return a floor that follows from the entries or from the structure of an operator.

    Args:
        op: Symmetric.
        max_products: Number of products that may be spent on a diagonally dominant scaling.
    """
    bound = lower_bound(op)
    if bound.value is not None and bound.value > 0:
        return Floor(bound.value, bound.note)
    if not isinstance(op, SparseOperator) or op.device.type != "cpu":
        return Floor(None)
    excess = row_excess(op)
    value = _grounded(op.rows, excess)
    if value > 0:
        return Floor(value, "diagonal dominance")
    return _scaled(op.rows, excess, max_products) if max_products else Floor(None)


def _grounded(rows: CompressedRows, excess: Tensor) -> float:
    r"""Return a lower bound for rows that are dominant, some of them strictly.

    With the excess :math:`d_i = a_{ii} - \sum_{j \ne i} |a_{ij}|`,

    .. math:: x^\top A x = \sum_{i<j} |a_{ij}| (x_i \pm x_j)^2 + \sum_i d_i x_i^2 ,

    the power in a network of conductances, with a ground of potential zero. A path of ``l`` edges
    from the ground to a vertex gives :math:`x_i^2 \le (1/d + l/w)\, x^\top A x` by Cauchy-Schwarz,
    with the smallest conductance ``w``. The paths of a tree with ``n`` vertices add up to
    :math:`n/d + n^2/(2 w)`.
    """
    # Excesses of zero are negative by their roundoff: A + slack I is dominant.
    slack = max(0.0, -float(excess.min()))
    if not is_below(slack, 1e-8 * float(excess.max())):
        return -math.inf
    values = torch.ones(rows.num_entries) if rows.values is None else rows.values
    parts = (part.numpy() for part in (values.double().abs(), rows.columns, rows.pointers))
    graph = csr_array(tuple(parts), shape=(rows.num_rows, rows.num_rows))
    if not bool((values != 0).all()):
        graph = graph.copy()
        graph.eliminate_zeros()
    count, names = connected_components(graph, directed=False)
    labels = torch.from_numpy(names).long()
    pointers, columns = (torch.from_numpy(part).long() for part in (graph.indptr, graph.indices))
    owners = torch.arange(rows.num_rows).repeat_interleave(pointers.diff())
    beside = owners != columns
    ends, weights = labels[owners[beside]], torch.from_numpy(graph.data)[beside]
    size = torch.bincount(labels, minlength=count).double()
    ground, weakest = torch.zeros(count).double(), torch.full((count,), math.inf).double()
    ground.scatter_reduce_(0, labels, excess + slack, "amax")
    weakest.scatter_reduce_(0, ends, weights, "amin")
    bounds = 1 / (size / ground + size.square() / (2 * weakest))
    return float(bounds.min()) * (1 - 1e-9) - slack * (1 + 1e-9)


def _scaled(rows: CompressedRows, excess: Tensor, max_products: int) -> Floor:
    r"""Return a floor if the rows are strictly dominant after a scaling of rows and columns.

    The comparison matrix :math:`C` has the diagonal of :math:`A` and the entries :math:`-|a_{ij}|`
    beside it. If :math:`C v \ge s v` for a positive vector, no eigenvalue is below ``s``: these are
    Gershgorin's discs of :math:`V^{-1} A V`. If there is such a vector, :math:`C^{-1} 1` is one.
    """
    diagonal = rows.diagonal().double()
    # 1'C1 > 0 is necessary, and fails for most matrices whose comparison matrix is not definite.
    if bool((diagonal <= 0).any()) or float(excess.sum()) <= 0 or rows.values is None:
        return Floor(None)
    owners = torch.arange(rows.num_rows).repeat_interleave(rows.pointers.diff().long())
    sizes = rows.values.double().abs()
    sizes = torch.where(owners == rows.columns, sizes, -sizes)
    comparison = SparseOperator(CompressedRows(rows.pointers, rows.columns, sizes))
    ones = torch.ones_like(diagonal)
    try:
        solution = solve(
            comparison,
            ones,
            rtol=0.1 / rows.num_rows**0.5,  # so that no entry of the residual exceeds 0.1
            max_steps=max_products - 2,
            preconditioner=lambda block: block / diagonal[:, None],
        )
    except ValueError:  # the comparison matrix is not definite, or singular
        return Floor(None)
    v = solution.x
    # Roundoff of C v, whose terms have the absolute values |C| v = 2 diag v - C v.
    product = comparison.matmat(v)
    unit = torch.finfo(torch.float64).eps * (rows.pointers.diff() + 4)
    ratio = (product - unit * (2 * diagonal * v + product.abs())) / v
    value, spent = float(ratio.min()) * (1 - 1e-9), solution.num_products + 1
    if bool((v > 0).all()) and value > 0:
        return Floor(value, "scaled diagonal dominance", num_products=spent)
    return Floor(None, num_products=spent)


# ------------------------------------------------------------------------------------------
# Likely bounds, from products.


def likely_floor(
    op: LinearOperator, *, max_products: int, generator: torch.Generator, bar: Progress
) -> Floor:
    """Return a floor that holds with probability 0.999, or none, by one Lanczos run.

    The run begins with a random vector and ends when it excludes eigenvalues near zero.

    Raises:
        NotPositiveDefiniteError: A Ritz value is negative by more than roundoff.
    """
    start = draw_probes(op, 1, kind="gaussian", generator=generator)[:, 0]
    (run,) = start_runs([start], capacity=2, mode="none")
    check = TUNING.first_check
    while True:
        step(op, [run])
        bar.update(run.size)
        last = run.exhausted or run.size == max_products
        if not (last or run.size >= check):
            continue
        check = run.size + max(2, run.size // 10)
        value, share = _excluded(run, op.shape[0])
        if value is not None:
            note = f"{run.size} Lanczos steps, with probability {1 - TUNING.missed:g}"
            return Floor(value, note, certain=False, num_products=run.size)
        late = run.size >= TUNING.patience
        if last or (late and share < TUNING.least_share):
            return Floor(None, num_products=run.size)


def _excluded(run: Recurrence, n: int) -> tuple[float | None, float]:
    """Return a likely floor, if there is one, and which share of the evidence for it is there."""
    smallest, roundoff = float(run.active_pairs()[0][0]), run.roundoff()
    if smallest < -roundoff:
        raise not_positive("a Ritz value", smallest)
    if run.exhausted:  # a random vector has a component along each eigenvector
        return (smallest - roundoff if smallest > 2 * roundoff else None), 0.0
    # See `_Search._log_missed`: P(|u'z|^2 < w) <= sqrt(2 n w / pi), and w <= 1 / sum_j p_j^2.
    wanted = math.log(2 * n / math.pi) - 2 * math.log(TUNING.missed)
    christoffel, low, high = run.log_christoffel(), 2 * roundoff, smallest
    if not (low < high and is_below(wanted, christoffel(low))):
        return None, max(0.0, christoffel(low)) / wanted
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_below(wanted, christoffel(middle)) else (low, middle)
    return low - roundoff, 1.0
