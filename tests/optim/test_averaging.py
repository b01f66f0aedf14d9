"""Averages against explicit loops in double precision, around any optimiser."""

import pytest
import torch
from optim.walks import (
    assert_near,
    assert_same,
    averages,
    exponential,
    inputs,
    network,
    polyak,
    tail,
    take_step,
    walked,
    weights,
)
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from ritz.optim import IterateAverage

OPTIMISERS = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam loop": lambda p: Adam(p, lr=0.02, foreach=False, amsgrad=True),
    "adamw foreach": lambda p: AdamW(p, lr=0.02, foreach=True),
    "adamw fused": lambda p: AdamW(p, lr=0.02, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
}
# Means of 30 iterates of size one, each rounded once.
NEAR = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.float64: {"rtol": 1e-13, "atol": 1e-13}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_tail_average_of_any_optimiser_follows_the_recurrence(name, dtype):
    model = network(dtype)
    optimizer = OPTIMISERS[name](model.parameters())
    average = IterateAverage(optimizer, start=7)
    path = walked(model, optimizer, 30)
    assert_near(averages(model, optimizer), tail(path, start=7), **NEAR[dtype])
    assert (average.count, average.step, average.start) == (25, 30, 7)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_averaging_does_not_change_the_steps_of_the_optimiser(name):
    plain, watched = network(), network()
    path = walked(plain, OPTIMISERS[name](plain.parameters()), 10)
    optimizer = OPTIMISERS[name](watched.parameters())
    IterateAverage(optimizer)
    for left, right in zip(walked(watched, optimizer, 10), path, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize(("start", "interval"), [(0, 1), (1, 1), (2, 3), (11, 10), (0, 4), (29, 5)])
@pytest.mark.parametrize("kind", ["tail", "ema"])
def test_start_and_interval_select_the_averaged_iterates(kind, start, interval):
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    IterateAverage(optimizer, kind=kind, start=start, interval=interval, decay=0.8)
    path = walked(model, optimizer, 31)
    expected = (
        tail(path, start=start, interval=interval)
        if kind == "tail"
        else exponential(path, decay=0.8, start=start, interval=interval)
    )
    assert_near(averages(model, optimizer), expected, **NEAR[torch.float64])


@pytest.mark.parametrize("interval", [1, 4])
def test_initial_weights_are_in_the_tail_average_but_not_in_the_polyak_average(interval):
    model, other = network(torch.float64), network(torch.float64)
    optimizer, second = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    average = IterateAverage(optimizer, kind="polyak", interval=interval)
    IterateAverage(second, interval=interval)
    path = walked(model, optimizer, 21)
    walked(other, second, 21)
    assert_near(averages(model, optimizer), polyak(path, interval=interval), **NEAR[torch.float64])
    assert average.count == 21 // interval
    everyone = [sum(c) / len(c) for c in zip(*path[::interval], strict=True)]
    assert_near(averages(other, second), everyone, **NEAR[torch.float64])


def test_average_from_step_zero_begins_with_weights_loaded_after_it_was_created():
    model = network(torch.float64)
    optimizer = Adam(model.parameters(), lr=0.1)
    IterateAverage(optimizer)
    model.load_state_dict(network(torch.float64, seed=3).state_dict())
    path = walked(model, optimizer, 5)
    assert_near(averages(model, optimizer), tail(path))


def test_averaging_works_if_gradients_are_cleared_after_the_step():
    model = network(torch.float64)
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda one, *_: one.zero_grad())
    IterateAverage(optimizer)
    path = walked(model, optimizer, 3)
    assert_near(averages(model, optimizer), tail(path), **NEAR[torch.float64])


def test_averaging_works_with_closures_and_lbfgs():
    model = network(torch.float64)
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=3)
    average = IterateAverage(optimizer, start=2)
    path = walked(model, optimizer, 6, closure=True)
    assert_near(averages(model, optimizer), tail(path, start=2), **NEAR[torch.float64])
    assert average.step == 6


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_are_averaged(dtype):
    start = torch.view_as_complex(inputs(0, 2).T.contiguous().double()).to(dtype)
    model = nn.ParameterList([nn.Parameter(start)])
    optimizer = AdamW(model.parameters(), lr=0.1)
    IterateAverage(optimizer)
    path = [weights(model)]
    for _ in range(9):
        optimizer.zero_grad()
        (model[0] - 1j).abs().square().sum().backward()
        optimizer.step()
        path.append(weights(model))
    (found,) = averages(model, optimizer)
    assert found.dtype == dtype
    precision = NEAR[torch.float32 if dtype == torch.complex64 else torch.float64]
    assert_near([found], tail(path), **precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exponential_average_of_half_precision_weights_does_not_stall(dtype):
    """In the precision of the weights a ten-thousandth of the way rounds to nothing."""
    model = network(dtype)
    optimizer = SGD(model.parameters(), lr=0.1)
    IterateAverage(optimizer, kind="ema", decay=0.9999)
    path = walked(model, optimizer, 50)
    found = averages(model, optimizer)
    assert all(average.dtype == torch.float32 for average in found)
    assert_near(found, exponential(path, decay=0.9999), **NEAR[torch.float32])
    moved = torch.cat([(a - w).flatten().abs() for a, w in zip(found, path[0], strict=True)])
    assert float((moved > 0).double().mean()) > 0.9


def test_dtype_sets_the_dtype_of_the_average():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    IterateAverage(optimizer, dtype=torch.float64)
    path = walked(model, optimizer, 20)
    assert_near(averages(model, optimizer), tail(path), **NEAR[torch.float64])


def test_average_of_constant_weights_equals_them_bit_for_bit():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.0)
    IterateAverage(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    walked(model, optimizer, 50)
    assert_same(averages(model, optimizer), before)


def test_first_step_with_learning_rate_zero_is_counted():
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    average = IterateAverage(optimizer)
    schedule = LambdaLR(optimizer, lambda t: float(t))
    path = [weights(model)]
    for step in range(4):
        take_step(model, optimizer, step)
        schedule.step()
        path.append(weights(model))
    assert average.step == 4
    assert_near(averages(model, optimizer), tail(path))


class Branches(nn.Module):
    """One branch for even calls, another for odd ones, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.even, self.odd, self.frozen = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x, even):
        return (self.even if even else self.odd)(self.frozen(x))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_parameters_with_a_late_or_no_gradient_are_averaged(name):
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = OPTIMISERS[name](model.parameters())
    average = IterateAverage(optimizer, start=2, interval=2)
    path = [weights(model)]
    for step in range(12):
        if step == 8:
            model.frozen.requires_grad_(True)
        optimizer.zero_grad()
        model(inputs(step, dtype=torch.float64), step < 4).square().sum().backward()
        optimizer.step()
        path.append(weights(model))
        if step < 8:
            assert "average" not in optimizer.state.get(model.frozen.weight, {})
    with average.applied(model):
        assert_near(weights(model), tail(path, start=2, interval=2), **NEAR[torch.float64])


def test_averaging_compiles_a_step_at_most_once_more():
    torch._dynamo.reset()
    model = network(torch.float64)
    optimizer = Adam(model.parameters(), lr=0.05, foreach=True)
    IterateAverage(optimizer, start=3, interval=2)
    counter = CompileCounter()
    optimizer.step = torch.compile(optimizer.step, backend=counter)
    path = walked(model, optimizer, 12)
    assert_near(averages(model, optimizer), tail(path, start=3, interval=2), **NEAR[torch.float64])
    # The state of a parameter has new keys after the first step.
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()


def test_steps_between_averages_do_not_write_the_average():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    IterateAverage(optimizer, start=2, interval=100)
    walked(model, optimizer, 2)
    versions = [average._version for average in averages(model, optimizer)]
    walked(model, optimizer, 50)
    assert [average._version for average in averages(model, optimizer)] == versions


def test_restart_begins_a_new_average_with_the_current_weights():
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    average = IterateAverage(optimizer, start=None)
    first = walked(model, optimizer, 5)
    assert (average.count, average.start) == (0, None)
    average.restart()
    assert (average.count, average.start) == (1, 6)
    assert_near(averages(model, optimizer), first[-1], rtol=0, atol=0)
    assert_near(averages(model, optimizer), tail(walked(model, optimizer, 6)))
    average.restart()
    assert_near(averages(model, optimizer), tail(walked(model, optimizer, 3)))
    assert (average.count, average.step, average.start) == (4, 14, 12)
