"""Averages in the state of an optimiser: saved, loaded, skipped steps left out, misuse refused."""

import io

import pytest
import torch
from optim.walks import (
    assert_near,
    assert_same,
    averages,
    loss_of,
    network,
    tail,
    trained,
    walked,
    weights,
)
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW

from ritz.optim import IterateAverage


def through_a_file(state):
    """What a file gives back that is read without unpickling."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(model, optimizer, make, **options):
    """A new model, optimiser and average that go on from the state of others."""
    twin = network(next(model.parameters()).dtype, seed=9)
    second = make(twin.parameters())
    average = IterateAverage(second, **options)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    twin.load_state_dict(through_a_file(model.state_dict()))
    return twin, second, average


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["tail", "ema", "polyak"])
def test_resuming_from_a_state_dict_is_exact_bit_for_bit(kind, dtype, stop):
    options = {"kind": kind, "interval": 2, "start": 0 if kind == "polyak" else 6}
    make = AdamW if dtype == torch.float32 else lambda p: SGD(p, lr=0.1)
    model, twin = network(dtype), network(dtype)
    optimizer, second = make(model.parameters()), make(twin.parameters())
    average = IterateAverage(optimizer, **options)
    IterateAverage(second, **options)
    walked(model, optimizer, stop)
    walked(twin, second, stop)
    third, fourth, other = resumed(twin, second, make, **options)
    assert (other.count, other.step) == (average.count, stop)
    assert_same(averages(third, fourth), averages(model, optimizer))
    walked(model, optimizer, 12)
    walked(third, fourth, 12)
    assert_same(third.parameters(), model.parameters())
    assert_same(averages(third, fourth), averages(model, optimizer))
    assert (other.count, other.step, other.start) == (average.count, average.step, average.start)


def test_state_has_the_documented_entries():
    model, optimizer, average, _ = trained(start=3)
    optimizer.state_dict()
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["average"].shape == p.shape
        numbers = [int(state[f"average_{name}"]) for name in ("count", "step", "start")]
        assert numbers == [average.count, 12, 3] == [11, 12, 3]


def test_count_in_the_state_is_always_current():
    model, optimizer, average, _ = trained(start=3, interval=3)
    for _ in range(7):
        walked(model, optimizer, 1)
        assert {int(s["average_count"]) for s in optimizer.state.values()} == {average.count}


def test_loaded_average_does_not_share_memory_with_the_state_dict():
    model, optimizer, _, _ = trained()
    state = optimizer.state_dict()
    kept = [a.clone() for a in averages(model, optimizer)]
    twin, second, _, _ = trained(num_steps=1)
    second.load_state_dict(state)
    assert set(state["state"][0]) == set(optimizer.state[next(model.parameters())])
    walked(twin, second, 3)
    assert_same(averages(model, optimizer), kept)


def test_loading_a_state_without_an_average_counts_from_step_zero():
    plain = network(torch.float64)
    old = Adam(plain.parameters())
    walked(plain, old, 4)
    model = network(torch.float64)
    optimizer = Adam(model.parameters())
    average = IterateAverage(optimizer, start=3)
    walked(model, optimizer, 6)
    optimizer.load_state_dict(old.state_dict())
    assert (average.count, average.step) == (0, 0)
    path = walked(model, optimizer, 5)
    assert_near(averages(model, optimizer), tail(path, start=3))


def test_start_may_change_on_resume_before_the_average_has_begun():
    model, optimizer, _, _ = trained(start=100)
    _, _, average = resumed(model, optimizer, AdamW, start=50)
    assert average.start == 50
    model, optimizer, _, _ = trained(start=10)
    _, _, average = resumed(model, optimizer, AdamW, start=50)
    assert average.start == 10
    model, optimizer, _, _ = trained(start=100)
    twin, second, average = resumed(model, optimizer, AdamW, start=5)
    walked(twin, second, 2)
    assert (average.start, average.count) == (13, 3)


@pytest.mark.parametrize("make", [SGD, Adam])
def test_empty_step_of_torch_distributed_checkpoint_is_not_counted(make):
    model = network(torch.float64)
    optimizer = make(model.parameters(), lr=0.1)
    average = IterateAverage(optimizer, start=2)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert all(entry["average"].shape == model.get_parameter(n).shape for n, entry in state.items())
    assert (average.step, average.count) == (0, 0)
    path = walked(model, optimizer, 5)
    assert average.step == 5
    assert_near(averages(model, optimizer), tail(path, start=2))


def infinite_at(bad, scaler, model, optimizer, step):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    scaler.scale(loss * (float("inf") if step in bad else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_mixed_precision_skips_are_not_counted(fused, interval):
    """A fused optimiser is stepped all the same, and does nothing."""
    bad = {0, 3, 4, 7, 8, 13}
    model = network(torch.float64)
    optimizer = AdamW(model.parameters(), lr=0.05, fused=fused)
    average = IterateAverage(optimizer, start=4, interval=interval)
    scaler = GradScaler("cpu", init_scale=4.0)
    path = [weights(model)]
    for step in range(20):
        infinite_at(bad, scaler, model, optimizer, step)
        if step not in bad:
            path.append(weights(model))
        if step == 9:
            optimizer.load_state_dict(optimizer.state_dict())
    assert average.step == 14 == len(path) - 1
    assert_near(averages(model, optimizer), tail(path, start=4, interval=interval))
    assert average.count == 1 + 11 // interval


def test_parameters_added_before_the_average_begins_are_averaged():
    model, late = network(torch.float64), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = Adam(model.parameters())
    IterateAverage(optimizer, start=6)
    walked(model, optimizer, 3)
    optimizer.add_param_group({"params": [late]})
    seen = []
    for step in range(6):
        late.grad = 2 * late.detach()
        seen.append(late.detach().clone())
        walked_once(model, optimizer, step)
    expected = (seen[2] + sum(seen[3:]) + late.detach()) / 5
    torch.testing.assert_close(optimizer.state[late]["average"], expected)


def walked_once(model, optimizer, step):
    """A step that leaves the gradients of other parameters as they are."""
    model.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def test_parameters_added_later_are_refused():
    model, optimizer, _, _ = trained()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="added after the average had begun"):
        walked(model, optimizer, 1)


def named(model):
    optimizer = Adam(model.named_parameters())
    IterateAverage(optimizer)
    return optimizer


def test_a_checkpoint_of_another_model_is_refused_by_name():
    _, optimizer, _, _ = trained()
    state = optimizer.state_dict()
    wide = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(
        ValueError, match=r"does not match: its average of parameter 0 has shape \(5, 3\), "
        r"the parameter \(6, 3\)",
    ):  # fmt: skip
        trained(wide)[1].load_state_dict(state)
    deep = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="state_dict must have 6 parameters, got 4"):
        trained(deep)[1].load_state_dict(state)


def test_parameter_names_are_compared_before_shapes():
    model = network()
    optimizer = named(model)
    walked(model, optimizer, 2)
    other = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 2)})
    with pytest.raises(ValueError, match=r"expected parameter a\.weight, got 0\.weight"):
        named(other).load_state_dict(optimizer.state_dict())


def test_parameter_names_match_with_and_without_wrappers():
    model = network()
    optimizer = named(model)
    walked(model, optimizer, 2)
    wrapped = nn.ModuleDict({"module": torch.compile(network(), backend="eager")})
    second = named(wrapped)
    assert second.param_groups[0]["param_names"][0] == "module._orig_mod.0.weight"
    second.load_state_dict(optimizer.state_dict())
    assert_same(averages(wrapped, second), averages(model, optimizer))


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"start": -1}, ValueError, "start must be at least 0, got -1"),
        ({"start": 1.5}, TypeError, "start must be an integer"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"kind": "ema", "decay": 1.1}, ValueError, "decay must be between 0.0 and 1.0, got 1.1"),
        ({"kind": "ema", "decay": -0.1}, ValueError, "decay must be between"),
        ({"kind": "mean"}, ValueError, "kind must be one of tail, ema, polyak"),
        ({"kind": "polyak", "start": 3}, ValueError, "start must be 0 for kind='polyak'"),
        ({"dtype": torch.bfloat16}, ValueError, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_error_names_the_setting_that_is_out_of_range(bad, error, match):
    with pytest.raises(error, match=match):
        IterateAverage(SGD(network().parameters(), lr=0.1), **bad)


def test_repr_of_an_average_shows_start_count_and_steps():
    _, _, average, _ = trained(start=3, interval=2)
    assert repr(average) == (
        "IterateAverage(AdamW, kind='tail', start=3, interval=2: 6 iterates after 12 steps)"
    )
    _, _, average, _ = trained(kind="ema", start=None, decay=0.5)
    assert "start=None, interval=1, decay=0.5: 0 iterates" in repr(average)


def test_second_average_on_one_optimiser_raises():
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got Seq"):
        IterateAverage(network())
    _, optimizer, _, _ = trained()
    with pytest.raises(ValueError, match="optimizer must not have average weights already"):
        IterateAverage(optimizer)
