"""Results of other weights, data and options lie beside each other."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.own import ritz, stopping_after

from ritz.cli import landscape, sharpness, spectrum
from ritz.cli._session import LONGEST, Choice, Names
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
        assert ritz(command, "run", *COMMANDS[command], *options, "--json", "--out", tmp_path) == 0
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
    assert ritz("sharpness", run / f"{weights}.safetensors", *COMMANDS["sharpness"], "--json") == 0
    name = FILES["sharpness"][0].format(ending)
    assert set(run.iterdir()) - before == {run / name}


def test_variants_that_were_stopped_go_on_from_their_own_states(
    here, finished, tmp_path, monkeypatch
):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    command = ["spectrum", "run", "--steps", "12", "--save-interval", "0", "--json", "--out"]
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


def opened(*, config=MADE, made=MADE, weights="weights", has_batch_norm=True, **choice):
    """What names depend on of an opened run."""
    return SimpleNamespace(
        choice=Choice(source=Path("run"), **choice),
        made=made,
        config=config,
        weights=Path(f"{weights}.safetensors"),
        has_batch_norm=has_batch_norm,
    )


def test_defaults_have_the_short_name():
    options = {"split": "train", "steps": None, "probes": 8}
    names = Names(sharpness.command, opened(), **options)
    assert names("sharpness", matrix="both", batch_norm="both") == "sharpness"
    options = {"steps": 30, "distance": 1.0, "points": 21}
    names = Names(landscape.command, opened(), **options)
    assert names("plane", directions="ritz", batch_norm="eval") == "plane"
    names = Names(spectrum.command, opened(), split="train", steps=100, vectors=False)
    assert names("spectrum", matrix="hessian", batch_norm="eval") == "spectrum"


def test_every_option_is_told_in_its_order():
    run = opened(weights="average", samples=50, precision="float64", seed=3)
    names = Names(landscape.command, run, steps=31, distance=2.5, points=5)
    name = names("landscape", directions="filter", batch_norm="train")
    assert name == (
        "landscape-filter-train-average-steps31-distance2.5-points5-samples50-float64-seed3"
    )
    names = Names(spectrum.command, opened(), split="test", steps=7, vectors=True)
    assert names("spectrum", matrix="hessian", batch_norm="both") == (
        "spectrum-eval-train-test-steps7-vectors"
    )
    assert names("spectrum", matrix="both", batch_norm="eval") == (
        "spectrum-hessian-ggn-test-steps7-vectors"
    )


def test_whole_numbers_have_no_point():
    names = Names(landscape.command, opened(), distance=2.0)
    assert names("landscape") == "landscape-distance2"


def test_a_mode_says_nothing_of_a_model_without_batch_norm():
    names = Names(landscape.command, opened(has_batch_norm=False))
    assert names("landscape", batch_norm="train") == "landscape"


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
def test_what_the_run_was_not_made_with_is_told(changes, ending):
    names = Names(sharpness.command, opened(config=replace(MADE, **changes)))
    assert names("sharpness") == f"sharpness-{ending}"


def test_where_no_run_says_so_model_and_data_are_told():
    run = opened(made=RunConfig(model="", data=""), config=RunConfig(model="m:net", data="d:load"))
    assert Names(spectrum.command, run)("spectrum") == "spectrum-m_net-d_load"


def test_long_names_are_cut_and_still_tell_the_files_apart():
    found = set()
    for path in ("x" * 300 + "1", "x" * 300 + "2", "ж" * 300):
        config = replace(MADE, data_options={"file": path})
        name = Names(sharpness.command, opened(config=config))("sharpness")
        assert len(name.encode()) <= LONGEST
        found.add(name)
    assert len(found) == 3
