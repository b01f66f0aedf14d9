"""Wrong inputs, each answered by one line that says what to do; nothing is changed."""

import sys

import numpy as np
import pytest
import torch
from cli.own import ritz
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ritz import Risk, data, hessian, lanczos, load, models, plots, trace
from ritz.training import evaluate, fit, load_weights

SOURCE = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

X = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (100,), generator=torch.Generator().manual_seed(1))

def net(): return nn.Linear(2, 3)
def wide(): return nn.Linear(5, 3)
def flat(): return nn.Sequential(nn.Linear(2, 3), nn.Flatten(0))
def broken(): raise RuntimeError("no such layer")
def number(): return 3
def needs(width): return nn.Linear(2, width)

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x), x

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x)

def good(): return X, Y
def lists(): return [X.tolist(), Y.tolist()]
def column(): return X, Y[:, None]
def floats(): return X, Y.float()
def short_labels(): return X, Y.to(torch.int16)
def half(): return X.half(), Y
def double(): return X.double(), Y
def unequal(): return X, Y[:50]
def nan(): return X * float("nan"), Y
def generator():
    for _ in range(5):
        yield X, Y
def five(): return tuple((X, Y) for _ in range(5))
def empty(): return X[:0], Y[:0]
def nothing(): return None
def text(): return "cifar"
def words(): return np.array(["a", "b"]), np.arange(2)
def label_7():
    wrong = Y.clone()
    wrong[50] = 7
    return X, wrong
def test_label_7(): return (X, Y), label_7()
def validation_label_7(): return (X, Y), label_7(), (X, Y)
def label(): return [{"x": X, "label": Y}]
def extra(): return [{"x": X, "labels": Y, "name": ["a"] * 100}]
def keys(): return {"training": (X, Y)}

class Failing(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): raise OSError("no such image")

def failing(): return DataLoader(Failing(), batch_size=2)
def workers(): return DataLoader(Failing(), batch_size=2, num_workers=1)

def vector_loss(outputs, target): return (outputs - 1).sum(1)
def number_loss(outputs, target): return 3.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module of wrong things."""
    (tmp_path / "wrong.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("RITZ_DATA", raising=False)
    yield tmp_path
    sys.modules.pop("wrong", None)


def train(*options, model="wrong:net", source="wrong:good"):
    usual = ["--model", model, "--data", source, "--epochs", "1", "--out", "run", "--json"]
    return ["train", *usual, *options]


COMMANDS = [
    (train(model="wrong:Pair"), "the model must return one tensor for this loss, got tuple"),
    (train(model="wrong:flat"), "must be (samples, classes) for cross-entropy, got (300,)"),
    (train(model="wrong:wide"), "--model wrong:wide failed on data wrong:good, with inputs of "),
    (train(model="wrong:broken"), "'wrong:broken' raised RuntimeError: no such layer"),
    (train(model="wrong:number"), "wrong:number must return a torch.nn.Module, got int"),
    (train(model="wrong:needs"), "'width'; it takes width: give them with --set-model NAME=VALUE"),
    (train(model="wrong:nett"), "has no function 'nett'; did you mean net"),
    (train(model="wrongg:net"), "no module 'wrongg'"),
    (train(model="vgg61"), "no model is named 'vgg61'; did you mean vgg6"),
    (train("--set-model", "colour=3", model="mlp"), "mlp has no option 'colour'; it has"),
    (train(model="lenet", source="digits"), "model lenet for data digits: input_shape must be"),
    (train("--preset", "gadam"), "no preset is named 'gadam'; did you mean gadam/lstm/ptb or"),
    (train("--preset", "zzz"), "no preset is named 'zzz'; see ritz list optimizers"),
    (train("--set-model", "width"), "--set-model takes KEY=VALUE, got 'width'"),
    (train(source="wrong:column"), "got (100, 1): remove the last dimension by .squeeze(-1)"),
    (train(source="wrong:floats"), "must be integers for cross-entropy, got float32: convert them"),
    (train(source="wrong:short_labels"), "must be int64 or uint8 for cross-entropy, got int16"),
    (train(source="wrong:half"), "float16: RuntimeError: mat1 and mat2 must have the same dtype"),
    (train(source="wrong:double"), '; convert inputs by .float(), or .astype("float32") in NumPy'),
    (train(source="wrong:unequal"), "train data must be tensors of the same length, got [100, 50]"),
    (train(source="wrong:nan"), "data must be finite, got NaN or Inf in tensor 0"),
    (train(source="wrong:generator"), "got generator, which can be read once only"),
    (train(source="wrong:five"), "got a tuple of 5: batches must be a list"),
    (train(source="wrong:empty"), "train data must have at least one sample"),
    (train(source="wrong:nothing"), "train data must be (inputs, targets)"),
    (train(source="wrong:text"), "got str"),
    (train(source="wrong:words"), "data must have a numeric dtype of torch"),
    (train(source="wrong:lists"), "train data must be (inputs, targets), both tensors or arrays"),
    (train(source="wrong:label_7"), "must be between 0 and 2, got 7"),
    (train(source="wrong:test_label_7"), "labels of the test data must be between 0 and 2, got 7"),
    (train(source="wrong:validation_label_7"), "labels of the validation data must be between"),
    (train(source="wrong:label", model="wrong:Named"), "a dictionary with 'labels', got the keys"),
    (train(source="wrong:extra", model="wrong:Named"), "an unexpected keyword argument 'name'"),
    (train(source="wrong:keys"), "data must have the parts train and perhaps validation and test"),
    (train(source="wrong:failing"), "failed: OSError: no such image"),
    (train(source="wrong:workers"), "no such image"),
    (train(source="cifar10"), "--data-dir (or the environment variable RITZ_DATA) must be given"),
    (train("--data-dir", "nowhere", source="mnist"), "--data-dir must be an existing folder, got"),
    (train("--set-data", "labels=1", source="digits"), "'labels'; its options are validation"),
    (train("--loss", "wrong:vector_loss"), "the loss must be a number, the mean over a batch"),
    (train("--loss", "wrong:number_loss"), "the loss must be a number, the mean over a batch, got"),
    (train("--loss", "cross_entropi"), "did you mean cross_entropy?"),
    (train("--set", "momentum=abc"), "momentum of optimizer sgd must be a number, got 'abc'"),
    (train("--set", "foo=1"), "--optimizer sgd has no setting 'foo'; it has lr, momentum"),
    (
        train("--optimizer", "kfac", "--set", "foo=1"),
        "weight_sharing, basis, max_order, precision, seed",
    ),
    (
        train("--optimizer", "adamw", "--damping", "noise"),
        "--damping rule 'noise' needs an optimiser with a damping delta, such as KFAC",
    ),
    # A setting of the optimiser with the name of an option of training.
    (
        train("--optimizer", "hessian_free", "--set", "max_steps=0"),
        "ritz: max_steps must be at least 1, got 0",
    ),
    (
        train("--optimizer", "lanczos_newton", "--set", "delta=much"),
        "delta of optimizer lanczos_newton must be a number, got 'much'",
    ),
    (train("--optimizer", "adamm"), "no optimiser is named 'adamm'; did you mean adam"),
    (train("--lr", "-1"), "--lr must be finite and above 0, got -1.0"),
    (train("--lr", "fast"), "--lr must be a number, got 'fast'"),
    (train("--seed", "-1"), "--seed must be between 0 and 4294967295, got -1"),
    (train("--seed", "9" * 23), "--seed must be between 0 and 4294967295, got 999"),
    (train("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
    (train("--average-from", "9"), "--average-from must be between 1 and 1, got 9"),
    (train("--final", "average"), "needs an average: pass --average-from or --patience\n"),
    (train("--warmup", "5"), "--warmup must be between 0 and 1, got 5"),
    (train("--max-steps", "0"), "--max-steps must be at least 1, got 0"),
    (train("--final-ratio", "-1"), "--final-ratio must be at least 0.0, got -1"),
    (train("--quantity", "trace"), "--quantity trace needs --watch: add --watch 1"),
    (train("--device", "tpu"), "--device must be cpu, cuda or cuda:<number>, got 'tpu'"),
    (train("--precision", "int8"), "int8"),
    (["spectrum", "nowhere"], "no such folder or file: nowhere"),
    (
        ["spectrum", "."],
        "no weights in .: it has neither weights.safetensors nor checkpoint.safetensors",
    ),
    (["spectrum", "wrong.py", "--model", "mlp", "--data", "digits"], "not a safetensors file"),
    (["spectrum", ".", "--l2", "nan"], "--l2 must be a number that is at least 0.0, got nan"),
    (["spectrum", ".", "--steps=many"], "--steps must be a whole number, got 'many'"),
    (["spectrum", ".", "--l2", "-1"], "--l2 must be at least 0.0, got -1.0"),
    (["sharpness", ".", "--probes", "0"], "--probes must be at least 1, got 0"),
    (["landscape", ".", "--points", "1"], "--points must be at least 2, got 1"),
    (["plot", "nowhere.jsonl"], "no such file or folder: nowhere.jsonl"),
    (["plot", "."], "no log in .: it has no log.jsonl, which ritz train writes"),
    (["graph", "compare", "wrong.py"], "FILE must be given at least twice"),
    (["study", "digits", "--out", "wrong.py"], "cannot write to wrong.py"),
    (
        ["plot", "wrong.py", "--out", "a.gif"],
        "the file of a figure must end in .png, .svg or .pdf, got 'a.gif'",
    ),
    (["study", "cluster_count"], "no study is named 'cluster_count'; did you mean cluster_counts?"),
    (["study", "digits", "--set", "num_epochs=x"], "num_epochs must be a whole number, got 'x'"),
    (["logdet", "wrong.py"], "wrong.py"),
    (["list"], "NAME'. Choose from: models, datasets, optimizers, quantities, studies"),
    (
        ["list", "colours"],
        "must be one of models, datasets, optimizers, quantities, studies; got 'colours'",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "line"), COMMANDS, ids=[" ".join(words)[:70] for words, _ in COMMANDS]
)
def test_a_wrong_command_is_one_line_with_exit_code_2_and_changes_nothing(
    folder, capsys, arguments, line
):
    code = ritz(*arguments)
    out, err = capsys.readouterr()

    assert (code, out) == (2, "")
    assert line in err
    assert err.startswith("ritz: ")
    assert err.count("\n") == 1
    assert len(err) < 500
    assert [path.name for path in folder.iterdir()] == ["wrong.py"]


X, Y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def net():
    return nn.Linear(2, 3)


class Tuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x), x


class Words(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return "a", "b"


CALLS = {
    "the model returns a tuple": (lambda: fit(Tuple(), (X, Y)), "return one tensor for this loss"),
    "labels of shape (n, 1)": (lambda: fit(net(), (X, Y[:, None])), r"by \.squeeze\(-1\)"),
    "labels as floats": (lambda: fit(net(), (X, Y.float())), r"convert them by \.long\(\)"),
    "labels out of range": (lambda: fit(net(), (X, Y + 3)), "must be between 0 and 2, got 3"),
    "test labels out of range": (
        lambda: fit(net(), ((X, Y), (X, Y + 3))),
        "labels of the test data must be between 0 and 2, got 3",
    ),
    "a loss per sample": (
        lambda: fit(net(), (X, Y), loss_fn=lambda a, b: (a - 1).sum(1)),
        r"the mean over a batch, got shape \(40,\)",
    ),
    "a generator as data": (
        lambda: fit(net(), ((X, Y) for _ in range(3))),
        "got generator, which can be read once only",
    ),
    "five parts": (lambda: fit(net(), tuple([(X, Y)] * 5)), "batches must be a list"),
    "a dataset of words": (lambda: fit(net(), Words()), "must contain a tensor"),
    "label instead of labels": (
        lambda: fit(net(), [{"x": X, "label": Y}]),
        r"a dictionary with 'labels', got the keys \['label', 'x'\]",
    ),
    "different lengths": (lambda: fit(net(), (X, Y[:7])), r"same length, got \[40, 7\]"),
    "an unknown option": (lambda: fit(net(), (X, Y), epochs=3), "did you mean num_epochs"),
    "an option of another type": (lambda: fit(net(), (X, Y), drop_last="no"), "True or False"),
    "a seed out of range": (lambda: fit(net(), (X, Y), seed=2**40), "seed must be between 0 and"),
    "a setting of the wrong type": (
        lambda: fit(net(), (X, Y), optimizer_settings={"momentum": "abc"}),
        "momentum of optimizer sgd must be a number, got 'abc'",
    ),
    "an unknown optimiser": (lambda: fit(net(), (X, Y), optimizer="adamm"), "did you mean adam"),
    "evaluation without batches": (lambda: evaluate(net(), []), "at least one batch"),
    "a risk of unequal tensors": (lambda: Risk(net(), cross_entropy, (X, Y[:3])), "same length"),
    "a risk of NaN": (lambda: Risk(net(), cross_entropy, (X * np.nan, Y)), "finite"),
    "too many steps": (
        lambda: lanczos(hessian(Risk(net(), cross_entropy, (X, Y))), num_steps=99),
        "num_steps must be between 1 and 9, got 99",
    ),
    "a matrix that is not symmetric": (lambda: trace(torch.ones(2, 3)), r"\(2, 3\)"),
    "an unknown data set": (lambda: data.load("minst"), "did you mean mnist"),
    "an unknown model": (lambda: models.create("vgg61"), "did you mean vgg6"),
    "a missing file of weights": (lambda: load_weights(net(), "no.pt"), "no such file: no.pt"),
    "a missing result": (lambda: load("no.safetensors"), "no.safetensors"),
    "a plot of a number": (lambda: plots.plot(3), "see help"),
    "a loader of nothing": (
        lambda: fit(net(), DataLoader(TensorDataset(X[:0], Y[:0]))),
        "num_samples=0|must not be empty",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_one_line_that_names_the_argument(tmp_path, monkeypatch, name):
    call, message = CALLS[name]
    monkeypatch.chdir(tmp_path)

    with pytest.raises((ValueError, TypeError, OSError, KeyError), match=message) as caught:
        call()

    assert "\n" not in str(caught.value).strip()
    assert list(tmp_path.iterdir()) == []
