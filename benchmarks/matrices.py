"""Sparse matrices for benchmarks, as SciPy CSR arrays."""

import numpy as np
import scipy.sparse as sp


def adjacency(n, i, j, dtype):
    """Return the symmetric matrix with ones at the edges between ``i`` and ``j``, without loops."""
    upper = sp.coo_array((np.ones(len(i), dtype), (i, j)), shape=(n, n)).tocsr()
    matrix = (upper + upper.T).tocsr()
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    matrix.data[:] = 1
    return matrix


def random_graph(n, num_edges, *, dtype=np.float64, seed=0):
    """Return the adjacency of ``num_edges`` uniform random edges, symmetric, without loops."""
    rng = np.random.default_rng(seed)
    i, j = rng.integers(0, n, (2, num_edges))
    return adjacency(n, i, j, dtype)


def power_law_graph(n, num_edges, *, exponent=0.35, dtype=np.float64, seed=0):
    """Return the adjacency of random edges with end points of weight ``rank ** -exponent``."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, n + 1) ** -exponent
    ends = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random((2, num_edges)))
    i, j = rng.permutation(n)[ends]
    return adjacency(n, i, j, dtype)


def laplacian(adjacency):
    """Return degrees minus adjacency."""
    return (sp.diags_array(np.asarray(adjacency.sum(1)).ravel()) - adjacency).tocsr()


def grid(side, *, potential=4.0, dtype=np.float64, seed=0):
    """Return the Laplacian of a grid plus a random potential with 30 deep wells."""
    ones = np.ones(side - 1)
    line = sp.diags_array([np.full(side, 2.0), -ones, -ones], offsets=[0, 1, -1])
    plain = sp.kron(line, sp.eye_array(side)) + sp.kron(sp.eye_array(side), line)
    rng = np.random.default_rng(seed)
    values = rng.uniform(0, potential, side * side)
    values[rng.choice(side * side, 30, replace=False)] = rng.uniform(-8, -2, 30)
    return (plain + sp.diags_array(values)).tocsr().astype(dtype)


def regular_graph(n, degree, *, seed=0):
    """Return row pointers and columns of ``degree / 2`` random permutations and their inverses.

    Every vertex has ``degree`` entries, some of which may coincide; the columns are not sorted.
    """
    rng = np.random.default_rng(seed)
    columns = np.empty((n, degree), dtype=np.int32)
    for pair in range(degree // 2):
        there = rng.permutation(n)
        columns[:, 2 * pair] = there
        columns[there, 2 * pair + 1] = np.arange(n)
    index = np.int32 if n * degree < 2**31 else np.int64
    return np.arange(n + 1, dtype=index) * index(degree), columns.ravel()
