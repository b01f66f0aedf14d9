"""Spiked models against simulated matrices and against each other."""

import math

import pytest
import torch
from matrices import seeded

from ritz.rmt import additive_spikes, multiplicative_spikes
from ritz.testing import spiked_wigner, spiked_wishart


def outlier(matrix):
    """The eigenvalue whose vector is nearest to the first axis, and the squared overlap."""
    values, vectors = torch.linalg.eigh(matrix)
    overlaps = vectors[0].square()
    best = int(overlaps.argmax())
    return float(values[best]), float(overlaps[best])


def within_errors(samples, expected, bias=0.0):
    samples = torch.tensor(samples, dtype=torch.float64)
    error = float(samples.std()) / len(samples) ** 0.5
    assert abs(float(samples.mean()) - expected) < 4 * error + bias


def check_outliers(spikes, matrices, *, value_bias, overlap_bias):
    """Compare a prediction with the outliers along the first axis of drawn matrices."""
    values, overlaps = zip(*map(outlier, matrices), strict=True)
    # The limits are approached as 1/n, the sample deviation is known to 1/sqrt(2 draws).
    within_errors(values, float(spikes.value), bias=value_bias)
    within_errors(overlaps, float(spikes.overlap), bias=overlap_bias)
    ratio = float(torch.tensor(values).double().std() / spikes.stddev)
    assert abs(ratio - 1) < 4 / math.sqrt(2 * len(values))


def test_the_homogeneous_model_is_theorem_14():
    values = torch.tensor([3.0, -2.0, 1.2, 0.7, -0.3, 0.0])
    v = 1.1

    spikes = additive_spikes(values, variance=v)

    values = values.double()
    above = values.abs() > math.sqrt(v)
    edge = torch.where(values < 0, -2.0, 2.0).double() * math.sqrt(v)
    torch.testing.assert_close(spikes.value, torch.where(above, values + v / values, edge))
    torch.testing.assert_close(spikes.overlap, torch.where(above, 1 - v / values**2, 0.0))
    assert torch.equal(spikes.detected, above)
    torch.testing.assert_close(spikes.threshold, torch.full_like(values, math.sqrt(v)))


def test_the_multiplicative_model_is_theorem_16():
    values, q, s = torch.tensor([8.0, 4.5, 3.0, 2.0, 0.1]).double(), 0.5, 2.0
    theta = values / s - 1

    spikes = multiplicative_spikes(values, ratio=q, bulk=s)

    above = theta.abs() > math.sqrt(q)
    edge = s * (1 + torch.where(theta < 0, -1, 1) * math.sqrt(q)) ** 2
    torch.testing.assert_close(
        spikes.value, torch.where(above, s * (1 + theta) * (1 + q / theta), edge)
    )
    overlap = (1 - q / theta**2) / (1 + q / theta)
    torch.testing.assert_close(spikes.overlap, torch.where(above, overlap, 0.0))


@pytest.mark.parametrize("spike", [1.5, -2.5])
def test_additive_value_overlap_and_spread_are_those_of_wigner_matrices(spike):
    n, matrices = 300, []
    for seed in range(60):
        # A rotation leaves the noise unchanged, so the spike may lie along the first axis.
        matrix = spiked_wigner(n, spikes=(), generator=seeded(seed)).matrix
        matrix[0, 0] += spike
        matrices.append(matrix)

    spikes = additive_spikes(spike, variance=1.0, size=n)

    check_outliers(spikes, matrices, value_bias=2 / n, overlap_bias=2 / n)


@pytest.mark.parametrize(("spike", "q"), [(4.0, 0.5), (6.0, 2.0), (0.1, 0.25)])
def test_multiplicative_value_overlap_and_spread_are_those_of_sample_covariances(spike, q):
    n = 300
    matrices = [
        spiked_wishart(n, int(n / q), spikes=(spike,), generator=seeded(seed)).matrix
        for seed in range(60)
    ]

    spikes = multiplicative_spikes(spike, ratio=q, size=n)

    check_outliers(spikes, matrices, value_bias=4 * spike / n, overlap_bias=4 / n)


def test_noise_along_the_outlier_predicts_covariances_where_the_mean_does_not():
    # V = lambda q along the outlier of a covariance, and q elsewhere
    spike, q = 5.0, 1.5
    exact = multiplicative_spikes(spike, ratio=q)

    directional = additive_spikes(spike, variance=q, along=spike * q, centre=1.0)
    mean = additive_spikes(spike, variance=q, centre=1.0)

    torch.testing.assert_close(directional.value, exact.value)
    torch.testing.assert_close(directional.overlap, exact.overlap)
    torch.testing.assert_close(directional.threshold, exact.threshold)
    assert float(mean.value) < float(exact.value) - 1


def test_the_inhomogeneous_ensemble_needs_the_variance_along_its_outlier():
    n, T, spike, draws = 200, 2000, 6.0, 40
    q = n / T
    values, along, mean = [], [], []
    for seed in range(draws):
        samples = torch.randn(n, T, dtype=torch.float64, generator=seeded(seed))
        samples[0] *= math.sqrt(spike)
        values.append(float(torch.linalg.eigvalsh(samples @ samples.T / T)[-1]))
        # V(v) of the mean of T samples: (mean |x|^2 (x'v)^2 - |C v|^2) / T, and its mean over v
        squares = samples.square().sum(0)
        along.append(float((squares * samples[0].square()).mean() - spike**2) / T)
        mean.append(float(squares.square().mean() - spike**2 - (n - 1)) / (n * T))

    along, mean = sum(along) / draws, sum(mean) / draws
    by_direction = additive_spikes(spike, variance=mean, along=along, centre=1.0)
    by_mean = additive_spikes(spike, variance=mean)

    # 6.13 and 6.02 for this size; 6.12 and 6.02 for large ones
    assert along == pytest.approx(q * spike, rel=0.1)
    assert float(by_mean.value) == pytest.approx(6.02, abs=0.005)
    within_errors(values, float(by_direction.value))
    error = float(torch.tensor(values).std()) / math.sqrt(draws)
    assert sum(values) / draws > float(by_mean.value) + error


@pytest.mark.parametrize("strength", [6.0, 0.2])
def test_independent_entries_of_unequal_variance_meet_their_model(strength):
    n, spike, c, matrices = 300, 3.0, 0.5, []
    for seed in range(40):
        noise = spiked_wigner(n, spikes=(), generator=seeded(seed)).matrix
        noise[0] *= math.sqrt(strength)
        noise[1:, 0] *= math.sqrt(strength)
        matrix = noise + c * torch.eye(n, dtype=torch.float64)
        matrix[0, 0] += spike - c
        matrices.append(matrix)

    spikes = additive_spikes(spike, variance=1.0, along=strength, centre=c, model="entries", size=n)

    check_outliers(spikes, matrices, value_bias=4 * strength / n, overlap_bias=4 / n)


def test_strong_noise_along_a_direction_causes_an_outlier():
    n, v, strength = 400, 1.0, 9.0
    spikes = additive_spikes(0.0, variance=v, along=strength, model="entries", size=n, spread=2 / n)
    noise = spiked_wigner(n, spikes=(), generator=seeded(3)).matrix
    noise[0, 1:] *= 3
    noise[1:, 0] *= 3

    assert bool(spikes.detected)
    largest = float(torch.linalg.eigvalsh(noise)[-1])
    assert abs(largest - float(spikes.value)) < 4 * float(spikes.stddev)


def test_entries_of_equal_variance_are_the_homogeneous_model():
    values = torch.tensor([4.0, 1.1, -3.0])
    homogeneous = additive_spikes(values, variance=1.3, centre=0.2, size=100)

    entries = additive_spikes(
        values, variance=1.3, along=1.3, centre=0.2, size=100, model="entries"
    )

    for name in ("value", "overlap", "threshold", "stddev", "edge"):
        torch.testing.assert_close(getattr(entries, name), getattr(homogeneous, name))


def test_models_agree_to_first_order_where_noise_is_weak():
    settings = {"variance": 1e-4, "along": 1e-3, "centre": 1.0}

    samples = additive_spikes(5.0, **settings)
    entries = additive_spikes(5.0, model="entries", **settings)

    assert float(samples.value - 5) == pytest.approx(1e-3 / 4, rel=1e-3)
    assert float(entries.value - 5) == pytest.approx(1e-3 / 4, rel=1e-3)
    assert float(1 - samples.overlap) == pytest.approx(float(1 - entries.overlap), rel=1e-3)


@pytest.mark.parametrize("q", [0.25, 4.0])
def test_the_largest_eigenvalue_of_a_bulk_exceeds_the_finite_edge_with_the_stated_probability(q):
    n, draws = 120, 200
    spikes = multiplicative_spikes(1.0, ratio=q, size=n, level=0.9)
    T = int(n / q)

    inside = sum(
        float(
            torch.linalg.eigvalsh(spiked_wishart(n, T, spikes=(), generator=seeded(i)).matrix)[-1]
        )
        <= float(spikes.edge)
        for i in range(draws)
    )

    assert abs(inside / draws - 0.9) < 4 * math.sqrt(0.09 / draws)


def test_wigner_matrices_exceed_the_edge_with_the_stated_probability():
    n, draws = 100, 300
    edges = additive_spikes(torch.tensor([0.1, -0.1]), variance=1.0, size=n, level=0.9).edge

    ends = [torch.linalg.eigvalsh(spiked_wigner(n, spikes=(), generator=seeded(i)).matrix)
            for i in range(draws)]  # fmt: skip

    for inside in ([x[-1] <= edges[0] for x in ends], [x[0] >= edges[1] for x in ends]):
        assert abs(sum(map(int, inside)) / draws - 0.9) < 4 * math.sqrt(0.09 / draws)


def test_outliers_and_variances_broadcast():
    spikes = additive_spikes(
        torch.tensor([3.0, -2.0]), variance=torch.tensor([[1.0], [4.0], [0.0]])
    )

    assert spikes.value.shape == (3, 2)
    torch.testing.assert_close(spikes.value[2], torch.tensor([3.0, -2.0]).double())
    torch.testing.assert_close(spikes.overlap[2], torch.ones(2).double())


def test_predictions_are_differentiable_also_at_the_centre():
    values = torch.tensor([3.0, 0.5, -2.0, 0.0], dtype=torch.float64, requires_grad=True)

    additive_spikes(values, variance=1.0, size=10).value.sum().backward()

    # 1 - v/lambda^2 above the threshold, 0 below
    expected = torch.tensor([8 / 9, 0.0, 0.75, 0.0], dtype=torch.float64)
    torch.testing.assert_close(values.grad, expected)


def test_unknown_fluctuations_are_nan():
    assert additive_spikes(3.0, variance=1.0).stddev.isnan()
    assert additive_spikes(3.0, variance=1.0, along=2.0, size=100).stddev.isnan()
    known = additive_spikes(3.0, variance=1.0, along=2.0, size=100, spread=0.04)
    assert float(known.stddev) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: additive_spikes(1.0, variance=-1.0), "variance must be at least 0"),
        (lambda: additive_spikes(float("nan"), variance=1.0), "values must be finite"),
        (lambda: additive_spikes(1.0, variance=1.0, along=-2.0), "along must be at least 0"),
        (lambda: additive_spikes(1.0, variance=1.0, model="x"), "model must be one of"),
        (lambda: additive_spikes(1.0, variance=1.0, level=1.0), "level must be between"),
        (lambda: additive_spikes(1.0, variance=1.0, size=0), "size must be at least 1"),
        (lambda: additive_spikes(1.0, variance=1.0, spread=-1.0), "spread must be at least 0"),
        (lambda: multiplicative_spikes(-1.0, ratio=1.0), "values must be at least 0"),
        (lambda: multiplicative_spikes(1.0, ratio=0.0), "ratio must be positive, got 0"),
        (lambda: multiplicative_spikes(1.0, ratio=1.0, bulk=-2.0), "bulk must be positive, got -2"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
