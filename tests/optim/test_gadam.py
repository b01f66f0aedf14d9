"""Gadam and GadamX: adaptive steps with an average, and wrong settings of adaptive steps."""

import copy

import pytest
import torch
from optim.optimizer_cases import copied, parameters, run, seeded

from ritz.optim import AutoAverage, Gadam, GadamX, IterateAverage, Padam, PadamW

both = pytest.mark.parametrize("cls", [Gadam, GadamX])


def iterates(optimizer, params, steps):
    """Weights of the first parameter before and after every step."""
    rng = seeded(1)
    found = [params[0].detach().clone()]
    for _ in range(steps):
        run(optimizer, params, rng, steps=1)
        found.append(params[0].detach().clone())
    return torch.stack(found)


@both
@pytest.mark.parametrize(("start", "interval"), [(0, 1), (1, 1), (4, 1), (4, 3)])
def test_average_equals_algorithm_1(cls, start, interval):
    params = parameters(seeded())
    optimizer = cls(params, start=start, interval=interval)
    path = iterates(optimizer, params, 10)
    # From the weights after step T - 1 with n = 1, then after every interval-th step.
    expected = path[max(start, 1) - 1 :: interval].mean(0)
    assert isinstance(optimizer.average, IterateAverage)
    torch.testing.assert_close(optimizer.state[params[0]]["average"], expected)


@both
def test_average_does_not_change_the_steps(cls):
    with_average, without = parameters(seeded()), parameters(seeded())
    plain = PadamW if cls is GadamX else Gadam
    first = run(cls(with_average, lr=0.02, weight_decay=0.1, start=0), with_average, seeded(1))
    second = run(plain(without, lr=0.02, weight_decay=0.1), without, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both
def test_without_start_averaging_begins_with_restart(cls):
    params = parameters(seeded())
    optimizer = cls(params)
    run(optimizer, params, seeded(1), steps=3)
    assert optimizer.average.count == 0
    optimizer.average.restart()
    path = iterates(optimizer, params, 2)
    torch.testing.assert_close(optimizer.state[params[0]]["average"], path.mean(0))


@both
def test_auto_average_uses_the_average_of_the_optimiser(cls):
    optimizer = cls(parameters(seeded()))
    assert AutoAverage(optimizer).average is optimizer.average


@both
def test_copied_optimiser_has_an_independent_average(cls):
    params = parameters(seeded())
    optimizer = cls(params, start=2)
    run(optimizer, params, seeded(1))
    again, second = copy.deepcopy((params, optimizer))
    assert second.average is not optimizer.average
    run(second, again, seeded(2), steps=3)
    assert (optimizer.average.count, second.average.count) == (5, 8)


@both
def test_skipped_steps_are_not_averaged(cls):
    params = parameters(seeded())
    optimizer = cls(params, start=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for overflow in (False, True, False):
        for p in params:
            p.grad = torch.full_like(p, torch.inf if overflow else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.average.step == 2
    assert optimizer.average.count == 3


BAD = [
    ({"partial": 0.6}, ValueError, "partial must be between 0 and 0.5, got 0.6"),
    ({"partial": -0.1}, ValueError, "partial must be between 0 and 0.5, got -0.1"),
    ({"partial": "1/8"}, TypeError, "partial must be a number, got str"),
    ({"lr": -1.0}, ValueError, "lr must be at least 0, got -1.0"),
    ({"lr": "fast"}, TypeError, "lr must be a number, got str"),
    ({"betas": 0.9}, ValueError, "betas must be two numbers, got 0.9"),
    ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
    ({"lr": torch.tensor(0.1), "foreach": True}, ValueError, "lr as a Tensor is not supported"),
    ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be less than 1, got 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] must be at least 0, got -0.1"),
    ({"betas": (0.9,)}, ValueError, "betas must be two numbers"),
    ({"eps": -1e-8}, ValueError, "eps must be at least 0"),
    ({"weight_decay": -1}, ValueError, "weight_decay must be at least 0, got -1"),
    ({"form": "beside"}, ValueError, "form must be one of inside, outside, published"),
    ({"partial": 0.2, "form": "outside"}, ValueError, "form='outside' needs partial=0.5"),
    ({"partial": 0.2, "fused": True}, ValueError, "fused=True needs partial=0.5"),
    ({"partial": 0.5, "form": "inside", "fused": True}, ValueError, "fused=True needs partial=0.5"),
    ({"partial": 0.5, "fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach`"),
    ({"partial": 0.5, "fused": True, "differentiable": True}, RuntimeError, "`fused` does not"),
    ({"foreach": True, "differentiable": True}, RuntimeError, "`foreach` does not support"),
    ({"momentum": 0.9}, TypeError, "unknown arguments momentum"),
]


@pytest.mark.parametrize("cls", [Padam, GadamX])
@pytest.mark.parametrize(("settings", "error", "match"), BAD)
def test_error_names_the_wrong_setting(cls, settings, error, match):
    with pytest.raises(error, match=match):
        cls(parameters(seeded()), **settings)


@pytest.mark.parametrize(("settings", "error", "match"), BAD[:2])
def test_error_names_the_wrong_setting_of_a_group(settings, error, match):
    params = parameters(seeded())
    optimizer = GadamX(params[:1])
    with pytest.raises(error, match=match):
        optimizer.add_param_group({"params": params[1:], **settings})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", [Padam, GadamX])
def test_tensor_learning_rate_set_later_raises_with_foreach(cls):
    params = parameters(seeded())
    optimizer = cls(params, foreach=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(RuntimeError, match="lr as a Tensor is not supported"):
        run(optimizer, params, seeded(1), steps=1)


@both
def test_state_of_another_model_is_refused(cls):
    params = parameters(seeded())
    optimizer = cls(params, start=0)
    run(optimizer, params, seeded(1))
    other = cls(copied(params)[:2], start=0)
    with pytest.raises(ValueError, match=r"state_dict must have|state_dict does not match"):
        other.load_state_dict(optimizer.state_dict())
