"""Extreme eigenpairs against ARPACK, and spectra of graphs against networkx."""

import networkx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import eigsh

import ritz


def sparse_matrix(n=2000, seed=3):
    noise = sp.random_array((n, n), density=0.005, rng=np.random.default_rng(seed))
    return (noise + noise.T + sp.diags_array(np.linspace(-3, 3, n))).tocsr()


@pytest.mark.parametrize(("end", "which"), [("largest", "LA"), ("smallest", "SA")])
@pytest.mark.parametrize("max_vectors", [None, 25])
def test_extreme_eigenvalues_equal_those_of_arpack(end, which, max_vectors):
    matrix = sparse_matrix()
    found = ritz.eigenpairs(matrix, **{end: 6}, rtol=1e-9, max_vectors=max_vectors, max_steps=5000)
    values, vectors = eigsh(matrix, k=6, which=which, tol=1e-12)
    order = np.argsort(values)
    found.raise_if_failed()
    np.testing.assert_allclose(found.values.numpy(), values[order], rtol=1e-10, atol=1e-10)
    overlaps = np.abs(np.sum(found.vectors.numpy() * vectors[:, order], axis=0))
    np.testing.assert_allclose(overlaps, 1, atol=1e-8)


def test_arpack_gets_the_same_values_from_a_ritz_operator():
    matrix = sparse_matrix(500)
    ours = eigsh(ritz.as_operator(matrix).to_scipy(), k=4, which="LA", tol=1e-12)[0]
    theirs = eigsh(matrix, k=4, which="LA", tol=1e-12)[0]
    np.testing.assert_allclose(np.sort(ours), np.sort(theirs), rtol=1e-12)


GRAPHS = {
    "karate": networkx.karate_club_graph(),
    "tree": networkx.balanced_tree(2, 5),
    "small world": networkx.watts_strogatz_graph(80, 6, 0.2, seed=1),
    "barbell": networkx.barbell_graph(20, 3),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_laplacian_spectrum_equals_that_of_networkx(name):
    graph = GRAPHS[name]
    expected = np.unique(np.sort(networkx.laplacian_spectrum(graph, weight=None)).round(8))
    matrix = networkx.laplacian_matrix(graph, weight=None).astype(float)
    found = ritz.lanczos(matrix, num_steps=len(graph))
    # One start vector finds a repeated eigenvalue once.
    certain = found.values[found.residuals < 1e-8].numpy()
    gaps = np.abs(certain[:, None] - expected).min(axis=1)
    assert gaps.max() < 1e-7
    assert abs(found.values[-1] - expected[-1]) < 1e-8
    assert abs(found.values[0]) < 1e-8


@pytest.mark.parametrize("name", GRAPHS)
def test_trace_of_the_exponential_is_the_estrada_index_of_networkx(name):
    graph = GRAPHS[name]
    matrix = networkx.adjacency_matrix(graph, weight=None).astype(float)
    found = ritz.trace_function(matrix, torch.exp, num_steps=20, num_probes=200)
    assert abs(float(found) - networkx.estrada_index(graph)) < 2 * float(found.error())
