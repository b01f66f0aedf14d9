"""Extreme eigenvalues with their multiplicities, and how sure a result is of them."""

import numpy as np
import pytest
import scipy.sparse
import torch

import ritz
from ritz.operators import DiagonalOperator, FunctionOperator


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def grid(*sides):
    """The Laplacian of a grid with Dirichlet ends: squares and cubes have repeated eigenvalues."""
    total = scipy.sparse.csr_array((1, 1))
    for side in sides:
        shape = (side, side)
        line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=shape)
        before, here = (scipy.sparse.eye_array(n) for n in (total.shape[0], side))
        total = scipy.sparse.kron(total, here) + scipy.sparse.kron(before, line)
    return scipy.sparse.csr_array(total)


def diagonal(*values, dtype=torch.float64):
    return DiagonalOperator(torch.cat([torch.as_tensor(v).flatten() for v in values]).to(dtype))


def ends(values, smallest, largest):
    values = np.sort(values)
    return np.concatenate([values[:smallest], values[len(values) - largest :]])


def assert_pairs(matrix, pairs, exact, rtol):
    norm = np.abs(exact).max()
    np.testing.assert_allclose(pairs.values, exact, rtol=0, atol=rtol * norm)
    gram = pairs.vectors.double().T @ pairs.vectors.double()
    torch.testing.assert_close(gram, torch.eye(len(exact)).double(), rtol=0, atol=1e-5)
    vectors = pairs.vectors.double().numpy()
    true = np.linalg.norm(matrix @ vectors - vectors * pairs.values.numpy(), axis=0)
    assert (true <= pairs.residuals.numpy() * (1 + 1e-6)).all()


@pytest.mark.parametrize("certify", ["random", "inertia"])
@pytest.mark.parametrize(
    ("sides", "wanted"),
    [((25, 25), {"smallest": 3}), ((6, 6, 6), {"smallest": 4, "largest": 5})],
    ids=["square", "cube"],
)
def test_a_repeated_eigenvalue_is_returned_repeatedly(sides, wanted, certify):
    matrix = grid(*sides)
    exact = ends(np.linalg.eigvalsh(matrix.toarray()), **{"smallest": 0, "largest": 0} | wanted)
    for seed in range(5):
        pairs = ritz.eigenpairs(matrix, **wanted, certify=certify, generator=seeded(seed))
        assert pairs.status.outcome == "converged"
        assert_pairs(matrix, pairs, exact, rtol=1e-10)


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([[0.0] * 100, [1.0] * 100, [2.0] * 3], {"largest": 5}),
        ([[-1.0] * 3, np.linspace(-0.9, 0.9, 150), [1.0] * 2], {"smallest": 4, "largest": 3}),
        ([np.ones(97) + 1e-3 * np.arange(97) / 97, [1.2] * 3], {"largest": 4}),
        ([[1.0] * 3, [2.0] * 2, [5.0]], {"largest": 3, "smallest": 2}),
        ([[1.0] * 50], {"largest": 3}),
        ([[0.0] * 50], {"smallest": 2}),
    ],
    ids=["low rank", "both ends", "outlier", "small", "identity", "zero"],
)
def test_multiplicities_of_many_kinds(values, wanted, dtype, mode):
    op = diagonal(*values, dtype=dtype)
    exact = ends(op.entries.double().numpy(), **{"smallest": 0, "largest": 0} | wanted)
    for seed in range(3):
        pairs = ritz.eigenpairs(op, **wanted, reorthogonalize=mode, generator=seeded(seed))
        assert pairs.status.ok
        tolerance = 3 * torch.finfo(dtype).eps ** 0.5 * max(1.0, np.abs(exact).max())
        np.testing.assert_allclose(pairs.values, exact, rtol=0, atol=tolerance)


def test_a_start_vector_that_misses_the_pair_is_not_believed():
    op = diagonal(np.linspace(0, 1, 99), [2.0])
    start = torch.ones(100, dtype=torch.float64)
    start[-1] = 0.0
    assert float(ritz.eigenpairs(op, largest=1, start=start).values[0]) == pytest.approx(2.0)


def test_the_status_says_whether_the_result_is_certified():
    op = DiagonalOperator(torch.linspace(0, 1, 200, dtype=torch.float64))
    sparse = grid(15, 15)
    assert "with probability 0.999" in ritz.eigenpairs(op, largest=2).status.message
    assert "by inertia" in ritz.eigenpairs(sparse, largest=2, certify="inertia").status.message
    alone = ritz.eigenpairs(sparse, smallest=3, certify="none")
    assert "repeated eigenvalues count once" in alone.status.message
    assert alone.values[2] > alone.values[1] + 0.01


def test_pairs_that_may_be_incomplete_are_uncertain():
    matrix = grid(25, 25)
    alone = ritz.eigenpairs(matrix, smallest=3, certify="none")
    pairs = ritz.eigenpairs(matrix, smallest=3, max_steps=alone.num_products + 5)
    assert pairs.status.outcome == "uncertain"
    with pytest.raises(ritz.NotConvergedError, match="repeated ones may be missing"):
        pairs.raise_if_failed()


def test_inertia_needs_a_matrix():
    op = FunctionOperator(lambda block: block, n=5)
    with pytest.raises(ValueError, match="certify='inertia' needs a dense or sparse matrix"):
        ritz.eigenpairs(op, largest=1, certify="inertia")
    with pytest.raises(ValueError, match="certify must be one of random, inertia, none"):
        ritz.eigenpairs(op, largest=1, certify="luck")


# Spectra with ends that are hard to see: outliers, power laws, clusters, hidden pairs.
HARD = {
    "outliers": np.concatenate(
        [0.01 * np.sin(np.arange(290)), [1, 2, 3, 5, 8, 13, 21, 34, 34, 55]]
    ),
    "power law": np.arange(1, 301) ** -1.5,
    "slow power law": np.arange(1, 301) ** -0.5,
    "cluster": np.concatenate([np.linspace(0, 1, 280), 1.01 + 1e-3 * np.arange(20)]),
    "tight cluster": np.concatenate([np.linspace(0, 1, 280), 1.5 + 1e-6 * np.arange(20)]),
    "hidden": np.concatenate([1 + 1e-3 * np.sin(np.arange(299)), [1.2]]),
    "graded": np.logspace(-8, 2, 300),
    "grid": np.linalg.eigvalsh(grid(7, 7, 7).toarray()),
    "negative": -np.logspace(-3, 1, 200),
    "two": np.array([1.0, 3.0]),
}


@pytest.mark.parametrize("name", HARD)
def test_bounds_and_the_norm_hold_on_spectra_with_hard_ends(name):
    values = np.sort(HARD[name])
    entries, norm = torch.from_numpy(values)[:, None], np.abs(values).max()
    # A function has no discs of Gershgorin.
    op = FunctionOperator(lambda block: entries * block, n=len(values), dtype=torch.float64)
    for seed in range(8):
        found = ritz.bounds(op, generator=seeded(seed))
        assert found.status.ok
        assert found.low <= values[0]  # no tolerance: the bounds include roundoff
        assert found.high >= values[-1]
        assert found.low >= values[0] - 0.01 * norm
        assert found.high <= values[-1] + 0.01 * norm
        estimate = ritz.spectral_norm(op, generator=seeded(seed))
        assert estimate.status.ok
        assert abs(float(estimate) - norm) <= float(estimate.truncation) <= 1.001e-3 * norm


def test_bounds_are_valid_even_if_the_steps_do_not_suffice():
    values = np.linspace(-1, 1, 500) ** 3
    for steps in (3, 6, 12):
        found = ritz.bounds(diagonal(values), method="lanczos", max_steps=steps)
        assert found.status.outcome == "max_steps"
        assert found.low <= -1
        assert found.high >= 1


def test_discs_of_gershgorin_end_the_search_early():
    values = np.linspace(0, 1, 400)
    with_discs = ritz.bounds(diagonal(values))
    without = ritz.bounds(diagonal(values), method="lanczos")
    assert with_discs.num_products < without.num_products
    assert tuple(with_discs) == (0.0, 1.0)
