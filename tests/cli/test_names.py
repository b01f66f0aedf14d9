"""Results of other weights, data and options lie beside each other."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.own import OWN, ritz, stopping_after
from torch import nn

from ritz.cli import landscape, sharpness, spectrum
from ritz.cli._measurement import LONGEST, Measurement
from ritz.training import TrainingConfig
from ritz.training._run_folder import RunConfig

FEW = ["--steps", "4"]
COMMANDS = {
    "spectrum": FEW,
    "sharpness": [*FEW, "--probes", "2", "--matrix", "ggn"],
    "landscape": ["--points", "3", "--directions", "random", "--plane"],
}
FILES = {
    "spectrum": ("spectrum-hessian-eval{}-steps4.safetensors", "spectrum{}-steps4.png"),
    "sharpness": ("sharpness-ggn{}-steps4-probes2.safetensors",),
    "landscape": ("landscape-random{}-points3.safetensors", "landscape-random{}-points3.png",
                  "plane-random{}-points3.safetensors", "plane-random{}-points3.png"),
}  # fmt: skip
AVERAGE, TEST, TRAIN = ["--average"], ["--split", "test"], ["--batch-norm", "train"]


@pytest.mark.parametrize(
    ("command", "variants"),
    [
        ("spectrum", {"": [], "-average": AVERAGE, "-test": TEST, "-average-test": AVERAGE + TEST}),
        ("sharpness", {"": ["--split", "train"], "-train": TRAIN, "-average-test": AVERAGE + TEST}),
        ("landscape", {"": [], "-train": TRAIN, "-average": AVERAGE}),
    ],
)
def test_variants_of_a_command_write_different_files(here, finished, tmp_path, command, variants):
    names = set()
    for ending, options in variants.items():
        assert (
            ritz(command, "run", *OWN, *COMMANDS[command], *options, "--json", "--out", tmp_path)
            == 0
        )
        names |= {name.format(ending) for name in FILES[command]}
        assert {path.name for path in tmp_path.iterdir()} == names
    contents = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize(
    ("weights", "ending"),
    [("average", "-average"), ("checkpoint", ""), ("weights", ""), ("epoch-0002", "-epoch-0002")],
)
def test_the_name_mentions_weights_other_than_the_last(here, finished, tmp_path, weights, ending):
    run = shutil.copytree(finished, tmp_path / "run")
    if weights == "epoch-0002":
        shutil.copy(run / "weights.safetensors", run / "epoch-0002.safetensors")
    before = set(run.iterdir())
    assert (
        ritz("sharpness", run / f"{weights}.safetensors", *OWN, *COMMANDS["sharpness"], "--json")
        == 0
    )
    name = FILES["sharpness"][0].format(ending)
    assert set(run.iterdir()) - before == {run / name}


def test_interrupted_variants_resume_from_separate_states(here, finished, tmp_path, monkeypatch):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    command = ["spectrum", "run", *OWN, "--steps", "12", "--save-interval", "0", "--json", "--out"]
    variants = ([], AVERAGE + TEST)
    for options in variants:
        assert ritz(*command, whole, *options) == 0
        with stopping_after(7, "ritz.spectra.lanczos", monkeypatch):
            assert ritz(*command, torn, *options) == 1
    states = len(list(torn.glob(".*.state")))
    for left, options in enumerate(reversed(variants)):
        assert len(list(torn.glob(".*.state"))) == states - left
        assert ritz(*command, torn, *options) == 0
    assert {p.name: p.read_bytes() for p in torn.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


MADE = RunConfig(model="net", data="digits", data_options={"rows": 20},
                 training=TrainingConfig(batch_size=16))  # fmt: skip
NET = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def name(command, result, *leading, config=MADE, made=MADE, weights="weights", net=NET, **options):
    """Return the name of a result of a command."""
    run = SimpleNamespace(
        config=config, made=made, model=net, weights=Path(f"{weights}.safetensors")
    )
    chosen = command.Options(source=Path("run"), **options)
    return Measurement(run, chosen, Path("run")).name(result, *leading)


def test_a_command_with_default_options_has_a_short_name():
    assert name(sharpness, "sharpness", "matrix", "batch_norm") == "sharpness"
    assert name(landscape, "plane", "directions", "batch_norm") == "plane"
    assert name(spectrum, "spectrum", "matrix", "batch_norm") == "spectrum"


def test_the_name_mentions_every_option_that_is_not_the_default_in_order():
    options = {"steps": 31, "distance": 2.5, "points": 5, "directions": "filter"}
    network = {"batch_norm": "train", "samples": 50, "precision": "float64", "seed": 3}
    leading = ("directions", "batch_norm")
    assert (
        name(landscape, "landscape", *leading, weights="average", **options, **network)
        == "landscape-filter-train-average-steps31-distance2.5-points5-samples50-float64-seed3"
    )
    options = {"split": "test", "steps": 7, "vectors": True}
    leading = ("matrix", "batch_norm")
    assert name(spectrum, "spectrum", *leading, batch_norm="both", **options) == (
        "spectrum-eval-train-test-steps7-vectors"
    )
    assert name(spectrum, "spectrum", *leading, matrix="both", **options) == (
        "spectrum-hessian-ggn-test-steps7-vectors"
    )


def test_options_that_no_result_depends_on_are_not_mentioned():
    options = {"plane": True, "picture": "pdf", "json": True, "device": "cpu"}
    assert name(landscape, "landscape", **options) == "landscape"


def test_whole_numbers_have_no_decimal_point():
    assert name(landscape, "landscape", distance=2.0) == "landscape-distance2"


def test_a_model_without_batch_norm_has_no_mode_in_its_name():
    net = nn.Linear(2, 2)
    assert name(landscape, "landscape", "batch_norm", batch_norm="train", net=net) == "landscape"


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"data": "mnist", "data_options": {}}, "mnist"),
        ({"data_options": {"file": "./my story.txt"}}, "digits-file=._my_story.txt"),
        ({"data_options": {}}, "digits"),  # the run had options
        ({"model": "own:net", "model_options": {"hidden": [64, 32]}}, "own_net-hidden=64,32"),
        ({"loss": "mse"}, "mse"),
        ({"training": TrainingConfig(batch_size=32)}, "batch32"),
    ],
)
def test_the_name_mentions_differences_from_the_run(changes, ending):
    config = replace(MADE, **changes)
    assert name(sharpness, "sharpness", config=config) == f"sharpness-{ending}"


def test_without_a_run_the_name_mentions_model_and_data():
    made, config = RunConfig(model="", data=""), RunConfig(model="m:net", data="d:load")
    assert name(spectrum, "spectrum", made=made, config=config) == "spectrum-m_net-d_load"


def test_long_names_are_cut_and_stay_different():
    names = set()
    for path in ("x" * 300 + "1", "x" * 300 + "2", "ж" * 300):
        config = replace(MADE, data_options={"file": path})
        names.add(name(sharpness, "sharpness", config=config))
    assert len(names) == 3
    assert all(len(one.encode()) <= LONGEST for one in names)
