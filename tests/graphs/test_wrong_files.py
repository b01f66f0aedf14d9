"""Errors of wrong files have one line, with the name of the file and the number of the line."""

import gzip
import time
import tracemalloc
from dataclasses import replace

import pytest
import torch

from ritz import graphs
from ritz.graphs import GraphError, as_graph, read
from ritz.graphs._io import assembly

ARRAY = "%%MatrixMarket matrix array real general\n"
MTX = "%%MatrixMarket matrix coordinate real general\n"
NODES = "node [ id 0 ] node [ id 1 ]"
XML = '<graphml><graph edgedefault="undirected"><node id="a"/><node id="b"/>'
WRONG = {
    "a negative weight": ("e.txt", "0 1 1\n1 2 -0.5\n", "line 2: the weight '-0.5' is negative"),
    "a NaN weight": ("e.txt", "# c\n0 1 1\n1 2 NaN\n", "line 3: the weight 'NaN' is not a finite"),
    "an infinite weight": ("e.txt", "0 1 inf\n", "line 1: the weight 'inf' is not a finite"),
    "a weight beyond float64": ("e.txt", "0 1 1e999\n", "line 1: .* is beyond float64"),
    "a weight that is none": (
        "e.txt",
        "0 1 1\n0 1 1.2.3\n",
        "line 2: .*'1.2.3' is not a finite number",
    ),
    "an empty file": ("e.txt", "", "e.txt is empty"),
    "blank lines": ("e.txt", "\n \n", "e.txt has no edge"),
    "comments alone": ("e.txt", "# a\n# b\n", "e.txt has no edge"),
    "an id beyond 64 bits": ("e.txt", f"0 {2**63}\n", f"line 1: .*'{2**63}' is beyond 64 bits"),
    "an id of 10,000 digits": ("e.txt", f"0 {'9' * 10000}\n", r"9\.\.\.' is beyond 64 bits"),
    "a negative id": ("e.txt", "0 -1\n", "line 1: the vertex id '-1' is negative"),
    "a name": ("e.txt", "0 1\nann 2\n", "line 2: the vertex id 'ann' is not a whole number"),
    "a fraction": ("e.txt", "0 1.5\n", "line 1: the vertex id '1.5' is not a whole number"),
    "one column": ("e.txt", "0 1\n2\n", "line 2: has 1 columns, expected 2"),
    "one column at first": ("e.txt", "2\n", "line 1: has 1 columns, expected two vertices"),
    "too many columns": ("e.txt", "0 1\n2 3 4\n", "line 2: has 3 columns, expected 2"),
    "one vertex": ("e.txt", "3 3\n", "no edge between two vertices, .*1 self-loops dropped"),
    "bytes that are no text": ("e.txt", b"0 1\n\xff\xfe 2\n", "line 2: the vertex id '.*xff"),
    "a binary file": ("e.txt", b"\x7fELF\0\0\0\1", "e.txt is a binary file"),
    "an endless line": ("e.txt", "0 1\n" + "7" * 3_000_000, "line 2: longer than 1048576 bytes"),
    "bzip2": ("e.txt", b"BZh91AY", "e.txt is a truncated bzip2 file"),
    "bzip2 noise": ("e.txt", b"BZh91AY&SY" + b"noise" * 9, "e.txt is a damaged bzip2 file"),
    "xz": ("e.txt", b"\xfd7zXZ\0\0\0", "e.txt is a (truncated|damaged) xz file"),
    "zip": ("e.txt", b"PK\x03\x04...", "is a zip file: unpack it first, only gzip, bzip2 and xz"),
    "zip of a matrix": ("e.npz", b"PK\x03\x04...", r"pass scipy.sparse.load_npz\(path\) for a mat"),
    "attributes of NetworkX": (
        "e.txt",
        "0 1 {'weight': 4}\n",
        "line 1: has attributes in braces, as networkx.write_edgelist",
    ),
    "no attributes of NetworkX": ("e.txt", "ann bob {}\n", "line 1: has attributes in braces"),
    "huge array": ("e.mtx", f"{ARRAY}99999 99999\n1\n", "holds fewer numbers than its header says"),
    "short array": ("e.mtx", f"{ARRAY}2 2\n0\n1\n1\n", "e.mtx cannot be read"),
    "negative array": ("e.mtx", f"{ARRAY}2 2\n0\n-1\n-1\n0\n", "e.mtx: the entries must be finite"),
    "title of columns": (
        "e.csv",
        "source,target\nann,bob\nbob,cy\n",
        "line 1: is the title of",
    ),
    "weight after names": (
        "e.txt",
        "ann bob 1\nbob cy x\n",
        "line 2: the weight 'x' is not",
    ),
    "a name among numbers": (
        "e.txt",
        "0 1\n1 2\n2 x\n",
        "line 3: the vertex id 'x' is",
    ),
    "mtx banner": (
        "e.mtx",
        "%%MatrixMarket matrix real general\n",
        "no valid Matrix Market header",
    ),
    "mtx skew": (
        "e.mtx",
        "%%MatrixMarket matrix coordinate real skew-symmetric\n2 2 1\n",
        "must be symmetric or general, got skew",
    ),
    "mtx complex": (
        "e.mtx",
        "%%MatrixMarket matrix coordinate complex general\n2 2 1\n",
        "got complex",
    ),
    "mtx without a size": ("e.mtx", MTX + "% c\n", "no valid Matrix Market header: .*EOF"),
    "mtx size": ("e.mtx", MTX + "2 2\n", "no valid Matrix Market header"),
    "mtx not square": ("e.mtx", MTX + "2 3 1\n1 2 1\n", "must be a square matrix, got 2 x 3"),
    "mtx index": ("e.mtx", MTX + "2 2 1\n1 3 1\n", "line 3: .*'3' is not between 1 and 2"),
    "mtx truncated": ("e.mtx", MTX + "2 2 2\n1 2 1\n", "holds 1 entries, its header says 2"),
    "mtx negative": ("e.mtx", MTX + "2 2 1\n1 2 -3\n", "line 3: the weight '-3' is negative"),
    "mtx too large": ("e.mtx", MTX + f"{2**40} {2**40} 1\n", "vertices; the maximum is 2147483647"),
    "mtx roomy": (
        "e.mtx",
        MTX + "1000000000 1000000000 1\n1 2 1\n",
        "1,000,000,000 vert.*--nodes 10",
    ),
    "metis roomy": ("e.metis", "900000000 1\n2\n1\n", "900,000,000 vertices for 1 edges.* 23 GiB"),
    "weights that overflow": ("e.txt", "0 1 1e308\n1 2 1e308\n", "up to 1e.308, that their sum"),
    "four columns": ("e.txt", "0 1 2 3\n", "weights=False .--no-weights. to ignore"),
    "mtx without edges": ("e.mtx", MTX + "2 2 0\n", "no edge between two vertices"),
    "gml truncated": ("e.gml", f"graph [ {NODES}", "expected ']', found EOF"),
    "gml bracket": ("e.gml", "graph [ ] ]", "found ']' at"),
    "gml without graph": ("e.gml", 'Creator "x"', "contains no graph"),
    "gml unknown vertex": (
        "e.gml",
        f"graph [ {NODES} edge [ source 0 target 5 ] ]",
        "undefined target 5",
    ),
    "gml twice": ("e.gml", "graph [ node [ id 0 ]\nnode [ id 0 ] ]", "node id 0 is duplicated"),
    "gml no source": (
        "e.gml",
        f"graph [ {NODES}\nedge [ target 0 ] ]",
        "edge #0 has no 'source'",
    ),
    "gml id": ("e.gml", "graph [\nnode [ id x ] ]", "no edge between two vertices"),
    "gml key": ("e.gml", 'graph [ "a" 1 ]', "expected ']', found"),
    "gml quote": ("e.gml", 'graph [\nlabel "a ]', "found EOF"),
    "gml deep": ("e.gml", "graph [ " + "a [ " * 20_000, "cannot be read as gml: .*recursion"),
    "gml two graphs": ("e.gml", "graph [ ]\ngraph [ ]", "more than one graph"),
    "gml weight": (
        "e.gml",
        f"graph [ {NODES}\nedge [ source 0 target 1 weight nan ] ]",
        "found 'nan' at",
    ),
    "gml one vertex": ("e.gml", "graph [ node [ id 0 ] ]", "no edge between two vertices"),
    "gml weight that is a name": (
        "e.gml",
        f'graph [ {NODES} edge [ source 0 target 1 weight "x" ] ]',
        "'weight' of the edge 0 - 1 must be a number, got 'x'",
    ),
    "gml negative weight": (
        "e.gml",
        f"graph [ {NODES} edge [ source 0 target 1 weight -1 ] ]",
        "must be finite and not negative",
    ),
    "metis word": ("e.metis", "2 1\n2\nx\n", "line 3: not all words are numbers"),
    "xml truncated": ("e.graphml", XML, "no element found: line 1"),
    "xml without graph": ("e.graphml", "<a/>", "not successfully read"),
    "xml hyperedge": ("e.graphml", XML + "<hyperedge/></graph></graphml>", "support hyperedges"),
    "xml nested": ("e.graphml", XML + "<graph/></graph></graphml>", "more than one graph"),
    "xml no source": (
        "e.graphml",
        XML + '<edge target="a"/></graph></graphml>',
        "an edge whose vertex is not declared",
    ),
    "xml unknown": (
        "e.graphml",
        XML + '<edge source="a" target="q"/></graph></graphml>',
        "an edge whose vertex is not declared",
    ),
    "xml entities": (
        "e.graphml",
        '<?xml version="1.0"?>\n<!DOCTYPE g [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><graphml/>',
        "has a DOCTYPE or ENTITY declaration",
    ),
    "metis header": ("e.metis", "x\n", "line 1: expected vertices, edges"),
    "metis without": ("e.metis", "% c\n", "line 1: expected vertices, edges"),
    "metis fmt": ("e.metis", "2 1 7\n", "line 1: fmt must be three digits 0 or 1"),
    "metis truncated": ("e.metis", "3 1\n2\n1\n", "lists 2 vertices, its header says 3"),
    "metis more": ("e.metis", "2 1\n2\n1\n1\n", "line 4: more lines than the 2 vertices"),
    "metis count": ("e.metis", "2 5\n2\n1\n", "lists 2 neighbours, its header says 5 edges"),
    "metis vertex": (
        "e.metis",
        "2 1\n2\n9\n",
        "line 3: a neighbour is not a vertex between 1 and 2",
    ),
    "metis pair": ("e.metis", "2 1 1\n2 5\n1\n", "line 3: a neighbour without its weight"),
    "metis weight": ("e.metis", "2 1 1\n2 5\n1 -5\n", "line 3: a weight is negative"),
    "metis huge": ("e.metis", f"{2**40} 1\n", "vertices; the maximum is 2147483647"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_file_raises_one_line_with_its_name(tmp_path, name):
    file, text, message = WRONG[name]
    path = tmp_path / file
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(GraphError, match=message) as caught:
        read(path)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_many_isolated_vertices_need_num_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "SIZES", replace(assembly.SIZES, free_nodes=100))
    path = tmp_path / "e.mtx"
    path.write_text(MTX + "101 101 1\n3 2 1\n")
    with pytest.raises(GraphError, match=r"e.mtx declares 101 vertices for 1 edges.*num_nodes=101"):
        read(path)
    assert read(path, num_nodes=101).num_isolated == 99
    with pytest.raises(GraphError, match="declares 101 vertices, num_nodes is 102"):
        read(path, num_nodes=102)
    pair = torch.tensor([[0], [100]])
    with pytest.raises(GraphError, match="edge_index declares 101 vertices for 1 edges"):
        as_graph(pair)
    assert as_graph(pair, num_nodes=101).num_nodes == 101


@pytest.mark.parametrize("keep", [5, 30, 200, -4])
def test_a_truncated_gzip_file_is_refused(tmp_path, keep):
    path = tmp_path / "edges.txt.gz"
    text = "".join(f"{i} {i * i % 97}\n" for i in range(1000))
    path.write_bytes(gzip.compress(text.encode(), mtime=0)[:keep])
    with pytest.raises(GraphError, match=r"edges.txt.gz is a (truncated|damaged) gzip file"):
        read(path)


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = tmp_path / "edges.txt.gz"
    data = bytearray(gzip.compress(b"0 1\n" * 50, mtime=0))
    data[-6] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(GraphError, match="damaged gzip file: CRC"):
        read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no graph file .*none.txt"):
        read(tmp_path / "none.txt")
    with pytest.raises(GraphError, match="is not a file"):
        read(tmp_path)
    with pytest.raises(GraphError, match=r"^\. is not a file"):
        read(".")
    with pytest.raises(FileNotFoundError, match="no graph file"):
        as_graph("nothing.txt")


@pytest.mark.parametrize("filler", [b"\n", b" ", b"# comment\n", b"1 1\n"])
def test_a_gzip_bomb_takes_time_but_no_memory(tmp_path, filler):
    path = tmp_path / "edges.txt.gz"
    size = 2**25
    path.write_bytes(gzip.compress(b"0 1\n" + filler * (size // len(filler)), mtime=0))
    tracemalloc.start()
    try:
        outcome = "read" if read(path).num_edges == 1 else "wrong"
    except GraphError as error:
        outcome = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Temporaries of a block of 1 MiB take up to 30; self-loops are records, of 8 bytes each, and
    # two copies of them with some temporaries may be there at once.
    allowed = 40 * (size // 4) if filler == b"1 1\n" else size
    assert peak < allowed
    assert outcome == (
        "edges.txt.gz, line 2: longer than 1048576 bytes" if filler == b" " else "read"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "format must be one of edges, mtx, gml, graphml, metis"),
        ({"directed": "keep"}, "directed must be one of drop, refuse"),
        ({"self_loops": "x"}, "self_loops must be one of"),
        ({"multi_edges": "x"}, "multi_edges must be one of"),
        ({"errors": "ignore"}, "errors must be one of raise, report"),
        ({"num_nodes": 0}, "num_nodes must be at least 1|num_nodes must be between 1"),
        ({"weights": "cost"}, "weights may name an attribute in GML and GraphML"),
        ({"format": "gml", "num_nodes": 3}, "num_nodes cannot be used with gml"),
        ({"format": "gml", "errors": "report"}, 'errors must be "raise" for gml'),
    ],
)
def test_wrong_options_name_the_argument(tmp_path, options, message):
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n")
    with pytest.raises(ValueError, match=message):
        read(path, **options)


@pytest.mark.parametrize("text", ["\n" * 60_000, "graph " * 10_000, "0 1 " + "1" * 900_000 + "x\n"])
def test_no_text_takes_more_than_linear_time(tmp_path, text):
    path = tmp_path / "edges.txt"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(GraphError):
        read(path)
    # In processor time, which other processes do not change, quadratic searches take over 10 s.
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: graphs.fit(ring(), models="erdos_renyi"), "models must be a sequence of names"),
        (lambda: graphs.configuration_model([1.5, 0.5]), "degrees must be whole numbers"),
        (lambda: graphs.stochastic_block_model(3, probabilities=0.1), "sizes must be integers"),
        (lambda: graphs.heat_trace(ring(), times="a"), "times must be numbers or a tensor"),
        (lambda: ring().subgraph([2, 2]), "nodes must be distinct, got 2 more than once"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(call, match):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def ring():
    return graphs.watts_strogatz(20, num_neighbors=4, p=0.1)
