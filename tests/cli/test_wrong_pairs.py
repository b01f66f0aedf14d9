"""Models, weights, data and losses that do not go together: one line that says which."""

import json
import sys

import pytest
import torch
from cli.own import OWN, ritz
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize("command", ["spectrum", "sharpness", "landscape"])
def test_weights_that_are_not_finite_are_named(here, finished, tmp_path, refused, command):
    weights = load_file(finished / "weights.safetensors")
    weights["1.weight"][2, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    save_file(weights, tmp_path / "weights.safetensors")
    (tmp_path / "run.json").write_bytes((finished / "run.json").read_bytes())
    line = refused(command, tmp_path, *OWN)
    assert "parameter '1.weight' must be finite, got 3 NaN or Inf of 24 entries" in line


def test_a_model_that_returns_its_loss_has_no_gauss_newton_matrix(here, tmp_path, refused, capsys):
    run = tmp_path / "run"
    loss = ["--model", "own_model:WithLoss", "--data", "own_data:named", "--loss", "model"]
    assert ritz("train", *loss, "--epochs", "1", "--out", run, "--json") == 0
    for arguments in (["sharpness", run, *loss], ["spectrum", run, *loss, "--matrix", "ggn"]):
        line = refused(*arguments)
        assert "with --loss model it returns only the loss: give --matrix hessian" in line
    few = [*loss, "--matrix", "hessian", "--steps", "3", "--json"]
    assert ritz("sharpness", run, "--probes", "2", *few) == 0
    assert ritz("spectrum", run, *few) == 0


PAIRS = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def arrays(rows=48, targets=48, kind="float32"):
    values = np.arange(6.0 * rows).reshape(-1, 6).astype(kind) % 7 / 7
    return values[::-1], np.arange(targets) % 3

def read_only():
    x, y = arrays()
    y.flags.writeable = False
    return {"train": (x, y), "test": (x, y)}

def empty():
    return arrays(0, 0)

def words():
    return np.array(["a", "b"], dtype=object), np.arange(2)

def a_list():
    return arrays()[0], [0, 1, 2] * 16

def one():
    return torch.zeros(4, 6)

def nothing():
    arrays()

def short():
    x, y = arrays()
    return x, y.astype("int32")

def no_batches():
    return []

class Failing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise OSError("no such image")

def failing():
    return DataLoader(Failing(), batch_size=2)

def net():
    return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))

def wide():
    return nn.Linear(7, 3)

def two(first=6):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(first, 3)

        def forward(self, x, mask):
            return self.layer(x)

    return Two()
"""


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    (tmp_path / "pairs.py").write_text(PAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("pairs", None)


def train(model, data, *options):
    return ["train", "--model", model, "--data", data, "--epochs", "1", "--out", "run", *options]


WATCH = ["--watch", "1"]
MANY = "train data must be tensors of the same length, got [48, 40]"
CASES = [
    ("lstm", "digits", [], "model lstm failed on data digits, with inputs of shape (2, 1, "
     "8, 8), float32: "),
    ("pairs:wide", "pairs:arrays", [], "model pairs:wide failed on data pairs:arrays, with "
     "inputs of shape (2, 6), float32: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ("pairs:two", "pairs:arrays", [], "TypeError: "),
    ("pairs:net", "pairs:arrays", ["--set-data", "kind=float64"], "with inputs of shape (2, 6), "
     "float64: RuntimeError: mat1 and mat2 must have the same dtype"),
    ("pairs:net", "pairs:arrays", ["--set-data", "kind=float64"], "; convert inputs by "
     '.float(), or .astype("float32")'),
    ("pairs:net", "pairs:nothing", [], "data pairs:nothing: train data must be (inputs, targets)"),
    ("pairs:net", "pairs:short", [], "the targets of the data pairs:short must be int64 or uint8 "
     "for cross-entropy, got int32"),
    ("pairs:net", "pairs:arrays", ["--set-data", "targets=40"], MANY),
    ("pairs:net", "pairs:arrays", ["--set-data", "targets=40", *WATCH], MANY),
    ("pairs:net", "pairs:empty", WATCH, "data pairs:empty: train data must have"),
    ("pairs:net", "pairs:words", [], "numeric dtype of torch, got an array of object"),
    ("pairs:net", "pairs:a_list", [], "train data must be (inputs, targets), both tensors or "
     "arrays, a dataset, a loader, or have batches(), got Tensor"),
    ("pairs:net", "pairs:one", [], "got Tensor"),
    ("pairs:net", "pairs:no_batches", [], "train data must not be empty"),
    ("pairs:net", "pairs:failing", [], "reading the first samples of data pairs:failing failed: "
     "OSError: no such image"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "options", "line"),
    CASES,
    ids=[f"{i}-{model}-{data}" for i, (model, data, *_) in enumerate(CASES)],
)
def test_model_and_data_that_do_not_fit_are_named_and_nothing_is_written(
    pairs, refused, model, data, options, line
):
    assert line in refused(*train(model, data, *options, "--json"))
    assert list(pairs.glob("run/*")) == []


def test_text_segments_too_long_for_the_model_are_described(pairs, refused):
    (pairs / "story.txt").write_text("once upon a time there was " * 400)
    options = ["--set-data", "file=./story.txt", "--set-data", "length=300"]
    line = refused(*train("gpt", "text", *options, "--batch-size", "1", "--json"))
    assert "model gpt failed on data text, with inputs of shape (1, 300), int64: " in line


@pytest.mark.parametrize("data", ["arrays", "read_only"])
def test_read_only_and_reversed_arrays_are_accepted(pairs, capsys, data):
    """Whether their strides are negative, and whether they may be written."""
    assert ritz(*train("pairs:net", f"pairs:{data}", "--json", *WATCH)) == 0
    assert ("test" in capsys.readouterr().out) == (data == "read_only")
    names = ["--model", "pairs:net", "--data", f"pairs:{data}"]
    assert ritz("spectrum", "run", *names, "--steps", "3", "--json") == 0
    assert "48 samples" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["spectrum", "sharpness", "landscape"])
def test_measuring_on_data_that_do_not_fit_the_model_is_refused(pairs, refused, capsys, command):
    assert ritz(*train("pairs:net", "pairs:arrays", "--json")) == 0
    line = refused(command, "run", "--model", "pairs:net", "--data", "digits")
    assert "model pairs:net failed on data digits, with inputs of shape (2, 1, 8, 8)" in line


def test_measuring_on_labels_that_do_not_fit_the_loss_is_refused(pairs, refused, capsys):
    assert ritz(*train("pairs:net", "pairs:arrays", "--json")) == 0
    assert "must be int64 or uint8" in refused(
        "spectrum", "run", "--model", "pairs:net", "--data", "pairs:short"
    )


def test_a_relative_path_of_the_data_is_stored_as_absolute(pairs, monkeypatch, capsys):
    (pairs / "story.txt").write_text("once upon a time there was " * 8)
    small = ["--set-model", "hidden=4", "--set-model", "width=4", "--set-model", "depth=1",
             "--batch-size", "4"]  # fmt: skip
    options = ["--set-data", "file=./story.txt", "--set-data", "length=2", *small]
    assert ritz(*train("lstm", "text", *options, "--json")) == 0
    made = json.loads((pairs / "run" / "run.json").read_text())
    assert made["data_options"] == {"file": str((pairs / "story.txt").resolve()), "length": 2}
    (pairs / "away").mkdir()
    monkeypatch.chdir(pairs / "away")
    assert ritz("spectrum", pairs / "run", "--steps", "2", "--json") == 0
