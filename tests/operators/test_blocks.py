import pytest
import torch

from ritz import diagonal, trace
from ritz.operators import (
    BlockDiagonalOperator,
    DenseOperator,
    DiagonalOperator,
    FunctionOperator,
    exact,
)


def entries(*values, dtype=torch.float64):
    return DiagonalOperator(torch.tensor(values, dtype=dtype))


def test_diagonal_and_trace_of_blocks_are_exact():
    op = BlockDiagonalOperator([entries(1.0, -2.0), DenseOperator(torch.eye(3).double())])
    assert diagonal(op).mean.tolist() == [1.0, -2.0, 1.0, 1.0, 1.0]
    assert (float(trace(op)), trace(op).method) == (2.0, "exact, by structure")
    assert repr(op) == "BlockDiagonalOperator(5 x 5, float64, cpu, 2 blocks)"


def test_nothing_is_exact_if_one_block_is_not():
    hidden = FunctionOperator(lambda block: 2 * block, n=2, dtype=torch.float64)
    op = BlockDiagonalOperator([entries(1.0), hidden])
    assert exact(op, "diagonal").value is None
    assert exact(op, "trace").value is None
    assert exact(op, "trace") == (None, "")
    assert float(trace(op)) == 5.0


def test_the_block_size_is_the_smallest_of_the_blocks():
    narrow = FunctionOperator(lambda block: block.clone(), n=2, dtype=torch.float64)
    narrow.block_size = 2
    assert BlockDiagonalOperator([entries(1.0), narrow]).block_size == 2


def test_no_blocks_or_blocks_of_several_dtypes_raise():
    with pytest.raises(ValueError, match="ops must contain at least one operator"):
        BlockDiagonalOperator([])
    with pytest.raises(ValueError, match="ops must agree in dtype and device"):
        BlockDiagonalOperator([entries(1.0), entries(1.0, dtype=torch.float32)])
