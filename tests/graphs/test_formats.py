"""Matrix Market, GML, GraphML and METIS files against NetworkX and SciPy."""

import bz2
import gzip
import lzma
import sys

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse

from ritz.graphs import GraphError, read
from ritz.graphs._io import lines


def karate():
    """The karate club with its weights and an isolated vertex."""
    graph = nx.Graph(nx.karate_club_graph())
    graph.add_node(34)
    return graph


def expected(graph, weight="weight"):
    return nx.to_numpy_array(graph, weight=weight)


def metis_text(graph, *, weighted):
    fmt = " 001" if weighted else ""
    lines = [f"{graph.number_of_nodes()} {graph.number_of_edges()}{fmt}"]
    for node in graph:
        neighbours = []
        for other, data in graph[node].items():
            neighbours += [str(other + 1)] + ([str(data["weight"])] if weighted else [])
        lines.append(" ".join(neighbours))
    return "\n".join(lines) + "\n"


def write(graph, path, suffix):
    if suffix == "gml":
        nx.write_gml(graph, path)
    elif suffix == "graphml":
        nx.write_graphml(graph, path)
    elif suffix == "edges":
        nx.write_weighted_edgelist(graph, path)
    elif suffix == "metis":
        path.write_text(metis_text(graph, weighted=True))
    else:
        scipy.io.mmwrite(
            path, scipy.sparse.coo_array(nx.to_numpy_array(graph)), symmetry="symmetric"
        )


@pytest.mark.parametrize("chunk", [5, 200, 2**20])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("suffix", ["gml", "graphml", "edges", "mtx", "metis"])
def test_a_written_networkx_graph_is_read_back(tmp_path, monkeypatch, suffix, compressed, chunk):
    graph, path = karate(), tmp_path / f"karate.{suffix}"
    write(graph, path, suffix)
    monkeypatch.setattr(lines, "CHUNK", chunk)
    if compressed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path = path.with_name(path.name + ".gz")
    found = read(path, num_nodes=35 if suffix == "edges" else None, directed="refuse")
    np.testing.assert_array_equal(found.to_scipy().toarray(), expected(graph))
    # Vertices of these two are counted from one.
    ones = list(range(1, 36))
    assert found.names is None if suffix not in ("mtx", "metis") else found.names.tolist() == ones
    assert found.num_isolated == 1


@pytest.mark.parametrize("symmetry", ["symmetric", "general"])
@pytest.mark.parametrize("field", ["pattern", "real", "integer"])
def test_matrix_market_files_agree_with_scipy(tmp_path, field, symmetry):
    path = tmp_path / "graph.mtx"
    matrix = scipy.sparse.coo_array(expected(karate()))
    scipy.io.mmwrite(path, matrix, field=field, symmetry=symmetry, comment="two\nlines")
    found = read(path, directed="refuse")
    np.testing.assert_array_equal(found.to_scipy().toarray(), scipy.io.mmread(path).toarray())
    assert (found.weights is None) == (field == "pattern")


def test_a_general_matrix_is_directed_unless_symmetric(tmp_path):
    path = tmp_path / "graph.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real general\n3 3 3\n1 2 5\n2 1 4\n3 1 2\n")
    found = read(path)
    assert found.intake.directed
    dense = found.to_scipy().toarray()
    assert (dense[0, 1], dense[1, 0], dense[0, 2]) == (5, 5, 2)
    # Neither order is a repeat of the other: the larger counts, whatever is done with repeats.
    assert read(path, multi_edges="sum").to_scipy()[0, 1] == 5
    with pytest.raises(GraphError, match="1 edges in one direction only, 1 in both, 1 of these"):
        read(path, directed="refuse")


@pytest.mark.parametrize("kind", ["gml", "graphml"])
def test_files_of_directed_graphs_are_recognised(tmp_path, kind):
    path = tmp_path / f"graph.{kind}"
    graph = nx.DiGraph([(0, 1), (1, 2)])
    {"gml": nx.write_gml, "graphml": nx.write_graphml}[kind](graph, path)
    assert read(path).intake.directed
    with pytest.raises(GraphError, match="says that it is directed"):
        read(path, directed="refuse")


@pytest.mark.parametrize("kind", ["gml", "graphml"])
def test_names_and_weight_attributes_are_read(tmp_path, kind):
    path = tmp_path / f"graph.{kind}"
    graph = nx.Graph()
    graph.add_edge("Ann Lee", "Börje", value=2.5, cost=7.0)
    graph.add_edge("Börje", "[c] # d", value=1.5, cost=3.0)
    {"gml": nx.write_gml, "graphml": nx.write_graphml}[kind](graph, path)
    found = read(path)
    np.testing.assert_array_equal(found.to_scipy().toarray(), expected(graph, "value"))
    assert found.names == ("Ann Lee", "Börje", "[c] # d")
    cost = read(path, weights="cost").to_scipy().toarray()
    np.testing.assert_array_equal(cost, expected(graph, "cost"))
    assert read(path, weights=False).weights is None
    with pytest.raises(GraphError, match="has no attribute 'price'"):
        read(path, weights="price")


@pytest.mark.parametrize("kind", ["gml", "graphml"])
def test_multigraphs_are_read(tmp_path, kind):
    path = tmp_path / f"graph.{kind}"
    graph = nx.MultiGraph([(0, 1), (1, 0), (1, 2)])
    {"gml": nx.write_gml, "graphml": nx.write_graphml}[kind](graph, path)
    assert read(path).num_edges == 2
    assert read(path, multi_edges="sum").to_scipy()[0, 1] == 2
    with pytest.raises(GraphError, match="names"):
        read(path, multi_edges="refuse")


def test_gml_files_by_newman_are_read(tmp_path):
    path = tmp_path / "graph.gml"
    path.write_text(
        'Creator "someone"\ngraph\n[\n  # a comment ]\n  node\n  [\n    id 4\n'
        '    label "over two\nlines"\n    graphics [ x 1 y [ id 9 ] ]\n  ]\n'
        "  node [ id 2 ] node [ id 7 ]\n"
        "  edge [ source 4 target 2 value 3 ]\n  edge [ source 2 target 7 ]\n]\n"
    )
    found = read(path)
    assert found.names == ("over two lines", "2", "7")
    assert found.to_scipy().toarray().tolist() == [[0, 3, 0], [3, 0, 1], [0, 1, 0]]


def test_gml_may_list_an_edge_twice_without_saying_so(tmp_path):
    path = tmp_path / "graph.gml"
    nodes = "node [ id 0 ] node [ id 1 ] node [ id 2 ]"
    edges = "edge [ source 0 target 1 ] edge [ source 1 target 0 ] edge [ source 1 target 2 ]"
    path.write_text(f"graph [ {nodes} {edges} ]")
    found = read(path)
    assert (found.num_edges, found.intake.num_merged) == (2, 1)


@pytest.mark.parametrize("kind", ["gml", "graphml"])
def test_self_loops_and_isolated_vertices_of_files_are_recorded(tmp_path, kind):
    path = tmp_path / f"graph.{kind}"
    graph = nx.Graph([(0, 1), (1, 1)])
    graph.add_node(2)
    {"gml": nx.write_gml, "graphml": nx.write_graphml}[kind](graph, path)
    found = read(path)
    assert (found.num_nodes, found.num_isolated, found.intake.num_self_loops) == (3, 1, 1)
    assert read(path, self_loops="keep").num_loops == 1


@pytest.mark.parametrize("kind", ["gml", "graphml"])
def test_the_error_without_networkx_says_what_to_install(tmp_path, monkeypatch, kind):
    path = tmp_path / f"graph.{kind}"
    {"gml": nx.write_gml, "graphml": nx.write_graphml}[kind](nx.path_graph(3), path)
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ImportError, match=f"reading {kind} needs networkx: pip install"):
        read(path)


def test_an_entity_bomb_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "bomb.graphml"
    entities = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(12))
    path.write_text(f'<!DOCTYPE g [<!ENTITY e0 "lol">{entities}]><graphml>&e12;</graphml>')
    with pytest.raises(GraphError, match="has a DOCTYPE or ENTITY declaration"):
        read(path)


def test_graphml_default_values_are_used(tmp_path):
    path = tmp_path / "graph.graphml"
    path.write_text(
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
        '<key id="k" for="edge" attr.name="weight" attr.type="double"><default>2.5</default></key>'
        '<graph edgedefault="undirected"><node id="a"/><node id="b"/><node id="c"/>'
        '<edge source="a" target="b"/><edge source="b" target="c"><data key="k">4</data></edge>'
        "</graph></graphml>"
    )
    assert read(path).to_scipy().toarray().tolist() == [[0, 2.5, 0], [2.5, 0, 4], [0, 4, 0]]


@pytest.mark.parametrize(("code", "lead"), [("011", "9 "), ("111", "1 9 "), ("11 2", "8 9 ")])
def test_metis_vertex_weights_are_ignored(tmp_path, code, lead):
    path = tmp_path / "graph.metis"
    path.write_text(f"% first\n3 2 {code}\n{lead}2 5\n% within\n{lead}1 5 3 6\n{lead}2 6\n")
    assert read(path).to_scipy().toarray().tolist() == [[0, 5, 0], [5, 0, 6], [0, 6, 0]]
    assert read(path, weights=False).weights is None


def test_an_empty_line_of_metis_is_an_isolated_vertex(tmp_path):
    path = tmp_path / "graph.graph"
    path.write_text("4 1\n\n4\n\n2\n\n")
    found = read(path)
    assert (found.num_nodes, found.num_edges, found.num_isolated) == (4, 1, 2)
    assert found.degrees.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("name", ["graph.dat", "graph.mtx.gz", "graph"])
def test_the_format_is_detected_from_the_content(tmp_path, name):
    path = tmp_path / name
    path.write_text("%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n2 1\n3 1\n")
    assert read(path).num_nodes == 3
    path.write_text("graph [ node [ id 0 ] node [ id 1 ] edge [ source 0 target 1 ] ]")
    assert read(path).num_edges == 1
    path.write_text(
        '<?xml version="1.0"?><graphml><graph edgedefault="undirected"><node id="a"/>'
        '<node id="b"/><edge source="a" target="b"/></graph></graphml>'
    )
    assert read(path).names == ("a", "b")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_are_recognised_by_their_first_bytes(tmp_path, compress):
    path = tmp_path / "edges"
    path.write_bytes(compress(b"0 1\n1 2\n"))

    graph = read(path)

    assert (graph.num_nodes, graph.num_edges) == (3, 2)


@pytest.mark.parametrize("name", ["graph.mtx.bz2", "graph.mtx.xz"])
def test_the_suffix_of_a_compressed_file_is_ignored(tmp_path, name):
    compress = bz2.compress if name.endswith("bz2") else lzma.compress
    (tmp_path / name).write_bytes(compress(b"2 1\n2\n1\n"))
    with pytest.raises(GraphError, match="has no valid Matrix Market header"):
        read(tmp_path / name)


@pytest.mark.parametrize("symmetry", ["symmetric", "general"])
@pytest.mark.parametrize("field", ["real", "integer"])
def test_a_dense_matrix_market_file_is_read(tmp_path, field, symmetry):
    path = tmp_path / "graph.mtx"
    matrix = expected(karate())
    scipy.io.mmwrite(path, matrix, field=field, symmetry=symmetry)

    graph = read(path)

    np.testing.assert_array_equal(graph.to_scipy().toarray(), matrix)
    assert graph.names.tolist() == list(range(1, 36))


def test_named_vertices_are_numbered_as_they_occur(tmp_path):
    path = tmp_path / "friends.csv"
    path.write_text("# who, whom, how much\nann,bob,2\nbob,Zoë,0.5\n\nann,7,1\n")

    graph = read(path)

    assert graph.names == ("ann", "bob", "Zoë", "7")
    dense = graph.to_scipy().toarray()
    assert dense.tolist() == [[0, 2, 0, 1], [2, 0, 0.5, 0], [0, 0.5, 0, 0], [1, 0, 0, 0]]


def test_invalid_lines_between_names_are_reported(tmp_path):
    path = tmp_path / "friends.txt"
    path.write_text("from to\nann bob\nbob\nbob cy\n")

    graph = read(path, errors="report")

    assert graph.names == ("ann", "bob", "cy")
    assert [reason.split(":")[0] for reason in graph.intake.reasons] == ["line 1", "line 3"]
