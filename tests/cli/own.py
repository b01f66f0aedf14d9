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

def loaders():
    train, test = (TensorDataset(*part) for part in load())
    return {"train": DataLoader(train, batch_size=16, shuffle=True), "test": test}
"""
SMALL = ["--epochs", "2", "--batch-size", "16", "--json"]


def ritz(*arguments):
    return _app.run([str(argument) for argument in arguments])


class Stop:
    """Ends a loop by an error after so many steps."""

    def __init__(self, after):
        self.after = after

    def start(self, label, total): ...

    def update(self, done, note=""):
        if done == self.after:
            raise RuntimeError("stopped")

    def finish(self): ...


@contextmanager
def stopping_after(steps, name, monkeypatch):
    """Let the function of that name stop by an error after so many steps."""
    module, _, function = name.rpartition(".")
    real = getattr(import_module(module), function)
    with monkeypatch.context() as patch:
        patch.setattr(name, lambda *a, **k: real(*a, **(k | {"progress": Stop(steps)})))
        yield
