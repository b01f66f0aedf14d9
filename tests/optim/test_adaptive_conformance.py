"""The adaptive optimisers behave like those of torch: groups, state, flags and errors."""

import copy
import functools
import io
import pickle

import pytest
import torch
from optim.optimizer_cases import EVERY, build, copied, give_gradients, parameters, run, seeded
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

every = pytest.mark.parametrize("name", EVERY)
FUSED = ("DampedAdamW", "Gadam", "PadamW half")


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def assert_near(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@every
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("schedule", [None, functools.partial(StepLR, step_size=5, gamma=0.9)])
def test_optimiser_reduces_the_loss(rng, name, contiguous, schedule):
    weights = torch.randn(10, 5, 2, generator=rng)
    weight = torch.nn.Parameter(weights[..., 0].clone() if contiguous else weights[..., 0])
    vector = torch.randn(5, generator=rng)
    optimizer = build(name, [weight])
    scheduler = schedule(optimizer) if schedule else None

    def closure():
        optimizer.zero_grad()
        loss = weight.mv(vector).square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(20):
        losses.append(float(optimizer.step(closure).detach()))
        if scheduler:
            scheduler.step()
    assert losses[-1] < losses[0]


@every
def test_plateau_scheduler_lowers_the_learning_rate(rng, name):
    params = parameters(rng)
    optimizer = build(name, params)
    before = optimizer.param_groups[0]["lr"]
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < before


@every
def test_maximize_equals_minimising_the_negative_loss(name):
    ours, mirrored = parameters(seeded()), parameters(seeded())
    up, down = build(name, ours, maximize=True), build(name, mirrored)
    for p, q in zip(ours, mirrored, strict=True):
        p.grad, q.grad = torch.ones_like(p), -torch.ones_like(q)
    up.step()
    down.step()
    assert_same(ours, mirrored)


@every
def test_foreach_steps_equal_steps_one_by_one(name):
    results = []
    for foreach in (False, True):
        params = [*parameters(seeded()), torch.nn.Parameter(torch.empty(0, dtype=torch.float64))]
        params += parameters(seeded(), dtype=torch.float32)
        results.append(run(build(name, params, foreach=foreach), params, seeded(1)))
    assert_near(*results)


@every
@pytest.mark.parametrize("foreach", [False, True])
def test_parameters_without_gradient_do_not_change(name, foreach):
    params = parameters(seeded())
    optimizer = build(name, params, foreach=foreach)
    give_gradients(params, seeded(1))
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert "step" not in optimizer.state[params[1]]
    optimizer.zero_grad()
    optimizer.step()  # nothing to do
    assert optimizer.state[params[0]]["step"] == 1


@every
def test_each_parameter_counts_its_steps_from_its_first_gradient(name):
    results = []
    for foreach in (False, True):
        params = parameters(seeded())
        optimizer, noise = build(name, params, foreach=foreach), seeded(1)
        for late in (True, True, False, False):
            give_gradients(params, noise)
            if late:
                params[1].grad = None
            optimizer.step()
        assert [int(optimizer.state[p]["step"]) for p in params] == [4, 2, 4]
        results.append(params)
    assert_near(*results)


@every
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}])
def test_zero_gradients_without_decay_change_nothing(name, how):
    params = parameters(seeded(), dtype=torch.float32)
    before = copied(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    build(name, params, weight_decay=0.0, **how).step()
    assert_same(params, before)


@every
@pytest.mark.parametrize("foreach", [None, False, True])
def test_step_does_not_change_the_gradients(name, foreach):
    params = parameters(seeded())
    optimizer = build(name, params, foreach=foreach, maximize=True)
    give_gradients(params, seeded(1))
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert_same([p.grad for p in params], before)


@every
@pytest.mark.parametrize("foreach", [False, True])
def test_complex_parameters_are_updated_as_pairs_of_real_ones(name, foreach):
    values = parameters(seeded(), dtype=torch.complex128, shapes=((3, 2), (4,)))
    pairs = [torch.nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in values]
    both = build(name, values, foreach=foreach), build(name, pairs, foreach=foreach)
    noise = seeded(1)
    for _ in range(4):
        give_gradients(values, noise)
        for p, q in zip(values, pairs, strict=True):
            q.grad = torch.view_as_real(p.grad)
        for optimizer in both:
            optimizer.step()
    assert_near([torch.view_as_real(p.detach()) for p in values], pairs)


@every
def test_learning_rate_may_be_a_tensor(name):
    number, tensor = parameters(seeded()), parameters(seeded())
    rate = EVERY[name][1]["lr"]
    expected = run(build(name, number), number, seeded(1))
    lr = torch.tensor(rate, dtype=torch.float64)
    assert_near(run(build(name, tensor, lr=lr), tensor, seeded(1)), expected)


@every
def test_groups_are_updated_as_by_separate_optimisers(name):
    together, apart = parameters(seeded()), parameters(seeded())
    rate = EVERY[name][1]["lr"]
    optimizer = build(name, together[:1])
    optimizer.add_param_group({"params": together[1:], "lr": rate / 2, "weight_decay": 0.2})
    others = [
        build(name, apart[:1]),
        build(name, apart[1:], lr=rate / 2, weight_decay=0.2),
    ]
    noise = seeded(1), seeded(1)
    for _ in range(4):
        give_gradients(together, noise[0])
        give_gradients(apart, noise[1])
        for one in (optimizer, *others):
            one.step()
    assert_same(together, apart)


@every
@pytest.mark.parametrize("how", ["state_dict", "file", "deepcopy", "pickle"])
def test_optimiser_resumes_from_its_state_bit_for_bit(name, how):
    params = parameters(seeded())
    optimizer = build(name, params)
    run(optimizer, params, seeded(1), steps=6)
    if how in ("deepcopy", "pickle"):
        pair = (params, optimizer)
        again, second = (
            copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        )
    else:
        again = copied(params)
        second, state = build(name, again), optimizer.state_dict()
        if how == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        second.load_state_dict(copy.deepcopy(state))
    assert_same(run(second, again, seeded(2)), run(optimizer, params, seeded(2)))
    if hasattr(optimizer, "average"):
        assert second.average.count == optimizer.average.count
        assert second.average.step == optimizer.average.step == 11
        for p, q in zip(params, again, strict=True):
            assert torch.equal(optimizer.state[p]["average"], second.state[q]["average"])


@every
def test_state_of_an_older_version_loads(name):
    params = parameters(seeded())
    optimizer = build(name, params)
    run(optimizer, params, seeded(1))
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in ("maximize", "foreach", "fused", "capturable", "differentiable", "compile"):
            del group[flag]
    for state in old["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(old)
    run(optimizer, params, seeded(2), steps=1)
    assert torch.is_tensor(optimizer.state[params[0]]["step"])
    assert optimizer.state[params[0]]["step"] == 6


@every
def test_every_setting_is_in_the_defaults_and_the_groups(name):
    optimizer = build(name, parameters(seeded()))
    keys = {"lr", "betas", "weight_decay", "partial", "form", "amsgrad", "maximize", "foreach"}
    keys |= {"fused", "capturable", "differentiable", "compile", "decoupled_weight_decay"}
    assert keys <= set(optimizer.defaults)
    assert keys <= set(optimizer.param_groups[0])
    assert "lr" in repr(optimizer)


@every
def test_step_hooks_run_before_and_after_the_step(name):
    params = parameters(seeded())
    optimizer, seen = build(name, params), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, params, seeded(1), steps=2)
    assert seen == ["before", "after"] * 2


@every
def test_steps_can_be_differentiated(name):
    start = torch.randn(3, generator=seeded(), dtype=torch.float64)
    grads = torch.rand(2, 3, generator=seeded(1), dtype=torch.float64) + 0.5

    def after(weights, grads):
        weights = weights.clone()
        optimizer = build(name, [weights], differentiable=True)
        for grad in grads:
            weights.grad = grad
            optimizer.step()
        return weights

    inputs = start.requires_grad_(), grads.requires_grad_()
    torch.autograd.gradcheck(after, inputs)


def test_gradient_with_respect_to_the_learning_rate_is_exact():
    start = torch.randn(3, generator=seeded(), dtype=torch.float64)
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def after(rate):
        weights = start.clone()
        optimizer = build("GadamX", [weights], lr=rate, differentiable=True)
        for _ in range(2):
            weights.grad = start + 1
            optimizer.step()
        return weights

    torch.autograd.gradcheck(after, rate)


@every
def test_gradient_scaler_skips_overflow_and_unscales(name):
    plain, scaled = parameters(seeded()), parameters(seeded())
    first, second = build(name, plain), build(name, scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    noise = seeded(1)
    for index in range(6):
        give_gradients(plain, noise)
        for p, q in zip(plain, scaled, strict=True):
            q.grad = p.grad * scaler.scale(torch.ones((), dtype=torch.float64))
        if index == 3:
            scaled[0].grad.view(-1)[0] = torch.inf
        else:
            first.step()
        scaler.step(second)
        scaler.update()
    assert second._step_supports_amp_scaling == (name in FUSED)
    assert second.state[scaled[0]]["step"] == 5
    assert_near(scaled, plain)


@every
def test_sparse_gradients_are_refused(name):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        build(name, [p]).step()


@every
def test_parameters_may_be_named(name):
    model = torch.nn.Linear(3, 2)
    optimizer = build(name, model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in FUSED])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capturable_steps_equal_ordinary_steps(name, foreach, dtype):
    results = []
    for capturable in (False, True):
        params = parameters(seeded(), dtype=dtype)
        optimizer = build(name, params, foreach=foreach, capturable=capturable)
        results.append(run(optimizer, params, seeded(1)))
    assert_near(*results)


@pytest.mark.parametrize("name", EVERY)
def test_a_state_of_other_shapes_is_refused(name):
    params = parameters(seeded(), shapes=((4, 3), (5,)))
    optimizer = build(name, params)
    run(optimizer, params, seeded(1), steps=1)
    others = parameters(seeded(), shapes=((4, 3), (5, 3)))
    before = [p.detach().clone() for p in others]
    other = build(name, others)
    with pytest.raises(ValueError, match=r"state_dict does not match: its \w+ of parameter 1"):
        other.load_state_dict(optimizer.state_dict())
    assert not other.state
    assert_near(others, before)
