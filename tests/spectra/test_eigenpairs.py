"""Extreme eigenvalues with their multiplicities, and how sure a result is of them."""

import networkx
import numpy as np
import pytest
import torch
from matrices import PRECISIONS, grid, outliers, seeded
from scipy.sparse.linalg import eigsh

import ritz
from ritz.operators import (
    DiagonalOperator,
    FunctionOperator,
    LaplacianOperator,
)
from ritz.spectra import eigenpairs
from ritz.testing import wigner


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
def test_eigenpairs_have_the_multiplicities_of_the_matrix(values, wanted, dtype, mode):
    op = diagonal(*values, dtype=dtype)
    exact = ends(op.entries.double().numpy(), **{"smallest": 0, "largest": 0} | wanted)
    for seed in range(3):
        pairs = ritz.eigenpairs(op, **wanted, reorthogonalize=mode, generator=seeded(seed))
        assert pairs.status.ok
        tolerance = 3 * torch.finfo(dtype).eps ** 0.5 * max(1.0, np.abs(exact).max())
        np.testing.assert_allclose(pairs.values, exact, rtol=0, atol=tolerance)


def test_an_eigenvector_orthogonal_to_the_start_is_returned():
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


@pytest.mark.parametrize("max_vectors", [None, 12, 25, 300])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_wanted_pairs_converge_with_and_without_restarts(rng, dtype, max_vectors):
    op, exact = outliers(dtype, rng, n=300)
    found = eigenpairs(op, largest=5, smallest=2, max_vectors=max_vectors)
    assert found.status.outcome == "converged"
    wanted = torch.cat([exact[:2], exact[-5:]])
    eps = torch.finfo(dtype).eps
    assert bool(((found.values - wanted).abs() <= found.residuals).all())
    vectors = found.vectors.double()
    true = (op.matrix.double() @ vectors - vectors * found.values).norm(dim=0)
    assert bool((true <= 2 * found.residuals).all())
    assert bool((found.residuals <= 4 * eps**0.5 * 20).all())
    assert found.vectors.shape == (300, 7)


def test_pairs_are_printed_from_the_largest_with_their_residuals(rng):
    op, exact = outliers(torch.float64, rng, n=300)
    found = eigenpairs(op, largest=3, max_vectors=8, rtol=1e-12, vectors=False)
    assert found.vectors is None
    assert found.status.ok
    assert "3 extreme eigenvalues of" in str(found)
    assert float(str(found).splitlines()[3].split()[0]) == pytest.approx(float(exact[-1]))


def test_pairs_are_those_of_scipy(rng):
    op = wigner(300, generator=rng)
    found = eigenpairs(op, largest=3, smallest=2, rtol=1e-10)
    for which, count, values in (("LA", 3, found.values[2:]), ("SA", 2, found.values[:2])):
        exact = eigsh(op.matrix.numpy(), k=count, which=which, return_eigenvectors=False)
        assert sorted(values.tolist()) == pytest.approx(sorted(exact), abs=1e-9)


def test_pairs_are_saved_with_the_name_of_their_matrix(tmp_path):
    op = LaplacianOperator(networkx.path_graph(30), matrix="laplacian")
    ritz.save(eigenpairs(op, largest=2), tmp_path / "pairs")
    assert ritz.load(tmp_path / "pairs").matrix == "laplacian"


def test_a_large_kernel_space_does_not_delay_convergence():
    entries = torch.zeros(100_000)
    entries[:3] = torch.tensor([3.0, 2.0, -1.0])
    found = eigenpairs(DiagonalOperator(entries), largest=2, smallest=1, max_vectors=8)
    assert found.values.tolist() == pytest.approx([-1.0, 2.0, 3.0], abs=1e-5)
    assert found.status.outcome == "converged"
    assert found.num_products < 30


def test_a_budget_too_small_is_reported_with_advice(rng):
    op = wigner(300, generator=rng)
    found = eigenpairs(op, largest=4, max_steps=10)
    assert found.status.outcome == "max_steps"
    assert "max_steps" in found.status.advice
    with pytest.raises(ritz.NotConvergedError, match="of 4 pairs"):
        found.raise_if_failed()


def test_stopping_early_spends_fewer_products(rng):
    op, _ = outliers(torch.float64, rng)
    calls = []
    counted = FunctionOperator(
        lambda x: calls.append(x.shape[1]) or op @ x, n=1000, dtype=torch.float64
    )
    found = eigenpairs(counted, largest=2, max_steps=500)
    assert sum(calls) == found.num_products < 40


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "largest or smallest must be at least 1"),
        ({"largest": 31}, "largest"),
        ({"largest": 20, "smallest": 20}, "smallest"),
        ({"largest": 2, "rtol": 1e-20}, "rtol"),
        ({"largest": 2, "max_steps": 0}, "max_steps"),
        ({"largest": 4, "max_vectors": 4}, "max_vectors"),
        ({"largest": 4, "reorthogonalize": "none"}, "reorthogonalize must be one of full, partial"),
        (
            {"max_steps": 40, "largest": 2, "max_vectors": 9, "reorthogonalize": "partial"},
            "restart",
        ),
        ({"largest": 1, "placement": "disk"}, "placement must be one of"),
        ({"largest": 1, "start": torch.zeros(30, dtype=torch.float64)}, "start must not be zero"),
    ],
)
def test_wrong_arguments_for_pairs_are_named(rng, bad, message):
    op = wigner(30, generator=rng)
    with pytest.raises((ValueError, TypeError), match=message):
        eigenpairs(op, **bad)
