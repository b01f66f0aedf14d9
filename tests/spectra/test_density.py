import math
from dataclasses import replace

import networkx
import pytest
import torch
from matrices import PRECISIONS, seeded

import ritz
from ritz import Density, Estimate, density, maxent, rmt
from ritz.operators import DenseOperator, FunctionOperator
from ritz.spectra import Moments, PolynomialDensity
from ritz.testing import wigner, with_spectrum

EIGENVALUES = torch.cat(
    [torch.linspace(-1, 1, 180, dtype=torch.float64), torch.tensor([3.0, 5.0]).double()]
)


def op(dtype=torch.float64):
    return with_spectrum(EIGENVALUES.to(dtype), generator=seeded(0))


def exact_cdf(x):
    return (EIGENVALUES[:, None] <= x).double().mean(0)


@pytest.fixture(scope="module")
def discrete():
    return density(op(), num_probes=12, num_steps=60)


@pytest.fixture(scope="module")
def polynomial():
    return density(op(), num_probes=12, num_steps=30, method="kpm")


@pytest.mark.parametrize("degree", range(6))
def test_the_moments_of_a_discrete_density_are_those_of_the_matrix(discrete, degree):
    samples = (discrete.weights * discrete.nodes**degree).sum(1)
    error = samples.std() / len(samples) ** 0.5
    exact = EIGENVALUES.pow(degree).mean()
    assert abs(discrete.moment(degree) - exact) <= 4 * error + 1e-12
    assert discrete.moment(degree) == pytest.approx(float(samples.mean()))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("mode", ["full", "partial", "none"])
def test_the_interval_of_the_cdf_contains_the_exact_histogram(dtype, mode):
    found = density(op(dtype), num_probes=24, num_steps=60, reorthogonalize=mode)
    x = torch.tensor([-1.5, -0.75, -0.25, 0.33, 0.75, 2.0, 4.0, 6.0], dtype=torch.float64)
    low, high = found.cdf_interval(x, level=0.9999)
    resolution = 0.02  # half a Gauss weight of the bulk: 60 nodes share it
    assert bool((exact_cdf(x) >= low - resolution).all())
    assert bool((exact_cdf(x) <= high + resolution).all())
    torch.testing.assert_close(found.cdf(x), (low + high) / 2)


def test_the_cdf_includes_the_mass_at_the_point(discrete):
    node = discrete.nodes.max()
    below, at = discrete.cdf(torch.stack([node - 1e-9, node]))
    assert at == pytest.approx(1.0, abs=1e-12)
    assert below < 1.0
    assert discrete.cdf(torch.tensor([[-9.0, 9.0]])).shape == (1, 2)


def test_masses_add_up_and_leave_out_their_lower_end(discrete):
    parts = [discrete.mass(-math.inf, -0.3), discrete.mass(-0.3, 2.0), discrete.mass(2.0, math.inf)]
    assert sum(parts) == pytest.approx(1.0)
    node = float(discrete.nodes[0, -1])
    assert discrete.mass(node, node) == 0.0


@pytest.mark.parametrize("ends", [(2.0, 0.0), (0.0, math.nan)])
def test_the_mass_of_a_reversed_interval_is_refused(ends, discrete):
    entropic = maxent(torch.tensor([1.0, 0.0]), interval=(-1.0, 1.0))
    for each in (discrete, rmt.Semicircle(), entropic):
        with pytest.raises(ValueError, match="low must be at most high, got"):
            each.mass(*ends)


def test_outliers_are_found_with_their_mass(discrete):
    assert discrete.support == pytest.approx((-1.0, 5.0), abs=1e-8)
    assert discrete.mass(4.9, 5.1) == pytest.approx(1 / 182, rel=0.9)


def test_the_products_reported_are_those_spent():
    calls = []

    def product(block):
        calls.append(block.shape[1])
        return 2.0 * block

    found = density(FunctionOperator(product, n=90, dtype=torch.float64), num_probes=5)
    assert found.num_products == sum(calls) == 5


@pytest.mark.parametrize("method", ["lanczos", "kpm"])
def test_the_default_number_of_steps_suits_small_matrices_too(method):
    assert density(torch.eye(3), method=method).moment(1) == pytest.approx(1.0)


def test_one_probe_is_allowed_and_has_no_interval():
    found = density(op(), num_probes=1, num_steps=20)
    x = torch.zeros(2, dtype=torch.float64)
    assert found.cdf(x).isfinite().all()
    assert torch.cat(found.cdf_interval(x)).isnan().all()
    assert torch.cat(found.smoothed(0.1).pdf_interval(x)).isnan().all()


def test_a_discrete_density_has_no_pdf(discrete):
    with pytest.raises(TypeError, match=r"use .smoothed\(width\) first"):
        discrete.pdf(torch.zeros(1))


def integral(found, degree):
    """Integrate the pdf times a power, in the angle because the ends may be singular."""
    low, high = found.support
    angles = (torch.arange(4000, dtype=torch.float64) + 0.5) * (math.pi / 4000)
    x = (low + high) / 2 + (high - low) / 2 * angles.cos()
    jacobian = (high - low) / 2 * angles.sin() * math.pi
    return float((found.pdf(x) * x**degree * jacobian).mean())


def check_is_a_density(found, points):
    low, high = found.support
    assert integral(found, 0) == pytest.approx(1.0, abs=2e-6)
    step = 1e-6 * (high - low)
    slope = (found.cdf(points + step) - found.cdf(points - step)) / (2 * step)
    torch.testing.assert_close(found.pdf(points), slope, rtol=1e-4, atol=1e-5)
    ends = found.cdf(torch.tensor([low, high], dtype=torch.float64))
    torch.testing.assert_close(
        ends, torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-6
    )
    assert found.mass(low, float(points[1])) == pytest.approx(float(found.cdf(points)[1]), abs=1e-6)
    assert isinstance(found, Density)


POINTS = torch.tensor([-0.9, -0.2, 0.5, 1.1, 2.9, 4.8], dtype=torch.float64)


def test_a_smoothed_density_integrates_to_one_and_is_the_slope_of_its_cdf(discrete):
    check_is_a_density(discrete.smoothed(0.1), POINTS)


def test_a_polynomial_density_integrates_to_one_and_is_the_slope_of_its_cdf(polynomial):
    check_is_a_density(polynomial, POINTS)


def test_an_interval_is_that_of_an_estimate_of_the_samples(discrete, polynomial):
    for found in (discrete.smoothed(0.1), polynomial):
        for samples, interval in (
            (found.pdf_samples(POINTS), found.pdf_interval),
            (found.cdf_samples(POINTS), found.cdf_interval),
        ):
            estimate = Estimate.of(samples, method="", num_products=0)
            for level in (0.5, 0.95):
                torch.testing.assert_close(interval(POINTS, level=level), estimate.interval(level))


@pytest.mark.parametrize(("num_probes", "probe"), [(3, "gaussian"), (8, "rademacher")])
def test_intervals_contain_the_smoothed_density(num_probes, probe):
    values = torch.cat([torch.linspace(0, 1, 37, dtype=torch.float64), EIGENVALUES[-3:]])
    width, count = 0.15, 120 * num_probes
    matrix = with_spectrum(values, generator=seeded(1))
    every = density(matrix, num_probes=count, num_steps=25, probe=probe)
    x = torch.linspace(float(values.min()), float(values.max()), 9, dtype=torch.float64)
    exact = torch.distributions.Normal(values, width)
    pdf, cdf = exact.log_prob(x[:, None]).exp().mean(1), exact.cdf(x[:, None]).mean(1)

    hits = torch.zeros(2)
    for first in range(0, count, num_probes):
        rows = slice(first, first + num_probes)
        few = replace(every, nodes=every.nodes[rows], weights=every.weights[rows]).smoothed(width)
        for kind, interval, truth in ((0, few.pdf_interval, pdf), (1, few.cdf_interval, cdf)):
            low, high = interval(x)
            inside = (truth >= low - 1e-9) & (truth <= high + 1e-9)
            hits[kind] += inside.double().mean() * num_probes / count

    assert float(hits.min()) >= 0.95


def test_a_density_of_exact_moments_has_no_error():
    matrix = torch.diag(EIGENVALUES[-12:])
    exact = density(matrix, num_probes=16, num_steps=10, method="kpm")
    low, high = exact.pdf_interval(POINTS)
    assert len(exact.moments.samples) > 1
    torch.testing.assert_close(low, high, rtol=0, atol=0)
    torch.testing.assert_close(low, exact.pdf(POINTS))


@pytest.mark.parametrize("degree", range(7))
def test_smoothing_biases_a_moment_by_theorem_2(discrete, degree):
    smoothed = discrete.smoothed(0.3)
    low, high = smoothed.support
    x = torch.linspace(low - 1, high + 1, 40_001, dtype=torch.float64)
    numeric = torch.trapezoid(smoothed.pdf(x) * x**degree, x)
    assert smoothed.moment(degree) == pytest.approx(float(numeric), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("degree", range(5))
def test_the_moments_of_a_polynomial_density_are_those_of_its_pdf(polynomial, degree):
    assert polynomial.moment(degree) == pytest.approx(integral(polynomial, degree), rel=1e-9)


def test_a_smoothed_density_is_a_mixture_of_gaussians(discrete):
    found = discrete.smoothed(0.2)
    normal = torch.distributions.Normal(discrete.nodes, 0.2)
    expected = [(normal.log_prob(x).exp() * discrete.weights).sum() / 12 for x in POINTS]
    torch.testing.assert_close(found.pdf(POINTS), torch.stack(expected))


def test_the_default_width_is_the_spacing_of_ritz_values(discrete):
    low, high = discrete.support
    assert discrete.smoothed().width == pytest.approx((high - low) / 60)
    assert density(op(), num_probes=2, num_steps=20, width=0.25).width == 0.25


def point_moments(t, count, interval=(-1.0, 1.0)):
    degrees = torch.arange(count, dtype=torch.float64)
    values = torch.cos(degrees * math.acos(t))[None]
    status = density(torch.eye(3), num_steps=2, method="kpm").moments.status
    return Moments(
        mean=values[0],
        stderr=torch.zeros(count),
        samples=values,
        basis="chebyshev",
        interval=interval,
        num_products=0,
        status=status,
        seed=0,
    )


@pytest.mark.parametrize("t", [-0.999, -0.3, 0.0, 0.8])
def test_jacksons_kernel_keeps_a_point_positive_and_as_wide_as_stated(t):
    found = PolynomialDensity(moments=point_moments(t, 100), dimension=1)
    x = torch.linspace(-0.9999, 0.9999, 2001, dtype=torch.float64)
    assert found.pdf(x).min() > -1e-12
    assert bool((found.cdf(x).diff() > -1e-12).all())
    if t == 0.0:
        assert math.sqrt(found.moment(2)) == pytest.approx(found.width, rel=0.02)


def test_a_polynomial_density_is_zero_outside_its_interval(polynomial):
    low, high = polynomial.support
    ends = torch.tensor([low - 1, low, high, high + 1], dtype=torch.float64)
    assert polynomial.pdf(ends).tolist() == [0.0] * 4
    torch.testing.assert_close(
        polynomial.cdf(ends), torch.tensor([0.0, 0, 1, 1], dtype=torch.float64)
    )


@pytest.mark.parametrize("method", ["lanczos", "kpm"])
def test_a_wigner_matrix_has_the_semicircle(method):
    found = density(wigner(800), num_probes=8, num_steps=30, method=method)
    x = torch.linspace(-1.9, 1.9, 9, dtype=torch.float64)
    exact = 0.5 + (x * (4 - x**2).sqrt() / 4 + torch.asin(x / 2)) / math.pi
    assert (found.cdf(x) - exact).abs().max() < 0.03


def test_a_graph_agrees_with_networkx():
    graph = networkx.connected_watts_strogatz_graph(150, 6, 0.3, seed=1)
    laplacian = networkx.normalized_laplacian_matrix(graph)
    spectrum = torch.from_numpy(networkx.normalized_laplacian_spectrum(graph))
    found = density(laplacian, num_probes=20, num_steps=60)
    x = torch.linspace(0.2, 1.7, 7, dtype=torch.float64)
    low, high = found.cdf_interval(x, level=0.9999)
    exact = (spectrum[:, None] <= x).double().mean(0)
    assert bool(((exact > low - 0.02) & (exact < high + 0.02)).all())


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("method", ["lanczos", "kpm"])
@pytest.mark.parametrize("matrix", [torch.zeros(4, 4), torch.eye(4), torch.full((1, 1), -2.0)])
def test_a_spectrum_of_one_point_is_a_point(matrix, method, dtype):
    value = float(matrix[0, 0])
    found = density(matrix.to(dtype), num_probes=3, num_steps=1, method=method)
    if method == "lanczos":
        assert found.mass(value - 1e-5, value + 1e-5) == 1.0
        assert "negative mass 0" in str(found) or value < 0
        assert found.smoothed().pdf(torch.tensor(value)) > 0
    assert found.moment(1) == pytest.approx(value, abs=1e-5)


def test_a_density_prints_its_settings(discrete, polynomial):
    assert str(discrete).startswith("DiscreteDensity of order 182 on [-1, 5] from 12 probes x 60")
    assert str(discrete.smoothed(0.5)).endswith("smoothed by a Gaussian of width 0.5")
    assert str(polynomial).startswith("PolynomialDensity of order 182, width ")


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"num_steps": 4}, "num_steps must be between 1 and 3"),
        ({"num_probes": 0}, "num_probes must be at least 1"),
        ({"method": "kpm", "num_probes": 1}, "num_probes must be at least 2"),
        ({"method": "kpm", "width": 0.1}, "width needs method='lanczos', got 0.1"),
        ({"method": "histogram"}, "method must be one of"),
        ({"width": 0.0}, "width must be finite and above 0"),
        ({"width": -1.0}, "width must be finite and above 0"),
        ({"block_size": 0}, "block_size must be at least"),
        ({"reorthogonalize": "maybe"}, "reorthogonalize must be one of"),
    ],
)
def test_misuse_names_the_argument(bad, match):
    with pytest.raises(ValueError, match=match):
        density(torch.eye(3), **({"num_steps": 2} | bad))


@pytest.mark.parametrize("method", ["lanczos", "kpm"])
def test_a_density_names_its_matrix_and_mode(method, tmp_path):
    op = DenseOperator(torch.diag(torch.arange(1.0, 21.0)))
    op.origin = {"matrix": "hessian", "batch_norm": "eval"}
    found = ritz.density(op, method=method, num_probes=2, num_steps=10)
    ritz.save(found, tmp_path / "density")
    again = ritz.load(tmp_path / "density")
    assert (again.matrix, again.batch_norm) == ("hessian", "eval")
    assert ritz.maxent(ritz.moments(op, num_moments=6)).matrix == "hessian"
    if method == "lanczos":
        assert found.smoothed().matrix == "hessian"
