import pytest
import torch
from matrices import PRECISIONS, hidden, seeded

from ritz import diagonal, frobenius_norm, trace
from ritz._core.random import probes
from ritz.operators import DiagonalOperator, FunctionOperator
from ritz.testing import assert_within_stderr, with_spectrum

METHODS = ["hutchinson", "hutch++", "xtrace"]


def decaying(n=60, dtype=torch.float64, seed=0):
    eigenvalues = torch.arange(1, n + 1, dtype=torch.float64) ** -1.0
    return with_spectrum(eigenvalues.to(dtype), generator=seeded(seed)).matrix


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_within_four_standard_errors_of_dense(method, dtype):
    matrix = decaying(90, dtype=dtype) - 0.1 * torch.eye(90, dtype=dtype)
    found = trace(hidden(matrix), method=method, num_probes=20, generator=seeded(1))
    assert found.stderr > 0
    assert found.mean.dtype == found.samples.dtype == torch.float64
    assert_within_stderr(found, float(matrix.double().trace()))


@pytest.mark.parametrize(
    ("method", "products"), [("hutchinson", 20), ("hutch++", 60), ("xtrace", 40)]
)
def test_the_products_reported_are_those_spent(method, products):
    calls = []
    found = trace(hidden(decaying(90), calls), method=method, num_probes=20)
    assert found.num_products == sum(calls) == products
    assert len(found.samples) == 20


def test_auto_uses_the_structure_and_no_products():
    found = trace(DiagonalOperator(torch.tensor([1.0, 2.0, -4.0])))
    assert (float(found), float(found.stderr), found.num_products) == (-1.0, 0.0, 0)
    assert found.samples is None
    assert found.method == "exact, by structure"


def test_auto_uses_xtrace_if_no_exact_trace_is_known():
    assert trace(hidden(decaying(90))).method == "XTrace"


@pytest.mark.parametrize("n", [1, 2, 10, 32])
def test_as_many_probes_as_rows_give_the_exact_trace(n):
    calls = []
    found = trace(hidden(decaying(n), calls), num_probes=32)
    assert float(found) == pytest.approx(float(decaying(n).trace()), rel=1e-14)
    assert found.num_products == sum(calls) == n
    assert found.stderr == 0


def check_honest(estimate, truth, count=200):
    found = [estimate(seeded(1000 + seed)) for seed in range(count)]
    errors = torch.stack([f.mean - truth for f in found])
    assert torch.stack([f.error() for f in found]).ge(errors.abs()).double().mean() >= 0.93
    assert 0.8 < float((errors / torch.stack([f.stderr for f in found])).std()) < 1.25
    assert abs(errors.mean()) < 4 * errors.std() / count**0.5


@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
@pytest.mark.parametrize("method", METHODS)
def test_the_standard_error_of_a_trace_is_honest(method, probe):
    matrix = decaying(50)
    op, truth = hidden(matrix), matrix.trace()

    def estimate(generator):
        return trace(op, method=method, num_probes=16, probe=probe, generator=generator)

    check_honest(estimate, truth)


@pytest.mark.parametrize("power", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("n", "num_probes"), [(300, 16), (100, 32)])
def test_the_standard_error_of_xtrace_is_never_far_too_small(n, num_probes, power):
    eigenvalues = torch.linspace(1, 2, n, dtype=torch.float64) ** (power == 0)
    eigenvalues = eigenvalues * torch.arange(1, n + 1, dtype=torch.float64) ** -power
    op = FunctionOperator(lambda block: eigenvalues[:, None] * block, n=n, dtype=torch.float64)
    found = [trace(op, num_probes=num_probes, generator=seeded(seed)) for seed in range(100)]
    errors = torch.stack([f.mean for f in found]) - eigenvalues.sum()
    reported = torch.stack([f.stderr for f in found])
    assert 0.6 < float(errors.square().mean().sqrt() / reported.square().mean().sqrt()) < 1.25


@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
def test_the_standard_error_of_the_frobenius_norm_is_honest(probe):
    op, truth = hidden(decaying(50)), decaying(50).norm()

    def estimate(generator):
        return frobenius_norm(op, num_probes=40, probe=probe, generator=generator)

    check_honest(estimate, truth)


@pytest.mark.parametrize(("probe", "fourth_moment"), [("rademacher", 1.0), ("gaussian", 3.0)])
def test_the_variance_is_that_of_the_formula(probe, fourth_moment):
    matrix = decaying(30) + torch.diag(torch.linspace(0, 1, 30, dtype=torch.float64))
    # Thirty probes would be a whole basis, which has no variance.
    runs = [
        trace(
            hidden(matrix), method="hutchinson", num_probes=29, probe=probe, generator=seeded(seed)
        )
        for seed in range(700)
    ]
    exact = 2 * matrix.square().sum() + (fourth_moment - 3) * matrix.diagonal().square().sum()
    squares = (torch.cat([run.samples for run in runs]) - matrix.trace()).square()
    assert abs(squares.mean() - exact) < 4 * squares.std() / len(squares) ** 0.5


def test_a_rademacher_trace_of_a_diagonal_matrix_has_no_variance():
    matrix = torch.diag(torch.arange(1.0, 9.0))
    found = trace(hidden(matrix), method="hutchinson", num_probes=3)
    assert found.samples.tolist() == [36.0] * 3


def naive_xtrace(matrix, omega):
    n, count = omega.shape
    samples = []
    for i in range(count):
        others = torch.cat([omega[:, :i], omega[:, i + 1 :]], 1)
        basis = torch.linalg.qr(matrix @ others).Q
        rest = omega[:, i] - basis @ (basis.T @ omega[:, i])
        scale = (n - count + 1) / rest.square().sum()
        samples.append((basis.T @ matrix @ basis).trace() + scale * rest @ matrix @ rest)
    return torch.stack(samples)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_xtrace_is_its_definition_with_every_probe_left_out(count):
    matrix = decaying(30)
    found = trace(hidden(matrix), method="xtrace", num_probes=count, generator=seeded(3))
    omega = probes(
        (30, count),
        kind="gaussian",
        generator=seeded(3),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    torch.testing.assert_close(found.samples, naive_xtrace(matrix, omega), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
def test_a_low_rank_has_an_exact_trace_at_any_scale(method, rank, dtype, scale):
    eigenvalues = torch.zeros(50, dtype=torch.float64)
    eigenvalues[:rank] = torch.linspace(1, 2, max(rank, 1))[:rank] * scale
    matrix = with_spectrum(eigenvalues, generator=seeded(1)).matrix.to(dtype)
    found = trace(hidden(matrix), method=method, num_probes=12)
    tolerance = 100 * torch.finfo(dtype).eps * scale
    assert float(found) == pytest.approx(float(matrix.double().trace()), abs=tolerance)
    assert float(found.stderr) <= tolerance


@pytest.mark.parametrize("method", METHODS)
def test_the_tolerance_is_reached(method):
    matrix = decaying(200)
    found = trace(hidden(matrix), method=method, num_probes=8, rtol=0.2, max_probes=4000)
    assert found.status.outcome == "converged"
    assert found.error() <= 0.2 * found.mean
    assert_within_stderr(found, float(matrix.trace()))
    assert 8 <= len(found.samples) < 200


@pytest.mark.parametrize("method", METHODS)
def test_a_tolerance_that_needs_more_probes_than_rows_is_reached_without_sampling(method):
    matrix = decaying(50)
    found = trace(hidden(matrix), method=method, num_probes=8, rtol=1e-9, max_probes=4000)
    assert float(found) == pytest.approx(float(matrix.trace()), rel=1e-12)
    assert float(found.stderr) == 0
    assert 0 < float(found.truncation) < 1e-12 * float(found)
    assert found.status.ok


def test_xtrace_counts_every_product_on_its_way_to_the_accuracy():
    calls = []
    found = trace(hidden(decaying(200), calls), method="xtrace", num_probes=4, rtol=1e-3)
    assert found.num_products == sum(calls)


@pytest.mark.parametrize("method", METHODS)
def test_too_few_probes_are_reported_and_raise_if_failed_raises(method):
    found = trace(hidden(decaying(200)), method=method, num_probes=4, rtol=1e-6, max_probes=8)
    assert found.status.outcome == "max_steps"
    assert "times as many probes" in found.status.advice
    with pytest.raises(RuntimeError, match=r"relative error .*, above rtol 1e-06"):
        found.raise_if_failed()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_frobenius_norm_is_within_four_standard_errors(dtype):
    matrix = decaying(dtype=dtype)
    found = frobenius_norm(hidden(matrix), num_probes=50)
    assert_within_stderr(found, float(matrix.double().norm()))
    assert found.num_products == 50


def test_the_frobenius_norm_reaches_its_tolerance():
    found = frobenius_norm(hidden(decaying(100)), num_probes=8, rtol=0.3, max_probes=5000)
    assert found.status.outcome == "converged"
    assert float(found.stderr) > 0
    assert 0.05 < float(found.error() / found.mean) <= 0.3
    exact = frobenius_norm(hidden(decaying(100)), num_probes=8, rtol=1e-9, max_probes=5000)
    assert (exact.status.outcome, float(exact.stderr)) == ("converged", 0.0)
    assert float(exact) == pytest.approx(float(decaying(100).norm()), rel=1e-12)
    failed = frobenius_norm(hidden(decaying(100)), num_probes=4, rtol=1e-4, max_probes=9)
    assert failed.status.outcome == "max_steps"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_product_that_is_not_finite_names_its_probe(method, value):
    def broken(block):
        product = block.clone()
        product[3, -1] = value
        return product

    op = FunctionOperator(broken, n=50)
    with pytest.raises(
        ValueError, match=r"op must give finite products; the product with probe 8 "
    ):
        trace(op, method=method, num_probes=8)
    with pytest.raises(ValueError, match="finite products"):
        frobenius_norm(op, num_probes=8)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"num_probes": 1}, "num_probes must be at least 2"),
        ({"method": "magic"}, "method must be one of auto, exact"),
        ({"method": "exact"}, "method='exact': no exact trace is available"),
        ({"rtol": -1.0}, "rtol must be between"),
        ({"rtol": 0.1, "max_probes": 3}, "max_probes must be at least 4"),
        ({"method": "hutchinson", "probe": "cauchy"}, "probe must be"),
    ],
)
def test_misuse_names_the_argument(bad, match):
    with pytest.raises(ValueError, match=match):
        trace(hidden(decaying(10)), **({"num_probes": 4} | bad))


@pytest.mark.parametrize("function", [trace, diagonal])
@pytest.mark.parametrize("bad", [{"num_probes": 1}, {"rtol": -1.0}, {"probe": "cauchy"}], ids=str)
def test_arguments_are_checked_even_if_the_structure_gives_the_result(function, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        function(DiagonalOperator(torch.ones(3)), **bad)
