import numpy as np
import pytest
import scipy.sparse
import torch
from matrices import PRECISIONS, grid, seeded
from scipy.sparse.linalg import eigsh

import ritz
from ritz import bounds, spectral_norm
from ritz.operators import (
    FunctionOperator,
    KernelOperator,
    LowRankOperator,
)
from ritz.testing import spiked_wigner, wigner, wishart, with_spectrum


def graph_laplacian(generator):
    weights = torch.rand(60, 60, generator=generator, dtype=torch.float64)
    weights = ((weights + weights.T) * (weights > 0.9)).tril(-1)
    weights = weights + weights.T
    return torch.diag(weights.sum(1)) - weights


KINDS = {
    "wigner": lambda g: wigner(80, generator=g).matrix,
    "spiked": lambda g: spiked_wigner(80, spikes=(3.0, -6.0), generator=g).matrix,
    "wishart": lambda g: wishart(80, 40, generator=g).matrix,
    "laplacian": graph_laplacian,
    "graded": lambda g: with_spectrum(torch.logspace(-12, 3, 80).double(), generator=g).matrix,
    "clustered": lambda g: with_spectrum(torch.ones(80).double(), generator=g).matrix,
    "kernel": lambda g: KernelOperator(torch.randn(80, 2, generator=g).double()).dense(),
    "low rank": lambda g: LowRankOperator(torch.randn(80, 3, generator=g).double()).dense(),
    "negative": lambda g: -wishart(80, 200, generator=g).matrix,
    "tiny": lambda g: 1e-30 * wigner(80, generator=g).matrix,
}


@pytest.mark.parametrize("method", ["auto", "lanczos", "gershgorin"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bounds_contain_the_spectrum(kind, method):
    for seed in range(5):
        matrix = KINDS[kind](seeded(seed))
        exact = torch.linalg.eigvalsh(matrix)
        found = bounds(matrix, method=method, generator=seeded(seed))
        roundoff = 1e-14 * float(exact.abs().max())
        assert found.low <= exact[0] + roundoff
        assert found.high >= exact[-1] - roundoff
        assert found.status.ok
        assert found.rigorous == (method == "gershgorin")
        if method != "gershgorin":
            norm = float(exact.abs().max())
            assert found.high - found.low <= exact[-1] - exact[0] + 0.05 * norm


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_is_that_of_dense(kind):
    for seed in range(5):
        matrix = KINDS[kind](seeded(seed))
        found = spectral_norm(matrix, generator=seeded(seed))
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        assert abs(float(found) - exact) <= float(found.truncation)
        assert found.truncation <= 2e-3 * exact
        assert (float(found.stderr), found.status.ok) == (0.0, True)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_sparse_matrix_agrees_with_scipy(dtype):
    rng = seeded(3)
    rows = torch.randint(0, 500, (3000,), generator=rng).numpy()
    columns = torch.randint(0, 500, (3000,), generator=rng).numpy()
    values = torch.randn(3000, generator=rng, dtype=torch.float64).numpy()
    half = scipy.sparse.csr_array((values, (rows, columns)), shape=(500, 500))
    matrix = half + half.T
    exact = abs(eigsh(matrix, k=1, which="LM", v0=values[:500], return_eigenvectors=False)[0])
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    found = spectral_norm(matrix.astype(kind), rtol=1e-4)
    assert float(found) == pytest.approx(exact, rel=1e-4)


def test_auto_is_within_gershgorin():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    assert tuple(bounds(matrix, method="gershgorin")) == (1.0, 3.0)
    low, high = bounds(matrix)
    assert low == 1.0
    assert high == 3.0


def test_a_looser_tolerance_costs_fewer_products():
    matrix = wigner(300).matrix
    loose, tight = bounds(matrix, rtol=0.1), bounds(matrix, rtol=1e-3)
    assert loose.num_products < tight.num_products
    assert loose.low < tight.low
    assert loose.high > tight.high


def test_an_eigenvector_nearly_orthogonal_to_the_start_is_still_inside():
    # A bulk narrower than the tolerance has small residuals before the outlier is seen.
    entries = 1 + 0.02 * (2 * torch.rand(10**6, 1, generator=seeded(0), dtype=torch.float64) - 1)
    entries[17] = 1.5
    op = FunctionOperator(lambda block: entries * block, n=10**6, dtype=torch.float64)
    assert bounds(op, generator=seeded(1)).high >= 1.5


def test_too_few_steps_are_reported_and_raise_if_failed_raises():
    matrix = wigner(300).matrix
    for found in (
        bounds(matrix, rtol=1e-6, max_steps=10, method="lanczos"),
        spectral_norm(matrix, rtol=1e-8, max_steps=10),
    ):
        assert found.status.outcome == "max_steps"
        assert found.num_products == 10
        with pytest.raises(RuntimeError, match="raise max_steps"):
            found.raise_if_failed()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    ("entries", "norm"),
    [
        ([0.0] * 5, 0.0),
        ([1.0] * 5, 1.0),
        ([-2.0], 2.0),
        ([0.0, 0, 0, 7], 7.0),
        ([1e30, 1e-30], 1e30),
    ],
)
def test_degenerate_matrices_have_bounds_and_a_norm(entries, norm, dtype):
    matrix = torch.diag(torch.tensor(entries, dtype=dtype))
    op = FunctionOperator(lambda block: matrix @ block, n=len(entries), dtype=dtype)
    assert float(spectral_norm(op)) == pytest.approx(norm, rel=1e-5)
    low, high = bounds(op)
    assert low <= min(entries)
    assert high >= max(entries)


def test_a_product_that_is_not_finite_names_its_step():
    op = FunctionOperator(lambda block: block * float("inf"), n=9)
    for function in (bounds, spectral_norm):
        with pytest.raises(ValueError, match="op must give finite products; at step 1"):
            function(op)


def test_bounds_print_their_interval_and_method():
    matrix = torch.diag(torch.tensor([1.0, 2.0]))
    assert str(bounds(matrix, method="gershgorin")) == (
        "[1, 2] certainly contains the spectrum (Gershgorin; completed: no product)"
    )
    assert "almost certainly contains the spectrum (Lanczos" in str(bounds(matrix))


def test_misuse_names_the_argument():
    op = FunctionOperator(lambda block: block, n=3)
    with pytest.raises(ValueError, match="method='gershgorin' needs an explicit matrix"):
        bounds(op, method="gershgorin")
    with pytest.raises(ValueError, match="method must be one of"):
        bounds(op, method="power")
    with pytest.raises(ValueError, match="rtol must be between"):
        spectral_norm(op, rtol=0.0)


def test_the_bound_of_a_norm_covers_the_roundoff_of_a_long_row():
    # The top eigenvector has one large entry, so each of 300 additions in its row rounds to 1e4.
    matrix = torch.diag(torch.linspace(1, 3, 300, dtype=torch.float64))
    matrix[0, 1:] = matrix[1:, 0] = 5.0
    matrix[0, 0] = 1e4
    norm = torch.linalg.eigvalsh(matrix)[-1]  # correct to 0.03 units of roundoff
    op = FunctionOperator(lambda block: matrix @ block, n=300, dtype=torch.float64)

    for seed in (15, 36, 66, 94):
        estimate = spectral_norm(op, generator=seeded(seed))
        assert abs(estimate.mean - norm) <= estimate.truncation
        assert estimate.truncation <= 30 * torch.finfo(torch.float64).eps * norm


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
        found = ritz.bounds(np.diag(values), method="lanczos", max_steps=steps)
        assert found.status.outcome == "max_steps"
        assert found.low <= -1
        assert found.high >= 1


def test_gershgorin_discs_end_the_search_early():
    values = np.linspace(0, 1, 400)
    with_discs = ritz.bounds(np.diag(values))
    without = ritz.bounds(np.diag(values), method="lanczos")
    assert with_discs.num_products < without.num_products
    assert tuple(with_discs) == (0.0, 1.0)
