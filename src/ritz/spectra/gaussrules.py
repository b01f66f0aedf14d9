"""Gauss rules of many start vectors at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ritz.operators.base import LinearOperator
from ritz.spectra.recurrence import Recurrence, Reorthogonalization, advance

Rule = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Rules:
    """Gauss rules of ``k`` start vectors.

    Attributes:
        last: Nodes and weights of the ``m``-point rules, each ``(m, k)``, float64 on the CPU.
        projected: Projected matrices, ``(k, m, m)``, of which leading parts have shorter rules.
        exact: Whether a run's space is invariant, and so its rule exact, ``(k,)``.
        num_products: Products spent.
    """

    last: Rule
    projected: Tensor
    exact: Tensor
    num_products: int


def ritz_rules(
    op: LinearOperator, block: Tensor, *, num_steps: int, reorthogonalize: Reorthogonalization
) -> Rules:
    r"""Return the Gauss rules of the columns of a block.

    Where a run ends early, because its space is invariant, its rule is exact and padded with
    nodes of weight zero.

    Args:
        op: Symmetric :math:`A`.
        block: Start vectors ``(n, k)``, none of them zero.
        num_steps: ``m``.
        reorthogonalize: How; see :func:`ritz.lanczos`.
    """
    runs = [
        Recurrence(start.contiguous(), capacity=num_steps, mode=reorthogonalize)
        for start in block.T
    ]
    advance(op, runs, num_steps)
    projected = torch.stack([_padded(run.projected(), num_steps) for run in runs])
    return Rules(
        last=gauss_rule(projected),
        projected=projected,
        exact=torch.tensor([run.exhausted for run in runs]),
        num_products=sum(run.size for run in runs),
    )


def _padded(matrix: Tensor, size: int) -> Tensor:
    padded = torch.eye(size, dtype=matrix.dtype) * matrix[0, 0]
    padded[: len(matrix), : len(matrix)] = matrix
    return padded


def gauss_rule(projected: Tensor) -> Rule:
    """Return the nodes and weights ``(m, k)`` of the Gauss rules of ``k`` projected matrices."""
    nodes, vectors = torch.linalg.eigh(projected)
    return nodes.T, vectors[:, 0].square().T
