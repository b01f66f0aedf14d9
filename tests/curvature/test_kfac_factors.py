"""Second moments of inputs and output derivatives of layers, against patches and einsum."""

import pytest
import torch
from torch import nn

from ritz.curvature import _kfac_factors as factors
from ritz.curvature._module_gradients import Call, patches


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (7, 5)),
    "positions": (lambda: nn.Linear(5, 4), (7, 3, 5)),
    "padded": (lambda: nn.Conv2d(16, 4, 3, padding=1), (3, 16, 6, 5)),
    "not padded": (lambda: nn.Conv2d(16, 4, 3), (3, 16, 6, 5)),
    "not square": (lambda: nn.Conv2d(16, 4, (3, 2), padding=(2, 1)), (3, 16, 4, 5)),
    "dilated": (lambda: nn.Conv2d(16, 4, 3, padding=2, dilation=2), (3, 16, 6, 7)),
    "image of 2 x 2": (lambda: nn.Conv2d(16, 4, 3, padding=1), (3, 16, 2, 2)),
    "image of 1 x 1": (lambda: nn.Conv2d(16, 4, 3, padding=1), (3, 16, 1, 1)),
    "kernel above image": (lambda: nn.Conv2d(16, 4, 5, padding=2), (3, 16, 3, 4)),
    "same": (lambda: nn.Conv2d(16, 4, 3, padding="same"), (3, 16, 6, 5)),
    "1 x 1": (lambda: nn.Conv2d(16, 4, 1), (3, 16, 6, 5)),
    "strided": (lambda: nn.Conv2d(16, 4, 3, stride=2, padding=1), (3, 16, 7, 6)),
    "one axis": (lambda: nn.Conv1d(16, 4, 3, padding=1), (3, 16, 6)),
    "one axis, dilated": (lambda: nn.Conv1d(16, 4, 4, padding=3, dilation=3), (3, 16, 9)),
    "three axes": (lambda: nn.Conv3d(2, 4, 2), (3, 2, 3, 4, 3)),
    "groups": (lambda: nn.Conv2d(16, 8, 3, padding=1, groups=4), (3, 16, 6, 5)),
    "circular": (lambda: nn.Conv2d(16, 8, 3, padding=1, padding_mode="circular"), (3, 16, 6, 5)),
}
layers = pytest.mark.parametrize("name", LAYERS)


def built(name):
    make, shape = LAYERS[name]
    return make().double(), noise(*shape)


def rows_of(layer, x, keys):
    """Inputs ``(batch, groups, i, T)`` with the constant of the bias."""
    linear = isinstance(layer, nn.Linear)
    a = x.reshape(len(x), 1, -1, 5).mT if linear else patches(layer, x)
    both = [a] * ("weight" in keys) + [torch.ones_like(a[:, :, :1])] * ("bias" in keys)
    return torch.cat(both, 2)


def deltas_of(layer, x):
    """Derivatives, and the same as ``(c, batch, groups, o, T)``."""
    deltas = noise(2, *layer(x).shape, seed=1)
    linear, groups = isinstance(layer, nn.Linear), getattr(layer, "groups", 1)
    delta = deltas.movedim(-1, 2) if linear else deltas
    return deltas, delta.reshape(2, len(x), groups, delta.shape[2] // groups, -1)


def agrees(found, expected, diagonal):
    expected = expected.diagonal(dim1=-2, dim2=-1) if diagonal else expected
    torch.testing.assert_close(found.reshape(expected.shape), expected)


@layers
@pytest.mark.parametrize("keys", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("diagonal", [False, True])
def test_input_moments_are_those_of_patches(name, keys, diagonal):
    layer, x = built(name)
    a = rows_of(layer, x, keys)
    expected = torch.einsum("ngit,ngjt->gij", a, a)
    agrees(factors.input_moment(layer, x, keys, diagonal=diagonal), expected, diagonal)


@layers
@pytest.mark.parametrize("diagonal", [False, True])
def test_output_moments_are_those_of_all_positions(name, diagonal):
    layer, x = built(name)
    deltas, delta = deltas_of(layer, x)
    expected = torch.einsum("cngot,cngpt->gop", delta, delta)
    agrees(factors.output_moment(layer, deltas, diagonal=diagonal), expected, diagonal)


@layers
@pytest.mark.parametrize("diagonal", [False, True])
def test_reduced_moments_are_those_of_mean_inputs_and_summed_derivatives(name, diagonal):
    layer, x = built(name)
    keys, (deltas, delta) = ("weight", "bias"), deltas_of(layer, x)
    a, summed = rows_of(layer, x, keys).mean(-1), delta.sum(-1)
    call = Call(args=(x,), kwargs={}, output=deltas[0], state={}, chosen=keys)
    joined = factors.join_calls(layer, [(call, deltas)])
    found = factors.reduced_moments(*joined, diagonal=(diagonal, diagonal))
    agrees(found[0], torch.einsum("ngi,ngj->gij", a, a), diagonal)
    agrees(found[1], torch.einsum("cngo,cngp->gop", summed, summed), diagonal)


@pytest.mark.parametrize("size", [511, 514, 700])
def test_symmetric_products_are_products(size):
    x = noise(size, 3)
    torch.testing.assert_close(factors.gram(x), x @ x.T)
