"""A network and data of a user's own, and how to run commands on them."""

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
