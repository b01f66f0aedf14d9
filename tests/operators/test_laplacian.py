"""The matrices of a graph against their formulas, NetworkX and theorems."""

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from matrices import PRECISIONS

import ritz
from ritz.operators import LaplacianOperator, _sparse, as_operator, exact
from ritz.operators._exact import gershgorin
from ritz.operators._laplacian import GRAPH_MATRICES
from ritz.operators._sparse import CompressedRows
from ritz.testing import check_operator


def weighted():
    """Weights with a self-loop at 4, isolated vertices 0 and 7, and two components."""
    w = np.zeros((9, 9))
    edges = {(1, 2): 0.5, (2, 3): 2.0, (1, 3): 1.25, (4, 4): 3.0, (4, 5): 1.5, (5, 6): 0.75}
    for (i, j), weight in {**edges, (6, 8): 4.0}.items():
        w[i, j] = w[j, i] = weight
    return w


def pattern():
    return (weighted() > 0).astype(float)


def formula(w, kind):
    """The definition, row by row, dividing only by degrees that are not zero."""
    d = w.sum(1)
    n = len(d)
    walk = np.zeros_like(w)
    for i in range(n):
        for j in range(n):
            walk[i, j] = w[i, j] / np.sqrt(d[i] * d[j]) if w[i, j] else 0.0
    return {
        "adjacency": w,
        "laplacian": np.diag(d) - w,
        "normalized": np.diag((d > 0).astype(float)) - walk,
        "normalized_adjacency": walk,
        "random_walk": walk,
        "modularity": w - np.outer(d, d) / d.sum(),
    }[kind]


@pytest.fixture(params=[_sparse.TUNING.min_entries, 0], ids=["plain", "compiled"])
def path(request, monkeypatch):
    monkeypatch.setattr(_sparse, "TUNING", replace(_sparse.TUNING, min_entries=request.param))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("kind", GRAPH_MATRICES)
@pytest.mark.parametrize("weights", [weighted, pattern], ids=["weighted", "pattern"])
@pytest.mark.usefixtures("path")
def test_every_graph_matrix_keeps_the_contract_and_equals_its_formula(weights, kind, dtype):
    w = weights()
    op = LaplacianOperator(scipy.sparse.csr_array(w), matrix=kind, dtype=dtype)
    expected = torch.from_numpy(formula(w, kind))
    assert op.dtype == dtype
    check_operator(op, dense=expected)
    torch.testing.assert_close(op.dense(), expected.to(dtype))


@pytest.mark.parametrize("kind", GRAPH_MATRICES)
@pytest.mark.parametrize("weights", [weighted, pattern], ids=["weighted", "pattern"])
def test_exact_diagonals_and_traces_of_graph_matrices_are_right(weights, kind):
    op = LaplacianOperator(scipy.sparse.csr_array(weights()), matrix=kind)
    dense = torch.from_numpy(formula(weights(), kind))
    torch.testing.assert_close(exact(op, "diagonal").value, dense.diagonal())
    assert exact(op, "trace").value == pytest.approx(float(dense.trace()), abs=1e-12)
    low, high = gershgorin(op)
    eigenvalues = torch.linalg.eigvalsh(dense)
    assert low <= eigenvalues[0] + 1e-12
    assert high >= eigenvalues[-1] - 1e-12
    assert ritz.bounds(op, method="gershgorin").rigorous


def test_the_bounds_of_normalised_matrices_need_no_product():
    w = scipy.sparse.csr_array(weighted())
    assert gershgorin(LaplacianOperator(w)) == (0.0, 2.0)
    assert gershgorin(LaplacianOperator(w, matrix="random_walk")) == (-1.0, 1.0)
    # vertex 6 has the largest degree without loops, 4.75
    assert gershgorin(LaplacianOperator(w, matrix="laplacian")) == (0.0, 9.5)


def graphs():
    loops = nx.Graph([(0, 1), (1, 1), (1, 2)])
    loops.add_node(9)
    repeated = nx.MultiGraph([(0, 1), (0, 1), (1, 2), (2, 2), (2, 2)])
    heavy = nx.gnp_random_graph(30, 0.2, seed=1)
    rng = np.random.default_rng(0)
    for i, j in heavy.edges:
        heavy[i][j]["weight"] = float(rng.uniform(0.1, 3))
    return {
        "loops": loops,
        "repeated": repeated,
        "weighted": heavy,
        "karate": nx.karate_club_graph(),
    }


@pytest.mark.parametrize("name", graphs())
def test_networkx_agrees_on_loops_repeated_edges_and_weights(name):
    graph = graphs()[name]
    theirs = {
        "adjacency": nx.to_scipy_sparse_array(graph, dtype=float),
        "laplacian": nx.laplacian_matrix(graph),
        "normalized": nx.normalized_laplacian_matrix(graph),
    }
    if not graph.is_multigraph():
        theirs["modularity"] = nx.modularity_matrix(graph, weight="weight")
    for kind, matrix in theirs.items():
        expected = torch.as_tensor(np.asarray(getattr(matrix, "todense", lambda m=matrix: m)()))
        found = LaplacianOperator(graph, matrix=kind).dense()
        torch.testing.assert_close(found, expected.double(), rtol=1e-12, atol=1e-12)


def test_the_random_walk_has_the_eigenvalues_and_vectors_it_promises():
    graph = nx.karate_club_graph()
    op = LaplacianOperator(graph, matrix="random_walk")
    w = nx.to_numpy_array(graph)
    walk = torch.from_numpy(w / w.sum(1, keepdims=True))
    values, vectors = torch.linalg.eigh(op.dense())
    theirs = torch.linalg.eigvals(walk).real.sort().values
    torch.testing.assert_close(values, theirs, rtol=0, atol=1e-12)
    right = vectors / op.degrees.sqrt()[:, None]
    torch.testing.assert_close(walk @ right, right * values, rtol=0, atol=1e-13)


def test_the_zeros_of_a_laplacian_count_components_and_isolated_vertices():
    graph = nx.disjoint_union_all([nx.cycle_graph(5), nx.path_graph(4), nx.empty_graph(3)])
    for kind in ("laplacian", "normalized"):
        values = torch.linalg.eigvalsh(LaplacianOperator(graph, matrix=kind).dense())
        assert int((values.abs() < 1e-12).sum()) == 5


@pytest.mark.parametrize("kind", GRAPH_MATRICES)
def test_graphs_without_edges_have_zero_matrices(kind):
    for n in (1, 4):
        op = LaplacianOperator(scipy.sparse.csr_array((n, n)), matrix=kind)
        assert torch.equal(op.dense(), torch.zeros(n, n, dtype=torch.float64))
        assert exact(op, "trace").value == 0.0


SOURCES = {
    "SciPy, integers": lambda w: scipy.sparse.csr_array(w.astype(np.int8)),
    "SciPy, booleans": lambda w: scipy.sparse.coo_array(w.astype(bool)),
    "torch CSR": lambda w: torch.from_numpy(w).to_sparse_csr(),
    "torch COO, integers": lambda w: torch.from_numpy(w).long().to_sparse_coo(),
    "NetworkX": lambda w: nx.from_numpy_array(w),
    "rows": lambda w: CompressedRows(
        torch.from_numpy(scipy.sparse.csr_array(w).indptr),
        torch.from_numpy(scipy.sparse.csr_array(w).indices),
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_weights_that_are_all_one_are_not_stored(source):
    op = LaplacianOperator(source(pattern()))
    assert op.rows.values is None
    assert op.dtype == torch.float64
    expected = formula(pattern(), "normalized")
    torch.testing.assert_close(op.dense(), torch.from_numpy(expected))


def test_repeated_edges_add_up_before_they_are_rounded_to_booleans():
    twice = scipy.sparse.coo_array(
        (np.ones(4, dtype=bool), ([0, 1, 0, 1], [1, 0, 1, 0])), shape=(2, 2)
    )
    op = LaplacianOperator(twice, matrix="adjacency")
    assert op.dense().tolist() == [[0.0, 2.0], [2.0, 0.0]]


def test_degrees_in_single_precision_are_summed_in_double():
    n = 40_000  # a star: the sum of its hub in float32, one by one, is off by 1e-3
    hub = np.zeros(n - 1, dtype=int)
    rim = np.arange(1, n)
    values = np.full(n - 1, 0.1, dtype=np.float32)
    star = scipy.sparse.coo_array((values, (hub, rim)), shape=(n, n))
    op = LaplacianOperator(star + star.T)
    assert float(op.degrees[0]) == pytest.approx((n - 1) * float(np.float32(0.1)), rel=1e-12)


def bad(weight):
    w = weighted()
    w[2, 3] = w[3, 2] = weight
    return scipy.sparse.csr_array(w)


WRONG = {
    "negative": (
        lambda: LaplacianOperator(bad(-1.0)),
        ValueError,
        r"got -1.0 at \(2, 3\) and 2 in all",
    ),
    "NaN": (lambda: LaplacianOperator(bad(np.nan)), ValueError, r"weights .* got nan at \(2, 3\)"),
    "Inf": (lambda: LaplacianOperator(bad(np.inf)), ValueError, r"finite, got inf at \(2, 3\)"),
    "directed": (
        lambda: LaplacianOperator(scipy.sparse.csr_array(np.triu(weighted(), 1))),
        ValueError,
        "weights must be of an undirected graph: SparseOperator.*must be symmetric",
    ),
    "a directed NetworkX graph": (
        lambda: LaplacianOperator(nx.DiGraph([(0, 1)])),
        ValueError,
        r"undirected graph, got a directed one: graph.to_undirected\(\)",
    ),
    "no vertex": (lambda: LaplacianOperator(nx.Graph()), ValueError, "at least one row, got 0"),
    "kind": (
        lambda: LaplacianOperator(nx.path_graph(2), matrix="signless"),
        ValueError,
        "matrix must be one of adjacency, .*; got 'signless'",
    ),
    "complex": (
        lambda: LaplacianOperator(scipy.sparse.csr_array(1j * weighted())),
        TypeError,
        "weights must be real, got complex128",
    ),
    "complex of torch": (
        lambda: LaplacianOperator(torch.eye(2).cfloat().to_sparse_csr()),
        TypeError,
        "weights must be real, got complex64",
    ),
    "not square": (
        lambda: LaplacianOperator(scipy.sparse.csr_array(np.ones((2, 3)))),
        ValueError,
        r"weights must be square, got \(2, 3\)",
    ),
    "dense": (
        lambda: LaplacianOperator(weighted()),
        TypeError,
        r"weights must be sparse \(SciPy or torch\), got ndarray",
    ),
    "integer dtype": (
        lambda: LaplacianOperator(nx.path_graph(2), dtype=torch.int64),
        TypeError,
        "floating-point dtype, got torch.int64",
    ),
    "as_operator of a graph": (
        lambda: as_operator(nx.path_graph(2)),
        TypeError,
        r"a graph has several: pass ritz.graphs.laplacian",
    ),
}


@pytest.mark.parametrize(("build", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_misuse_names_the_argument_and_the_entry(build, kind, match):
    with pytest.raises(kind, match=match):
        build()


def test_the_repr_of_a_graph_matrix_names_it():
    op = LaplacianOperator(nx.path_graph(3), matrix="laplacian")
    assert repr(op) == "LaplacianOperator(3 x 3, float64, cpu, laplacian, 4 entries)"
