import pytest
import scipy.sparse
import torch

from ritz.operators import (
    DeflatedOperator,
    DenseOperator,
    DiagonalOperator,
    Exact,
    FunctionOperator,
    KernelOperator,
    KroneckerOperator,
    LowRankOperator,
    RestrictedOperator,
    ShiftedOperator,
    SparseOperator,
    exact,
)
from ritz.operators._exact import gershgorin

ENTRIES = torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64)


def symmetric(n, seed=0):
    noise = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise + noise.T


def sparse(n):
    matrix = symmetric(n) * (symmetric(n, 1) > 1)
    return SparseOperator(scipy.sparse.csr_array(matrix.numpy()))


def known():
    matrix = DenseOperator(symmetric(4))
    factors = symmetric(4)[:, :2]
    return [
        matrix,
        sparse(20),
        DiagonalOperator(ENTRIES),
        LowRankOperator(factors, scales=torch.tensor([1.0, -3.0]).double(), entries=ENTRIES),
        KernelOperator(symmetric(5)[:, :2], outputscale=2.0, noise=0.5),
        KroneckerOperator(matrix, sparse(6)),
        2.5 * matrix,
        ShiftedOperator(matrix, -1.5),
        RestrictedOperator(matrix, torch.tensor([3, 1])),
        matrix + DiagonalOperator(ENTRIES) - LowRankOperator(factors),
    ]


@pytest.mark.parametrize("op", known(), ids=repr)
def test_exact_diagonals_and_traces_equal_those_of_the_matrix(op):
    dense = op.dense()
    torch.testing.assert_close(exact(op, "diagonal").value, dense.diagonal())
    assert exact(op, "trace").value == pytest.approx(float(dense.trace()), abs=1e-12)


def unknown():
    function = FunctionOperator(lambda block: block, n=4, dtype=torch.float64)
    direction = torch.eye(4, dtype=torch.float64)[:, 0]
    return [
        function,
        2.0 * function,
        ShiftedOperator(function, 1.0),
        DiagonalOperator(ENTRIES) + function,
        KroneckerOperator(DiagonalOperator(ENTRIES), function),
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


@pytest.mark.parametrize("seed", range(5))
def test_gershgorin_discs_contain_the_spectrum(seed):
    matrix = symmetric(12, seed)
    low, high = gershgorin(DenseOperator(matrix))
    radius = matrix.abs().sum(1) - matrix.diagonal().abs()
    assert low == pytest.approx(float((matrix.diagonal() - radius).min()))
    assert high == pytest.approx(float((matrix.diagonal() + radius).max()))
    eigenvalues = torch.linalg.eigvalsh(matrix)
    assert low <= eigenvalues[0]
    assert high >= eigenvalues[-1]
    sparse_ends = gershgorin(SparseOperator(matrix.to_sparse_csr()))
    assert sparse_ends == pytest.approx((low, high))


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
