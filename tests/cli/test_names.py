"""Results of other weights and other data lie beside each other."""

import shutil

import pytest
from cli.own import ritz, stopping_after

COMMANDS = {
    "spectrum": ["--steps", "4"],
    "sharpness": ["--steps", "4", "--probes", "2", "--matrix", "ggn", "--batch-norm", "eval"],
    "landscape": ["--points", "3", "--directions", "random", "--plane"],
}
FILES = {
    "spectrum": ("spectrum-hessian-eval{}.safetensors", "spectrum{}.png"),
    "sharpness": ("sharpness{}.safetensors",),
    "landscape": ("landscape{}.safetensors", "landscape{}.png", "plane{}.safetensors",
                  "plane{}.png"),
}  # fmt: skip
AVERAGE, TEST = ["--average"], ["--split", "test"]


@pytest.mark.parametrize(
    ("command", "variants"),
    [
        ("spectrum", {"": [], "-average": AVERAGE, "-test": TEST, "-average-test": AVERAGE + TEST}),
        ("sharpness", {"": ["--split", "train"], "-average-test": AVERAGE + TEST}),
        ("landscape", {"": [], "-average": AVERAGE}),
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
    assert set(run.iterdir()) - before == {run / f"sharpness{ending}.safetensors"}


def test_variants_that_were_stopped_go_on_from_their_own_states(
    here, finished, tmp_path, monkeypatch
):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    command = ["spectrum", "run", "--steps", "12", "--save-interval", "0", "--json", "--out"]
    variants = ([], AVERAGE, AVERAGE + TEST)
    for options in variants:
        assert ritz(*command, whole, *options) == 0
        with stopping_after(7, "ritz.cli.spectrum.lanczos", monkeypatch):
            assert ritz(*command, torn, *options) == 1
    states = len(list(torn.glob(".*.state")))
    for left, options in enumerate(reversed(variants)):
        assert len(list(torn.glob(".*.state"))) == states - left
        assert ritz(*command, torn, *options) == 0
    assert {p.name: p.read_bytes() for p in torn.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }
