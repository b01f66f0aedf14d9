"""Bounds against brute force: each holds and is not far from the exact value."""

import itertools
import math

import networkx
import pytest
import torch
from matrices import seeded

import ritz
from ritz.rmt import MarchenkoPastur, Normal, Semicircle, bounds, diffusion, quadratic
from ritz.testing import with_spectrum


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def definite(d, seed, condition=20.0):
    values = torch.linspace(1.0, condition, d, dtype=torch.float64)
    return with_spectrum(values, generator=seeded(seed)).matrix


@pytest.mark.parametrize("num_steps", [3, 6, 10])
def test_lanczos_and_power_iteration_stay_below_their_bounds(num_steps):
    eigenvalues = torch.cat([torch.linspace(0, 1, 80), torch.tensor([1.3])]).double()
    op = with_spectrum(eigenvalues, generator=seeded(3))
    leading = torch.linalg.eigh(op.matrix).eigenvectors[:, -1]
    start = random(81, seed=7)
    start = start / start.norm()
    settings = {"num_steps": num_steps, "overlap": abs(float(start @ leading))}

    basis = torch.linalg.qr(
        torch.stack([torch.linalg.matrix_power(op.matrix, k) @ start for k in range(num_steps)], 1)
    ).Q
    ritz_value = float(torch.linalg.eigvalsh(basis.T @ op.matrix @ basis)[-1])
    powered = torch.linalg.matrix_power(op.matrix, num_steps - 1) @ start
    powered = float(powered @ op.matrix @ powered / (powered @ powered))

    lanczos = bounds.lanczos_error(1.3, 1.0, 0.0, **settings)
    power = bounds.power_error(1.3, 1.0, 0.0, **settings)
    assert 0 <= 1.3 - ritz_value <= lanczos
    assert 1.3 - powered <= power
    assert lanczos < power


def test_the_bound_of_lanczos_holds_for_the_smallest_eigenvalue_of_the_negative():
    bound = bounds.lanczos_error(-1.0, -2.0, -10.0, num_steps=5, overlap=0.1)

    # T_4(1 + 2/8)^-2 with T_4(x) = 8x^4 - 8x^2 + 1
    chebyshev = 8 * 1.25**4 - 8 * 1.25**2 + 1
    assert bound == pytest.approx(9 * 99 / chebyshev**2)


def test_the_table_of_lanczos_over_power_is_that_of_the_thesis():
    gaps = torch.tensor([[1.5], [1.1], [1.01]], dtype=torch.float64)

    factors = bounds.krylov_factors(gaps, num_steps=torch.tensor([5, 10, 15, 20]))

    lanczos = [
        [1.1e-4, 2.0e-10, 3.9e-16, 7.4e-22],
        [2.7e-2, 5.5e-5, 1.1e-7, 2.1e-10],
        [5.6e-1, 1.0e-1, 1.5e-2, 2.0e-3],
    ]
    power = [
        [3.9e-2, 6.8e-4, 1.2e-5, 2.0e-7],
        [4.7e-1, 1.8e-1, 6.9e-2, 2.7e-2],
        [9.2e-1, 8.4e-1, 7.6e-1, 6.9e-1],
    ]
    torch.testing.assert_close(factors.lanczos, torch.tensor(lanczos).double(), rtol=0.05, atol=0)
    torch.testing.assert_close(factors.power, torch.tensor(power).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("degree", range(7))
@pytest.mark.parametrize("kernel", [Normal(variance=0.09), Semicircle(variance=0.2)])
def test_the_bias_of_smoothing_is_the_difference_of_moments(degree, kernel):
    points = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)

    bias = bounds.smoothing_bias(points, degree, kernel=kernel)

    # Gauss-Legendre in the angle over the support of the kernel, for each point
    low, high = kernel.support
    f = (torch.arange(4000, dtype=torch.float64) + 0.5) * (math.pi / 4000)
    x = 0.5 * (low + high) - 0.5 * (high - low) * torch.cos(f)
    weights = kernel.pdf(x) * 0.5 * (high - low) * torch.sin(f) * (math.pi / 4000)
    smoothed = float(((points[:, None] + x) ** degree @ weights).mean())
    assert bias == pytest.approx(smoothed - float((points**degree).mean()), abs=1e-9)


def test_the_bias_is_that_of_a_smoothed_density():
    op = with_spectrum(torch.linspace(-1, 3, 40, dtype=torch.float64), generator=seeded(1))
    discrete = ritz.density(op, num_probes=3, num_steps=20)

    bias = bounds.smoothing_bias(discrete, 5, kernel=Normal(variance=0.04))

    assert bias == pytest.approx(discrete.smoothed(0.2).moment(5) - discrete.moment(5))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_finite_size_moments_of_random_signs_stay_within_the_correction(size):
    pairs = list(itertools.combinations_with_replacement(range(size), 2))
    total = torch.zeros(7, dtype=torch.float64)
    for signs in itertools.product((-1.0, 1.0), repeat=len(pairs)):
        matrix = torch.zeros(size, size, dtype=torch.float64)
        for (i, j), sign in zip(pairs, signs, strict=True):
            matrix[i, j] = matrix[j, i] = sign / math.sqrt(size)
        values = torch.linalg.eigvalsh(matrix)
        total += torch.stack([(values**k).mean() for k in range(7)])

    for degree in (2, 4, 6):
        exact, limit = float(total[degree]) / 2 ** len(pairs), Semicircle().moment(degree)
        correction = bounds.moment_correction(degree, size, bound=1.0, stddev=1.0)
        assert abs(exact - limit) / limit <= correction
        if degree == 4:  # 2 - 1/P, so the correction is of order 1/P, not 1/P^2
            assert exact == pytest.approx(2 - 1 / size)


@pytest.mark.parametrize("condition", [1.0, 5.0, 300.0])
def test_the_variance_of_a_probe_is_bounded_for_every_spectrum(condition):
    size, bound = 50, bounds.probe_variance(50, condition=condition)

    ratios = []
    for share in range(1, size):
        # Two-point spectra attain Kantorovich's bound.
        values = torch.ones(size, dtype=torch.float64)
        values[share:] = condition
        ratios.append(float(2 * values.square().sum() / values.sum() ** 2))

    assert max(ratios) <= bound * (1 + 1e-12)
    if condition < size:  # else a single small eigenvalue is already too many
        assert max(ratios) > 0.99 * bound


def test_the_predicted_number_of_probes_reaches_the_tolerance():
    values = torch.ones(200, dtype=torch.float64)
    values[:30] = 10.0
    op = with_spectrum(values, generator=seeded(2))
    count = bounds.probes_needed(200, condition=10.0, rtol=0.02)

    estimates = [
        float(ritz.trace(op, method="hutchinson", num_probes=count, probe="gaussian",
                         generator=seeded(i))) for i in range(40)
    ]  # fmt: skip

    spread = float(torch.tensor(estimates).std()) / float(values.sum())
    assert spread < 0.02 * (1 + 4 / math.sqrt(2 * 40))


def test_entropies_of_dice_concentrate_as_jaynes_predicts():
    tosses, cells, draws = 500, 6, 4000
    gap = bounds.entropy_concentration(tosses, degrees=cells - 1, level=0.9)

    thrown = torch.randint(cells, (draws, tosses), generator=seeded(4))
    shares = torch.nn.functional.one_hot(thrown, cells).double().mean(1)
    entropies = -torch.special.xlogy(shares, shares).sum(1)

    inside = float((math.log(cells) - entropies <= gap).double().mean())
    # The law is that of many tosses, off by some tenths of a per cent here.
    assert abs(inside - 0.9) < 4 * math.sqrt(0.09 / draws) + 0.005


@pytest.mark.parametrize("seed", range(4))
def test_one_edge_between_two_graphs_moves_eigenvalues_by_no_more_than_the_bound(seed):
    first = networkx.barabasi_albert_graph(20, 2, seed=seed)
    second = networkx.erdos_renyi_graph(15, 0.4, seed=seed)
    both = networkx.disjoint_union(first, second)
    a, b = 3, 20 + max(networkx.node_connected_component(second, 0))
    degrees = [torch.tensor([both.degree(g) for g in both.neighbors(vertex)]) for vertex in (a, b)]

    bound = bounds.edge_perturbation(*degrees)

    before = torch.from_numpy(networkx.normalized_laplacian_matrix(both).toarray())
    both.add_edge(a, b)
    after = torch.from_numpy(networkx.normalized_laplacian_matrix(both).toarray())
    norm = float(torch.linalg.matrix_norm(after - before, 2))
    moved = (torch.linalg.eigvalsh(after) - torch.linalg.eigvalsh(before)).abs().max()
    assert float(moved) <= norm <= bound < 3 * norm


def test_the_norm_of_iterates_is_that_of_simulated_runs():
    eigenvalues = torch.linspace(0.1, 2.0, 300, dtype=torch.float64)
    settings = {"rate": 0.3, "num_steps": 40, "start": 0.5, "noise": 1.5}
    runs = quadratic.simulate(eigenvalues, num_paths=600, decay=0.5, **settings)

    for ends, moments in (
        (runs.iterate, quadratic.iterate(eigenvalues, **settings)),
        (runs.average, quadratic.average(eigenvalues, **settings)),
    ):
        norm = bounds.squared_norm(moments)
        squares = ends.square().sum(1)
        assert abs(float(squares.mean()) - norm.mean) < 4 * norm.stddev / math.sqrt(600)
        assert abs(float(squares.std()) / norm.stddev - 1) < 4 / math.sqrt(2 * 600)
        losses = 0.5 * (ends.square() @ eigenvalues)
        loss = bounds.expected_loss(moments, eigenvalues)
        assert abs(float(losses.mean()) - loss) < 4 * float(losses.std()) / math.sqrt(600)


def test_losses_of_iterate_and_average_are_the_limits_of_the_exact_ones():
    eigenvalues = torch.linspace(0.5, 3.0, 20, dtype=torch.float64)
    noise, n = torch.linspace(1, 2, 20, dtype=torch.float64), 10**6
    settings = {"rate": 0.2, "num_steps": n, "noise": noise}

    last = bounds.expected_loss(quadratic.iterate(eigenvalues, **settings), eigenvalues)
    mean = bounds.expected_loss(quadratic.average(eigenvalues, **settings), eigenvalues)

    assert bounds.iterate_loss(eigenvalues, noise=noise, rate=0.2) == pytest.approx(last)
    average = bounds.average_loss(eigenvalues, noise=noise, num_steps=n)
    assert average == pytest.approx(mean, rel=1e-4)


def test_rates_break_even_where_both_losses_are_equal():
    one = torch.full((3,), 2.0, dtype=torch.float64)
    # 2/((n + 2) lambda), the thesis's formula
    assert bounds.break_even_rate(one, num_steps=98) == pytest.approx(2 / (100 * 2.0))
    many = torch.tensor([0.01, 1.0, 5.0], dtype=torch.float64)
    rate = bounds.break_even_rate(many, num_steps=1000)
    loss = bounds.iterate_loss(many, noise=1.0, rate=rate)
    assert loss == pytest.approx(bounds.average_loss(many, noise=1.0, num_steps=1000))
    assert rate != pytest.approx(2 / 1002 * float((1 / many).mean()), rel=1e-3)


def test_averages_under_dependent_noise_have_the_variance_of_a_dense_recursion():
    n, rate, eigenvalue, correlation = 3000, 0.5, 1.0, 0.8
    lags = torch.arange(60, dtype=torch.float64)
    covariances = correlation**lags

    variance = bounds.dependent_average_variance(covariances, eigenvalue=eigenvalue, num_steps=n)

    # The average is sum_t c_t xi_t with c_t = alpha/n sum_{m < n - t} phi^m
    phi = 1 - rate * eigenvalue
    weights = rate / n * (1 - phi ** torch.arange(n, 0, -1).double()) / (1 - phi)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs().double()
    exact = float(weights @ torch.where(distance < 60, correlation**distance, 0.0) @ weights)
    assert variance == pytest.approx(exact, rel=5e-3)
    assert variance > 8 / n  # nine times that of independent noise, 1/n


@pytest.mark.parametrize("num_steps", [3, 30, 3000])
def test_losses_of_preconditioned_averages_stay_below_their_bounds(num_steps):
    d, rate = 6, 0.7
    H, noise = definite(d, 1), 0.1 * definite(d, 2)
    values, vectors = torch.linalg.eigh(H)
    start = random(d, seed=5)
    for power in (0.5, 1.0):  # B at least alpha H: Adam's square root, and Newton's
        B = (vectors * values**power) @ vectors.T * (20.0 ** (1 - power))
        step = torch.eye(d, dtype=torch.float64) - rate * torch.linalg.solve(B, H)
        kick = rate * torch.linalg.inv(B)
        # State (w, sum of w), from w_0
        w, total = start.clone(), start.clone()
        effects = []
        for _ in range(num_steps):
            w = step @ w
            total = total + w
        # Noise of the step t enters the average as sum_m step^m kick.
        sums, power_of_step = torch.zeros_like(step), torch.eye(d, dtype=torch.float64)
        covariance = torch.zeros_like(step)
        last = torch.zeros_like(step)
        for _ in range(num_steps):
            last = last + power_of_step @ kick @ noise @ kick.T @ power_of_step.T
            sums = sums + power_of_step
            power_of_step = step @ power_of_step
            effects = sums @ kick
            covariance = covariance + effects @ noise @ effects.T
        count = num_steps + 1
        mean = total / count
        exact = 0.5 * float(mean @ H @ mean + (H @ covariance).trace() / count**2)

        bound = bounds.preconditioned_average_loss(
            H, preconditioner=B, noise=noise, start=start, rate=rate, num_steps=num_steps
        )

        assert exact <= bound
        stationary = 0.5 * float((H @ last).trace())
        limit = bounds.preconditioned_iterate_loss(B, noise=noise, rate=rate)
        assert stationary <= limit
        if num_steps == 3000:
            assert stationary > limit / 2  # so that a quarter, as printed, is no bound


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_the_regret_of_sgd_is_bounded_at_the_rate_that_is_called_optimal(noise):
    eigenvalues = torch.linspace(0.01, 1.0, 50, dtype=torch.float64)
    T, distance = 200, math.sqrt(50) * 0.4
    settings = {"distance": distance, "noise": noise, "num_steps": T}
    rate = bounds.optimal_rate(smoothness=1.0, **settings)

    moments = quadratic.average(eigenvalues, rate=rate, num_steps=T, start=0.4, noise=noise**2 / 50)

    bound = bounds.regret(rate=rate, **settings)
    assert bounds.expected_loss(moments, eigenvalues) <= bound
    assert bound <= distance**2 / (2 * T) + 1.5 * noise * distance / math.sqrt(T)
    best = min(bounds.regret(rate=r, **settings) for r in torch.logspace(-4, 0, 400).tolist())
    assert bound <= 2.5 * best


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bounds.lanczos_error(1, 2, 0, num_steps=2, overlap=1.0), "must descend"),
        (lambda: bounds.lanczos_error(2, 1, 0, num_steps=2, overlap=0.0), "overlap must be"),
        (lambda: bounds.power_error(2, 1, -3, num_steps=2, overlap=0.5), "largest must exceed"),
        (lambda: bounds.krylov_factors(0.5, num_steps=2), "gap must be at least 1, got 0.5"),
        (
            lambda: bounds.smoothing_bias(torch.ones(2), 2, kernel=MarchenkoPastur(ratio=1.0)),
            "kernel must have mean zero",
        ),
        (lambda: bounds.moment_correction(2, 5, bound=1.0, stddev=2.0), "stddev must be"),
        (lambda: bounds.probe_variance(5, condition=0.5), "condition must be at least 1"),
        (lambda: bounds.probes_needed(5, condition=2.0, rtol=0.0), "rtol must be between"),
        (lambda: bounds.entropy_concentration(0, degrees=1), "num_samples must be at least 1"),
        (
            lambda: bounds.edge_perturbation(torch.ones(0), torch.ones(1)),
            "first must be a tensor of deg",
        ),
        (lambda: bounds.iterate_loss(torch.ones(2), noise=1.0, rate=2.0), "rate must lie"),
        (lambda: bounds.average_loss(torch.zeros(2), noise=1.0, num_steps=3), "eigenvalues must"),
        (lambda: bounds.iterate_loss(torch.ones(2), noise=math.nan, rate=0.1), "noise must be fin"),
        (lambda: bounds.iterate_loss(torch.ones(2), noise=-1.0, rate=0.1), "noise must be at leas"),
        (lambda: bounds.break_even_rate(torch.ones(2), num_steps=2, noise=0.0), "noise must be po"),
        (
            lambda: bounds.break_even_rate(torch.tensor([1e-12, 1e12]).double(), num_steps=9),
            "eigenvalues must have a break-even rate between",
        ),
        (
            lambda: bounds.dependent_average_variance(torch.ones(2), eigenvalue=0.0, num_steps=3),
            "eigenvalue must be finite and above 0",
        ),
        (
            lambda: bounds.expected_loss(
                quadratic.iterate(torch.ones(2), rate=0.1, num_steps=2), torch.ones(1)
            ),
            r"eigenvalues must be \(2,\), got \(1,\)",
        ),
        (
            lambda: bounds.preconditioned_iterate_loss(-torch.eye(2), noise=torch.eye(2), rate=0.1),
            "preconditioner must be positive definite",
        ),
        (
            lambda: bounds.regret(distance=1.0, noise=1.0, rate=0.0, num_steps=2),
            "rate must be finite and above 0",
        ),
        (
            lambda: bounds.optimal_rate(smoothness=1.0, distance=0.0, noise=1.0, num_steps=2),
            "distance must be finite and above 0",
        ),
    ],
)
def test_wrong_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_bound_of_preconditioned_averages_is_refused_where_it_does_not_hold():
    H, B = torch.diag(torch.tensor([1.0, 4.0])), torch.diag(torch.tensor([1.0, 2.0]))
    rest = {"noise": torch.eye(2), "start": torch.ones(2), "num_steps": 3}

    assert bounds.preconditioned_average_loss(H, preconditioner=B, rate=0.5, **rest) > 0
    with pytest.raises(ValueError, match=r"rate must be at most 0\.5, where rate \* H <= B"):
        bounds.preconditioned_average_loss(H, preconditioner=B, rate=0.51, **rest)


# ------------------------------------------------------------------------------------------
# Noise of any covariance.
def factors(A):
    """Factors C of the noise with equal total variance: the roots of A and of its diagonal."""
    values, vectors = torch.linalg.eigh(A)
    return (vectors * values.sqrt()) @ vectors.T, A.diagonal().sqrt().diag()


def test_the_cost_of_noise_is_the_frobenius_norm_of_the_matrix_or_of_its_diagonal():
    A = definite(8, 3)
    full, diagonal = factors(A)

    torch.testing.assert_close((full.T @ full).trace(), (diagonal.T @ diagonal).trace())
    assert diffusion.noise_cost(A, full) == pytest.approx(float(A.square().sum()))
    assert diffusion.noise_cost(A, diagonal) == pytest.approx(float(A.diagonal().square().sum()))


@pytest.mark.parametrize("which", [0, 1])
def test_losses_under_decaying_rates_follow_the_recursion_and_stay_below_theorem_4_1(which):
    A, start, steps, paths = definite(5, 4, condition=6.0), random(5, seed=1), 400, 4000
    C = factors(A)[which]
    rates = diffusion.decaying_rates(A, num_steps=steps)

    losses = diffusion.expected_losses(A, C, start=start, rates=rates)

    assert float(rates[0]) == pytest.approx(1 / 6.0)
    for k in range(steps + 1):
        assert float(losses[k]) <= diffusion.loss_bound(A, C, start=start, step=k)
    ends = diffusion.simulate(A, C, start=start, rates=rates, num_paths=paths, generator=seeded(2))
    sampled = 0.5 * ((ends @ A) * ends).sum(1)
    assert abs(float(sampled.mean() - losses[-1])) < 4 * float(sampled.std()) / math.sqrt(paths)


def test_noise_of_the_diagonal_reaches_a_lower_loss_than_full_noise_at_a_constant_rate():
    A = definite(5, 4, condition=30.0)
    rates = [0.03] * 2000

    full, diagonal = (
        diffusion.expected_losses(A, C, start=torch.zeros(5), rates=rates)[-1] for C in factors(A)
    )

    assert float(diagonal) < float(full)


def test_small_steps_of_sgd_have_the_distribution_of_the_diffusion():
    A, C, start, rate, steps = (
        definite(4, 5, condition=8.0),
        random(4, 6),
        random(4, seed=3),
        1e-3,
        600,
    )
    gaussian = diffusion.ornstein_uhlenbeck(A, C, time=rate * steps, rate=rate, start=start)

    paths = 20_000
    ends = diffusion.simulate(A, C, start=start, rates=[rate] * steps, num_paths=paths)

    # Steps of 1e-3 times a largest eigenvalue of 8 differ from the flow by up to 1 %.
    spread = gaussian.covariance.diagonal().sqrt()
    assert bool(((ends.mean(0) - gaussian.mean).abs() < 4 * spread / math.sqrt(paths) + 5e-3).all())
    sampled, size = ends.T.cov(), spread[:, None] * spread
    limit = 4 * math.sqrt(2 / paths) + 0.01
    assert bool(((sampled - gaussian.covariance).abs() < limit * size).all())


def test_the_covariance_solves_the_equations_of_riccati_and_lyapunov():
    A, C, h = definite(4, 5), random(4, 2), 1e-5

    def covariance(time):
        return diffusion.ornstein_uhlenbeck(A, C, time=time, rate=0.3).covariance

    S = covariance(0.1)
    derivative = (covariance(0.1 + h) - covariance(0.1 - h)) / (2 * h)
    torch.testing.assert_close(derivative, 0.3 * C @ C.T - A @ S - S @ A, rtol=1e-6, atol=1e-6)
    S = covariance(math.inf)
    torch.testing.assert_close(A @ S + S @ A, 0.3 * C @ C.T)
    assert not bool(covariance(0.0).any())


def test_determinants_are_those_of_the_closed_forms():
    A, time, rate, d = definite(4, 7), 0.05, 0.2, 4
    values = torch.linalg.eigvalsh(A)
    inner = float((1 - torch.exp(-2 * values * time)).log().sum()) + d * math.log(rate / 2)
    one = torch.eye(d, dtype=torch.float64)

    full, plain, doubled = (
        diffusion.log_determinant(diffusion.ornstein_uhlenbeck(A, C, time=time, rate=rate))
        for C in (factors(A)[0], one, 2 * one)
    )

    assert full == pytest.approx(inner)
    assert plain == pytest.approx(inner - float(values.log().sum()))
    assert doubled == pytest.approx(plain + 2 * d * math.log(2))


def test_the_hellinger_distance_is_an_integral():
    first = diffusion.Gaussian(
        mean=torch.tensor([0.0, 0.5]).double(), covariance=definite(2, 1, condition=3.0)
    )
    second = diffusion.Gaussian(
        mean=torch.tensor([1.0, 0.0]).double(), covariance=definite(2, 8, condition=2.0)
    )

    axis = torch.linspace(-14, 14, 600, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)

    def pdf(gaussian):
        normal = torch.distributions.MultivariateNormal(gaussian.mean, gaussian.covariance)
        return normal.log_prob(points).exp()

    cell = float(axis[1] - axis[0]) ** 2
    exact = 0.5 * cell * float((pdf(first).sqrt() - pdf(second).sqrt()).square().sum())
    assert diffusion.hellinger(first, second) == pytest.approx(exact, rel=1e-9)
    assert diffusion.hellinger(first, first) == 0
    # As the noise vanishes, the distance of different means tends to one.
    small = [
        diffusion.hellinger(
            diffusion.Gaussian(mean=first.mean, covariance=s * first.covariance),
            diffusion.Gaussian(mean=second.mean, covariance=s * second.covariance),
        )
        for s in (1.0, 0.1, 0.001)
    ]
    assert small[0] < small[1] < small[2] <= 1
    assert small[2] == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: diffusion.noise_cost(-torch.eye(2), torch.eye(2)), "curvature must be positive"),
        (
            lambda: diffusion.noise_cost(torch.ones(2, 3), torch.eye(2)),
            "curvature must be .d, d., got",
        ),
        (lambda: diffusion.noise_cost(torch.eye(2), torch.eye(3)), r"factor must be \(2, r\)"),
        (
            lambda: diffusion.ornstein_uhlenbeck(torch.eye(2), torch.eye(2), time=-1.0),
            "time must be at least 0",
        ),
        (lambda: diffusion.decaying_rates(torch.eye(2), num_steps=0), "num_steps must be"),
        (
            lambda: diffusion.decaying_rates(torch.eye(2), num_steps=2, offset=1.0),
            "offset must be at least",
        ),
        (
            lambda: diffusion.loss_bound(
                torch.eye(2), torch.eye(2), start=torch.ones(2), step=3, offset=0.5
            ),
            "offset must be at least",
        ),
        (
            lambda: diffusion.expected_losses(
                torch.eye(2), torch.eye(2), start=torch.ones(3), rates=[0.1]
            ),
            r"start must be \(2,\), got \(3,\)",
        ),
        (
            lambda: diffusion.simulate(
                torch.eye(2), torch.eye(2), start=torch.ones(2), rates=[math.nan], num_paths=2
            ),
            "rates must be finite",
        ),
        (
            lambda: diffusion.hellinger(
                *[diffusion.ornstein_uhlenbeck(torch.eye(2), torch.eye(2), time=0.0)] * 2
            ),
            "first must have a positive definite covariance",
        ),
    ],
)
def test_wrong_arguments_of_the_diffusion_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
