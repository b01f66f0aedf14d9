"""The class Graph: its properties, components, subgraphs and files."""

import networkx as nx
import numpy as np
import pytest
import torch

import ritz
from ritz.graphs import Graph, as_graph, read


@pytest.fixture
def graph(tmp_path):
    """Two components, of four and three vertices, with gaps in the ids, and a weight each."""
    path = tmp_path / "seven.txt"
    path.write_text("10 20 1\n20 30 2\n30 10 3\n30 40 4\n70 80 5\n80 90 6\n")
    return read(path)


def test_rows_are_the_rows_of_the_symmetric_matrix(graph):
    dense = graph.to_scipy().toarray()
    np.testing.assert_array_equal(dense, dense.T)
    assert dense[0, 1] == 1
    assert dense[2, 3] == 4
    assert dense.sum() == 2 * (1 + 2 + 3 + 4 + 5 + 6)
    assert graph.names.tolist() == [10, 20, 30, 40, 70, 80, 90]
    assert graph.crow.dtype == graph.col.dtype == torch.int32


def test_columns_ascend_in_each_row(graph):
    rows = [graph.col[a:b].tolist() for a, b in zip(graph.crow, graph.crow[1:], strict=False)]
    assert rows == [[1, 2], [0, 2], [0, 1, 3], [2], [5], [4, 6], [5]]


def test_numbers_of_edges_and_degrees_are_right(graph):
    assert (graph.num_nodes, graph.num_edges, graph.num_isolated) == (7, 6, 0)
    assert graph.degrees.tolist() == [4, 3, 9, 4, 5, 11, 6]
    unweighted = as_graph(nx.path_graph(3))
    assert unweighted.weights is None
    assert unweighted.degrees.tolist() == [1, 2, 1]


def test_components_are_numbered_per_vertex(graph):
    count, labels = graph.components()
    assert count == 2
    assert len(labels[:4].unique()) == len(labels[4:].unique()) == 1
    part = graph.largest_component()
    assert part.names.tolist() == [10, 20, 30, 40]
    assert part.num_edges == 4
    assert part.largest_component() is part


def test_of_equally_large_components_the_first_is_returned():
    graph = as_graph(torch.tensor([[2, 0], [3, 1]]), num_nodes=4)
    assert graph.largest_component().names.tolist() == [0, 1]


def test_a_subgraph_has_the_order_of_its_argument(graph):
    part = graph.subgraph([3, 2, 0])
    assert part.names.tolist() == [40, 30, 10]
    np.testing.assert_array_equal(
        part.to_scipy().toarray(), graph.to_scipy().toarray()[np.ix_([3, 2, 0], [3, 2, 0])]
    )
    mask = torch.tensor([True, False, True, True, False, False, False])
    assert graph.subgraph(mask).names.tolist() == [10, 30, 40]


def test_subgraphs_keep_names_and_self_loops():
    source = nx.Graph([("a", "b"), ("b", "c"), ("c", "c")])
    part = as_graph(source, self_loops="keep").subgraph([2, 1])
    assert part.names == ("c", "b")
    assert part.num_loops == 1
    assert part.num_edges == 2


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "at least one vertex"),
        ([False] * 7, "at least one vertex"),
        ([0, 7], "between 0 and 6"),
        ([-1], "between 0 and 6"),
        ([1, 1], "must be distinct, got"),
        ([0.5], "mask or a list of indices"),
        ([True, False], "mask of 7 entries"),
    ],
)
def test_invalid_vertices_of_a_subgraph_are_refused(graph, nodes, message):
    with pytest.raises(ValueError, match=message):
        graph.subgraph(nodes)


def test_a_printed_graph_shows_its_size_and_source(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text("0 1\n1 0\n1 2\n2 2\n")
    assert str(read(path)) == (
        "Graph of 3 vertices and 2 edges, unweighted\n"
        "  neighbours: mean 1.333, median 1, largest 2; 0 isolated\n"
        "  from small.txt: 4 records; 1 merged into others, 1 self-loops dropped; "
        "directions dropped"
    )


@pytest.mark.parametrize("names", ["integers", "strings"])
def test_a_graph_is_equal_after_saving_and_loading(graph, tmp_path, names):
    if names == "strings":
        graph = as_graph(nx.Graph([("a", "b"), ("b", "c")]))
    ritz.save(graph, tmp_path / "graph.safetensors")
    back = ritz.load(tmp_path / "graph.safetensors")
    assert isinstance(back, Graph)
    assert str(back) == str(graph)
    assert torch.equal(back.col, graph.col)
    assert list(back.names) == list(graph.names)
