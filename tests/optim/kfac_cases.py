"""Networks, data and steps that the tests of K-FAC share."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ALL_STEPS = {"factor_every": 1, "inverse_every": 1}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes, *shape, seed=1):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def built(make, seed=0):
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(drawn - 0.4)
    return model


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def take_step(model, optimizer, x, y, loss=cross_entropy):
    """One step; return the gradient and the change of the weights, over minus the rate."""
    before = flat(model.parameters()).clone()
    optimizer.zero_grad()
    outputs = model(x)
    optimizer.observe(outputs, y, loss)
    loss(outputs, y).backward()
    gradient = flat(p.grad for p in model.parameters()).clone()
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    return gradient, (before - flat(model.parameters())) / rate


def curvature(optimizer):
    return {block.name: block for block in optimizer.curvature.blocks}


def linear_network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2))


def small_network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, dilation=1, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
