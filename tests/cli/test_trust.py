"""A run folder is data: code that it names is imported only if the command line repeats it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from cli.own import ritz

SOURCE = "from torch import nn\n\ndef net(**options):\n    return nn.Linear(64, 10)\n"
DATA = """
import torch

def load():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8)
"""
NAMES = {"model": "net_of_mine:net", "data": "data_of_mine:load"}
REPEATED = ["--model", "net_of_mine:net", "--data", "data_of_mine:load"]


@pytest.fixture
def mark(tmp_path):
    """A file that exists once the code of a run was imported or called."""
    return tmp_path / "ran"


@pytest.fixture
def work(tmp_path, mark, monkeypatch):
    """The current folder of a user, with a model that leaves a mark when it is imported."""
    here = tmp_path / "work"
    here.mkdir()
    touch = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (here / "net_of_mine.py").write_text(touch + SOURCE)
    (here / "data_of_mine.py").write_text(DATA)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    yield here
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]


def write_run(folder, **names):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__), folder / "weights.safetensors")  # never read
    (folder / "run.json").write_text(json.dumps({"model": "mlp", "data": "digits"} | names))
    return folder


@pytest.mark.parametrize("command", ["spectrum", "sharpness", "landscape"])
def test_code_named_by_a_run_is_not_executed(work, mark, refused, command):
    run = write_run(work / "run", **NAMES)
    assert refused(command, run) == (
        f"ritz: {run}/run.json refers to user-defined code, which is imported only if the command "
        "names it: add "
        "--model net_of_mine:net --data data_of_mine:load\n"
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    ("names", "repeat"),
    [
        ({"model": "os:system", "model_options": {"command": "touch MARK"}}, "--model os:system"),
        (
            {"data": "subprocess:check_call", "data_options": {"args": ["touch", "MARK"]}},
            "--data subprocess:check_call",
        ),
        ({"loss": "os:abort"}, "--loss os:abort"),
        ({"model": "net_of_mine:net"}, "--model net_of_mine:net"),
    ],
)
def test_model_data_and_loss_named_by_a_run_are_not_imported(work, mark, refused, names, repeat):
    text = json.dumps(names).replace("MARK", str(mark))
    line = refused("spectrum", write_run(work / "run", **json.loads(text)))
    assert line.endswith(f"names it: add {repeat}\n")
    assert not mark.exists()


def test_only_missing_names_have_to_be_repeated(work, mark, refused):
    run = write_run(work / "run", **NAMES)
    line = refused("spectrum", run, "--data", "data_of_mine:load")
    assert line.endswith("add --model net_of_mine:net\n")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["net:net; rm -rf .", "$(touch x):net", ":net", "a b:net", "x:"])
def test_a_name_that_could_harm_a_shell_is_refused(work, refused, name):
    line = refused("spectrum", write_run(work / "run", model=name))
    assert line == f"ritz: {name!r} must be of the form module:factory\n"


def test_a_run_is_measured_if_the_command_repeats_its_names(work, capsys):
    few = ["--epochs", "1", "--out", "runs/x", "--json"]
    assert ritz("train", *REPEATED, *few) == 0
    assert ritz("spectrum", "runs/x", *REPEATED, "--steps", "2", "--json") == 0
    # Registered names run no code of the user, so another data set needs no more than its name.
    assert ritz("spectrum", "runs/x", "--model", "net_of_mine:net", "--data", "digits", "--json",
                "--steps", "2") == 2  # fmt: skip
    assert "failed on data digits" in capsys.readouterr().err


def test_an_unknown_module_suggests_a_similar_one(work, refused):
    line = refused("spectrum", write_run(work / "run"), "--model", "net_of_mina:net")
    assert "no module 'net_of_mina' in" in line
    assert "did you mean net_of_mine" in line


@pytest.mark.parametrize("options", [{"hidden": [10**6, 10**6]}, {"hidden": [9] * 10**5}])
def test_a_run_whose_model_is_larger_than_its_weights_is_refused(work, refused, options):
    line = refused("spectrum", write_run(work / "run", model="mlp", model_options=options))

    assert "run.json describes a model that is larger than" in line


@pytest.mark.parametrize(
    "names",
    [
        {"model": 5},
        {"data": ["digits"]},
        {"loss": None},
        {"model_options": "width"},
        {"data_dir": 3},
        {"training": {"seed": "x"}},
        {"training": {"optimizer": 7}},
        {"training": {"drop_last": "yes"}},
        {"training": {"keep": 5}},
        {"training": 5},
        {"unknown": 1},
    ],
)
def test_a_configuration_of_other_types_is_refused(work, refused, names):
    line = refused("spectrum", write_run(work / "run", **names))

    assert "run.json does not describe a run of ritz" in line


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model": ' * 50_000, "[]", "3", '"run"', "null"])
def test_a_configuration_that_is_no_dictionary_is_refused(work, refused, text):
    run = write_run(work / "run")
    (run / "run.json").write_text(text)

    assert "run.json does not describe a run of ritz" in refused("spectrum", run)
