import math
from dataclasses import replace

import pytest
import torch

import ritz
from ritz import graphs
from ritz.studies import cluster_counts, write
from ritz.studies.cluster_counts import FIRST, METHODS, Config, run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with one of the graphs: four complete ones, so that the truth is known."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "graphs").mkdir()
    lines = [
        f"{30 * part + i} {30 * part + j}" for part in range(4) for i in range(30) for j in range(i)
    ]
    (folder / "graphs" / "ca-GrQc.txt.gz").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def result(data):
    small = Config(
        clusters=(4, 12),
        num_seeds=2,
        num_moments=60,
        num_probes=20,
        data=str(data),
        moments=(20, 40),
    )
    return run(small)


def test_the_default_method_is_exact_and_certified(result):
    assert result.errors("auto").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert bool(result.certified.all())
    assert float(result.errors("krylov").max()) == 0.0


def test_sampled_methods_reach_the_error_of_the_probes_but_the_first_minimum_does_not(result):
    for name in ("entropic", "lanczos"):
        assert bool((result.errors(name) < 4 * result.limits[:, None]).all())
    assert float(result.errors(FIRST).mean()) > 0.5


def test_limits_are_the_standard_errors_of_independent_probes(result):
    assert result.limits.tolist() == pytest.approx([math.sqrt(2 / 80), math.sqrt(2 / 240)])


def test_real_graphs_have_their_counts_and_truth(result):
    (real,) = result.real
    assert (real.name, real.num_nodes, real.truth) == ("ca-GrQc.txt.gz", 120, 4)
    assert real.default.count == 4
    # Sixteen times the variance of what probes alone leave.
    assert bool(((real.estimates - 4).abs() < 4 * math.sqrt(2 * 4 / 20)).all())
    assert real.settled


def test_the_table_has_the_published_errors(result):
    text = str(result)
    words = (
        *METHODS,
        FIRST,
        "sqrt(2/(d N_c))",
        "published lanczos",
        "settled",
        "components",
        "ca-GrQc",
    )
    for word in words:
        assert word in text


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(cluster_counts, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)


def test_mixed_graphs_are_counted_by_every_method(monkeypatch):
    monkeypatch.delenv("RITZ_DATA", raising=False)  # without the real graphs
    monkeypatch.setitem(cluster_counts.MIXED, 6, (400, 50, 90))
    config = Config(
        clusters=(2,),
        num_seeds=1,
        num_moments=50,
        num_probes=10,
        mixed=(6,),
        mixed_moments=(30, 40),
    )
    found = run(config)
    assert found.mixed["6"]["auto"].count == 6
    assert set(found.mixed["6"]) == set(found.seconds["6"]) == set(METHODS)
    assert (
        "6 clusters of mixed kinds, 400 vertices; error of the probes sqrt(2/(d N_c)) = 18.26%"
        in str(found)
    )
    assert str(found).count("fewer moments:") == 2
    for counts in found.by_moments["6"].values():
        # Four times what ten probes leave of six clusters.
        assert bool(((counts - 6).abs() < 4 * math.sqrt(2 * 6 / 10)).all())
    # One number of planted clusters is a point and has no panel of its own.
    (ax,) = cluster_counts.figure(found).axes
    assert ax.get_title(loc="left") == "Clusters of mixed kinds; the default is exact"


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_the_figure_names_graphs_without_a_gap(result):
    (real,), absent = result.real, torch.full((2,), torch.nan, dtype=torch.float64)
    half = torch.stack([absent[0], real.estimates[1]])
    rows = (real, replace(real, estimates=absent), replace(real, estimates=half))
    planted, ax = cluster_counts.figure(replace(result, real=rows)).axes
    assert labels(ax) == ["ca-GrQc", "ca-GrQc: no gap", "ca-GrQc (no gap: m = 20)"]
    assert "error of the probes" in labels(planted)


def test_wrong_settings_name_the_field():
    with pytest.raises(ValueError, match="clusters must be at least 2, got 1"):
        Config(clusters=(1,))
    with pytest.raises(ValueError, match="mixed must be of 305, 1355; got 7"):
        Config(mixed=(7,))


def test_without_a_folder_there_are_no_real_graphs(monkeypatch):
    monkeypatch.delenv("RITZ_DATA", raising=False)
    found = run(Config(clusters=(2,), num_seeds=1, num_probes=10))
    assert found.real == ()
    assert isinstance(found.counts["auto"], torch.Tensor)
    assert graphs.Graph.__name__ not in str(found)
