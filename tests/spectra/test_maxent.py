import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import seeded
from numpy.polynomial import legendre
from scipy import stats

from ritz import NotConvergedError, maxent, moments
from ritz.spectra._maxent.dual import Grid, chebyshev
from ritz.testing import with_spectrum

LOW, HIGH = (1 - 0.5**0.5) ** 2, (1 + 0.5**0.5) ** 2
LAWS = {
    "semicircle": ((-1.0, 1.0), lambda x: 2 / math.pi * np.sqrt(1 - x**2)),
    "uniform": ((-1.0, 1.0), lambda x: 0.5 + 0 * x),
    "beta": ((0.0, 1.0), stats.beta(2, 3).pdf),
    "normal": ((-3.0, 3.0), stats.truncnorm(-3, 3).pdf),
    "narrow normal": ((-1.0, 1.0), stats.truncnorm(-10, 10, scale=0.1).pdf),
    "marchenko-pastur": (
        (LOW, HIGH),
        lambda x: np.sqrt(np.maximum((HIGH - x) * (x - LOW), 0)) / (math.pi * x),
    ),
}
ANGLES, WEIGHTS = legendre.leggauss(1000)
T = -np.cos((ANGLES + 1) * math.pi / 2)  # on [-1, 1]; the cosine takes care of root singularities
WEIGHTS = WEIGHTS * math.pi / 2 * np.sqrt(1 - T**2)


def points(interval):
    low, high = interval
    return low + (high - low) * (T + 1) / 2, WEIGHTS * (high - low) / 2


def chebyshev_moments(name, m):
    interval, pdf = LAWS[name]
    x, weights = points(interval)
    return torch.from_numpy(np.polynomial.chebyshev.chebvander(T, m).T @ (weights * pdf(x)))


def atoms(nodes, m):
    angles = torch.arccos(torch.tensor(nodes, dtype=torch.float64))
    return torch.cos(torch.arange(m + 1, dtype=torch.float64)[:, None] * angles).mean(1)


def divergence(name, density):
    """Kullback-Leibler divergence from the law to the density."""
    x, weights = points(LAWS[name][0])
    p = LAWS[name][1](x)
    q = density.log_pdf(torch.from_numpy(x)).numpy()
    return float((weights * p * (np.log(np.maximum(p, 1e-300)) - q)).sum())


def integral(density):
    x, weights = (torch.from_numpy(array) for array in points(density.support))
    return float(weights @ density.pdf(x))


def recovered(name, m, **options):
    return maxent(chebyshev_moments(name, m), interval=LAWS[name][0], **options)


def check_same(one, other, rtol=1e-6):
    torch.testing.assert_close(one.alphas, other.alphas, rtol=rtol, atol=rtol)
    assert one.entropy == pytest.approx(other.entropy, abs=rtol)


@pytest.mark.parametrize("name", LAWS)
def test_thirty_moments_recover_the_density(name):
    assert -1e-12 < divergence(name, recovered(name, 30)) <= 1e-4


@pytest.mark.parametrize("name", ["semicircle", "beta", "marchenko-pastur"])
def test_the_divergence_falls_with_the_moments(name):
    # The other laws are themselves maximum-entropy densities of few moments.
    found = [divergence(name, recovered(name, m)) for m in (2, 5, 10, 20, 30)]
    assert all(b < a for a, b in pairwise(found))
    assert found[0] > 1e-3


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("m", [10, 30, 60, 100])
def test_the_moments_are_matched(name, m):
    found = recovered(name, m)
    assert found.status.outcome == "converged"
    assert "relaxed" not in found.status.message
    assert found.moment_error < 1e-8
    assert found.num_steps < 40
    assert integral(found) == pytest.approx(1.0, abs=1e-11)


@pytest.mark.parametrize("name", LAWS)
def test_the_entropy_never_rises_and_stays_above_that_of_the_law(name):
    densities = [recovered(name, m) for m in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60)]
    found = [density.entropy for density in densities]
    slack = 1e-8 * max(float(density.alphas.abs().max()) for density in densities) + 1e-9
    assert all(b <= a + slack for a, b in pairwise(found))
    x, weights = points(LAWS[name][0])
    p = LAWS[name][1](x)
    assert found[-1] >= -(weights * p * np.log(np.maximum(p, 1e-300))).sum() - 1e-7


@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["beta", "normal", "marchenko-pastur"])
def test_the_density_does_not_depend_on_the_basis(name, m):
    interval, pdf = LAWS[name]
    x, weights = points(interval)
    by_legendre = torch.from_numpy(legendre.legvander(T, m).T @ (weights * pdf(x)))
    powers = torch.from_numpy(np.vander(x, m + 1, increasing=True).T @ (weights * pdf(x)))
    expected = recovered(name, m)
    check_same(maxent(by_legendre, basis="legendre", interval=interval), expected)
    check_same(maxent(powers, basis="power", interval=interval), expected)


@pytest.mark.parametrize("m", [30, 60])
def test_many_legendre_moments_are_as_accurate_as_chebyshev_moments(m):
    interval, pdf = LAWS["beta"]
    x, weights = points(interval)
    by_legendre = torch.from_numpy(legendre.legvander(T, m).T @ (weights * pdf(x)))
    found = maxent(by_legendre, basis="legendre", interval=interval)
    assert found.moment_error < 1e-8
    assert found.entropy == pytest.approx(recovered("beta", m).entropy, abs=1e-8)


@pytest.mark.parametrize("m", [20, 40])
def test_power_moments_of_high_degree_are_matched_to_their_roundoff_which_is_reported(m):
    powers = torch.from_numpy(np.vander(T, m + 1, increasing=True).T @ (0.5 * WEIGHTS))
    found = maxent(powers, basis="power")
    assert found.status.outcome == "converged"
    assert abs(integral(found) - 1) < 1e-3
    assert ("their rounding error" in found.status.message) == (m == 40)


@pytest.mark.parametrize("interval", [(0.0, 1.0), (1000.1, 1001.1), (-3e-9, 1e-9), (-5e7, 1e8)])
def test_any_interval_shifts_and_scales_the_density(interval):
    given_moments = chebyshev_moments("beta", 8)
    unit, moved = maxent(given_moments), maxent(given_moments, interval=interval)
    low, high = interval
    half = (high - low) / 2
    t = torch.linspace(-0.9, 0.9, 9, dtype=torch.float64)
    x = low + half * (t + 1)
    torch.testing.assert_close(moved.pdf(x) * half, unit.pdf(t), rtol=1e-8, atol=0)
    torch.testing.assert_close(moved.cdf(x), unit.cdf(t), rtol=0, atol=1e-9)
    assert moved.entropy == pytest.approx(unit.entropy + math.log(half))
    ends = torch.tensor([low, high], dtype=torch.float64)
    assert moved.cdf(ends).tolist() == [0.0, pytest.approx(1.0, abs=1e-9)]
    assert bool((moved.cdf(torch.linspace(low, high, 300, dtype=torch.float64)).diff() >= 0).all())


def test_vectors_solved_together_equal_vectors_solved_alone():
    many = torch.stack([
        chebyshev_moments("uniform", 8), chebyshev_moments("semicircle", 8),
        atoms([0.3], 8), torch.tensor([1.0] + [1.5] * 8).double(), atoms([-1.0, 1.0], 8),
        chebyshev_moments("beta", 8),
    ])  # fmt: skip
    together = maxent(many)
    assert isinstance(together, tuple)
    for row, found in zip(many, together, strict=True):
        alone = maxent(row)
        check_same(found, alone, rtol=1e-5)
        assert found.status.message.partition(";")[2] == alone.status.message.partition(";")[2]
        torch.testing.assert_close(found.ridge, alone.ridge)


def test_vectors_with_and_without_errors_solved_together_equal_those_solved_alone():
    many = torch.stack([atoms([-1.0, 1.0], 6), atoms([-0.5, 0.1, 0.8, 0.9], 6)])
    errors = torch.zeros_like(many)
    errors[1, 1:] = 0.01
    together = maxent(many, stderr=errors)
    for row, error, found in zip(many, errors, together, strict=True):
        alone = maxent(row, stderr=error)
        check_same(found, alone, rtol=1e-5)
        assert found.status.outcome == alone.status.outcome == "converged"
    assert "relaxed" in together[0].status.message
    assert "relaxed" not in together[1].status.message


def test_no_moment_vectors_give_no_densities():
    assert maxent(torch.ones(0, 4)) == ()


def test_standard_errors_are_the_ridge_and_the_moments_are_within_them():
    exact = atoms([-0.5, 0.1, 0.3, 0.8, 0.9], 8)
    errors = torch.tensor([0.0] + [0.02] * 8, dtype=torch.float64)
    found = maxent(exact, stderr=errors)
    torch.testing.assert_close(found.ridge, errors[1:].square())
    torch.testing.assert_close(found.fitted - found.targets, found.ridge * found.alphas)
    assert found.entropy > maxent(exact, stderr=errors / 10).entropy


def test_infeasible_moments_are_relaxed_and_the_relaxation_is_reported():
    found = maxent(torch.tensor([1.0, 1.5, 1.5]))
    assert "(largest error 0.5), because no density was found" in found.status.message
    assert found.moment_error == pytest.approx(0.5, abs=1e-2)
    assert abs(integral(found) - 1) < 5e-3
    assert found.entropy < -1.0


def test_an_unresolved_density_is_not_reported_as_converged():
    found = maxent(torch.tensor([1.0] + [1.5] * 30))
    assert found.status.outcome == "max_steps"
    with pytest.raises(NotConvergedError, match="narrower than the quadrature resolves"):
        found.raise_if_failed()


def test_a_finer_quadrature_resolves_narrower_peaks():
    coarse, fine = maxent(atoms([0.3], 6)), maxent(atoms([0.3], 6), grid_size=2048)
    assert "narrower peaks need a larger grid_size" in coarse.status.advice
    assert float(fine.ridge.max()) < float(coarse.ridge.max())
    assert fine.moment_error < coarse.moment_error
    x = torch.linspace(0.2, 0.4, 20_001, dtype=torch.float64)
    assert float(torch.trapezoid(fine.pdf(x), x)) == pytest.approx(1.0, abs=2e-3)


def test_too_few_steps_are_reported():
    found = recovered("beta", 20, max_steps=1)
    assert found.status.outcome == "max_steps"
    assert "steps, above atol 1e-09" in found.status.message
    assert "larger stderr=" in found.status.advice
    with pytest.raises(NotConvergedError):
        found.raise_if_failed()


@pytest.mark.parametrize("m", [1, 2])
def test_few_moments_have_closed_forms(m):
    """One moment gives an exponential; two moments of a narrow normal law give that law."""
    if m == 1:
        found = maxent(torch.tensor([1.0, 1 / math.tanh(2.0) - 0.5], dtype=torch.float64))
        torch.testing.assert_close(found.alphas, torch.tensor([-2.0]).double())
    else:
        found = recovered("narrow normal", 2)
        torch.testing.assert_close(found.alphas, torch.tensor([0.0, 25.0]).double())


@pytest.mark.parametrize("kind", ["list", "float32", "needs a gradient"])
def test_moments_are_accepted_as_a_list_in_float32_and_with_a_gradient(kind):
    base = chebyshev_moments("beta", 6)
    made = {
        "list": base.tolist(),
        "float32": base.float(),
        "needs a gradient": base.clone().requires_grad_(),
    }[kind]
    found = maxent(made)
    assert found.entropy == pytest.approx(maxent(base).entropy, abs=1e-5)
    assert found.alphas.dtype == torch.float64
    assert not found.alphas.requires_grad


@pytest.mark.parametrize(
    ("given_moments", "options", "message"),
    [
        ([1.0], {}, r"\(m \+ 1,\) or \(N, m \+ 1\), m >= 1, got \(1,\)"),
        (1.0, {}, r"m >= 1, got \(\)"),
        ([[[1.0, 0.0]]], {}, r"m >= 1, got \(1, 1, 2\)"),
        ([1.0, math.nan], {}, "moments must be finite, got 1 NaN or Inf of 2"),
        ([1.0, math.inf], {}, "moments must be finite"),
        ([0.9, 0.0], {}, r"moments\[0\] must be 1, got 0.9"),
        ([[1.0, 0.0], [2.0, 0.0]], {}, r"moments\[0\] must be 1"),
        ([1.0, 0.0], {"interval": (1.0, 1.0)}, "lower end first"),
        ([1.0, 0.0], {"interval": (0.0, math.inf)}, "interval must be finite"),
        ([1.0, 0.0], {"interval": (math.nan, 1.0)}, "interval must be finite"),
        ([1.0, 0.0], {"basis": "hermite"}, "basis must be one of chebyshev"),
        ([1.0, 0.0], {"prior": "normal"}, "prior must be one of flat"),
        ([1.0, 0.0], {"prior": None}, "prior must be one of flat"),
        ([1.0, 0.0], {"prior": "marchenko_pastur"}, "needs an interval of positive numbers"),
        ([1.0, 0.0], {"prior": lambda x: x}, "prior must be positive inside the interval"),
        ([1.0, 0.0], {"prior": lambda x: x * math.nan}, "prior must be positive"),
        ([1.0, 0.0], {"prior": lambda x: torch.ones(2)}, "keep the shape of x"),
        ([1.0, 0.0], {"prior": lambda x: 1.0}, "keep the shape of x"),
        ([1.0, 0.0], {"prior": lambda x: x**2 * math.inf}, "prior must be finite"),
        ([1.0, 0.0], {"stderr": torch.tensor([0.0, -1.0])}, "stderr must be at least 0"),
        ([1.0, 0.0], {"stderr": torch.tensor([0.0, math.nan])}, "stderr must be finite"),
        ([1.0, 0.0], {"stderr": torch.zeros(3)}, r"stderr must have the shape of moments, \(2,\)"),
        ([1.0, 0.0], {"atol": math.nan}, "atol must be finite and at least 0"),
        ([1.0, 0.0], {"atol": -1.0}, "atol must be finite and at least 0"),
        ([1.0, 0.0], {"max_steps": 0}, "max_steps must be at least 1"),
        ([1.0, 0.0], {"grid_size": 2}, "grid_size must be at least 3"),
    ],
)
def test_misuse_is_refused(given_moments, options, message):
    with pytest.raises(ValueError, match=message):
        maxent(torch.tensor(given_moments), **options)


@pytest.mark.parametrize("basis", ["chebyshev", "legendre", "power"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_density_has_the_moments_of_a_matrix_within_their_errors(basis, dtype):
    values = torch.cat([torch.linspace(1, 2, 100), torch.linspace(3, 5, 100)]).to(dtype)
    op = with_spectrum(values, generator=seeded(0))
    measured = moments(op, num_moments=10, basis=basis, interval=(0.9, 5.1), num_probes=20)
    found = maxent(measured)
    assert found.status.outcome == "converged"
    assert found.interval == (0.9, 5.1)
    assert found.moment(1) == pytest.approx(float(values.double().mean()), rel=0.02)
    if basis == "chebyshev":
        off = (found.fitted - measured.mean[1:]).abs()
        assert bool((off <= 4 * measured.stderr[1:] + 1e-9).all())


def test_the_log_determinant_of_a_matrix_is_near_the_truth():
    values = torch.linspace(0.5, 3.0, 300, dtype=torch.float64)
    op = with_spectrum(values, generator=seeded(0))
    measured = moments(op, num_moments=20, num_probes=30)
    series = np.polynomial.Chebyshev.interpolate(np.log, 20, domain=list(measured.interval))
    samples = measured.samples @ torch.from_numpy(series.coef)  # the same, a probe at a time
    error = float(samples.std() / 30**0.5)
    found = maxent(measured).expectation(torch.log)
    assert found == pytest.approx(float(samples.mean()), abs=1e-3)
    assert abs(found - float(values.log().mean())) < 4 * error < 0.04


@pytest.mark.parametrize("m", [6, 30])
def test_a_matrix_of_two_repeated_eigenvalues_has_a_density(m):
    """Some of its standard errors are roundoff, far below the true errors of the moments."""
    values = torch.cat([torch.ones(40), 2 * torch.ones(40)])
    found = maxent(moments(with_spectrum(values, generator=seeded(0)), num_moments=m))
    assert found.status.outcome == "converged"
    assert "relaxed" in found.status.message
    assert found.mass(0.0, 1.5) == pytest.approx(0.5, abs=0.05)
    assert abs(integral(found) - 1) < 5e-3


# ------------------------------------------------------------------------------------------
# What holds for every density of maximum entropy, whatever the law and the prior.


INTERVAL = (0.5, 3.5)
PRIORS = ("flat", "semicircle", "marchenko_pastur")


# Smooth laws: mixtures of normals in the angle, whose Chebyshev moments are known.
centres = st.lists(st.floats(-0.9, 0.9), min_size=1, max_size=6)
widths = st.floats(0.25, 0.6)
few = settings(max_examples=15, deadline=None, derandomize=True)


def law(centres, width, m):
    orders = torch.arange(m + 1, dtype=torch.float64)
    angles = torch.arccos(torch.tensor(centres, dtype=torch.float64))
    return torch.cos(orders[:, None] * angles).mean(1) * (-0.5 * (width * orders) ** 2).exp()


def powers(cheb, interval):
    """Power moments on the interval from Chebyshev moments, by exact quadrature."""
    low, high = interval
    m = len(cheb) - 1
    grid = Grid.make(m + 1, m)
    x = 0.5 * (low + high) + 0.5 * (high - low) * grid.nodes
    values = x[:, None] ** torch.arange(m + 1, dtype=torch.float64)
    return torch.linalg.solve(grid.polynomials, values).T @ cheb


@few
@given(centres, widths, st.sampled_from(PRIORS))
def test_the_entropy_never_rises_as_moments_are_added(centres, width, prior):
    cheb = law(centres, width, 12)
    counts = (1, 2, 3, 5, 8, 12)
    found = [maxent(cheb[: m + 1], interval=INTERVAL, prior=prior) for m in counts]
    assert all(density.relaxation == 0 for density in found)
    # Errors of 1e-9 in the moments are multiplied by up to a few hundred.
    assert all(b.entropy <= a.entropy + 1e-6 for a, b in pairwise(found))
    assert found[0].entropy <= (math.log(3.0) if prior == "flat" else 0.0) + 1e-9


@few
@given(centres, widths, centres, widths, st.sampled_from(PRIORS))
def test_no_divergence_is_negative(one, width, other, spread, prior):
    p = maxent(law(one, width, 6), interval=INTERVAL, prior=prior)
    q = maxent(law(other, spread, 8), interval=INTERVAL)
    assert p.kl(q) >= -1e-9
    assert q.kl(p) >= -1e-9
    assert p.kl(p) == 0.0
    assert p.symmetric_kl(q) == pytest.approx(q.symmetric_kl(p))


@pytest.mark.parametrize("low", [1e-2, 1e-6, 1e-12])
def test_a_prior_over_many_orders_of_magnitude_is_resolved(low):
    """The moments are those of the prior, by the midpoint rule in log x: errors below 1e-6."""
    size = 200_000
    logs = math.log(low) * (1 - (torch.arange(size, dtype=torch.float64) + 0.5) / size)
    x = logs.exp()
    shares = ((x - low) * (1 - x)).sqrt()
    shares = shares / shares.sum()
    asked = shares @ chebyshev((2 * x - 1 - low) / (1 - low), 12)
    found = maxent(asked, interval=(low, 1.0), prior="marchenko_pastur")
    assert found.status.outcome == "converged"
    assert found.status.advice == ""
    assert found.entropy == pytest.approx(0.0, abs=1e-6)
    assert found.expectation(torch.log) == pytest.approx(float(shares @ logs), rel=1e-4)
    middle = float(shares[x < 0.1].sum())
    assert found.mass(low, 0.1) == pytest.approx(middle, rel=1e-4)


def test_a_prior_that_the_grid_does_not_resolve_gets_a_finer_one_or_is_named():
    def steep(x):
        return 1 / x

    asked = torch.tensor([1.0, -0.8, 0.4], dtype=torch.float64)
    fine = maxent(asked, interval=(1e-6, 1.0), prior=steep)
    assert fine.grid_size > 512
    assert fine.status.advice == ""
    # The expected value is by quadrature in log x, which resolves 1/x with few nodes.
    assert fine.entropy == pytest.approx(-0.325348, abs=1e-4)
    coarse = maxent(asked, interval=(1e-6, 1.0), prior=steep, grid_size=256)
    assert "for the prior" in coarse.status.message
    assert coarse.status.advice == "the prior needs a larger grid_size"


def measured(values, **options):
    op = with_spectrum(values.double(), generator=seeded(0))
    return moments(op, num_probes=30, generator=seeded(1), **options)


def test_power_moments_that_were_not_mapped_need_the_interval():
    values = torch.linspace(1.0, 5.0, 200)
    given = measured(values, num_moments=6, basis="power")
    assert given.interval == (-1.0, 1.0)
    with pytest.raises(ValueError, match=r"not inside interval \(-1.0, 1.0\): a power moment"):
        maxent(given)
    with pytest.raises(ValueError, match=r"of degree .* above .* use a larger interval"):
        maxent(given, interval=(0.0, 4.0))
    found = maxent(given, interval=(0.9, 5.1))
    same = maxent(measured(values, num_moments=6, interval=(0.9, 5.1)))
    assert found.interval == (0.9, 5.1)
    assert found.status.outcome == "converged"
    assert found.moment(1) == pytest.approx(same.moment(1), rel=0.01)
    assert found.expectation(torch.log) == pytest.approx(float(values.log().mean()), rel=0.02)


def test_power_moments_of_a_spectrum_inside_the_unit_interval_need_no_interval():
    values = torch.linspace(-0.8, 0.9, 200)
    found = maxent(measured(values, num_moments=6, basis="power"))
    assert found.interval == (-1.0, 1.0)
    assert found.moment(2) == pytest.approx(float(values.double().square().mean()), rel=0.05)


@pytest.mark.parametrize("basis", ["chebyshev", "power"])
def test_another_interval_than_that_of_the_moments_is_refused(basis):
    given = measured(torch.linspace(1.0, 5.0, 50), num_moments=4, basis=basis, interval=(0.5, 6.0))
    assert maxent(given, interval=(0.5, 6.0)).interval == (0.5, 6.0)
    with pytest.raises(ValueError, match=r"interval must be that of the moments, \(0.5, 6.0\)"):
        maxent(given, interval=(0.0, 6.0))


def test_power_moments_far_from_zero_are_matched_to_their_roundoff():
    """At 1000, the moment of degree 6 has three correct digits, and the result says so."""
    asked = powers(law([0.1, -0.3], 0.4, 6), (1000.0, 1002.0))
    found = maxent(asked, basis="power", interval=(1000.0, 1002.0))
    assert found.status.outcome == "converged"
    assert "their rounding error" in found.status.message
    assert found.moment(1) == pytest.approx(float(asked[1]), rel=1e-6)
