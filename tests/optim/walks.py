"""Small models, steps of training that repeat, and averages by explicit loops in float64."""

import torch
from torch import nn
from torch.optim import AdamW

from ritz.optim import IterateAverage


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def inputs(step, size=8, dtype=torch.float32):
    noise = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, generator=noise, dtype=torch.float64).to(dtype)


def loss_of(model, step):
    dtype = next(model.parameters()).dtype
    target = inputs(1000 + step, dtype=dtype)[:, :2]
    return (model(inputs(step, dtype=dtype)) - target).square().mean()


def take_step(model, optimizer, step, *, closure=False):
    def evaluated():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    if closure:
        optimizer.step(evaluated)
    else:
        evaluated()
        optimizer.step()


def weights(model):
    """A copy of all weights, in double precision."""
    wide = torch.complex128 if next(model.parameters()).is_complex() else torch.float64
    return [p.detach().to(wide, copy=True) for p in model.parameters()]


def walked(model, optimizer, num_steps, **options):
    """The weights before each step and after the last, a list of ``num_steps + 1``."""
    path = [weights(model)]
    for step in range(num_steps):
        take_step(model, optimizer, step, **options)
        path.append(weights(model))
    return path


def trained(model=None, num_steps=12, **options):
    """A model after some steps, its optimiser, the average, and the path."""
    model = network() if model is None else model
    optimizer = AdamW(model.parameters(), lr=0.05)
    average = IterateAverage(optimizer, **options)
    path = walked(model, optimizer, num_steps)
    return model, optimizer, average, path


def copies(model):
    """The state of a model, copied."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def tail(path, *, start=0, interval=1):
    """The average of Gadam, as its recurrence is written."""
    first = max(start, 1)
    average, n = path[first - 1], 1
    for t in range(first, len(path)):
        if (t - first + 1) % interval == 0:
            average = [(a * n + w) / (n + 1) for a, w in zip(average, path[t], strict=True)]
            n += 1
    return average


def exponential(path, *, decay, start=0, interval=1):
    first = max(start, 1)
    average = path[first - 1]
    for t in range(first, len(path)):
        if (t - first + 1) % interval == 0:
            average = [decay * a + (1 - decay) * w for a, w in zip(average, path[t], strict=True)]
    return average


def polyak(path, *, interval=1):
    chosen = path[interval::interval]
    return [sum(column) / len(chosen) for column in zip(*chosen, strict=True)]


def averages(model, optimizer):
    return [optimizer.state[p]["average"] for p in model.parameters()]


def assert_near(found, expected, **tolerances):
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left.detach().to(right.dtype), right, **tolerances)


def assert_same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
