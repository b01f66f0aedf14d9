"""Rules that set the damping of an optimiser, against dense matrices."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

from ritz import optim
from ritz.curvature import Risk
from ritz.data import load
from ritz.models import create
from ritz.optim import KFAC, DampedAdamW, Damping, LanczosNewton, _damping
from ritz.training import fit


def logistic(seed=0, samples=60):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (samples,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Linear(3, 3).double()
    return model, (inputs, labels)


def logistic_risk():
    model, data = logistic()
    return model, cross_entropy, data


def sample_matrices(model, data):
    """The Hessians of all samples, ``(n, P, P)``; the model is linear, so they are its GGN."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])

    def loss(theta, x, y):
        parts = theta.split([shape.numel() for shape in shapes.values()])
        named = {k: v.view(s) for (k, s), v in zip(shapes.items(), parts, strict=True)}
        return cross_entropy(functional_call(model, named, (x[None],)), y[None])

    return torch.stack([hessian(loss)(theta, x, y) for x, y in zip(*data, strict=True)])


@pytest.fixture
def many_probes(monkeypatch):
    tuning = dataclasses.replace(_damping.TUNING, num_probes=400)
    monkeypatch.setattr(_damping, "TUNING", tuning)


def optimizer_of(model, **settings):
    return DampedAdamW(model.parameters(), lr=0.1, **settings)


class DampedGradient(torch.optim.Optimizer):
    """Gradient steps divided by the damping: a damped method that knows no curvature."""

    def __init__(self, params, lr=0.1, delta=1.0, momentum=0.0):
        super().__init__(params, {"lr": lr, "delta": delta, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["delta"])


def test_ratio_keeps_damping_over_learning_rate_constant():
    model, _ = logistic()
    optimizer = optimizer_of(model, delta=0.4)
    schedule = optim.Schedule(optimizer, optim.step_decay([1, 2]))
    damping = Damping(optimizer, "ratio")
    optimizer.step()
    for _ in range(3):
        group = optimizer.param_groups[0]
        damping.step()
        assert group["delta"] / group["lr"] == pytest.approx(4.0)
        schedule.step()
    assert damping.values() == pytest.approx([0.004])


@pytest.mark.usefixtures("many_probes")
@pytest.mark.parametrize("num_samples", [None, 60])
def test_damping_by_shrinkage_is_that_of_the_dense_matrices(num_samples):
    model, data = logistic()
    optimizer = optimizer_of(model)
    each = sample_matrices(model, data)
    matrix = each.mean(0)
    size, count = len(matrix), len(each)
    mean = matrix.trace() / size
    d2 = (matrix - mean * torch.eye(size)).square().sum()
    inverse = 1 / 10 - (1 / num_samples if num_samples else 0)
    e2 = size * (each - matrix).square().sum() / count / size * inverse
    beta = d2 / (d2 + e2)

    Damping(optimizer, "shrinkage", batch_size=10, num_samples=num_samples).step(
        Risk(model, cross_entropy, data)
    )

    # 400 probes of quantities with a relative spread of the order of one: 5 % each.
    expected = float(mean * (1 - beta) / beta)
    assert optimizer.param_groups[0]["delta"] == pytest.approx(expected, rel=0.2)


@pytest.mark.usefixtures("many_probes")
def test_damping_against_noise_is_that_of_the_dense_matrices():
    model, data = logistic()
    optimizer = optimizer_of(model)
    each = sample_matrices(model, data)
    values = torch.linalg.eigvalsh(each.mean(0))
    noise = (each - each.mean(0)).square().sum() / len(each) / each.shape[1] / 10
    # Each sample has rank two and the batch none more than its directions, so all values count.
    terms = torch.minimum(values, noise / values)

    Damping(optimizer, "noise", batch_size=10).step(Risk(model, cross_entropy, data))

    expected = 0.1 / 2 * float(terms.max())
    assert optimizer.param_groups[0]["delta"] == pytest.approx(expected, rel=0.2)


def edge_of(model, data, batch_size, *, momentum):
    """The damping of the edge of stability per unit of learning rate, from dense matrices."""
    each = sample_matrices(model, data)
    values, vectors = torch.linalg.eigh(each.mean(0))
    top, leading = values[-1], vectors[:, -1]
    images = (each - each.mean(0)) @ leading
    shift = images.square().sum(1).mean() / batch_size / top
    kappa = (1 + momentum) / (1 - momentum)
    return float((top + kappa * shift) / (2 * (1 + momentum)))


@pytest.mark.parametrize("rule", ["noise", "shrinkage"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_measured_damping_is_not_below_that_of_the_edge_of_stability(rule, momentum):
    model, data = logistic()
    optimizer = LanczosNewton(model.parameters(), lr=0.5, delta=0.01, momentum=momentum)
    damping = Damping(optimizer, rule, batch_size=10)

    damping.step(Risk(model, cross_entropy, data))

    assert damping.values()[0] >= 0.5 * 0.95 * edge_of(model, data, 10, momentum=momentum)
    if rule == "noise":
        assert damping.values()[0] == pytest.approx(
            0.5 * edge_of(model, data, 10, momentum=momentum), rel=0.1
        )


def test_damping_follows_the_learning_rate_between_measurements():
    model, data = logistic()
    optimizer = LanczosNewton(model.parameters(), lr=0.5)
    damping = Damping(optimizer, "noise", batch_size=10)
    damping.step(Risk(model, cross_entropy, data))
    before = damping.values()[0]

    optimizer.param_groups[0]["lr"] = 0.1
    damping.step()

    assert damping.values() == pytest.approx([before / 5])


@pytest.mark.parametrize("rule", ["noise", "shrinkage"])
def test_damping_falls_slowly_when_the_curvature_vanishes(rule):
    """Saturated outputs have no curvature at all, and this is no error of the matrix."""
    model, data = logistic()
    optimizer = LanczosNewton(model.parameters(), lr=0.5)
    damping = Damping(optimizer, rule, batch_size=10)
    damping.step(Risk(model, cross_entropy, data))
    before = optimizer.param_groups[0]["damping_per_rate"]
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([1e6, 0.0, 0.0]))

    damping.step(Risk(model, cross_entropy, data))

    assert optimizer.param_groups[0]["damping_per_rate"] == before / 2


@pytest.mark.parametrize("change", [{"rule": "shrinkage"}, {"matrix": "hessian"}])
@pytest.mark.parametrize("loaded", [False, True])
def test_what_another_rule_has_measured_is_not_used(change, loaded):
    model, data = logistic()
    risk = Risk(model, cross_entropy, data)
    optimizer, fresh = (LanczosNewton(model.parameters(), lr=0.5, delta=0.01) for _ in range(2))
    options = {"rule": "noise", "batch_size": 10}
    Damping(optimizer, **options).step(risk)
    optimizer.param_groups[0]["damping_per_rate"] = 1e3  # half of it would be the next value
    if loaded:
        state, optimizer = optimizer.state_dict(), LanczosNewton(model.parameters())
        optimizer.load_state_dict(state)
    assert Damping(optimizer, **options).is_measured
    other, alone = (Damping(each, **(options | change)) for each in (optimizer, fresh))

    assert not other.is_measured
    with pytest.raises(ValueError, match="needs a risk"):
        other.step()
    for each in (other, alone):
        each.step(risk)
    assert other.values() == alone.values()
    assert other.is_measured


def test_adaptive_damping_is_not_below_that_of_the_edge_of_stability():
    model, data = logistic()
    optimizer = DampedGradient(model.parameters(), lr=0.5, delta=1e-3)
    damping = Damping(optimizer, "adaptive", batch_size=10)
    risk = Risk(model, cross_entropy, data)

    damping.step(risk)

    least = damping.values()[0]
    assert least == pytest.approx(0.5 * edge_of(model, data, 10, momentum=0.0), rel=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        with damping.measured(risk):
            optimizer.step()
    assert damping.values()[0] >= least


@pytest.mark.parametrize(
    ("mean", "matrix", "match"),
    [
        (-1.0, "hessian", r"got -0\.0833 of the hessian: use matrix='ggn'"),
        (float("nan"), "ggn", "got nan of the ggn: the training has probably diverged"),
    ],
)
def test_a_matrix_that_cannot_be_shrunk_is_reported_with_its_cause(
    mean, matrix, match, monkeypatch
):
    model, data = logistic()
    estimate = SimpleNamespace(mean=torch.tensor(mean, dtype=torch.float64))
    monkeypatch.setattr(_damping, "trace", lambda *_, **__: estimate)

    with pytest.raises(ValueError, match=match):
        _damping.shrinkage_damping(Risk(model, cross_entropy, data), 0.1, matrix=matrix)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow),
                                  pytest.param(2, marks=pytest.mark.slow)])  # fmt: skip
@pytest.mark.parametrize("optimizer", ["kfac", "ekfac", "lanczos_newton", "damped_adamw"])
def test_all_rules_train_a_network_on_digits_about_as_well_as_a_constant(optimizer, seed):
    data, scores = load("digits"), {}
    # Adaptive damping is refused for Adam.
    others = ["noise", "shrinkage"] + ["adaptive"] * (optimizer != "damped_adamw")
    for rule in ["constant", *others]:
        generator = torch.Generator().manual_seed(seed)
        model = create("mlp", num_classes=10, input_shape=data.shape, generator=generator)
        result = fit(model, data, optimizer=optimizer, damping=rule, seed=seed, num_epochs=6,
                     batch_size=128)  # fmt: skip
        assert result.status.ok
        scores[rule] = result.metrics["test_accuracy"]

    assert min(scores.values()) > max(scores["constant"] - 0.03, 0.85), scores


def test_damping_is_never_above_half_the_rate_times_the_root_of_the_noise():
    model, data = logistic()
    risk = Risk(model, cross_entropy, data)
    variance = sample_matrices(model, data)
    noise = float((variance - variance.mean(0)).square().sum()) / 60 / 12
    assert _damping.noise_damping(risk, 1.0) <= 0.5 * noise**0.5 * 1.3  # few probes


def test_adaptive_damping_falls_where_the_model_of_the_loss_is_right():
    # The loss is quadratic, so the reduction is the one that was promised.
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 1).double()
    data = (torch.randn(20, 3, generator=generator).double(), torch.ones(20, 1).double())
    loss = nn.MSELoss()
    optimizer = DampedGradient(model.parameters(), lr=0.01)
    damping = Damping(optimizer, "adaptive")
    for expected in (2 / 3, 4 / 9):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        with damping.measured(Risk(model, loss, [data])):
            optimizer.step()
        assert optimizer.param_groups[0]["delta"] == pytest.approx(expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_adaptive_damping_judges_a_step_without_decay_and_momentum(momentum, monkeypatch):
    model, data = logistic()
    optimizer = KFAC(model, lr=0.1, momentum=momentum, weight_decay=3.0, delta=0.5)
    damping, judged = Damping(optimizer, "adaptive"), []
    monkeypatch.setattr(
        _damping, "reduction_ratio", lambda loss, after, _: judged.append(after.theta)
    )
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        risk, before = Risk(model, cross_entropy, data), _damping.momentum_buffers(optimizer)
        with damping.measured(risk):
            optimizer.step()
    space = risk.space

    if momentum:
        buffers = {name: optimizer.state[p]["momentum_buffer"]
                   for name, p in model.named_parameters()}  # fmt: skip
        earlier = {name: before[p] for name, p in model.named_parameters()}
        direction = space.flatten(buffers) - momentum * space.flatten(earlier)
        expected = risk.theta - 0.1 * direction
    else:
        expected = space.flatten(dict(model.named_parameters())) + 0.1 * 3.0 * risk.theta
    torch.testing.assert_close(judged[-1], expected.detach())


def test_adaptive_damping_rises_after_a_step_that_raises_the_loss():
    model, data = logistic()
    optimizer = DampedGradient(model.parameters(), lr=1e-4, delta=1e-8)
    damping = Damping(optimizer, "adaptive")
    cross_entropy(model(data[0]), data[1]).backward()
    with damping.measured(Risk(model, cross_entropy, [data])):
        optimizer.step()
    assert optimizer.param_groups[0]["delta"] == pytest.approx(1.5e-8)


def test_adaptive_damping_stays_after_a_step_that_was_skipped():
    model, data = logistic()
    optimizer = DampedGradient(model.parameters(), delta=0.3)
    damping = Damping(optimizer, "adaptive")
    with damping.measured(Risk(model, cross_entropy, [data])):
        pass  # as a gradient scaler does after an overflow
    assert optimizer.param_groups[0]["delta"] == 0.3


@pytest.mark.parametrize("ratio", [float("nan"), float("-inf"), 0.1])
def test_a_poor_or_undefined_reduction_raises_the_damping(ratio):
    assert _damping.levenberg_marquardt(1.0, ratio) == 1.5


def test_damping_has_a_least_value():
    assert _damping.levenberg_marquardt(1e-8, 1.0) == 1e-8
    assert _damping.levenberg_marquardt(1.0, 0.5) == 1.0


@pytest.mark.parametrize("rule", ["ratio", "shrinkage", "noise", "adaptive"])
def test_a_run_with_a_damping_rule_resumes_bit_for_bit(rule, tmp_path):
    generator = torch.Generator().manual_seed(3)
    data = (torch.randn(96, 4, generator=generator), torch.randint(3, (96,), generator=generator))

    def train(folder, **more):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        kind = KFAC if rule == "adaptive" else DampedAdamW
        first = model if rule == "adaptive" else model.parameters()
        optimizer = kind(first, lr=0.05, delta=0.01)
        settings = {"batch_size": 32, "num_epochs": 3, "damping": rule, "schedule": "step",
                    "milestones": [1, 2], "save_interval": 0.0}  # fmt: skip
        fit(model, data, optimizer=optimizer, checkpoint=folder, **(settings | more))
        return model.state_dict(), optimizer.param_groups[0]["delta"]

    whole, delta = train(tmp_path / "whole")

    def stop(step, model, optimizer):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", monitors=[stop])
    resumed, resumed_delta = train(tmp_path / "parts")

    assert resumed_delta == delta != 0.01
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda p: Damping(torch.optim.SGD(p), "ratio"),
            r"damping rule 'ratio' needs an optimiser with a damping delta, .*, got SGD",
        ),
        (lambda p: Damping(DampedAdamW(p), "fast"), "rule must be one of"),
        (lambda p: Damping(DampedAdamW(p), "noise"), "needs batch_size, got None"),
        (lambda p: Damping(DampedAdamW(p), "noise", batch_size=4).step(), "needs a risk"),
        (
            lambda p: Damping(DampedAdamW(p), "adaptive"),
            r"'adaptive' needs an optimiser that adds delta to the curvature, .*, got DampedAdamW",
        ),
        (
            lambda p: Damping(LanczosNewton(p), "adaptive").step(),
            "needs a risk for rule='adaptive'",
        ),
        (
            lambda p: Damping(LanczosNewton(p), "adaptive").step(Risk(*logistic_risk())),
            r"step\(risk\) needs batch_size for rule='adaptive', got None",
        ),
        (lambda p: Damping(LanczosNewton(p), "noise", batch_size=4, seed=-1), "seed must be at"),
    ],
)
def test_wrong_use_is_one_clear_error(make, match):
    with pytest.raises(ValueError, match=match):
        make(nn.Linear(2, 2).parameters())


def normed_risk():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    return Risk(model, cross_entropy, logistic()[1], batch_norm="train", batch_size=60)


@pytest.mark.parametrize("rule", ["noise", "shrinkage", "adaptive"])
@pytest.mark.parametrize(
    ("risk", "change", "match"),
    [
        (lambda: Risk(*logistic_risk()), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (lambda: Risk(*logistic_risk()), {"momentum": 1.0}, "momentum must be less than 1"),
        (
            lambda: Risk(logistic()[0], cross_entropy, logistic(samples=1)[1]),
            {},
            r"Damping.step\(risk\) needs at least 2 samples, got 1",
        ),
        (normed_risk, {}, r"Damping.step\(risk\) needs .*, got a risk with batch norm"),
    ],
)
def test_a_measurement_that_is_not_possible_is_one_clear_error(rule, risk, change, match):
    risk = risk()
    optimizer = LanczosNewton(risk.model.parameters())
    damping = Damping(optimizer, rule, batch_size=change.get("batch_size", 4) or 4)
    damping.batch_size = change.get("batch_size", 4)
    optimizer.param_groups[0]["momentum"] = change.get("momentum", 0.0)

    with pytest.raises(ValueError, match=match):
        damping.step(risk)


def test_seeds_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match="seed must be an integer, got 'a'"):
        Damping(optimizer_of(nn.Linear(2, 2)), "constant", seed="a")


def test_options_of_fit_that_do_not_fit_are_refused():
    model, data = logistic()
    with pytest.raises(ValueError, match="damping_interval must be given with a damping"):
        fit(model, data, damping_interval=3)
    with pytest.raises(ValueError, match=r"damping rule 'noise' needs .*, got SGD"):
        fit(model, data, damping="noise")
    with pytest.raises(ValueError, match="curvature_batch_size must be given with an optimiser"):
        fit(model, data, curvature_batch_size=8)


def test_ratio_holds_for_a_group_that_is_added_later():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = DampedAdamW(layers[0].parameters(), lr=0.1, delta=0.01)
    damping = Damping(optimizer, "ratio")
    optimizer.add_param_group({"params": list(layers[1].parameters()), "delta": 0.4})
    damping.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.05

    damping.step()

    assert damping.values() == pytest.approx([0.005, 0.2])


class ToInfinity(DampedGradient):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.fill_(torch.inf)


def test_adaptive_damping_after_a_step_to_infinity_leaves_the_run_to_end_as_diverged():
    model, data = logistic()
    result = fit(
        model, data, optimizer=ToInfinity(model.parameters()),
        damping="adaptive", damping_interval=1, num_epochs=3, batch_size=8,
    )  # fmt: skip
    assert result.status.outcome == "diverged"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 5}, [5]),
        ({"batch_size": 5, "accumulate": 3}, [15]),
        ({"batch_schedule": "0:5,1:10"}, [5, 10]),
        ({"loader": 4}, [4]),
    ],
)
def test_measured_damping_is_that_of_the_samples_of_a_step(options, expected, monkeypatch):
    sizes = []

    def measure(risk, inverse, **_):
        sizes.append(round(1 / (inverse + 1 / 60), 6))  # 1/b = 1/B - 1/N
        return 1.0

    monkeypatch.setattr(_damping, "noise_damping", measure)
    model, data = logistic()
    if "loader" in options:
        dataset = torch.utils.data.TensorDataset(*data)
        data, options = torch.utils.data.DataLoader(dataset, batch_size=options["loader"]), {}

    fit(model, data, optimizer="damped_adamw", damping="noise", num_epochs=2, **options)

    assert list(dict.fromkeys(sizes)) == expected
