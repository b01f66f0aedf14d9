import math

import pytest
import torch
from curvature.networks import seeded
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from ritz.curvature import Risk, hessian
from ritz.measures import critical_sharpness, trainable_rate

N = 64


class Quadratic(nn.Module):
    """Outputs whose mean is a quadratic of the weights with these eigenvalues, plus a constant."""

    def __init__(self, values, start=1.0, floor=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((len(values),), start, dtype=torch.float64))
        self.register_buffer("values", torch.tensor(values, dtype=torch.float64))
        self.floor = floor

    def forward(self, x):
        return 0.5 * (x[:, :1] * self.values * self.w**2).sum(1) + self.floor


def mean(outputs, target):
    return outputs.mean()


def quadratic(values, **options):
    data = torch.ones(N, 1, dtype=torch.float64)
    return Risk(Quadratic(values, **options), mean, (data, data[:, 0]))


def sgd(params, rate):
    return SGD(params, lr=rate)


def test_critical_sharpness_along_the_gradient_is_the_curvature_there():
    risk = quadratic([0.1, 1.0, 7.0])
    gradient, matrix = risk.gradient(), hessian(risk).dense()

    found = critical_sharpness(risk)

    exact = float(gradient @ matrix @ gradient / (gradient @ gradient))
    assert abs(float(found) - exact) <= float(found.truncation) <= 0.06 * exact
    assert int(found.method.split()[0]) <= 16  # forward passes


@pytest.mark.parametrize(("floor", "outcome"), [(0.0, "converged"), (1e13, "max_steps")])
def test_a_tolerance_below_the_roundoff_of_the_loss_is_not_reached(floor, outcome):
    found = critical_sharpness(quadratic([1.0, 2.0], floor=floor), rtol=1e-3)

    assert found.status.outcome == outcome
    assert abs(float(found) - 1.8) <= float(found.truncation)  # (1 + 8) / (1 + 4)
    assert (float(found.truncation) <= 1e-3 * float(found)) == found.status.ok


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_critical_sharpness_finds_its_scale(scale):
    risk = quadratic([scale, 3 * scale])
    direction = torch.tensor([0.0, 1.0], dtype=torch.float64)

    found = critical_sharpness(risk, direction)

    # L(w - eta u) - L(w) = 3 s (-eta + eta^2 / 2) rises beyond eta = 2: its sharpness is one.
    assert abs(float(found) - 1) <= float(found.truncation)


def test_critical_sharpness_uses_no_gradient_of_a_direction(monkeypatch):
    risk = quadratic([1.0, 2.0])
    direction = risk.gradient()
    monkeypatch.setattr(Risk, "gradient", None)

    critical_sharpness(risk, direction)


def test_a_direction_without_a_critical_step_is_uncertain():
    risk = quadratic([1.0, 2.0])

    uphill = critical_sharpness(risk, -risk.gradient())
    flat = critical_sharpness(quadratic([-1.0, -1.0]))

    assert math.isnan(float(uphill))
    assert "does not fall" in str(uphill.status)
    assert (float(flat), flat.status.outcome) == (0.0, "uncertain")


def test_critical_sharpness_refuses_a_direction_of_zero():
    with pytest.raises(ValueError, match="direction must not be zero"):
        critical_sharpness(quadratic([1.0, 2.0], start=0.0))


@pytest.mark.parametrize(
    ("make", "factor"),
    [(sgd, 2.0), (lambda params, rate: SGD(params, lr=rate, momentum=0.5), 3.0)],
    ids=["sgd", "momentum"],
)
@pytest.mark.parametrize("start", [1e-2, 4.0])
def test_the_largest_rate_of_a_quadratic_is_the_edge_of_stability(make, factor, start):
    risk = quadratic([0.2, 5.0])

    found = trainable_rate(risk, make, batch_size=8, start=start, num_steps=120, num_trials=2)

    edge = factor / 5.0
    assert abs(float(found) / edge - 1) < 0.15
    assert float(found.truncation) < 0.15 * edge


def test_trials_do_not_change_model_or_global_generator():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    x, y = torch.randn(N, 3, generator=seeded()), torch.randint(2, (N,), generator=seeded(1))
    risk = Risk(model, functional.cross_entropy, (x, y))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, options = torch.get_rng_state(), {"batch_size": 16, "start": 0.1, "num_steps": 5}

    first = trainable_rate(risk, sgd, generator=seeded(2), **options)
    again = trainable_rate(risk, sgd, generator=seeded(2), **options)

    assert torch.equal(first.mean, again.mean)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_trials_start_at_the_weights_of_the_risk():
    risk = quadratic([1.0], start=1.0, floor=1.0)
    # Half of the loss at w = 0.1 is the floor: from there, growth to twice the loss takes longer.
    near = risk.at(torch.full((1,), 1e-3, dtype=torch.float64))

    far, close = (
        float(trainable_rate(one, sgd, batch_size=8, start=2.0, num_steps=10, num_trials=2))
        for one in (risk, near)
    )

    assert close > 1.2 * far


def test_rates_that_never_fail_have_no_limit():
    risk = quadratic([1e-30, 1e-30])

    found = trainable_rate(risk, sgd, batch_size=8, start=1.0, num_steps=3, num_trials=2)

    assert math.isinf(float(found.truncation))
    assert found.status.outcome == "uncertain"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be between 1 and 64, got 0"),
        ({"batch_size": 65}, ValueError, "batch_size must be between 1 and 64, got 65"),
        ({"start": 0.0}, ValueError, "start must be"),
        ({"start": math.nan}, ValueError, "start must be"),
        ({"num_steps": 1}, ValueError, "num_steps must be at least 2"),
        ({"limit": 0.5}, ValueError, "limit must be at least 1"),
        ({"make": "sgd"}, TypeError, "make must be a function"),
    ],
)
def test_wrong_arguments_are_named(options, error, match):
    given = {"batch_size": 8, "start": 1.0, "make": sgd} | options
    with pytest.raises(error, match=match):
        trainable_rate(quadratic([1.0]), given.pop("make"), **given)
