from decimal import Decimal, localcontext

import pytest
import torch
from matrices import seeded

from ritz.rmt import quadratic

SETTINGS = {"rate": 0.1, "num_steps": 57, "start": 0.7, "noise": 2.3}
# phi close to 1, equal to rho, moderate, zero, negative, close to -1
PRODUCTS = [1e-12, 1e-7, 1e-3, 0.1, 0.9, 1.0, 1.4, 1.999, 2 - 1e-9]


def exact_sums(x, rho, num_steps):
    """Mean and variance of last iterate, averages and moving average as they are defined."""
    phi, rho = 1 - Decimal(x), Decimal(rho)
    noises = []  # what the noise of m steps ago has become
    w, total, moving = Decimal(1), Decimal(1), 1 - rho
    for _ in range(num_steps):
        noises.append((w, total, moving))
        w = phi * w
        total, moving = total + w, rho * moving + (1 - rho) * w
    # The start moves as noise does, but is not averaged and enters e_0 whole.
    start = (w, total - 1, moving + rho * rho**num_steps)
    return start, tuple(sum(row[i] ** 2 for row in noises) for i in range(3))


def exact_forms(x, rho, n):
    """The published closed forms, in high precision because their terms cancel."""
    phi, rho = 1 - Decimal(x), Decimal(rho)
    K = n - 2 * phi * (1 - phi**n) / (1 - phi) + phi**2 * (1 - phi ** (2 * n)) / (1 - phi**2)
    E = (
        phi**2 * (1 - phi ** (2 * n)) / (1 - phi**2)
        - 2 * phi * rho * (1 - (phi * rho) ** n) / (1 - phi * rho)
        + rho**2 * (1 - rho ** (2 * n)) / (1 - rho**2)
    )
    last = phi**n, (1 - phi ** (2 * n)) / (1 - phi**2)
    average = phi * (1 - phi**n) / (n * (1 - phi)), K / (n * (1 - phi)) ** 2
    mean = (phi * (1 - rho) * phi**n - rho * (1 - phi) * rho**n) / (phi - rho)
    return last, average, (mean, ((1 - rho) / (phi - rho)) ** 2 * E)


def close(found, mean, variance):
    # A small multiple of the roundoff of some ten operations, with nothing lost to cancellation.
    tolerance = {"rtol": 1e-13, "atol": 1e-300}
    expected = torch.tensor([float(mean)], dtype=torch.float64)
    torch.testing.assert_close(found.mean, expected, rtol=1e-13, atol=1e-15)
    expected = torch.tensor([float(variance)], dtype=torch.float64)
    torch.testing.assert_close(found.variance, expected, **tolerance)


@pytest.mark.parametrize("x", PRODUCTS)
@pytest.mark.parametrize("num_steps", [1, 2, 13, 64])
def test_moments_equal_the_sums_that_define_them_to_roundoff(x, num_steps):
    value = torch.tensor([x], dtype=torch.float64)
    common = {"rate": 1.0, "num_steps": num_steps}
    rho = 0.9  # phi = rho for x = 0.1
    with localcontext() as context:
        context.prec = 60
        (last, total, moving), (q_last, q_total, q_moving) = exact_sums(x, rho, num_steps)
        n = num_steps
        close(quadratic.iterate(value, **common), last, q_last)
        close(quadratic.average(value, **common), total / n, q_total / n**2)
        found = quadratic.average(value, include_start=True, **common)
        close(found, (total + 1) / (n + 1), q_total / (n + 1) ** 2)
        close(quadratic.ema(value, decay=rho, **common), moving, q_moving)


@pytest.mark.parametrize("x", [1e-9, 1e-5, 3e-3, 0.5, 1.7, 2 - 1e-7])
def test_a_million_steps_equal_the_closed_forms_in_many_digits(x):
    value, n = torch.tensor([x], dtype=torch.float64), 10**6
    with localcontext() as context:
        context.prec = 80
        last, average, moving = exact_forms(x, 0.999, n)
        close(quadratic.iterate(value, rate=1.0, num_steps=n), *last)
        close(quadratic.average(value, rate=1.0, num_steps=n), *average)
        close(quadratic.ema(value, rate=1.0, num_steps=n, decay=0.999), *moving)


def test_a_flat_direction_is_a_random_walk():
    flat, n = torch.zeros(1, dtype=torch.float64), 1000
    common = {"rate": 0.5, "noise": 4.0, "num_steps": n, "start": 3.0}
    close(quadratic.iterate(flat, **common), 3, n)
    close(quadratic.average(flat, **common), 3, (n + 1) * (2 * n + 1) / (6 * n))


@pytest.mark.parametrize("x", [-0.1, 2.3])
def test_unstable_directions_are_followed_while_they_are_finite(x):
    value = torch.tensor([x], dtype=torch.float64)
    with localcontext() as context:
        context.prec = 60
        (last, total, moving), (q_last, q_total, q_moving) = exact_sums(x, 0.9, 40)
        close(quadratic.iterate(value, rate=1.0, num_steps=40), last, q_last)
        close(quadratic.average(value, rate=1.0, num_steps=40), total / 40, q_total / 1600)
        close(quadratic.ema(value, rate=1.0, num_steps=40, decay=0.9), moving, q_moving)
    with pytest.raises(ValueError, match="num_steps must be small enough"):
        quadratic.average(value, rate=1.0, num_steps=10**6)


@pytest.mark.parametrize("interval", [1, 4])
def test_covariances_equal_those_of_a_dense_recursion(rng, interval):
    d, rho, count = 12, 0.8, 57 // interval
    eigenvalues = torch.linspace(-0.2, 18.0, d, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64)).Q
    eye, zero = torch.eye(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    step = eye - SETTINGS["rate"] * (Q * eigenvalues) @ Q.T
    # The state is (w, sum of w, ema); entering the averages is a linear map of its own.
    move = torch.block_diag(step, eye, eye)
    enter = torch.cat([torch.cat([eye, zero, zero], 1), torch.cat([eye, eye, zero], 1),
                       torch.cat([(1 - rho) * eye, zero, rho * eye], 1)])  # fmt: skip
    noise = torch.block_diag(SETTINGS["rate"] ** 2 * SETTINGS["noise"] * eye, zero, zero)
    start = SETTINGS["start"] * Q.sum(1)
    mean = torch.cat([start, torch.zeros_like(start), start])
    covariance = torch.zeros(3 * d, 3 * d, dtype=torch.float64)
    for t in range(1, SETTINGS["num_steps"] + 1):
        mean, covariance = move @ mean, move @ covariance @ move.T + noise
        if t % interval == 0:
            mean, covariance = enter @ mean, enter @ covariance @ enter.T
    every = {"interval": interval} | SETTINGS
    found = (
        quadratic.iterate(eigenvalues, **SETTINGS),
        quadratic.average(eigenvalues, **every),
        quadratic.ema(eigenvalues, decay=rho, **every),
    )
    for i, (moments, scale) in enumerate(zip(found, (1, count, 1), strict=True)):
        block = slice(i * d, (i + 1) * d)
        expected = (Q * moments.variance) @ Q.T
        torch.testing.assert_close(covariance[block, block] / scale**2, expected)
        torch.testing.assert_close(mean[block] / scale, Q @ moments.mean)


@pytest.mark.parametrize(("interval", "decay"), [(1, 0.9), (5, 0.6)])
def test_a_thousand_dimensions_simulated_meet_the_closed_forms(interval, decay):
    generator = seeded(1)
    eigenvalues = torch.linspace(0.01, 19.0, 1000, dtype=torch.float64)
    paths = 400
    every = SETTINGS | {"interval": interval}
    drawn = quadratic.simulate(
        eigenvalues, num_paths=paths, decay=decay, generator=generator, **every
    )
    for samples, moments in (
        (drawn.iterate, quadratic.iterate(eigenvalues, **SETTINGS)),
        (drawn.average, quadratic.average(eigenvalues, **every)),
        (drawn.average_with_start, quadratic.average(eigenvalues, include_start=True, **every)),
        (drawn.ema, quadratic.ema(eigenvalues, decay=decay, **every)),
    ):
        # 4e5 samples over independent directions: their standardised sums are known exactly.
        z = (samples - moments.mean) / moments.variance.sqrt()
        assert abs(float(z.mean())) < 4 / z.numel() ** 0.5
        assert abs(float(z.square().mean()) - 1) < 4 * (2 / z.numel()) ** 0.5
        # Each direction by itself: the share beyond two standard errors is that of a normal law.
        beyond = ((z.mean(0) * paths**0.5).abs() > 2).double().mean()
        share = 0.0455
        assert abs(float(beyond) - share) < 4 * (share * (1 - share) / 1000) ** 0.5


@pytest.mark.parametrize(("decay", "interval"), [(0.0, 1), (0.95, 1), (0.95, 3)])
def test_many_steps_reach_the_stationary_state(decay, interval):
    eigenvalues = torch.linspace(0.5, 19.9, 30, dtype=torch.float64)
    common = {"rate": 0.1, "noise": 1.7, "decay": decay, "interval": interval}
    found = quadratic.stationary(eigenvalues, **common)
    late = quadratic.ema(eigenvalues, num_steps=30_000, **common)
    torch.testing.assert_close(late.variance, found.variance, rtol=1e-12, atol=0)
    assert float(late.mean.abs().max()) < 1e-12
    assert not bool(found.mean.any())


def test_the_average_forgets_the_rate_and_falls_as_one_over_n():
    value, n = torch.tensor([2.0], dtype=torch.float64), 10**7
    for rate in (0.1, 0.01):
        found = quadratic.average(value, rate=rate, num_steps=n, noise=3.0)
        torch.testing.assert_close(
            n * found.variance, torch.tensor([0.75]).double(), rtol=1e-4, atol=0
        )


def test_each_direction_may_have_its_own_learning_rate():
    eigenvalues = torch.tensor([0.3, 5.0])
    both = quadratic.iterate(eigenvalues, rate=torch.tensor([0.2, 0.1]), num_steps=9)
    for i, rate in enumerate((0.2, 0.1)):
        one = quadratic.iterate(eigenvalues[i : i + 1], rate=torch.tensor([rate]), num_steps=9)
        torch.testing.assert_close(both.variance[i : i + 1], one.variance)
    assert both.mean.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"interval": 0}, "interval"),
        ({"interval": 58}, "num_steps must be at least 58"),
        ({"rate": -0.1}, "rate must be at least 0"),
        ({"noise": -1.0}, "noise must be at least 0"),
        ({"start": torch.ones(3)}, r"start must be a number or \(2,\), got \(3,\)"),
        ({"start": float("nan")}, "start must be finite"),
        ({"decay": 1.1}, "decay must be between"),
    ],
)
def test_wrong_settings_are_named(change, match):
    with pytest.raises(ValueError, match=match):
        quadratic.ema(torch.ones(2), **({"decay": 0.5} | SETTINGS | change))


def test_a_simulation_records_its_seed_and_checks_its_settings():
    ones = torch.ones(2)
    drawn = quadratic.simulate(ones, num_paths=3, decay=0.5, **SETTINGS)
    again = quadratic.simulate(
        ones,
        num_paths=3,
        decay=0.5,
        generator=seeded(drawn.seed),
        **SETTINGS,
    )
    assert torch.equal(drawn.ema, again.ema)
    with pytest.raises(ValueError, match="num_paths"):
        quadratic.simulate(ones, num_paths=0, decay=0.5, **SETTINGS)
    with pytest.raises(ValueError, match="decay"):
        quadratic.simulate(ones, num_paths=3, decay=-0.5, **SETTINGS)


@pytest.mark.parametrize("x", PRODUCTS)
def test_the_stationary_state_keeps_its_digits_where_phi_and_rho_are_close_to_one(x):
    rho, exact = 1 - 2.0**-40, Decimal(x)
    phi = 1 - exact
    with localcontext(prec=60):
        slower = (1 - Decimal(rho)) / (1 + Decimal(rho))
        slower *= (1 + phi * Decimal(rho)) / (1 - phi * Decimal(rho))
        expected = float(slower / (exact * (2 - exact)))
    eigenvalues = torch.tensor([x], dtype=torch.float64)
    found = quadratic.stationary(eigenvalues, rate=1.0, decay=rho)
    assert float(found.variance) == pytest.approx(expected, rel=1e-13)


def test_there_is_no_stationary_state_outside_the_stable_range():
    for bad in (0.0, -1.0, 20.0):
        with pytest.raises(ValueError, match="between 0 and 2 / rate"):
            quadratic.stationary(torch.tensor([1.0, bad]), rate=0.1)
    with pytest.raises(ValueError, match="decay"):
        quadratic.stationary(torch.ones(1), rate=0.1, decay=1.0)
    with pytest.raises(TypeError, match="eigenvalues must be a tensor"):
        quadratic.iterate([1.0], rate=0.1, num_steps=1)
