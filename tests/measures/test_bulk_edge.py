"""The edge of the bulk, and outliers."""

import math

import pytest
import torch
from curvature.networks import seeded

from ritz.measures import bulk_edge
from ritz.spectra import lanczos

SIZE, SPIKES = 400, (5.0, 3.0, -4.0)


def spiked(seed, spikes=SPIKES):
    """A semicircle of radius 2 with outliers."""
    generator = seeded(seed)
    noise = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    vectors = torch.randn(SIZE, len(spikes), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(vectors)[0]
    values = torch.tensor(spikes, dtype=torch.float64)
    return (noise + noise.T) / math.sqrt(2 * SIZE) + basis @ torch.diag(values) @ basis.T


def runs(matrix, count=2, num_steps=50):
    return [lanczos(matrix, num_steps=num_steps, generator=seeded(10 + i)) for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_outliers_of_a_spiked_matrix_are_found_and_no_others(seed):
    # Each sample has P sigma^2 = 50, and the matrix is a mean of 50: a semicircle of radius 2.
    found = bulk_edge(runs(spiked(seed)), variance=50.0, batch_size=50)

    # lambda' = lambda + 1/lambda
    expected = torch.tensor(sorted(value + 1 / value for value in SPIKES), dtype=torch.float64)
    torch.testing.assert_close(found.outliers, expected, rtol=0.1, atol=0.0)
    assert -2.1 < found.lower < -1.5
    assert 1.5 < found.upper < 2.1
    low, high = found.noise
    assert high - low == pytest.approx(4.0)
    assert abs(high - 2) < found.margin + 0.1


def test_without_outliers_none_are_found():
    found = bulk_edge(runs(spiked(5, spikes=(0.1,))), variance=50.0, batch_size=50)
    assert len(found.outliers) == 0
    assert "0 outliers: none" in str(found)


@pytest.mark.parametrize("seed", range(20))
def test_a_matrix_whose_eigenvalues_are_all_found_has_no_bulk(seed):
    # By chance, some eigenvalue has the largest weight of all.
    values = torch.linspace(-1.0, 3.0, 12, dtype=torch.float64)
    run = lanczos(torch.diag(values), num_steps=12, generator=seeded(seed))

    found = bulk_edge(run)

    # One weight in a thousand exceeds that of a single eigenvalue.
    assert math.isnan(found.lower)
    assert math.isnan(found.upper)
    assert len(found.outliers) == 0
    assert "none: all Ritz values are single eigenvalues" in str(found)
    noisy = bulk_edge(run, variance=0.01, batch_size=1)
    assert noisy.noise[0] == pytest.approx(float(run.weights @ run.values) - 0.2)
    assert 0 < len(noisy.outliers) < 12


def test_the_margin_falls_with_the_size_by_the_law_of_tracy_and_widom():
    matrix = spiked(0)
    narrow, wide = (
        bulk_edge(runs(matrix), variance=1.0, batch_size=1, level=level).margin
        for level in (0.9, 0.999)
    )
    # Quantiles 0.4501 and 3.2724, and the unit P^(-2/3) of a semicircle of radius 2.
    assert wide - narrow == pytest.approx((3.2724 - 0.4501) * SIZE ** (-2 / 3), rel=0.02)


def test_the_law_of_marchenko_and_pastur_bounds_a_covariance():
    x = torch.randn(4 * SIZE, SIZE, generator=seeded(3), dtype=torch.float64)
    run = runs(x.T @ x / len(x))
    found = bulk_edge(run, batch_size=len(x), law="marchenko_pastur")
    # Edges (1 -+ sqrt(1/4))^2
    assert found.noise == pytest.approx((0.25, 2.25), rel=0.05)
    assert len(found.outliers) == 0


def test_the_crude_edge_is_five_times_the_mean_eigenvalue():
    matrix = torch.diag(torch.rand(SIZE, generator=seeded(1), dtype=torch.float64))
    found = bulk_edge(runs(matrix, count=4))
    exact = 5 * float(matrix.trace()) / SIZE
    assert abs(float(found.crude) - exact) < 4 * float(found.crude.stderr)
    assert math.isnan(found.margin)


def test_the_crude_edge_of_one_run_has_an_error_bar():
    matrix = torch.diag(torch.rand(SIZE, generator=seeded(1), dtype=torch.float64))
    exact = 5 * float(matrix.trace()) / SIZE

    edges = [bulk_edge(run).crude for run in runs(matrix, count=40, num_steps=15)]

    scores = torch.tensor([(float(edge) - exact) / float(edge.stderr) for edge in edges])
    # The mean square of 40 scores of variance 1 has the standard error sqrt(2 / 40).
    assert abs(float(scores.square().mean()) - 1) < 4 * math.sqrt(2 / 40)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"law": "wigner"}, "law must be one of"),
        ({"level": 1.0}, "level"),
        ({"variance": -1.0}, "variance"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input_names_the_argument(bad, message):
    run = lanczos(torch.eye(4), num_steps=1)
    with pytest.raises(ValueError, match=message):
        bulk_edge(run, **bad)
    with pytest.raises(ValueError, match="at least one run"):
        bulk_edge([])


def test_a_negative_mean_has_no_law_of_marchenko_and_pastur():
    run = lanczos(-spiked(0) @ spiked(0), num_steps=20)
    with pytest.raises(ValueError, match="unless the mean eigenvalue of the bulk is positive"):
        bulk_edge(run, batch_size=10, law="marchenko_pastur")
