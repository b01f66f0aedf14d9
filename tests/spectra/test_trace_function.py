import math

import pytest
import torch
from matrices import PRECISIONS, seeded

import ritz
from ritz import trace_function
from ritz.operators import DenseOperator, FunctionOperator
from ritz.spectra._functions.quadrature import ritz_rules
from ritz.testing import assert_within_stderr, with_spectrum

MODES = ["none", "partial", "full"]


def matrix_with(eigenvalues, dtype=torch.float64):
    return with_spectrum(eigenvalues.to(dtype), generator=seeded(0))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_one_step_is_exact_for_the_identity_function(dtype):
    op = DenseOperator(torch.diag(torch.arange(1, 13, dtype=dtype)))
    found = trace_function(op, lambda x: x, num_probes=3, num_steps=1, method="lanczos")
    torch.testing.assert_close(found.samples, torch.full((3,), 78.0, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_log_determinant_is_within_four_standard_errors_of_dense(dtype, mode):
    op = matrix_with(torch.linspace(0.5, 4.0, 80), dtype)
    found = trace_function(
        op,
        torch.log,
        method="lanczos",
        num_probes=64,
        num_steps=20,
        reorthogonalize=mode,
        generator=seeded(1),
    )
    assert_within_stderr(found, float(torch.logdet(op.matrix.double())))
    assert found.num_products == 64 * 20


@pytest.mark.parametrize("degree", range(6))
def test_m_steps_are_exact_for_polynomials_of_degree_2m_minus_1(degree):
    op = matrix_with(torch.linspace(-1, 2, 25, dtype=torch.float64))
    found = trace_function(op, lambda x: x**degree, num_probes=4, num_steps=3, generator=seeded(2))
    probes = torch.randint(0, 2, (4, 25), generator=seeded(2), dtype=torch.int8).double() * 2 - 1
    power = torch.linalg.matrix_power(op.matrix, degree)
    torch.testing.assert_close(found.samples, torch.einsum("ki,ij,kj->k", probes, power, probes))


def test_an_indefinite_spectrum_keeps_its_negative_part():
    values = torch.cat([torch.linspace(-2, -1, 12), torch.linspace(1, 3, 18)]).double()
    found = trace_function(
        matrix_with(values),
        torch.sign,
        method="lanczos",
        num_probes=25,
        num_steps=30,
        reorthogonalize="full",
    )
    assert float(found.stderr) > 0
    assert_within_stderr(found, 6.0)


def test_the_standard_error_is_honest():
    eigenvalues = torch.linspace(0.1, 2.0, 30, dtype=torch.float64)
    op, truth, scores = matrix_with(eigenvalues), eigenvalues.exp().sum(), []
    for seed in range(200):
        found = trace_function(
            op,
            torch.exp,
            method="lanczos",
            num_probes=10,
            num_steps=6,
            block_size=10,
            generator=seeded(seed),
        )
        scores.append(float((found.mean - truth) / found.stderr))
    assert 0.8 < float(torch.tensor(scores).std()) < 1.25


@pytest.mark.parametrize("function", [torch.log, torch.reciprocal, torch.sqrt, torch.rsqrt])
def test_with_a_floor_the_truncation_bounds_the_change_by_more_steps(function):
    op = matrix_with(torch.logspace(-4, 0, 100, dtype=torch.float64))
    options = {"method": "lanczos", "floor": 0.99e-4}
    short = trace_function(op, function, num_steps=8, generator=seeded(1), **options)
    full = trace_function(
        op, function, num_steps=100, reorthogonalize="full", generator=seeded(1), **options
    )
    change = abs(float(short) - float(full))
    assert full.truncation < 1e-9 * abs(full.mean)
    assert change <= float(short.truncation) + float(full.truncation)
    assert float(short.truncation) < 200 * change


@pytest.mark.parametrize("function", [torch.exp, torch.sqrt, torch.special.entr])
def test_without_a_floor_the_truncation_estimates_the_change_by_more_steps(function):
    op = matrix_with(torch.logspace(-4, 0, 100, dtype=torch.float64))
    short = trace_function(op, function, num_steps=6, generator=seeded(1), method="lanczos")
    full = trace_function(
        op,
        function,
        num_steps=100,
        reorthogonalize="full",
        generator=seeded(1),
        method="lanczos",
    )
    change = abs(float(short) - float(full))
    assert full.truncation < 1e-9 * abs(full.mean)
    assert change <= float(short.truncation) < 100 * change + 1e-9


@pytest.mark.parametrize("function", [torch.log, torch.reciprocal, torch.rsqrt])
def test_the_truncation_is_unknown_if_the_spectrum_may_reach_a_pole(function):
    op = matrix_with(torch.logspace(-6, 0, 100, dtype=torch.float64))
    found = trace_function(op, function, num_steps=8, method="lanczos")
    assert float(found.truncation) == torch.inf
    assert found.status.outcome == "uncertain"
    assert "floor" in found.status.advice


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_truncation_of_fewer_than_four_steps_is_unknown(num_steps):
    op = matrix_with(torch.linspace(0.5, 4.0, 40))
    found = trace_function(op, torch.log, num_steps=num_steps, method="lanczos")
    assert float(found.truncation) == torch.inf
    assert found.status.outcome == "uncertain"
    with pytest.raises(RuntimeError, match="the error is unknown"):
        found.raise_if_failed()


def test_auto_computes_all_eigenvalues_if_they_need_no_more_products():
    values = torch.linspace(0.5, 4.0, 100, dtype=torch.float64)
    few = trace_function(matrix_with(values), torch.exp, num_steps=9, num_probes=11)
    enough = trace_function(matrix_with(values), torch.exp, num_steps=10, num_probes=10)
    assert "Lanczos" in few.method
    assert enough.method == "all 100 eigenvalues"
    assert (float(enough.stderr), enough.num_products) == (0.0, 100)
    assert float(enough) == pytest.approx(float(values.exp().sum()), rel=1e-12)


@pytest.mark.parametrize("method", ["lanczos", "krylov", "chebyshev", "maxent"])
def test_no_method_samples_with_as_many_probes_as_rows(method):
    values = torch.linspace(0.5, 4.0, 16, dtype=torch.float64)
    found = trace_function(
        matrix_with(values), torch.exp, num_steps=4, num_probes=16, method=method
    )
    assert (found.method, float(found.stderr)) == ("all 16 eigenvalues", 0.0)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_an_invariant_space_is_exact_and_costs_no_further_product(num_steps):
    calls = []

    def product(block):
        calls.append(block.shape[1])
        return 3.0 * block

    op = FunctionOperator(product, n=20, dtype=torch.float64)
    found = trace_function(op, torch.log, method="lanczos", num_probes=6, num_steps=num_steps)
    assert float(found) == pytest.approx(20 * torch.tensor(3.0).log().item())
    assert float(found.stderr) < 1e-12
    assert 0 < float(found.truncation) < 1e-12  # roundoff
    assert found.num_products == sum(calls) == 6


def test_the_whole_space_leaves_no_error_but_roundoff():
    op = matrix_with(torch.linspace(1, 2, 40, dtype=torch.float64))
    found = trace_function(
        op, torch.exp, method="lanczos", num_steps=40, num_probes=8, reorthogonalize="full"
    )
    assert float(found.stderr) > 0
    assert 0 < float(found.truncation) < 1e-12 * float(found)  # roundoff


def test_every_rule_sums_to_one_and_padding_has_no_weight():
    op = matrix_with(torch.tensor([1.0, 1.0, 1.0, 5.0, 5.0], dtype=torch.float64))
    block = torch.randn(5, 3, generator=seeded(0), dtype=torch.float64)
    rules = ritz_rules(op, block, num_steps=4, reorthogonalize="full")
    nodes, weights = rules.nodes, rules.weights
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))
    assert rules.num_products == 6
    assert int((weights > 1e-12).sum()) == 6
    torch.testing.assert_close(
        (weights * nodes).sum(1) * block.square().sum(0),
        torch.einsum("ik,ij,jk->k", block, op.matrix, block),
    )


def test_the_tolerance_is_reached_or_its_failure_reported():
    values = torch.linspace(0.5, 4.0, 400, dtype=torch.float64)
    op = matrix_with(values)
    found = trace_function(op, torch.sqrt, num_steps=12, num_probes=8, rtol=0.005)
    assert "Lanczos" in found.method
    assert found.status.outcome == "converged"
    assert found.error() <= 0.005 * found.mean
    assert_within_stderr(found, values.sqrt().sum())
    short = trace_function(op, torch.sqrt, num_steps=12, num_probes=8, rtol=1e-4, max_probes=9)
    assert short.status.outcome == "max_steps"
    with pytest.raises(RuntimeError, match="times as many probes"):
        short.raise_if_failed()


def test_a_tolerance_that_the_steps_cannot_reach_asks_for_steps_and_not_for_probes():
    op = matrix_with(torch.logspace(-3, 1, 400, dtype=torch.float64))
    found = trace_function(op, torch.sqrt, num_steps=5, num_probes=8, rtol=1e-3)
    assert found.status.outcome == "max_steps"
    assert float(found.truncation) > 1e-3 * float(found)
    assert found.num_products == 8 * 5  # further probes would not help
    with pytest.raises(RuntimeError, match="use more steps"):
        found.raise_if_failed()


def test_the_error_for_a_function_that_is_not_finite_names_the_point():
    values = torch.linspace(-1.0, 2.0, 40, dtype=torch.float64)
    for method in ("lanczos", "eigenvalues", "krylov", "chebyshev"):
        options = {"method": method, "num_steps": 3, "num_probes": 8}
        with pytest.raises(ValueError, match="finite on the spectrum, got NaN or Inf at -"):
            trace_function(matrix_with(values), torch.sqrt, **options)
        with pytest.raises(ValueError, match="op must be positive definite, got a Ritz value of -"):
            trace_function(matrix_with(values), torch.log, **options)


def test_a_function_may_be_singular_between_the_eigenvalues():
    op = DenseOperator(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    found = trace_function(op, torch.reciprocal, num_steps=2, reorthogonalize="full")
    assert_within_stderr(found, 0.0)
    values = torch.cat([torch.linspace(-2, -1, 15), torch.linspace(1, 3, 25)]).double()
    found = trace_function(
        matrix_with(values),
        torch.reciprocal,
        method="lanczos",
        num_probes=8,
        num_steps=40,
        reorthogonalize="full",
    )
    assert found.status.ok
    assert_within_stderr(found, float(values.reciprocal().sum()))


def test_a_function_that_changes_the_shape_is_refused():
    op = torch.diag(torch.linspace(1, 2, 12))
    with pytest.raises(ValueError, match=r"function must keep the shape \(4, 2\)"):
        trace_function(op, torch.sum, method="lanczos", num_steps=2, num_probes=4)
    with pytest.raises(ValueError, match=r"function must keep the shape \(12,\), got \(\)"):
        trace_function(op, torch.sum, method="eigenvalues", num_steps=2)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"method": "magic"}, "method must be one of auto, lanczos, krylov"),
        ({"num_steps": 0}, "num_steps must be between 1 and 3"),
        ({"num_steps": 4}, "num_steps must be between 1 and 3"),
        ({"num_probes": 1}, "num_probes must be at least 2"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"reorthogonalize": "some"}, "reorthogonalize must be one of"),
    ],
)
def test_misuse_names_the_argument(bad, match):
    with pytest.raises(ValueError, match=match):
        trace_function(torch.eye(3), torch.log, **({"num_steps": 2} | bad))


def test_a_product_that_is_not_finite_names_its_step():
    calls = []

    def product(block):
        calls.append(1)
        return block.flip(0) * (float("nan") if len(calls) == 3 else 1.0)

    op = FunctionOperator(product, n=30, dtype=torch.float64)
    shifted = op + DenseOperator(torch.diag(torch.linspace(0, 1, 30, dtype=torch.float64)))
    with pytest.raises(ValueError, match="finite products; at step 3 it gave 30 NaN or Inf"):
        trace_function(shifted, torch.exp, method="lanczos", num_steps=8, num_probes=8)


def within(found, exact):
    low, high = found.interval(0.9999)
    return math.isfinite(float(high)) and float(low) <= exact <= float(high)


FUNCTIONS = {
    "inverse": torch.reciprocal,
    "inverse root": lambda x: x**-0.5,
    "exponential": torch.exp,
    "entropy": torch.special.entr,
}
METHODS = ("lanczos", "krylov", "chebyshev", "maxent")


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


@pytest.mark.parametrize("method", ["chebyshev", "maxent"])
def test_a_series_across_the_pole_of_the_function_asks_for_a_floor(method):
    """No node of the series is the pole, so that the function is finite at all of them."""
    matrix = torch.diag(torch.logspace(-6, 0, 60, dtype=torch.float64))
    op = FunctionOperator(matrix.__matmul__, n=60, dtype=torch.float64)

    with pytest.raises(ValueError, match=r"floor must be given: the bounds .* beyond the domain"):
        ritz.trace_function(op, torch.reciprocal, num_steps=10, num_probes=8, method=method)
    with_floor = ritz.trace_function(
        op, torch.reciprocal, num_steps=10, num_probes=8, method="chebyshev", floor=1e-6
    )

    low, high = with_floor.interval()
    assert low <= (1 / matrix.diagonal()).sum() <= high
