import io
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LRScheduler, SequentialLR

from ritz.optim import (
    DampedAdamW,
    GroupSchedule,
    Schedule,
    averaging_decay,
    held_from,
    linear_decay,
    step_decay,
    warmup,
)


def optimizer(**settings):
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    groups = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.3}]
    return torch.optim.AdamW(groups, **settings)


def followed(schedule, optimizer, num_steps, key="lr"):
    """The values that each of so many steps is taken with, of the first group."""
    values = []
    for _ in range(num_steps):
        values.append(float(optimizer.param_groups[0][key]))
        optimizer.step()
        schedule.step()
    return values


def test_linear_decay_is_constant_then_linear_then_constant():
    shape = linear_decay(100)
    assert [shape(t) for t in (0, 25, 50)] == [1.0, 1.0, 1.0]
    assert shape(70) == pytest.approx(0.505)  # half way from 1 to 0.01
    assert shape(90) == pytest.approx(0.01)
    assert shape(91) == shape(100) == shape(1000) == 0.01
    values = [shape(t) for t in range(101)]
    assert values == sorted(values, reverse=True)


def test_averaging_decay_is_linear_decay_until_averaging_starts():
    shape, plain = averaging_decay(60), linear_decay(60, final=0.5)
    assert [shape(t) for t in range(80)] == [plain(t) for t in range(80)]
    assert shape(30) == 1.0
    assert shape(42) == pytest.approx(0.75)
    assert shape(55) == shape(60) == shape(200) == 0.5


def test_linear_decay_with_hold_equal_to_until_is_a_step():
    shape = linear_decay(10, hold=0.5, until=0.5, final=0.2)
    assert [shape(t) for t in (4, 5, 6)] == [1.0, 1.0, 0.2]


def test_step_decay_changes_at_its_milestones():
    shape = step_decay([2, 5], factor=0.5)
    assert [shape(t) for t in range(7)] == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_warmup_multiplies_any_shape_without_delaying_it():
    shape = warmup(4, then=step_decay([3, 6], factor=0.1))
    expected = [0.25, 0.5, 0.75, 0.1, 0.1, 0.1, 0.01]
    assert [shape(t) for t in range(7)] == pytest.approx(expected)
    assert [warmup(2)(t) for t in range(3)] == [0.5, 1.0, 1.0]


def test_schedule_uses_the_initial_learning_rate_of_each_group():
    adam = optimizer()
    schedule = Schedule(adam, linear_decay(10))
    assert isinstance(schedule, LRScheduler)
    for t in range(12):
        factor = linear_decay(10)(t)
        rates = [group["lr"] for group in adam.param_groups]
        assert rates == schedule.get_last_lr() == [0.1 * factor, 0.3 * factor]
        adam.step()
        schedule.step()


def test_schedule_accepts_one_shape_per_group():
    adam = optimizer()
    schedule = Schedule(adam, [step_decay([1]), lambda step: 1.0 + step])
    adam.step()
    schedule.step()
    assert [group["lr"] for group in adam.param_groups] == pytest.approx([0.01, 0.6])


def test_tensor_learning_rates_are_set_in_place():
    weight = torch.zeros(2, requires_grad=True)
    adam = torch.optim.AdamW([weight], lr=torch.tensor(0.5), foreach=False)
    rate = adam.param_groups[0]["lr"]
    schedule = Schedule(adam, step_decay([1], factor=0.5))
    followed(schedule, adam, 1)
    assert adam.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_schedule_works_in_torch_sequential_lr():
    adam = optimizer()
    parts = [Schedule(adam, warmup(4)), Schedule(adam, linear_decay(10))]
    values = followed(SequentialLR(adam, parts, milestones=[4]), adam, 14)
    shapes = [warmup(4)(t) for t in range(4)] + [linear_decay(10)(t) for t in range(10)]
    assert values == pytest.approx([0.1 * shape for shape in shapes])


def test_schedule_may_be_followed_by_a_recursive_scheduler_of_torch():
    adam = optimizer()
    parts = [Schedule(adam, warmup(2)), ExponentialLR(adam, 0.5)]
    values = followed(SequentialLR(adam, parts, milestones=[2]), adam, 5)
    assert values == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.025])


@pytest.mark.parametrize("num_done", [0, 3, 7])
def test_schedule_resumes_from_its_state(num_done):
    shape = warmup(2, then=linear_decay(10))
    whole = optimizer()
    expected = followed(Schedule(whole, shape), whole, 12)
    first = optimizer()
    schedule = Schedule(first, shape)
    values = followed(schedule, first, num_done)
    file = io.BytesIO()
    torch.save((first.state_dict(), schedule.state_dict()), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)  # plain numbers: nothing is unpickled
    second = optimizer()
    schedule = Schedule(second, shape)
    second.load_state_dict(states[0])
    schedule.load_state_dict(states[1])
    assert values + followed(schedule, second, 12 - num_done) == expected


def test_shapes_can_be_pickled():
    shape = warmup(3, then=averaging_decay(20))
    again = pickle.loads(pickle.dumps(shape))
    assert [again(t) for t in range(30)] == [shape(t) for t in range(30)]


@pytest.mark.parametrize("key", ["eps", "weight_decay"])
def test_group_schedule_changes_any_setting(key):
    adam = optimizer(eps=1e-3, weight_decay=0.2)
    begun, shape = adam.param_groups[0][key], linear_decay(10)
    schedule = GroupSchedule(adam, shape, key=key)
    values = followed(schedule, adam, 12, key=key)
    assert values == [begun * shape(t) for t in range(12)]
    assert schedule.get_last_values() == [begun * 0.01] * 2
    assert adam.param_groups[0]["lr"] == 0.1


def test_steps_use_the_scheduled_damping(rng):
    gradients = torch.randn(6, 5, generator=rng)
    ours, theirs = (torch.ones(5, requires_grad=True) for _ in range(2))
    damped, plain = DampedAdamW([ours], delta=0.5), torch.optim.AdamW([theirs], eps=0.5)
    schedule = GroupSchedule(damped, linear_decay(5), key="delta")
    for t, gradient in enumerate(gradients):
        plain.param_groups[0]["eps"] = 0.5 * linear_decay(5)(t)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        damped.step()
        plain.step()
        schedule.step()
    torch.testing.assert_close(ours, theirs)


def test_group_schedule_works_in_torch_chained_scheduler():
    adam = optimizer(eps=1e-3)
    damping = GroupSchedule(adam, step_decay([2]), key="eps")
    chained = ChainedScheduler([Schedule(adam, step_decay([1])), damping], optimizer=adam)
    followed(chained, adam, 2)
    assert [adam.param_groups[0][key] for key in ("lr", "eps")] == pytest.approx([0.01, 1e-4])
    assert chained.state_dict()["_schedulers"][1] == {"num_steps": 2}


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_group_schedule_resumes_from_its_state(optimizer_first):
    first = optimizer(eps=1e-3)
    schedule = GroupSchedule(first, linear_decay(8), key="eps")
    followed(schedule, first, 6)
    second = optimizer(eps=5.0)  # what the state of the optimiser replaces
    if optimizer_first:
        second.load_state_dict(first.state_dict())
    again = GroupSchedule(second, linear_decay(8), key="eps")
    again.load_state_dict(schedule.state_dict())
    second.load_state_dict(first.state_dict())
    assert again.get_last_values() == schedule.get_last_values()
    rest = followed(schedule, first, 4, key="eps")
    assert followed(again, second, 4, key="eps") == rest


def test_group_schedule_sets_a_tensor_in_place():
    adam = optimizer()
    damping = torch.tensor(2.0)
    for group in adam.param_groups:
        group["delta"] = damping.clone()
    held = adam.param_groups[0]["delta"]
    schedule = GroupSchedule(adam, step_decay([1], factor=0.5), key="delta")
    schedule.step()
    assert adam.param_groups[0]["delta"] is held
    assert float(held) == 1.0


def test_group_schedule_takes_groups_that_are_added_later():
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    adam = DampedAdamW(layers[0].parameters(), delta=0.1)
    schedule = GroupSchedule(adam, step_decay([1], factor=0.5), key="delta")
    adam.add_param_group({"params": list(layers[1].parameters()), "delta": 0.4})

    schedule.step()

    assert schedule.get_last_values() == [0.05, 0.2]
    several = GroupSchedule(adam, [warmup(2), warmup(2)], key="weight_decay")
    adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="shape must be a function or one for each of 3 groups"):
        several.step()


@pytest.mark.parametrize("key", ["amsgrad", "betas", "params", "damping"])
def test_group_schedule_raises_for_a_setting_that_is_not_a_number(key):
    with pytest.raises(ValueError, match=f"numeric setting .lr, eps, weight_decay.*got '{key}'"):
        GroupSchedule(optimizer(), linear_decay(10), key=key)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: linear_decay(0), "num_steps"),
        (lambda: linear_decay(10, final=-0.1), "final"),
        (lambda: linear_decay(10, hold=1.5), "hold must be between 0.0 and 1.0, got 1.5"),
        (lambda: linear_decay(10, hold=0.8, until=0.7), "until must be between 0.8"),
        (lambda: averaging_decay(0), "start"),
        (lambda: step_decay([3, 3]), "milestones must ascend"),
        (lambda: step_decay([-1]), "milestones"),
        (lambda: step_decay([1], factor=-1.0), "factor"),
        (lambda: warmup(0), "num_steps"),
        (lambda: Schedule(optimizer(), [warmup(2)]), "each of 2 groups"),
        (lambda: Schedule(optimizer(), 0.1), "shape must be a function"),
    ],
)
def test_schedule_error_names_the_wrong_shape(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_schedule_raises_for_something_that_is_not_an_optimiser():
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got Linear"):
        Schedule(torch.nn.Linear(1, 1), warmup(2))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: warmup(3, then=0.5), "then must be a function of the steps done, got float"),
        (lambda: held_from(3, 0.5), "shape must be a function of the steps done, got float"),
        (lambda: step_decay(3), "milestones must be a list of steps, got int"),
    ],
)
def test_shapes_that_cannot_be_called_raise_when_they_are_made(make, match):
    with pytest.raises(TypeError, match=match):
        make()
