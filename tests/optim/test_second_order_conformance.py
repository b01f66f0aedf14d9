"""Second-order optimisers behave like those of torch; wrong input raises."""

import copy
import io
import pickle

import pytest
import torch
from optim.second_order_cases import EVERY, build, network, samples, steps, weights
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from ritz import optim
from ritz.curvature import Risk
from ritz.optim import CurvatureOptimizer, HessianFree, LanczosNewton, SpectralSGD

every = pytest.mark.parametrize("name", EVERY)


def twins(name, **changes):
    model = network()
    return model, build(name, model.parameters(), **changes)


@every
def test_optimiser_reduces_the_loss_with_a_scheduler(name):
    model, optimizer = twins(name)
    batch, scheduler, losses = samples(), StepLR(optimizer, step_size=2, gamma=0.9), []
    for step in range(6):
        losses += steps(optimizer, model, batch, count=1, first=step)
        scheduler.step()
    assert losses[-1] < losses[0]


@every
def test_the_protocol_is_satisfied(name):
    _, optimizer = twins(name)
    assert isinstance(optimizer, CurvatureOptimizer)
    assert issubclass(type(optimizer), CurvatureOptimizer)
    assert not isinstance(torch.optim.SGD([torch.zeros(1)]), CurvatureOptimizer)


@every
def test_a_closure_gives_the_same_step_and_its_loss(name):
    batch, results = samples(), []
    for with_closure in (False, True):
        model, optimizer = twins(name)
        optimizer.update_curvature(Risk(model, cross_entropy, [batch]))

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        loss = optimizer.step(closure) if with_closure else closure()
        if not with_closure:
            optimizer.step()
        results.append((weights(model), float(loss.detach())))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def saved(optimizer, way):
    """The state of an optimiser after a round trip."""
    if way == "torch.save":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file)
    return copy.deepcopy(optimizer.state_dict())


@every
@pytest.mark.parametrize(("way", "done"), [("memory", 2), ("torch.save", 3)])
def test_a_loaded_state_continues_bit_for_bit(name, way, done):
    batch = samples()
    model, optimizer = twins(name)
    steps(optimizer, model, batch, count=done)
    other = network(seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    loaded = build(name, other.parameters())
    loaded.load_state_dict(saved(optimizer, way))

    steps(optimizer, model, batch, count=4, first=done)
    steps(loaded, other, batch, count=4, first=done)

    assert torch.equal(weights(model), weights(other))
    one, two = optimizer.state_dict(), loaded.state_dict()
    assert one["param_groups"] == two["param_groups"]
    for key, entry in one["state"].items():
        assert all(torch.equal(value, two["state"][key][item]) for item, value in entry.items())


@every
def test_copies_and_pickles_continue_by_themselves(name):
    batch = samples()
    model, optimizer = twins(name)
    steps(optimizer, model, batch, count=2)
    # A copy of both together keeps the optimiser on the parameters of its model.
    others = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    steps(optimizer, model, batch, count=3, first=2)
    for twin, copied in others:
        steps(copied, twin, batch, count=3, first=2)
        assert torch.equal(weights(twin), weights(model))


@every
def test_groups_may_differ_in_rate_and_decay(name):
    batch, rates = samples(), (0.3, 0.1)
    model = network()
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    groups = [{"params": p, "lr": rate} for p, rate in zip(layers, rates, strict=True)]
    adapt = {"adapt": False} if name.startswith("HessianFree") else {}
    optimizer = build(name, groups, weight_decay=0.0, **adapt)
    whole, single = network(), None
    single = build(name, whole.parameters(), lr=1.0, weight_decay=0.0, **adapt)
    before = weights(model)
    steps(optimizer, model, batch, count=1)
    steps(single, whole, batch, count=1)
    moved, unit = weights(model) - before, weights(whole) - before
    size = sum(p.numel() for p in layers[0])
    torch.testing.assert_close(moved[:size], 0.3 * unit[:size])
    torch.testing.assert_close(moved[size:], 0.1 * unit[size:])


@every
def test_decay_is_decoupled(name):
    adapt = {"adapt": False} if name.startswith("HessianFree") else {}
    batch, results = samples(), []
    for decay in (0.0, 0.5):
        model, optimizer = twins(name, weight_decay=decay, **adapt)
        before = weights(model)
        steps(optimizer, model, batch, count=1)
        group = optimizer.param_groups[0]
        rate = group["lr"] * (group.get("rate") or 1.0)
        results.append(weights(model) - before + rate * decay * before)
    torch.testing.assert_close(*results)


@every
def test_hooks_and_plateau_schedulers_work(name):
    model, optimizer = twins(name)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    steps(optimizer, model, samples(), count=1)
    assert seen == ["before", "after"]
    scheduler, rate = ReduceLROnPlateau(optimizer, patience=0), optimizer.param_groups[0]["lr"]
    for _ in range(3):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] < rate


def test_cyclic_schedulers_leave_the_measured_momentum_alone():
    model, optimizer = twins("SpectralSGD")
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(optimizer, 1.0, total_steps=10)
    scheduler = OneCycleLR(optimizer, 1.0, total_steps=10, cycle_momentum=False)
    for step in range(4):
        steps(optimizer, model, samples(), count=1, first=step)
        scheduler.step()
        assert optimizer.param_groups[0]["momentum"] == optimizer.rates.momentum


@every
def test_averages_and_lookahead_wrap_it(name):
    model, optimizer = twins(name)
    average = optim.IterateAverage(optimizer, start=2)
    steps(optimizer, model, samples(), count=4)
    assert average.count == 4  # the weights before step 2, and after each since
    model, inner = twins(name)
    lookahead = optim.Lookahead(inner, k=2)
    batch = samples()
    for step in range(4):
        if inner.curvature_due(step):
            inner.update_curvature(Risk(model, cross_entropy, [batch]))
        lookahead.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        lookahead.step()
    assert bool(torch.isfinite(weights(model)).all())


@every
def test_a_step_without_gradients_does_nothing(name):
    model, optimizer = twins(name)
    before = weights(model)
    optimizer.step()
    assert torch.equal(before, weights(model))


# ------------------------------------------------------------------------------------------
# Frozen and tied parameters, batch norm, small batches, wrong input.


@every
def test_frozen_parameters_do_not_move_and_the_others_move_as_alone(name):
    batch, model = samples(), network()
    model[0].requires_grad_(False)
    frozen = [p.detach().clone() for p in model[0].parameters()]
    optimizer = build(name, model.parameters())
    steps(optimizer, model, batch, count=3)
    head = network()
    head[0].requires_grad_(False)
    steps(build(name, head[2].parameters()), head, batch, count=3)
    assert all(torch.equal(a, b) for a, b in zip(frozen, model[0].parameters(), strict=True))
    assert torch.equal(weights(model), weights(head))


@every
def test_an_optimiser_of_some_parameters_takes_the_others_as_constants(name):
    batch, model = samples(), network()
    first = [p.detach().clone() for p in model[0].parameters()]
    steps(build(name, model[2].parameters()), model, batch, count=3)
    assert all(torch.equal(a, b) for a, b in zip(first, model[0].parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False).double()
        self.two = nn.Linear(4, 4, bias=False).double()
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


@every
def test_tied_parameters_count_once(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tied()
    optimizer = build(name, model.parameters())
    losses = steps(optimizer, model, samples(), count=5)
    assert losses[-1] < losses[0]
    assert len(optimizer.param_groups[0]["params"]) == 3


@every
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_networks_with_batch_norm(name, mode):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model.double().train(mode == "train")
    batch, optimizer = samples(), build(name, model.parameters())
    statistics = model[1].running_mean.clone()
    losses = []
    for step in range(5):
        if optimizer.curvature_due(step):
            optimizer.update_curvature(Risk(model, cross_entropy, [batch], batch_norm=mode))
            # Measuring changes neither the statistics nor the mode.
            assert step or torch.equal(statistics, model[1].running_mean)
            assert model.training == (mode == "train")
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@every
def test_a_batch_of_one_sample_works(name):
    model, optimizer = twins(name)
    losses = steps(optimizer, model, samples(1), count=4)
    assert losses[-1] < losses[0]


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_one_clear_error(name, bad):
    model, optimizer = twins(name)
    inputs, labels = samples()
    steps(optimizer, model, (inputs, labels), count=1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    broken = inputs.clone()
    broken[3] = bad
    with pytest.raises(ValueError, match="batch 0 must be finite"):
        optimizer.update_curvature(Risk(model, cross_entropy, [(broken, labels)]))
    assert torch.equal(before, weights(model))
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


@every
def test_a_step_without_curvature_is_one_clear_error(name):
    model, optimizer = twins(name)
    cross_entropy(model(samples()[0]), samples()[1]).backward()
    with pytest.raises(RuntimeError, match=r"needs the curvature .*update_curvature\(ritz.Risk"):
        optimizer.step()


def test_hessian_free_needs_curvature_for_every_step():
    model, batch = network(), samples()
    optimizer = HessianFree(model.parameters())
    steps(optimizer, model, batch, count=1)
    with pytest.raises(RuntimeError, match="needs the curvature"):
        optimizer.step()


@every
def test_a_parameter_without_a_gradient_counts_as_one_with_a_gradient_of_zeros(name):
    batch, moved = samples(), []
    for empty in (True, False):
        model, optimizer = twins(name, weight_decay=0.0)
        before = weights(model)
        optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
        cross_entropy(model(batch[0]), batch[1]).backward()
        model[0].bias.grad = None if empty else torch.zeros_like(model[0].bias)
        optimizer.step()
        moved.append(torch.cat([(weights(model) - before)[:20], (weights(model) - before)[25:]]))
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_one_clear_error(dtype):
    model, (inputs, labels) = network(dtype=dtype), samples()
    optimizer = LanczosNewton(model.parameters())
    with pytest.raises(ValueError, match=f"float32 or float64, got .* for parameters in {dtype}"):
        optimizer.update_curvature(Risk(model, cross_entropy, [(inputs.to(dtype), labels)]))


def test_a_parameter_without_curvature_is_one_clear_error():
    model, batch = network(), samples()
    model[0].requires_grad_(False)
    optimizer = LanczosNewton(model.parameters())
    optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
    model[0].requires_grad_(True)
    cross_entropy(model(batch[0]), batch[1]).backward()
    with pytest.raises(RuntimeError, match="of every parameter with a gradient"):
        optimizer.step()


@every
def test_risks_of_other_models_are_refused(name):
    _, optimizer = twins(name)
    with pytest.raises(ValueError, match="risk must have the model that this"):
        optimizer.update_curvature(Risk(network(), cross_entropy, [samples()]))
    with pytest.raises(TypeError, match="risk must be"):
        optimizer.update_curvature(samples())
    model = network()
    both = build(name, [*model.parameters(), nn.Parameter(torch.zeros(2).double())])
    with pytest.raises(ValueError, match="risk must have the model of all parameters"):
        both.update_curvature(Risk(model, cross_entropy, [samples()]))
    with pytest.raises(ValueError, match="in the dtype of its parameters"):
        build(name, model.parameters()).update_curvature(
            Risk(model, cross_entropy, [samples()], precision="float32")
        )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: LanczosNewton(p, delta=0.0), "delta must be finite and above 0, got 0"),
        (lambda p: LanczosNewton(p, -1.0), "lr must be finite and at least 0"),
        (lambda p: LanczosNewton(p, num_steps=0), "num_steps must be at least 1, got 0"),
        (lambda p: LanczosNewton(p, interval=0), "interval must be at least 1, got 0"),
        (lambda p: LanczosNewton(p, matrix="covariance"), "matrix must be one of"),
        (lambda p: LanczosNewton(p, start="warm"), "start must be one of"),
        (lambda p: LanczosNewton(p, momentum=1.0), "momentum must be less than 1, got 1.0"),
        (lambda p: LanczosNewton(p, momentum=-0.1), "momentum must be finite and at least 0"),
        (lambda p: LanczosNewton(p, eta=-1.0), "eta must be finite and at least 0"),
        (lambda p: HessianFree(p, delta=-1.0), "delta must be finite and above 0"),
        (lambda p: HessianFree(p, decay=2.0), "decay must be between"),
        (lambda p: HessianFree(p, matrix="fisher"), "matrix must be one of"),
        (lambda p: SpectralSGD(p, interval=0), "interval must be at least 1"),
        (lambda p: SpectralSGD(p, weight_decay=-1.0), "weight_decay must be finite and at least 0"),
    ],
)
def test_wrong_settings_name_the_argument(make, match):
    with pytest.raises(ValueError, match=match):
        make(network().parameters())


@pytest.mark.parametrize("name", ["delta", "num_steps"])
def test_settings_of_the_matrix_are_the_same_in_all_groups(name):
    model = network()
    optimizer = LanczosNewton(model[0].parameters())
    with pytest.raises(ValueError, match=f"{name} must be the same in all groups"):
        optimizer.add_param_group({"params": list(model[2].parameters()), name: 3})


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = LanczosNewton(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


@every
def test_a_group_that_is_added_during_training_takes_the_present_settings(name):
    model, batch = network(), samples()
    optimizer = build(name, model[2].parameters())
    steps(optimizer, model, batch, count=2)
    for group in optimizer.param_groups:
        # As a scheduler and a damping rule change them; HessianFree adapts its damping itself.
        group.update({"lr": 0.2} | ({"delta": 0.7} if "delta" in group else {}))

    optimizer.add_param_group({"params": list(model[0].parameters())})

    first, second = optimizer.param_groups
    shared = {"delta", "num_steps", "max_steps", "matrix", "rate", "momentum", "adapt"}
    assert all(first[key] == second[key] for key in shared & first.keys())
    optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
    before = [p.detach().clone() for p in model[0].parameters()]
    steps(optimizer, model, batch, count=2)
    assert not any(torch.equal(a, b) for a, b in zip(before, model[0].parameters(), strict=True))


@every
@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"lr": "a"}, "lr must be a number, got str"),
        ({"lr": None}, "lr must be a number, got NoneType"),
        ({"lr": float("nan")}, "lr must be finite and at least 0, got nan"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite"),
        ({"delta": float("inf")}, "delta must be finite and above 0, got inf"),
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"max_steps": 2.5}, "max_steps must be an integer, got 2.5"),
        ({"nesterov": 3}, "nesterov must be True or False, got int"),
        ({"adapt": "yes"}, "adapt must be True or False, got str"),
    ],
)
def test_settings_of_a_group_are_checked_like_those_of_the_optimiser(name, setting, error):
    params = list(network().parameters())
    if not setting.keys() <= build(name, params).defaults.keys():
        return
    with pytest.raises((ValueError, TypeError), match=error):
        build(name, params, **setting)
    with pytest.raises((ValueError, TypeError), match=error):
        build(name, [{"params": params, **setting}])
