import json

import pytest
from cli.own import ritz

import ritz as library
from ritz.measures import Landscape, Landscape2d, Sharpness

FEW = ["--steps", "6"]


def test_sharpness_of_a_run_in_both_modes(here, finished, tmp_path, capsys):
    assert ritz("sharpness", "run", *FEW, "--probes", "2", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "spectral norm" in out
    assert "Lanczos" in err
    found = library.load(tmp_path / "sharpness.safetensors")
    assert isinstance(found, Sharpness)
    assert [(row.kind, row.batch_norm) for row in found.rows] == [
        (kind, mode) for mode in ("eval", "train") for kind in ("hessian", "ggn")
    ]


def test_sharpness_of_one_matrix_for_machines(here, finished, tmp_path, capsys):
    arguments = ["--matrix", "ggn", "--batch-norm", "train", "--probes", "2", "--average"]
    assert ritz("sharpness", "run", *FEW, *arguments, "--json", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["result"]["sharpness"]["rows"]
    assert err == ""
    assert [(row["kind"], row["batch_norm"]) for row in rows] == [("ggn", "train")]


def test_a_landscape_with_its_plane_and_test_data(here, finished, tmp_path, capsys):
    arguments = ["--points", "3", "--plane", "--batch-norm", "recomputed", "--picture", "svg"]
    assert ritz("landscape", "run", *FEW, *arguments, "--out", tmp_path) == 0
    assert "Landscape of" in capsys.readouterr().out
    lines, plane = (
        library.load(tmp_path / f"{name}.safetensors") for name in ("landscape", "plane")
    )
    assert isinstance(lines, Landscape)
    assert isinstance(plane, Landscape2d)
    assert lines.batch_norm == "recomputed"
    assert lines.test_loss.shape == (3, 3)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".svg"}


@pytest.mark.parametrize("kind", ["random", "filter"])
def test_directions_that_are_drawn(here, finished, tmp_path, capsys, kind):
    arguments = ["--points", "3", "--directions", kind, "--json"]
    assert ritz("landscape", "run", *arguments, "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["result"]["landscape"]
    assert err == ""
    assert found["names"] == [f"{kind} direction 1", f"{kind} direction 2"]


def test_without_matplotlib_the_numbers_are_written_all_the_same(
    here, finished, tmp_path, monkeypatch
):
    real = __import__("importlib").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert ritz("landscape", "run", "--points", "3", "--json", *FEW, "--out", tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["landscape.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["landscape", "run", "--points", "1"], "--points must be at least 2, got 1"),
        (["landscape", "run", "--distance", "-1"], "--distance must be at least 0.0, got -1.0"),
        (["landscape", "run", "--directions", "up"], "Invalid value for '--directions'"),
        (["landscape", "elsewhere"], "no such folder or file: elsewhere"),
        (["sharpness", "run", "--probes", "0"], "--probes must be at least 1, got 0"),
        (["sharpness", "run", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["sharpness", "run", "--steps", "5000"], "num_steps must be between 1 and 51, got 5000"),
        (["sharpness", "run", "--model", "own_model:smooth"], "is of another architecture"),
        (["sharpness", "elsewhere"], "no such folder or file: elsewhere"),
    ],
)
def test_bad_input_is_one_line(here, finished, refused, arguments, line):
    assert line in refused(*arguments)
