"""Lookahead against a reference of ten lines, and with other optimisers of torch."""

import copy

import pytest
import torch
from optim.walks import (
    assert_near,
    assert_same,
    averages,
    loss_of,
    network,
    tail,
    take_step,
    walked,
    weights,
)
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ritz.optim import AutoAverage, Gadam, IterateAverage, Lookahead

INNER = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.02),
    "adamw fused": lambda p: AdamW(p, lr=0.02, fused=True),
}
EXACT = {"rtol": 1e-13, "atol": 1e-13}  # a few roundings a synchronisation


def reference(make, num_steps, *, k=5, alpha=0.5, until=10**9):
    """The published algorithm: the slow weights are there from the start."""
    model = network(torch.float64)
    optimizer = make(model.parameters())
    slow, path = weights(model), [weights(model)]
    for t in range(1, num_steps + 1):
        take_step(model, optimizer, t - 1)
        if t % k == 0 and t < until:
            for p, s in zip(model.parameters(), slow, strict=True):
                s += alpha * (p.detach() - s)
                p.data.copy_(s)
        path.append(weights(model))
    return path


def assert_same_path(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert_near(left, right, **EXACT)


@pytest.mark.parametrize(("k", "alpha"), [(5, 0.5), (1, 0.3), (6, 0.8), (3, 1.0)])
@pytest.mark.parametrize("name", INNER)
def test_every_iterate_equals_the_published_algorithm(name, k, alpha):
    model = network(torch.float64)
    optimizer = Lookahead(INNER[name](model.parameters()), k=k, alpha=alpha)
    expected = reference(INNER[name], 17, k=k, alpha=alpha)
    assert_same_path(walked(model, optimizer, 17), expected)


def test_the_first_synchronisation_pulls_towards_the_initial_weights():
    """Slow weights that begin at the first synchronisation leave it without effect."""
    model = network(torch.float64)
    path = walked(model, Lookahead(SGD(model.parameters(), lr=0.1), k=2), 2)
    plain = network(torch.float64)
    fast = walked(plain, SGD(plain.parameters(), lr=0.1), 2)
    middle = [(a + b) / 2 for a, b in zip(fast[0], fast[2], strict=True)]
    assert_near(path[2], middle, **EXACT)
    assert_near(path[1], fast[1], rtol=0, atol=0)


@pytest.mark.parametrize("until", [1, 5, 6, 11])
def test_lookahead_stops_when_averaging_starts(until):
    model = network(torch.float64)
    optimizer = Lookahead(Adam(model.parameters(), lr=0.02), until=until)
    IterateAverage(optimizer, start=until)
    path = walked(model, optimizer, 17)
    expected = reference(INNER["adam"], 17, until=until)
    assert_same_path(path, expected)
    assert_near(averages(model, optimizer), tail(expected, start=until), **EXACT)


def test_stop_acts_at_once_and_is_saved_in_the_state():
    model = network(torch.float64)
    optimizer = Lookahead(Adam(model.parameters(), lr=0.02))
    walked(model, optimizer, 7)
    optimizer.stop()
    assert optimizer.until == 8
    again = Lookahead(Adam(network().parameters(), lr=0.02))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.until == 8
    expected = reference(INNER["adam"], 7)[-1]
    assert_near(weights(model), expected, **EXACT)
    plain = copy.deepcopy(model)
    inner = Adam(plain.parameters(), lr=0.02)
    inner.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    walked(model, optimizer, 6)
    walked(plain, inner, 6)
    assert_same(model.parameters(), plain.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_resuming_from_a_state_dict_is_exact_bit_for_bit(stop, dtype):
    model = network(dtype)
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1, momentum=0.9))
    walked(model, optimizer, stop)
    twin = network(dtype, seed=5)
    second = Lookahead(SGD(twin.parameters(), lr=0.1, momentum=0.9))
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    walked(model, optimizer, 11)
    walked(twin, second, 11)
    assert_same(twin.parameters(), model.parameters())
    slow = [[o.state[p]["slow"] for p in m.parameters()] for m, o in ((model, optimizer),
                                                                      (twin, second))]  # fmt: skip
    assert_same(*slow)
    assert slow[0][0].dtype == torch.promote_types(dtype, torch.float32)


def test_average_and_slow_weights_are_saved_in_one_state():
    def made(seed=0):
        model = network(seed=seed)
        optimizer = Lookahead(Adam(model.parameters(), lr=0.02), until=6)
        return model, optimizer, IterateAverage(optimizer, start=6)

    model, optimizer, average = made()
    walked(model, optimizer, 9)
    twin, second, other = made(seed=3)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    walked(model, optimizer, 4)
    walked(twin, second, 4)
    assert_same(averages(twin, second), averages(model, optimizer))
    assert (other.count, other.step) == (average.count, 13)


def test_lookahead_works_with_schedulers_hooks_closures_and_groups():
    model = network(torch.float64)
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = Lookahead(inner, k=2)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("outer"))
    inner.register_step_post_hook(lambda *_: seen.append("inner"))
    take_step(model, optimizer, 0, closure=True)
    scheduler.step()
    take_step(model, optimizer, 1)
    scheduler.step()
    assert seen == ["inner", "outer"] * 2
    assert [group["lr"] for group in inner.param_groups] == [pytest.approx(0.01)]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert len(inner.param_groups) == 2 == len(optimizer.param_groups)
    assert optimizer.param_groups is inner.param_groups
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert repr(optimizer).startswith("Lookahead(k=2, alpha=0.5, until=None) of SGD (")
    assert "lr: 0.5" in repr(optimizer)


def test_frozen_parameters_are_left_alone():
    model = network(torch.float64)
    model.requires_grad_(False)
    before = weights(model)
    optimizer = Lookahead(AdamW(model.parameters()), k=2)
    for _ in range(4):
        optimizer.step()
    assert_same(weights(model), before)


def test_tensors_with_a_gradient_that_require_none_are_followed():
    """torch updates them, so slow weights and averages must include them."""
    tensor = torch.ones(3, dtype=torch.float64)
    tensor.grad = torch.ones_like(tensor)
    optimizer = Lookahead(SGD([tensor], lr=0.1), k=2)
    IterateAverage(optimizer, start=1)
    optimizer.step()
    optimizer.step()
    # phi = 1 + (0.8 - 1) / 2, and the average is that of 1, 0.9 and 0.9.
    torch.testing.assert_close(tensor, torch.full_like(tensor, 0.9), **EXACT)
    average = optimizer.state[tensor]["average"]
    torch.testing.assert_close(average, torch.full_like(tensor, 2.8 / 3), **EXACT)


def test_global_hooks_run_once_per_step():
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    model = network()
    optimizer = copy.deepcopy(Lookahead(SGD(model.parameters(), lr=0.1)))
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert seen == ["before", "after"]


def test_a_pre_hook_of_lookahead_may_replace_the_closure():
    optimizer = Lookahead(SGD(network().parameters(), lr=0.1))
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0


def test_state_dict_hooks_of_lookahead_change_what_is_saved_and_loaded():
    model = network()
    optimizer = Lookahead(SGD(model.parameters(), lr=0.1))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"note": 3})
    walked(model, optimizer, 2)
    state = optimizer.state_dict()
    assert state["note"] == 3
    seen = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, loaded: (
            loaded | {"param_groups": [g | {"lr": 7.0} for g in state["param_groups"]]}
        )
    )
    optimizer.register_load_state_dict_post_hook(lambda found: seen.append(found))
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert seen == [optimizer]


def test_parameters_added_later_get_slow_weights():
    model, late = network(torch.float64), nn.Parameter(torch.full((2,), 8.0, dtype=torch.float64))
    optimizer = Lookahead(SGD(model.parameters(), lr=0.5), k=4)
    walked(model, optimizer, 2)
    optimizer.add_param_group({"params": [late]})
    for step in (2, 3):
        model.zero_grad()
        loss_of(model, step).backward()
        late.grad = torch.ones_like(late)
        optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((2,), 7.5, dtype=torch.float64))


def test_lookahead_works_around_lbfgs():
    model = network(torch.float64)
    optimizer = Lookahead(LBFGS(model.parameters(), lr=0.5, max_iter=2), k=2)
    path = walked(model, optimizer, 2, closure=True)
    plain = network(torch.float64)
    fast = walked(plain, LBFGS(plain.parameters(), lr=0.5, max_iter=2), 2, closure=True)
    middle = [(a + b) / 2 for a, b in zip(fast[0], fast[2], strict=True)]
    assert_near(path[2], middle, **EXACT)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_steps_that_mixed_precision_skips_are_not_counted(fused, outer):
    make = lambda p: AdamW(p, lr=0.02, fused=fused)  # noqa: E731
    model = network(torch.float64)
    inner = make(model.parameters())
    optimizer = Lookahead(inner, k=2)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in (0, 100, 1, 101, 2):  # one more that counted would synchronise too early
        optimizer.zero_grad()
        loss = loss_of(model, step % 100) * (float("inf") if step >= 100 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer if outer else inner)
        scaler.update()
    assert_near(weights(model), reference(make, 3, k=2)[-1], **EXACT)


def test_deep_copy_of_lookahead_is_independent():
    model = network()
    optimizer = Lookahead(Adam(model.parameters(), lr=0.02))
    walked(model, optimizer, 7)
    twin, second = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    walked(twin, second, 6)
    assert_same(model.parameters(), before)
    walked(model, optimizer, 6)
    assert_same(twin.parameters(), model.parameters())


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"alpha": 1.5}, "alpha must be between 0.0 and 1.0"),
        ({"until": 0}, "until must be at least 1"),
    ],
)
def test_error_names_the_setting_that_is_out_of_range(bad, match):
    with pytest.raises(ValueError, match=match):
        Lookahead(SGD(network().parameters(), lr=0.1), **bad)


def test_second_average_or_lookahead_on_one_optimiser_raises():
    params = list(network().parameters())
    optimizer = Lookahead(Gadam(params))
    assert AutoAverage(optimizer).average is optimizer.optimizer.average
    with pytest.raises(ValueError, match="optimizer must not have average weights already"):
        IterateAverage(optimizer)
    with pytest.raises(ValueError, match="optimizer must not have slow weights already"):
        Lookahead(optimizer)


def test_lookahead_raises_for_something_that_is_not_an_optimiser():
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got list"):
        Lookahead([1])
