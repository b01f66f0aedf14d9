"""Curvature of parts of the data, and how it differs from that of the whole."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from ritz._core.checks import check_choice, check_tensor
from ritz.curvature.ggns import ggn
from ritz.curvature.hessians import hessian
from ritz.curvature.products import CurvatureOperator
from ritz.curvature.risk import Risk
from ritz.operators.algebra import SumOperator

Kind = Literal["hessian", "ggn"]
KINDS = ("hessian", "ggn")


def curvature_operator(risk: Risk, kind: Kind, **options: Any) -> CurvatureOperator:
    """Return the Hessian or the Gauss-Newton matrix, by name; options are theirs."""
    check_choice("kind", kind, KINDS)
    return hessian(risk, **options) if kind == "hessian" else ggn(risk, **options)


def batch_products(
    risk: Risk, block: Tensor, *, kind: Kind = "hessian"
) -> Iterator[tuple[float, Tensor]]:
    r"""Yield weight :math:`w_b` and product :math:`H_b V`, ``(P, k)``, of each batch in turn.

    Weights sum to one over all processes, and :math:`\sum_b w_b H_b` is the matrix of the risk
    without its L2 term. All of them cost one product with the whole; one product in memory.

    Args:
        risk: The loss at a point, with its batches.
        block: :math:`V`, ``(P, k)``.
        kind: ``hessian`` or ``ggn``.
    """
    theta = risk.theta
    check_tensor("block", block, dtype=theta.dtype, device=theta.device, rows=len(theta))
    columns = block if block.ndim == 2 else block[:, None]
    # One pass: what one product leaves behind would never be used.
    yield from curvature_operator(risk, kind, memory=0).products.each(columns)


def fluctuation(risk: Risk, part: Risk, *, kind: Kind = "hessian") -> SumOperator:
    r"""Return :math:`H_\text{part} - H`: what a batch or some samples see beside what all do.

    Args:
        risk: The whole.
        part: A part of it, such as ``risk.batch(3)`` or ``risk.samples(indices)``.
        kind: ``hessian`` or ``ggn``.
    """
    return curvature_operator(part, kind) - curvature_operator(risk, kind)
