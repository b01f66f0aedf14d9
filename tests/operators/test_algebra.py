import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import seeded

from ritz import lanczos
from ritz.operators import (
    BlockDiagonalOperator,
    DeflatedOperator,
    DenseOperator,
    DiagonalOperator,
    FunctionOperator,
    KernelOperator,
    KroneckerOperator,
    LowRankOperator,
    RestrictedOperator,
    ShardedOperator,
    ShiftedOperator,
    as_operator,
)

numbers = st.floats(-100, 100, allow_nan=False)


@st.composite
def matrices(draw, low=1, high=6):
    n = draw(st.integers(low, high))
    entries = draw(st.lists(numbers, min_size=n * n, max_size=n * n))
    square = torch.tensor(entries, dtype=torch.float64).reshape(n, n)
    return square.tril() + square.tril(-1).T


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-9)


@given(matrices(), numbers)
def test_operators_can_be_scaled_from_the_left_and_the_right(matrix, factor):
    op, block = DenseOperator(matrix), torch.ones(len(matrix), 2, dtype=torch.float64)
    assert_same((factor * op) @ block, factor * (matrix @ block))
    assert_same((op * factor) @ block, op @ (factor * block))
    assert_same((op / 4) @ block, matrix @ block / 4)
    assert_same((-op) @ block, -(matrix @ block))


@given(matrices(low=2))
def test_a_deflated_eigenvector_has_eigenvalue_zero_and_the_others_stay(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    rest = DeflatedOperator(DenseOperator(matrix), vectors[:, -1:]).dense()
    expected = torch.cat([values[:-1], values.new_zeros(1)]).sort().values
    assert_same(torch.linalg.eigvalsh((rest + rest.T) / 2), expected)


def test_as_operator_returns_an_operator_unchanged():
    op = DiagonalOperator(torch.ones(2))
    assert as_operator(op) is op


def test_a_function_that_returns_its_own_input_does_not_spoil_a_lanczos_run():
    op = FunctionOperator(lambda block: block, n=20, dtype=torch.float64, name="identity")
    found = lanczos(op, num_steps=5, vectors=True)
    assert found.status.outcome == "breakdown"
    torch.testing.assert_close(found.values, torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(found.vectors.norm(dim=0), torch.ones(1, dtype=torch.float64))


def test_a_function_that_reuses_its_result_does_not_spoil_a_lanczos_run():
    entries = torch.linspace(1, 2, 30, dtype=torch.float64)[:, None]
    kept = torch.empty(30, 1, dtype=torch.float64)
    op = FunctionOperator(lambda x: torch.mul(entries, x, out=kept), n=30, dtype=torch.float64)
    expected = lanczos(DiagonalOperator(entries[:, 0]), num_steps=30).values
    torch.testing.assert_close(lanczos(op, num_steps=30).values, expected)


def trained(matrix):
    return [
        DenseOperator(matrix),
        as_operator(matrix.detach().to_sparse_csr().requires_grad_()),
        DiagonalOperator(matrix[0]),
        LowRankOperator(matrix, scales=matrix[0], entries=matrix[1]),
        KernelOperator(matrix, lengthscale=torch.tensor(2.0, requires_grad=True)),
        DeflatedOperator(DenseOperator(matrix), torch.linalg.qr(matrix[:, :2]).Q),
        FunctionOperator(lambda block: matrix @ block, n=6),
        FunctionOperator(matrix.mv, n=6, columnwise=True),
    ]


@pytest.mark.parametrize("index", range(8))
def test_products_of_tensors_that_require_gradients_have_no_graph(index):
    noise = torch.randn(6, 6, generator=seeded(0))
    op = trained((noise + noise.T).requires_grad_())[index]
    assert not (op @ torch.ones(6)).requires_grad
    assert lanczos(op, num_steps=4).values.isfinite().all()


DIAGONAL = DiagonalOperator(torch.ones(2))
SAID = [
    (DIAGONAL, "DiagonalOperator(2 x 2, float32, cpu)"),
    (
        DiagonalOperator(torch.ones(1_000_000, dtype=torch.float64)),
        "DiagonalOperator(1,000,000 x 1,000,000, float64, cpu)",
    ),
    (as_operator(torch.eye(3).to_sparse_csr()), "SparseOperator(3 x 3, float32, cpu, 3 entries)"),
    (
        LowRankOperator(torch.ones(4, 2)),
        "LowRankOperator(4 x 4, float32, cpu, rank 2 plus diagonal)",
    ),
    (
        KernelOperator(torch.ones(4, 2), noise=0.1),
        "KernelOperator(4 x 4, float32, cpu, squared_exponential, 2 dimensions, noise 0.1)",
    ),
    (
        KroneckerOperator(DIAGONAL, DIAGONAL),
        "KroneckerOperator(4 x 4, float32, cpu, DiagonalOperator ⊗ DiagonalOperator)",
    ),
    (-DIAGONAL, "ScaledOperator(2 x 2, float32, cpu, -1 * DiagonalOperator)"),
    (
        ShiftedOperator(DIAGONAL, -0.5),
        "ShiftedOperator(2 x 2, float32, cpu, DiagonalOperator -0.5 I)",
    ),
    (
        DIAGONAL + DIAGONAL,
        "SumOperator(2 x 2, float32, cpu, DiagonalOperator + DiagonalOperator)",
    ),
    (
        RestrictedOperator(DIAGONAL, torch.tensor([1])),
        "RestrictedOperator(1 x 1, float32, cpu, 1 coordinates of DiagonalOperator)",
    ),
    (
        DeflatedOperator(DIAGONAL, torch.eye(2)[:, :1]),
        "DeflatedOperator(2 x 2, float32, cpu, DiagonalOperator without 1 directions)",
    ),
    (FunctionOperator(torch.neg, n=3), "FunctionOperator(3 x 3, float32, cpu, neg)"),
    (
        ShardedOperator(DIAGONAL),
        "ShardedOperator(2 x 2, float32, cpu, sum over 1 processes of DiagonalOperator)",
    ),
]


@pytest.mark.parametrize(("op", "text"), SAID, ids=lambda x: type(x).__name__)
def test_the_repr_of_an_operator_describes_it(op, text):
    assert repr(op) == text


def test_the_block_size_is_the_smallest_of_the_blocks():
    narrow = FunctionOperator(lambda block: block.clone(), n=2, dtype=torch.float64)
    narrow.block_size = 2
    assert BlockDiagonalOperator([DiagonalOperator(torch.ones(1).double()), narrow]).block_size == 2
