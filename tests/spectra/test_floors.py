"""Lower bounds of the eigenvalues in ``logdet``: certain, likely, or unknown."""

import math

import numpy as np
import pytest
import scipy.sparse as sparse
import torch
from matrices import seeded

import ritz
from ritz._core.progress import tracking
from ritz.operators import (
    DiagonalOperator,
    FunctionOperator,
    SparseOperator,
)
from ritz.spectra import NotPositiveDefiniteError
from ritz.spectra._functions.floors import certain_floor, likely_floor
from ritz.spectra._functions.quadrature import Projections, brackets
from ritz.spectra._lanczos import advance, start_runs


def grid(side, shift=0.0):
    line = sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    return (sparse.kronsum(line, line) + shift * sparse.eye_array(side**2)).tocsr()


def ring(n, shift=0.0):
    ones = [-1.0] * 4
    edges = sparse.diags_array(ones, offsets=[-1, 1, n - 1, 1 - n], shape=(n, n))
    return (edges + (2.0 + shift) * sparse.eye_array(n)).tocsr()


def scaled(matrix, seed):
    scales = sparse.diags_array(np.random.default_rng(seed).lognormal(0, 0.2, matrix.shape[0]))
    return (scales @ matrix @ scales).tocsr()


def signed(matrix, seed):
    signs = sparse.diags_array(np.random.default_rng(seed).choice([-1.0, 1.0], matrix.shape[0]))
    return (signs @ matrix @ signs).tocsr()


def products_only(matrix):
    op = ritz.as_operator(matrix)
    return FunctionOperator(op.matmat, n=op.shape[0], dtype=op.dtype)


def search(op, max_products, seed=0):
    with tracking(False, "floor", max_products) as bar:
        return likely_floor(op, max_products=max_products, generator=seeded(seed), bar=bar)


@pytest.mark.parametrize("matrix", [grid(12), signed(grid(12), 0), grid(1, 1e-9), ring(40, 1e-13)])
def test_weak_dominance_with_one_strict_row_gives_a_positive_floor(matrix):
    smallest = np.linalg.eigvalsh(matrix.toarray())[0]

    floor = certain_floor(SparseOperator(matrix))

    assert 0 < floor.value <= smallest


def test_a_component_without_a_strict_row_has_no_floor():
    matrix = sparse.block_diag([grid(4), ring(6)]).tocsr()  # the ring alone is singular

    assert certain_floor(SparseOperator(matrix), 100).value is None


@pytest.mark.parametrize("seed", range(4))
def test_a_scaled_dominant_matrix_has_a_floor_near_its_smallest_eigenvalue(seed):
    matrix = scaled(signed(grid(12, 0.1), seed), seed)
    smallest = np.linalg.eigvalsh(matrix.toarray())[0]

    floor = certain_floor(SparseOperator(matrix), 200)

    assert smallest / 20 < floor.value <= smallest
    assert floor.num_products <= 200
    assert "scaled" in floor.note


@pytest.mark.parametrize("seed", range(4))
def test_matrices_that_no_scaling_makes_dominant_have_no_certain_floor(seed):
    rows = sparse.random_array((60, 60), density=0.1, rng=seed, format="csr")

    definite = SparseOperator((rows @ rows.T + 1e-3 * sparse.eye_array(60)).tocsr())
    indefinite = SparseOperator((grid(8) - 0.5 * sparse.eye_array(64)).tocsr())

    assert certain_floor(definite, 200).value is None
    assert certain_floor(indefinite, 200).value is None


# ------------------------------------------------------------------------------------------
# Likely bounds.
@pytest.mark.parametrize(
    ("entries", "max_products"),
    [
        (torch.linspace(1, 100, 2000), 100),
        (torch.cat([torch.tensor([1e-5]), torch.linspace(1, 100, 1999)]), 200),
        (torch.logspace(-3, 0, 2000), 300),
    ],
)
def test_a_likely_floor_is_below_all_eigenvalues(entries, max_products):
    op = products_only(DiagonalOperator(entries.double()))

    floors = [search(op, max_products, seed) for seed in range(30)]

    assert all(0 < floor.value <= float(entries.min()) for floor in floors)
    assert not any(floor.certain for floor in floors)


@pytest.mark.parametrize("seed", range(10))
def test_no_likely_floor_of_a_singular_matrix(seed):
    assert search(products_only(ring(1600)), 500, seed).value is None


def test_a_negative_ritz_value_refuses_the_matrix():
    entries = torch.cat([torch.tensor([-1e-3]), torch.linspace(1, 2, 1999)]).double()

    with pytest.raises(NotPositiveDefiniteError, match=r"a Ritz value of -0\.001"):
        search(products_only(DiagonalOperator(entries)), 500)


def test_decaying_eigenvalues_end_the_search_early():
    entries = torch.logspace(-9, 0, 2000).double()

    assert search(products_only(DiagonalOperator(entries)), 500).num_products <= 55


def test_a_likely_floor_above_a_ritz_value_is_dropped():
    op = DiagonalOperator(torch.linspace(1, 2, 50).double())
    runs = start_runs([torch.ones(50, dtype=torch.float64)], capacity=13, mode="full")
    advance(op, runs, 12)
    spaces = Projections.of(runs, 12)

    dropped = brackets(spaces, torch.log, floor=1.5, bounds=True, likely=True)

    torch.testing.assert_close(dropped.mixed, brackets(spaces, torch.log).mixed)
    with pytest.raises(ValueError, match="floor must be below all eigenvalues"):
        brackets(spaces, torch.log, floor=1.5, bounds=True)


# ------------------------------------------------------------------------------------------
# Log determinants with these bounds.
@pytest.mark.parametrize("make", [SparseOperator, products_only])
@pytest.mark.parametrize("matrix", [grid(150, 0.01), scaled(grid(150, 0.05), 0)])
def test_a_log_determinant_of_many_sparse_rows_converges_without_a_floor(make, matrix):
    # D A D has the log determinant of A plus 2 sum_i log d_i, and the diagonal d_i^2 a_ii.
    ends = 2 - 2 * torch.cos(math.pi * torch.arange(1, 151) / 151).double()
    shift = 0.01 if matrix[0, 0] == 4.01 else 0.05
    scales = float(np.log(matrix.diagonal() / (4 + shift)).sum())
    truth = float((ends[:, None] + ends + shift).log().sum()) + scales

    estimate = ritz.logdet(make(matrix), rtol=0.02)

    assert estimate.status.outcome == "converged"
    assert "eigenvalues above" in estimate.method
    assert abs(float(estimate) - truth) <= float(estimate.error(0.999))


@pytest.mark.parametrize("seed", range(3))
def test_a_singular_matrix_does_not_converge(seed):
    estimate = ritz.logdet(
        products_only(ring(1600)), num_products=300, rtol=0.05, generator=seeded(seed)
    )

    assert estimate.status.outcome == "uncertain"


def test_a_certain_floor_makes_the_truncation_of_a_trace_a_bound():
    matrix = grid(40, 0.01)
    options = {"num_steps": 12, "num_probes": 4}

    with_entries = ritz.trace_function(matrix, torch.log, **options)
    passed = ritz.trace_function(
        matrix, torch.log, floor=certain_floor(SparseOperator(matrix)).value, **options
    )

    assert "Gershgorin" in with_entries.method
    assert float(with_entries) == float(passed)
    assert float(with_entries.truncation) == float(passed.truncation)


def test_a_floor_far_below_the_spectrum_does_not_widen_the_bars_of_an_inverse():
    entries = products_only(grid(40, 0.0))

    from_entries = ritz.trace_function(grid(40), torch.reciprocal, num_steps=60, num_probes=4)
    from_products = ritz.trace_function(entries, torch.reciprocal, num_steps=60, num_probes=4)

    assert float(from_entries.truncation) <= 1.01 * float(from_products.truncation)
