import json

import pytest
import torch

from ritz import graphs
from ritz.cli import _app

QUICK = ["--moments", "60", "--probes", "20"]


def edge_list(path, graph, offset=0):
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.crow.diff().long())
    keep = rows < graph.col
    pairs = torch.stack([rows[keep], graph.col[keep].long()], dim=1) + offset
    path.write_text("# a comment\n" + "\n".join(f"{u}\t{v}" for u, v in pairs.tolist()) + "\n")
    return str(path)


@pytest.fixture
def blocks(tmp_path):
    graph = graphs.cluster_graph([30] * 9, degree=12, num_links=18)
    return edge_list(tmp_path / "blocks.txt", graph, offset=100)


@pytest.fixture
def random(tmp_path):
    generator = torch.Generator().manual_seed(1)
    graph = graphs.erdos_renyi(300, p=0.05, generator=generator)
    return edge_list(tmp_path / "random.txt", graph)


def test_clusters_are_printed_with_their_gap_and_error_bar(blocks, capsys):
    assert _app.run(["graph", "clusters", blocks, *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "Graph of 270 vertices" in out
    assert "\n9 clusters\n" in out
    assert "all eigenvalues were computed" in out
    assert "reading blocks.txt (bytes) [####" in err


def test_clusters_are_written_as_json_labels_and_picture(blocks, tmp_path, capsys):
    labels, picture = tmp_path / "labels.txt", tmp_path / "blocks.png"
    command = ["graph", "clusters", blocks, *QUICK, "--json", "--seed", "3"]
    assert _app.run([*command, "--labels", str(labels), "--out", str(picture)]) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    found = shown["result"]["clusters"]
    assert (found["count"], found["certified"], found["seed"]) == (9, True, 3)
    assert found["gap"][0] < found["threshold"] < found["gap"][1]
    assert shown["files"] == [str(labels), str(picture)]
    assert err == ""
    lines = [line.split("\t") for line in labels.read_text().splitlines()]
    assert [int(name) for name, _ in lines] == list(range(100, 370))
    assert [int(group) for _, group in lines] == [i // 30 for i in range(270)]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_graph_without_a_gap_gives_json_without_nan(random, tmp_path, capsys):
    labels = tmp_path / "labels.txt"
    assert _app.run(["graph", "clusters", random, *QUICK, "--json", "--labels", str(labels)]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["result"]["clusters"]
    assert found["count"] is None
    assert found["stderr"] is None
    assert found["reason"].startswith("no gap")
    assert not labels.exists()
    assert _app.run(["graph", "clusters", random, *QUICK, "--labels", str(labels)]) == 0
    assert f"{labels} was not written, because the number" in capsys.readouterr().err
    assert _app.run(["graph", "clusters", random, *QUICK, "--out", str(tmp_path / "a.svg")]) == 0
    assert "No count: no gap" in capsys.readouterr().out


def test_a_density_is_printed_and_drawn(random, tmp_path, capsys):
    picture = tmp_path / "spectrum.pdf"
    command = ["graph", "density", random, *QUICK]
    assert _app.run([*command, "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "60 moments" in out
    assert f"written: {picture}" in out
    assert picture.read_bytes().startswith(b"%PDF")
    assert _app.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["density"]
    # The trace of a normalised Laplacian is its order where no vertex is isolated.
    assert found["mean"] == pytest.approx(1.0, abs=0.01)
    assert len(found["alphas"]) == 60


def test_a_repeated_eigenvalue_does_not_flatten_the_picture(tmp_path, monkeypatch):
    # Half of the eigenvalues of a tree with many leaves are 1.
    file = edge_list(tmp_path / "tree.txt", graphs.barabasi_albert(400, num_edges=1))
    figures = []
    monkeypatch.setattr("ritz.plots.save_figure", lambda figure, out: figures.append(figure) or out)
    picture = ["--out", str(tmp_path / "tree.png")]
    assert _app.run(["graph", "density", file, *QUICK, *picture, "--json"]) == 0
    (ax,) = figures[0].axes
    assert 0 < ax.get_ylim()[1] < max(ax.lines[0].get_ydata()) / 2


def test_several_files_are_compared(blocks, random, tmp_path, capsys):
    picture = tmp_path / "likeness.png"
    command = ["graph", "compare", blocks, random, *QUICK]
    assert _app.run([*command, "--json", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["similarity"]
    assert found["names"] == ["blocks.txt", "random.txt"]
    assert found["matrix"][0][0] == 0.0
    assert found["matrix"][0][1] > 4 * found["stderr"][0][1] == 0  # small graphs are exact
    assert picture.is_file()
    assert _app.run([*command, "--measure", "jensen_shannon"]) == 0
    assert "Jensen-Shannon divergence between the spectra of 2 graphs" in capsys.readouterr().out


def test_the_model_of_a_random_graph_is_printed(tmp_path, capsys):
    generator = torch.Generator().manual_seed(1)
    graph = graphs.erdos_renyi(60, p=0.3, generator=generator)
    file, picture = edge_list(tmp_path / "er.txt", graph), tmp_path / "model.png"
    assert _app.run(["graph", "model", file, "--json", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert found["model"] == found["fits"][0]["model"]
    assert {fit["model"] for fit in found["fits"]} >= {"erdos_renyi", "barabasi_albert"}
    assert picture.is_file()


def test_the_same_seed_prints_the_same_numbers(blocks, capsys):
    texts = []
    for _ in range(2):
        assert _app.run(["graph", "clusters", blocks, *QUICK, "--json", "--seed", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("command", ["density", "clusters", "model"])
def test_bad_files_are_one_line_and_exit_code_2(command, tmp_path, capsys):
    contents = {
        "empty.txt": (b"", "empty"),
        "binary.txt": (bytes(range(256)) * 20, "binary.txt"),
        "negative.txt": (b"0 1 -2.5\n", "line 1"),
        "nan.txt": (b"0 1 1.0\n1 2 nan\n", "line 2"),
        "truncated.txt.gz": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "truncated.txt.gz"),
        "huge.txt": (b"0 99999999999999999999999\n", "64 bits"),
        "loop.txt": (b"0 0\n", "edge"),
    }
    for name, (data, words) in contents.items():
        (tmp_path / name).write_bytes(data)
        assert _app.run(["graph", command, str(tmp_path / name), "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert words in err


def test_wrong_options_are_one_line_and_exit_code_2(blocks, tmp_path, capsys):
    (tmp_path / "times.txt").write_text("0 1 2 3\n")
    times = str(tmp_path / "times.txt")
    wrong = {
        "no graph file": ["clusters", str(tmp_path / "none.txt")],
        "Invalid value for '--method'": ["clusters", blocks, "--method", "magic"],
        "--probes must be at least 2, got 1": ["clusters", blocks, "--probes", "1"],
        "--no-weights to ignore it": ["clusters", times],
        "expected two vertices and a weight": ["clusters", blocks, "--weights"],
        "Invalid value for '--self-loops'": ["density", blocks, "--self-loops", "maybe"],
        "Invalid value for '--multi-edges'": ["model", blocks, "--multi-edges", "maybe"],
        "the file of a figure must end in .png": [
            "clusters",
            blocks,
            "--out",
            str(tmp_path / "x.doc"),
        ],
        "there is no folder": ["density", blocks, "--out", str(tmp_path / "no" / "x.png")],
        "--labels must be in an existing folder": [
            "clusters",
            blocks,
            "--labels",
            "no/such/labels",
        ],
        "FILE must be given at least twice": ["compare", blocks],
        "Invalid value for '--measure'": ["compare", blocks, blocks + "", "--measure", "cosine"],
        "Invalid value for '--directed'": ["model", blocks, "--directed", "maybe"],
    }
    for words, command in wrong.items():
        assert _app.run(["graph", *command]) == 2
        err = capsys.readouterr().err
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err


def test_wrong_numbers_and_choices_are_refused_before_a_file_is_read(tmp_path, capsys):
    none = str(tmp_path / "none.txt")
    wrong = {
        "--moments must be at least 1, got 0": ["density", none, "--moments", "0"],
        "--moments must be at least 4, got 3": ["clusters", none, "--moments", "3"],
        "--moments must be at least 2, got 1": [
            "density",
            none,
            "--method",
            "kpm",
            "--moments",
            "1",
        ],
        "--probes must be at least 2, got 1": ["compare", none, none, "--probes", "1"],
        f"--seed must be between 0 and {2**32 - 1}": ["model", none, "--seed", str(2**32)],
        "Invalid value for '--method'": ["clusters", none, "--method", "magic"],
        "Invalid value for '--measure'": ["compare", none, none, "--measure", "cosine"],
    }
    for words, command in wrong.items():
        assert _app.run(["graph", *command]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_file_compared_with_itself_has_two_names(random, capsys):
    assert _app.run(["graph", "compare", random, random, *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["similarity"]
    assert found["names"] == [random, f"{random} (2)"]
    assert found["matrix"][0][1] <= 4 * found["stderr"][0][1]


def test_labels_keep_the_vertex_names_and_escape_tabs(tmp_path, capsys):
    labels = tmp_path / "labels.txt"
    file = tmp_path / "two.mtx"
    head = "%%MatrixMarket matrix coordinate pattern symmetric\n"
    file.write_text(head + "4 4 2\n2 1\n4 3\n")
    assert _app.run(["graph", "clusters", str(file), *QUICK, "--labels", str(labels)]) == 0
    assert labels.read_text() == "1\t0\n2\t0\n3\t1\n4\t1\n"
    file = tmp_path / "two.gml"
    names = ("Ann Lee", "Bo\ttab", "C", "D")
    nodes = "".join(f'node [ id {i} label "{name}" ]\n' for i, name in enumerate(names))
    edges = "edge [ source 0 target 1 ]\nedge [ source 2 target 3 ]\n"
    file.write_text(f"graph [\n{nodes}{edges}]\n")
    assert _app.run(["graph", "clusters", str(file), *QUICK, "--labels", str(labels)]) == 0
    assert labels.read_text() == "Ann Lee\t0\nBo\\ttab\t0\nC\t1\nD\t1\n"
    assert "written" in capsys.readouterr().out


def test_reading_options_are_passed_to_the_library(tmp_path, capsys):
    file = tmp_path / "four.txt"
    file.write_text("0 1 2 9\n1 2 3 9\n2 2 1 9\n1 0 2 9\n")
    command = ["graph", "density", str(file), "--moments", "4"]
    assert _app.run([*command, "--no-weights"]) == 0
    assert "2 edges, unweighted" in capsys.readouterr().out
    options = ["--weights", "--self-loops", "keep", "--multi-edges", "sum", "--nodes", "5"]
    assert _app.run([*command, *options]) == 0
    out = capsys.readouterr().out
    assert "5 vertices and 3 edges, 1 of them self-loops, weighted, 1 to 4" in out


def test_a_directed_graph_is_refused_on_request(tmp_path, capsys):
    file = tmp_path / "arcs.txt"
    file.write_text("0 1\n1 0\n1 2\n2 3\n3 0\n")
    assert _app.run(["graph", "clusters", str(file), "--directed", "refuse"]) == 2
    assert "directed" in capsys.readouterr().err
    assert _app.run(["graph", "clusters", str(file), *QUICK]) == 0
    assert "directions dropped" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["auto", "krylov", "entropic"])
def test_the_clusters_of_five_vertices_are_counted(tmp_path, capsys, method):
    file = tmp_path / "g.txt"
    file.write_text("0 1\n1 2\n2 0\n3 4\n")

    assert _app.run(["graph", "clusters", str(file), "--method", method]) == 0
    assert "2 clusters" in capsys.readouterr().out
