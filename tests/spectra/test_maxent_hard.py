"""Moments that are hard or impossible to match: each run ends early and reports how."""

import math

import pytest
import torch
from matrices import seeded

from ritz import NotConvergedError, maxent, moments
from ritz.spectra._maxent.dual import chebyshev
from ritz.testing import with_spectrum

STEPS = 400  # of all variances together: a tenth of a second with a hundred moments


def atoms(nodes, m):
    return chebyshev(torch.tensor(nodes, dtype=torch.float64), m).mean(0)


def check_honest(found, asked):
    """A result matches its moments, reports their relaxation, or reports its failure."""
    assert found.num_steps <= STEPS
    off = float((found.fitted - asked[1:]).abs().max())
    assert found.moment_error == pytest.approx(off, abs=1e-12)
    x = torch.linspace(-1, 1, 201, dtype=torch.float64)
    assert bool(found.pdf(x).isfinite().all())
    assert not found.status.ok or float(found.cdf(x).diff().min()) > -1e-12
    if not found.status.ok:
        assert found.status.advice
        with pytest.raises(NotConvergedError):
            found.raise_if_failed()
    elif found.relaxation:
        assert f"relaxed to a variance of {found.relaxation:.0g}" in found.status.message
        assert float(found.ridge.max()) == pytest.approx(found.relaxation)
    else:
        assert found.moment_error < 1e-8


@pytest.mark.parametrize("m", [1, 2, 10, 30, 100])
@pytest.mark.parametrize(
    "nodes", [[1.0], [-1.0], [0.3], [-1.0, 1.0], [-0.5, 0.5], [0.1, 0.11], [-0.9, 0.2, 0.3, 1.0]]
)
def test_moments_of_atoms_are_matched_or_relaxed(nodes, m):
    asked = atoms(nodes, m)
    found = maxent(asked)
    check_honest(found, asked)
    if found.status.ok:
        mean = sum(nodes) / len(nodes)
        assert found.moment(1) == pytest.approx(mean, abs=found.moment_error + 1e-3)


@pytest.mark.parametrize("m", [1, 2, 10, 30, 100])
@pytest.mark.parametrize("kind", ["too large", "no variance", "random", "wild", "alternating"])
def test_infeasible_moments_are_relaxed_or_reported(kind, m):
    given = {
        "too large": torch.full((m,), 1.5),
        "no variance": torch.full((m,), -1.0),
        "random": torch.randn(m, generator=seeded(0)),
        "wild": 1e6 * torch.randn(m, generator=seeded(1)),
        "alternating": (-1.0) ** torch.arange(m) * 2,
    }[kind]
    asked = torch.cat([torch.ones(1), given]).double()
    found = maxent(asked)
    check_honest(found, asked)
    assert found.relaxation > 0 or not found.status.ok


def test_infeasible_moments_are_given_up_early():
    many = torch.cat([torch.ones(200, 1), torch.randn(200, 30, generator=seeded(0))], 1).double()
    found = maxent(many)
    assert max(density.num_steps for density in found) <= 250
    assert sum(density.num_steps for density in found) / 200 < 80


@pytest.mark.parametrize("mean", [0.0, 0.5, -0.999, 0.999999, 1.0])
def test_one_moment_gives_an_exponential(mean):
    """Its rate a solves ``coth(a) - 1/a = mean``."""
    asked = torch.tensor([1.0, mean], dtype=torch.float64)
    found = maxent(asked)
    check_honest(found, asked)
    rate = -float(found.alphas[0])
    if found.relaxation == 0 and mean:
        assert 1 / math.tanh(rate) - 1 / rate == pytest.approx(mean, abs=1e-8)
    assert (rate == 0.0) == (mean == 0.0)


@pytest.mark.parametrize("m", [4, 30])
def test_an_eigenvalue_at_the_upper_bound_is_allowed(m):
    values = torch.cat([torch.linspace(0.1, 0.6, 99), torch.ones(1)]).double()
    op = with_spectrum(values, generator=seeded(0))
    found = maxent(moments(op, num_moments=m, interval=(0.0, 1.0), num_probes=20))
    assert found.status.outcome == "converged"
    assert found.mass(0.0, 1.0) == pytest.approx(1.0, abs=1e-9)
    assert found.moment(1) == pytest.approx(float(values.mean()), rel=0.05)


@pytest.mark.parametrize("value", [1.0, 1e-9, -3e7])
def test_one_repeated_eigenvalue_gives_a_narrow_density(value):
    found = maxent(moments(value * torch.eye(50, dtype=torch.float64), num_moments=20))
    assert found.num_steps <= STEPS
    assert found.status.outcome == "converged"
    assert found.moment(1) == pytest.approx(value, rel=1e-3)


def test_a_multiple_of_the_identity_at_the_end_of_the_interval_is_allowed():
    measured = moments(torch.eye(50).double(), num_moments=20, interval=(0.0, 1.0))
    found = maxent(measured)
    check_honest(found, measured.mean)
    assert found.relaxation > 0
    assert found.moment(1) == pytest.approx(1.0, abs=0.05)


def test_standard_errors_of_zero_equal_no_standard_errors():
    asked = atoms([-0.6, -0.1, 0.0, 0.4, 0.7], 6)
    exact, found = maxent(asked), maxent(asked, stderr=torch.zeros(7))
    assert torch.equal(found.alphas, exact.alphas)
    assert torch.equal(found.ridge, exact.ridge)


@pytest.mark.parametrize("error", [1e3, 1e150, 1e300])
def test_wildly_large_standard_errors_leave_the_prior(error):
    asked = atoms([0.3], 10)
    found = maxent(asked, stderr=torch.full((11,), error, dtype=torch.float64))
    assert found.status.outcome == "converged"
    assert float(found.alphas.abs().max()) < 1e-5
    assert found.entropy == pytest.approx(math.log(2), abs=1e-5)
    assert found.relaxation == 0.0


def test_one_moment_without_an_error_is_matched_beside_moments_with_large_errors():
    errors = torch.full((6,), 1e200, dtype=torch.float64)
    errors[2] = 0.0
    found = maxent(atoms([-0.5, 0.5], 5), stderr=errors)
    assert found.status.outcome == "converged"
    assert float(found.fitted[1] - found.targets[1]) == pytest.approx(0.0, abs=1e-8)
    assert float(found.alphas[[0, 2, 3, 4]].abs().max()) < 1e-9


@pytest.mark.parametrize("basis", ["legendre", "power"])
def test_large_errors_in_another_basis_stay_large_in_the_chebyshev_basis(basis):
    errors = torch.full((5,), 1e200, dtype=torch.float64)
    found = maxent(torch.tensor([1.0, 0.1, 0.2, 0.0, 0.1]), basis=basis, stderr=errors)
    assert found.status.outcome == "converged"
    assert float(found.alphas.abs().max()) < 1e-9
