"""The edge of stability, its scaling rules, least damping, and largest rates by trials."""

import math

import pytest
import torch
from curvature.networks import seeded
from measures.quadratics import quadratic, sgd
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from ritz.curvature import Risk
from ritz.measures import curvature_ratio, least_damping, stable_rate, trainable_rate
from ritz.measures._groups import share_of_variance
from ritz.measures._learning_rates import (
    additive_change,
    additive_exponent,
    multiplicative_change,
    multiplicative_exponent,
)
from ritz.rmt import additive_spikes, multiplicative_spikes

N, P = 1000, 400


def grows(make, rate, curvature, steps=3000):
    """Return whether an optimiser diverges on a quadratic of this curvature."""
    w = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = make([w], rate)
    for _ in range(steps):
        w.grad = curvature * w.detach()
        optimizer.step()
        if not abs(float(w.detach())) < 1e3:
            return True
    return abs(float(w.detach())) > 1


class Adaptive(SGD):
    """Adam with constant divisors of one and no bias correction."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.7, dampening=0.7)


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({}, lambda params, rate: SGD(params, lr=rate)),
        (
            {"optimizer": "momentum", "momentum": 0.7},
            lambda params, rate: SGD(params, lr=rate, momentum=0.7),
        ),
        (
            {"optimizer": "momentum", "momentum": 0.7, "dampening": 0.4},
            lambda params, rate: SGD(params, lr=rate, momentum=0.7, dampening=0.4),
        ),
        (
            {"optimizer": "nesterov", "momentum": 0.7},
            lambda params, rate: SGD(params, lr=rate, momentum=0.7, nesterov=True),
        ),
        ({"optimizer": "adam", "momentum": 0.7}, Adaptive),
    ],
    ids=["sgd", "momentum", "dampened", "nesterov", "adam"],
)
def test_steps_of_torch_diverge_right_above_the_edge(options, make):
    edge = float(stable_rate(2.5, **options))

    assert not grows(make, 0.99 * edge, 2.5)
    assert grows(make, 1.01 * edge, 2.5)


def growth(options, rate, noise):
    """Return the factor per step of the mean squares, for a curvature of mean 1 and variance."""
    rho, kind = options.get("momentum", 0.0), options.get("optimizer", "sgd")
    scale = 1 - options.get("dampening", rho if kind == "adam" else 0.0)
    # z <- rho z + s h w, w <- w - alpha z (Nesterov: w - alpha (s h w + rho z)); state (w, z)
    nesterov = kind == "nesterov"

    def step(h):
        back = rho * torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        drive = scale * h * torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        velocity = back + drive
        weight = torch.eye(2, dtype=torch.float64)[0]
        moved = rho * velocity[1] + drive[1] if nesterov else velocity[1]
        return torch.stack([weight - rate * moved, velocity[1]])

    # The mean of kron(A, A) over a curvature of 1 + sd and 1 - sd.
    both = [torch.kron(step(1 + x), step(1 + x)) for x in (noise**0.5, -(noise**0.5))]
    return float(torch.linalg.eigvals(sum(both) / 2).abs().max())


@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0, 30.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "momentum", "momentum": 0.9},
        {"optimizer": "momentum", "momentum": 0.5, "dampening": 0.3},
        {"optimizer": "nesterov", "momentum": 0.9},
        {"optimizer": "nesterov", "momentum": 0.3},
        {"optimizer": "adam", "momentum": 0.9},
    ],
)
def test_mean_squares_of_steps_with_noisy_curvature_grow_right_above_the_edge(options, noise):
    mean = 2.5
    batch = mean * (1 + noise)  # lambda + v / lambda

    edge = float(stable_rate(batch, full=mean, **options))

    assert growth(options, 0.999 * edge * mean, noise) < 1
    assert growth(options, 1.001 * edge * mean, noise) > 1


def test_noise_lowers_the_edge_with_momentum_more_than_without():
    options = {"optimizer": "momentum", "momentum": 0.9}

    edges = [float(stable_rate(curvature, full=1.0, **options)) for curvature in (1.0, 0.5, 11.0)]

    # A curvature of batches below that of all data is an error of sampling: no noise.
    assert edges == pytest.approx([3.8, 7.6, 3.8 / (1 + 19 * 10)])
    plain = float(stable_rate(11.0, **options))
    assert stable_rate(11.0, full=math.nan, **options).isnan()
    assert float(stable_rate(11.0, full=-1.0, **options)) == pytest.approx(plain)
    assert float(stable_rate(2.0, full=1.0, optimizer="momentum", momentum=1.0)) == 0.0


def test_no_learning_rate_is_unstable_without_positive_curvature():
    found = stable_rate(torch.tensor([-1.0, 0.0, 4.0, math.nan]))

    assert found[:3].tolist() == [math.inf, math.inf, 0.5]
    assert found[3].isnan()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "rmsprop"}, "optimizer must be one of sgd, momentum"),
        ({"momentum": 0.9}, "momentum must be 0 for sgd, got 0.9"),
        ({"optimizer": "nesterov", "dampening": 0.1}, "dampening must be 0 for nesterov"),
        ({"optimizer": "momentum", "momentum": 1.5}, "momentum must be between 0.0 and 1.0"),
        ({"optimizer": "momentum", "momentum": math.nan}, "momentum must be a number"),
    ],
)
def test_a_wrong_update_is_one_clear_line(options, match):
    with pytest.raises(ValueError, match=match):
        stable_rate(1.0, **options)


def slope(edge, sizes):
    """Return d log edge / d log B by central differences."""
    step = 1e-5
    above, below = edge(sizes * math.exp(step)), edge(sizes * math.exp(-step))
    return (above.log() - below.log()) / (2 * step)


SIZES = torch.tensor([2.0, 10.0, 60.0, 700.0], dtype=torch.float64)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("variance", [3.0, 40.0])
def test_the_exponent_of_directional_noise_is_the_slope_of_the_edge(variance):
    def edge(sizes):
        return 2 / (1.7 + variance * share_of_variance(sizes, N) / 1.7)

    found = additive_exponent(number(1.7), number(variance), batch_sizes=SIZES, num_samples=N)

    torch.testing.assert_close(found, slope(edge, SIZES), rtol=1e-6, atol=1e-8)


def test_the_exponent_of_homogeneous_noise_is_that_of_the_spiked_model():
    def edge(sizes):
        shares = share_of_variance(sizes, N) * 40.0
        values = [float(additive_spikes(1.7, variance=float(x)).value) for x in shares]
        return 2 / torch.tensor(values, dtype=torch.float64)

    found = additive_exponent(
        number(1.7), number(40.0), batch_sizes=SIZES, num_samples=N, homogeneous=True
    )

    torch.testing.assert_close(found, slope(edge, SIZES), rtol=1e-4, atol=1e-6)
    assert float(found[0]) == pytest.approx(0.5 * N / (N - 2))  # the root rule in b


def test_the_additive_rule_changes_where_noise_and_curvature_are_equal():
    change = additive_change(number(1.7), number(40.0), num_samples=N)

    noise = 40.0 * share_of_variance(change, N)
    assert float(noise) == pytest.approx(1.7**2)


@pytest.mark.parametrize("spike", [1.5, 30.0])
def test_the_exponent_of_the_multiplicative_model_is_the_slope_of_its_edge(spike):
    def edge(sizes):
        values = [
            float(multiplicative_spikes(spike, ratio=P / float(size), bulk=0.5).value)
            for size in sizes
        ]
        return 2 / torch.tensor(values, dtype=torch.float64)

    found = multiplicative_exponent(number(spike), number(0.5), batch_sizes=SIZES, num_parameters=P)

    torch.testing.assert_close(found, slope(edge, SIZES), rtol=1e-4, atol=1e-6)
    theta = spike / 0.5 - 1
    change = multiplicative_change(number(spike), number(0.5), num_parameters=P)
    assert float(change) == pytest.approx(P / theta)


def test_least_damping_is_the_largest_residue_over_outliers():
    outliers, variance = torch.tensor([9.0, 4.0, 1.0, -3.0, 0.0]), 2.0

    found = least_damping(outliers, variance=variance, learning_rate=0.5)

    residues = [abs(x) * min(1.0, variance / x**2) for x in (9.0, 4.0, 1.0, -3.0)]
    assert float(found) == pytest.approx(0.25 * max(residues))
    assert max(residues) == 1.0  # one outlier below the threshold
    assert float(found) <= 0.25 * math.sqrt(variance)


def test_least_damping_of_one_outlier_is_inverse_to_the_batch_size():
    found = [float(least_damping(torch.tensor([5.0]), variance=8.0 / b)) for b in (1, 2, 4)]

    assert found == pytest.approx([0.8, 0.4, 0.2])


def test_negative_variances_and_dampings_are_refused():
    with pytest.raises(ValueError, match=r"^variance must be at least 0, got -0\.5$"):
        least_damping(torch.tensor([5.0]), variance=torch.tensor([-0.5]))
    with pytest.raises(ValueError, match=r"^damping must be at least 0, got -1$"):
        curvature_ratio(2.0, -1.0)


def test_the_curvature_ratio_is_that_of_effective_learning_rates():
    top, bottom, damping, rate = 7.0, 0.5, 0.2, 0.3
    flat, sharp = rate / (bottom + damping), rate / (top + damping)

    assert float(curvature_ratio(top, damping, smallest=bottom)) == pytest.approx(flat / sharp)
    assert float(curvature_ratio(top, 1e-6)) == pytest.approx(1 + top / 1e-6)
    assert float(curvature_ratio(top, math.inf)) == 1


# ------------------------------------------------------------------------------------------
# Largest learning rates by trials.


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


def test_trials_repeat_with_the_same_generator():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    x, y = torch.randn(64, 3, generator=seeded()), torch.randint(2, (64,), generator=seeded(1))
    risk, options = (
        Risk(model, functional.cross_entropy, (x, y)),
        {"batch_size": 16, "start": 0.1, "num_steps": 5},
    )

    first, again = (trainable_rate(risk, sgd, generator=seeded(2), **options) for _ in range(2))

    assert torch.equal(first.mean, again.mean)


def test_trials_start_at_the_weights_of_the_risk():
    risk = quadratic([1.0], start=1.0, floor=1.0)
    # Half of the loss at w = 0.1 is the floor: from there, growth to twice the loss takes longer.
    near = risk.at(torch.full((1,), 1e-3, dtype=torch.float64))

    far, close = (
        float(trainable_rate(one, sgd, batch_size=8, start=2.0, num_steps=10, num_trials=2))
        for one in (risk, near)
    )

    assert close > 1.2 * far


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3, affine=False)])
def test_trials_are_compared_with_the_initial_loss_in_training_mode(layer):
    x = torch.randn(64, 3, generator=seeded(), dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(layer, nn.Linear(3, 1, bias=False)).double()
    nn.init.ones_(model[1].weight)
    target = x.sum(1, keepdim=True) + 0.01
    risk = Risk(model, functional.mse_loss, (x, target))
    rows = torch.arange(64).split(4)
    with torch.no_grad():
        training = max(float(functional.mse_loss(model(x[i]), target[i])) for i in rows)

    found = trainable_rate(risk, sgd, batch_size=4, start=0.1, num_trials=2)

    assert training > 100 * risk.loss()
    assert math.isfinite(float(found.truncation))
    assert 0.01 < float(found) < 10


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
def test_wrong_arguments_of_trials_are_named(options, error, match):
    given = {"batch_size": 8, "start": 1.0, "make": sgd} | options
    with pytest.raises(error, match=match):
        trainable_rate(quadratic([1.0]), given.pop("make"), **given)
