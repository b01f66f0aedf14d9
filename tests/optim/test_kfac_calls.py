"""Layers that are called several times for one sample, against sample gradients."""

import pytest
import torch
from optim.kfac_cases import ALL_STEPS, built, curvature, labels, noise
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from ritz.optim import KFAC


class Twice(nn.Module):
    """The class scores of a pair: those of one encoder, subtracted."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return self.encoder(x[:, 0]) - self.encoder(x[:, 1] * 0.5) * 0.3


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 3, padding_idx=0)

    def forward(self, x):
        # From (batch, 4) and from (batch, 2, 2) tokens.
        return self.table(x[:, 0]).mean(1) - self.table(x[:, 1].unflatten(1, (2, 2))).sum((1, 2))


def convolution():
    layers = nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 4), nn.Flatten()
    return Twice(nn.Sequential(*layers))


CASES = {
    "linear": (lambda: Twice(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))), (4,)),
    "convolution": (convolution, (2, 4, 4)),
    "norm": (lambda: Twice(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))), (4,)),
    "embedding": (Tokens, None),
}
cases = pytest.mark.parametrize("name", CASES)


def case(name):
    make, shape = CASES[name]
    x = labels(6, 7, 2, 4) if shape is None else noise(7, 2, *shape)
    return built(make), x, labels(3, 7)


def sample_gradients(model, x, y):
    params = {key: p.detach() for key, p in model.named_parameters()}

    def loss(params, one, label):
        return cross_entropy(functional_call(model, params, (one[None],)), label[None])

    return vmap(grad(loss), (None, 0, 0))(params, x, y)


def joint(block, gradients):
    """Sample gradients ``[W b]`` of a layer, ``(batch, groups, o, i)``."""
    groups = getattr(block.module, "groups", 1)
    parts = [gradients[f"{block.name}.{key}"] for key in block.params]
    if block.name == "table":
        return parts[0].mT.unsqueeze(1)
    return torch.cat([g.reshape(len(g), groups, g.shape[1] // groups, -1) for g in parts], 3)


@cases
def test_scales_of_ekfac_are_those_of_gradients_over_all_calls(name):
    model, x, y = case(name)
    optimizer = KFAC(model, lr=0.0, kind="ekfac", **ALL_STEPS)

    for _ in range(2):  # before and after there are eigenbases
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    gradients = sample_gradients(model, x, y)
    for block in curvature(optimizer).values():
        if "moment" in block.average:
            rows = torch.stack([gradients[f"{block.name}.{key}"] for key in block.params], 2)
            expected = torch.einsum("nci,ncj->cij", rows, rows) / len(x)
            torch.testing.assert_close(block.average["moment"], expected)
            continue
        G, U_A = joint(block, gradients), block.inverse.get("inputs_basis")
        turned = block.inverse["outputs_basis"].mT @ (G if U_A is None else G @ U_A)
        expected = turned.square().mean(0)
        torch.testing.assert_close(block.average["scales"].view_as(expected), expected)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_take_calls_as_positions(sharing):
    encoder, x, y = built(lambda: nn.Linear(4, 3)), noise(7, 2, 4), labels(3, 7)
    model = Twice(encoder)
    optimizer = KFAC(model, lr=1.0, momentum=0, damping="exact", delta=0.1, weight_sharing=sharing)
    before = torch.cat([encoder.weight, encoder.bias[:, None]], 1).detach().clone()
    scores = model(x)
    cross_entropy(scores, y).backward()
    optimizer.step()

    # The derivatives in the outputs of both calls, and their inputs with the constant 1.
    base = torch.softmax(scores.detach(), 1) - nn.functional.one_hot(y, 3)
    deltas = torch.stack([base, -0.3 * base], 1)
    a = torch.cat([torch.stack([x[:, 0], 0.5 * x[:, 1]], 1), torch.ones(7, 2, 1)], 2)
    if sharing == "reduce":
        a, deltas = a.mean(1, keepdim=True), deltas.sum(1, keepdim=True)
    A = torch.einsum("nti,ntj->ij", a, a) / (7 * a.shape[1])
    S = torch.einsum("nto,ntp->op", deltas, deltas) / 7
    gradient = torch.cat([encoder.weight.grad, encoder.bias.grad[:, None]], 1)
    matrix = torch.kron(S, A) + 0.1 * torch.eye(15, dtype=torch.float64)
    expected = before - torch.linalg.solve(matrix, gradient.flatten()).view(3, 5)
    torch.testing.assert_close(torch.cat([encoder.weight, encoder.bias[:, None]], 1), expected)


def scores(name, inner, x):
    """What the model computes, by two passes of its layers."""
    if name == "embedding":
        return inner(x[:, 0]).mean(1) - inner(x[:, 1]).sum(1)
    return inner(x[:, 0]) - 0.3 * inner(x[:, 1] * 0.5)


@pytest.mark.parametrize("options", [{}, {"kind": "ekfac"}, {"weight_sharing": "reduce"}])
@cases
def test_two_passes_with_one_backward_pass_are_of_the_same_samples(name, options):
    found = []
    for inside in (True, False):
        model, x, y = case(name)
        inner = model.table if name == "embedding" else model.encoder
        optimizer = KFAC(model if inside else inner, **ALL_STEPS, **options)
        cross_entropy(model(x) if inside else scores(name, inner, x), y).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_passes_on_batches_of_different_sizes_are_of_different_samples():
    found = []
    for cuts in ([7], [4, 3]):
        model, x, y = case("linear")
        optimizer = KFAC(model, kind="ekfac", **ALL_STEPS)
        cross_entropy(torch.cat([model(part) for part in x.split(cuts)]), y).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("fisher", ["monte_carlo", "ggn"])
@cases
def test_observed_passes_count_their_samples_once(name, fisher):
    found = []
    for passes in (1, 2):
        model, x, y = case(name)
        inner = model.table if name == "embedding" else model.encoder
        optimizer = KFAC(model if passes == 1 else inner, fisher=fisher, kind="ekfac")
        outputs = model(x) if passes == 1 else scores(name, inner, x)
        optimizer.observe(outputs, y, cross_entropy)
        cross_entropy(outputs, y).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_accumulated_batches_with_their_passes_first_are_counted_apart(kind):
    found = []
    for first in (True, False):
        model, x, y = case("linear")
        optimizer = KFAC(model, kind=kind)
        halves = [(x[:3], y[:3]), (x[3:6], y[3:6])]
        if first:
            losses = [cross_entropy(model(a), b) / 2 for a, b in halves]
            for loss in losses:
                loss.backward()
        else:
            cross_entropy(model(x[:6]), y[:6]).backward()
        optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*found)
