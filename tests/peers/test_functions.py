"""Traces of functions against imate, primate and dense algebra."""

import imate
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from primate.operators import MatrixFunction

import ritz

NUM_PROBES, NUM_STEPS = 200, 40
FUNCTIONS = {
    "log": (torch.log, np.log, imate.logdet),
    "inverse": (torch.reciprocal, np.reciprocal, imate.traceinv),
}


def sparse_matrix(n=1000, seed=4):
    noise = sp.random_array((n, n), density=0.004, rng=np.random.default_rng(seed))
    degrees = np.asarray((noise + noise.T).sum(1)).ravel()
    return (sp.diags_array(degrees + 0.5) - noise - noise.T).tocsr()


def exact(matrix, function):
    return float(function(np.linalg.eigvalsh(matrix.toarray())).sum())


def of_imate(matrix, name):
    _, info = FUNCTIONS[name][2](
        matrix,
        method="slq",
        min_num_samples=NUM_PROBES,
        max_num_samples=NUM_PROBES,
        error_rtol=1e-12,
        lanczos_degree=NUM_STEPS,
        return_info=True,
        seed=6,
    )
    return np.ravel(info["convergence"]["samples"])


def of_primate(matrix, name):
    function = MatrixFunction(matrix, fun=FUNCTIONS[name][1], deg=NUM_STEPS, orth=0)
    signs = np.random.default_rng(6).choice([-1.0, 1.0], (NUM_PROBES, matrix.shape[0]))
    return np.array([float(function.quad(probe)[0]) for probe in signs])


@pytest.mark.parametrize("peer", [of_imate, of_primate])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_trace_of_a_function_agrees_with_the_peer_and_with_dense_algebra(name, peer):
    matrix = sparse_matrix()
    truth = exact(matrix, FUNCTIONS[name][1])
    found = ritz.trace_function(
        matrix,
        FUNCTIONS[name][0],
        method="lanczos",
        num_steps=NUM_STEPS,
        num_probes=NUM_PROBES,
    )
    samples = peer(matrix, name)
    spread = samples.std(ddof=1) / NUM_PROBES**0.5
    assert abs(float(found) - truth) < 4 * float(found.stderr)
    assert abs(samples.mean() - truth) < 4 * spread
    assert abs(np.log(float(found.stderr) / spread)) < 4 / NUM_PROBES**0.5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_probe_gives_the_quadrature_of_primate(name):
    matrix = sparse_matrix()
    generator = torch.Generator().manual_seed(8)
    found = ritz.trace_function(
        matrix,
        FUNCTIONS[name][0],
        method="lanczos",
        num_steps=NUM_STEPS,
        num_probes=2,
        generator=generator,
    )
    op = ritz.as_operator(matrix)
    drawn = ritz._core.random.probes(
        (matrix.shape[0], 2),
        generator=torch.Generator().manual_seed(8),
        dtype=op.dtype,
        device=op.device,
    )
    peer = MatrixFunction(matrix, fun=FUNCTIONS[name][1], deg=NUM_STEPS, orth=0)
    expected = [float(peer.quad(column)[0]) for column in drawn.T.contiguous().numpy()]
    np.testing.assert_allclose(found.samples.numpy(), expected, rtol=1e-8)
