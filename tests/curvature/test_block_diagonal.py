"""Block-diagonal parts by layer."""

import pytest
import torch
from curvature.structures import built, ragged_batches_with_l2

from ritz import trace
from ritz.curvature import block_diagonal, ggn, hessian


@pytest.fixture(scope="module")
def layered():
    return built(ragged_batches_with_l2)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_blocks_of_layers_equal_the_blocks_of_the_matrix(layered, kind):
    whole = (hessian if kind == "hessian" else ggn)(layered, engine="eager").dense()
    for by, sizes in [(None, [25, 15]), (["0.weight", "0.bias|2"], [20, 20]), ([".*"], [40])]:
        op = block_diagonal(layered, matrix=kind, by=by, engine="eager")
        assert op.sizes == sizes
        expected = torch.block_diag(
            *(whole[part][:, part] for part in torch.arange(40).split(sizes))
        )
        torch.testing.assert_close(op.dense(), expected)
    if kind == "ggn":
        assert float(trace(op)) == pytest.approx(float(whole.trace()))


@pytest.mark.parametrize(
    ("by", "error", "match"),
    [
        ("0", TypeError, "by must be a list"),
        ([], TypeError, "by must be a list"),
        (["0"], ValueError, "by must select every parameter once, in the order"),
        (["0", ".*"], ValueError, "by must select every parameter once, in the order"),
        (["2", "0"], ValueError, "in the order .*, got .*'2.weight', '0.weight'"),
        (["0", "3"], ValueError, "params must match one of"),
    ],
)
def test_blocks_that_are_no_partition_in_order_raise(layered, by, error, match):
    with pytest.raises(error, match=match):
        block_diagonal(layered, by=by)


def test_block_diagonal_names_a_wrong_matrix(layered):
    with pytest.raises(ValueError, match="matrix must be one of hessian, ggn"):
        block_diagonal(layered, matrix="fisher")
