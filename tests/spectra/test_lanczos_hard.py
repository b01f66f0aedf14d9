"""Lanczos on matrices and operators made to break it."""

import pytest
import torch
from matrices import PRECISIONS

from ritz.operators import DenseOperator, DiagonalOperator, FunctionOperator, LowRankOperator
from ritz.spectra import eigenpairs, lanczos
from ritz.testing import with_spectrum

MODES = ["full", "partial", "none"]
pytestmark = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_zero_matrix_ends_after_one_step(dtype, mode):
    found = lanczos(
        DenseOperator(torch.zeros(9, 9, dtype=dtype)), num_steps=5, reorthogonalize=mode
    )
    assert found.values.tolist() == [0.0]
    assert found.residuals.tolist() == [0.0]
    assert found.weights.tolist() == [1.0]
    assert found.status.outcome == "breakdown"
    assert "dimension 1" in found.status.message


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_an_operator_may_return_its_input(dtype, mode):
    op = FunctionOperator(lambda x: x, n=9, dtype=dtype)
    found = lanczos(op, num_steps=9, reorthogonalize=mode)
    assert found.num_products == 1
    assert found.values.tolist() == pytest.approx([1.0], rel=1e-6)
    assert found.status.outcome == "breakdown"


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_matrix_of_one_row_has_its_entry_as_value(dtype, mode):
    found = lanczos(
        DenseOperator(torch.tensor([[-3.0]], dtype=dtype)), num_steps=1, reorthogonalize=mode
    )
    assert found.values.tolist() == [-3.0]
    assert found.weights.tolist() == [1.0]


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_matrix_of_rank_one_has_two_values(rng, dtype, mode):
    vector = torch.randn(200, 1, generator=rng, dtype=dtype)
    found = lanczos(LowRankOperator(vector), num_steps=50, reorthogonalize=mode)
    assert found.status.outcome == "breakdown"
    assert len(found.values) == 2
    exact = float(vector.double().square().sum())
    assert found.values.tolist() == pytest.approx([0.0, exact], abs=1e-5 * exact)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_low_rank_in_a_dense_matrix_ends_early(rng, dtype, mode):
    values = torch.zeros(300, dtype=dtype)
    values[:4] = torch.tensor([1.0, 2.0, 4.0, -8.0])
    found = lanczos(with_spectrum(values, generator=rng), num_steps=40, reorthogonalize=mode)
    distance = (found.values[:, None] - values.double()).abs().min(1).values
    assert bool((distance <= found.residuals).all())
    if mode != "none":
        assert int((found.weights > 1e-8).sum()) == 5


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_repeated_eigenvalues_count_once_with_their_whole_weight(rng, dtype, mode):
    entries = torch.tensor([1.0, 2.0, 2.0, 2.0, 3.0, 3.0], dtype=dtype)
    start = torch.ones(6, dtype=dtype)
    found = lanczos(DiagonalOperator(entries), num_steps=6, start=start, reorthogonalize=mode)
    assert found.values.tolist() == pytest.approx([1.0, 2.0, 3.0], rel=1e-5)
    assert found.weights.tolist() == pytest.approx([1 / 6, 3 / 6, 2 / 6], rel=1e-5)
    assert "dimension 3" in found.status.message


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_copies_of_a_repeated_eigenvalue_are_found_after_a_breakdown(dtype, mode):
    op = DiagonalOperator(torch.tensor([5.0, 5.0, 5.0, 4.0, 3.0, 1.0, 1.0], dtype=dtype))
    if mode == "none":
        with pytest.raises(ValueError, match="reorthogonalize must be one of full, partial"):
            eigenpairs(op, largest=4, reorthogonalize=mode)
    else:
        found = eigenpairs(op, largest=4, reorthogonalize=mode)
        assert found.values.tolist() == pytest.approx([4.0, 5.0, 5.0, 5.0], rel=1e-5)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_eigenvalues_from_1e_minus_30_to_1e30_are_resolved(dtype, mode):
    entries = torch.logspace(-30, 30, 61, dtype=torch.float64).to(dtype)
    found = lanczos(DiagonalOperator(entries), num_steps=40, reorthogonalize=mode)
    assert bool(torch.isfinite(found.values).all())
    assert float(found.values[-1]) == pytest.approx(1e30, rel=1e-5)
    distance = (found.values[:, None] - entries.double()).abs().min(1).values
    assert bool((distance <= found.residuals).all())
    assert float(found.weights.sum()) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [1, 4])
def test_a_bad_product_is_named_at_its_step(rng, mode, bad, at):
    entries = torch.randn(50, generator=rng)
    calls = []

    def product(block):
        calls.append(1)
        out = entries[:, None] * block
        if len(calls) == at:
            out[17] = bad
        return out

    with pytest.raises(ValueError, match=rf"at step {at} it gave 1 NaN or Inf entries.*row 17"):
        lanczos(FunctionOperator(product, n=50), num_steps=10, reorthogonalize=mode)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_matrix_that_is_not_symmetric_is_refused(rng, dtype, mode):
    matrix = torch.randn(80, 80, generator=rng, dtype=dtype)
    op = FunctionOperator(lambda x: matrix @ x, n=80, dtype=dtype)
    with pytest.raises(ValueError, match="op must be symmetric: at step 2"):
        lanczos(op, num_steps=10, reorthogonalize=mode)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_slightly_asymmetric_matrix_is_refused(rng, dtype, mode):
    matrix = torch.randn(80, 80, generator=rng, dtype=dtype)
    matrix = matrix + matrix.T + 0.05 * torch.randn(80, 80, generator=rng, dtype=dtype)
    op = FunctionOperator(lambda x: matrix @ x, n=80, dtype=dtype)
    with pytest.raises(ValueError, match="op must be symmetric"):
        lanczos(op, num_steps=10, reorthogonalize=mode)


def test_an_operator_that_changes_between_calls_is_refused(rng, mode):
    entries = torch.rand(80, generator=rng)
    op = FunctionOperator(
        lambda x: (entries + 0.1 * torch.rand(80, generator=rng))[:, None] * x, n=80
    )
    with pytest.raises(ValueError, match="op must not change between calls"):
        lanczos(op, num_steps=10, reorthogonalize=mode)
