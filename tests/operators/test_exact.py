"""Diagonals, traces and bounds of eigenvalues that operators know without products."""

import pytest
import torch
from matrices import seeded

from ritz.operators import (
    BlockDiagonalOperator,
    DeflatedOperator,
    DenseOperator,
    DiagonalOperator,
    Exact,
    FunctionOperator,
    KroneckerOperator,
    LowRankOperator,
    RestrictedOperator,
    ShiftedOperator,
    SparseOperator,
    exact,
)
from ritz.operators._exact import gershgorin
from ritz.operators._shared import lower_bound

ENTRIES = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64)


def symmetric(n, seed=0):
    noise = torch.randn(n, n, generator=seeded(seed), dtype=torch.float64)
    return noise + noise.T


def unknown():
    function = FunctionOperator(lambda block: block, n=4, dtype=torch.float64)
    direction = torch.eye(4, dtype=torch.float64)[:, 0]
    return [
        function,
        2.0 * function,
        ShiftedOperator(function, 1.0),
        DiagonalOperator(ENTRIES) + function,
        KroneckerOperator(DiagonalOperator(ENTRIES), function),
        BlockDiagonalOperator([DiagonalOperator(ENTRIES), function]),
        RestrictedOperator(function, torch.tensor([0])),
        DeflatedOperator(DiagonalOperator(ENTRIES), direction),
    ]


@pytest.mark.parametrize("op", unknown(), ids=repr)
def test_operators_without_structure_have_no_exact_diagonal_or_bounds(op):
    assert exact(op, "diagonal").value is None
    assert exact(op, "trace").value is None
    assert gershgorin(op) is None


def test_the_exact_diagonal_is_a_copy():
    op = DiagonalOperator(ENTRIES.clone())
    exact(op, "diagonal").value.zero_()
    assert torch.equal(op.entries, ENTRIES)


def test_gershgorin_discs_are_those_of_the_rows():
    matrix = symmetric(12)
    radius = matrix.abs().sum(1) - matrix.diagonal().abs()
    ends = float((matrix.diagonal() - radius).min()), float((matrix.diagonal() + radius).max())
    for op in (DenseOperator(matrix), SparseOperator(matrix.to_sparse_csr())):
        assert gershgorin(op) == pytest.approx(ends)


def test_gershgorin_of_a_diagonal_matrix_is_exact():
    assert gershgorin(DiagonalOperator(ENTRIES)) == (-1.0, 3.0)
    assert gershgorin(DenseOperator(torch.diag(ENTRIES))) == (-1.0, 3.0)


def test_gershgorin_resolves_a_radius_far_below_the_diagonal():
    matrix = torch.tensor([[1e8, 3.0], [3.0, 1e8]])  # in float32 the sum of a row is 1e8
    for op in (DenseOperator(matrix), SparseOperator(matrix.to_sparse_csr())):
        assert gershgorin(op) == (1e8 - 3, 1e8 + 3)


def test_a_user_defined_operator_can_register_its_trace():
    class Ones(DiagonalOperator.__base__):
        def _matmat(self, block):
            return block.clone()

    exact.register(Ones)(
        lambda op, quantity: Exact.of(torch.ones(op.shape[0], dtype=op.dtype), quantity)
    )
    assert exact(Ones(7, dtype=torch.float64, device="cpu"), "trace").value == 7.0


def test_a_negative_multiple_or_an_indefinite_part_has_no_bound_from_its_structure():
    assert lower_bound(-DenseOperator(torch.eye(3))).value is None
    assert lower_bound(LowRankOperator(torch.ones(3, 1), scales=torch.tensor([-1.0]))).value is None


def test_roundoff_of_the_row_sums_is_subtracted():
    # 0.1 + 0.2 > 0.3 exactly, but the computed difference of the row is -5.6e-17 or zero.
    row = torch.tensor([0.1 + 0.2, 0.1, 0.2], dtype=torch.float64)
    matrix = torch.diag(row[0].expand(3)).index_put(
        (torch.tensor([0, 0, 1, 2]), torch.tensor([1, 2, 0, 0])), row[[1, 2, 1, 2]]
    )

    assert lower_bound(DenseOperator(matrix)).value < 0
