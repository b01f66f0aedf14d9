"""Traces in which simple eigenvalues are counted exactly, and the rest is sampled."""

import math
from functools import cache, partial

import pytest
import torch
from curvature.networks import seeded

from ritz.measures._bulk_edge import vector_errors
from ritz.measures._sharpness import simple_eigenvalues, traces
from ritz.spectra import eigenpairs, lanczos_block
from ritz.testing import with_spectrum

DTYPES = [torch.float32, torch.float64]
OFTEN = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]  # many repetitions
FUNCTIONS = {
    "trace": lambda run: run.values,
    "square": lambda run: run.values.square(),
    "below": lambda run: (run.values < -run.roundoff).double(),
}
EXACT = {
    "trace": torch.sum,
    "square": lambda values: values.square().sum(),
    "below": lambda values: (values < 0).double().sum(),
}


def spiked(outliers, n=300):
    """A bulk with a gap at zero, so that a step there is no trouble to quadrature."""
    values = torch.linspace(-0.3, 1.0, n, dtype=torch.float64)
    values += torch.where(values < 0, -0.2, 0.2)
    values[-len(outliers) :] = torch.tensor(outliers, dtype=torch.float64)
    return values


SIMPLE = spiked([-6.0, 5.0, 8.0, 12.0])
DOUBLE = spiked([-6.0, -6.0, 5.0, 8.0, 8.0, 8.0, 12.0])


@cache
def with_values(values, dtype):
    return with_spectrum(torch.tensor(values, dtype=dtype), generator=seeded(1))


def runs_of(values, *, num_probes, seed=0, dtype=torch.float64, num_steps=40, split=True):
    op = with_values(tuple(values.tolist()), dtype)
    start = torch.randn(len(values), num_probes, generator=seeded(seed), dtype=dtype)
    against = start if split else None
    return lanczos_block(op, num_steps=num_steps, start=start, against=against)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_probes", [2, 8])
def test_only_simple_eigenvalues_are_counted_exactly(num_probes, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for values, expected in ((SIMPLE, [-6.0, 5.0, 8.0, 12.0]), (DOUBLE, [5.0, 12.0])):
        runs = runs_of(values, num_probes=num_probes, dtype=dtype)
        places = simple_eigenvalues(runs)
        for run, own in zip(runs, places, strict=True):
            torch.testing.assert_close(
                run.values[own], torch.tensor(expected).double(), rtol=tolerance, atol=0
            )


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-5, 1e-3])
def test_pair_of_unresolved_eigenvalues_is_not_split_off(gap):
    """Two probes each, forty times: two lines in a plane are seldom within a degree."""
    values = spiked([5.0, 12.0, 12.0 + gap])
    slipped = 0
    for seed in range(40):
        runs = runs_of(values, num_probes=2, seed=seed, num_steps=12)
        places = simple_eigenvalues(runs)[0]
        slipped += int((runs[0].values[places] > 11).sum()) == 1  # two would be right
    assert slipped <= 2  # at 0.8 per cent each: three and more once in 240


@pytest.mark.parametrize("dtype", OFTEN)
@pytest.mark.parametrize("values", [SIMPLE, DOUBLE], ids=["simple", "multiple"])
@pytest.mark.parametrize("num_probes", [2, 6])
def test_split_traces_are_unbiased_over_many_repetitions(values, dtype, num_probes):
    repetitions = 60 if num_probes == 2 else 25
    means = []
    for seed in range(repetitions):
        runs = runs_of(values, num_probes=num_probes, seed=seed, dtype=dtype)
        means.append(traces(runs, list(FUNCTIONS.values()))[0].mean(1))
    means = torch.stack(means, 1)
    for name, row in zip(FUNCTIONS, means, strict=True):
        exact = float(EXACT[name](values))
        error = float(row.std()) / math.sqrt(repetitions)
        # Roundoff of the matrix itself beside, in single precision.
        slack = 1e-5 * float(values.abs().sum()) if dtype == torch.float32 else 1e-9
        assert abs(float(row.mean()) - exact) <= 4 * error + slack, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_splitting_off_outliers_leaves_only_the_error_of_the_rest(dtype):
    """Nearly all of the square of the norm, 269, is that of four eigenvalues."""
    make = partial(runs_of, SIMPLE, num_probes=8, dtype=dtype)
    plain, none = traces(make(split=False), list(FUNCTIONS.values()))
    split, count = traces(make(), list(FUNCTIONS.values()))
    assert (none, count) == (0, 4)
    ratios = split.std(1) / plain.std(1)
    assert float(ratios[0]) < 0.5  # the trace, most of which is the bulk's
    assert float(ratios[1]) < 0.1  # the square of the Frobenius norm
    assert abs(float(split[1].mean()) - float(SIMPLE.square().sum())) < 4 * float(split[1].std())


def test_full_krylov_space_of_simple_eigenvalues_has_no_sampling_error():
    values = torch.linspace(-1.0, 2.0, 20, dtype=torch.float64)
    samples, count = traces(runs_of(values, num_probes=3, num_steps=20), list(FUNCTIONS.values()))
    assert count == 20
    for name, row in zip(FUNCTIONS, samples, strict=True):
        exact = torch.full_like(row, float(EXACT[name](values)))
        torch.testing.assert_close(row, exact, rtol=1e-10, atol=0)


def test_nothing_is_split_off_with_one_probe_or_without_cosines():
    runs = runs_of(SIMPLE, num_probes=1)
    assert simple_eigenvalues(runs).shape == (1, 0)
    samples, count = traces(runs, list(FUNCTIONS.values()))
    assert count == 0
    run = runs[0]
    expected = 300 * (run.weights * run.values).sum() / run.weights.sum()
    torch.testing.assert_close(samples[0, 0], expected)
    assert simple_eigenvalues(runs_of(SIMPLE, num_probes=3, split=False)).shape == (3, 0)


def test_eigenvalue_missed_by_one_probe_is_sampled():
    op = with_spectrum(SIMPLE, generator=seeded(1))
    top = torch.linalg.eigh(op.matrix).eigenvectors[:, -1:]
    start = torch.randn(300, 3, generator=seeded(0), dtype=torch.float64)
    start[:, 1:2] -= top @ (top.T @ start[:, 1:2])
    runs = lanczos_block(op, num_steps=14, start=start, against=start)
    places = simple_eigenvalues(runs)
    assert float(runs[0].values[places[0]].max()) == pytest.approx(8.0)


@pytest.mark.parametrize("rtol", [1e-2, 1e-3])
def test_the_error_of_an_eigenvector_counts_eigenvalues_beside_the_wanted_ones(rtol):
    # A single pair has no other wanted pair from which a gap could be taken.
    values = torch.cat([torch.linspace(0, 9, 77), torch.tensor([9.2, 9.6, 10.0])]).double()
    op = with_spectrum(values, generator=seeded(1))
    leading = torch.linalg.eigh(op.matrix).eigenvectors[:, -1]
    for seed in range(5):
        pairs = eigenpairs(op, largest=1, rtol=rtol, certify="none", generator=seeded(seed))
        sine = math.sqrt(max(0.0, 1 - float(leading @ pairs.vectors[:, 0]) ** 2))
        assert sine <= float(vector_errors(pairs)[0])
