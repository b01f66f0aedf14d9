"""Traces and diagonals against curvlinops: equal means, and no larger variance at equal cost."""

import curvlinops
import pytest
import torch

import ritz
from ritz.testing import with_spectrum

NUM_PRODUCTS, NUM_RUNS = 60, 60


def matrices():
    decaying = 0.9 ** torch.arange(200, dtype=torch.float64)
    flat = torch.linspace(-1, 2, 200, dtype=torch.float64)
    return {"decaying": with_spectrum(decaying), "flat": with_spectrum(flat)}


def ours(op, method, seed):
    products_a_probe = {"hutchinson": 1, "hutch++": 3, "xtrace": 2}[method]
    generator = torch.Generator().manual_seed(1000 + seed)
    return ritz.trace(
        op, method=method, num_probes=NUM_PRODUCTS // products_a_probe, generator=generator
    )


def theirs(matrix, method, seed):
    estimators = {
        "hutchinson": curvlinops.hutchinson_trace,
        "hutch++": curvlinops.hutchpp_trace,
        "xtrace": curvlinops.xtrace,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return estimators[method](matrix, NUM_PRODUCTS)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
@pytest.mark.parametrize("name", ["decaying", "flat"])
def test_estimators_agree_with_curvlinops_in_mean_and_variance(name, method):
    op = matrices()[name]
    truth = op.matrix.trace()
    mine = [ours(op, method, seed) for seed in range(NUM_RUNS)]
    means = torch.stack([estimate.mean for estimate in mine])
    peers = torch.stack([theirs(op.matrix, method, seed) for seed in range(NUM_RUNS)])
    assert all(estimate.num_products <= NUM_PRODUCTS for estimate in mine)
    for sample in (means, peers):
        assert (sample.mean() - truth).abs() < 4 * sample.std() / NUM_RUNS**0.5
    # The log of a ratio of two spreads over d runs each has a standard error of about 1/sqrt(d).
    assert (means.std() / peers.std()).log() < 4 / NUM_RUNS**0.5


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_standard_errors_agree_with_the_spread_over_runs(method):
    op = matrices()["flat"]
    mine = [ours(op, method, seed) for seed in range(NUM_RUNS)]
    scatter = torch.stack([estimate.mean for estimate in mine]).std()
    stated = torch.stack([estimate.stderr for estimate in mine]).square().mean().sqrt()
    assert (scatter / stated).log().abs() < 4 / NUM_RUNS**0.5


def test_diagonal_agrees_with_curvlinops_within_errors():
    matrix = matrices()["flat"].matrix
    with torch.random.fork_rng():
        torch.manual_seed(5)
        peer = curvlinops.hutchinson_diag(matrix, 190)
    # A FunctionOperator has no structure, so the diagonal has to be sampled.
    op = ritz.operators.FunctionOperator(lambda x: matrix @ x, n=200, dtype=matrix.dtype)
    found = ritz.diagonal(op, num_probes=190)
    error = (found.mean - peer).norm() / found.stderr.norm()
    assert error < 2**0.5 * 1.3  # two estimates of one variance, a norm over 200 entries
