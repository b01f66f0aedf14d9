"""Steps of optimisers along eigenvectors, against dense eigenvectors."""

import math

import pytest
import torch
from optim.second_order_cases import network, samples, weights
from torch.nn.functional import cross_entropy

from ritz.curvature import Risk, hessian
from ritz.optim import (
    KFAC,
    DampedAdamW,
    LanczosNewton,
    Lookahead,
    SpectralSGD,
    StepReader,
    read_step,
)


def taken(make, *, decay=0.0):
    """A step of an optimiser with the eigenpairs of its batch, and the reading."""
    model, batch = network(), samples()
    optimizer = make(model.parameters())
    reader = StepReader(optimizer)
    risk = Risk(model, cross_entropy, [batch])
    values, vectors = torch.linalg.eigh(hessian(risk).dense())
    before = weights(model)
    if hasattr(optimizer, "update_curvature"):
        optimizer.update_curvature(risk)
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    chosen = values.abs().argsort()[-6:].sort().values
    reading = reader.read(risk, values[chosen], vectors[:, chosen])
    return reading, before, weights(model), values[chosen], vectors[:, chosen], risk


def test_sgd_has_one_rate_in_all_directions():
    reading, before, after, _, vectors, risk = taken(lambda p: torch.optim.SGD(p, lr=0.3))
    torch.testing.assert_close(reading.rates, torch.full((6,), 0.3, dtype=torch.float64))
    assert reading.flat_rate == pytest.approx(0.3)
    assert reading.curvature_ratio == pytest.approx(1.0)
    torch.testing.assert_close(reading.update, vectors.T @ (after - before))
    torch.testing.assert_close(reading.gradient, vectors.T @ risk.gradient())
    assert not bool(reading.decay.any())
    turn = vectors.T @ (after / after.norm() - before / before.norm())
    torch.testing.assert_close(reading.turn, turn)


def test_the_turn_of_a_small_step_is_that_of_equation_11():
    rate = 1e-6
    reading, before, _, _, vectors, risk = taken(lambda p: torch.optim.SGD(p, lr=rate))
    unit, gradient = before / before.norm(), risk.gradient()
    # d(w/|w|) = (I - ww'/|w|^2) dw / |w| with dw = -rate g.
    expected = vectors.T @ (-rate * (gradient - unit * (unit @ gradient))) / before.norm()
    torch.testing.assert_close(reading.turn, expected, rtol=1e-4, atol=1e-12)


def test_a_damped_newton_step_has_the_rates_of_equation_9():
    def make(params):
        return LanczosNewton(params, 0.5, delta=0.2, num_steps=43)

    reading, *_, values, _, _ = taken(make)
    torch.testing.assert_close(reading.rates, 0.5 / (values.abs() + 0.2), rtol=1e-5, atol=1e-8)
    top = float(values.max())
    # Beside the six directions there are others with curvature, so R is a little below.
    # (lambda_1 + delta) / delta if all else is flat; the other directions have curvature here.
    assert reading.curvature_ratio == pytest.approx(reading.flat_rate * (top + 0.2) / 0.5)
    assert 2 < reading.curvature_ratio <= (top + 0.2) / 0.2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_decoupled_decay_is_split_off(decay):
    def make(params):
        return DampedAdamW(params, lr=0.01, delta=0.1, weight_decay=decay)

    reading, before, after, _, vectors, _ = taken(make)
    torch.testing.assert_close(reading.decay, -0.01 * decay * (vectors.T @ before))
    torch.testing.assert_close(reading.update + reading.decay, vectors.T @ (after - before))
    plain, *_ = taken(lambda p: DampedAdamW(p, lr=0.01, delta=0.1, weight_decay=0.0))
    torch.testing.assert_close(reading.update, plain.update)


def test_an_l2_term_takes_its_share_of_the_update():
    rate, decay = 0.3, 0.05
    reading, before, after, _, vectors, risk = taken(
        lambda p: torch.optim.SGD(p, lr=rate, weight_decay=decay)
    )
    # Equation 10 for SGD: (1 - gamma alpha) w - alpha g in every direction.
    torch.testing.assert_close(reading.rates, torch.full((6,), rate, dtype=torch.float64))
    torch.testing.assert_close(reading.decay, -rate * decay * (vectors.T @ before))
    torch.testing.assert_close(reading.gradient, vectors.T @ risk.gradient())
    torch.testing.assert_close(reading.update + reading.decay, vectors.T @ (after - before))


def test_the_decay_of_spectral_sgd_has_its_measured_rate():
    reading, before, after, _, vectors, _ = taken(
        lambda p: SpectralSGD(p, 0.2, num_steps=8, matrix="ggn", weight_decay=0.1)
    )
    torch.testing.assert_close(reading.update + reading.decay, vectors.T @ (after - before))
    assert reading.curvature_ratio == pytest.approx(1.0)


def test_a_reading_without_a_step_is_none_and_closing_removes_the_hook():
    model, batch = network(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader, risk = StepReader(optimizer), Risk(model, cross_entropy, [batch])
    values, vectors = torch.zeros(1).double(), torch.eye(len(weights(model)))[:, :1].double()
    assert reader.read(risk, values, vectors) is None
    reader.close()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert reader.read(risk, values, vectors) is None


def test_a_reading_prints_its_table_and_checks_its_vectors():
    reading, *_ = taken(lambda p: torch.optim.SGD(p, lr=0.3))
    assert "R = 1" in str(reading)
    assert len(str(reading).splitlines()) == 8
    with pytest.raises(ValueError, match="gradient"):
        read_step(torch.ones(1), torch.eye(3)[:, :1], gradient=torch.ones(2),
                  before=torch.ones(3), after=torch.ones(3))  # fmt: skip


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("kind", ["RMSprop", "SGD", "AdamW", "Adafactor"])
def test_decay_of_a_wrapped_optimiser_is_split_off_as_that_of_the_optimiser(kind, lookahead):
    model, batch, parts = network(), samples(), []
    for decay in (0.0, 0.5):
        model = network()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, weight_decay=decay)
        optimizer = Lookahead(optimizer) if lookahead else optimizer
        reader, before = StepReader(optimizer), weights(model)
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        basis = torch.eye(len(before), dtype=torch.float64)[:, :3]
        risk = Risk(model, cross_entropy, [batch])
        reading = reader.read(risk, torch.arange(3.0).double(), basis)
        parts.append((reading, basis.T @ before, basis.T @ (weights(model) - before)))
    (plain, *_), (reading, before, moved) = parts

    torch.testing.assert_close(reading.update + reading.decay, moved)
    torch.testing.assert_close(reading.gradient, plain.gradient)
    if kind in ("AdamW", "Adafactor"):
        torch.testing.assert_close(reading.decay, -0.1 * 0.5 * before)
    else:
        # An L2 term has its share of the gradient in the update.
        share = 0.5 * before / (reading.gradient + 0.5 * before)
        torch.testing.assert_close(reading.decay, share * moved)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"values": torch.ones(3)}, ValueError, r"values must be \(2,\), got \(3,\)"),
        ({"decay": torch.ones(2)}, ValueError, r"decay must be \(5,\), got \(2,\)"),
        ({"without_momentum": torch.ones(5, 1)}, ValueError, r"must be \(5,\), got \(5, 1\)"),
        ({"gradient": torch.ones(5).double()}, TypeError, "torch.float32, like vectors, got"),
    ],
)
def test_readings_name_a_vector_that_does_not_fit(changes, error, match):
    parts = {"values": torch.ones(2), "vectors": torch.eye(5)[:, :2]}
    parts |= dict.fromkeys(("gradient", "before", "after"), torch.ones(5)) | changes
    with pytest.raises(error, match=match):
        read_step(parts.pop("values"), parts.pop("vectors"), **parts)


def several(make, *, steps=4, decay=0.0):
    """The reading of the last of several steps, and its parts."""
    model, data = network(), samples(64)
    optimizer = make(model)
    reader = StepReader(optimizer)
    for step in range(steps):
        batch = tuple(part[16 * step : 16 * step + 16] for part in data)
        risk = Risk(model, cross_entropy, [batch])
        values, vectors = torch.linalg.eigh(hessian(risk).dense())
        if hasattr(optimizer, "update_curvature"):
            optimizer.update_curvature(risk)
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return reader.read(risk, values[-6:], vectors[:, -6:]), values[-6:], vectors[:, -6:], risk


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_momentum_does_not_change_the_rates_of_sgd(nesterov, decay):
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": decay}

    reading, *_ = several(lambda model: torch.optim.SGD(model.parameters(), **settings))

    torch.testing.assert_close(reading.rates, torch.full((6,), 0.1, dtype=torch.float64))
    assert reading.curvature_ratio == pytest.approx(1.0)


def test_momentum_does_not_change_the_rates_of_a_newton_step():
    readings = [
        several(lambda model, m=momentum: LanczosNewton(
            model.parameters(), 0.5, delta=0.2, num_steps=43, momentum=m), steps=2)
        for momentum in (0.0, 0.9)
    ]  # fmt: skip

    for reading, values, *_ in readings:
        torch.testing.assert_close(reading.rates, 0.5 / (values.abs() + 0.2), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_does_not_change_the_rates_of_kfac(momentum):
    """With a large damping K-FAC is SGD with the learning rate alpha / delta."""
    reading, *_ = several(lambda model: KFAC(model, lr=1e3, delta=1e5, momentum=momentum))

    assert reading.curvature_ratio == pytest.approx(1.0, rel=0.05)
    assert reading.flat_rate == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, DampedAdamW])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_rates_of_adam_are_those_of_its_divisors(kind, beta):
    made = []

    def make(model):
        made.append(kind(model.parameters(), lr=0.01, betas=(beta, 0.99)))
        return made[0]

    reading, _, vectors, _ = several(make)

    states = [made[0].state[p] for p in made[0].param_groups[0]["params"]]
    root = torch.cat([state["exp_avg_sq"].flatten() for state in states]) / (1 - 0.99**4)
    # The order of the parameters of the network is that of the risk.
    g = torch.cat([p.grad.flatten() for p in made[0].param_groups[0]["params"]])
    expected = (vectors.T @ (0.01 * g / (root.sqrt() + 1e-8))) / (vectors.T @ g)
    torch.testing.assert_close(reading.rates, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
        lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    ],
)
def test_rates_are_nan_where_the_momentum_is_not_known(make):
    reading, *_ = several(make)

    assert bool(reading.rates.isnan().all())
    assert math.isnan(reading.curvature_ratio)
    assert math.isnan(reading.flat_rate)
    assert bool(reading.update.isfinite().all())
