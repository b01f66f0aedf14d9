"""Laws against integrals of their densities, published figures and sampled matrices."""

import math

import pytest
import torch
from matrices import seeded
from numpy.polynomial.legendre import leggauss

import ritz
from ritz.rmt import (
    MarchenkoPastur,
    Normal,
    Semicircle,
    TracyWidom,
    additive_spikes,
    generalized_marchenko_pastur,
    stieltjes,
)
from ritz.spectra import Density, maxent
from ritz.testing import spiked_wishart, wigner, wishart

LAWS = {
    "semicircle": Semicircle(mean=1.0, variance=3.0),
    "normal": Normal(mean=-1.0, variance=2.0),
    "marchenko-pastur": MarchenkoPastur(ratio=0.3, scale=2.0),
    "singular edge": MarchenkoPastur(ratio=1.0),
    "with an atom": MarchenkoPastur(ratio=4.0),
    "nearly a point": MarchenkoPastur(ratio=1e-6),
    "tracy-widom 1": TracyWidom(beta=1),
    "tracy-widom 2": TracyWidom(beta=2),
    "free": generalized_marchenko_pastur(torch.tensor([1.0, 3.0, 10.0]), ratio=0.1),
}


@pytest.fixture(params=LAWS.values(), ids=LAWS.keys())
def law(request):
    return request.param


def rule(low, high, count=400):
    """A quadrature for densities with roots at the ends: Gauss-Legendre in the angle."""
    nodes, weights = (torch.from_numpy(array) for array in leggauss(count))
    f = math.pi / 2 * (nodes + 1)
    half = 0.5 * (high - low)
    return low + half * (1 - torch.cos(f)), math.pi / 2 * weights * half * torch.sin(f)


def pieces(law):
    if isinstance(law, MarchenkoPastur):
        return [law.edges]
    return [(band.low, band.high) for band in getattr(law, "bands", ())] or [law.support]


def distance(law, eigenvalues):
    """Kolmogorov-Smirnov distance, for eigenvalues away from atoms."""
    values = eigenvalues.sort().values
    levels = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    return float((law.cdf(values) - levels + 0.5 / len(values)).abs().max())


def test_moments_are_integrals_of_the_density_and_atoms(law):
    for degree in range(6):
        total = float(law.atoms.masses @ law.atoms.points**degree)
        for low, high in pieces(law):
            x, weights = rule(low, high)
            total += float(weights @ (law.pdf(x) * x**degree))

        assert law.moment(degree) == pytest.approx(total, rel=1e-10, abs=1e-10)


def test_the_distribution_function_is_the_integral_of_the_density(law):
    for low, high in pieces(law):
        start = float(law.cdf(torch.tensor(low, dtype=torch.float64)))
        for share in (0.02, 0.3, 0.5, 0.9, 1.0):
            # The angle of the rule up to a point inside: its right end is no edge.
            end = math.pi * share
            nodes, weights = (torch.from_numpy(array) for array in leggauss(200))
            f, half = end / 2 * (nodes + 1), 0.5 * (high - low)
            x = low + 2 * half * torch.sin(f / 2) ** 2
            part = float((end / 2 * weights * half * torch.sin(f)) @ law.pdf(x))
            point = torch.tensor(low + half * (1 - math.cos(end)), dtype=torch.float64)

            assert float(law.cdf(point)) == pytest.approx(start + part, abs=2e-11)


def test_quantiles_invert_the_distribution_function(law):
    levels = torch.rand(500, dtype=torch.float64, generator=seeded(1))
    jump = float(law.atoms.masses.sum())

    points = law.ppf(levels)

    continuous = levels > jump  # the only atom is at 0, below the rest
    torch.testing.assert_close(law.cdf(points)[continuous], levels[continuous], rtol=0, atol=1e-12)
    assert not bool(points[~continuous].any())
    assert law.support[0] <= float(law.ppf(0.0)) <= float(law.ppf(1.0)) <= law.support[1]


def test_samples_have_the_mean_and_variance_of_the_law(law):
    n = 40_000
    drawn = law.sample(n, generator=seeded(5))

    mean, square = law.moment(1), law.moment(2)
    spread = math.sqrt(square - mean**2)
    assert abs(float(drawn.mean()) - mean) < 4 * spread / math.sqrt(n)
    error = float(drawn.square().std()) / math.sqrt(n)
    assert abs(float(drawn.square().mean()) - square) < 4 * error
    assert torch.equal(drawn, law.sample(n, generator=seeded(5)))


def test_the_derivative_of_the_distribution_function_is_the_density(law):
    low, high = law.support
    x = torch.linspace(low - 0.1, high + 0.1, 57, dtype=torch.float64, requires_grad=True)

    law.cdf(x).sum().backward()

    torch.testing.assert_close(x.grad, law.pdf(x).detach())
    assert bool(torch.autograd.grad(law.pdf(x).sum(), x)[0].isfinite().all())


def test_laws_are_densities_and_are_stored(law, tmp_path):
    assert isinstance(law, Density)
    low, high = law.support
    whole = float(law.cdf(torch.tensor(high + 1.0)))
    assert whole == pytest.approx(1.0, abs=1e-10)
    assert law.mass(low - 1, high + 1) == pytest.approx(1.0, abs=1e-10)

    ritz.save(law, tmp_path / "law.ritz")

    again = ritz.load(tmp_path / "law.ritz")
    middle = torch.tensor([0.4 * low + 0.6 * high])
    assert torch.equal(again.cdf(middle), law.cdf(middle))


def test_the_stieltjes_transform_is_the_integral(law):
    if isinstance(law, TracyWidom):
        pytest.skip("has no transform of its own")
    z = torch.tensor([1.0 + 0.5j, -3.0 + 0.2j, 2.0 - 1.0j, 30.0 + 0j], dtype=torch.complex128)
    expected = (law.atoms.masses / (z[:, None] - law.atoms.points)).sum(1)
    for low, high in pieces(law):
        x, weights = rule(low, high, 2000)
        expected = expected + (weights * law.pdf(x) / (z[:, None] - x)).sum(1)

    torch.testing.assert_close(law.stieltjes(z), expected, rtol=1e-9, atol=1e-11)
    inside = torch.tensor([low + 0.37 * (high - low)], dtype=torch.float64)
    torch.testing.assert_close(-law.stieltjes(inside).imag / math.pi, law.pdf(inside))


def test_the_semicircle_has_catalan_moments_and_a_closed_distribution_function():
    assert [Semicircle().moment(k) for k in range(9)] == [1, 0, 1, 0, 2, 0, 5, 0, 14]
    x = torch.tensor([-1.0, 0.0, math.sqrt(2)], dtype=torch.float64)
    # t = x / 2 at arcsin t = -pi/6, 0, pi/4
    expected = [0.5 - math.sqrt(3) / (4 * math.pi) - 1 / 6, 0.5, 0.5 + 0.5 / math.pi + 0.25]
    torch.testing.assert_close(
        Semicircle().cdf(x), torch.tensor(expected).double(), rtol=0, atol=1e-6
    )
    assert abs(float(Semicircle().cdf(x)[0]) - expected[0]) < 1e-15


def test_marchenko_pastur_of_ratio_one_is_the_square_of_the_semicircle():
    x = torch.linspace(0.01, 3.99, 50, dtype=torch.float64)

    squared = 2 * Semicircle().cdf(x.sqrt()) - 1

    torch.testing.assert_close(MarchenkoPastur(ratio=1.0).cdf(x), squared, rtol=0, atol=1e-14)


def test_wide_and_tall_marchenko_pastur_share_their_eigenvalues():
    # X X'/T and X'X/T have the same eigenvalues but for zeros.
    wide, tall = MarchenkoPastur(ratio=4.0), MarchenkoPastur(ratio=0.25, scale=4.0)
    x = torch.linspace(1.1, 8.9, 20, dtype=torch.float64)

    torch.testing.assert_close(wide.pdf(x), tall.pdf(x) / 4, rtol=1e-13, atol=0)
    torch.testing.assert_close(wide.cdf(x), 0.75 + tall.cdf(x) / 4, rtol=1e-13, atol=0)
    assert float(wide.cdf(torch.tensor(-1e-9))) == 0
    assert float(wide.cdf(torch.tensor(0.0))) == 0.75
    assert float(wide.ppf(0.7)) == 0


@pytest.mark.parametrize(
    ("beta", "mean", "variance", "levels"),
    [
        # Bornemann (2010), Table 10; percentiles of beta = 1 from Bejan (2005), Table 2.
        (1, -1.206533574582, 1.607781034581, {0.90: 0.4501, 0.95: 0.9793, 0.99: 2.0234}),
        (2, -1.771086807411, 0.8131947928329, {}),
    ],
)
def test_tracy_widom_meets_published_figures(beta, mean, variance, levels):
    law = TracyWidom(beta=beta)

    assert law.moment(0) == pytest.approx(1, abs=1e-11)
    assert law.moment(1) == pytest.approx(mean, abs=1e-10)
    assert law.moment(2) - law.moment(1) ** 2 == pytest.approx(variance, abs=1e-10)
    for level, quantile in levels.items():
        assert float(law.ppf(level)) == pytest.approx(quantile, abs=6e-5)


def test_tracy_widom_of_beta_2_at_minus_two_has_the_published_digits():
    # Bornemann (2010), section 1: F_2(-2) = 0.41322 41425 05122 57485 ...
    value = float(TracyWidom(beta=2).cdf(torch.tensor(-2.0)))

    assert value == pytest.approx(0.41322414250512257485, abs=1e-13)


def test_tracy_widom_laws_satisfy_painleve_two():
    # log F_2 has the second derivative -q^2 with q'' = s q + 2 q^3, and F_1 = sqrt(F_2) exp(-I/2)
    # with I' = -q, so q = -(2 log F_1 - log F_2)' from the two laws.
    first, second = TracyWidom(beta=1), TracyWidom(beta=2)
    s = torch.linspace(-3.5, 2.0, 12, dtype=torch.float64)
    h = 0.02

    def q(x):
        return (2 * first.pdf(x) / first.cdf(x) - second.pdf(x) / second.cdf(x)).abs()

    # Central differences of order 6
    stencil = {0: -49 / 18, 1: 1.5, 2: -0.15, 3: 1 / 90}
    bend = sum(w * (q(s + k * h) + (q(s - k * h) if k else 0)) for k, w in stencil.items()) / h**2
    torch.testing.assert_close(bend, s * q(s) + 2 * q(s) ** 3, rtol=0, atol=1e-8)
    slope = sum(
        w * (second.pdf(s + k * h) / second.cdf(s + k * h)
             - second.pdf(s - k * h) / second.cdf(s - k * h))
        for k, w in {1: 0.75, 2: -0.15, 3: 1 / 60}.items()
    ) / h  # fmt: skip
    torch.testing.assert_close(slope, -(q(s) ** 2), rtol=0, atol=1e-8)


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_sampled_matrices_follow_the_laws(q):
    n = 500
    drawn = torch.linalg.eigvalsh(wigner(n).matrix)
    # Eigenvalues of one matrix lie within about log(n)/n of the law.
    assert distance(Semicircle(), drawn) < 4 / n

    drawn = torch.linalg.eigvalsh(wishart(n, int(n / q)).matrix)
    positive = drawn[drawn > 1e-9]
    law = MarchenkoPastur(ratio=q)
    assert len(positive) / n == pytest.approx(1 - float(law.atoms.masses.sum()))
    levels = torch.arange(1, len(positive) + 1).double() / n + float(law.atoms.masses.sum())
    assert float((law.cdf(positive) - levels).abs().max()) < 5 / n


def test_largest_eigenvalues_of_wigner_matrices_follow_tracy_widom():
    n, draws = 100, 400
    law = TracyWidom(beta=1)

    largest = torch.stack(
        [torch.linalg.eigvalsh(wigner(n, generator=seeded(i)).matrix)[-1] for i in range(draws)]
    )

    # Kolmogorov's 99.9 % bound, with a bias of order n^(-2/3)
    assert distance(law, n ** (2 / 3) * (largest - 2)) < 1.95 / math.sqrt(draws) + n ** (-2 / 3)


def test_the_smallest_spike_beyond_the_edge_is_improbable_under_the_bulk():
    n, T, q = 200, 400, 0.5
    value = torch.linalg.eigvalsh(spiked_wishart(n, T, spikes=(3.0,)).matrix)[-1]

    scale = (1 + math.sqrt(q)) * (1 / math.sqrt(q) + 1) ** (1 / 3) * T ** (-2 / 3)
    score = (float(value) - MarchenkoPastur(ratio=q).edges[1]) / scale

    assert 1 - float(TracyWidom().cdf(torch.tensor(score))) < 1e-6


def test_levels_and_points_keep_the_digits_of_python_numbers():
    level = torch.tensor(1 - 1e-10, dtype=torch.float64)

    # By way of float32 the level would be 1, and G good to seven digits.
    torch.testing.assert_close(TracyWidom().ppf(1 - 1e-10), TracyWidom().ppf(level))
    edges = [
        additive_spikes(0.0, variance=1.0, size=100, level=p).edge for p in (1 - 1e-7, 1 - 1e-9)
    ]
    assert float(edges[1]) > float(edges[0]) + 0.01
    exact = stieltjes(Semicircle(), torch.tensor(0.1 + 0.3j, dtype=torch.complex128))
    torch.testing.assert_close(stieltjes(Semicircle(), 0.1 + 0.3j), exact, rtol=1e-15, atol=0)


def test_a_single_complex_number_has_a_transform():
    # G(iy) of the normal law is -i times the integral of exp(-x^2/2) y / (x^2 + y^2).
    x = torch.linspace(-40.0, 40.0, 4001, dtype=torch.float64)
    exact = (Normal().pdf(x) / (x.square() + 1)).sum() * 0.02

    value = stieltjes(Normal(), 1j)

    assert complex(value) == pytest.approx(complex(0, -float(exact)), abs=1e-12)


def test_the_ends_of_the_levels_are_the_ends_of_the_support(law):
    ends = law.ppf(torch.tensor([0.0, 1.0]))

    assert tuple(ends.tolist()) == law.support


def test_nan_is_neither_inside_nor_outside(law):
    points = torch.tensor([math.nan, law.support[1]], dtype=torch.float64)

    for values in (law.pdf(points), law.cdf(points)):
        assert values.isnan().tolist() == [True, False]


def test_laws_are_priors_of_maximum_entropy():
    law = Semicircle(mean=0.5, variance=0.09)
    moments = torch.tensor([law.moment(k) for k in range(4)], dtype=torch.float64)

    by_law = maxent(moments, interval=law.support, prior=law, basis="power")
    by_name = maxent(moments, interval=law.support, prior="semicircle", basis="power")

    x = torch.linspace(0.0, 1.0, 11, dtype=torch.float64)
    # The moments are those of the prior, so the answer is the prior.
    torch.testing.assert_close(by_law.pdf(x), law.pdf(x), rtol=1e-5, atol=0)
    torch.testing.assert_close(by_law.pdf(x), by_name.pdf(x), rtol=1e-9, atol=0)
    assert by_law.kl(law) == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Semicircle(variance=0.0), "variance must be finite and above 0"),
        (lambda: Normal(variance=math.inf), "variance must be finite"),
        (lambda: MarchenkoPastur(ratio=-1.0), "ratio must be finite"),
        (lambda: MarchenkoPastur(ratio=1.0, scale=math.nan), "scale must be finite"),
        (lambda: TracyWidom(beta=4), "beta must be 1 or 2, got 4"),
        (lambda: Semicircle().ppf(1.5), "levels must be between 0 and 1"),
        (lambda: Semicircle().ppf(math.nan), "levels must be between 0 and 1"),
        (lambda: Semicircle().sample(0), "n must be at least 1"),
        (lambda: Semicircle(mean=math.nan), "mean must be finite, got nan"),
        (lambda: Normal(mean=math.inf), "mean must be finite, got inf"),
        (lambda: MarchenkoPastur(ratio=1.0).moment(-1), "degree must be at least 0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
