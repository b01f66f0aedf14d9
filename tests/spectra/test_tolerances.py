"""A converged result is within its tolerance, for ill-conditioned matrices too."""

import pytest
import torch
from matrices import hidden, seeded

import ritz
from ritz.testing import with_spectrum

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
