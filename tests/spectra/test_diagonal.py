import pytest
import torch
from matrices import PRECISIONS, hidden, seeded

from ritz import diagonal
from ritz.operators import DiagonalOperator, FunctionOperator
from ritz.testing import assert_within_stderr, wigner


@pytest.fixture
def matrix():
    return wigner(300).matrix


@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_every_entry_is_within_four_standard_errors_of_dense(matrix, dtype, probe):
    found = diagonal(hidden(matrix.to(dtype)), num_probes=200, probe=probe)
    assert found.mean.dtype == found.stderr.dtype == dtype
    assert_within_stderr(found, matrix.diagonal())
    assert found.samples is None
    assert found.num_products == 200


def test_auto_uses_the_structure_and_no_products():
    found = diagonal(DiagonalOperator(torch.tensor([1.0, -2.0])))
    assert found.mean.tolist() == [1.0, -2.0]
    assert (found.num_products, found.method) == (0, "exact, by structure")


def test_rademacher_probes_of_a_diagonal_matrix_have_no_spread():
    entries = torch.linspace(-1, 1, 9, dtype=torch.float64)
    found = diagonal(hidden(torch.diag(entries)), num_probes=6)
    torch.testing.assert_close(found.mean, entries)
    assert found.stderr.max() < 1e-15


@pytest.mark.parametrize("num_probes", [300, 1000])
def test_as_many_probes_as_rows_are_exact(matrix, num_probes):
    found = diagonal(hidden(matrix), num_probes=num_probes)
    torch.testing.assert_close(found.mean, matrix.diagonal())
    assert found.stderr.max() == 0
    assert bool((found.truncation < 1e-14).all())
    assert found.num_products == 300


def test_the_variance_is_that_of_the_other_entries_of_the_row(matrix):
    # Three hundred probes would be a whole basis, which has no variance.
    runs = [
        diagonal(hidden(matrix), num_probes=299, block_size=299, generator=seeded(seed))
        for seed in range(12)
    ]
    variance = 299 * torch.stack([run.stderr.square() for run in runs]).mean(0)
    expected = matrix.square().sum(1) - matrix.diagonal().square()
    torch.testing.assert_close(variance, expected, rtol=0.25, atol=0)


def test_the_standard_errors_are_honest(matrix):
    scores = []
    for seed in range(200):
        found = diagonal(hidden(matrix), num_probes=16, block_size=16, generator=seeded(seed))
        scores.append((found.mean - matrix.diagonal()) / found.stderr)
    assert 0.8 < float(torch.cat(scores).std()) < 1.25


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_does_not_matter(matrix, dtype, scale):
    whole = diagonal(hidden(matrix.to(dtype)), num_probes=20)
    found = diagonal(hidden((matrix * scale).to(dtype)), num_probes=20)
    torch.testing.assert_close(found.mean / scale, whole.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.stderr / scale, whole.stderr, rtol=1e-4, atol=1e-5)


def test_the_tolerance_is_reached_or_its_failure_reported(matrix):
    op = hidden(matrix + 3 * torch.eye(300, dtype=torch.float64))
    found = diagonal(op, num_probes=4, rtol=0.1)
    assert found.status.outcome == "converged"
    assert found.error().norm() <= 0.1 * found.mean.norm()
    assert 4 < found.num_products < 300
    exact = diagonal(op, num_probes=4, rtol=1e-4)
    assert exact.status.ok
    torch.testing.assert_close(exact.mean, matrix.diagonal() + 3)
    assert exact.stderr.max() == 0
    short = diagonal(op, num_probes=4, rtol=1e-4, max_probes=10)
    assert (short.status.outcome, short.num_products) == ("max_steps", 10)
    with pytest.raises(RuntimeError, match="times as many probes"):
        short.raise_if_failed()


def test_a_product_that_is_not_finite_names_its_probe():
    def broken(block):
        product = block.clone()
        product[0, 2] = float("nan")
        return product

    with pytest.raises(ValueError, match="the product with probe 3 has NaN or Inf"):
        diagonal(FunctionOperator(broken, n=10))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"method": "exact"}, "method='exact': no exact diagonal is available"),
        ({"method": "guess"}, "method must be one of"),
        ({"num_probes": 1}, "num_probes must be at least 2"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"rtol": 2.0}, "rtol must be between"),
    ],
)
def test_misuse_names_the_argument(matrix, bad, match):
    with pytest.raises(ValueError, match=match):
        diagonal(hidden(matrix), **bad)


def test_gaussian_probes_of_a_diagonal_matrix_have_no_spread():
    # With the plain mean of z * (A z) the error would be A_ii times that of the mean of z * z.
    entries = torch.tensor([1e3, 1.0, -1e-3, 0.0], dtype=torch.float64).repeat(5)
    found = diagonal(hidden(torch.diag(entries)), num_probes=8, probe="gaussian", block_size=3)

    torch.testing.assert_close(found.mean, entries, rtol=1e-14, atol=0)
    assert bool((found.stderr <= 1e-15 * entries.abs()).all())


def test_intervals_of_gaussian_probes_hold_for_large_diagonals():
    near = wigner(40).matrix + 20 * torch.eye(40, dtype=torch.float64)
    op, held = hidden(near), []
    for seed in range(50):
        found = diagonal(op, num_probes=6, probe="gaussian", generator=seeded(seed))
        held.append((found.mean - near.diagonal()).abs() <= found.error(0.95))

    # Intervals by the plain mean contain 0.83 of the entries.
    assert 0.93 <= float(torch.stack(held).double().mean()) <= 0.97
