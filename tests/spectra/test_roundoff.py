"""Roundoff in estimates without sampling error, on matrices whose eigenvalues are known exactly."""

import math

import mpmath
import pytest
import scipy.sparse as sparse
import torch
from matrices import hidden, seeded
from scipy.linalg import hadamard, hilbert, invhilbert

import ritz
from ritz.operators import FunctionOperator


def exact_matrix(n, seed):
    """A dense matrix without roundoff, and its eigenvalues.

    Of a Hadamard matrix H, H diag(k) H / n has the eigenvalues k. All sums here are short enough to
    be exact.
    """
    generator = seeded(seed)
    eigenvalues = torch.randint(1, 2**12, (n,), generator=generator).double() / 2**9
    signs = torch.from_numpy(hadamard(n)).double()
    return (signs * eigenvalues) @ signs / n, eigenvalues


def exact_sum(function, eigenvalues):
    with mpmath.workdps(40):
        return sum(function(mpmath.mpf(float(value))) for value in eigenvalues)


def holds(estimate, truth):
    with mpmath.workdps(40):
        error = abs(mpmath.mpf(float(estimate)) - truth)
    return float(error) <= float(estimate.error(0.95))


LOGDETS = {
    "factor": lambda matrix: ritz.logdet(matrix),
    "Krylov": lambda matrix: ritz.logdet(hidden(matrix), method="krylov"),
}


@pytest.mark.parametrize("n", [2, 16, 128])
@pytest.mark.parametrize("name", LOGDETS)
def test_the_interval_of_an_exact_log_determinant_contains_the_exact_value(name, n):
    for seed in range(5):
        matrix, eigenvalues = exact_matrix(n, seed)
        estimate = LOGDETS[name](matrix)
        assert float(estimate.stderr) == 0
        assert holds(estimate, exact_sum(mpmath.log, eigenvalues))
        assert float(estimate.truncation) < 1e-10


def test_intervals_of_traces_from_all_eigenvalues_contain_the_exact_value():
    functions = [
        (torch.reciprocal, lambda x: 1 / x),
        (torch.log, mpmath.log),
        (torch.exp, mpmath.exp),
        (torch.sqrt, mpmath.sqrt),
    ]
    runs = []
    for n in (16, 64, 128):
        for seed in range(6):
            matrix, eigenvalues = exact_matrix(n, seed)
            for function, precise in functions:
                estimate = ritz.trace_function(matrix, function, num_steps=n)
                assert estimate.method == f"all {n} eigenvalues"
                assert float(estimate.stderr) == 0
                runs.append(holds(estimate, exact_sum(precise, eigenvalues)))
    assert sum(runs) / len(runs) >= 0.95


def test_the_inverse_on_a_whole_block_krylov_space_has_the_roundoff_of_its_products():
    # The complete bipartite graph of 5 and 60 vertices: norm 65, and one eigenvalue of 1/16.
    shift = 1 / 16
    adjacency = torch.zeros(65, 65, dtype=torch.float64)
    adjacency[:5, 5:] = adjacency[5:, :5] = 1
    matrix = torch.diag(adjacency.sum(1) + shift) - adjacency
    eigenvalues = [shift, *[5 + shift] * 59, *[60 + shift] * 4, 65 + shift]
    truth, runs = exact_sum(lambda x: 1 / x, eigenvalues), []
    for seed in range(60):
        generator = seeded(seed)
        estimate = ritz.trace_function(
            hidden(matrix), torch.reciprocal, num_steps=12, num_probes=16, method="krylov",
            generator=generator,
        )  # fmt: skip
        assert float(estimate.truncation) < 1e-12 * float(estimate)
        runs.append(holds(estimate, truth))
    assert sum(runs) / len(runs) >= 0.95


WHOLE = {
    "trace": (lambda op: ritz.trace(op, num_probes=64), torch.trace),
    "Hutchinson": (lambda op: ritz.trace(op, method="hutchinson", num_probes=64), torch.trace),
    "Frobenius norm": (
        lambda op: ritz.frobenius_norm(op, num_probes=64),
        lambda m: math.hypot(*m.ravel()),
    ),
    "diagonal": (lambda op: ritz.diagonal(op, num_probes=64), torch.diagonal),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_interval_of_a_whole_basis_contains_the_exact_value(name):
    run, truth = WHOLE[name]
    for seed in range(5):
        # Division by 3 rounds the entries, so the products are not exact.
        matrix = exact_matrix(64, seed)[0] / 3
        estimate = run(hidden(matrix))
        assert estimate.stderr.max() == 0
        assert bool((estimate.truncation > 0).all())
        assert bool(((estimate.mean - truth(matrix)).abs() <= estimate.error()).all())


@pytest.mark.parametrize("method", ["auto", "krylov", "eigenvalues", "lanczos"])
@pytest.mark.parametrize("n", [6, 8, 10, 11, 12])
def test_the_inverse_of_a_hilbert_matrix_has_the_error_of_its_condition_number(method, n):
    # The condition numbers are 1e7 to 1e16, and the error grows with them.
    matrix = torch.from_numpy(hilbert(n)).double()
    truth = float(invhilbert(n, exact=False).trace())
    estimate = ritz.trace_function(matrix, torch.reciprocal, num_steps=n, method=method)
    assert float(estimate.error()) >= abs(float(estimate) - truth)
    assert float(estimate.truncation) > 1e-10 * truth
    if n >= 12:  # an eigenvalue of 1e-17 may be zero
        assert estimate.status.outcome == "uncertain"


def test_the_bar_of_xtrace_is_not_below_roundoff(rng):
    # With more probes than the rank, the samples differ only by roundoff.
    factor = torch.randn(43, 10, generator=rng, dtype=torch.float64)
    matrix = factor @ factor.T
    with mpmath.workdps(40):
        truth = sum(mpmath.mpf(float(entry)) for entry in matrix.diagonal())
    for seed in range(20):
        generator = seeded(seed)
        estimate = ritz.trace(hidden(matrix), num_probes=32, generator=generator)
        assert holds(estimate, truth)
        assert float(estimate.error()) >= 1e-16 * float(estimate)
        assert float(estimate.error()) < 1e-12 * float(estimate)


@pytest.mark.parametrize("noise", [0.0, 1e-20])
@pytest.mark.parametrize("method", ["auto", "lanczos", "krylov"])
def test_a_singular_matrix_has_no_log_determinant(method, noise, rng):
    # A path with free ends: its Laplacian has the eigenvalue zero, up to the noise.
    n = 400
    ones = torch.ones(n, dtype=torch.float64)
    matrix = torch.diag(2 * ones) - torch.diag(ones[1:], 1) - torch.diag(ones[1:], -1)
    matrix[0, 0] = matrix[-1, -1] = 1.0
    matrix += noise * torch.eye(n, dtype=torch.float64)
    for num_products in (200, 3 * n):
        try:
            estimate = ritz.logdet(
                hidden(matrix), method=method, num_products=num_products, rtol=1e-2, generator=rng
            )
        except ritz.spectra.NotPositiveDefiniteError:
            continue
        assert estimate.status.outcome == "uncertain"
        assert float(estimate.truncation) == torch.inf


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("n", [10, 37, 100, 301])
def test_a_singular_matrix_has_no_factor(form, n):
    # Roundoff decides whether the last pivot is negative, zero or positive.
    entries = [-1.0, 2.0, -1.0]
    matrix = sparse.diags_array(entries, offsets=[-1, 0, 1], shape=(n, n)).tolil()
    matrix[0, 0] = matrix[n - 1, n - 1] = 1.0
    matrix = matrix / 3
    try:
        estimate = ritz.logdet(matrix.toarray() if form == "dense" else matrix.tocsr())
    except ritz.spectra.NotPositiveDefiniteError:
        return
    assert estimate.status.outcome == "uncertain"
    assert float(estimate.truncation) == torch.inf


def test_a_norm_by_unit_vectors_is_within_its_error_for_entries_of_one_size():
    """A plain sum of 256 nearly equal squares loses 12 units of roundoff."""
    eigenvalues = torch.tensor([100.0, 50.0, 20.0] + [0.1] * 253, dtype=torch.float64)
    signs = torch.from_numpy(hadamard(256)).double()

    estimate = ritz.frobenius_norm(hidden((signs * eigenvalues / 256) @ signs), rtol=1e-3)

    assert holds(estimate, math.sqrt(math.fsum((eigenvalues**2).tolist())))


@pytest.mark.parametrize("method", ["xtrace", "hutch++"])
def test_a_trace_of_millions_of_float32_rows_holds_its_roundoff(method):
    # Sums of torch over 2 million float32 rows lose four digits.
    u = torch.rand(2_000_000, 1, generator=seeded(1))
    u /= float(u.double().norm())

    def product(block):
        return 100 * u * (u.double() * block).sum(0).float()

    op = FunctionOperator(product, n=len(u), dtype=torch.float32)
    estimate = ritz.trace(op, method=method, num_probes=4)

    assert float(estimate.mean) == pytest.approx(100, abs=4e-4)
