import json

import pytest
import torch
from cli.own import OWN, ritz, stopping_after
from torch.nn.functional import cross_entropy

import ritz as library
from ritz.cli._measurement import merge_config
from ritz.cli._options import MeasureOptions
from ritz.measures import Landscape, Landscape2d, Sharpness
from ritz.training._run_folder import RunConfig

FEW = ["--steps", "6"]


def test_sharpness_is_measured_in_both_batch_norm_modes(here, finished, tmp_path, capsys):
    assert ritz("sharpness", "run", *OWN, *FEW, "--probes", "2", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    assert "spectral norm" in out
    assert "sharpness" in err
    found = library.load(tmp_path / "sharpness-steps6-probes2.safetensors")
    assert isinstance(found, Sharpness)
    assert [(row.matrix, row.batch_norm) for row in found.rows] == [
        (kind, mode) for mode in ("eval", "train") for kind in ("hessian", "ggn")
    ]


def test_sharpness_of_one_matrix_as_json(here, finished, tmp_path, capsys):
    arguments = ["--matrix", "ggn", "--batch-norm", "train", "--probes", "2", "--average"]
    assert ritz("sharpness", "run", *OWN, *FEW, *arguments, "--json", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["result"]["sharpness"]["rows"]
    assert err == ""
    assert [(row["matrix"], row["batch_norm"]) for row in rows] == [("ggn", "train")]


def test_a_landscape_has_a_plane_and_test_data(here, finished, tmp_path, capsys):
    arguments = ["--points", "3", "--plane", "--batch-norm", "recomputed", "--picture", "svg"]
    assert ritz("landscape", "run", *OWN, *FEW, *arguments, "--out", tmp_path) == 0
    assert "Landscape of" in capsys.readouterr().out
    lines, plane = (
        library.load(tmp_path / f"{name}-recomputed-steps6-points3.safetensors")
        for name in ("landscape", "plane")
    )
    assert isinstance(lines, Landscape)
    assert isinstance(plane, Landscape2d)
    assert lines.batch_norm == "recomputed"
    assert lines.test_loss.shape == (3, 3)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".svg"}


def test_a_budget_of_a_landscape_cuts_steps_then_points(
    here, finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("ritz.cli._measurement.LONG", 0.0)

    assert ritz("landscape", "run", *OWN, "--max-products", "60", "--out", tmp_path) == 0

    assert "20 products, 39 evaluations on" in capsys.readouterr().err
    found = library.load(tmp_path / "landscape-max_products60.safetensors")
    assert len(found.t) == 13
    assert ritz("landscape", "run", *OWN, "--max-products", "7") == 2
    assert "--max-products must be at least 8, got 7" in capsys.readouterr().err


def test_an_interrupted_landscape_resumes_to_the_same_files(here, finished, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    arguments = ["landscape", "run", *OWN, "--plane", "--points", "4", *FEW, "--json",
                 "--save-interval", "0", "--out"]  # fmt: skip
    assert ritz(*arguments, whole) == 0
    for stage in ("spectra.lanczos", "measures.landscape", "measures.landscape2d"):
        torn = tmp_path / stage
        with stopping_after(4, f"ritz.{stage}", monkeypatch):
            assert ritz(*arguments, torn) == 1
        assert list(torn.glob(".*.state"))
        assert ritz(*arguments, torn) == 0
        for path in whole.iterdir():
            assert (torn / path.name).read_bytes() == path.read_bytes(), path.name
        assert not list(torn.glob(".*"))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_ritz_directions_have_the_batch_norm_mode_of_the_landscape(here, finished, tmp_path, mode):
    from ritz.cli._factories import make_data, make_model

    arguments = ["--points", "3", "--distance", "1e-3", "--steps", "51", "--precision", "float64"]
    assert ritz("landscape", "run", *OWN, *arguments, "--batch-norm", mode, "--json",
                "--out", tmp_path) == 0  # fmt: skip
    (file,) = tmp_path.glob("*.safetensors")
    found = library.load(file)
    second = (found.loss[:, 0] + found.loss[:, 2] - 2 * found.loss[:, 1]) / 1e-6
    parts = make_data("own_data:load", data_dir=None, options={})
    model = make_model("own_model:net", parts, {})
    library.training.load_weights(model, finished / "weights.safetensors")
    risk = library.Risk(model, cross_entropy, parts.train, batch_size=16, batch_norm=mode,
                        precision="float64")  # fmt: skip
    exact = torch.linalg.eigvalsh(library.hessian(risk).dense())
    # The fourth derivative enters with 1e-6 / 12, roundoff with 1e-16 / 1e-6.
    torch.testing.assert_close(second[:2], exact[[-1, 0]], rtol=1e-4, atol=1e-6)


def test_samples_select_training_data_and_test_data_stay_whole(here, finished, tmp_path, capsys):
    arguments = ["--points", "3", "--samples", "20", *FEW, "--json", "--out", tmp_path]
    assert ritz("landscape", "run", *OWN, *arguments) == 0  # there are 16 to test on
    assert "20 samples" in json.loads(capsys.readouterr().out)["result"]["landscape"]["risk"]


@pytest.mark.parametrize("kind", ["random", "filter"])
def test_random_and_filter_directions_are_drawn(here, finished, tmp_path, capsys, kind):
    arguments = ["--points", "3", "--directions", kind, "--json"]
    assert ritz("landscape", "run", *OWN, *arguments, "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["result"]["landscape"]
    assert err == ""
    assert found["names"] == [f"{kind} direction 1", f"{kind} direction 2"]


def test_without_matplotlib_results_are_still_written(here, finished, tmp_path, monkeypatch):
    real = __import__("importlib").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert ritz("landscape", "run", *OWN, "--points", "3", "--json", *FEW, "--out", tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["landscape-steps6-points3.safetensors"]


@pytest.mark.parametrize(
    ("options", "model", "data"),
    [
        ({}, {"width": 5}, {"rows": 40}),
        ({"set_data": ["rows=24"]}, {"width": 5}, {"rows": 24}),
        ({"set_model": ["width=3"]}, {"width": 3}, {"rows": 40}),
        ({"model": "mlp", "data": "digits", "set_model": ["hidden=2"]}, {"hidden": 2}, {}),
    ],
)
def test_options_of_the_run_are_kept_only_for_its_model_and_data(tmp_path, options, model, data):
    made = RunConfig(model="own_model:net", model_options={"width": 5}, data="own_data:load",
                     data_options={"rows": 40})  # fmt: skip
    names = {"model": "own_model:net", "data": "own_data:load"}
    config = merge_config(MeasureOptions(source=tmp_path, **(names | options)), made, tmp_path)
    assert (config.model_options, config.data_options) == (model, data)


def test_repeated_names_keep_the_options_of_the_run(here, tmp_path, capsys):
    options = ["--set-model", "width=2", "--set-data", "rows=20", "--epochs", "1", "--json"]
    assert ritz("train", *OWN, *options, "--out", tmp_path) == 0
    capsys.readouterr()
    assert ritz("spectrum", tmp_path, *OWN, "--steps", "3", "--json") == 0
    assert "20 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["landscape", "run", *OWN, "--points", "1"],
            "--points must be at least 2, got 1",
        ),
        (["landscape", "run", *OWN, "--distance", "-1"], "--distance must be finite and above 0"),
        (
            ["landscape", "run", *OWN, "--distance", "0"],
            "--distance must be finite and above 0, got 0.0",
        ),
        (["landscape", "run", *OWN, "--distance", "inf"], "--distance must be finite and above 0"),
        (["landscape", "run", *OWN, "--directions", "up"], "--directions must be one of"),
        (
            ["landscape", "run", *OWN, "--save-interval", "-1"],
            "--save-interval must be at least 0.0",
        ),
        (["landscape", "elsewhere"], "no such folder or file: elsewhere"),
        (["sharpness", "run", *OWN, "--probes", "0"], "--probes must be at least 1, got 0"),
        (
            ["sharpness", "run", *OWN, "--save-interval", "-1"],
            "--save-interval must be at least 0.0",
        ),
        (["sharpness", "run", *OWN, "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (
            ["sharpness", "run", *OWN, "--steps", "5000"],
            "--steps must be between 1 and 51, got 5000",
        ),
        (["sharpness", "run", *OWN, "--model", "own_model:smooth"], "does not match the model"),
        (["sharpness", "elsewhere"], "no such folder or file: elsewhere"),
    ],
)
def test_bad_input_is_one_line(here, finished, refused, arguments, line):
    assert line in refused(*arguments)
