"""Whether a run that goes on still has the operator it began with."""

import math

import torch
from torch import Tensor

from ritz.operators.base import LinearOperator
from ritz.spectra.recurrence import ASYMMETRY, Recurrence

# Units of roundoff in the norm of the matrix that a number found again may be off by, however
# small it is: sums over many entries come in another order.
REPEATED = 100.0


def difference(op: LinearOperator, run: Recurrence) -> str | None:
    r"""Return how the operator differs from the one the run was made with, ``None`` if it does not.

    One product with a row of the basis, :math:`A v_k`, which the run knows:

    .. math:: A v_k = \sum_i T_{ik} v_i + c_k v_{m+1}

    Its norm and :math:`v_k^\top A v_k` must come out to the root of roundoff, which a matrix scaled
    by 1.001 fails in single precision too; noise in the product enters the first squared and the
    second as an average. The vector itself, in which noise is as large as it is, must come out as
    well as products must be symmetric: other data that happen to have the same norm fail there.

    Cost: one product and one read of the basis.

    Args:
        op: What multiplies now.
        run: A run that has made a step at least.
    """
    basis = run.basis
    row, column, gone = _known(run)
    vector = basis.whole(basis.rows[row])
    product = basis.local(op.matmat(vector[:, None])[:, 0].contiguous())
    norm, diagonal = basis.norm(product), basis.dot(row, product)
    basis.subtract(product, column.to(product.device))
    size, known = max(run.scale, run.magnitude), math.hypot(float(column.norm()), gone)
    number = run.eps**0.5 * known + REPEATED * run.eps * size
    beside = run.removed[row] if run.mode == "partial" else 0.0
    allowed = (
        (f"a product of norm {known:.9g} now has {norm:.9g}", norm - known, number),
        (f"a quadratic form of {float(column[row]):.9g} is now {diagonal:.9g}",
         diagonal - float(column[row]), number),
        (f"a product of norm {known:.9g} is another vector", basis.norm(product) - gone,
         ASYMMETRY * run.eps**0.5 * size + beside),
    )  # fmt: skip
    # Not "gap > most": NaN is a difference too.
    return next((what for what, gap, most in allowed if not abs(gap) <= most), None)


def _known(run: Recurrence) -> tuple[int, Tensor, float]:
    """A row, its product in terms of the rows ``(basis.size,)``, and the norm of what is gone.

    The row with the largest product, where there is a choice: roundoff is that of the whole matrix.
    """
    if run.mode == "none":
        return _newest(run)
    columns = torch.zeros(run.basis.size, run.size, dtype=torch.float64)
    columns[: run.size] = run.projected()
    if run.basis.size > run.size:
        if run.alphas:
            columns[-1, -1] = run.betas[-1]
        else:
            columns[-1] = torch.from_numpy(run.couplings)
    row = int(columns.norm(dim=0).argmax())
    return row, columns[:, row], 0.0


def _newest(run: Recurrence) -> tuple[int, Tensor, float]:
    """The same for the last row whose product is known, of the two that "none" keeps."""
    column = torch.zeros(run.basis.size, dtype=torch.float64)
    before = run.betas[-2] if run.size > 1 else 0.0
    row = run.newest if run.exhausted else 1 - run.newest
    column[row] = run.alphas[-1]
    if run.basis.size > 1:
        column[1 - row] = before if run.exhausted else run.betas[-1]
    return row, column, 0.0 if run.exhausted else before
