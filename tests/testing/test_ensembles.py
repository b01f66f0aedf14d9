import math

import pytest
import torch
from matrices import PRECISIONS, seeded

from ritz.testing import (
    check_operator,
    network_like,
    spiked_wigner,
    spiked_wishart,
    wigner,
    wishart,
    with_spectrum,
)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("n", [1, 2, 30])
def test_a_matrix_has_the_spectrum_that_was_chosen(n, dense, dtype):
    eigenvalues = torch.linspace(-2, 5, n, dtype=dtype)
    op = with_spectrum(eigenvalues, dense=dense)
    check_operator(op)
    found = torch.linalg.eigvalsh(op.dense().double())
    torch.testing.assert_close(found.to(dtype), eigenvalues, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_the_eigenvectors_are_not_the_unit_vectors(dense):
    matrix = with_spectrum(torch.linspace(1, 2, 20, dtype=torch.float64), dense=dense).dense()
    assert (matrix - torch.diag(matrix.diagonal())).norm() > 0.1


def test_the_uniform_rotation_has_the_moments_of_haar():
    first = torch.zeros(8, dtype=torch.float64)
    first[0] = 1.0
    drawn = torch.stack([with_spectrum(first, generator=seeded(s)).matrix for s in range(500)])
    # q q' of a uniform unit vector: mean I/n, and variance of a diagonal entry 2 (n-1)/(n^2 (n+2)).
    deviation = drawn.mean(0) - torch.eye(8, dtype=torch.float64) / 8
    assert deviation.abs().max() < 4.5 * math.sqrt(14 / (64 * 10) / 500)


def test_a_million_rows_need_no_matrix():
    eigenvalues = torch.zeros(10**6)
    eigenvalues[0] = 4.0
    op = with_spectrum(eigenvalues, dense=False)
    block = torch.ones(10**6, 1)
    product = op @ block
    torch.testing.assert_close(op @ product, 4 * product, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_wigner_matrix_fills_the_semicircle(dtype):
    op = wigner(600, dtype=dtype)
    assert op.dtype == dtype
    values = torch.linalg.eigvalsh(op.matrix.double())
    assert values.abs().max() == pytest.approx(2.0, abs=0.1)
    assert values.square().mean() == pytest.approx(1.0, abs=0.02)
    assert values.pow(4).mean() == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("spike", [3.0, -4.0])
def test_a_spike_leaves_the_semicircle_where_it_should(spike):
    values = torch.linalg.eigvalsh(spiked_wigner(600, spikes=(spike,)).matrix)
    outlier = values[values.abs().argmax()]
    assert outlier == pytest.approx(spike + 1 / spike, abs=0.15)


def test_a_spike_below_the_threshold_stays_inside():
    values = torch.linalg.eigvalsh(spiked_wigner(600, spikes=(0.5,)).matrix)
    assert values.max() < 2.1


@pytest.mark.parametrize("samples", [300, 2400])
def test_a_wishart_matrix_fills_marchenko_and_pasturs_law(samples):
    q = 600 / samples
    values = torch.linalg.eigvalsh(wishart(600, samples).matrix)
    assert values.max() == pytest.approx((1 + q**0.5) ** 2, rel=0.05)
    assert values.mean() == pytest.approx(1.0, abs=0.03)
    assert values.square().mean() == pytest.approx(1 + q, rel=0.05)
    assert int((values < 1e-10).sum()) == max(0, 600 - samples)


def test_a_spiked_covariance_has_its_outlier_where_it_should():
    q, theta = 600 / 2400, 4.0
    values = torch.linalg.eigvalsh(spiked_wishart(600, 2400, spikes=(1 + theta,)).matrix)
    assert values[-1] == pytest.approx((1 + theta) * (1 + q / theta), rel=0.06)
    assert values[-2] < (1 + q**0.5) ** 2 * 1.05


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_network_like_matrix_has_the_counts_of_the_thesis(dtype):
    op, values = network_like(200, dtype=dtype)
    assert op.dtype == values.dtype == dtype
    assert torch.equal(values, values.sort().values)
    assert int((values == 0).sum()) == 100
    assert int((values < 0).sum()) == 2
    assert int((values > 0).sum()) == 98
    assert values.min() >= -10
    assert values.max() <= 60
    found = torch.linalg.eigvalsh(op.dense().double())
    torch.testing.assert_close(found.to(dtype), values, rtol=1e-4, atol=1e-4)


BUILDERS = {
    "with_spectrum": lambda g: with_spectrum(torch.arange(5.0), generator=g).dense(),
    "reflected": lambda g: with_spectrum(torch.arange(5.0), dense=False, generator=g).dense(),
    "wigner": lambda g: wigner(5, generator=g).matrix,
    "spiked_wigner": lambda g: spiked_wigner(5, spikes=(2.0,), generator=g).matrix,
    "wishart": lambda g: wishart(5, 9, generator=g).matrix,
    "network_like": lambda g: network_like(100, generator=g)[0].dense(),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_the_generator_decides_and_the_global_one_is_not_touched(build):
    before = torch.get_rng_state()
    assert torch.equal(build(None), build(seeded(1)))
    assert not torch.equal(build(None), build(seeded(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_dtype_does_not_matter():
    before, expected = torch.get_default_dtype(), network_like(100)[1]
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(network_like(100)[1], expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: with_spectrum(torch.eye(2)), "eigenvalues must be a vector"),
        (lambda: with_spectrum(torch.tensor([1.0, math.nan])), "eigenvalues must be finite"),
        (lambda: wigner(0), "n must be at least 1"),
        (lambda: spiked_wigner(1, spikes=(2.0, 3.0)), "n must be at least 2"),
        (lambda: wishart(5, 0), "num_samples must be at least 1"),
        (lambda: spiked_wishart(5, 9, spikes=(-1.0,)), "spikes must be positive variances"),
        (lambda: network_like(50), "n must be at least 100"),
    ],
)
def test_misuse_names_the_argument(build, match):
    with pytest.raises(ValueError, match=match):
        build()
