"""A converged result is within its tolerance, for ill-conditioned matrices too."""

import math

import pytest
import torch
from matrices import hidden, seeded

import ritz
from ritz import rmt, spectra
from ritz.operators import KernelOperator, check_symmetric
from ritz.rmt import bounds
from ritz.testing import check_operator, with_spectrum

DOUBLE = torch.float64
SPECTRA = {
    "flat": torch.linspace(1, 2, 120, dtype=DOUBLE),
    "condition 1e3": torch.logspace(-2, 1, 150, dtype=DOUBLE),
    "condition 1e8": torch.logspace(-6, 2, 150, dtype=DOUBLE),
    "power law": 1e-6 + torch.arange(1, 151, dtype=DOUBLE) ** -2,
    "exponential": 1e-8 + 0.8 ** torch.arange(150, dtype=DOUBLE),
    "small cluster": torch.cat([torch.full((40,), 1e-5), torch.linspace(1, 3, 100)]).double(),
    "outliers": torch.cat([torch.linspace(0.1, 1, 140), torch.logspace(1, 3, 5)]).double(),
}
FUNCTIONS = {
    "log": torch.log,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "exp": lambda x: torch.exp(-x),
    "power": lambda x: x**-0.5,
}


def outcomes(run, truth, rtol, seeds):
    """How each run ended, and whether its true error is within the tolerance."""
    results = []
    for seed in range(seeds):
        estimate = run(seeded(seed))
        right = abs(float(estimate) - truth) <= rtol * abs(truth)
        results.append((estimate.status.outcome, right))
        within = float(estimate.error()) <= rtol * abs(float(estimate))
        assert (estimate.status.outcome == "converged") == within
        assert estimate.status.ok == within
    return results


def check(results):
    converged = [right for outcome, right in results if outcome == "converged"]
    assert sum(converged) >= 0.95 * len(converged)
    return len(converged) / len(results)


@pytest.mark.parametrize("floor", [False, True], ids=["no floor", "floor"])
@pytest.mark.parametrize("method", ["lanczos", "krylov"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_converged_traces_of_functions_are_within_the_tolerance(name, method, floor):
    function, results, easy = FUNCTIONS[name], [], []
    for kind, values in SPECTRA.items():
        op = hidden(with_spectrum(values).matrix)

        def run(generator, op=op, values=values):
            return ritz.trace_function(
                op,
                function,
                num_steps=8,
                num_probes=16,
                max_probes=64,
                method=method,
                rtol=0.1,
                floor=0.99 * float(values.min()) if floor else None,
                generator=generator,
            )

        ended = outcomes(run, float(function(values).sum()), 0.1, seeds=4)
        results += ended
        easy += ended if kind == "flat" else []
    check(results)
    assert check(easy) == 1


@pytest.mark.parametrize("floor", [False, True], ids=["no floor", "floor"])
@pytest.mark.parametrize("method", ["lanczos", "krylov", "auto"])
def test_converged_log_determinants_are_within_the_tolerance(method, floor):
    results, easy = [], []
    for kind, values in SPECTRA.items():
        op = hidden(with_spectrum(values).matrix)

        def run(generator, op=op, values=values):
            return ritz.logdet(
                op,
                method=method,
                num_products=130,
                rtol=0.05,
                floor=0.99 * float(values.min()) if floor else None,
                generator=generator,
            )

        ended = outcomes(run, float(values.log().sum()), 0.05, seeds=6)
        results += ended
        easy += ended if kind == "flat" else []
    check(results)
    assert check(easy) >= 0.5


def test_a_tolerance_below_the_truncation_is_not_reached_by_probes_alone():
    # tr 1/A of log-uniform eigenvalues: forty steps see nothing of the smallest ones.
    values = torch.logspace(-6, 2, 300, dtype=DOUBLE)
    op, truth = hidden(with_spectrum(values).matrix), float(values.reciprocal().sum())
    for seed in range(5):
        estimate = ritz.trace_function(
            op,
            torch.reciprocal,
            num_steps=40,
            num_probes=7,
            method="lanczos",
            rtol=0.05,
            max_probes=14,
            generator=seeded(seed),
        )
        assert not estimate.status.ok
        assert float(estimate.error()) >= abs(float(estimate) - truth)
        with pytest.raises(ritz.NotConvergedError):
            estimate.raise_if_failed()


SMALL = torch.diag(torch.linspace(1, 2, 12, dtype=DOUBLE))
POINTS = torch.linspace(0, 1, 12, dtype=DOUBLE)[:, None]
ONES = torch.ones(12, dtype=DOUBLE)


def kernel():
    return KernelOperator(POINTS, noise=torch.tensor(0.1, dtype=DOUBLE, requires_grad=True))


RELATIVE = {
    "trace": lambda rtol: ritz.trace(SMALL, rtol=rtol),
    "frobenius_norm": lambda rtol: ritz.frobenius_norm(SMALL, rtol=rtol),
    "diagonal": lambda rtol: ritz.diagonal(SMALL, rtol=rtol),
    "moments": lambda rtol: ritz.moments(SMALL, num_moments=2, rtol=rtol),
    "trace_function": lambda rtol: ritz.trace_function(SMALL, torch.exp, num_steps=2, rtol=rtol),
    "logdet": lambda rtol: ritz.logdet(SMALL, rtol=rtol),
    "logdet_gradient": lambda rtol: spectra.logdet_gradient(kernel(), rtol=rtol),
    "log_likelihood": lambda rtol: spectra.log_likelihood(kernel(), ONES, rtol=rtol),
    "solve": lambda rtol: ritz.solve(SMALL, ONES, rtol=rtol),
    "eigenpairs": lambda rtol: ritz.eigenpairs(SMALL, largest=1, rtol=rtol),
    "bounds": lambda rtol: ritz.bounds(SMALL, method="gershgorin", rtol=rtol),
    "spectral_norm": lambda rtol: ritz.spectral_norm(SMALL, rtol=rtol),
    "check_symmetric": lambda rtol: check_symmetric(ritz.as_operator(SMALL), rtol=rtol),
    "check_operator": lambda rtol: check_operator(ritz.as_operator(SMALL), rtol=rtol),
    "probes_needed": lambda rtol: bounds.probes_needed(12, condition=2.0, rtol=rtol),
}
ABSOLUTE = {
    "solve": lambda atol: ritz.solve(SMALL, ONES, atol=atol),
    "maxent": lambda atol: ritz.maxent(ritz.moments(SMALL, num_moments=2), atol=atol),
}
LEVELS = {
    "interval": lambda level: ritz.trace(SMALL).interval(level),
    "pdf_interval": lambda level: ritz.density(SMALL, width=0.1).pdf_interval(ONES, level=level),
    "spikes": lambda level: rmt.multiplicative_spikes(3.0, ratio=0.5, size=100, level=level),
    "entropy": lambda level: bounds.entropy_concentration(100, degrees=3, level=level),
}


@pytest.mark.parametrize(
    ("name", "calls", "wrong"),
    [
        ("rtol", RELATIVE, [-0.1, 1.5, math.nan, math.inf]),
        ("atol", ABSOLUTE, [-0.1, math.nan, math.inf]),
        ("level", LEVELS, [-0.1, 1.5, math.nan, math.inf]),
    ],
)
def test_tolerances_and_levels_out_of_range_are_refused(name, calls, wrong):
    for call in calls.values():
        for value in wrong:
            with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
                call(value)
        for value in ("0.1", True, torch.tensor(0.1), [0.1]):
            with pytest.raises(TypeError, match=f"{name} must be a number"):
                call(value)
        call(0.5)
