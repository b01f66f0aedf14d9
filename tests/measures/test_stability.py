import math

import pytest
import torch
from torch.optim import SGD

from ritz.measures import curvature_ratio, least_damping, stable_rate
from ritz.measures._stability import (
    additive_change,
    additive_exponent,
    multiplicative_change,
    multiplicative_exponent,
    share_of_variance,
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
        ({"optimizer": "momentum", "momentum": math.nan}, "momentum must be between"),
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


def test_the_curvature_ratio_is_that_of_effective_learning_rates():
    top, bottom, damping, rate = 7.0, 0.5, 0.2, 0.3
    flat, sharp = rate / (bottom + damping), rate / (top + damping)

    assert float(curvature_ratio(top, damping, smallest=bottom)) == pytest.approx(flat / sharp)
    assert float(curvature_ratio(top, 1e-6)) == pytest.approx(1 + top / 1e-6)
    assert float(curvature_ratio(top, math.inf)) == 1
