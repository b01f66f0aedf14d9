"""A small risk, and what tests of its resumption share."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz._core.storage import save
from ritz.curvature import Risk


class KilledError(Exception):
    pass


def network(seed=0):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)


def risk(*, seed=0, data_seed=1, **options):
    return Risk(network(seed), cross_entropy, data(24, data_seed), batch_size=12, **options)


def assert_same_files(found, expected, folder):
    save(found, folder / "found")
    save(expected, folder / "expected")
    assert (folder / "found").read_bytes() == (folder / "expected").read_bytes()
