"""Edge lists: separators, comments, ids, weights, repeated edges, loops and directions."""

import gzip
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from calls import num_calls

from ritz.graphs import GraphError, read
from ritz.graphs._io import lines


@pytest.fixture
def written(tmp_path):
    def write(text, name="graph.txt"):
        path = tmp_path / name
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        return path

    return write


def edges(graph):
    """Edges by the names of the source, with weights."""
    coo = graph.to_scipy().tocoo()
    names = range(graph.num_nodes) if graph.names is None else graph.names.tolist()
    return {
        (names[i], names[j]): w
        for i, j, w in zip(coo.row, coo.col, coo.data, strict=True)
        if i <= j
    }


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n",
        "0\t1\n1\t2",
        "0,1\r\n1,2\r\n",
        "  0   1  \n\n\n 1 \t 2",
        "# a comment\n% another\n0 1 # to the end of the line\n1 2\n#\n",
        "\ufeff0 1\n1 2\n",
        "00 01\n1 2\n",
        "0;1\n1;2\n",
    ],
)
@pytest.mark.parametrize("name", ["graph.txt", "graph.txt.gz", "graph"])
def test_separators_comments_and_gzip_are_understood(written, text, name):
    graph = read(written(text, name))
    assert edges(graph) == {(0, 1): 1, (1, 2): 1}
    assert graph.names is None
    assert graph.intake.num_records == 2


def test_vertices_are_the_64_bit_ids_in_ascending_order(written):
    big = 2**63 - 1
    graph = read(written(f"7 {big}\n{big} 100000000000000000\n7 5\n"))
    assert graph.names.tolist() == [5, 7, 10**17, big]
    assert edges(graph) == {(5, 7): 1, (7, big): 1, (10**17, big): 1}


@pytest.mark.parametrize("digits", [1, 7, 8, 9, 15, 16, 17, 18, 19])
def test_ids_of_every_length_are_parsed(written, digits):
    ids = [10 ** (digits - 1) + k for k in (0, 3, 7)]
    graph = read(written("".join(f"{a} {b}\n" for a, b in pairwise(ids))))
    assert graph.names.tolist() == ids


def test_num_nodes_adds_isolated_vertices(written):
    graph = read(written("1 3\n"), num_nodes=6)
    assert (graph.num_nodes, graph.num_isolated) == (6, 4)
    assert graph.names is None
    with pytest.raises(GraphError, match="line 2: the vertex id '6' is not between 0 and 5"):
        read(written("1 3\n1 6\n"), num_nodes=6)


@pytest.mark.parametrize(
    "weight", ["2", "2.5", ".5", "5.", "1e-3", "+1.5E2", "0.1234567890123456789"]
)
def test_weights_are_rounded_as_python_does(written, weight):
    assert edges(read(written(f"0 1 {weight}\n1 2 3\n"))) == {(0, 1): float(weight), (1, 2): 3}


def test_a_weight_of_zero_is_no_edge_but_its_ends_are_vertices(written):
    graph = read(written("0 1 0\n1 2 3\n"))
    assert edges(graph) == {(1, 2): 3}
    assert (graph.num_nodes, graph.num_isolated, graph.intake.num_zero_weights) == (3, 1, 1)


def test_weights_that_are_all_one_make_an_unweighted_graph(written):
    assert read(written("0 1 1\n1 2 1.0\n")).weights is None


def test_the_third_column_may_be_ignored_or_required(written):
    path = written("0 1 99 -3\n1 2 98 x\n")
    assert edges(read(path, weights=False)) == {(0, 1): 1, (1, 2): 1}
    assert edges(read(path, weights=True)) == {(0, 1): 99, (1, 2): 98}
    with pytest.raises(GraphError, match=r"line 1: has 4 columns.*weights=True .--weights. if"):
        read(path)
    with pytest.raises(GraphError, match="line 1: has 2 columns, expected two vertices and a we"):
        read(written("0 1\n"), weights=True)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("merge", {(0, 1): 4, (1, 2): 2}), ("sum", {(0, 1): 8, (1, 2): 2})],
)
def test_repeated_edges_of_weighted_lists_are_merged_summed_or_refused(written, rule, expected):
    graph = read(written("0 1 1\n0 1 4\n1 0 3\n1 2 2\n"), multi_edges=rule)
    assert edges(graph) == expected
    assert (graph.intake.num_merged, graph.intake.num_reciprocal) == (2, 1)


def test_repeated_edges_of_unweighted_lists_are_merged_counted_or_refused(written):
    path = written("0 1\n0 1\n1 0\n1 2\n")
    assert edges(read(path)) == {(0, 1): 1, (1, 2): 1}
    assert edges(read(path, multi_edges="sum")) == {(0, 1): 3, (1, 2): 1}
    with pytest.raises(GraphError, match="names an edge twice: 0 - 1"):
        read(path, multi_edges="refuse")


def test_self_loops_are_dropped_kept_or_refused(written):
    path = written("5 5 2\n5 6 1\n5 5 3\n")
    assert edges(read(path)) == {(5, 6): 1}
    kept = read(path, self_loops="keep")
    assert edges(kept) == {(5, 5): 3, (5, 6): 1}
    assert (kept.num_loops, kept.num_edges) == (1, 2)
    assert kept.degrees.tolist() == [4, 1]
    assert edges(read(path, self_loops="keep", multi_edges="sum")) == {(5, 5): 5, (5, 6): 1}
    with pytest.raises(GraphError, match="2 self-loops, the first at vertex 5"):
        read(path, self_loops="refuse")


def test_a_graph_with_unweighted_self_loops_stays_unweighted(written):
    kept = read(written("0 0\n0 1\n"), self_loops="keep")
    assert kept.weights is None
    assert edges(kept) == {(0, 0): 1, (0, 1): 1}


@pytest.mark.parametrize(
    ("text", "directed"),
    [
        ("0 1\n1 2\n", False),
        ("0 1\n1 0\n1 2\n2 1\n", False),
        ("0 1\n1 0\n1 2\n", True),
        ("0 1 2\n1 0 3\n", True),
    ],
)
def test_a_list_is_directed_if_only_some_edges_have_their_reverse(written, text, directed):
    path = written(text)
    assert read(path).intake.directed == directed
    if directed:
        with pytest.raises(GraphError, match=r'graph.txt is directed.*pass directed="drop"'):
            read(path, directed="refuse")
    else:
        assert read(path, directed="refuse").num_edges == read(path).num_edges


def test_only_the_largest_component_is_returned_on_request(written):
    graph = read(written("0 1\n5 6\n6 7\n"), largest_component=True)
    assert graph.names.tolist() == [5, 6, 7]


def test_rejected_lines_are_counted_and_quoted(written):
    path = written("0 1 2\n1\n1 2 -1\n\n# no\n2 3 nan\n3 4 1\nx y z\n1 2 3 4\n0 9 9 # yes\n8 8 x")
    graph = read(path, errors="report")
    assert edges(graph) == {(0, 1): 2, (3, 4): 1, (0, 9): 9}
    assert graph.intake.num_records == 9
    assert graph.intake.num_rejected == 6
    assert graph.intake.reasons[0] == "line 2: has 1 columns, expected 3"
    assert graph.intake.reasons[2] == "line 6: the weight 'nan' is not a finite number"
    assert len(graph.intake.reasons) == 5
    assert "rejected: line 2" in str(graph)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_block_size_does_not_change_the_graph(written, monkeypatch, chunk):
    generator = np.random.default_rng(3)
    rows = generator.integers(0, 10**12, (400, 2))
    text = "".join(f"{a} {b} {a % 7 + 0.5}\n" for a, b in rows)
    path = written("# header\n" + text + "1 2 x\n")
    whole = read(path, errors="report")
    monkeypatch.setattr(lines, "CHUNK", chunk)
    pieces = read(path, errors="report")
    assert torch.equal(pieces.col, whole.col)
    assert torch.equal(pieces.weights, whole.weights)
    assert torch.equal(pieces.names, whole.names)
    assert pieces.intake == whole.intake
    assert whole.intake.reasons == ("line 402: the weight 'x' is not a finite number",)


def test_progress_reaches_the_size_of_the_file(written):
    class Watch:
        done = -1

        def start(self, label, total):
            self.label, self.total = label, total

        def update(self, done, note=""):
            self.done = done

        def finish(self):
            self.finished = True

    # Small files are counted in bytes: in KiB they would be of none.
    for count, unit, total in ((2, "bytes", 8), (2000, "bytes", 8000), (300_000, "KiB", 1171)):
        watch = Watch()
        read(written("0 1\n" * count), progress=watch)
        assert watch.label == f"reading graph.txt ({unit})"
        assert watch.done == watch.total == total
        assert watch.finished


@pytest.mark.parametrize("decimals", [0, 1, 6, 15, 17])
def test_decimal_weights_are_rounded_as_python_rounds_them(written, decimals):
    rng = random.Random(decimals)
    words = [f"{rng.random() * 9:.{decimals}f}" for _ in range(500)]

    graph = read(written("".join(f"{i} {i + 1} {word}\n" for i, word in enumerate(words))))

    matrix = graph.to_scipy()
    assert [matrix[i, i + 1] for i in range(500)] == [float(word) for word in words]


@pytest.mark.parametrize("line", ["3 4 1 .5", "3 4.5 1", "3.5 4 1", "3 4 1.5 2", "3 4 .", "3-4 1"])
def test_a_line_of_another_form_is_not_read_as_a_decimal(written, line):
    file = written("0 1 0.5\n1 2 1.5\n" + line + "\n2 3 2.5\n")

    graph = read(file, errors="report")

    assert (graph.num_edges, graph.intake.num_rejected) == (3, 1)
    assert graph.intake.reasons[0].startswith("line 3: ")


def test_a_late_invalid_line_is_named_without_reading_lines_one_by_one(written):
    clean, file = written("0 1\n" * 400_000, "clean.txt"), written("0 1\n" * 400_000 + "0 x\n")

    def refuse():
        with pytest.raises(GraphError, match=r"line 400001: the vertex id 'x' is not a whole"):
            read(file)

    assert num_calls(refuse) < num_calls(lambda: read(clean)) + 10_000


def test_one_invalid_line_in_a_hundred_costs_little_for_the_valid_ones(written):
    lines = [f"{i} {i + 1}\n" for i in range(200_000)]
    clean = written("".join(lines), "clean.txt")
    lines[50::100] = [f"{i} x{i}\n" for i in range(2000)]
    file = written("".join(lines))

    calls = num_calls(lambda: read(file, errors="report"))

    # 37 calls for each invalid line, and less than one for a valid line
    assert calls < num_calls(lambda: read(clean)) + 100 * 2000
