"""A product with NaN gives an error or a failed status, because no comparison passes on NaN."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from matrices import seeded

import ritz
from ritz._core.checks import is_below
from ritz.measures import rank_degeneracy
from ritz.operators import FunctionOperator
from ritz.spectra import lanczos_block, log_likelihood, moments
from ritz.testing import with_spectrum

N = 40
RHS = torch.ones(N, dtype=torch.float64)
ESTIMATORS = {
    "lanczos": lambda op: ritz.lanczos(op, num_steps=10),
    "partial": lambda op: ritz.lanczos(op, num_steps=10, reorthogonalize="partial"),
    "none": lambda op: ritz.lanczos(op, num_steps=10, reorthogonalize="none"),
    "lanczos_block": lambda op: lanczos_block(op, num_steps=8, num_probes=2)[1],
    "eigenpairs": lambda op: ritz.eigenpairs(op, largest=2, smallest=1),
    "bounds": ritz.bounds,
    "spectral_norm": ritz.spectral_norm,
    "density": lambda op: ritz.density(op, num_steps=10, num_probes=2),
    "kpm": lambda op: ritz.density(op, num_steps=10, num_probes=2, method="kpm"),
    "moments": lambda op: moments(op, num_moments=10, num_probes=2),
    "solve": lambda op: ritz.solve(op, RHS),
    "solve block": lambda op: ritz.solve(op, RHS[:, None].expand(-1, 2)),
    "trace": lambda op: ritz.trace(op, rtol=1e-3),
    "hutchinson": lambda op: ritz.trace(op, method="hutchinson", rtol=1e-3),
    "hutch++": lambda op: ritz.trace(op, method="hutch++", rtol=1e-3),
    "diagonal": lambda op: ritz.spectra.diagonal(op, rtol=1e-3),
    "frobenius_norm": lambda op: ritz.frobenius_norm(op, rtol=1e-3),
    "trace_function": lambda op: ritz.trace_function(op, torch.exp, num_steps=10, rtol=1e-3),
    **{
        f"trace_function, {method}": lambda op, method=method: ritz.trace_function(
            op, torch.sqrt, num_steps=4, num_probes=4, method=method, floor=0.25, rtol=1e-3
        )
        for method in ("krylov", "chebyshev", "maxent", "eigenvalues")
    },
    "logdet": lambda op: ritz.logdet(op, rtol=1e-3),
    "logdet, lanczos": lambda op: ritz.logdet(op, method="lanczos", num_products=30, rtol=1e-3),
    "log_likelihood": lambda op: log_likelihood(op, RHS, method="lanczos", num_probes=4),
    "rank_degeneracy": lambda op: (
        rank_degeneracy(lanczos_block(op, num_steps=8, num_probes=2), matrix="hessian").mass
    ),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_product_that_is_not_finite_gives_an_error_or_a_failed_status(name, call, bad):
    spectrum = torch.linspace(0.5, 2.0, N, dtype=torch.float64)
    matrix = with_spectrum(spectrum, generator=seeded(0)).matrix
    calls = 0

    def product(block):
        nonlocal calls
        calls += 1
        result = matrix @ block
        if calls == call:
            result[3] = bad
        return result

    op = FunctionOperator(product, n=N, dtype=torch.float64)
    calls = 0  # the construction of the operator may have multiplied too
    try:
        result = ESTIMATORS[name](op)
    except ValueError:
        return
    assert calls < call or not result.status.ok


@pytest.mark.parametrize("bad", [math.nan, torch.tensor(math.nan), torch.tensor([0.0, math.nan])])
def test_nan_is_not_below_any_bound(bad):
    assert not is_below(bad, 1.0)
    assert not is_below(bad, math.inf)
    assert not is_below(0.0, bad)


def test_tolerances_are_compared_by_is_below_or_with_the_error_on_the_left():
    # ``error > rtol`` is false for NaN, so that what it guards passes. ``error <= rtol`` fails.
    word = re.compile(r"(^|_)(rtol|atol|tolerance|allowed)$")
    source = Path(ritz.__file__).parent
    wrong = []
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare) or isinstance(node.ops[0], ast.LtE):
                continue
            operators = (ast.Lt, ast.Gt, ast.GtE)
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
            names = [part.id if isinstance(part, ast.Name) else part.attr for part in parts]
            if isinstance(node.ops[0], operators) and any(map(word.search, names)):
                wrong.append(f"{path.relative_to(source)}:{node.lineno}")
    assert not wrong
