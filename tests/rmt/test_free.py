"""Transforms and free convolutions against closed forms and sampled matrices."""

import math

import pytest
import torch
from matrices import seeded

import ritz
from ritz.rmt import (
    MarchenkoPastur,
    Normal,
    Semicircle,
    TracyWidom,
    blue,
    free_product,
    free_sum,
    generalized_marchenko_pastur,
    r_transform,
    s_transform,
    stieltjes,
)
from ritz.testing import wigner, wishart, with_spectrum


def grid(low, high, count=40):
    return torch.linspace(low, high, count, dtype=torch.float64)


def distance(law, eigenvalues):
    values = eigenvalues.sort().values
    levels = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    return float((law.cdf(values) - levels).abs().max())


def test_transforms_of_closed_form_laws():
    g = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64)
    law = MarchenkoPastur(ratio=0.5, scale=2.0)

    torch.testing.assert_close(r_transform(Semicircle(mean=1.0, variance=2.0), g), 1 + 2 * g)
    torch.testing.assert_close(r_transform(law, g), 2 / (1 - g), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(s_transform(law, g), 1 / (2 * (1 + 0.5 * g)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", [1, -1])
def test_blue_inverts_stieltjes_of_a_spectrum(side):
    values = torch.randn(50, dtype=torch.float64, generator=seeded(1))
    z = side * torch.tensor([4.0, 7.0, 100.0], dtype=torch.float64)

    g = stieltjes(values, z)

    torch.testing.assert_close(g.real, (1 / (z[:, None] - values)).mean(1))
    torch.testing.assert_close(blue(values, g.real), z, rtol=1e-11, atol=0)


def test_spectra_densities_and_eigenvalues_have_the_same_transforms():
    op = with_spectrum(torch.linspace(1, 2, 30, dtype=torch.float64), generator=seeded(0))
    spectrum = ritz.lanczos(op, num_steps=30)
    discrete = ritz.density(op, num_probes=1, num_steps=30)
    z = torch.tensor([3.0 + 0.1j, 0.0j, 1.5 + 1j], dtype=torch.complex128)

    expected = (spectrum.weights / (z[:, None] - spectrum.values)).sum(1)

    torch.testing.assert_close(stieltjes(spectrum, z), expected)
    nodes = (discrete.weights / (z[:, None, None] - discrete.nodes)).sum((1, 2))
    torch.testing.assert_close(stieltjes(discrete, z), nodes)
    smooth = discrete.smoothed(0.3)
    moments = [smooth.moment(k) for k in range(8)]
    far = torch.tensor(60.0, dtype=torch.float64)
    series = sum(moment / 60.0 ** (k + 1) for k, moment in enumerate(moments))
    assert float(stieltjes(smooth, far).real) == pytest.approx(series, rel=1e-8)


def test_semicircles_add_variances_and_means():
    law = free_sum(Semicircle(mean=-1.0, variance=1.0), Semicircle(mean=2.0, variance=2.0))
    exact, x = Semicircle(mean=1.0, variance=3.0), grid(-2.5, 4.5)

    assert law.status.outcome == "converged"
    torch.testing.assert_close(law.pdf(x), exact.pdf(x), rtol=0, atol=1e-11)
    torch.testing.assert_close(law.cdf(x), exact.cdf(x), rtol=0, atol=1e-11)
    assert law.support == pytest.approx(exact.support, abs=1e-9)


def test_two_reflections_add_to_the_arcsine_law():
    signs = torch.tensor([-1.0, 1.0])

    law = free_sum(signs, signs)

    x = grid(-1.99, 1.99)
    assert law.status.outcome == "converged"
    torch.testing.assert_close(law.cdf(x), 0.5 + torch.asin(x / 2) / math.pi, rtol=0, atol=1e-8)


def test_marchenko_pastur_laws_of_one_ratio_add():
    # R is s/(1 - s q g): with q and s such that s q is equal, means add.
    first, second = MarchenkoPastur(ratio=0.5), MarchenkoPastur(ratio=0.25, scale=2.0)
    exact = MarchenkoPastur(ratio=0.5 / 3, scale=3.0)
    x = grid(*exact.edges)

    law = free_sum(first, second)

    torch.testing.assert_close(law.cdf(x), exact.cdf(x), rtol=0, atol=1e-10)


def test_free_sums_add_r_transforms_and_products_multiply_s_transforms():
    first, second = MarchenkoPastur(ratio=0.5), torch.tensor([1.0, 2.0, 4.0])
    g = torch.tensor([0.05, -0.2], dtype=torch.float64)

    added, multiplied = free_sum(first, second), free_product(first, second)

    both = r_transform(first, g) + r_transform(second, g)
    torch.testing.assert_close(r_transform(added, g), both, rtol=1e-6, atol=0)
    both = s_transform(first, g) * s_transform(second, g)
    torch.testing.assert_close(s_transform(multiplied, g), both, rtol=1e-6, atol=0)


def test_masses_of_free_sums_and_products_are_those_that_must_meet():
    first, second = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 2.0])

    added, multiplied = free_sum(first, second), free_product(first, second)

    # 3/4 + 2/3 - 1 at 0 and 3/4 + 1/3 - 1 at 2; the product has the larger kernel, 3/4
    torch.testing.assert_close(added.atoms.points, torch.tensor([0.0, 2.0]).double())
    torch.testing.assert_close(added.atoms.masses, torch.tensor([5 / 12, 1 / 12]).double())
    assert multiplied.atoms.points.tolist() == [0.0]
    assert multiplied.atoms.masses.tolist() == [0.75]
    for law, mean in ((added, 0.25 + 2 / 3), (multiplied, 0.25 * 2 / 3)):
        assert law.status.outcome == "converged"
        assert law.moment(1) == pytest.approx(mean, abs=1e-8)


def test_constants_shift_and_scale():
    law, two = MarchenkoPastur(ratio=0.5), torch.tensor([2.0])
    x = grid(0.1, 6.0)

    torch.testing.assert_close(free_sum(law, two).cdf(x), law.cdf(x - 2), rtol=0, atol=1e-9)
    torch.testing.assert_close(free_product(law, two).cdf(x), law.cdf(x / 2), rtol=0, atol=1e-9)


def test_a_uniform_population_is_marchenko_pastur():
    law = generalized_marchenko_pastur(torch.ones(5), ratio=2.0)
    exact, x = MarchenkoPastur(ratio=2.0), grid(0, 7)

    torch.testing.assert_close(law.cdf(x), exact.cdf(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("q", [0.1, 3.0])
def test_moments_of_sample_covariances_are_those_of_the_population_law(q):
    population = torch.tensor([1.0, 3.0, 10.0, 0.5], dtype=torch.float64)

    law = generalized_marchenko_pastur(population, ratio=q)

    h1, h2, h3 = (float(population.pow(k).mean()) for k in (1, 2, 3))
    # Silverstein and Bai (2010), Lemma 3.1 for three moments
    assert law.moment(1) == pytest.approx(h1, rel=1e-8)
    assert law.moment(2) == pytest.approx(h2 + q * h1**2, rel=1e-8)
    assert law.moment(3) == pytest.approx(h3 + 3 * q * h1 * h2 + q**2 * h1**3, rel=1e-8)


def test_a_diagonal_plus_a_wigner_matrix_follows_the_free_sum():
    n = 500
    points = torch.linspace(-2, 2, 10, dtype=torch.float64)
    diagonal = points.repeat(n // 10)

    law = free_sum(Semicircle(), points)

    drawn = torch.linalg.eigvalsh(wigner(n).matrix + torch.diag(diagonal))
    assert distance(law, drawn) < 8 / n


def test_a_product_of_sample_covariances_follows_the_free_product():
    n = 400
    a = wishart(n, 2 * n, generator=seeded(1)).matrix
    factor = torch.linalg.cholesky(wishart(n, 3 * n, generator=seeded(2)).matrix)

    law = free_product(MarchenkoPastur(ratio=1 / 2), MarchenkoPastur(ratio=1 / 3))

    drawn = torch.linalg.eigvalsh(factor.T @ a @ factor)
    assert distance(law, drawn) < 8 / n


def test_the_laplacian_of_a_random_graph_is_a_semicircle_plus_a_normal_law():
    n, p = 600, 0.3
    draws = torch.rand(n, n, dtype=torch.float64, generator=seeded(3))
    adjacency = (draws.triu(1) < p).double()
    adjacency = (adjacency.triu(1)) + adjacency.triu(1).T
    laplacian = torch.diag(adjacency.sum(1)) - adjacency
    scale = math.sqrt(n * p * (1 - p))

    law = free_sum(Semicircle(), Normal())

    # One eigenvalue is 0; the degrees are one draw of n numbers from their law.
    drawn = (torch.linalg.eigvalsh(laplacian)[1:] - n * p) / scale
    assert distance(law, drawn) < 1.95 / math.sqrt(n)


def test_a_smooth_law_without_a_closed_transform_becomes_a_short_series():
    law, n = TracyWidom(beta=1), 400
    x, z = grid(-4.0, 3.0, 9), torch.tensor([0.3 + 0.4j, -2.0 - 0.2j], dtype=torch.complex128)

    # On the real line -Im G / pi is the density, and off it G is an integral.
    torch.testing.assert_close(-stieltjes(law, x).imag / math.pi, law.pdf(x), rtol=0, atol=1e-11)
    nodes = grid(-8.5, 13.5, 100_001)
    integral = torch.trapezoid(law.pdf(nodes) / (z[:, None] - nodes), nodes)
    torch.testing.assert_close(stieltjes(law, z), integral, rtol=0, atol=1e-10)

    total = free_sum(Semicircle(), law)

    assert total.status.outcome == "converged"
    # Means, variances and third central moments are free cumulants: they add.
    shifted = [sum(math.comb(3, k) * one.moment(k) * (-one.moment(1)) ** (3 - k) for k in range(4))
               for one in (total, law)]  # fmt: skip
    assert shifted[0] == pytest.approx(shifted[1], abs=1e-8)
    drawn = torch.diag(law.ppf((torch.arange(n) + 0.5) / n)) + wigner(n, generator=seeded(4)).matrix
    assert distance(total, torch.linalg.eigvalsh(drawn)) < 4 / n


def test_a_density_with_an_edge_is_a_rule_of_many_points():
    flat = ritz.rmt.Semicircle()

    class Uniform:
        support, atoms = (0.0, 1.0), flat.atoms

        def pdf(self, x):
            return ((x > 0) & (x < 1)).double()

        def cdf(self, x):
            return x.clamp(0, 1)

        def moment(self, degree):
            return 1 / (degree + 1)

        def mass(self, low, high):
            return min(high, 1.0) - max(low, 0.0)

    z = torch.tensor(0.5 + 0.2j, dtype=torch.complex128)
    exact = torch.log(z / (z - 1))
    torch.testing.assert_close(stieltjes(Uniform(), z), exact, rtol=0, atol=1e-8)


def test_a_free_law_is_a_part_of_another():
    inner = free_sum(Semicircle(variance=0.5), Semicircle(variance=0.5))

    law = free_sum(inner, Semicircle(variance=2.0))

    exact, x = Semicircle(variance=3.0), grid(-3.4, 3.4)
    torch.testing.assert_close(law.cdf(x), exact.cdf(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_factors_of_opposite_sizes_have_the_product_of_factors_of_one_size(scale):
    point = torch.tensor([scale], dtype=torch.float64)

    law = free_product(point, MarchenkoPastur(ratio=0.5, scale=1 / scale))

    exact = MarchenkoPastur(ratio=0.5)
    assert law.status.ok
    assert law.support == pytest.approx(exact.support, abs=1e-9)
    x = grid(0.0, 3.0)
    torch.testing.assert_close(law.cdf(x), exact.cdf(x), rtol=0, atol=1e-11)


def test_roundoff_in_a_wide_gap_is_no_band():
    law = free_sum(torch.tensor([0.0, 100.0]), Semicircle(variance=1e-4))

    assert len(law.bands) == 2


def test_bands_narrower_than_the_search_are_reported():
    # Two bands, of widths 1e-4 and 10 at 1 and 1e5
    law = generalized_marchenko_pastur(torch.tensor([1.0, 1e5]), ratio=1e-8)

    assert law.status.outcome == "uncertain"
    assert "narrower" in law.status.advice
    assert "missing mass" in str(law)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: free_product(Semicircle(), MarchenkoPastur(ratio=1.0)), "first must have"),
        (lambda: free_product(torch.ones(2), torch.zeros(2)), "second must have positive"),
        (lambda: free_sum(torch.tensor([math.nan]), Semicircle()), "first must be finite"),
        (lambda: stieltjes(torch.tensor([]), 1j), "measure must have at least one eigenvalue"),
        (lambda: blue(Semicircle(), 1.5), "g must be a value that the transform takes"),
        (lambda: blue(Semicircle(), 0.0), "g must be a value that the transform takes"),
        (lambda: s_transform(Semicircle(), 0.1), "measure must have positive and no neg"),
        (lambda: s_transform(MarchenkoPastur(ratio=2.0), -0.6), "y must be a value"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_a_measure_of_a_wrong_type_is_named():
    with pytest.raises(
        TypeError,
        match="measure must be a tensor of eigenvalues, a Spectrum, a law or a density, got list",
    ):
        stieltjes([1.0, 2.0], 1j)
