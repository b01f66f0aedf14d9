"""Optimisers that need curvature, and the small problems that their tests share."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.curvature import Risk
from ritz.optim import HessianFree, LanczosNewton, SpectralSGD

EVERY = {
    "LanczosNewton": (LanczosNewton, {"lr": 0.5, "delta": 1.0, "num_steps": 6, "interval": 2}),
    "LanczosNewton ggn": (
        LanczosNewton,
        {"lr": 0.3, "delta": 0.5, "num_steps": 4, "matrix": "ggn", "momentum": 0.5,
         "weight_decay": 0.01, "start": "gradient"},
    ),
    "HessianFree": (HessianFree, {"delta": 0.5, "max_steps": 8}),
    "HessianFree hessian": (
        HessianFree, {"delta": 1.0, "max_steps": 5, "matrix": "hessian", "weight_decay": 0.01}
    ),
    "SpectralSGD": (
        SpectralSGD,
        {"lr": 0.3, "interval": 3, "num_steps": 6, "nesterov": True, "weight_decay": 0.01},
    ),
}  # fmt: skip


def network(*, dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def samples(count=24, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(3, (count,), generator=generator)


def build(name, params, **changes):
    cls, settings = EVERY[name]
    return cls(params, **(settings | changes))


def steps(optimizer, model, batch, count=5, *, first=0, loss_fn=cross_entropy):
    """Take some steps in a plain loop; return the losses before them."""
    losses = []
    for step in range(first, first + count):
        if optimizer.curvature_due(step):
            optimizer.update_curvature(Risk(model, loss_fn, [batch]))
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
