import networkx as nx
import pytest
import torch

import ritz
from ritz.studies import graph_likeness, write
from ritz.studies.graph_likeness import Config, misplaced, run, separation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two graphs a kind, as files: cliques, grids, hubs."""
    path = tmp_path_factory.mktemp("data")
    made = {
        "cliques1": nx.relaxed_caveman_graph(60, 8, 0.1, seed=0),
        "cliques2": nx.relaxed_caveman_graph(80, 8, 0.1, seed=1),
        "grid1": nx.grid_2d_graph(24, 24),
        "grid2": nx.grid_2d_graph(18, 30),
        "hubs1": nx.barabasi_albert_graph(500, 8, seed=0),
        "hubs2": nx.barabasi_albert_graph(600, 8, seed=1),
    }
    for name, graph in made.items():
        plain = nx.convert_node_labels_to_integers(graph)
        nx.write_edgelist(plain, path / f"{name}.txt", data=False)
    return path


@pytest.fixture(scope="module")
def config(folder):
    return Config(
        citation=("cliques1.txt", "cliques2.txt"),
        road=("grid1.txt", "grid2.txt"),
        social=("hubs1.txt", "hubs2.txt"),
        num_moments=20,
        num_probes=20,
        other_moments=(10,),
        data=str(folder),
    )


@pytest.fixture(scope="module")
def result(config):
    return run(config)


def test_graphs_of_one_kind_are_nearer_than_graphs_of_two_kinds(result):
    for kind in ("citation", "road", "social"):
        found = separation(result.likeness["symmetric_kl"].matrix, result.kinds, kind)
        assert found["largest_within"] < found["least_between"]
        assert found["ordered"] == 1


def test_halves_are_compared_with_each_other_and_with_other_graphs(result):
    assert result.apart.shape == result.others.shape == (6,)
    assert bool((result.apart > 0).all())
    assert result.halves.matrix.shape == (12, 12)
    # Those of cliques and of hubs find no nearer graph of another kind.
    rows = result.halves.matrix
    assert float(rows[0, 1]) < float(rows[0, 4:].min())


def test_separation_counts_each_pair_once():
    matrix = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [2.0, 0.5, 0.0]])
    found = separation(matrix, ("a", "a", "b"), "a")
    expected = {"within": 1, "largest_within": 1, "between": 1.25, "least_between": 0.5}
    assert found == expected | {"ordered": 0.5}
    with pytest.raises(ValueError, match="kind must have two graphs, and"):
        separation(matrix, ("a", "a", "b"), "b")


def test_kinds_are_separated_after_every_preprocessing(result):
    titles = {"10 moments", "largest component", "largest component without trees"}
    assert set(result.treated) == titles
    for matrix in result.treated.values():
        assert separation(matrix, result.kinds, "road")["ordered"] == 1
    assert "another kind than to one of the same kind:\n  none" in str(result)
    assert "The published kinds alone:\n  citation" in str(result)


def test_graphs_that_are_nearer_to_another_kind_are_named():
    matrix = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.5], [2.0, 0.5, 0.0]])
    assert misplaced(matrix, ("x", "y", "z"), ("a", "a", "b")) == ["y: z before x (1)"]


def test_attached_trees_are_removed():
    lollipop = ritz.graphs.as_graph(nx.lollipop_graph(5, 4))
    assert graph_likeness._without_trees(lollipop).num_nodes == 5
    path = ritz.graphs.as_graph(nx.path_graph(6))
    assert graph_likeness._without_trees(path).num_nodes == 6


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(graph_likeness, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)


def test_a_missing_data_file_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("RITZ_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"give data= \(--set data=FOLDER\), or set RITZ_DATA"
    ):
        run(Config())
    with pytest.raises(FileNotFoundError, match="no file 'graphs/ca-AstroPh"):
        run(Config(data=str(tmp_path)))
    with pytest.raises(ValueError, match="must together name at least two graphs"):
        Config(citation=(), road=(), social=())
