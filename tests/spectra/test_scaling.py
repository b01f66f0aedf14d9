import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

from ritz import Density, maxent
from ritz.spectra._maxent.scaling import bmxnt


def power_moments(law, m):
    return torch.tensor([float(law.moment(k)) if k else 1.0 for k in range(m + 1)]).double()


BETA = stats.beta(2, 3)


def test_one_moment_is_solved_as_maximum_entropy_solves_it():
    found = bmxnt(power_moments(BETA, 1), rtol=1e-12)
    exact = maxent(power_moments(BETA, 1), basis="power", interval=(0.0, 1.0))
    assert found.status.outcome == "converged"
    torch.testing.assert_close(found.alphas, exact.alphas, rtol=1e-9, atol=1e-9)
    assert found.entropy == pytest.approx(exact.entropy)
    assert found.moment(1) == pytest.approx(0.4)


def test_an_exponential_density_is_found_from_two_moments():
    t = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    law = stats.truncexpon(b=3, scale=1 / 3)
    found = bmxnt(power_moments(law, 2))
    torch.testing.assert_close(
        found.pdf(t), torch.from_numpy(law.pdf(t.numpy())), rtol=2e-3, atol=0
    )


def test_uniform_moments_need_no_sweep():
    found = bmxnt(1 / torch.arange(1, 9, dtype=torch.float64))
    assert found.num_steps == 0
    assert float(found.alphas.abs().max()) == 0.0


def test_its_entropy_rises_with_the_moments_and_that_of_maxent_does_not():
    """More is known, so the entropy must fall: the sweeps stop short, and it does not."""
    counts = (2, 3, 5, 8)
    old = [bmxnt(power_moments(BETA, m)) for m in counts]
    new = [maxent(power_moments(BETA, m), basis="power", interval=(0.0, 1.0)) for m in counts]
    assert all(b.entropy > a.entropy + 1e-3 for a, b in pairwise(old))
    assert all(b.entropy <= a.entropy for a, b in pairwise(new))
    assert {density.status.outcome for density in old} == {"max_steps"}
    assert "use maxent" in old[-1].status.advice
    assert {density.status.outcome for density in new} == {"converged"}
    assert new[-1].moment_error < 1e-8 < old[-1].moment_error


def test_the_interval_shifts_and_scales_the_density():
    given = power_moments(BETA, 2)
    unit, moved = bmxnt(given), bmxnt(given, interval=(3.0, 7.0))
    t = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    torch.testing.assert_close(moved.pdf(3 + 4 * t), unit.pdf(t) / 4)
    assert moved.entropy == pytest.approx(unit.entropy + math.log(4))
    assert isinstance(moved, Density)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([1.0], {}, "positive power moments"),
        ([[1.0, 0.5]], {}, "positive power moments"),
        ([1.0, -0.5], {}, "positive power moments"),
        ([1.0, math.nan], {}, "positive power moments"),
        ([1.0, math.inf], {}, "moments must be finite"),
        ([2.0, 0.5], {}, "begin with that of degree 0, which is 1, got 2"),
        ([1.0, 0.5], {"interval": (1.0, 0.0)}, "lower end first"),
        ([1.0, 0.5], {"interval": (0.0, math.inf)}, "interval must be finite"),
        ([1.0, 0.5], {"rtol": -1.0}, "rtol must be at least"),
        ([1.0, 0.5], {"max_sweeps": 0}, "max_sweeps must be at least 1"),
        ([1.0, 0.5], {"grid_size": 2}, "grid_size must be at least 4"),
    ],
)
def test_misuse_is_refused(given, options, message):
    with pytest.raises(ValueError, match=message):
        bmxnt(torch.tensor(given), **options)
