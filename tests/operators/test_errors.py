"""Every misuse of an operator has an error that names the argument."""

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator

from ritz.operators import (
    BlockDiagonalOperator,
    DeflatedOperator,
    DenseOperator,
    DiagonalOperator,
    FunctionOperator,
    KernelOperator,
    KroneckerOperator,
    LinearOperator,
    LowRankOperator,
    RestrictedOperator,
    ShiftedOperator,
    SparseOperator,
    as_operator,
    check_symmetric,
    exact,
)
from ritz.operators._base import ScaledOperator, SumOperator

EYE = torch.eye(3, dtype=torch.float64)
OP = DenseOperator(EYE)
NAN = float("nan")
SKEW = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
WRONG = {
    "diagonal a list": (
        lambda: DiagonalOperator([1.0]),
        TypeError,
        "entries must be a torch.Tensor",
    ),
    "scales a number": (
        lambda: LowRankOperator(torch.ones(3, 2), scales=2.0),
        TypeError,
        "scales must be a torch.Tensor, got float",
    ),
    "shift of a tensor": (
        lambda: ShiftedOperator(EYE, 1.0),
        TypeError,
        "op must be an operator, .*, got Tensor",
    ),
    "blocks of tensors": (
        lambda: BlockDiagonalOperator([EYE, EYE]),
        TypeError,
        "ops must be an operator, .*, got Tensor",
    ),
    "Kronecker product of tensors": (
        lambda: KroneckerOperator(EYE, EYE),
        TypeError,
        "factors must be an operator, .*, got Tensor",
    ),
    "symmetry of a tensor": (lambda: check_symmetric(EYE), TypeError, "op must be an operator"),
    "function a string": (
        lambda: FunctionOperator("product", n=3),
        TypeError,
        "function must be a function of a block, got str",
    ),
    "function of 2.5 rows": (
        lambda: FunctionOperator(lambda block: block, n=2.5),
        TypeError,
        "n must be an integer, got 2.5",
    ),
    "function on no device": (
        lambda: FunctionOperator(lambda block: block, n=3, device="gpu"),
        ValueError,
        "device must be cpu, cuda or cuda:<number>, got 'gpu'",
    ),
    "dense not square": (lambda: DenseOperator(torch.ones(2, 3)), ValueError, "square, got"),
    "dense a vector": (lambda: DenseOperator(torch.ones(3)), ValueError, "square, got"),
    "dense not symmetric": (lambda: DenseOperator(SKEW), ValueError, "must be symmetric, but u'Av"),
    "dense NaN": (lambda: DenseOperator(EYE * NAN), ValueError, r"matrix must be finite.*\(0, 0\)"),
    "dense integer": (lambda: DenseOperator(EYE.long()), TypeError, "floating-point dtype, got"),
    "dense complex": (lambda: DenseOperator(EYE.cfloat()), TypeError, "real floating-point"),
    "dense empty": (lambda: DenseOperator(EYE[:0, :0]), ValueError, "at least one row, got 0"),
    "dense from NumPy": (
        lambda: DenseOperator(np.eye(2)),
        TypeError,
        r"matrix must be a torch.Tensor \(ritz.as_operator takes others\), got ndarray",
    ),
    "sparse not square": (
        lambda: SparseOperator(scipy.sparse.csr_array(np.ones((2, 3)))),
        ValueError,
        r"square, got \(2, 3\)",
    ),
    "sparse not symmetric": (
        lambda: SparseOperator(SKEW.to_sparse_csr()),
        ValueError,
        "must be symmetric",
    ),
    "sparse Inf": (
        lambda: SparseOperator(scipy.sparse.csr_array(np.diag([1.0, np.inf]))),
        ValueError,
        "matrix must be finite",
    ),
    "sparse integer": (
        lambda: SparseOperator(scipy.sparse.csr_array(np.eye(2, dtype=int))),
        TypeError,
        "convert with astype",
    ),
    "sparse integer of torch": (
        lambda: SparseOperator(torch.eye(2, dtype=torch.long).to_sparse_csr()),
        TypeError,
        "floating-point dtype",
    ),
    "sparse dense": (lambda: SparseOperator(EYE), TypeError, "must be sparse.*got a dense tensor"),
    "sparse NumPy": (lambda: SparseOperator(np.eye(2)), TypeError, "must be sparse.*got ndarray"),
    "diagonal a matrix": (lambda: DiagonalOperator(EYE), ValueError, "entries must be a vector"),
    "diagonal NaN": (lambda: DiagonalOperator(EYE[0] * NAN), ValueError, "entries must be finite"),
    "low rank a vector": (lambda: LowRankOperator(EYE[0]), ValueError, r"factors must be \(n, r\)"),
    "low rank scales": (
        lambda: LowRankOperator(EYE, scales=EYE[0, :2]),
        ValueError,
        r"scales must be \(3,\)",
    ),
    "low rank scales a block": (
        lambda: LowRankOperator(EYE, scales=EYE),
        ValueError,
        r"scales must be \(3,\)",
    ),
    "low rank entries": (
        lambda: LowRankOperator(EYE, entries=EYE),
        ValueError,
        r"entries must be \(3,\)",
    ),
    "low rank dtype": (
        lambda: LowRankOperator(EYE, scales=torch.ones(3)),
        TypeError,
        "scales must be torch.float64",
    ),
    "low rank NaN": (lambda: LowRankOperator(EYE * NAN), ValueError, "factors must be finite"),
    "kernel a vector": (lambda: KernelOperator(EYE[0]), ValueError, r"points must be \(n, d\)"),
    "kernel NaN": (lambda: KernelOperator(EYE * NAN), ValueError, "points must be finite"),
    "kernel name": (lambda: KernelOperator(EYE, kernel="rbf"), ValueError, "kernel must be one of"),
    "kernel lengthscale": (
        lambda: KernelOperator(EYE, lengthscale=-1.0),
        ValueError,
        "lengthscale must be a positive number",
    ),
    "kernel lengthscales": (
        lambda: KernelOperator(EYE, lengthscale=torch.ones(2)),
        ValueError,
        "one per dimension",
    ),
    "kernel noise": (lambda: KernelOperator(EYE, noise=-1.0), ValueError, "noise must be finite"),
    "kernel outputscale": (
        lambda: KernelOperator(EYE, outputscale=-1.0),
        ValueError,
        "outputscale must be finite",
    ),
    "no blocks": (lambda: BlockDiagonalOperator([]), ValueError, "ops must contain at least one"),
    "blocks of two dtypes": (
        lambda: BlockDiagonalOperator([OP, DenseOperator(EYE.float())]),
        ValueError,
        "ops must agree in dtype and device",
    ),
    "kernel points of a list": (
        lambda: KernelOperator([[1.0]]),
        TypeError,
        "points must be a tensor or NumPy array, got list",
    ),
    "kernel lengthscale a string": (
        lambda: KernelOperator(EYE, lengthscale="long"),
        TypeError,
        "lengthscale must be numbers or a tensor, got 'long'",
    ),
    "exact trace of a tensor": (lambda: exact(EYE, "trace"), TypeError, "op must be an operator"),
    "sum of none": (SumOperator, ValueError, "at least one operator"),
    "sum of two orders": (
        lambda: OP + DiagonalOperator(EYE[0, :2]),
        ValueError,
        "terms must agree in shape",
    ),
    "sum of two dtypes": (
        lambda: OP + DenseOperator(EYE.float()),
        ValueError,
        "terms must agree in shape, dtype",
    ),
    "kronecker dtypes": (
        lambda: KroneckerOperator(OP, DenseOperator(EYE.float())),
        ValueError,
        "factors must agree in dtype",
    ),
    "scale NaN": (lambda: ScaledOperator(OP, NAN), ValueError, "factor must be finite"),
    "scale bool": (lambda: ScaledOperator(OP, True), TypeError, "factor must be a number"),
    "shift Inf": (
        lambda: ShiftedOperator(OP, float("inf")),
        ValueError,
        "shift must be finite, got inf",
    ),
    "deflation rows": (
        lambda: DeflatedOperator(OP, EYE[:2]),
        ValueError,
        r"vectors must be \(3,\) or \(3, k\)",
    ),
    "deflation scale": (
        lambda: DeflatedOperator(OP, 2 * EYE[:, :1]),
        ValueError,
        r"orthonormal columns, got \|Q'Q - I\| = 3",
    ),
    "deflation NaN": (lambda: DeflatedOperator(OP, EYE * NAN), ValueError, "orthonormal columns"),
    "restriction float": (
        lambda: RestrictedOperator(OP, torch.tensor([0.0])),
        TypeError,
        "indices must be a vector of integers",
    ),
    "restriction mask": (
        lambda: RestrictedOperator(OP, torch.tensor([True, False, True])),
        TypeError,
        "indices must be a vector of integers",
    ),
    "restriction repeated": (
        lambda: RestrictedOperator(OP, torch.tensor([0, 0])),
        ValueError,
        "indices must be distinct",
    ),
    "restriction beyond": (
        lambda: RestrictedOperator(OP, torch.tensor([3])),
        ValueError,
        "indices must be between 0 and 2, got 3",
    ),
    "restriction negative": (
        lambda: RestrictedOperator(OP, torch.tensor([-1])),
        ValueError,
        "indices must be between 0 and 2, got -1",
    ),
    "restriction empty": (
        lambda: RestrictedOperator(OP, torch.empty(0, dtype=torch.long)),
        ValueError,
        "at least one row",
    ),
    "as_operator of a list": (lambda: as_operator([[1.0]]), TypeError, "op must be.*got list"),
    "as_operator of integers": (
        lambda: as_operator(np.eye(2, dtype=int)),
        TypeError,
        "must be float32 or float64, got int64: convert with astype",
    ),
    "SciPy not square": (
        lambda: as_operator(ScipyOperator((2, 3), matvec=lambda x: x[:2], dtype=float)),
        ValueError,
        r"op must be square, got \(2, 3\)",
    ),
    "SciPy complex": (
        lambda: as_operator(ScipyOperator((2, 2), matvec=lambda x: x, dtype=complex)),
        TypeError,
        "real floating-point",
    ),
    "function of no rows": (
        lambda: FunctionOperator(lambda x: x, n=0),
        ValueError,
        "at least one row",
    ),
    "function dtype": (
        lambda: FunctionOperator(lambda x: x, n=2, dtype=torch.int64),
        TypeError,
        "real floating-point",
    ),
    "dense() too large": (
        lambda: OP.dense(max_bytes=71),
        ValueError,
        "pass max_bytes=72 to allow it",
    ),
    "add a number": (lambda: OP + 1.0, TypeError, r"is ritz.operators.ShiftedOperator\(op, c\)"),
    "subtract a number": (lambda: OP - np.float64(1), TypeError, "may mean A \\+ c I or A \\+ c"),
    "divide by a string": (lambda: OP / "2", TypeError, "unsupported operand"),
    "times a string": (lambda: OP * "2", TypeError, "can't multiply|unsupported operand"),
}


@pytest.mark.parametrize(("build", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_misuse_names_the_argument(build, kind, match):
    with pytest.raises(kind, match=match):
        build()


BLOCKS = {
    "rows": (
        torch.ones(2, 1, dtype=torch.float64),
        ValueError,
        r"block must be \(3,\) or \(3, k\)",
    ),
    "order": (torch.ones(3, 1, 1, dtype=torch.float64), ValueError, "block must be"),
    "dtype": (torch.ones(3), TypeError, "block must be torch.float64.*got torch.float32"),
    "device": (torch.ones(3, dtype=torch.float64, device="meta"), ValueError, "on cpu.*got meta"),
    "array": (np.ones(3), TypeError, "block must be a torch.Tensor, got ndarray"),
}


@pytest.mark.parametrize(("block", "kind", "match"), BLOCKS.values(), ids=BLOCKS.keys())
def test_a_wrong_block_is_refused(block, kind, match):
    with pytest.raises(kind, match=match):
        OP.matmat(block)


@pytest.mark.parametrize(
    ("function", "kind", "match"),
    [
        (lambda block: block[:2], ValueError, r"must return a tensor \(3, 2\), got \(2, 2\)"),
        (lambda block: block.numpy(), ValueError, r"must return a tensor \(3, 2\), got ndarray"),
        (lambda block: block.float(), TypeError, "of torch.float64, got .* of torch.float32"),
    ],
)
def test_a_function_that_returns_a_wrong_shape_or_type_raises(function, kind, match):
    op = FunctionOperator(function, n=3, dtype=torch.float64)
    with pytest.raises(kind, match=match):
        op.matmat(torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (3,)])
def test_a_subclass_that_returns_a_wrong_shape_raises(shape):
    class Wrong(LinearOperator):
        def _matmat(self, block):
            return torch.ones(shape)

    with pytest.raises(TypeError, match=r"the product of Wrong\(3 x 3.* must be \(3, 2\)"):
        Wrong(3, dtype=torch.float32, device="cpu").matmat(torch.ones(3, 2))


def test_a_function_that_is_not_symmetric_is_found_by_two_products():
    with pytest.raises(ValueError, match=r"FunctionOperator.*must be symmetric"):
        check_symmetric(FunctionOperator(lambda block: block.cumsum(0), n=50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_small_asymmetric_entry_among_a_million_is_found(dtype):
    matrix = torch.eye(1000, dtype=dtype)
    matrix[3, 5] = 100 * torch.finfo(dtype).eps ** 0.5 * 1000**0.5
    with pytest.raises(ValueError, match="must be symmetric"):
        DenseOperator(matrix)


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e200])
def test_symmetric_matrices_of_every_scale_are_accepted(scale):
    matrix = scale * torch.tensor([[1.0, 2.0, 3.0], [2.0, 5.0, 0.0], [3.0, 0.0, 7.0]]).double()
    assert torch.equal(DenseOperator(matrix).matrix, matrix)


def test_a_read_only_array_is_accepted_without_a_warning():
    array = np.eye(3)
    array.flags.writeable = False
    assert torch.equal(as_operator(array).dense(), EYE)
    csr = scipy.sparse.csr_array(np.eye(3))
    csr.data.flags.writeable = False
    assert torch.equal(as_operator(csr).dense(), EYE)


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_product_that_writes_to_its_block_is_refused(columnwise):
    op = FunctionOperator(lambda block: block.mul_(2), n=5, columnwise=columnwise)
    with pytest.raises(ValueError, match="must not change the block in place"):
        op @ torch.ones(5, 2)
    with torch.inference_mode():
        assert float((FunctionOperator(lambda block: 2 * block, n=5) @ torch.ones(5)).sum()) == 10


@pytest.mark.parametrize(
    ("matrix", "error"),
    [
        (np.eye(3, dtype=object), "matrix must be float32 or float64, got object"),
        (
            np.eye(3, dtype=np.longdouble),
            "matrix must be float32 or float64, got (longdouble|float)",
        ),
        (np.ma.masked_array(np.eye(3), np.eye(3) > 2), "matrix must have no mask"),
    ],
)
def test_matrices_that_torch_cannot_hold_are_named(matrix, error):
    with pytest.raises(TypeError, match=error):
        as_operator(matrix)


def test_bytes_in_the_other_order_are_swapped():
    matrix = np.diag([1.0, 2.0]).astype(">f8")
    assert as_operator(matrix).matrix.tolist() == [[1.0, 0.0], [0.0, 2.0]]


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_a_tensor_of_sparse_blocks_is_refused():
    with pytest.raises(TypeError, match="must be in COO, CSR or CSC format"):
        as_operator(torch.eye(4).to_sparse_bsr((2, 2)))
