import math

import pytest
import torch

from ritz import NotConvergedError, logdet
from ritz._core.results import Status
from ritz.operators import DenseOperator, KernelOperator, _kernel
from ritz.spectra import NotPositiveDefiniteError, backward_gradient, logdet_gradient
from ritz.spectra._logdet_gradient import attach_gradient

PRECISIONS = [torch.float32, torch.float64]


def operator(n=300, dtype=torch.float64, noise=1e-2, lengthscale=0.6, **options):
    rng = torch.Generator().manual_seed(5)
    points = torch.randn(n, 3, generator=rng, dtype=dtype)
    given = {
        "lengthscale": lengthscale * torch.tensor([0.5, 1.0, 2.0], dtype=dtype),
        "outputscale": torch.tensor(1.5, dtype=dtype),
        "noise": torch.tensor(noise, dtype=dtype),
    }
    given = {name: value.requires_grad_() for name, value in given.items()}
    return KernelOperator(points, **given, **options)


def exact(op):
    """The gradient of torch's own log determinant of the matrix, in float64."""
    value = torch.logdet(op.double().matrix())
    found = torch.autograd.grad(value, tuple(op.parameters.values()))
    return dict(zip(op.parameters, found, strict=True))


def assert_within(found, truth, sigmas=4.0):
    for name, estimate in found.items():
        bars = torch.hypot(estimate.stderr, estimate.truncation)
        gap = (estimate.mean - truth[name].double()).abs()
        assert bool((gap <= sigmas * bars).all()), (name, gap / bars)


@pytest.mark.parametrize("name", _kernel.KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_the_truth_lies_within_four_standard_errors(name, seed):
    op = operator(kernel=name)
    found = logdet_gradient(
        op, method="lanczos", rank=50, generator=torch.Generator().manual_seed(seed)
    )
    assert_within(found, exact(op))


@pytest.mark.parametrize("noise", [1e-1, 1e-4, 1e-7])
@pytest.mark.parametrize("lengthscale", [0.1, 0.6, 3.0])
def test_the_truth_lies_within_the_bars_for_any_condition_number(noise, lengthscale):
    op = operator(noise=noise, lengthscale=lengthscale)
    found = logdet_gradient(op, method="lanczos")
    assert_within(found, exact(op))
    assert all(estimate.status.ok for estimate in found.values())
    # The means are far larger than the bars, or the test above would say little.
    assert float(found["outputscale"].stderr) < 0.1 * float(found["outputscale"].mean)


def test_single_precision_is_enough_where_the_noise_is_not_small():
    op = operator(dtype=torch.float32, noise=0.1)
    assert_within(logdet_gradient(op, method="lanczos"), exact(op))


def test_the_samples_have_less_spread_than_those_of_solutions():
    op = operator(noise=1e-6, lengthscale=1.5)
    found = logdet_gradient(op, method="lanczos", num_probes=50)["lengthscale"]
    signs = torch.randint(0, 2, (300, 50), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    signs = signs.double()
    solution = torch.linalg.solve(op.dense(), signs)
    # u'Kv is the form of u + v minus that of u - v, over 4.
    plus, minus = (op.slopes(solution + sign * signs)["lengthscale"] for sign in (1, -1))
    usual = (plus - minus) / 4
    assert bool((found.samples.std(0) < usual.std(0) / 5).all())


def test_every_probe_gives_the_derivative_by_a_common_factor_exactly():
    # A factor c of the whole matrix has the derivative n / c: the form of u is |z|^2.
    op = operator(n=120)
    found = logdet_gradient(op, method="lanczos", rtol=1e-10)
    total = op.outputscale * found["outputscale"].samples + op.noise * found["noise"].samples
    torch.testing.assert_close(total, torch.full_like(total, 120.0))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_small_matrix_is_factored(dtype):
    op = operator(dtype=dtype, noise=0.1)
    truth = exact(op)
    for name, estimate in logdet_gradient(op).items():
        torch.testing.assert_close(estimate.mean, truth[name].double())
        assert not estimate.stderr.any()
        assert "exact" in estimate.method


def test_the_error_of_a_factor_is_within_its_bar_beside_the_closed_form():
    # K = [[s + v, s k], [s k, s + v]] has the eigenvalues s (1 -+ k) + v.
    distance, noise = 1e-4, torch.tensor(1e-10, dtype=torch.float64, requires_grad=True)
    points = torch.tensor([[0.0], [distance]], dtype=torch.float64)
    small = -math.expm1(-0.5 * distance**2) + 1e-10
    truth = 1 / small + 1 / (2 - small + 2e-10)

    found = logdet_gradient(KernelOperator(points, noise=noise))["noise"]

    gap = abs(float(found) - truth)
    assert 0 < gap < float(found.error())
    assert float(found.error()) < 1e-4 * truth


@pytest.mark.parametrize("lengthscale", [0.3, 3.0])
def test_the_error_of_a_factor_is_within_its_bar_in_single_precision(lengthscale):
    op = operator(dtype=torch.float32, noise=1e-6, lengthscale=lengthscale)
    truth = exact(op)

    found = logdet_gradient(op, method="cholesky")

    for name, estimate in found.items():
        gap = (estimate.mean - truth[name].double()).abs()
        assert bool((gap < estimate.error() + 1e-7 * truth[name].abs()).all())
        assert 0 < float(estimate.error().max()) < 1e-3 * float(truth[name].abs().max())


def test_a_matrix_that_may_be_singular_has_a_gradient_of_unknown_error():
    points = torch.tensor([[0.0], [1e-9]], dtype=torch.float64)
    noise = torch.tensor(2.0**-52, dtype=torch.float64, requires_grad=True)

    found = logdet_gradient(KernelOperator(points, noise=noise))["noise"]

    assert found.status.outcome == "uncertain"
    assert math.isinf(float(found.truncation))


def test_the_preconditioner_saves_products():
    op = operator(noise=1e-4, lengthscale=2.0)
    many, few = (
        logdet_gradient(op, method="lanczos", rank=rank)["noise"].num_products for rank in (1, 100)
    )
    assert few < many / 3


def test_backward_multiplies_the_gradient_by_the_upstream_gradient():
    op = operator()
    log_noise = torch.tensor(math.log(0.02), dtype=torch.float64, requires_grad=True)
    op = KernelOperator(op.points, lengthscale=op.lengthscale, noise=log_noise.exp())
    found = attach_gradient(logdet(op), op, method="lanczos")
    (3 * found.mean).backward()
    gradient = backward_gradient(found)["noise"]
    torch.testing.assert_close(log_noise.grad, 3 * op.noise * gradient.mean)
    assert float(gradient.stderr) > 0
    assert found.mean.item() == pytest.approx(logdet(op).mean.item())


def test_two_passes_and_two_generators_alike_give_the_same_gradient():
    op, seeds = operator(), [torch.Generator().manual_seed(4) for _ in range(2)]
    found = []
    for generator in seeds:
        mean = attach_gradient(logdet(op), op, method="lanczos", generator=generator).mean
        for _ in range(2):
            found.append(torch.autograd.grad(mean, op.parameters["noise"], retain_graph=True)[0])
    assert len({float(gradient) for gradient in found}) == 1


def test_an_estimate_without_parameters_is_returned_unchanged():
    op = operator()
    estimate = logdet(op)
    plain = KernelOperator(op.points, noise=0.1)
    assert attach_gradient(estimate, plain) is estimate
    assert attach_gradient(estimate, DenseOperator(torch.eye(3))) is estimate
    with torch.no_grad():
        assert attach_gradient(estimate, op) is estimate


def test_a_gradient_that_did_not_converge_raises_in_backward():
    op = operator(noise=1e-6)
    found = attach_gradient(logdet(op), op, method="lanczos", max_steps=3, rank=5)
    with pytest.raises(NotConvergedError, match=r"roots not found after 3 steps.*max_steps"):
        found.mean.backward()


def test_too_few_steps_are_reported():
    found = logdet_gradient(operator(noise=1e-6), method="lanczos", max_steps=3, rank=5)
    assert isinstance(found["noise"].status, Status)
    assert found["noise"].status.outcome == "max_steps"
    assert float(found["noise"].truncation) > 0.1 * float(found["noise"].mean)


@pytest.mark.parametrize("method", ["cholesky", "lanczos"])
def test_a_singular_matrix_is_refused(method):
    points = torch.zeros(20, 1, dtype=torch.float64)
    points[10:] = torch.linspace(1, 2, 10, dtype=torch.float64)[:, None]
    scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    op = KernelOperator(points, lengthscale=scale)
    with pytest.raises(NotPositiveDefiniteError, match="op must be positive definite"):
        logdet_gradient(op, method=method, rtol=1e-12)


def test_there_must_be_a_parameter_and_a_pass():
    op = operator()
    with pytest.raises(ValueError, match=r"no parameter of .* requires a gradient"):
        logdet_gradient(KernelOperator(op.points, noise=0.1))
    with pytest.raises(TypeError, match="op must be a KernelOperator, got DenseOperator"):
        logdet_gradient(DenseOperator(torch.eye(3)))
    found = attach_gradient(logdet(op), op)
    with pytest.raises(ValueError, match="value has no gradient"):
        backward_gradient(found)


@pytest.mark.parametrize(
    "bad",
    [{"method": "krylov"}, {"num_probes": 1}, {"rtol": 2.0}, {"max_steps": 0}, {"rank": 0}],
    ids=lambda bad: next(iter(bad)),
)
def test_misuse_names_the_argument(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        logdet_gradient(operator(n=20), **bad)
