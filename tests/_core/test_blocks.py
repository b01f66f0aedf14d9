"""Sums over many rows keep their digits in float32."""

import pytest
import torch
from matrices import seeded

from ritz._core.blocks import CHUNK, ROWS, column_dots, column_norms, inner_products, orthonormalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 3 * ROWS + 5, 1100 * ROWS])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_inner_products_are_those_of_float64(dtype, rows, layout):
    generator = seeded(0)
    left = torch.randn(rows, 3, generator=generator, dtype=dtype)
    right = torch.randn(rows, 2, generator=generator, dtype=dtype)
    if layout == "columns":
        left = left.T.contiguous().T

    exact = left.double().T @ right.double()

    assert (inner_products(left, right) - exact).abs().max() < 2e-6 * rows
    assert torch.allclose(inner_products(left, right[:, 0]), inner_products(left, right)[:, 0])


def test_long_vectors_in_float32_keep_six_digits():
    # For these, the product of torch is 34 % too small, and its norm 2 % too large.
    ones = torch.full((40_000_000, 1), 0.1)

    assert float(inner_products(ones, ones)) == pytest.approx(4e5, rel=2e-6)
    assert float(column_norms(ones)) == pytest.approx(4e5**0.5, rel=2e-6)


def test_inner_products_of_wide_blocks_in_float32_keep_seven_digits():
    # One product of torch is off by 1e-6, and by 2e-5 if all entries are equal.
    block = torch.randn(500_000, 16, generator=seeded(0))
    exact = block.double().T @ block.double()
    assert float((inner_products(block, block) - exact).abs().max()) < 2e-7 * len(block)

    equal = torch.full_like(block, 0.1)
    exact = equal.double().T @ equal.double()
    torch.testing.assert_close(inner_products(equal, equal), exact, rtol=4e-6, atol=0)


@pytest.mark.parametrize("rank", [3, 1, 0])
def test_an_orthonormal_basis_of_long_columns_is_orthonormal_to_roundoff(rank):
    block = torch.rand(2_000_000, 3, generator=seeded(0))
    block[:, rank:] = block[:, :1] if rank else 0

    basis, factor = orthonormalize(block)

    gram = basis.double().T @ basis.double()
    assert (gram - torch.eye(3)).abs().max() < 1e-6  # qr in float32: 1e-4
    assert torch.equal(factor, factor.triu())
    assert (basis.double() @ factor.double() - block).norm() <= 1e-6 * block.double().norm()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 0), (CHUNK + 3, 1), (CHUNK // 2, 3)])
def test_column_dots_are_summed_in_double_precision(rows, columns):
    block = torch.full((rows, columns), 0.1)
    expected = torch.full((columns,), rows * float(torch.tensor(0.1)) ** 2, dtype=torch.float64)
    torch.testing.assert_close(column_dots(block, block), expected)
