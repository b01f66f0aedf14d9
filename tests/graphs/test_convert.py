"""Graphs from NetworkX, SciPy, torch and paths."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch

from ritz.graphs import GraphError, as_graph, read, to_undirected


def dense(graph):
    return graph.to_scipy().toarray()


@pytest.fixture
def weighted():
    graph = nx.gnm_random_graph(12, 30, seed=5)
    for u, v in graph.edges:
        graph[u][v]["weight"] = 1 + u + v / 4
    graph.add_node(12)
    return graph


def test_a_networkx_graph_has_the_matrix_of_networkx(weighted):
    found = as_graph(weighted)
    np.testing.assert_array_equal(dense(found), nx.to_numpy_array(weighted))
    assert (found.num_isolated, found.names) == (1, None)
    assert as_graph(found) is found


def test_networkx_names_are_kept_and_missing_weights_are_one():
    graph = nx.Graph()
    graph.add_edge("b", "a", cost=3)
    graph.add_edge("a", "c")
    found = as_graph(graph, weights="cost")
    assert found.names == ("b", "a", "c")
    assert dense(found).tolist() == [[0, 3, 0], [3, 0, 1], [0, 1, 0]]
    assert as_graph(graph).weights is None


def test_networkx_multigraphs_and_digraphs_are_converted():
    multi = nx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    assert as_graph(multi).num_edges == 2
    assert dense(as_graph(multi, multi_edges="sum"))[0, 1] == 2
    arcs = nx.DiGraph([(0, 1), (1, 0), (1, 2)])
    assert as_graph(arcs).intake.directed
    with pytest.raises(GraphError, match="DiGraph is directed"):
        as_graph(arcs, directed="refuse")
    assert not as_graph(nx.path_graph(4).to_directed(), directed="refuse").intake.directed


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "array", "matrix"])
def test_scipy_and_numpy_matrices_are_converted(weighted, layout):
    matrix = nx.to_numpy_array(weighted)
    given = {
        "csr": scipy.sparse.csr_array,
        "csc": scipy.sparse.csc_array,
        "coo": scipy.sparse.coo_array,
        "matrix": scipy.sparse.csr_matrix,
        "array": np.array,
    }[layout](matrix)
    np.testing.assert_array_equal(dense(as_graph(given)), matrix)


@pytest.mark.parametrize("layout", ["to_dense", "to_sparse_coo", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_torch_matrices_are_converted(layout, dtype):
    matrix = torch.tensor([[0, 2, 0], [2, 0, 1], [0, 1, 0]], dtype=dtype)
    given = matrix if layout == "to_dense" else getattr(matrix, layout)()
    assert dense(as_graph(given)).tolist() == matrix.tolist()


def test_repeated_entries_of_a_sparse_matrix_are_summed():
    given = scipy.sparse.coo_array(([1.0, 2, 3], ([0, 0, 1], [1, 1, 0])), shape=(2, 2))
    assert dense(as_graph(given, directed="refuse")).tolist() == [[0, 3], [3, 0]]


@pytest.mark.parametrize("both", [True, False])
def test_an_edge_index_is_converted(weighted, both):
    pairs = np.array(list(weighted.edges)).T
    values = np.array([weighted[u][v]["weight"] for u, v in weighted.edges])
    if both:
        pairs, values = np.hstack([pairs, pairs[::-1]]), np.concatenate([values, values])
    found = as_graph(
        torch.tensor(pairs), weights=torch.tensor(values), num_nodes=13, directed="refuse"
    )
    np.testing.assert_array_equal(dense(found), nx.to_numpy_array(weighted))


def test_as_graph_reads_a_path(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("0 1 2\n1 2 3\n2 2 1\n")
    assert dense(as_graph(path)).tolist() == dense(read(path)).tolist()
    assert as_graph(str(path), self_loops="keep").num_loops == 1


def test_input_is_not_changed():
    matrix = scipy.sparse.csr_array(np.array([[0, 1.0], [1, 0]]))
    graph = as_graph(matrix)
    before = matrix.toarray()
    graph.to_scipy().data[:] = 7
    np.testing.assert_array_equal(matrix.toarray(), before)


@pytest.mark.parametrize(
    ("combine", "expected"), [("max", [4, 3, 1]), ("sum", [5, 3, 1]), ("mean", [2.5, 1.5, 1])]
)
@pytest.mark.parametrize("source", ["scipy", "networkx"])
def test_directions_are_combined_by_maximum_sum_or_mean(combine, expected, source):
    arcs = np.array([[1.0, 4, 0], [1, 0, 3], [0, 0, 0]])
    given = scipy.sparse.csr_array(arcs) if source == "scipy" else nx.DiGraph(arcs)
    found = dense(to_undirected(given, combine=combine, self_loops="keep"))
    np.testing.assert_array_equal(found, found.T)
    assert [found[0, 1], found[1, 2], found[0, 0]] == expected
    assert dense(to_undirected(given, combine=combine))[0, 0] == 0


def test_directions_of_an_edge_index_are_combined():
    arcs = torch.tensor([[0, 1, 1], [1, 0, 2]])
    assert dense(to_undirected(arcs, combine="sum"))[0].tolist() == [0, 2, 0]
    graph = as_graph(arcs)
    np.testing.assert_array_equal(dense(to_undirected(graph)), dense(graph))


def test_repeated_arcs_are_merged_or_summed():
    arcs = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 2]])
    weights = torch.tensor([1.0, 5.0, 2.0, 1.0])
    merged = to_undirected(arcs, weights=weights)
    np.testing.assert_array_equal(dense(merged), dense(as_graph(arcs, weights=weights)))
    assert dense(merged)[0, 1] == 5
    assert dense(to_undirected(arcs, weights=weights, combine="sum"))[0, 1] == 7
    assert dense(to_undirected(arcs, weights=weights, multi_edges="sum"))[0, 1] == 6
    multi = nx.MultiDiGraph([(0, 1), (0, 1), (1, 2)])
    assert to_undirected(multi).weights is None
    assert to_undirected(arcs, num_nodes=9).num_nodes == 9


def test_a_two_by_two_array_needs_num_nodes_or_floats():
    pairs = torch.tensor([[0, 2], [2, 1]])
    assert as_graph(pairs, num_nodes=3).num_edges == 2
    assert to_undirected(pairs, num_nodes=3).num_edges == 2
    assert as_graph(pairs, weights=torch.ones(2)).num_nodes == 3
    assert dense(as_graph(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))).tolist() == [[0, 2], [2, 0]]
    for given in (np.eye(2, dtype=bool)[::-1], torch.eye(2, dtype=torch.bool).flip(0)):
        assert dense(as_graph(np.ascontiguousarray(given))).tolist() == [[0, 1], [1, 0]]


NAN = np.array([[0, np.nan], [np.nan, 0]])


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.array([[0, -1.0], [-1, 0]]), {}, "finite and not negative, got -1.0 at entry 0"),
        (NAN, {}, "finite and not negative, got nan"),
        (scipy.sparse.csr_array(NAN), {}, "finite and not negative, got nan"),
        (np.zeros((3, 3)), {}, "no edge between two vertices"),
        (np.ones((3, 4)), {}, "must be square, got"),
        (np.array([[0, 1], [1, 2], [2, 0]]), {}, r"an edge_index is \(2, E\), the transpose"),
        ([("a", "b"), ("b", "c")], {}, r"networkx.Graph\(edges\) if vertices have names"),
        (np.ones((3, 3)) * 1j, {}, "must contain real numbers"),
        (np.array([[0, 1.0], [0, 0]]), {"directed": "refuse"}, "ndarray is directed"),
        (np.ones((3, 3)), {"num_nodes": 4}, "num_nodes must be 3, the rows of the matrix, got 4"),
        (np.ones((3, 3)), {"weights": torch.ones(9)}, "weights .* are for an edge_index"),
        (
            nx.Graph([(0, 1)]),
            {"weights": torch.ones(1)},
            "weights must be the name of an attribute",
        ),
        (torch.rand(2, 5), {}, "edge_index must contain integers"),
        (torch.tensor([[0, 1], [1, 5]]), {"num_nodes": 3}, "between 0 and 2, got 0..5"),
        (torch.tensor([[0, -1], [1, 1]]), {"num_nodes": 2}, "between 0 and 1, got -1..1"),
        (np.array([[0, 2], [2, 0]]), {}, r"\(2, 2\) array of integers, .* pass num_nodes"),
        (torch.tensor([[0, 2], [2, 0]]), {}, "floats for the second"),
        (nx.Graph([(0, 1, {"weight": "x"})]), {}, "'weight' of the edge 0 - 1 must be a number, g"),
        (nx.Graph([("a", 1, {"cost": [2]})]), {"weights": "cost"}, r"'cost' of .* 'a' - 1 .*\[2\]"),
        (torch.tensor([[0], [1]]), {"weights": torch.ones(3)}, r"weights must be \(1,\)"),
        (torch.tensor([[0], [1]]), {"weights": torch.tensor([-2.0])}, "weights must be finite"),
        (nx.empty_graph(4), {}, "Graph has no edge between two vertices, but 4 vertices$"),
        (nx.empty_graph(1), {}, "Graph has no edge between two vertices, but 1 vertex$"),
        (nx.Graph([(0, 1, {"weight": -1})]), {}, "attribute 'weight' must be finite and not neg"),
        ({"a": 1}, {}, "graph must be a ritz, NetworkX, igraph or sparse graph.*got dict"),
    ],
)
def test_objects_that_are_not_graphs_raise_a_clear_error(x, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        as_graph(x, **options)


def test_unknown_rules_for_directions_are_refused():
    with pytest.raises(ValueError, match="combine must be one of max, sum, mean"):
        to_undirected(np.ones((2, 2)), combine="min")
    with pytest.raises(GraphError, match="the matrix must be finite and not negative"):
        to_undirected(-np.ones((2, 2)))
    with pytest.raises(ValueError, match="multi_edges must be one of merge, sum"):
        to_undirected(np.ones((2, 2)), multi_edges="refuse")
    with pytest.raises(TypeError, match=r"a matrix or an edge_index, got a path: read\(\) takes"):
        to_undirected("arcs.txt")


@pytest.mark.parametrize(("combine", "factor"), [("max", 1), ("mean", 1), ("sum", 2)])
def test_an_undirected_edge_becomes_two_arcs(combine, factor):
    graph = nx.Graph()
    graph.add_edge(0, 1, weight=3.0)
    found = to_undirected(graph, combine=combine).to_scipy().toarray()
    np.testing.assert_array_equal(found, factor * np.array([[0.0, 3.0], [3.0, 0.0]]))


class IGraph:
    """The part of the interface of igraph that ritz uses; igraph itself is tested if installed."""

    class Table(dict):
        def attributes(self):
            return list(self)

    def __init__(self, edges, count, *, directed=False, weights=None, names=None):
        self.edges, self.count, self.directed = edges, count, directed
        self.es = self.Table({} if weights is None else {"weight": weights})
        self.vs = self.Table({} if names is None else {"name": names})

    def get_edgelist(self):
        return self.edges

    def vcount(self):
        return self.count

    def is_directed(self):
        return self.directed


def test_igraph_objects_are_converted_with_names_and_weights():
    x = IGraph([(0, 1), (1, 2)], 4, weights=[2, None], names=["a", "b", "c", "d"])

    graph = as_graph(x)

    assert graph.names == ("a", "b", "c", "d")
    assert dense(graph).tolist() == [[0, 2, 0, 0], [2, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert as_graph(x, weights=False).weights is None
    arcs = IGraph([(0, 1), (1, 0), (1, 2)], 3, directed=True)
    assert as_graph(arcs).intake.directed
    assert dense(to_undirected(arcs, combine="sum"))[0].tolist() == [0, 2, 0]


def test_a_real_igraph_graph_is_converted():
    igraph = pytest.importorskip("igraph")
    x = igraph.Graph.Famous("Zachary")

    graph = as_graph(x)

    np.testing.assert_array_equal(dense(graph), np.array(x.get_adjacency().data))


def test_to_undirected_accepts_the_same_objects_as_as_graph():
    matrix = np.array([[0, 1.0, 0], [0, 0, 2], [0, 0, 0]])
    expected = [[0, 1, 0], [1, 0, 2], [0, 2, 0]]

    for convert in (as_graph, to_undirected):
        assert dense(convert(matrix, weights="weight", num_nodes=3)).tolist() == expected
        assert dense(convert(matrix > 0)).tolist() == (np.array(expected) > 0).tolist()
        assert convert(nx.Graph([(0, 1, {"weight": 3})]), weights=False).weights is None
