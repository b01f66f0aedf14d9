"""Sums of K-FAC that wait for the end of a step, as they do on a GPU."""

import copy
from dataclasses import replace

import pytest
import torch
from optim.kfac_cases import built, convolutional, flat, labels, noise, small_network
from optim.test_kfac_calls import CASES
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.curvature import _cuda_graph
from ritz.optim import KFAC
from ritz.optim._kfac import curvature, deferred
from ritz.optim._kfac.blocks import Block


class Replays:
    """Like `Replayed` on a GPU: from the third call on, nothing but the tensors is computed."""

    may_record = True

    def __init__(self, function, *, borrowed):
        self.function, self.calls = function, 0

    def __call__(self, values, *inputs, replay=None):
        self.calls += 1
        results = self.function(*inputs)
        if self.calls > 2:
            for block in self.blocks:
                block.restart()
        return results


@pytest.fixture
def waiting(monkeypatch):
    """Let all blocks wait as on a GPU; returns those that did."""
    waited, let_wait = [], deferred.DeferredSums.let_wait

    def let_wait_here(self, blocks):
        Replays.blocks = blocks
        with monkeypatch.context() as patch:
            patch.setattr(Block, "device", torch.device("cuda"))
            let_wait(self, blocks)
        waited.extend(block for block in blocks if block.waits)

    monkeypatch.setattr(deferred.DeferredSums, "let_wait", let_wait_here)
    monkeypatch.setattr(deferred, "may_replay", lambda: True)
    monkeypatch.setattr(deferred, "Replayed", Replays)
    return waited


def normed():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


MODELS = {
    "convolutions": (convolutional, (2, 5, 5)),
    "norm": (normed, (2, 4, 4)),
    "few rows": (lambda: nn.Sequential(nn.Linear(70, 5), nn.Tanh(), nn.Linear(5, 3)), (70,)),
    "several calls": (CASES["convolution"][0], (2, 2, 4, 4)),
}
OPTIONS = {
    "kfac": {},
    "ekfac": {"kind": "ekfac"},
    "reduce": {"weight_sharing": "reduce"},
    "diagonal": {"max_order": 8},
    "ggn": {"fisher": "ggn"},
}


def train(model, shape, options, batches=((7,), (7,), (3, 7), (7,), (7,), (7,))):
    optimizer = KFAC(model, lr=0.1, delta=0.1, factor_every=1, inverse_every=2, **options)
    for step, sizes in enumerate(batches):
        optimizer.zero_grad()
        for part, size in enumerate(sizes):
            x, y = noise(size, *shape, seed=10 * step + part), labels(3, size, seed=step + part)
            outputs = model(x)
            optimizer.observe(outputs, y, cross_entropy)
            cross_entropy(outputs, y).backward()
            x.zero_()  # a loop may reuse the memory of a batch
        optimizer.step()
    return flat(model.parameters())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_sums_that_do_not_wait(name, options, request):
    make, shape = MODELS[name]
    model = built(make)
    expected = train(copy.deepcopy(model), shape, options)

    waited = request.getfixturevalue("waiting")

    torch.testing.assert_close(train(model, shape, options), expected)
    assert waited


@pytest.mark.usefixtures("waiting")
def test_sums_that_are_not_finite_are_dropped():
    model = built(small_network)
    optimizer = KFAC(model, lr=0.0, factor_every=1)
    for scale in (1.0, 1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        (cross_entropy(model(noise(5, 3)), labels(3, 5)) * scale).backward()
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()

    blocks = optimizer.curvature.blocks
    assert [block.updates for block in blocks] == [3, 3]
    assert all(bool(total.isfinite().all()) for block in blocks for total in block.average.values())


class Positions(nn.Module):
    """A parameter with the shape of the output of a layer, whose gradient torch does not copy."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.positions = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x):
        return self.last((self.layer(x) + self.positions).tanh())


@pytest.mark.filterwarnings("ignore:KFAC uses the plain gradient")
def test_a_derivative_may_become_the_gradient_of_a_parameter(request):
    model = built(Positions)
    batches = ((1,), (1, 1), (1, 1), (1, 1))
    expected = train(copy.deepcopy(model), (3,), {}, batches)

    waited = request.getfixturevalue("waiting")

    torch.testing.assert_close(train(model, (3,), {}, batches), expected)
    assert waited


def test_calls_wait_no_longer_if_a_step_becomes_large(waiting, monkeypatch):
    model = built(small_network)
    optimizer = KFAC(model, factor_every=1)
    blocks, size = optimizer.curvature.blocks, 8 * 5 * (3 + 4 + 4 + 3)
    monkeypatch.setattr(curvature, "MEMORY", 2 * size)
    monkeypatch.setattr(deferred, "MEMORY", 2 * size)
    for count in (1, 2, 4):
        optimizer.zero_grad()
        for part in range(count):
            x, y = noise(5, 3, seed=part), labels(3, 5, seed=part)
            (cross_entropy(model(x), y) / count).backward()
            if part < 2:  # the first step has no inverses that calls could wait for
                assert all(len(b.waiting) == (part + 1 if count > 1 else 0) for b in blocks)
        assert not (count == 4 and any(block.waiting or block.waits for block in blocks))
        optimizer.step()
        assert all(block.waits == (count < 4) for block in blocks)
    inputs = torch.cat([torch.cat([noise(5, 3, seed=i), torch.ones(5, 1)], 1) for i in range(4)])
    # The first layer got 5, 10 and 20 rows in three steps, of which each counts a third.
    steps = [inputs[:n].T @ inputs[:n] / n for n in (5, 10, 20)]
    torch.testing.assert_close(blocks[0].average["inputs"], sum(steps) / 3)


def test_no_layer_waits_on_the_cpu():
    model = built(small_network)
    optimizer = KFAC(model, factor_every=1)
    cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
    optimizer.step()

    assert not any(block.waits for block in optimizer.curvature.blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kind": "ekfac"}, {"precision": "float32"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_replayed_sums_give_the_steps_of_the_cpu(name, options, monkeypatch):
    monkeypatch.setattr(_cuda_graph, "TUNING", replace(_cuda_graph.TUNING, launches=0.0))
    make, shape = MODELS[name]
    model = built(make)
    other = copy.deepcopy(model).cuda()
    # Eigenvectors of zero differ from one device to the other, so EK-FAC gets regular factors.
    rows = 160 if "kind" in options else 8
    every = {"factor_every": 1, "inverse_every": 10}
    optimizers = [KFAC(each, lr=0.1, delta=0.5, **every, **options) for each in (model, other)]
    for step in range(9):
        x, y = noise(rows, *shape, seed=step), labels(3, rows, seed=step)
        for each, optimizer in zip((model, other), optimizers, strict=True):
            device = next(each.parameters()).device
            optimizer.zero_grad()
            cross_entropy(each(x.to(device)), y.to(device)).backward()
            optimizer.step()

    torch.testing.assert_close(
        flat(other.parameters()).cpu(), flat(model.parameters()), rtol=1e-6, atol=1e-9
    )
    assert optimizers[1].curvature._sums._replayed.num_graphs == 1
