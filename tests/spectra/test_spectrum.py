"""Norms, negative mass and cosines of a spectrum."""

import re

import pytest
import torch
from matrices import seeded

from ritz.spectra import lanczos, lanczos_block
from ritz.spectra._lanczos.spectrum import least_frobenius_norm, negative_values
from ritz.testing import with_spectrum

DTYPES = [torch.float32, torch.float64]


def spiked(dtype, generator):
    values = torch.linspace(-0.02, 0.03, 400, dtype=torch.float64)
    values[-3:] = torch.tensor([2.0, 5.0, 8.0])
    return with_spectrum(values.to(dtype), generator=generator), values


def printed(spectrum):
    """Frobenius and spectral norm, read from the print of a spectrum."""
    found = re.search(r"Frobenius norm (\S+) ± \S+, spectral norm >= (\S+)", str(spectrum))
    return tuple(map(float, found.groups()))


@pytest.mark.parametrize("mode", ["full", "partial", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norms_printed_do_not_contradict_each_other(rng, dtype, mode):
    op, values = spiked(dtype, rng)
    raised = 0
    for seed in range(12):
        generator = seeded(seed)
        found = lanczos(op, num_steps=25, reorthogonalize=mode, generator=generator)
        sampled = float(400 * found.weights @ found.values.square()) ** 0.5
        frobenius, spectral = printed(found)
        least = least_frobenius_norm(found)
        assert frobenius == pytest.approx(max(sampled, least), rel=1e-4)
        assert frobenius >= spectral * (1 - 1e-4)  # five digits are printed
        assert least <= float(values.norm()) * (1 + 1e-5)
        raised += sampled < least
    # Often the probe has a small part along the largest eigenvectors.
    assert raised >= 3


def test_the_floor_is_the_sum_over_all_values_unless_they_repeat(rng):
    op, values = spiked(torch.float64, rng)
    full = lanczos(op, num_steps=25)
    assert least_frobenius_norm(full) > (8**2 + 5**2 + 2**2) ** 0.5 * (1 - 1e-9)
    ghosts = lanczos(op, num_steps=120, reorthogonalize="none")
    # Ghosts repeat eigenvalues, so the sum over all values is no lower bound.
    assert float(ghosts.values.norm()) > float(values.norm())
    assert least_frobenius_norm(ghosts) == pytest.approx(8.0)


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cosines_are_those_of_the_ritz_vectors(rng, dtype, mode):
    op, _ = spiked(dtype, rng)
    start, against = (torch.randn(400, 3, generator=rng, dtype=dtype) for _ in range(2))
    options = {"num_steps": 20, "start": start, "reorthogonalize": mode}
    found = lanczos_block(op, against=against, **options)
    units = against.double() / against.double().norm(dim=0)
    for run, same in zip(found, lanczos_block(op, vectors=True, **options), strict=True):
        assert run.cosines.shape == (3, 20)
        expected = units.T @ same.vectors.double()
        tolerance = 20 * torch.finfo(dtype).eps  # of sums of 400 entries
        torch.testing.assert_close(run.cosines, expected, rtol=0, atol=tolerance)
        assert same.cosines is None


def test_cosines_with_the_start_are_the_roots_of_the_weights(rng):
    op, _ = spiked(torch.float64, rng)
    start = torch.randn(400, 1, generator=rng, dtype=torch.float64)
    (run,) = lanczos_block(op, num_steps=10, start=start, against=start)
    torch.testing.assert_close(run.cosines[0].square(), run.weights, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("against", "mode", "message"),
    [
        (torch.ones(30), "full", r"against must be \(30, k\), got \(30,\)"),
        (torch.ones(30, 0), "full", "against must have at least one column"),
        (torch.ones(29, 2), "full", "against must .*30"),
        (torch.ones(30, 2).double(), "full", "against must .*float32"),
        (torch.zeros(30, 2), "full", "against must have .* no column of zeros"),
        (torch.ones(30, 2), "none", "against needs a basis"),
    ],
)
def test_vectors_that_cosines_cannot_be_taken_with_are_named(against, mode, message):
    with pytest.raises((TypeError, ValueError), match=message):
        lanczos_block(torch.eye(30), num_steps=2, against=against, reorthogonalize=mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_steps", [8, 25, 60])
def test_the_negative_mass_lies_between_its_certain_and_its_possible_value(rng, dtype, num_steps):
    op, values = spiked(dtype, rng)
    truth = float((values < 0).double().mean())
    below = [lanczos(op, num_steps=num_steps, generator=seeded(seed))
             for seed in range(12)]  # fmt: skip
    low, high = (
        torch.stack([run.weights[negative_values(run)[side]].sum() for run in below])
        for side in (0, 1)
    )
    noise = 4 * float(low.std() + high.std()) / 12**0.5
    assert float(low.mean()) - noise <= truth <= float(high.mean()) + noise


def test_the_share_whose_sign_is_not_known_is_printed(rng):
    op, _ = spiked(torch.float64, rng)
    early, late = (lanczos(op, num_steps=steps, generator=seeded(0)) for steps in (10, 400))
    assert re.search(r"negative mass \S+ ± \S+, sign undecided 0\.\d+ ± \S+, ", str(early))
    assert re.search(r"negative mass 0\.\d+ ± \S+, mass nearest", str(late))
