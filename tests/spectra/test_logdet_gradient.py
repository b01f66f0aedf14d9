import math

import pytest
import torch
from matrices import PRECISIONS, seeded

from ritz import NotConvergedError, logdet
from ritz._core.results import Status
from ritz.operators import DenseOperator, KernelOperator, _kernel
from ritz.spectra import NotPositiveDefiniteError, backward_gradient, logdet_gradient
from ritz.spectra._lanczos import TUNING
from ritz.spectra._logdet_gradient import differentiable, inverse_roots
from ritz.testing import with_spectrum


def operator(n=300, dtype=torch.float64, noise=1e-2, lengthscale=0.6, **options):
    rng = seeded(5)
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
    found = logdet_gradient(op, method="lanczos", rank=50, generator=seeded(seed))
    assert_within(found, exact(op))


@pytest.mark.parametrize("noise", [1e-1, 1e-4, 1e-7])
@pytest.mark.parametrize("lengthscale", [0.1, 0.6, 3.0])
def test_the_truth_lies_within_the_bars_for_any_condition_number(noise, lengthscale):
    op = operator(noise=noise, lengthscale=lengthscale)
    found = logdet_gradient(op, method="lanczos")
    assert_within(found, exact(op))
    assert all(estimate.status.ok for estimate in found.values())
    # The error bars are small, so the test above is not trivial.
    assert float(found["outputscale"].stderr) < 0.1 * float(found["outputscale"].mean)


def test_single_precision_is_enough_where_the_noise_is_not_small():
    op = operator(dtype=torch.float32, noise=0.1)
    assert_within(logdet_gradient(op, method="lanczos"), exact(op))


def test_the_samples_have_less_spread_than_those_of_solutions():
    op = operator(noise=1e-6, lengthscale=1.5)
    found = logdet_gradient(op, method="lanczos", num_probes=50)["lengthscale"]
    signs = torch.randint(0, 2, (300, 50), generator=seeded(1)) * 2.0 - 1
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


@pytest.fixture
def sampled(monkeypatch):
    """Estimate gradients from probes, also of matrices that are small enough to be factored."""
    monkeypatch.setattr("ritz.spectra._logdet_gradient.fits", lambda op: False)


def test_backward_multiplies_the_gradient_by_the_upstream_gradient(sampled):
    op = operator()
    log_noise = torch.tensor(math.log(0.02), dtype=torch.float64, requires_grad=True)
    op = KernelOperator(op.points, lengthscale=op.lengthscale, noise=log_noise.exp())
    found = logdet(op)
    (3 * found.mean).backward()
    gradient = backward_gradient(found)["noise"]
    torch.testing.assert_close(log_noise.grad, 3 * op.noise * gradient.mean)
    assert float(gradient.stderr) > 0
    assert found.mean.item() == pytest.approx(logdet(op).mean.item())


def test_two_passes_and_two_generators_alike_give_the_same_gradient(sampled):
    op, found = operator(), []
    for _ in range(2):
        mean = logdet(op, generator=seeded(4)).mean
        for _ in range(2):
            found.append(torch.autograd.grad(mean, op.parameters["noise"], retain_graph=True)[0])
    assert len({float(gradient) for gradient in found}) == 1


def test_without_parameters_there_is_no_graph():
    op = operator()
    assert not logdet(KernelOperator(op.points, noise=0.1)).mean.requires_grad
    with torch.no_grad():
        assert not logdet(op).mean.requires_grad


def test_a_gradient_that_did_not_converge_raises_in_backward():
    op = operator(noise=1e-6)
    found = differentiable(
        logdet(op),
        op.parameters,
        lambda: logdet_gradient(op, method="lanczos", max_steps=3, rank=5),
    )
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


def test_a_missing_parameter_or_gradient_is_named():
    op = operator()
    with pytest.raises(ValueError, match=r"no parameter of .* requires a gradient"):
        logdet_gradient(KernelOperator(op.points, noise=0.1))
    with pytest.raises(TypeError, match="op must be a KernelOperator, got DenseOperator"):
        logdet_gradient(DenseOperator(torch.eye(3)))
    with pytest.raises(ValueError, match="value has no gradient"):
        backward_gradient(logdet(op))


@pytest.mark.parametrize(
    "bad",
    [{"method": "krylov"}, {"num_probes": 1}, {"rtol": 2.0}, {"max_steps": 0}, {"rank": 0}],
    ids=lambda bad: next(iter(bad)),
)
def test_misuse_names_the_argument(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        logdet_gradient(operator(n=20), **bad)


# ------------------------------------------------------------------------------------------
# Vectors whose covariance is the inverse of a matrix.


def system(n=150, smallest=1e-3, dtype=torch.float64):
    eigenvalues = torch.linspace(smallest, 2.0, n)
    op = with_spectrum(eigenvalues.to(dtype), generator=seeded(0))
    block = torch.randn(n, 3, generator=seeded(1), dtype=dtype)
    return op, block


def inverse_root(op, block):
    values, vectors = torch.linalg.eigh(op.matrix.double())
    return vectors @ (values**-0.5 * vectors).T @ block.double()


@pytest.mark.parametrize("rtol", [0.3, 1e-2, 1e-6])
def test_the_residual_bounds_the_error(rtol):
    op, block = system()
    found = inverse_roots(op, block, rtol=rtol, max_steps=150)
    gap = found.vectors - inverse_root(op, block)
    error = (gap * (op.matrix @ gap)).sum(0).sqrt() / block.norm(dim=0)
    assert bool((error <= found.residuals).all())
    assert bool((error > found.residuals / 1000).all())  # the bound is not trivial
    assert bool((found.residuals <= rtol).all())
    assert found.status.outcome == "converged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_preconditioned_root_has_the_same_form(dtype):
    op, block = system(dtype=dtype)
    generator = seeded(2)
    scales = with_spectrum(torch.linspace(0.5, 3.0, 150).to(dtype), generator=generator).matrix
    found = inverse_roots(op, block, rtol=1e-5, max_steps=150, root=lambda x: scales @ x)
    # u u' has the mean A^{-1} since U = R (R A R)^{-1/2} has U U' = A^{-1}: u'Au is |z|^2.
    forms = (found.vectors * (op.matrix @ found.vectors)).sum(0)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-8
    torch.testing.assert_close(forms, block.square().sum(0), rtol=tolerance, atol=0)
    inner = scales @ op.matrix @ scales
    values, vectors = torch.linalg.eigh(inner.double())
    expected = scales.double() @ vectors @ (values**-0.5 * vectors).T @ block.double()
    gap = float((found.vectors - expected).norm() / expected.norm())
    assert gap < (1e-2 if dtype == torch.float32 else 1e-3)


def test_a_basis_grows_beyond_its_capacity():
    op, block = system(n=300, smallest=1e-4)
    found = inverse_roots(op, block, rtol=1e-9, max_steps=300)
    assert found.num_products > 3 * (TUNING.growth + 1)
    torch.testing.assert_close(found.vectors, inverse_root(op, block), rtol=1e-6, atol=1e-6)


def test_an_invariant_space_ends_the_run():
    op = with_spectrum(torch.ones(20).double(), generator=seeded(0))
    block = torch.ones(20, 1, dtype=torch.float64)
    found = inverse_roots(op, block, rtol=1e-12, max_steps=20)
    assert found.num_products == 1
    torch.testing.assert_close(found.vectors, block)


def test_roots_that_were_not_found_are_reported():
    op, block = system()
    found = inverse_roots(op, block, rtol=1e-6, max_steps=4)
    assert found.status.outcome == "max_steps"
    assert "3 of 3 roots not found after 4 steps" in found.status.message


def test_an_indefinite_matrix_is_refused_with_its_ritz_value():
    op, block = system(smallest=-1.0)
    with pytest.raises(NotPositiveDefiniteError, match="got a Ritz value of -"):
        inverse_roots(op, block, rtol=1e-6, max_steps=150)
