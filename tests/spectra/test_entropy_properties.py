"""What holds for every density of maximum entropy, whatever the law, the basis and the prior."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ritz import maxent, moments
from ritz.spectra._maxent.dual import Grid, chebyshev
from ritz.spectra._moments import chebyshev_from_legendre
from ritz.testing import with_spectrum

INTERVAL = (0.5, 3.5)
PRIORS = ("flat", "semicircle", "marchenko_pastur")
# Smooth laws: mixtures of normals in the angle, whose Chebyshev moments are known.
centres = st.lists(st.floats(-0.9, 0.9), min_size=1, max_size=6)
widths = st.floats(0.25, 0.6)
few = settings(max_examples=15, deadline=None, derandomize=True)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def law(centres, width, m):
    orders = torch.arange(m + 1, dtype=torch.float64)
    angles = torch.arccos(torch.tensor(centres, dtype=torch.float64))
    return torch.cos(orders[:, None] * angles).mean(1) * (-0.5 * (width * orders) ** 2).exp()


def powers(cheb, interval):
    """Power moments of the variable itself, by exact integration of polynomials of it."""
    low, high = interval
    m = len(cheb) - 1
    grid = Grid.make(m + 1, m)
    x = 0.5 * (low + high) + 0.5 * (high - low) * grid.nodes
    values = x[:, None] ** torch.arange(m + 1, dtype=torch.float64)
    return torch.linalg.solve(grid.polynomials, values).T @ cheb


@few
@given(centres, widths, st.floats(-2, 2), st.floats(0.2, 5))
def test_the_density_does_not_depend_on_the_basis(centres, width, low, length):
    interval = (low, low + length)
    cheb = law(centres, width, 6)
    expected = maxent(cheb, interval=interval)
    x = torch.linspace(low, low + length, 33, dtype=torch.float64)[1:-1]
    legendre = chebyshev_from_legendre(6) @ cheb
    for basis, found in (("legendre", legendre), ("power", powers(cheb, interval))):
        other = maxent(found, basis=basis, interval=interval)
        # Moments agree to tol or to the roundoff of powers, 1e-10; multipliers may be hundreds.
        torch.testing.assert_close(other.pdf(x), expected.pdf(x), rtol=1e-4, atol=1e-6)
        assert other.entropy == pytest.approx(expected.entropy, abs=1e-6)


@few
@given(centres, widths, st.sampled_from(PRIORS))
def test_the_entropy_never_rises_as_moments_are_added(centres, width, prior):
    cheb = law(centres, width, 12)
    counts = (1, 2, 3, 5, 8, 12)
    found = [maxent(cheb[: m + 1], interval=INTERVAL, prior=prior) for m in counts]
    assert all(density.relaxation == 0 for density in found)
    # Moments are off by 1e-9, times multipliers of up to a few hundred.
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
    """Its own moments, by the midpoint rule in the logarithm, whose error is below 1e-6."""
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
    # The value of a rule in the logarithm of x, which resolves 1/x on few nodes.
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
    """Of degree 6 at 1000, three digits of eighteen are left: that is said, not taken for exact."""
    asked = powers(law([0.1, -0.3], 0.4, 6), (1000.0, 1002.0))
    found = maxent(asked, basis="power", interval=(1000.0, 1002.0))
    assert found.status.outcome == "converged"
    assert "their rounding error" in found.status.message
    assert found.moment(1) == pytest.approx(float(asked[1]), rel=1e-6)
