import math
from dataclasses import replace

import pytest
import torch
from matrices import seeded
from torch.distributions import MultivariateNormal

from ritz import NotConvergedError
from ritz._core.results import Status
from ritz.operators import DenseOperator, KernelOperator
from ritz.spectra import backward_gradient, log_likelihood
from ritz.spectra._likelihood import form_gradient, inverse_form


def problem(n=300, dtype=torch.float64, noise=0.05):
    rng = seeded(8)
    points = torch.randn(n, 2, generator=rng, dtype=dtype)
    y = torch.sin(2 * points).sum(1) + 0.2 * torch.randn(n, generator=rng, dtype=dtype)
    given = {
        "lengthscale": torch.tensor([0.8, 1.2], dtype=dtype, requires_grad=True),
        "outputscale": torch.tensor(1.3, dtype=dtype, requires_grad=True),
        "noise": torch.tensor(noise, dtype=dtype, requires_grad=True),
    }
    return KernelOperator(points, **given), y


def exact(op, y):
    covariance = op.double().matrix()
    return MultivariateNormal(torch.zeros_like(covariance[0]), covariance).log_prob(y.double())


@pytest.mark.parametrize("noise", [0.05, 1e-4])
def test_the_form_is_that_of_dense_and_its_error_is_bounded(noise):
    op, y = problem(noise=noise)
    found, _ = inverse_form(op, y, rank=10)
    truth = float(y @ torch.linalg.solve(op.dense(), y))
    gap = truth - float(found.mean)
    assert gap >= -1e-9 * truth  # what is left out is positive
    assert gap <= float(found.truncation) + 1e-9 * truth
    assert float(found.truncation) < 1e-2 * truth
    assert gap < 1e-3 * truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_the_form_is_that_of_dense(dtype):
    op, y = problem(dtype=dtype)
    y.requires_grad_()
    wanted = op.parameters | {"y": y}
    form = y @ torch.linalg.solve(op.matrix(), y)
    truth = torch.autograd.grad(form, tuple(wanted.values()))
    found, x = inverse_form(op, y, rtol=1e-4 if dtype == torch.float32 else 1e-7)
    gradient = form_gradient(op, y, x, wanted, found)
    for name, theirs in zip(wanted, truth, strict=True):
        # The residual is small relative to the norm, not to each entry.
        size = float(theirs.abs().max())
        ours = gradient[name].mean.to(dtype)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * size)


def test_an_unsolved_form_has_no_gradient():
    op, y = problem(n=20)
    found, x = inverse_form(op, y)
    failed = replace(found, status=Status(outcome="max_steps", message="not solved"))
    with pytest.raises(NotConvergedError, match="not solved"):
        form_gradient(op, y, x, op.parameters, failed)


def test_any_matrix_has_a_form():
    y = torch.arange(1.0, 5.0)
    found, _ = inverse_form(DenseOperator(2 * torch.eye(4)), y)
    assert float(found) == 15.0
    assert 0 <= float(found.truncation) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_likelihood_of_a_small_matrix_is_exact(dtype):
    op, y = problem(dtype=dtype)
    y.requires_grad_()
    wanted = (*op.parameters.values(), y)
    found, truth = log_likelihood(op, y), exact(op, y)
    torch.testing.assert_close(found.mean, truth)
    gradients = torch.autograd.grad(found.mean, wanted)
    for ours, theirs in zip(gradients, torch.autograd.grad(truth, wanted), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not float(found.stderr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_a_factor_is_within_its_bars_beside_the_closed_form(dtype):
    # K = [[1 + v, k], [k, 1 + v]]: for y = (1, -1) the form is 2 / (1 - k + v).
    noise = torch.tensor(2.0**-20, dtype=dtype, requires_grad=True)
    points = torch.tensor([[0.0], [2.0**-9]], dtype=dtype)
    y = torch.tensor([1.0, -1.0], dtype=dtype, requires_grad=True)
    small = -math.expm1(-(2.0**-19)) + 2.0**-20
    truth = 1 / small**2 - 0.5 / small - 0.5 / (2 - small + 2.0**-19)

    value = log_likelihood(KernelOperator(points, noise=noise), y)
    value.mean.backward()
    found = backward_gradient(value)

    assert 0 < abs(float(found["noise"]) - truth) < float(found["noise"].error()) < 1e-6 * truth
    gap = (found["y"].mean + y.detach().double() / small).abs()
    assert bool((gap < found["y"].error()).all())
    assert float(found["y"].error().max()) < 1e-6 / small


def test_the_tolerance_of_the_log_determinant_is_not_claimed_for_the_likelihood():
    # The quadratic form and the log determinant nearly cancel.
    op = DenseOperator(torch.diag(torch.linspace(0.01, 0.02, 50, dtype=torch.float64)))
    y = torch.full((50,), 0.1, dtype=torch.float64)

    found = log_likelihood(op, y, method="auto")

    assert found.status.outcome == "completed"


def test_a_likelihood_of_a_matrix_that_may_be_singular_is_uncertain():
    points = torch.tensor([[0.0], [1e-9]], dtype=torch.float64)
    y = torch.ones(2, dtype=torch.float64)

    found = log_likelihood(KernelOperator(points, noise=2.0**-52), y)

    assert found.status.outcome == "uncertain"


@pytest.mark.parametrize("method", ["krylov", "lanczos"])
def test_a_sampled_likelihood_and_its_gradient_lie_within_four_error_bars(method):
    op, y = problem()
    found = log_likelihood(op, y, method=method, num_products=160, num_probes=8, rank=30)
    truth = exact(op, y)
    bars = 4 * math.hypot(float(found.stderr), float(found.truncation))
    assert 0 < bars < 0.03 * len(y)  # a small share of each of the two terms
    assert abs(float((found.mean - truth).detach())) < bars
    found.mean.backward()
    slopes = torch.autograd.grad(truth, tuple(op.parameters.values()))
    for (name, estimate), slope in zip(backward_gradient(found).items(), slopes, strict=True):
        assert bool(((estimate.mean - slope).abs() < 4 * estimate.stderr).all()), name
        torch.testing.assert_close(op.parameters[name].grad, estimate.mean)
        torch.testing.assert_close(estimate.samples.mean(0), estimate.mean)


def test_the_likelihood_is_differentiable_in_the_observations():
    op, y = problem()
    op = KernelOperator(op.points, noise=0.1)
    y.requires_grad_()
    gradients = [
        torch.autograd.grad(log_likelihood(op, y, method=method).mean, y)[0]
        for method in ("cholesky", "krylov")
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-2)


def test_without_parameters_there_is_no_graph():
    op, y = problem()
    plain = KernelOperator(op.points, noise=0.1)
    assert not log_likelihood(plain, y).mean.requires_grad
    assert not log_likelihood(plain, y, method="krylov").mean.requires_grad
    with torch.no_grad():
        assert not log_likelihood(op, y).mean.requires_grad


def test_a_likelihood_is_maximised():
    op, y = problem()
    start = [value.detach().log() for value in op.parameters.values()]
    logs = [value.clone().requires_grad_() for value in start]
    optimizer = torch.optim.Adam(logs, lr=0.1)
    values = []
    for _ in range(25):
        optimizer.zero_grad()
        given = dict(zip(op.parameters, (value.exp() for value in logs), strict=True))
        moved = KernelOperator(op.points, **given)
        loss = -log_likelihood(moved, y, method="krylov", num_products=100, rank=30).mean
        loss.backward()
        values.append(float(exact(moved, y).detach()))
        optimizer.step()
    # The function drawn has noise 0.04 and length scales of about 0.8: both scales must be found.
    assert values[-1] > values[0] + 5
    assert values[-1] >= max(values) - 1


Y = torch.ones(5, dtype=torch.float64)
OP = DenseOperator(torch.eye(5, dtype=torch.float64))
WRONG = {
    "rows": ({"y": Y[:4]}, ValueError, r"y must be \(5,\)"),
    "block": ({"y": Y[:, None]}, ValueError, r"y must be \(5,\)"),
    "dtype": ({"y": Y.float()}, TypeError, "y must be torch.float64"),
    "NaN": ({"y": Y * math.nan}, ValueError, "y must be finite"),
    "method": ({"method": "maxent"}, ValueError, "method must be one of"),
}


def test_points_and_observations_may_be_arrays():
    points = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]
    y = torch.sin(9 * points[:, 0])
    found = log_likelihood(KernelOperator(points.numpy(), noise=0.1), y.numpy())
    assert float(found) == float(log_likelihood(KernelOperator(points, noise=0.1), y))


@pytest.mark.parametrize(("bad", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_misuse_names_the_argument(bad, kind, match):
    with pytest.raises(kind, match=match):
        log_likelihood(OP, **({"y": Y} | bad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_the_form_is_within_its_truncation(dtype):
    op, y = problem(n=120, dtype=dtype, noise=1e-2)
    y.requires_grad_()
    wanted = op.parameters | {"y": y}
    form = y.double() @ torch.linalg.solve(op.matrix().double(), y.double())
    truth = torch.autograd.grad(form, tuple(wanted.values()))
    found, x = inverse_form(op, y, rtol=0.01, rank=5)

    gradient = form_gradient(op, y, x, wanted, found, rank=5)

    for name, exact in zip(wanted, truth, strict=True):
        gap = (gradient[name].mean - exact).abs()
        assert bool((gap <= gradient[name].truncation).all())
        assert float(gradient[name].truncation.max()) < 0.1 * float(exact.abs().max())
