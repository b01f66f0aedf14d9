"""Marginal likelihoods and their gradients against gpytorch."""

import gpytorch
import pytest
import torch

from ritz.operators import KernelOperator
from ritz.spectra import backward_gradient, log_likelihood

SCALES = torch.tensor([0.6, 1.1, 2.0], dtype=torch.float64)
OUTPUTSCALE, NOISE = torch.tensor([1.4, 0.05], dtype=torch.float64)
THEIRS = {
    "squared_exponential": gpytorch.kernels.RBFKernel,
    "matern12": lambda **options: gpytorch.kernels.MaternKernel(nu=0.5, **options),
    "matern32": lambda **options: gpytorch.kernels.MaternKernel(nu=1.5, **options),
    "matern52": lambda **options: gpytorch.kernels.MaternKernel(nu=2.5, **options),
}


def data(n=400):
    rng = torch.Generator().manual_seed(2)
    points = torch.randn(n, 3, generator=rng, dtype=torch.float64)
    return points, torch.cos(points).sum(1) + 0.2 * torch.randn(n, generator=rng).double()


class Model(gpytorch.models.ExactGP):
    def __init__(self, points, y, name, likelihood):
        super().__init__(points, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(THEIRS[name](ard_num_dims=3))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def of_gpytorch(name):
    """Return the log likelihood and its gradient with respect to scales and noise."""
    points, y = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Model(points, y, name, likelihood).double().train()
    # Set as tensors after the change to float64; otherwise gpytorch rounds them to float32.
    likelihood.noise, model.covar_module.outputscale = NOISE, OUTPUTSCALE
    model.covar_module.base_kernel.lengthscale = SCALES
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    # The default of gpytorch, set explicitly: Cholesky up to 800 points.
    with gpytorch.settings.max_cholesky_size(1000):
        value = len(y) * objective(model(points), y)
        value.backward()
    owners = {
        "lengthscale": (model.covar_module.base_kernel, "raw_lengthscale"),
        "outputscale": (model.covar_module, "raw_outputscale"),
        "noise": (likelihood.noise_covar, "raw_noise"),
    }
    return float(value.detach()), {key: slope(*owner) for key, owner in owners.items()}


def slope(module, name):
    """Return the gradient by the parameter, not by the raw parameter before the constraint."""
    raw = getattr(module, name)
    transformed = getattr(module, f"{name}_constraint").transform(raw)
    return raw.grad / torch.autograd.grad(transformed.sum(), raw)[0]


def of_ritz(name, **options):
    points, y = data()
    given = {
        "lengthscale": SCALES.clone().requires_grad_(),
        "outputscale": OUTPUTSCALE.clone().requires_grad_(),
        "noise": NOISE.clone().requires_grad_(),
    }
    found = log_likelihood(KernelOperator(points, kernel=name, **given), y, **options)
    found.mean.backward()
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_exact_likelihood_and_gradient_equal_those_of_gpytorch(name):
    found, (value, gradient) = of_ritz(name), of_gpytorch(name)
    # gpytorch computes distances from squares: on the diagonal they are the root of roundoff.
    assert found.mean.item() == pytest.approx(value, rel=1e-8)
    for key, ours in backward_gradient(found).items():
        theirs = gradient[key].reshape(ours.mean.shape)
        torch.testing.assert_close(ours.mean, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", THEIRS)
def test_sampled_likelihood_and_gradient_lie_within_four_standard_errors_of_gpytorch(name):
    found, (value, gradient) = of_ritz(name, method="krylov", num_products=200), of_gpytorch(name)
    bars = torch.hypot(found.stderr, found.truncation).item()
    assert abs(found.mean.item() - value) < 4 * bars
    for key, ours in backward_gradient(found).items():
        gap = ours.mean - gradient[key].reshape(ours.mean.shape)
        assert bool((gap.abs() < 4 * torch.hypot(ours.stderr, ours.truncation)).all()), key
