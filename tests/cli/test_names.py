"""Results of other weights, data and options lie beside each other."""

import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.own import OWN, ritz, stopping_after
from torch import nn

from ritz.cli import landscape, sharpness, spectrum
from ritz.cli._options import MeasureOptions
from ritz.cli._session import LONGEST, Measurement
from ritz.training import TrainingConfig
from ritz.training._workflow import RunConfig

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
def test_no_variant_of_a_command_overwrites_another(here, finished, tmp_path, command, variants):
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
def test_a_file_of_weights_is_named_unless_it_is_the_last(
    here, finished, tmp_path, weights, ending
):
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


def test_variants_that_were_stopped_go_on_from_their_own_states(
    here, finished, tmp_path, monkeypatch
):
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


def name(command, result, *, leading=None, config=MADE, made=MADE, weights="weights", net=NET,
         options=None, **common):  # fmt: skip
    """The name of a result of a command."""
    run = SimpleNamespace(
        config=config, made=made, model=net, weights=Path(f"{weights}.safetensors")
    )
    defaults = {key: p.default for key, p in signature(command.command).parameters.items()}
    session = Measurement(run, MeasureOptions(source=Path("run"), **common), Path("run"),
                          defaults, options or {})  # fmt: skip
    return session.name(result, **(leading or {}))


def test_defaults_have_the_short_name():
    options = {"split": "train", "steps": None, "probes": 8}
    leading = {"matrix": "both", "batch_norm": "both"}
    assert name(sharpness, "sharpness", leading=leading, options=options) == "sharpness"
    options = {"steps": 30, "distance": 1.0, "points": 21}
    leading = {"directions": "ritz", "batch_norm": "eval"}
    assert name(landscape, "plane", leading=leading, options=options) == "plane"
    options = {"split": "train", "steps": 100, "vectors": False}
    leading = {"matrix": "hessian", "batch_norm": "eval"}
    assert name(spectrum, "spectrum", leading=leading, options=options) == "spectrum"


def test_every_option_is_mentioned_in_its_order():
    options = {"steps": 31, "distance": 2.5, "points": 5}
    network = {"samples": 50, "precision": "float64", "seed": 3}
    leading = {"directions": "filter", "batch_norm": "train"}
    assert (
        name(landscape, "landscape", leading=leading, options=options, weights="average", **network)
        == "landscape-filter-train-average-steps31-distance2.5-points5-samples50-float64-seed3"
    )
    options = {"split": "test", "steps": 7, "vectors": True}
    leading = {"matrix": "hessian", "batch_norm": "both"}
    assert name(spectrum, "spectrum", leading=leading, options=options) == (
        "spectrum-eval-train-test-steps7-vectors"
    )
    leading = {"matrix": "both", "batch_norm": "eval"}
    assert name(spectrum, "spectrum", leading=leading, options=options) == (
        "spectrum-hessian-ggn-test-steps7-vectors"
    )


def test_whole_numbers_have_no_point():
    assert name(landscape, "landscape", options={"distance": 2.0}) == "landscape-distance2"


def test_a_model_without_batch_norm_has_no_mode_in_its_name():
    leading = {"batch_norm": "train"}
    assert name(landscape, "landscape", leading=leading, net=nn.Linear(2, 2)) == "landscape"


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
def test_differences_from_the_run_are_mentioned(changes, ending):
    config = replace(MADE, **changes)
    assert name(sharpness, "sharpness", config=config) == f"sharpness-{ending}"


def test_without_a_run_model_and_data_are_mentioned():
    made, config = RunConfig(model="", data=""), RunConfig(model="m:net", data="d:load")
    assert name(spectrum, "spectrum", made=made, config=config) == "spectrum-m_net-d_load"


def test_long_names_are_cut_and_still_tell_the_files_apart():
    names = set()
    for path in ("x" * 300 + "1", "x" * 300 + "2", "ж" * 300):
        config = replace(MADE, data_options={"file": path})
        names.add(name(sharpness, "sharpness", config=config))
    assert len(names) == 3
    assert all(len(one.encode()) <= LONGEST for one in names)
