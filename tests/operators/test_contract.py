"""Every operator keeps one contract, in both precisions, against a matrix built without it."""

import numpy as np
import pytest
import scipy.sparse
import torch
from matrices import PRECISIONS, seeded
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import aslinearoperator, eigsh

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
    SparseOperator,
    _kernel,
    as_operator,
    exact,
)
from ritz.operators._base import ScaledOperator, SumOperator
from ritz.operators._shared import gershgorin, lower_bound
from ritz.operators._sparse import CompressedRows
from ritz.testing import check_operator

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def symmetric(n, dtype, seed=0):
    noise = torch.randn(n, n, generator=seeded(seed), dtype=dtype)
    return noise + noise.T


def sparse_matrix(dtype):
    matrix = symmetric(30, torch.float64, 3) * (symmetric(30, torch.float64, 4) > 1.0)
    return matrix.to(dtype)


def points(dtype):
    return torch.randn(21, 3, generator=seeded(5), dtype=dtype)


def kernel_matrix(x, name, lengthscale, outputscale, noise):
    x = (x.double() / lengthscale).numpy()
    r = np.linalg.norm(x[:, None] - x[None], axis=2)
    a = {"matern32": np.sqrt(3) * r, "matern52": np.sqrt(5) * r}.get(name, r)
    k = {
        "squared_exponential": np.exp(-(r**2) / 2),
        "matern12": np.exp(-r),
        "matern32": (1 + a) * np.exp(-a),
        "matern52": (1 + a + a**2 / 3) * np.exp(-a),
    }[name]
    return torch.from_numpy(outputscale * k + noise * np.eye(len(x)))


@case
def dense(dtype):
    return DenseOperator(symmetric(7, dtype)), symmetric(7, dtype)


@case
def dense_of_one_row(dtype):
    return DenseOperator(torch.full((1, 1), -2.0, dtype=dtype)), torch.full((1, 1), -2.0)


@case
def numpy_array(dtype):
    return as_operator(symmetric(7, dtype).numpy()), symmetric(7, dtype)


@case
def scipy_csr(dtype):
    matrix = sparse_matrix(dtype)
    return SparseOperator(scipy.sparse.csr_array(matrix.numpy())), matrix


@case
def scipy_csc(dtype):
    matrix = sparse_matrix(dtype)
    return SparseOperator(scipy.sparse.csc_matrix(matrix.numpy())), matrix


@case
def scipy_coo_with_repeated_entries(dtype):
    one = np.ones(3, dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    matrix = scipy.sparse.coo_array((one, ([0, 0, 1], [0, 0, 2])), shape=(3, 3))
    expected = torch.tensor([[4.0, 0, 0], [0, 0, 1], [0, 1, 0]])
    return SparseOperator(matrix + matrix.T), expected


@case
def scipy_csr_with_repeated_entries_out_of_order(dtype):
    values = np.array([1.0, 2.0, 1.0, 1.0], dtype=torch.empty(0, dtype=dtype).numpy().dtype)
    matrix = scipy.sparse.csr_array((values, [1, 0, 1, 0], [0, 3, 4]), shape=(2, 2))
    matrix.data[0] = matrix.data[2] = 0.5
    return SparseOperator(matrix), torch.tensor([[2.0, 1.0], [1.0, 0.0]])


@case
def torch_csr(dtype):
    return SparseOperator(sparse_matrix(dtype).to_sparse_csr()), sparse_matrix(dtype)


@case
def torch_csc(dtype):
    return as_operator(sparse_matrix(dtype).to_sparse_csc()), sparse_matrix(dtype)


@case
def torch_coo_not_coalesced(dtype):
    half = sparse_matrix(dtype).to_sparse_coo() * 0.5
    twice = torch.sparse_coo_tensor(
        torch.cat([half.indices(), half.indices()], 1),
        torch.cat([half.values(), half.values()]),
        half.shape,
        check_invariants=True,
    )
    return as_operator(twice), sparse_matrix(dtype)


@case
def compressed_rows_without_values(dtype):
    pattern = (sparse_matrix(dtype) != 0).to(dtype).to_sparse_csr()
    rows = CompressedRows(pattern.crow_indices(), pattern.col_indices(), dtype=dtype)
    return SparseOperator(rows), pattern.to_dense()


@case
def diagonal(dtype):
    entries = torch.tensor([3.0, 0.0, -1.0, 2.0], dtype=dtype)
    return DiagonalOperator(entries), torch.diag(entries)


@case
def low_rank(dtype):
    factors = symmetric(9, dtype)[:, :2]
    return LowRankOperator(factors), factors @ factors.T


@case
def low_rank_plus_diagonal(dtype):
    factors, scales = symmetric(9, dtype)[:, :2], torch.tensor([2.0, -1.0], dtype=dtype)
    entries = torch.linspace(-1, 1, 9, dtype=dtype)
    expected = factors @ torch.diag(scales) @ factors.T + torch.diag(entries)
    return LowRankOperator(factors, scales=scales, entries=entries), expected


@case
def kernel_with_a_lengthscale_a_dimension(dtype):
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    op = KernelOperator(points(dtype), lengthscale=scale, outputscale=2.0, noise=0.1)
    return op, kernel_matrix(points(dtype), "squared_exponential", scale, 2.0, 0.1)


def kernel_case(name):
    def build(dtype):
        op = KernelOperator(points(dtype), kernel=name, lengthscale=1.5, outputscale=3.0, noise=0.2)
        return op, kernel_matrix(points(dtype), name, 1.5, 3.0, 0.2)

    build.__name__ = f"kernel_{name}"
    return build


for name in _kernel.KERNELS:
    case(kernel_case(name))


@case
def kronecker(dtype):
    left, right = symmetric(3, dtype, 1), symmetric(4, dtype, 2)
    return KroneckerOperator(DenseOperator(left), DenseOperator(right)), torch.kron(left, right)


@case
def kronecker_of_three(dtype):
    a, b, c = (symmetric(n, dtype, n) for n in (2, 3, 4))
    inner = KroneckerOperator(DenseOperator(b), DenseOperator(c))
    return KroneckerOperator(DenseOperator(a), inner), torch.kron(a, torch.kron(b, c))


@case
def kronecker_of_definite(dtype):
    left = torch.tensor([[2.0, -0.5], [-0.5, 1.0]], dtype=dtype)
    right = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=dtype))
    return KroneckerOperator(DenseOperator(left), DenseOperator(right)), torch.kron(left, right)


@case
def block_diagonal_of_three(dtype):
    a, b = symmetric(3, dtype, 1), symmetric(2, dtype, 2)
    one = torch.full((1,), -2.0, dtype=dtype)
    op = BlockDiagonalOperator([DenseOperator(a), DiagonalOperator(one), DenseOperator(b)])
    return op, torch.block_diag(a, one[:, None], b)


@case
def sum_of_three(dtype):
    a, b, c = (symmetric(6, dtype, seed) for seed in (1, 2, 3))
    return SumOperator(DenseOperator(a), DenseOperator(b), DenseOperator(c)), a + b + c


@case
def difference(dtype):
    a, b = symmetric(6, dtype, 1), symmetric(6, dtype, 2)
    return DenseOperator(a) - DenseOperator(b), a - b


@case
def scaled(dtype):
    return ScaledOperator(DenseOperator(symmetric(6, dtype)), -2.5), -2.5 * symmetric(6, dtype)


@case
def shifted(dtype):
    matrix = symmetric(6, dtype)
    return ShiftedOperator(DenseOperator(matrix), 0.7), matrix + 0.7 * torch.eye(6, dtype=dtype)


@case
def deflated(dtype):
    matrix = symmetric(8, dtype)
    basis = torch.linalg.qr(symmetric(8, torch.float64, 1)[:, :3]).Q.to(dtype)
    projection = torch.eye(8, dtype=dtype) - basis @ basis.T
    return DeflatedOperator(DenseOperator(matrix), basis), projection @ matrix @ projection


@case
def deflated_by_one_vector(dtype):
    matrix, basis = symmetric(3, dtype), torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
    expected = matrix.clone()
    expected[1], expected[:, 1] = 0, 0
    return DeflatedOperator(DenseOperator(matrix), basis), expected


@case
def restricted(dtype):
    matrix, indices = symmetric(8, dtype), torch.tensor([5, 0, 3])
    return RestrictedOperator(DenseOperator(matrix), indices), matrix[indices][:, indices]


@case
def function_on_blocks(dtype):
    matrix = symmetric(6, dtype)
    return FunctionOperator(lambda block: matrix @ block, n=6, dtype=dtype), matrix


@case
def function_on_columns(dtype):
    matrix = symmetric(6, dtype)
    return FunctionOperator(matrix.mv, n=6, dtype=dtype, columnwise=True), matrix


@case
def function_that_returns_its_input(dtype):
    return FunctionOperator(lambda block: block, n=6, dtype=dtype), torch.eye(6)


@case
def scipy_linear_operator(dtype):
    matrix = symmetric(6, dtype)
    return as_operator(aslinearoperator(matrix.numpy())), matrix


@case
def scipy_identity_that_returns_its_input(dtype):
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    op = ScipyOperator(shape=(5, 5), matvec=lambda x: x, matmat=lambda x: x, dtype=kind)
    return as_operator(op), torch.eye(5)


@case
def sharded_in_one_process(dtype):
    return ShardedOperator(DenseOperator(symmetric(6, dtype))), symmetric(6, dtype)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_every_operator_keeps_the_contract(build, dtype, monkeypatch):
    monkeypatch.setattr(_kernel, "TILE", 8)  # 21 points are then 3 tiles, the last one short
    op, expected = build(dtype)
    assert op.dtype == dtype
    assert op.shape == tuple(expected.shape)
    check_operator(op, dense=expected.double())
    torch.testing.assert_close(op.dense(), expected.to(dtype), rtol=1e-4, atol=1e-5)


# Operators that know their products only, and those without a lower bound of the eigenvalues.
HIDDEN = {name for name in CASES if name.startswith(("deflated", "function", "scipy_l", "scipy_i"))}
HIDDEN |= {"sharded_in_one_process"}
UNBOUNDED = HIDDEN | {"scaled", "difference", "low_rank_plus_diagonal", "kronecker"}
UNBOUNDED |= {"kronecker_of_three"}


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_without_products_agrees_with_the_matrix(name):
    op, _ = CASES[name](torch.float64)
    dense = op.dense()
    values = torch.linalg.eigvalsh(dense)
    diagonal, trace = (exact(op, quantity).value for quantity in ("diagonal", "trace"))
    bound, discs = lower_bound(op).value, gershgorin(op)

    assert (diagonal is None) == (trace is None) == (name in HIDDEN)
    if name not in HIDDEN:
        torch.testing.assert_close(diagonal, dense.diagonal())
        assert trace == pytest.approx(float(dense.trace()), abs=1e-12)
    assert (bound is None) == (name in UNBOUNDED)
    assert bound is None or bound <= values[0] + 1e-13
    assert discs is None or discs[0] <= values[0] + 1e-13 <= discs[1] + 1e-13
    assert discs is None or values[-1] - 1e-13 <= discs[1]


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_a_block_without_columns_gives_a_block_without_columns(build):
    op, _ = build(torch.float64)
    empty = torch.empty(op.shape[0], 0, dtype=torch.float64)
    assert op.matmat(empty).shape == empty.shape


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_operators_convert_to_scipy_and_back(dtype):
    matrix = symmetric(30, dtype)
    there = DenseOperator(matrix).to_scipy()
    start = matrix[0].numpy()
    largest = eigsh(there, k=2, which="LA", v0=start, return_eigenvectors=False)
    exact = torch.linalg.eigvalsh(matrix)[-2:]
    torch.testing.assert_close(torch.from_numpy(largest), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(as_operator(there).dense(), matrix)


def test_half_precision_is_an_operator_too():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16))
    assert (as_operator(matrix) @ torch.ones(3, dtype=torch.bfloat16)).tolist() == [1.0, 2.0, 4.0]
