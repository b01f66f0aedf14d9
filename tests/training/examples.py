"""Small problems for tests of training, of fixed seeds."""

import torch
from torch import nn


def digits():
    """Training and held-out digits as tensors, ``(1000, 64)`` and ``(797, 64)``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    x, y = torch.tensor(images / 16).float()[order], torch.tensor(labels)[order]
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


def samples(count=48, features=6, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator)
    teacher = torch.randn(features, classes, generator=generator)
    return x, (x @ teacher).argmax(1)


def network(features=6, classes=3, *, norm=False, dropout=0.0, width=8, seed=0):
    """A perceptron with its weights drawn from a generator of its own."""
    layers = [nn.Linear(features, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, classes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                shape = layer.weight.shape
                layer.weight.copy_(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
                layer.bias.zero_()
    return model


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


class StoppedError(Exception):
    pass


class Stop:
    """Ends a run after so many steps as a kill would: nothing is saved at the end."""

    unit = "step"

    def __init__(self, step):
        self.step = step

    def __call__(self, count, model, optimizer):
        if count == self.step:
            raise StoppedError
