"""Error bars where they are hard to get right: no floor, few rows, single precision."""

import math

import pytest
import torch

import ritz
from ritz.operators import FunctionOperator, KernelOperator
from ritz.testing import with_spectrum

DOUBLE = torch.float64
SPECTRA = {
    "flat": torch.linspace(1, 10, 200, dtype=DOUBLE),
    "decaying": torch.logspace(-8, 2, 200, dtype=DOUBLE),
    "power law": 1e-8 + torch.arange(1, 201, dtype=DOUBLE) ** -3,
    "two clusters": torch.cat(
        [torch.logspace(-12, -11.5, 100, dtype=DOUBLE), torch.logspace(0, 0.5, 100, dtype=DOUBLE)]
    ),
    "condition 1e15": torch.logspace(-15, 0, 200, dtype=DOUBLE),
}


def hidden(matrix):
    """The matrix known by its products alone."""
    return FunctionOperator(lambda block: matrix @ block, n=len(matrix), dtype=matrix.dtype)


def bars(found, exact):
    """Distance to the truth in combined error bars."""
    bar = math.hypot(float(found.stderr), float(found.truncation))
    return abs(float(found) - exact) / (bar + 1e-12 * abs(exact))


@pytest.mark.parametrize("method", ["lanczos", "krylov"])
@pytest.mark.parametrize("name", SPECTRA)
def test_without_a_floor_the_truth_lies_within_four_bars(name, method, rng):
    values = SPECTRA[name]
    op = hidden(with_spectrum(values, generator=rng).matrix)
    exact = float(values.log().sum())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        found = ritz.logdet(op, method=method, num_products=120, generator=generator)
        assert bars(found, exact) <= 4


@pytest.mark.parametrize("power", [-1.5, -1.0, 0.5])
def test_traces_of_slowly_converging_functions_lie_within_four_bars(power, rng):
    values = torch.logspace(-3, 1, 200, dtype=DOUBLE)
    op = with_spectrum(values, generator=rng)
    found = ritz.trace_function(op, lambda x: x**power, num_steps=10)
    assert bars(found, float((values**power).sum())) <= 4


def test_a_space_of_one_block_has_unknown_truncation(rng):
    op = hidden(with_spectrum(SPECTRA["decaying"], generator=rng).matrix)
    found = ritz.trace_function(op, torch.sqrt, method="krylov", num_steps=3, num_probes=16)
    assert math.isnan(float(found.truncation))
    values = torch.logspace(-2, 1, 200, dtype=DOUBLE)
    op = hidden(with_spectrum(values, generator=rng).matrix)
    found = ritz.trace_function(op, torch.sqrt, method="krylov", num_steps=6, num_probes=16)
    assert "25 directions of 50" in found.method
    assert bars(found, float(values.sqrt().sum())) <= 4


@pytest.mark.parametrize("seed", range(25))
def test_two_rows_have_a_spread(seed):
    # Two random signs make two patterns: one in eight sets of four probes has but one of them.
    matrix = torch.tensor([[3.0, 1.0], [1.0, 0.5]], dtype=DOUBLE)
    generator = torch.Generator().manual_seed(seed)
    found = ritz.logdet(hidden(matrix), method="lanczos", num_products=40, generator=generator)
    assert float(found.stderr) > 0
    assert bars(found, math.log(0.5)) <= 4


@pytest.mark.parametrize("noise", [1e-1, 1e-3, 1e-5])
def test_single_precision_has_the_error_of_its_roundoff(noise):
    points = torch.rand(600, 2, generator=torch.Generator().manual_seed(0))
    exact = float(
        torch.logdet(KernelOperator(points.double(), lengthscale=0.3, noise=noise).dense())
    )
    op = KernelOperator(points, lengthscale=0.3, noise=noise)
    found = ritz.logdet(op, method="krylov", num_products=300)
    assert bars(found, exact) <= 4
    assert abs(float(found) - exact) < 0.01 * abs(exact)


def test_a_repeated_eigenvalue_in_single_precision():
    found = ritz.logdet(hidden(3 * torch.eye(500)), method="lanczos", num_products=100)
    assert 0 < float(found.truncation) < 1e-6 * float(found)
    assert bars(found, 500 * math.log(3)) <= 4
