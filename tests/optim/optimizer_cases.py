"""The adaptive optimisers and small problems that their tests share."""

import torch

from ritz.optim import DampedAdamW, Gadam, GadamX, Padam, PadamW

EVERY = {
    "DampedAdamW": (DampedAdamW, {"lr": 0.01, "delta": 1e-3, "weight_decay": 0.1}),
    "Gadam": (Gadam, {"lr": 0.01, "weight_decay": 0.1, "start": 3, "interval": 2}),
    "Gadam inside": (Gadam, {"lr": 0.01, "form": "inside", "start": 2}),
    "GadamX": (GadamX, {"lr": 0.05, "weight_decay": 0.1, "start": 3, "interval": 2}),
    "GadamX L2": (GadamX, {"lr": 0.05, "partial": 0.2, "decoupled_weight_decay": False}),
    "Padam": (Padam, {"lr": 0.05, "weight_decay": 0.1}),
    "Padam published": (Padam, {"lr": 0.05, "form": "published"}),
    "PadamW": (PadamW, {"lr": 0.05, "partial": 0.25}),
    "PadamW amsgrad": (PadamW, {"lr": 0.05, "amsgrad": True}),
    "PadamW half": (PadamW, {"lr": 0.01, "partial": 0.5}),
    "PadamW nought": (PadamW, {"lr": 0.01, "partial": 0.0}),
}


def build(name, params, **changes):
    cls, settings = EVERY[name]
    return cls(params, **(settings | changes))


def parameters(generator, *, dtype=torch.float64, shapes=((4, 3), (5,), ())):
    make = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [torch.nn.Parameter(weights) for weights in make]


def copied(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


def give_gradients(params, generator):
    for p in params:
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad = 0.5 * p.detach() + noise.to(p.device)


def run(optimizer, params, generator, steps=5):
    for _ in range(steps):
        give_gradients(params, generator)
        optimizer.step()
    return [p.detach().clone() for p in params]


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)
