import math

import pytest
import torch

import ritz
from ritz.operators import FunctionOperator, KernelOperator
from ritz.testing import with_spectrum

FUNCTIONS = {
    "inverse": torch.reciprocal,
    "inverse root": lambda x: x**-0.5,
    "exponential": torch.exp,
    "entropy": torch.special.entr,
}
METHODS = ("lanczos", "krylov", "chebyshev", "maxent")


def within(found, exact):
    low, high = found.interval(0.9999)
    return math.isfinite(float(high)) and float(low) <= exact <= float(high)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_truth_lies_within_both_error_bars(name, method, rng):
    values = torch.logspace(-1, 1, 300, dtype=torch.float64)
    op = with_spectrum(values, generator=rng)
    exact = float(FUNCTIONS[name](values).sum())
    found = ritz.trace_function(
        op, FUNCTIONS[name], method=method, num_steps=14, num_probes=16, floor=0.1 * (1 - 1e-9)
    )
    assert within(found, exact)
    assert abs(float(found) - exact) < 0.2 * abs(exact)
    assert found.num_products <= 14 * 16


@pytest.mark.parametrize("name", FUNCTIONS)
def test_eigenvalues_are_exact(name, rng):
    values = torch.logspace(-1, 1, 40, dtype=torch.float64)
    op = with_spectrum(values, generator=rng)
    found = ritz.trace_function(op, FUNCTIONS[name], method="eigenvalues", num_steps=1)
    assert float(found) == pytest.approx(float(FUNCTIONS[name](values).sum()), rel=1e-12)
    assert float(found.stderr) == 0
    assert 0 < float(found.truncation) < 1e-11 * abs(float(found))  # roundoff


def test_a_krylov_space_of_full_dimension_is_exact(rng):
    values = torch.linspace(-2, 2, 60, dtype=torch.float64)
    op = with_spectrum(values, generator=rng)
    found = ritz.trace_function(op, torch.exp, method="krylov", num_steps=10, num_probes=6)
    assert float(found) == pytest.approx(float(values.exp().sum()), rel=1e-10)
    assert "the whole space" in found.method


def test_a_krylov_space_is_accurate_if_few_eigenvalues_dominate(rng):
    values = torch.cat([torch.linspace(0, 1, 480), torch.linspace(50, 90, 20)]).double()
    op = with_spectrum(values, generator=rng)
    options = {"num_steps": 20, "num_probes": 10}
    found = ritz.trace_function(op, torch.square, method="krylov", **options)
    plain = ritz.trace_function(op, torch.square, **options)
    assert within(found, float(values.square().sum()))
    assert float(found.stderr) < 1e-3 * float(plain.stderr)


@pytest.mark.parametrize("method", ["krylov", "chebyshev"])
def test_a_function_that_is_not_finite_on_the_spectrum_is_named(method, rng):
    op = with_spectrum(torch.linspace(-1, 1, 100, dtype=torch.float64), generator=rng)
    options = {"method": method, "num_steps": 5, "num_probes": 10}
    with pytest.raises(ValueError, match="finite on the spectrum, got NaN or Inf at -"):
        ritz.trace_function(op, torch.sqrt, **options)
    with pytest.raises(ValueError, match="op must be positive definite, got a Ritz value of -"):
        ritz.trace_function(op, torch.log, **options)


def test_an_unknown_method_is_named(rng):
    op = with_spectrum(torch.ones(10, dtype=torch.float64), generator=rng)
    with pytest.raises(ValueError, match="method must be one of auto, lanczos, krylov"):
        ritz.trace_function(op, torch.exp, method="magic", num_steps=5)


def chain(n, shift):
    """A second difference and a shift, known by products alone, and its log determinant."""

    def product(block):
        out = (2 + shift) * block
        out[1:] -= block[:-1]
        out[:-1] -= block[1:]
        return out

    angles = torch.arange(1, n + 1, dtype=torch.float64) * math.pi / (n + 1)
    exact = float((2 + shift - 2 * angles.cos()).log().sum())
    return FunctionOperator(product, n=n, dtype=torch.float64), exact


def test_auto_stops_when_the_tolerance_is_reached():
    op, exact = chain(20_000, 1.0)
    found = ritz.logdet(op, rtol=0.01)
    assert found.status.outcome == "converged"
    assert found.num_products < 100
    assert "Lanczos quadrature, which reaches rtol" in found.method
    assert abs(float(found) - exact) < 0.01 * exact


def test_auto_aims_at_a_thousandth_and_reports_whether_it_was_reached():
    op, exact = chain(20_000, 1.0)
    found = ritz.logdet(op)
    assert found.status.outcome == "converged"
    assert float(found.error()) <= 1e-3 * float(found)
    assert within(found, exact)
    short = ritz.logdet(op, num_products=200, rtol=1e-6)
    assert short.status.outcome == "max_steps"
    assert within(short, exact)


def test_truncation_is_unknown_after_a_single_step():
    op, _ = chain(20_000, 1.0)
    found = ritz.logdet(op, num_products=30, rtol=1e-5)
    assert "x 1 steps" in found.method
    assert float(found.truncation) == math.inf
    assert found.status.outcome == "uncertain"


def test_auto_uses_a_krylov_space_if_quadrature_does_not_reach_the_tolerance():
    op, exact = chain(2000, 1e-5)
    found = ritz.logdet(op, num_products=400, floor=1e-5, rtol=1e-3)
    assert "directions split off" in found.method
    assert "Lanczos quadrature would not reach rtol" in found.method
    assert found.num_products <= 400
    assert within(found, exact)


def test_steps_are_few_where_truncation_does_not_count_and_many_where_it_does():
    easy = ritz.logdet(chain(5000, 5.0)[0], method="lanczos", num_products=200)
    hard = ritz.logdet(chain(5000, 1e-6)[0], method="lanczos", num_products=200)
    assert len(easy.samples) >= 25
    assert len(hard.samples) <= 20


@pytest.mark.parametrize("kernel", ["squared_exponential", "matern32"])
def test_the_mean_is_differentiable_in_the_parameters_of_a_kernel(kernel, rng):
    points = torch.randn(150, 3, generator=rng, dtype=torch.float64)
    lengthscale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    op = KernelOperator(points, kernel=kernel, lengthscale=lengthscale, noise=noise)
    ritz.logdet(op).mean.backward()
    step = 1e-5

    def exact(shift, extra):
        moved = KernelOperator(points, kernel=kernel, lengthscale=0.8 + shift, noise=0.1 + extra)
        return float(torch.logdet(moved.dense()))

    slope = (exact(step, 0) - exact(-step, 0)) / (2 * step)
    assert float(lengthscale.grad) == pytest.approx(slope, rel=1e-5)
    slope = (exact(0, step) - exact(0, -step)) / (2 * step)
    assert float(noise.grad) == pytest.approx(slope, rel=1e-5)


def test_a_block_krylov_space_refuses_products_that_are_not_symmetric(rng):
    values = torch.linspace(1, 3, 120, dtype=torch.float64)
    matrix = with_spectrum(values, generator=rng).matrix
    skew = torch.randn(120, 120, generator=rng, dtype=torch.float64).triu() * 1e-3
    calls = []

    def drifting(block):
        calls.append(0)
        return matrix @ block + 1e-3 * len(calls) * torch.roll(block, 1, 0)

    for product in (lambda block: (matrix + skew) @ block, drifting):
        op = FunctionOperator(product, n=120, dtype=torch.float64)
        with pytest.raises(ValueError, match="op must be symmetric and the same in every call"):
            ritz.logdet(op, method="krylov", num_products=60)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (None, "function must be callable, got NoneType"),
        (lambda x: 1.0, "function must return a real tensor, got float"),
        (lambda x: torch.sqrt(x + 0j), "function must return a real tensor, got torch.complex128"),
    ],
)
def test_a_function_without_real_values_is_refused(function, error):
    with pytest.raises(TypeError, match=error):
        ritz.trace_function(torch.eye(20), function, num_steps=3, num_probes=4)


@pytest.mark.parametrize("floor", [float("nan"), -math.inf, "a"])
def test_a_floor_that_is_not_a_number_is_refused(floor):
    with pytest.raises((ValueError, TypeError), match="floor must be"):
        ritz.trace_function(torch.eye(20), torch.exp, num_steps=3, num_probes=4, floor=floor)


@pytest.mark.parametrize("method", ["lanczos", "krylov", "eigenvalues"])
def test_comparisons_count_eigenvalues(method, rng):
    values = torch.cat([torch.full((90,), -1.0), torch.full((30,), 2.0)]).double()
    op = with_spectrum(values, generator=rng)
    weight = torch.tensor(1.0, requires_grad=True)
    for function in (lambda x: x > 0, lambda x: (x > 0).long(), lambda x: (x > 0) * weight):
        found = ritz.trace_function(op, function, method=method, num_steps=6, num_probes=16)
        assert within(found, 30.0)
        assert not found.mean.requires_grad


def test_a_function_may_write_to_its_argument(rng):
    op = with_spectrum(torch.linspace(1, 2, 100, dtype=torch.float64), generator=rng)
    settings = {"method": "lanczos", "num_steps": 6, "num_probes": 4}
    there = ritz.trace_function(op, lambda x: x.square_(), **settings)
    assert torch.equal(there.mean, ritz.trace_function(op, torch.square, **settings).mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roundoff_beyond_the_rank_is_not_mistaken_for_asymmetry(dtype, rng):
    values = torch.cat([torch.linspace(1, 3, 8), torch.zeros(112)]).to(dtype)
    op = with_spectrum(values, generator=rng)
    found = ritz.trace_function(op, torch.exp, method="krylov", num_steps=10, num_probes=8)
    assert within(found, float(values.double().exp().sum()))
