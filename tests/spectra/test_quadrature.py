import pytest
import torch

from ritz import trace_function
from ritz.operators import DenseOperator, FunctionOperator
from ritz.spectra._functions.quadrature import ritz_rules
from ritz.testing import assert_within_stderr, with_spectrum

PRECISIONS = [torch.float32, torch.float64]
MODES = ["none", "partial", "full"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def matrix_with(eigenvalues, dtype=torch.float64):
    return with_spectrum(eigenvalues.to(dtype), generator=seeded(0))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_one_step_is_exact_for_the_identity_function(dtype):
    op = DenseOperator(torch.diag(torch.arange(1, 7, dtype=dtype)))
    found = trace_function(op, lambda x: x, num_probes=3, num_steps=1)
    torch.testing.assert_close(found.samples, torch.full((3,), 21.0, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_log_determinant_is_within_four_standard_errors_of_dense(dtype, mode):
    op = matrix_with(torch.linspace(0.5, 4.0, 40), dtype)
    found = trace_function(
        op, torch.log, num_probes=64, num_steps=20, reorthogonalize=mode, generator=seeded(1)
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
    op = matrix_with(torch.tensor([-2.0, -1.0, 1.0, 2.0, 3.0], dtype=torch.float64))
    found = trace_function(op, torch.sign, num_probes=400, num_steps=5, reorthogonalize="full")
    assert_within_stderr(found, 1.0)


def test_the_standard_error_is_honest():
    eigenvalues = torch.linspace(0.1, 2.0, 30, dtype=torch.float64)
    op, truth, scores = matrix_with(eigenvalues), eigenvalues.exp().sum(), []
    for seed in range(200):
        found = trace_function(
            op, torch.exp, num_probes=10, num_steps=6, block_size=10, generator=seeded(seed)
        )
        scores.append(float((found.mean - truth) / found.stderr))
    assert 0.8 < float(torch.tensor(scores).std()) < 1.25


def test_the_truncation_says_how_much_more_steps_would_change():
    op = matrix_with(torch.logspace(-4, 0, 100, dtype=torch.float64))
    short = trace_function(op, torch.log, num_steps=8, generator=seeded(1))
    full = trace_function(op, torch.log, num_steps=60, reorthogonalize="full", generator=seeded(1))
    assert short.truncation > 10 * full.truncation
    assert 0.25 * short.truncation < abs(short.mean - full.mean) < 4 * short.truncation
    assert full.truncation < 0.005 * abs(full.mean)  # which error bars of sampling exceed


def test_a_single_step_has_unknown_truncation():
    op = matrix_with(torch.linspace(0.5, 4.0, 40))
    assert trace_function(op, torch.log, num_steps=1).truncation.isnan()


@pytest.mark.parametrize("num_steps", [1, 4])
def test_an_invariant_space_is_exact_and_costs_no_further_product(num_steps):
    calls = []

    def product(block):
        calls.append(block.shape[1])
        return 3.0 * block

    op = FunctionOperator(product, n=20, dtype=torch.float64)
    found = trace_function(op, torch.log, num_probes=5, num_steps=num_steps)
    assert float(found) == pytest.approx(20 * torch.tensor(3.0).log().item())
    assert float(found.stderr) < 1e-12
    assert found.truncation == 0
    assert found.num_products == sum(calls) == 5


def test_the_whole_space_leaves_no_truncation():
    op = matrix_with(torch.linspace(1, 2, 6, dtype=torch.float64))
    found = trace_function(op, torch.exp, num_steps=6, reorthogonalize="full")
    assert found.truncation == 0


def test_every_rule_sums_to_one_and_the_padding_weighs_nothing():
    op = matrix_with(torch.tensor([1.0, 1.0, 1.0, 5.0, 5.0], dtype=torch.float64))
    block = torch.randn(5, 3, generator=seeded(0), dtype=torch.float64)
    rules = ritz_rules(op, block, num_steps=4, reorthogonalize="full")
    nodes, weights = rules.last
    torch.testing.assert_close(weights.sum(0), torch.ones(3, dtype=torch.float64))
    assert rules.exact.all()
    assert rules.num_products == 6
    assert int((weights > 1e-12).sum()) == 6
    torch.testing.assert_close(
        (weights * nodes).sum(0) * block.square().sum(0),
        torch.einsum("ik,ij,jk->k", block, op.matrix, block),
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_block_size_does_not_matter(mode):
    op = matrix_with(torch.linspace(0.5, 4.0, 40, dtype=torch.float64))
    runs = [
        trace_function(
            op, torch.log, num_probes=7, num_steps=12, block_size=width, reorthogonalize=mode
        )
        for width in (1, 3, 7, 100)
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.samples, runs[0].samples)


def test_the_tolerance_is_reached_or_its_failure_reported():
    op = matrix_with(torch.linspace(0.5, 4.0, 40, dtype=torch.float64))
    found = trace_function(op, torch.sqrt, num_steps=12, num_probes=4, rtol=0.005)
    assert found.status.outcome == "converged"
    assert found.stderr <= 0.005 * found.mean
    exact = torch.linspace(0.5, 4.0, 40, dtype=torch.float64).sqrt().sum()
    assert_within_stderr(found, exact)
    short = trace_function(op, torch.sqrt, num_steps=12, num_probes=4, rtol=1e-6, max_probes=5)
    assert short.status.outcome == "max_steps"
    with pytest.raises(RuntimeError, match="times as many probes"):
        short.raise_if_failed()


def test_a_function_that_is_not_finite_on_the_spectrum_is_refused_where_it_is_not():
    op = matrix_with(torch.tensor([-1.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="finite on the spectrum, but is not at -"):
        trace_function(op, torch.log, num_steps=3)


def test_a_function_may_be_singular_between_the_eigenvalues():
    op = DenseOperator(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    found = trace_function(op, torch.reciprocal, num_steps=2, reorthogonalize="full")
    assert_within_stderr(found, 0.0)


def test_a_function_that_changes_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"function must keep the shape \(2, 8\)"):
        trace_function(torch.eye(3), torch.sum, num_steps=2)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
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
        trace_function(shifted, torch.exp, num_steps=8)
