import math

import pytest
import torch
from matrices import PRECISIONS, hidden, seeded
from numpy.polynomial import chebyshev, legendre
from scipy.special import eval_chebyt, eval_legendre

from ritz import moments
from ritz.operators import DenseOperator, FunctionOperator
from ritz.spectra._moments import chebyshev_from_legendre
from ritz.testing import wigner, with_spectrum

EIGENVALUES = torch.linspace(-1.0, 3.0, 50, dtype=torch.float64)
INTERVAL = (-1.5, 3.5)


def exact(basis, degree, interval=INTERVAL):
    low, high = interval
    t = ((2 * EIGENVALUES - low - high) / (high - low)).numpy()
    value = {"chebyshev": eval_chebyt, "legendre": eval_legendre}.get(basis, lambda j, x: x**j)
    return torch.tensor([value(j, t).mean() for j in range(degree + 1)])


def counting(calls, dtype=torch.float64):
    return hidden(with_spectrum(EIGENVALUES, generator=seeded(0)).matrix.to(dtype), calls)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "power"])
def test_every_moment_is_within_four_standard_errors_of_dense(basis, dtype):
    found = moments(
        counting([], dtype), num_moments=12, basis=basis, interval=INTERVAL, num_probes=40
    )
    off = (found.mean - exact(basis, 12)).abs()
    assert bool((off <= 4 * found.stderr + 1e-6).all())
    torch.testing.assert_close(found.samples[:, 0], torch.ones(40, dtype=torch.float64))
    assert (found.basis, found.interval) == (basis, INTERVAL)


@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "power"])
def test_every_sample_is_the_quadratic_form_of_its_polynomial(basis):
    calls = []
    found = moments(
        counting(calls), num_moments=9, basis=basis, interval=INTERVAL, num_probes=3, block_size=2
    )
    values, vectors = torch.linalg.eigh(with_spectrum(EIGENVALUES, generator=seeded(0)).matrix)
    t = ((2 * values - 2.0) / 5.0).numpy()
    probes = torch.randint(0, 2, (3, 50), generator=seeded(0), dtype=torch.int8).double() * 2 - 1
    weights = (probes @ vectors).square() / 50
    basis_values = {"chebyshev": chebyshev.chebvander, "legendre": legendre.legvander}
    table = basis_values.get(basis, lambda x, m: x[:, None] ** range(m + 1))(t, 9)
    torch.testing.assert_close(found.samples, weights @ torch.from_numpy(table))


@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "power"])
@pytest.mark.parametrize("num_moments", [1, 2, 3, 10, 11])
def test_a_product_gives_two_moments(basis, num_moments):
    calls = []
    found = moments(
        counting(calls), num_moments=num_moments, basis=basis, interval=INTERVAL, num_probes=4
    )
    assert sum(calls) == found.num_products == 4 * math.ceil(num_moments / 2)


def test_the_products_of_the_bounds_are_counted_too():
    calls = []
    found = moments(counting(calls), num_moments=6, num_probes=4)
    assert sum(calls) == found.num_products > 12
    assert found.interval[0] <= -1.0
    assert found.interval[1] >= 3.0


def test_the_semicircle_has_catalan_moments():
    found = moments(wigner(1500), num_moments=8, basis="power", num_probes=32)
    catalan = torch.tensor([1.0, 0, 1, 0, 2, 0, 5, 0, 14], dtype=torch.float64)
    assert bool(((found.mean - catalan).abs() <= 4 * found.stderr + 30 / 1500 * catalan).all())


def test_power_moments_without_an_interval_are_those_of_the_matrix_itself():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    found = moments(matrix, num_moments=3, basis="power", num_probes=2)
    torch.testing.assert_close(found.mean, torch.tensor([1, 7 / 3, 7, 73 / 3], dtype=torch.float64))
    assert found.stderr.max() == 0


def test_legendre_polynomials_are_convex_combinations_of_chebyshev_ones():
    table = chebyshev_from_legendre(100)
    assert table.min() > -1e-14
    torch.testing.assert_close(table.sum(1), torch.ones(101, dtype=torch.float64))


@pytest.mark.parametrize("interval", [(-0.5, 3.5), (-1.5, 2.0), (10.0, 11.0), (-0.1, 0.1)])
@pytest.mark.parametrize("basis", ["chebyshev", "legendre"])
def test_an_interval_that_misses_the_spectrum_is_refused(basis, interval):
    with pytest.raises(
        ValueError, match=r"must contain the spectrum, got .*: the Chebyshev moment"
    ):
        moments(counting([]), num_moments=40, basis=basis, interval=interval)


def test_one_moment_is_enough_to_notice_a_wrong_interval():
    with pytest.raises(ValueError, match="moment of degree 1 is 9, above 1"):
        moments(5 * torch.eye(4), num_moments=1, interval=(0.0, 1.0))


@pytest.mark.parametrize("interval", [(1.0, 0.0), (0.0, 0.0), (float("nan"), 1.0), (0, math.inf)])
def test_an_invalid_interval_is_refused(interval):
    with pytest.raises(ValueError, match="interval must be finite with its lower end first"):
        moments(torch.eye(3), num_moments=2, interval=interval)


def test_an_operator_that_is_not_symmetric_shows_in_the_moments():
    op = FunctionOperator(lambda block: block.cumsum(0) / 100, n=30, dtype=torch.float64)
    with pytest.raises(ValueError, match="op must be symmetric and deterministic"):
        moments(op, num_moments=6, interval=(-1.0, 1.0))


@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "power"])
def test_a_product_that_is_not_finite_is_distinguished_from_a_wrong_interval(basis):
    op = FunctionOperator(lambda block: block * float("nan"), n=30)
    with pytest.raises(
        ValueError, match=r"op must give finite products; the .* of degree 1 is NaN"
    ):
        moments(op, num_moments=6, basis=basis, interval=(-1.0, 1.0))


def test_power_moments_that_overflow_ask_for_an_interval():
    with pytest.raises(ValueError, match="degree 13 is NaN or Inf: pass interval="):
        moments(1e6 * torch.eye(3), num_moments=20, basis="power")


def test_the_tolerance_is_reached_or_its_failure_reported():
    found = moments(counting([]), num_moments=4, interval=INTERVAL, num_probes=8, rtol=0.2)
    assert found.status.outcome == "converged"
    assert 2 * found.stderr.norm() <= 0.2 * found.mean.norm()
    assert 8 <= len(found.samples) < 50
    exact_ones = moments(counting([]), num_moments=4, interval=INTERVAL, num_probes=8, rtol=1e-6)
    assert exact_ones.status.outcome == "converged"
    torch.testing.assert_close(exact_ones.mean, exact("chebyshev", 4))
    assert exact_ones.stderr.max() == 0
    short = moments(
        counting([]), num_moments=4, interval=INTERVAL, num_probes=8, rtol=1e-4, max_probes=12
    )
    assert short.status.outcome == "max_steps"
    with pytest.raises(RuntimeError, match="times as many probes"):
        short.raise_if_failed()


@pytest.mark.parametrize("num_probes", [2, 4])
def test_the_constant_moment_does_not_end_a_search_for_a_tolerance(num_probes):
    found = moments(counting([]), num_moments=4, interval=INTERVAL, num_probes=num_probes, rtol=0.2)
    assert found.status.outcome == "converged"


def test_the_standard_errors_are_honest():
    scores = []
    for seed in range(200):
        found = moments(
            counting([]), num_moments=3, interval=INTERVAL, num_probes=12, generator=seeded(seed)
        )
        scores.append(((found.mean - exact("chebyshev", 3)) / found.stderr)[1:])
    spread = torch.stack(scores).std(0)
    assert bool(((spread > 0.8) & (spread < 1.25)).all())


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, -3e20])
def test_moments_of_a_multiple_of_the_identity_are_those_of_one_point(value, dtype):
    found = moments(DenseOperator(value * torch.eye(6, dtype=dtype)), num_moments=30)
    low, high = found.interval
    assert low < value < high
    t = (2 * value - low - high) / (high - low)
    expected = torch.tensor([eval_chebyt(j, t) for j in range(31)], dtype=torch.float64)
    torch.testing.assert_close(found.mean, expected, rtol=0, atol=1e-4)


def test_moments_print_their_basis_and_interval():
    text = str(moments(torch.eye(20), num_moments=2, interval=(0.0, 2.0), num_probes=12))
    about = "2 chebyshev moments on [0, 2] from 12 probes, largest stderr 0"
    assert text == f"{about}; completed: 12 probes"
