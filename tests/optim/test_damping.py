"""Rules that set the damping of an optimiser, against dense matrices."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

from ritz import optim
from ritz.curvature import Risk
from ritz.optim import DampedAdamW, Damping, _damping
from ritz.training import fit


def logistic(seed=0, samples=60):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (samples,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Linear(3, 3).double()
    return model, (inputs, labels)


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
    optimizer = optimizer_of(model, delta=1.0, weight_decay=0.0)
    damping = Damping(optimizer, "adaptive")
    for expected in (2 / 3, 4 / 9):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        with damping.measured(Risk(model, loss, [data])):
            optimizer.step()
        assert optimizer.param_groups[0]["delta"] == pytest.approx(expected)


def test_adaptive_damping_rises_after_a_step_that_raises_the_loss():
    model, data = logistic()
    optimizer = DampedAdamW(model.parameters(), lr=1e3, delta=1e-8)
    damping = Damping(optimizer, "adaptive")
    cross_entropy(model(data[0]), data[1]).backward()
    with damping.measured(Risk(model, cross_entropy, [data])):
        optimizer.step()
    assert optimizer.param_groups[0]["delta"] == pytest.approx(1.5e-8)


def test_adaptive_damping_stays_after_a_step_that_was_skipped():
    model, data = logistic()
    optimizer = optimizer_of(model, delta=0.3)
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
        optimizer = DampedAdamW(model.parameters(), lr=0.05, delta=0.01)
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
        (lambda p: Damping(DampedAdamW(p), "adaptive").step(), "needs a .with. block"),
    ],
)
def test_wrong_use_is_one_clear_error(make, match):
    with pytest.raises(ValueError, match=match):
        make(nn.Linear(2, 2).parameters())


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


def test_adaptive_damping_after_a_step_to_infinity_leaves_the_run_to_end_as_diverged():
    model, data = logistic()
    result = fit(
        model, data, optimizer="damped_adamw", optimizer_settings={"lr": 1e300, "delta": 1e-300},
        damping="adaptive", damping_interval=1, num_epochs=3, batch_size=8,
    )  # fmt: skip
    assert result.status.outcome == "diverged"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 5}, [5, 5]),
        ({"batch_size": 5, "accumulate": 3}, [15, 15]),
        ({"batch_schedule": "0:5,1:10"}, [5, 10]),
        ({"loader": 4}, [4, 4]),
    ],
)
def test_measured_damping_is_that_of_the_samples_of_a_step(options, expected, monkeypatch):
    sizes = []

    def measure(risk, inverse, **_):
        sizes.append(1 / (inverse + 1 / 60))  # 1/b = 1/B - 1/N
        return 1.0

    monkeypatch.setattr(_damping, "noise_damping", measure)
    model, data = logistic()
    if "loader" in options:
        dataset = torch.utils.data.TensorDataset(*data)
        data, options = torch.utils.data.DataLoader(dataset, batch_size=options["loader"]), {}

    fit(model, data, optimizer="damped_adamw", damping="noise", num_epochs=2, **options)

    assert sizes == pytest.approx(expected)
