"""Results of A and of 2^k A agree to roundoff, wherever both are normal numbers."""

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from matrices import seeded

import ritz
from ritz.measures import rank_degeneracy
from ritz.operators import FunctionOperator, KernelOperator
from ritz.spectra import lanczos_block, log_likelihood, logdet_gradient, moments
from ritz.testing import with_spectrum

N = 60
SCALES = [(torch.float64, k) for k in (-900, -540, -270, 270, 510, 900)]
SCALES += [(torch.float32, k) for k in (-100, -50, 50, 100)]


def matrix_and_rhs(dtype):
    generator = seeded(0)
    spectrum = torch.linspace(0.5, 2.0, N, dtype=torch.float64)
    matrix = with_spectrum(spectrum, generator=generator).matrix
    return matrix.to(dtype), torch.randn(N, generator=generator, dtype=torch.float64).to(dtype)


def times(tensor, k):
    # Exact, and in one step: 2^k may leave the range of float32 where the product does not.
    return (tensor.double() * 2.0**k).to(tensor.dtype)


# Each maps an operator, 2^k and the right-hand side to numbers that do not depend on k.
ESTIMATORS = {
    "lanczos": lambda op, unit, b: ritz.lanczos(op, num_steps=20).values / unit,
    "partial": lambda op, unit, b: (
        ritz.lanczos(op, num_steps=20, reorthogonalize="partial").values / unit
    ),
    "none": lambda op, unit, b: (
        ritz.lanczos(op, num_steps=20, reorthogonalize="none").values / unit
    ),
    "lanczos_block": lambda op, unit, b: lanczos_block(op, num_steps=9)[3].residuals / unit,
    "eigenpairs": lambda op, unit, b: ritz.eigenpairs(op, largest=2, smallest=2).values / unit,
    "bounds": lambda op, unit, b: torch.tensor(tuple(ritz.bounds(op)), dtype=torch.float64) / unit,
    "spectral_norm": lambda op, unit, b: ritz.spectral_norm(op).mean / unit,
    "density": lambda op, unit, b: ritz.density(op, num_steps=10).nodes / unit,
    "kpm": lambda op, unit, b: ritz.density(op, num_steps=9, method="kpm").moments.mean,
    "moments": lambda op, unit, b: moments(op, num_moments=8).mean,
    "solve": lambda op, unit, b: ritz.solve(op, b).x * unit,
    "trace": lambda op, unit, b: ritz.trace(op, num_probes=8).mean / unit,
    "hutchinson": lambda op, unit, b: ritz.trace(op, method="hutchinson").mean / unit,
    "hutch++": lambda op, unit, b: ritz.trace(op, method="hutch++", num_probes=9).mean / unit,
    "diagonal": lambda op, unit, b: ritz.spectra.diagonal(op).mean / unit,
    "frobenius_norm": lambda op, unit, b: ritz.frobenius_norm(op).mean / unit,
    "trace_function": lambda op, unit, b: (
        ritz.trace_function(op, torch.sqrt, num_probes=4, num_steps=9).mean / unit**0.5
    ),
    **{
        f"trace_function, {method}": lambda op, unit, b, method=method: (
            ritz.trace_function(
                op, torch.sqrt, num_probes=8, num_steps=5, method=method, floor=0.25 * unit
            ).mean
            / unit**0.5
        )
        for method in ("krylov", "chebyshev", "maxent", "eigenvalues")
    },
    "logdet": lambda op, unit, b: ritz.logdet(op, num_probes=4).mean / N - np.log(unit),
    "logdet, lanczos": lambda op, unit, b: (
        ritz.logdet(op, num_products=50, method="lanczos").mean / N - np.log(unit)
    ),
    "log_likelihood": lambda op, unit, b: (
        log_likelihood(op, b * unit**0.5, method="lanczos", num_probes=4).mean / N
        + np.log(unit) / 2
    ),
    "logdet_gradient": lambda op, unit, b: gradient(op.dtype, unit),
    "rank_degeneracy": lambda op, unit, b: degeneracy(op, unit),
}


def gradient(dtype, unit):
    generator = seeded(0)
    points = torch.rand(N, 2, generator=generator, dtype=torch.float64).to(dtype)
    numbers = [torch.tensor(number, dtype=dtype, requires_grad=True) for number in
               (0.5, unit, 0.1 * unit)]  # fmt: skip
    op = KernelOperator(points, lengthscale=numbers[0], outputscale=numbers[1], noise=numbers[2])
    slopes = logdet_gradient(op, method="lanczos", num_probes=4, rank=5)
    factors = {"lengthscale": 1.0, "outputscale": unit, "noise": unit}
    return torch.stack([slopes[name].mean * factor for name, factor in factors.items()])


def degeneracy(op, unit):
    found = rank_degeneracy(lanczos_block(op, num_steps=9), matrix="hessian")
    ends = torch.tensor(found.interval, dtype=torch.float64) / unit
    return torch.cat([torch.stack([found.mass.mean, found.mass.truncation]), ends])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_power_of_two_changes_only_the_scale(name):
    plain = {}
    for dtype, k in [(torch.float64, 0), (torch.float32, 0), *SCALES]:
        matrix, b = matrix_and_rhs(dtype)
        matrix = times(matrix, k)
        op = FunctionOperator(lambda block, a=matrix: a @ block, n=N, dtype=dtype)
        numbers = ESTIMATORS[name](op, 2.0**k, b).double()
        expected = plain.setdefault(dtype, numbers)
        rtol = 2e3 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            numbers, expected, rtol=rtol, atol=rtol * float(expected.abs().max()),
            msg=lambda text, k=k, dtype=dtype: f"2^{k} in {dtype}: {text}",
        )  # fmt: skip


# Each maps an operator, 2^k and the right-hand side to an estimate that is proportional to a power
# of 2^k, or to its logarithm.
ESTIMATES = {
    "diagonal": (1.0, lambda op, unit, b: ritz.spectra.diagonal(op)),
    "diagonal, rtol": (1.0, lambda op, unit, b: ritz.diagonal(op, rtol=1e-3, max_probes=48)),
    "trace, rtol": (1.0, lambda op, unit, b: ritz.trace(op, rtol=1e-9, max_probes=40)),
    "frobenius_norm": (1.0, lambda op, unit, b: ritz.frobenius_norm(op)),
    "trace_function": (0.5, lambda op, unit, b: ritz.trace_function(op, torch.sqrt, num_steps=9)),
    "logdet, lanczos": (0, lambda op, unit, b: ritz.logdet(op, num_products=50, method="lanczos")),
    "logdet, krylov": (0, lambda op, unit, b: ritz.logdet(op, method="krylov")),
    "logdet, factor": (0, lambda op, unit, b: ritz.logdet(op.matmat(torch.eye(N, dtype=b.dtype)))),
    "log_likelihood": (0, lambda op, unit, b: log_likelihood(op, b * unit**0.5)),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_a_power_of_two_changes_only_the_scale_of_error_bars(name):
    power, estimate = ESTIMATES[name]
    plain = {}
    for dtype, k in [(torch.float64, 0), (torch.float32, 0), *SCALES]:
        matrix, b = matrix_and_rhs(dtype)
        matrix = times(matrix, k)
        op = FunctionOperator(lambda block, a=matrix: a @ block, n=N, dtype=dtype)

        found = estimate(op, 2.0**k, b)

        bar = (found.error() / 2.0 ** (power * k)).double()
        expected, outcome = plain.setdefault(dtype, (bar, found.status.outcome))
        # The roundoff of a logarithm grows with its size.
        atol = 1e3 * N * torch.finfo(torch.float64).eps * (1 + abs(k) * (not power))
        torch.testing.assert_close(bar, expected, rtol=2e-3, atol=atol)
        assert found.status.outcome == outcome


@pytest.mark.parametrize("k", [-900, -300, 300, 900])
def test_right_hand_sides_of_any_scale_are_solved_side_by_side(k):
    matrix, b = matrix_and_rhs(torch.float64)
    block = torch.stack([b, times(b, k)], 1)

    solution = ritz.solve(matrix, block)

    assert solution.status.ok
    expected = ritz.solve(matrix, b).x
    torch.testing.assert_close(solution.x[:, 0], expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(times(solution.x[:, 1], -k), expected, rtol=1e-12, atol=0.0)


def test_a_solution_outside_of_the_range_is_refused():
    matrix = torch.diag(torch.full((5,), 1e-300, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the solution leaves the range of torch.float64"):
        ritz.solve(matrix, torch.full((5,), 1e100, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-165, 1e-82, 1e155])
def test_the_largest_eigenvalue_of_a_scipy_operator_has_its_residual(scale):
    values = np.random.default_rng(0).normal(size=(300, 300))
    matrix = (values @ values.T / 300 + 0.1 * np.eye(300)) * scale
    op = scipy.sparse.linalg.LinearOperator(
        matrix.shape, matvec=lambda v: matrix @ v, matmat=lambda v: matrix @ v, dtype=float
    )
    exact = np.linalg.eigvalsh(matrix)[-1]

    pairs = ritz.eigenpairs(op, largest=1)

    assert pairs.status.ok
    assert float(pairs.values[0]) == pytest.approx(exact, rel=1e-12)
    assert 0 < float(pairs.residuals[0]) < 1e-6 * exact


def test_bounds_of_a_matrix_of_subnormal_entries_end():
    matrix = times(matrix_and_rhs(torch.float64)[0], -1030)
    op = FunctionOperator(lambda block: matrix @ block, n=N, dtype=torch.float64)

    low, high = ritz.bounds(op)

    assert low < 0.5 * 2.0**-1030 < 2.0**-1029 < high


def test_a_trace_beyond_the_range_is_uncertain():
    matrix = times(matrix_and_rhs(torch.float64)[0], 1020)

    assert ritz.trace(matrix).status.outcome == "uncertain"


def test_half_precision_has_a_log_determinant():
    matrix = 2 * torch.eye(5, dtype=torch.float16)

    found = ritz.logdet(matrix, method="krylov")

    assert abs(float(found) - 5 * np.log(2)) < float(found.truncation)
