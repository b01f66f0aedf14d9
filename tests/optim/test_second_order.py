"""Second-order optimisers on problems whose steps are known."""

import sys
from itertools import pairwise

import pytest
import torch
from optim.second_order_cases import network, samples, steps, weights
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz._core.results import AsymmetryError
from ritz.curvature import Risk, ggn, hessian
from ritz.operators import DenseOperator
from ritz.optim import HessianFree, LanczosNewton, SpectralSGD, spectral_rates
from ritz.optim._hessian_free import MartensStop
from ritz.optim._newton import ritz_pairs
from ritz.spectra import NotPositiveDefiniteError, lanczos

both = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


class Quadratic(nn.Module):
    r"""The loss :math:`w'Aw/2 - b'w`, which does not depend on the inputs."""

    def __init__(self, values, *, dtype=torch.float64, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        n = len(values)
        q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
        values = torch.as_tensor(values, dtype=torch.float64)
        self.register_buffer("matrix", (q * values @ q.T).to(dtype))
        b = torch.randn(n, generator=generator, dtype=torch.float64)
        self.register_buffer("b", b.to(dtype))
        self.w = nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64).to(dtype))

    def forward(self, x):
        # The mean over the batch of the same number.
        return (0.5 * self.w @ self.matrix @ self.w - self.b @ self.w).expand(len(x))


def mean_loss(outputs, target):
    return outputs.mean()


BATCH = (torch.zeros(4, 1), torch.zeros(4))


def advance(model, optimizer, count=1):
    for step in range(count):
        if optimizer.curvature_due(step):
            optimizer.update_curvature(Risk(model, mean_loss, [BATCH]))
        optimizer.zero_grad()
        model(BATCH[0]).mean().backward()
        optimizer.step()


def newton_step(model, delta, *, eta=1.0):
    """The step by dense linear algebra in float64, with the absolute values of the eigenvalues."""
    values, vectors = torch.linalg.eigh(model.matrix.double())
    gradient = model.matrix.double() @ model.w.detach().double() - model.b.double()
    return -vectors @ ((vectors.T @ gradient) / (eta * values.abs() + delta))


@pytest.mark.parametrize("kind", [LanczosNewton, HessianFree])
@pytest.mark.parametrize("delta", [0.0, -1.0, float("nan")])
def test_a_damping_that_a_schedule_has_made_invalid_is_named(kind, delta):
    model = Quadratic([1.0, 2.0, 3.0])
    optimizer = kind(model.parameters(), matrix="hessian")
    advance(model, optimizer)
    weights = model.w.detach().clone()
    optimizer.param_groups[0]["delta"] = delta

    with pytest.raises(ValueError, match="delta must be finite and above 0"):
        advance(model, optimizer)

    assert torch.equal(model.w, weights)


class Scaled(nn.Module):
    """A linear model whose scale and shift are parameters without an axis."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x):
        return self.scale * self.linear(x) + self.shift


def test_lanczos_newton_moves_parameters_without_an_axis():
    torch.manual_seed(0)
    model = Scaled().double()
    batch = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    optimizer = LanczosNewton(model.parameters(), lr=0.5, delta=0.3)

    for _ in range(2):  # the second refresh begins from the basis of the first
        risk = Risk(model, mse_loss, [batch])
        values, vectors = torch.linalg.eigh(hessian(risk) @ torch.eye(5, dtype=torch.float64))
        expected = risk.theta - 0.5 * vectors @ (
            (vectors.T @ risk.gradient()) / (values.abs() + 0.3)
        )
        optimizer.update_curvature(risk)
        optimizer.zero_grad()
        mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

        torch.testing.assert_close(Risk(model, mse_loss, [batch]).theta, expected)


SPECTRA = {
    "distinct": [0.1, 0.5, 1.0, 2.0, 5.0, 9.0],
    "repeated": [0.2, 0.2, 0.2, 3.0, 3.0, 7.0],
    "indefinite": [-3.0, -0.5, 0.0, 0.3, 2.0, 8.0],
}


@both
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("delta", [1.0, 1e-3])
@pytest.mark.parametrize("start", ["basis", "gradient"])
def test_full_lanczos_newton_is_the_damped_newton_step(dtype, kind, delta, start):
    model = Quadratic(SPECTRA[kind], dtype=dtype)
    before, expected = model.w.detach().double().clone(), newton_step(model, delta)
    optimizer = LanczosNewton(model.parameters(), 1.0, delta=delta, num_steps=6, start=start)
    if kind == "indefinite" and delta == 1e-3:
        expected = newton_step(model, delta)
    advance(model, optimizer)
    error = (model.w.detach().double() - before - expected).norm() / expected.norm()
    # Roundoff of the eigenvalue nearest zero is divided by the damping.
    assert error < 100 * torch.finfo(dtype).eps * max(1.0, 8 / delta)


@pytest.mark.parametrize("eta", [1.0, 3.0, 10.0])
def test_eta_divides_the_step_along_the_ritz_vectors(eta):
    model = Quadratic(SPECTRA["distinct"])
    before, expected = model.w.detach().clone(), newton_step(model, 0.5, eta=eta)
    advance(model, LanczosNewton(model.parameters(), 1.0, delta=0.5, eta=eta, num_steps=6))
    torch.testing.assert_close(model.w.detach() - before, expected)


def test_directions_that_were_not_found_take_a_gradient_step_over_the_damping():
    model, delta = Quadratic([0.0] * 30 + [5.0, 50.0]), 0.1
    before = model.w.detach().clone()
    expected = newton_step(model, delta)
    advance(model, LanczosNewton(model.parameters(), 1.0, delta=delta, num_steps=4))
    # Two outliers above a null space: four steps find both, and the rest has no curvature.
    torch.testing.assert_close(model.w.detach() - before, expected, rtol=1e-6, atol=1e-8)


def test_tiny_damping_does_not_cancel_in_float32():
    values, delta = [0.0] * 20 + [40.0, 90.0], 1e-6
    model = Quadratic(values, dtype=torch.float32)
    pairs = torch.linalg.eigh(model.matrix.double())
    sharp = pairs.eigenvectors[:, -2:]
    gradient = 100 * sharp.sum(1) + 1e-6 * pairs.eigenvectors[:, 0]
    expected = -sharp @ (sharp.T @ gradient / (pairs.eigenvalues[-2:] + delta))
    optimizer = LanczosNewton(model.parameters(), 1.0, delta=delta, num_steps=22)
    optimizer.update_curvature(Risk(model, mean_loss, [BATCH]))
    before = model.w.detach().double().clone()
    model.w.grad = gradient.float()

    optimizer.step()

    moved = sharp.T @ (model.w.detach().double() - before)
    # g/delta + (1/(lambda + delta) - 1/delta) u u'g would be wrong by eps |g|/delta = 12 here.
    assert (moved - sharp.T @ expected).abs().max() < 0.1
    assert (sharp.T @ expected).abs().max() > 1


@pytest.mark.parametrize("warm", ["basis", "random"])
def test_a_warm_start_finds_slowly_moving_directions_again(warm):
    generator = torch.Generator().manual_seed(0)
    model = Quadratic([0.01 * i for i in range(60)] + [3.0, 4.0, 5.0, 6.0])
    optimizer = LanczosNewton(model.parameters(), 0.0, delta=1.0, num_steps=6, start=warm)
    for step in range(4):
        noise = torch.randn(64, 64, generator=generator, dtype=torch.float64)
        model.matrix += 0.002 * (noise + noise.T)
        if step == 0:
            optimizer.param_groups[0]["num_steps"] = 30
        optimizer.update_curvature(Risk(model, mean_loss, [BATCH]))
        optimizer.param_groups[0]["num_steps"] = 6
    true = torch.linalg.eigh(model.matrix).eigenvectors[:, -4:]
    basis = optimizer.state[model.w]["basis"]
    found = (basis @ true).square().sum(0)
    # Six steps from anywhere do not separate four outliers; from their own span they do.
    assert (found > 0.99).all() if warm == "basis" else (found < 0.99).any()


@both
def test_hessian_free_is_the_solution_of_conjugate_gradients(dtype):
    model = Quadratic(SPECTRA["distinct"], dtype=dtype)
    before, expected = model.w.detach().double().clone(), newton_step(model, 0.7)
    optimizer = HessianFree(model.parameters(), delta=0.7, matrix="ggn")
    # The Gauss-Newton matrix of a loss that is its output is zero: use the squared error instead.
    design = torch.linalg.cholesky(model.matrix.double()).T.to(dtype)
    linear = nn.Linear(6, 1, bias=False).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(model.w[None])
    target = design.double() @ torch.linalg.solve(model.matrix.double(), model.b.double())
    batch = (design, target.to(dtype)[:, None])

    # The mean of six squares has 2/6 of the matrix and of the gradient.
    def loss_fn(outputs, target):
        return 3.0 * (outputs - target).square().mean()

    optimizer = HessianFree(linear.parameters(), delta=0.7)
    optimizer.update_curvature(Risk(linear, loss_fn, [batch]))
    loss_fn(linear(batch[0]), batch[1]).backward()
    optimizer.step()

    moved = linear.weight.detach().double()[0] - before
    assert (moved - expected).norm() / expected.norm() < 10 * torch.finfo(dtype).eps ** 0.5
    # The loss is quadratic: the model promises what comes, and the damping falls.
    assert optimizer.param_groups[0]["ratio"] == pytest.approx(1.0, rel=1e-3)
    assert optimizer.param_groups[0]["delta"] == pytest.approx(0.7 * 2 / 3)


@both
def test_hessian_free_with_the_hessian_takes_absolute_values(dtype):
    model = Quadratic(SPECTRA["indefinite"], dtype=dtype)
    before, expected = model.w.detach().double().clone(), newton_step(model, 0.7)
    advance(model, HessianFree(model.parameters(), delta=0.7, matrix="hessian", adapt=False))
    torch.testing.assert_close(
        model.w.detach().double() - before, expected, rtol=2e-5, atol=2e-5 * float(expected.norm())
    )


def test_hessian_free_reaches_the_minimum_of_a_network_with_the_full_batch():
    model, batch = network(), samples()
    losses = steps(HessianFree(model.parameters(), delta=1.0), model, batch, count=25)
    sgd = network()
    optimizer = torch.optim.SGD(sgd.parameters(), lr=0.5, momentum=0.9)
    for _ in range(25):
        optimizer.zero_grad()
        loss = cross_entropy(sgd(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * float(loss.detach())


def test_the_start_of_conjugate_gradients_is_the_last_step():
    model, batch = network(), samples()
    optimizer = HessianFree(model.parameters(), delta=10.0, adapt=False, lr=1e-4)
    steps(optimizer, model, batch, count=1)
    cold = optimizer.param_groups[0]["num_iterations"]
    steps(optimizer, model, batch, count=1, first=1)
    # The weights have hardly moved, so 0.95 of the solution is nearly the solution.
    assert optimizer.param_groups[0]["num_iterations"] < cold
    assert all("direction" in optimizer.state[p] for p in model.parameters())


def test_martens_rule_stops_when_ten_steps_gain_little():
    def forms(values):
        stop = MartensStop()
        return next((i for i, v in enumerate(values, start=1) if stop(torch.tensor([v]))), None)

    # phi = -1 + 0.5^i: the gain of the last ten steps, 0.5^(i - 10), is below 10 * 5e-4 at i = 18.
    assert forms([-1 + 0.5**i for i in range(1, 60)]) == 18
    assert forms([1.0 - 1e-9 * i for i in range(60)]) is None  # not below the start yet
    assert forms([-0.1 * i for i in range(1, 60)]) is None  # still falling


@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
@pytest.mark.parametrize("cause", ["no gradient", "no rate"])
def test_a_step_of_length_zero_leaves_the_damping(matrix, cause):
    model, batch = network(), samples()
    rate = 0.0 if cause == "no rate" else 1.0
    optimizer = HessianFree(model.parameters(), rate, delta=0.5, matrix=matrix)
    optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
    cross_entropy(model(batch[0]), batch[1]).backward()
    if cause == "no gradient":
        optimizer.zero_grad(set_to_none=False)
        optimizer.param_groups[0]["num_iterations"] = 9  # of an earlier step

    optimizer.step()

    assert optimizer.param_groups[0]["delta"] == 0.5
    assert optimizer.param_groups[0]["ratio"] is None
    assert bool(optimizer.param_groups[0]["num_iterations"]) == (cause == "no rate")


def test_reductions_below_the_roundoff_of_the_loss_leave_the_damping():
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1)
    batch = (torch.randn(50, 4, generator=generator), torch.randn(50, 1, generator=generator))
    optimizer = HessianFree(model.parameters(), delta=1.0)
    steps(optimizer, model, batch, count=5, loss_fn=mse_loss)
    delta = optimizer.param_groups[0]["delta"]

    # The minimum is reached, and the loss there is not zero.
    steps(optimizer, model, batch, count=10, loss_fn=mse_loss)

    assert optimizer.param_groups[0]["delta"] == delta


def test_learning_rates_that_differ_cannot_adapt_the_damping():
    model, batch = network(), samples()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = HessianFree(groups)
    optimizer.param_groups[1]["lr"] = 0.5  # as a schedule of each group sets it

    with pytest.raises(ValueError, match=r"lr must be the same in all groups with adapt=True"):
        steps(optimizer, model, batch, count=1)


def test_the_ritz_values_of_lanczos_newton_are_not_printed():
    model, batch = network(), samples()
    optimizer = LanczosNewton(model.parameters(), num_steps=5)
    optimizer.update_curvature(Risk(model, cross_entropy, [batch]))

    assert "ritz_values: 5 values" in repr(optimizer)


# ------------------------------------------------------------------------------------------
# Steps of Hessian-free optimisation that the quadratic model does not predict.


def separable(gap, seed):
    """Two classes of unit variance at a distance of ``2 gap``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (1024,), generator=generator)
    centre = torch.randn(10, generator=generator)
    noise = torch.randn(1024, 10, generator=generator)
    return noise + (2 * labels[:, None] - 1) * gap * centre / centre.norm(), labels


@pytest.mark.parametrize(
    ("layers", "gap", "seed"), [((10, 2), 3.0, 3), ((10, 16, 2), 2.0, 2), ((10, 32, 32, 2), 3.0, 3)]
)
def test_small_batches_that_are_fitted_do_not_increase_the_loss_of_the_others(layers, gap, seed):
    inputs, labels = separable(gap, seed)
    torch.manual_seed(seed)
    parts = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(layers)]
    model = nn.Sequential(*[layer for pair in parts for layer in pair][:-1])
    optimizer, generator = HessianFree(model.parameters()), torch.Generator().manual_seed(seed)
    first, worst = float(cross_entropy(model(inputs), labels).detach()), 0.0

    # Fitted batches have no curvature, so the damping falls. A batch with a sample that is
    # classified wrongly then has a large gradient and no curvature either.
    for _ in range(3):
        for rows in torch.randperm(1024, generator=generator).split(64):
            steps(optimizer, model, (inputs[rows], labels[rows]), count=1)
            worst = max(worst, float(cross_entropy(model(inputs), labels).detach()))

    assert worst < first


def test_a_step_is_shortened_until_the_loss_falls_as_predicted():
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    inputs, target = (torch.randn(50, n, generator=generator).double() for n in (4, 1))
    before, op = weights(model), ggn(Risk(model, mse_loss, [(inputs, target)]))
    optimizer = HessianFree(model.parameters(), lr=2.5, delta=0.01)

    steps(optimizer, model, (inputs, target), count=1, loss_fn=mse_loss)

    # 2.5 times the Newton step increases a quadratic loss, and 2.5 * 2/3 times decreases it.
    damped = op @ torch.eye(4).double() + 0.01 * torch.eye(4)
    newton = torch.linalg.solve(damped, -op.risk.gradient())
    torch.testing.assert_close(weights(model) - before, 2.5 * 2 / 3 * newton, rtol=1e-6, atol=1e-8)
    # Once poor, once good: 3/2 * 2/3.
    assert optimizer.param_groups[0]["delta"] == pytest.approx(0.01)
    assert optimizer.param_groups[0]["ratio"] == pytest.approx(1.0)


def test_no_step_is_taken_if_no_length_reduces_the_loss():
    model, batch = network(), samples()
    before = weights(model)
    optimizer = HessianFree(model.parameters(), lr=1e200, delta=0.5)

    steps(optimizer, model, batch, count=1)

    assert torch.equal(weights(model), before)
    assert optimizer.param_groups[0]["delta"] == 0.75
    assert optimizer.param_groups[0]["ratio"] is None


# ------------------------------------------------------------------------------------------
# Losses so near zero that roundoff exceeds their curvature.


CONVERGED = {
    "LanczosNewton": (LanczosNewton, {"delta": 0.3, "num_steps": 6, "interval": 2}),
    "HessianFree": (HessianFree, {"delta": 0.5}),
    "HessianFree hessian": (HessianFree, {"delta": 0.5, "max_steps": 20, "matrix": "hessian"}),
    "SpectralSGD": (SpectralSGD, {"interval": 3, "num_steps": 6}),
}


def wide():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3))


@pytest.mark.parametrize("name", CONVERGED)
def test_training_goes_on_where_roundoff_exceeds_the_curvature(name):
    kind, settings = CONVERGED[name]
    model, batch = wide(), samples(dtype=torch.float32)
    optimizer = kind(model.parameters(), **settings)
    steps(optimizer, model, batch, count=60)
    with torch.no_grad():
        model[2].weight *= 8  # all outputs are certain, so the loss has no digits left
        model[2].bias *= 8

    losses = steps(optimizer, model, batch, count=12)

    assert losses[0] < 1e-5
    assert losses[-1] <= losses[0]


@pytest.mark.parametrize("kind", [LanczosNewton, SpectralSGD])
def test_a_first_measurement_below_roundoff_is_one_clear_error(kind, monkeypatch):
    def fail(*args, **kwargs):
        raise AsymmetryError("op must be symmetric")

    monkeypatch.setattr(sys.modules[kind.__module__], "lanczos", fail)
    model, batch = network(), samples()
    optimizer = kind(model.parameters())

    with pytest.raises(ValueError, match=f"{kind.__name__} cannot measure the curvature, because"):
        optimizer.update_curvature(Risk(model, cross_entropy, [batch]))


def certain(dtype):
    """A model and a batch whose loss is about three units of machine precision."""
    model, (inputs, _) = network(dtype=dtype), samples(dtype=dtype)
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(
            torch.tensor([1.0, 0.0, 0.0]) * (15.0 if dtype is torch.float32 else 35)
        )
    return model, (inputs, torch.zeros(len(inputs), dtype=torch.int64))


@both
def test_the_first_pairs_are_measured_where_gradients_are_roundoff(dtype):
    model, batch = certain(dtype)
    optimizer = LanczosNewton(model.parameters(), delta=1e-2, num_steps=4)

    losses = steps(optimizer, model, batch)

    assert 0 < losses[0] < 16 * torch.finfo(dtype).eps
    assert losses[-1] <= losses[0]


def test_a_first_learning_rate_from_roundoff_raises_with_advice_that_can_be_followed():
    for dtype, advice in ((torch.float32, "a loss near zero: use float64$"),
                          (torch.float64, "a loss near zero$")):  # fmt: skip
        model, batch = certain(dtype)
        with pytest.raises(ValueError, match=advice):
            steps(SpectralSGD(model.parameters()), model, batch)


@pytest.mark.parametrize(("small", "seed"), [(2e-5, 14), (2e-5, 17), (4e-4, 5), (4e-4, 35)])
def test_ritz_vectors_of_several_lanczos_runs_are_orthonormal(small, seed):
    # Each run finds one of three equal eigenvalues. The last runs have vectors near roundoff.
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))[0]
    values = torch.cat([torch.tensor([1.0, 1.0, 1.0, small]), torch.zeros(36)])
    op = DenseOperator((basis * values @ basis.T).float())

    found, vectors = ritz_pairs(op, 10, None, torch.Generator().manual_seed(seed))

    gram = vectors.T @ vectors
    torch.testing.assert_close(gram, torch.eye(len(found)), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sort(descending=True)[0][:3], torch.ones(3).double())


def test_a_fixed_damping_below_roundoff_is_one_clear_error(monkeypatch):
    def fail(*args, **kwargs):
        raise NotPositiveDefiniteError("op must be positive definite")

    monkeypatch.setattr(sys.modules[HessianFree.__module__], "solve", fail)
    model, batch = network(), samples()
    optimizer = HessianFree(model.parameters(), delta=1e-9, adapt=False)

    with pytest.raises(ValueError, match="delta must exceed the roundoff of the matrix, got 1e-09"):
        steps(optimizer, model, batch, count=1)


# ------------------------------------------------------------------------------------------
# SpectralSGD.


def factor(model, optimizer, *, count, last):
    """The factor by which the error falls per step, over the last steps."""
    best = torch.linalg.solve(model.matrix, model.b)
    advance(model, optimizer, count - last)
    before = float((model.w.detach() - best).norm())
    for _ in range(last):
        optimizer.zero_grad()
        model(BATCH[0]).mean().backward()
        optimizer.step()
    return (float((model.w.detach() - best).norm()) / before) ** (1 / last)


@pytest.mark.parametrize("nesterov", [False, True])
def test_spectral_sgd_converges_at_the_optimal_factor_on_a_quadratic(nesterov):
    model = Quadratic(torch.linspace(1, 25, 8).tolist())
    optimizer = SpectralSGD(model.parameters(), interval=10**6, num_steps=8, nesterov=nesterov)
    found = factor(model, optimizer, count=50, last=40)
    rates = optimizer.rates
    assert rates.lambda_max == pytest.approx(25.0)
    assert rates.lambda_min == pytest.approx(1.0)
    # (sqrt(25) - 1) / (sqrt(25) + 1) = 2/3 for Polyak, 1 - 1/5 for Nesterov. The error of a double
    # root falls like t times the power: from step 10 to 50 that is (50 / 10)^(1/40) = 1.04 more.
    expected = 0.8 if nesterov else 2 / 3
    assert expected <= found * 1.001
    assert found < expected * 1.05
    assert optimizer.param_groups[0]["rate"] == pytest.approx(1 / 25 if nesterov else 1 / 9)


def test_another_rate_or_momentum_converges_more_slowly():
    factors = {}
    for scale, change in ((1.0, 0.0), (0.8, 0.0), (1.0, 0.1), (1.0, -0.1)):
        model = Quadratic(torch.linspace(1, 25, 8).tolist())
        optimizer = SpectralSGD(model.parameters(), scale, interval=10**6, num_steps=8)
        optimizer.update_curvature(Risk(model, mean_loss, [BATCH]))
        optimizer.param_groups[0]["momentum"] += change
        optimizer.curvature_due = lambda step: False
        factors[scale, change] = factor(model, optimizer, count=50, last=40)
    best = factors.pop((1.0, 0.0))
    assert all(best < other for other in factors.values())


def test_the_rates_are_those_of_the_formulas():
    spectrum = spectrum_of([4.0, 6.0, 9.0], [0.3, 0.4, 0.3])
    polyak, nesterov = spectral_rates(spectrum), spectral_rates(spectrum, nesterov=True)
    assert (polyak.rate, polyak.momentum) == pytest.approx((0.16, 0.04), rel=1e-5)
    assert (nesterov.rate, nesterov.momentum) == pytest.approx((1 / 9, 0.2), rel=1e-5)


def spectrum_of(values, weights_):
    start = torch.tensor(weights_).sqrt()
    op = DenseOperator(torch.diag(torch.tensor(values)))
    return lanczos(op, num_steps=len(values), start=start)


def test_the_bulk_and_values_that_are_not_positive_are_dropped_and_reported():
    rates = spectral_rates(spectrum_of([-1.0, 0.01, 1.0, 4.0], [0.1, 0.7, 0.1, 0.1]))
    assert (rates.lambda_min, rates.lambda_max) == pytest.approx((1.0, 4.0), rel=1e-5)
    assert rates.dropped_mass == pytest.approx(0.7)
    assert rates.num_negative == 1
    assert "dropped: bulk of mass 0.7, 1 not positive" in str(rates)
    kept = spectral_rates(spectrum_of([0.5, 1.0, 4.0], [0.4, 0.3, 0.3]))
    assert (kept.lambda_min, kept.dropped_mass, kept.num_negative) == (
        pytest.approx(0.5, rel=1e-5), 0.0, 0)  # fmt: skip


def test_the_largest_value_counts_even_if_most_of_the_mass_is_there():
    rates = spectral_rates(spectrum_of([0.1, 0.5, 4.0], [0.1, 0.2, 0.7]))
    assert (rates.lambda_min, rates.lambda_max) == pytest.approx((0.1, 4.0), rel=1e-5)
    assert rates.dropped_mass == 0
    # All eigenvalues alike: one Ritz value, and one step to the minimum.
    model = Quadratic([2.0] * 5)
    advance(model, SpectralSGD(model.parameters(), num_steps=5))
    torch.testing.assert_close(model.w.detach(), 0.5 * model.b)


def test_a_single_remaining_value_has_no_momentum():
    rates = spectral_rates(spectrum_of([0.0, 4.0], [0.8, 0.2]))
    assert (rates.rate, rates.momentum) == pytest.approx((0.25, 0.0))


def test_a_spectrum_without_positive_values_is_an_error_first_and_ignored_later():
    with pytest.raises(ValueError, match="a positive Ritz value outside of the bulk"):
        spectral_rates(spectrum_of([-2.0, -1.0, -0.5], [0.3, 0.3, 0.4]))
    model = Quadratic([1.0, 2.0, 4.0])
    optimizer = SpectralSGD(model.parameters(), num_steps=3)
    optimizer.update_curvature(Risk(model, mean_loss, [BATCH]))
    before = dict(optimizer.param_groups[0])
    model.matrix.neg_()
    optimizer.update_curvature(Risk(model, mean_loss, [BATCH]))
    after = optimizer.param_groups[0]
    assert (after["rate"], after["momentum"]) == (before["rate"], before["momentum"])


# ------------------------------------------------------------------------------------------
# Which matrix, of which batch.


@pytest.mark.parametrize(("matrix", "operator"), [("hessian", hessian), ("ggn", ggn)])
def test_the_basis_is_that_of_the_matrix_of_the_batch(matrix, operator):
    model, batch = network(), samples()
    optimizer = LanczosNewton(model.parameters(), num_steps=43, matrix=matrix)
    optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
    dense = operator(Risk(model, cross_entropy, [batch])).dense()
    found = torch.tensor(optimizer.param_groups[0]["ritz_values"], dtype=torch.float64)
    expected = torch.linalg.eigvalsh(dense)
    top = found.abs().sort().values[-5:]
    torch.testing.assert_close(top, expected.abs().sort().values[-5:])
    basis = torch.cat([optimizer.state[p]["basis"].flatten(1) for p in model.parameters()], 1)
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)).double())


def test_the_fisher_matrix_draws_new_labels_for_each_refresh():
    model, batch = network(), samples()
    optimizer = LanczosNewton(model.parameters(), num_steps=3, matrix="fisher", start="random")
    values = []
    for _ in range(2):
        optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
        values.append(optimizer.param_groups[0]["ritz_values"])
    assert values[0] != values[1]


def test_a_risk_made_once_is_moved_to_the_present_weights():
    results = []
    for once in (True, False):
        model, batch = network(), samples()
        optimizer = LanczosNewton(model.parameters(), 0.5, delta=1.0, num_steps=5)
        risk = Risk(model, cross_entropy, [batch])
        for _ in range(4):
            optimizer.update_curvature(risk if once else Risk(model, cross_entropy, [batch]))
            optimizer.zero_grad()
            cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        results.append(weights(model))
    assert torch.equal(*results)


def test_curvature_is_due_at_the_interval():
    model = network()
    newton = LanczosNewton(model.parameters(), interval=3)
    assert [newton.curvature_due(step) for step in range(7)] == [
        True, False, False, True, False, False, True]  # fmt: skip
    assert all(HessianFree(model.parameters()).curvature_due(step) for step in range(3))
    spectral = SpectralSGD(model.parameters(), interval=2)
    assert [spectral.curvature_due(step) for step in range(3)] == [True, False, True]


def test_the_momentum_and_the_decay_are_those_of_the_formula():
    model, batch = network(), samples()
    rate, momentum, decay = 0.2, 0.6, 0.1
    settings = {"delta": 0.5, "num_steps": 8, "momentum": momentum, "weight_decay": decay}
    optimizer = LanczosNewton(model.parameters(), rate, **settings)
    optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
    basis = torch.cat([optimizer.state[p]["basis"].flatten(1) for p in model.parameters()], 1)
    values = torch.tensor(optimizer.param_groups[0]["ritz_values"], dtype=torch.float64).abs()
    buffer = torch.zeros_like(weights(model))
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        along = basis @ gradient
        # As printed in METHODS and the paper: the coefficient beside g/delta.
        coefficient = -values / (0.5 * (values + 0.5))
        bracket = basis.T @ (coefficient * along) + gradient / 0.5
        buffer = momentum * buffer + bracket
        expected = (1 - rate * decay) * weights(model) - rate * buffer
        optimizer.step()
        torch.testing.assert_close(weights(model), expected)


def test_a_basis_that_the_user_has_replaced_is_used():
    model = Quadratic([1.0, 2.0, 3.0, 4.0])
    optimizer = LanczosNewton(model.parameters(), 1.0, delta=1.0, num_steps=2, interval=10)
    advance(model, optimizer)
    state = optimizer.state[model.w]
    state["basis"] = torch.zeros_like(state["basis"])
    before = model.w.detach().clone()

    optimizer.zero_grad()
    model(BATCH[0]).mean().backward()
    optimizer.step()

    # Without a basis the step is that of gradient descent, g / delta.
    torch.testing.assert_close(model.w.detach(), before - model.w.grad)
