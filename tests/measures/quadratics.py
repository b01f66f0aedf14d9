"""Risks that are quadratics of the weights with given eigenvalues."""

import torch
from torch import nn
from torch.optim import SGD

from ritz.curvature import Risk

N = 64


class Quadratic(nn.Module):
    """Outputs whose mean is a quadratic of the weights with these eigenvalues, plus a constant."""

    def __init__(self, values, start=1.0, floor=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((len(values),), start, dtype=torch.float64))
        self.register_buffer("values", torch.tensor(values, dtype=torch.float64))
        self.floor = floor

    def forward(self, x):
        return 0.5 * (x[:, :1] * self.values * self.w**2).sum(1) + self.floor


def mean(outputs, target):
    return outputs.mean()


def quadratic(values, **options):
    data = torch.ones(N, 1, dtype=torch.float64)
    return Risk(Quadratic(values, **options), mean, (data, data[:, 0]))


def sgd(params, rate):
    return SGD(params, lr=rate)
