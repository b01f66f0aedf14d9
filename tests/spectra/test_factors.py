import numpy as np
import pytest
import scipy.sparse as sparse
import torch

import ritz
from ritz.operators import FunctionOperator, SparseOperator
from ritz.spectra import NotPositiveDefiniteError
from ritz.spectra._functions.log_determinants import is_narrow, is_small, logdet_by_factor


def band(n, width):
    offsets = list(range(-width, width + 1))
    values = [-1.0 if offset else 2.0 * width + 1 for offset in offsets]
    return sparse.diags_array(values, offsets=offsets, shape=(n, n)).tocsr()


def expander(n, degree, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), degree)
    edges = sparse.coo_array((np.ones(n * degree), (rows, rng.permutation(rows))), shape=(n, n))
    weights = (edges + edges.T).tocsr()
    return sparse.diags_array(weights.sum(1) + 1.0).tocsr() - weights


def test_a_long_matrix_of_a_narrow_graph_is_factored():
    op = SparseOperator(band(30_000, 2))
    assert is_narrow(op)
    assert not is_small(op)
    found = ritz.logdet(op, rtol=1e-6)
    sampled = ritz.logdet(op, method="lanczos", num_products=400)
    assert "factor of a sparse matrix" in found.method
    assert "Lanczos quadrature would not reach rtol" in found.method
    assert float(found.stderr) == 0
    assert abs(float(found) - float(sampled)) < 4 * float(sampled.stderr) + float(
        sampled.truncation
    )


def test_a_matrix_whose_factor_would_fill_is_sampled():
    op = SparseOperator(expander(21_000, 6))
    assert not is_narrow(op)
    assert "Lanczos quadrature" in ritz.logdet(op).method


def test_rows_without_entries_do_no_harm():
    matrix = sparse.coo_array(([1.0], ([0], [0])), shape=(30_000, 30_000)).tocsr()
    assert is_narrow(SparseOperator(matrix))
    with pytest.raises(NotPositiveDefiniteError, match="positive definite"):
        ritz.logdet(matrix, method="cholesky")


def test_products_alone_are_never_factored():
    op = FunctionOperator(lambda block: 2 * block, n=5, dtype=torch.float64)
    assert not is_small(op)
    assert not is_narrow(op)
    with pytest.raises(ValueError, match="needs a dense or sparse matrix"):
        logdet_by_factor(op)


def test_cholmod_is_used_if_installed():
    pytest.importorskip("sksparse.cholmod")
    matrix = band(500, 3)
    found = logdet_by_factor(SparseOperator(matrix))
    assert "CHOLMOD" in found.method
    assert float(found) == pytest.approx(np.linalg.slogdet(matrix.toarray())[1], rel=1e-12)
    with pytest.raises(NotPositiveDefiniteError, match="positive definite"):
        logdet_by_factor(SparseOperator(-matrix))


@pytest.mark.parametrize("size", [2, 3, 40])
def test_a_pivot_off_the_diagonal_is_no_factor_of_a_positive_definite_matrix(size):
    # Elimination with rows exchanged gives positive pivots, and a determinant of -1.
    matrix = sparse.eye_array(size).tolil()
    matrix[:2, :2] = [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(NotPositiveDefiniteError, match="zero pivot"):
        ritz.logdet(matrix.tocsr(), method="cholesky")
