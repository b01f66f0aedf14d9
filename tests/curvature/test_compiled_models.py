"""Models that are compiled, in whole or in part, have the products of the plain model."""

import pytest
import torch
from curvature.networks import labels, noise
from torch import nn
from torch.nn.functional import cross_entropy

import ritz

DATA = (noise(7, 4), labels(3, 7))


class Net(nn.Module):
    def __init__(self, act=torch.tanh):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 5), nn.Linear(5, 3), act

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def network(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(**options).double()


def whole():
    return torch.compile(network(), backend="eager")


def in_place():
    model = network()
    model.compile(backend="eager")
    return model


def part():
    model = network()
    model.first = torch.compile(model.first, backend="eager")
    return model


def function():
    return network(act=torch.compile(lambda x: torch.tanh(x), backend="eager"))


@pytest.mark.parametrize(
    ("make", "used"), [(whole, True), (in_place, False), (part, True), (function, False)]
)
def test_products_are_linearised_and_those_of_the_plain_model(make, used):
    plain = ritz.Risk(network(), cross_entropy, DATA)
    model = make()
    if used:
        with torch.no_grad():
            model(DATA[0])

    risk = ritz.Risk(model, cross_entropy, DATA)
    op, unit = ritz.hessian(risk), torch.eye(plain.space.size, dtype=torch.float64)

    torch.testing.assert_close(op @ unit, ritz.hessian(plain) @ unit)
    torch.testing.assert_close(ritz.ggn(risk) @ unit, ritz.ggn(plain) @ unit)
    torch.testing.assert_close(risk.gradient(), plain.gradient())
    assert op.products.plan == "forward over reverse, linearized"


def test_names_are_those_of_the_plain_model():
    plain, compiled = (ritz.Risk(model, cross_entropy, DATA) for model in (network(), whole()))
    assert compiled.space.shapes == plain.space.shapes
    assert ritz.Risk(whole(), cross_entropy, DATA, params="second").space.size == 18


def test_the_model_is_compiled_again_after_a_product():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = torch.compile(network(), backend=backend)
    risk = ritz.Risk(model, cross_entropy, DATA)
    ritz.hessian(risk) @ risk.theta
    assert not calls

    with torch.no_grad():
        model(DATA[0])

    assert len(calls) == 1
