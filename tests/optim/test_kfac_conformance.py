"""K-FAC behaves like an optimiser of torch: schedulers, groups, state and errors."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from ritz.optim import KFAC

SETTINGS = [{}, {"kind": "ekfac"}, {"nesterov": True, "weight_decay": 0.1}, {"damping": "exact"}]
every = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def problem(seed=0, dtype=torch.float64):
    noise = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=noise, dtype=torch.float64))
    x = torch.randn(6, 5, generator=noise, dtype=torch.float64).to(dtype)
    return model, x, torch.randn(6, 2, generator=noise, dtype=torch.float64).to(dtype)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def run(model, optimizer, x, y, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@every
@pytest.mark.parametrize("tensor", [False, True])
def test_optimiser_reduces_the_loss_with_a_scheduler_and_a_closure(settings, tensor):
    model, x, y = problem()
    rate = torch.tensor(0.01) if tensor else 0.01
    optimizer = KFAC(model, lr=rate, delta=0.1, **settings)
    scheduler = StepLR(optimizer, step_size=5, gamma=0.9)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    losses = []
    for _ in range(20):
        losses.append(float(optimizer.step(closure).detach()))
        scheduler.step()
    assert losses[-1] < losses[0]


@every
def test_transposed_weights_take_the_same_steps(settings):
    found = []
    for transposed in (False, True):
        model, x, y = problem()
        if transposed:
            model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
        found.append(run(model, KFAC(model, lr=0.1, delta=0.1, **settings), x, y))
    torch.testing.assert_close(*found)


@every
def test_images_in_channels_last_take_the_same_steps(settings):
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=layout).double()
        x = torch.arange(150.0, dtype=torch.float64).reshape(2, 3, 5, 5).sin()
        x = x.to(memory_format=layout)
        optimizer = KFAC(model, lr=0.1, delta=0.1, **settings)
        found.append(run(model, optimizer, x, torch.zeros(2, 36).double()))
    torch.testing.assert_close(*found)


def test_plateau_scheduler_lowers_the_learning_rate():
    model, _, _ = problem()
    optimizer = KFAC(model, lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_a_rate_of_zero_changes_nothing():
    model, x, y = problem()
    optimizer = KFAC(model, lr=0.1)
    LambdaLR(optimizer, lambda step: 0.0)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(run(model, optimizer, x, y), before)


def test_groups_have_their_own_settings():
    model, x, y = problem()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "delta": 10.0},
    ]
    optimizer = KFAC(model, lr=0.1, delta=0.1, params=groups, momentum=0)
    whole, _, _ = problem()
    other = KFAC(whole, lr=0.1, delta=10.0, momentum=0)
    before = model[0].weight.detach().clone()
    run(model, optimizer, x, y, steps=1)
    run(whole, other, x, y, steps=1)
    assert torch.equal(model[0].weight, before)
    torch.testing.assert_close(model[2].weight, whole[2].weight)


def test_no_gradients_is_nothing_to_do():
    model, x, y = problem()
    optimizer = KFAC(model, lr=0.1)
    optimizer.step()
    assert optimizer.curvature.steps == 0
    run(model, optimizer, x, y, steps=1)
    assert optimizer.curvature.steps == 1


@every
def test_zero_gradients_without_decay_change_nothing(settings):
    model, x, y = problem()
    optimizer = KFAC(model, lr=0.1, **(settings | {"weight_decay": 0.0}))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    (0 * loss_of(model, x, y)).backward()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(before, after)


@every
def test_step_does_not_change_the_gradients(settings):
    model, x, y = problem()
    optimizer = KFAC(model, lr=0.1, **settings)
    loss_of(model, x, y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))


def test_state_dict_round_trip_and_hooks():
    model, x, y = problem()
    optimizer = KFAC(model, lr=0.1)
    run(model, optimizer, x, y, steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    seen = []
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(opt))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    optimizer.load_state_dict(state)
    run(model, optimizer, x, y, steps=1)
    assert seen == [optimizer, optimizer]
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    assert again["param_groups"] == state["param_groups"]
    for index, entry in state["state"].items():
        assert entry.keys() == again["state"][index].keys()
        assert all(torch.equal(entry[k], again["state"][index][k]) for k in entry)


def test_error_messages_are_those_of_torch():
    model, _, _ = problem()
    with pytest.raises(ValueError, match="momentum must be less than 1"):
        KFAC(model, momentum=1.0)
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        KFAC(model, lr=torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        KFAC(model, params=[])
    with pytest.raises(ValueError, match="KFAC takes all parameter groups when it is created"):
        KFAC(model).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    words = nn.Embedding(3, 2, sparse=True)
    with pytest.warns(UserWarning, match="Embedding is not known"):
        optimizer = KFAC(words)
    words(torch.tensor([0, 1])).sum().backward()
    with pytest.raises(RuntimeError, match="KFAC does not support sparse gradients"):
        optimizer.step()
