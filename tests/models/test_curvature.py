"""Hessian products through a network of each family, against double backward."""

from functools import partial

import pytest
import torch
from models.tiny import WORDS, fill, sample, tiny, wave
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ritz
from ritz._core.batch_norm import batch_norms, evaluating
from ritz.models._resnets import (
    ResNet,
    basic,
    bottleneck,
    cifar_resnet,
    preresnet,
    resnext29,
    stem,
    wideresnet,
)

LOSS = nn.functional.cross_entropy

TINY = {"num_classes": 3, "input_shape": (1, 8, 8), "width": 2}


def image_resnet(block, expansion):
    """One block per stage, since the registered depths would take seconds to trace."""
    first = stem(1, 2, 7, 2) | {"maxpool": nn.MaxPool2d(3, stride=2, padding=1)}
    return ResNet(first, block, (1, 1, 1, 1), (2, 1, 3), expansion=expansion)


SHALLOW = {
    "resnet": partial(cifar_resnet, depth=8, **TINY),
    "image resnet": partial(image_resnet, basic, 1),
    "image bottlenecks": partial(image_resnet, bottleneck, 4),
    "bottlenecks": partial(preresnet, depth=11, block="bottleneck", **TINY),
    "wide": partial(wideresnet, depth=10, factor=2, **TINY),
    "resnext": partial(resnext29, groups=2, breadth=1, **TINY),
}
NAMED = ["logistic", "mlp", "lenet", "alexnet", "allcnn", "vgg6", "vgg6_bn", "preresnet8", "lstm",
         "gpt"]  # fmt: skip


def network(name):
    if name in SHALLOW:
        return fill(SHALLOW[name]().double()), (wave(4, 1, 8, 8), torch.arange(4) % 3)
    depth = {"depth": 1} if name in WORDS else {}
    return tiny(name, **depth), sample(name)


def double_backward(model, data, vector, *, batch_statistics):
    inputs, target = data
    params = list(model.parameters())
    with evaluating(model, batch_statistics=batch_statistics), sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(LOSS(model(inputs), target), params, create_graph=True)
        flat = torch.cat([part.reshape(-1) for part in gradient])
        parts = torch.autograd.grad(flat @ vector, params)
    return torch.cat([part.reshape(-1) for part in parts])


def check(name, engine, mode):
    model, data = network(name)
    risk = ritz.Risk(model, LOSS, data, batch_norm=mode, batch_size=4)
    vector = wave(len(risk.theta), phase=2.0)
    found = ritz.hessian(risk, engine=engine) @ vector
    expected = double_backward(model, data, vector, batch_statistics=mode == "train")
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


@pytest.mark.parametrize("name", [*NAMED, *SHALLOW])
def test_hessian_products_are_right(name):
    check(name, "eager", "train" if batch_norms(network(name)[0]) else "eval")


@pytest.mark.parametrize("name", ["logistic", "lenet", "allcnn", "preresnet8", "lstm", "gpt"])
def test_traced_hessian_products_are_right(name):
    check(name, "linearized", "eval")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg6_bn", *SHALLOW])
def test_traced_hessian_products_of_deep_models_are_right(name):
    check(name, "linearized", "eval")


@pytest.mark.parametrize("name", ["lstm", "allcnn", "vgg6"])
def test_products_with_fixed_dropout_are_symmetric(name):
    changes = {"weight_drop": 0.5, "embedding_dropout": 0.2} if name == "lstm" else {}
    model, data = tiny(name, dropout=0.3, **changes), sample(name)
    risk = ritz.Risk(model, LOSS, data, dropout="fixed")
    op = ritz.hessian(risk, engine="eager")
    v, w = wave(len(risk.theta), phase=2.0), wave(len(risk.theta), phase=3.0)
    torch.testing.assert_close(w @ (op @ v), v @ (op @ w), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["logistic", "mlp", "lenet", "alexnet", "allcnn", "vgg6_bn"])
def test_plain_stacks_of_layers_have_exact_traces(name):
    """They are sequences of known layers, so the trace needs no probes."""
    model, data = network(name)
    assert ritz.trace(ritz.hessian(ritz.Risk(model, LOSS, data))).stderr == 0
