"""A network and data of a user's own, and how to run commands on them."""

from contextlib import contextmanager
from importlib import import_module

from ritz.cli import _app

MODEL = """
from torch import nn

def net(num_classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(),
                         nn.Linear(width, num_classes))

def smooth():
    return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3))

def number():
    return 3

def broken():
    raise RuntimeError("no such layer")

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

def worse(outputs, target):
    return outputs.exp().exp().exp().mean()
"""
DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def load(rows=48):
    x = torch.randn(rows + 16, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])

def named():
    x, y = load()[0]
    return [{"x": x[:24], "labels": y[:24]}, {"x": x[24:], "labels": y[24:]}]

def loaders():
    train, test = (TensorDataset(*part) for part in load())
    return {"train": DataLoader(train, batch_size=16, shuffle=True), "test": test}
"""
# A run names code of its user, which commands import only if they repeat the names.
OWN = ["--model", "own_model:net", "--data", "own_data:load"]
SMALL = ["--epochs", "2", "--batch-size", "16", "--json"]


def ritz(*arguments):
    return _app.run([str(argument) for argument in arguments])


def fail():
    raise RuntimeError("stopped")


class Stop:
    """Ends a loop, by an error, after so many steps."""

    def __init__(self, after, end):
        self.after, self.end = after, end

    def start(self, label, total): ...

    def update(self, done, note=""):
        if done == self.after:
            self.end()

    def finish(self): ...


@contextmanager
def stopping_after(steps, name, monkeypatch, end=fail):
    """Let the function of that name stop after so many steps, by an error."""
    module, _, function = name.rpartition(".")
    real = getattr(import_module(module), function)
    with monkeypatch.context() as patch:
        patch.setattr(name, lambda *a, **k: real(*a, **(k | {"progress": Stop(steps, end)})))
        yield
