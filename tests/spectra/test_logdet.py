import math

import numpy as np
import pytest
import scipy.sparse as sparse
import torch
from matrices import hidden, seeded

import ritz
from ritz._core.progress import tracking
from ritz.operators import DenseOperator, FunctionOperator, KernelOperator, SparseOperator
from ritz.spectra import NotPositiveDefiniteError
from ritz.spectra._functions import block_krylov
from ritz.spectra._functions.log_determinants import is_narrow, is_small, logdet_by_factor
from ritz.spectra._functions.quadrature import Projections, brackets
from ritz.spectra._lanczos.recurrence import Recurrence
from ritz.spectra._lanczos.steps import advance
from ritz.testing import check_operator, with_spectrum


def kernel(n, lengthscale, noise=1e-6, dtype=torch.float64):
    points = 0.3 * torch.randn(n, 4, generator=seeded(3), dtype=dtype)
    return KernelOperator(points, lengthscale=lengthscale, noise=noise)


def within(found, exact, sigmas=4.0):
    bar = sigmas * float(found.stderr) + float(found.truncation)
    return math.isfinite(bar) and abs(float(found) - exact) <= bar


def test_a_dense_matrix_is_factored(rng):
    op = with_spectrum(torch.linspace(0.1, 4, 60, dtype=torch.float64), generator=rng)
    found = ritz.logdet(op)
    assert float(found) == pytest.approx(float(torch.logdet(op.matrix)), rel=1e-12)
    assert float(found.stderr) == 0
    assert "factor of a dense matrix" in found.method


def test_a_sparse_matrix_is_factored():
    line = sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(12, 12))
    matrix = sparse.kronsum(line, line).tocsr()
    found = ritz.logdet(matrix)
    expected = torch.logdet(torch.from_numpy(matrix.toarray()))
    assert float(found) == pytest.approx(float(expected), rel=1e-12)
    assert "sparse" in found.method


@pytest.mark.parametrize("n", [1, 7, 25, 60, 130])
def test_as_many_products_as_rows_are_exact(n, rng):
    op = with_spectrum(torch.logspace(-6, 2, n, dtype=torch.float64), generator=rng)
    found = ritz.logdet(hidden(op.matrix), method="krylov", num_products=max(n, 10))
    assert float(found) == pytest.approx(float(torch.logdet(op.matrix)), rel=1e-7, abs=1e-7)
    assert found.num_products == n
    assert "the whole space" in found.method


@pytest.mark.parametrize("lengthscale", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_the_truth_lies_within_both_error_bars(lengthscale, seed):
    op = kernel(400, lengthscale)
    exact = float(torch.logdet(op.dense()))
    generator = seeded(seed)
    found = ritz.logdet(op, num_products=200, num_probes=8, generator=generator)
    assert within(found, exact)
    assert found.num_products <= 200
    assert abs(float(found) - exact) < 0.05 * abs(exact)
    assert "directions split off" in found.method


def test_a_floor_brackets_the_truncation():
    op = kernel(400, 0.4)
    exact = float(torch.logdet(op.dense()))
    blind = ritz.logdet(hidden(op.dense()), num_products=200)
    told = ritz.logdet(hidden(op.dense()), num_products=200, floor=1e-6)
    assert abs(float(told) - exact) < abs(float(blind) - exact)
    assert within(told, exact)


def test_gauss_and_radau_are_bounds(rng):
    values = torch.logspace(-5, 1, 80, dtype=torch.float64)
    op = with_spectrum(values, generator=rng)
    starts = torch.randn(80, 5, generator=rng, dtype=torch.float64)
    starts /= starts.norm(dim=0)
    lambdas, vectors = torch.linalg.eigh(op.matrix)
    exact = ((vectors.T @ starts).square() * lambdas.log()[:, None]).sum(0)
    for steps in (4, 10, 25):
        runs = [Recurrence(z.contiguous(), capacity=steps, mode="full") for z in starts.T]
        advance(op, runs, steps)
        spaces = Projections.of(runs, steps)
        nodes, weights = torch.linalg.eigh(spaces.matrices)
        gauss = (weights[:, 0].square() * nodes.log()).sum(1)
        found = brackets(spaces, torch.log, floor=1e-5 * (1 - 1e-9), bounds=True)
        # The truth lies between the Gauss rule above and the Gauss-Radau rule below.
        assert bool((exact <= gauss + 1e-9).all())
        assert bool((found.mixed <= gauss + 1e-9).all())
        assert bool(((found.mixed - exact).abs() <= found.gap + 1e-9).all())
        assert float((found.mixed - exact).abs().mean()) < float((gauss - exact).mean())
        inverse = brackets(spaces, torch.reciprocal, floor=1e-5 * (1 - 1e-9), bounds=True)
        forms = ((vectors.T @ starts).square() / lambdas[:, None]).sum(0)
        lower = (weights[:, 0].square() / nodes).sum(1)
        assert bool((lower <= forms * (1 + 1e-9)).all())
        assert bool(((inverse.mixed - forms).abs() <= inverse.gap * (1 + 1e-9)).all())


def test_the_determinant_is_that_of_the_space_times_that_of_its_complement(rng):
    matrix = with_spectrum(torch.logspace(-3, 1, 50, dtype=torch.float64), generator=rng).matrix
    with tracking(False, "", None) as bar:
        space = block_krylov.block_krylov(
            DenseOperator(matrix), dimension=20, width=5, generator=rng, bar=bar
        )
    split = block_krylov.Deflation(DenseOperator(matrix), space)
    basis = space.basis
    eye = torch.eye(50, dtype=torch.float64)
    torch.testing.assert_close(basis.T @ basis, eye[:20, :20])
    outer = torch.linalg.svd(eye - basis @ basis.T).U[:, :30]
    inner = basis.T @ matrix @ basis
    schur = (
        outer.T @ (matrix - matrix @ basis @ torch.linalg.solve(inner, basis.T @ matrix)) @ outer
    )
    torch.testing.assert_close(outer.T @ split.complement.dense() @ outer, schur)
    total = split.logdet + float(torch.logdet(schur))
    assert total == pytest.approx(float(torch.logdet(matrix)), rel=1e-10)
    assert float(schur.trace()) == pytest.approx(float(matrix.trace()) - split.trace)
    check_operator(split.complement)


def test_the_trace_is_a_control_variate():
    op = kernel(400, 0.15)
    told = ritz.logdet(op, num_products=150)
    blind = ritz.logdet(hidden(op.dense()), num_products=150, floor=1e-6)
    assert "control variate" in told.method
    assert "controlled" not in blind.method
    assert float(told.stderr) < float(blind.stderr)


@pytest.mark.parametrize("value", [2.0, 1e-9, 1e9])
def test_the_logdet_of_a_multiple_of_the_identity_has_only_roundoff(value):
    matrix = value * torch.eye(90, dtype=torch.float64)
    found = ritz.logdet(hidden(matrix), num_products=40)
    assert float(found) == pytest.approx(90 * math.log(value), rel=1e-9)


def test_a_condition_number_of_1e15_leaves_two_digits(rng):
    op = with_spectrum(torch.logspace(-12, 3, 100, dtype=torch.float64), generator=rng)
    exact = float(torch.logspace(-12, 3, 100, dtype=torch.float64).log().sum())
    assert float(ritz.logdet(hidden(op.matrix), num_products=100)) == pytest.approx(exact, rel=0.02)


def test_a_seed_gives_the_same_bits_and_is_recorded():
    op = kernel(200, 0.3)
    first, second = (ritz.logdet(op, num_products=80, generator=seeded(5)) for _ in range(2))
    assert torch.equal(first.samples, second.samples)
    assert first.seed == 5


def test_the_status_says_whether_the_accuracy_was_reached():
    op = kernel(300, 0.3)
    assert ritz.logdet(op, num_products=300, rtol=1e-6).status.outcome == "converged"
    short = ritz.logdet(op, num_products=200, rtol=1e-6)
    assert short.status.outcome == "max_steps"
    assert short.status.advice
    with pytest.raises(ritz.NotConvergedError, match="above rtol"):
        short.raise_if_failed()
    unknown = ritz.logdet(op, num_products=60, rtol=1e-6)
    assert unknown.status.outcome == "uncertain"
    assert unknown.status.advice
    with pytest.raises(ritz.NotConvergedError, match="the error is unknown"):
        unknown.raise_if_failed()


@pytest.mark.parametrize("n", [40, 200])
@pytest.mark.parametrize("wrap", [DenseOperator, hidden], ids=["dense", "products"])
def test_a_negative_eigenvalue_is_named(wrap, n, rng):
    values = torch.linspace(-0.5, 3, n, dtype=torch.float64)
    op = wrap(with_spectrum(values, generator=rng).matrix)
    with pytest.raises(NotPositiveDefiniteError, match=r"positive definite, got .* of -0\.\d"):
        ritz.logdet(op, num_products=100)


def test_a_sparse_matrix_that_is_not_positive_definite_is_named():
    matrix = sparse.diags_array([1.0, -2.0, 3.0]).tocsr()
    with pytest.raises(NotPositiveDefiniteError, match="pivot of -2"):
        ritz.logdet(SparseOperator(matrix))
    with pytest.raises(NotPositiveDefiniteError, match="zero pivot"):
        ritz.logdet(SparseOperator(sparse.csr_array([[1.0, 1.0], [1.0, 1.0]])))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "magic"}, "method must be one of"),
        ({"num_products": 9}, "num_products must be at least 10"),
        ({"num_probes": 1}, "num_probes must be between 2 and 750"),
        ({"floor": 0.0}, "floor must be finite and above 0"),
        ({"rtol": -1.0}, "rtol must be between"),
        ({"method": "cholesky"}, "needs a dense or sparse matrix"),
        ({"floor": 0.5, "num_products": 60}, "floor must be below all eigenvalues"),
    ],
)
def test_wrong_arguments_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        ritz.logdet(kernel(200, 0.3), **options)


@pytest.mark.parametrize("method", ["lanczos", "chebyshev", "maxent"])
@pytest.mark.parametrize("seed", range(3))
def test_simpler_methods_agree_where_the_condition_number_is_small(method, seed, rng):
    values = torch.linspace(0.5, 3.0, 300, dtype=torch.float64)
    op = with_spectrum(values, generator=rng)
    generator = seeded(seed)
    found = ritz.logdet(
        hidden(op.matrix), method=method, num_products=400, num_probes=16, generator=generator
    )
    assert within(found, float(values.log().sum()))
    assert found.num_products <= 400
    assert len(found.samples) == 16


def test_every_method_takes_the_floor_that_a_kernel_knows():
    op = kernel(200, 0.1, noise=1e-2)
    exact = float(torch.logdet(op.dense()))
    for method in ("krylov", "lanczos", "chebyshev", "maxent"):
        found = ritz.logdet(op, method=method, num_products=150, num_probes=10)
        assert within(found, exact, sigmas=5.0), method


@pytest.mark.parametrize("method", ["chebyshev", "maxent"])
def test_a_spectrum_that_may_reach_zero_needs_a_floor(method, rng):
    op = with_spectrum(torch.logspace(-6, 0, 80, dtype=torch.float64), generator=rng)
    with pytest.raises(ValueError, match="floor must be given"):
        ritz.logdet(hidden(op.matrix), method=method)


def test_entropy_gives_a_sample_for_each_probe_with_the_spread_of_the_value(rng):
    values = torch.linspace(0.2, 2.0, 200, dtype=torch.float64)
    op = hidden(with_spectrum(values, generator=rng).matrix)
    found = [
        ritz.logdet(op, method="maxent", num_products=300, num_probes=20,
                    generator=seeded(seed))
        for seed in range(24)
    ]  # fmt: skip
    spread = torch.stack([one.mean for one in found]).std()
    stated = torch.stack([one.stderr for one in found]).mean()
    assert 0.5 < float(spread / stated) < 2.0


@pytest.mark.parametrize("method", ["krylov", "lanczos", "chebyshev", "maxent"])
def test_every_method_names_a_negative_ritz_value_and_a_floor_that_is_too_high(method, rng):
    bad = with_spectrum(torch.linspace(-0.5, 3, 60, dtype=torch.float64), generator=rng)
    for floor in (None, 0.1):
        with pytest.raises(NotPositiveDefiniteError, match=r"got a Ritz value of -0\.\d"):
            ritz.logdet(hidden(bad.matrix), method=method, num_products=300, floor=floor)
    good = with_spectrum(torch.linspace(1, 3, 200, dtype=torch.float64), generator=rng)
    with pytest.raises(ValueError, match="floor must be below all eigenvalues, got 2 and"):
        ritz.logdet(hidden(good.matrix), method=method, num_products=150, floor=2.0)


@pytest.mark.parametrize("method", ["auto", "krylov", "lanczos", "chebyshev", "maxent"])
@pytest.mark.parametrize("options", [{"num_products": 12}, {"num_products": 60, "num_probes": 30}])
def test_no_more_products_are_spent_than_allowed(method, options, rng):
    values = torch.linspace(1, 3, 200, dtype=torch.float64)
    matrix, calls = with_spectrum(values, generator=rng).matrix, []

    def product(block):
        calls.append(block.shape[1])
        return matrix @ block

    op = FunctionOperator(product, n=200, dtype=torch.float64)
    before = sum(calls)  # products of the check for symmetry
    found = ritz.logdet(op, method=method, floor=0.9, **options)
    assert sum(calls) - before == found.num_products <= options["num_products"]
    exact = float(values.log().sum())
    assert abs(float(found) - exact) < 0.1 * exact
    # Quadrature with fewer than four steps has no error bar.
    known = method in ("chebyshev", "maxent")
    assert within(found, exact) if known else found.status.outcome == "uncertain"


@pytest.mark.parametrize("method", ["auto", "krylov", "lanczos", "chebyshev", "maxent"])
def test_the_logdet_of_one_row(method):
    found = ritz.logdet(hidden(torch.tensor([[3.0]], dtype=torch.float64)), method=method)
    assert float(found) == pytest.approx(math.log(3), rel=1e-6)


def test_the_truncation_of_a_chebyshev_series_includes_the_ends_of_its_interval():
    # All but one eigenvalue are at the lower end, where the interpolation is worst.
    values = torch.full((500,), 1e-3, dtype=torch.float64)
    values[0] = 500.0
    found = ritz.logdet(torch.diag(values), method="chebyshev", num_products=400, floor=1e-3)
    error = abs(float(found) - float(values.log().sum()))
    assert error <= float(found.truncation) < 2 * error


@pytest.mark.parametrize("method", ["chebyshev", "maxent"])
@pytest.mark.parametrize("function", [torch.special.entr, torch.log, torch.sqrt])
def test_a_series_of_too_low_degree_has_a_truncation_that_bounds_its_error(method, function, rng):
    # Six large eigenvalues and many small ones: no density of few moments is near.
    factor = torch.randn(200, 6, generator=rng, dtype=torch.float64)
    matrix = factor @ factor.T + 1e-3 * torch.eye(200, dtype=torch.float64)
    truth = float(function(torch.linalg.eigvalsh(matrix)).sum())
    for seed in range(3):
        found = ritz.trace_function(
            hidden(matrix),
            function,
            num_steps=20,
            num_probes=8,
            method=method,
            floor=0.999e-3,
            rtol=0.05,
            generator=seeded(seed),
        )
        assert float(found.error()) >= abs(float(found) - truth)
        assert not found.status.ok or abs(float(found) - truth) <= 0.05 * abs(truth)


def test_a_pilot_of_few_probes_does_not_rule_out_quadrature_by_itself():
    # Four probes spread by less than the truncation of their short runs. That is what a loose
    # tolerance asks for, not a sign that they agree by chance.
    values = torch.linspace(0.01, 4.0, 4000, dtype=torch.float64)
    op = FunctionOperator(lambda block: values[:, None] * block, n=4000, dtype=torch.float64)

    found = ritz.logdet(op, rtol=0.05, floor=0.01)

    assert found.status.outcome == "converged"
    assert found.num_products < 400
    assert within(found, float(values.log().sum()))


def holds(found, exact):
    low, high = found.interval(0.9999)
    return math.isfinite(float(high)) and float(low) <= exact <= float(high)


def chain(n, shift):
    """A shifted second difference as a FunctionOperator, and its log determinant."""

    def product(block):
        out = (2 + shift) * block
        out[1:] -= block[:-1]
        out[:-1] -= block[1:]
        return out

    angles = torch.arange(1, n + 1, dtype=torch.float64) * math.pi / (n + 1)
    exact = float((2 + shift - 2 * angles.cos()).log().sum())
    return FunctionOperator(product, n=n, dtype=torch.float64), exact


def test_auto_stops_when_the_tolerance_is_reached():
    op, exact = chain(20_000, 1.0)
    found = ritz.logdet(op, rtol=0.01)
    assert found.status.outcome == "converged"
    assert found.num_products < 100
    assert "Lanczos quadrature, which reaches rtol" in found.method
    assert abs(float(found) - exact) < 0.01 * exact


def test_auto_aims_at_a_thousandth_and_reports_whether_it_was_reached():
    op, exact = chain(20_000, 1.0)
    found = ritz.logdet(op)
    assert found.status.outcome == "converged"
    assert float(found.error()) <= 1e-3 * float(found)
    assert holds(found, exact)
    short = ritz.logdet(op, num_products=200, rtol=1e-6)
    assert short.status.outcome == "max_steps"
    assert holds(short, exact)


def test_truncation_is_unknown_after_a_single_step():
    op, _ = chain(20_000, 1.0)
    found = ritz.logdet(op, num_products=30, rtol=1e-5)
    assert "x 1 steps" in found.method
    assert float(found.truncation) == math.inf
    assert found.status.outcome == "uncertain"


def test_auto_uses_a_krylov_space_if_quadrature_does_not_reach_the_tolerance():
    op, exact = chain(2000, 1e-5)
    found = ritz.logdet(op, num_products=400, floor=1e-5, rtol=1e-3)
    assert "directions split off" in found.method
    assert "Lanczos quadrature would not reach rtol" in found.method
    assert found.num_products <= 400
    assert holds(found, exact)


def test_steps_are_few_where_truncation_does_not_count_and_many_where_it_does():
    easy = ritz.logdet(chain(5000, 5.0)[0], method="lanczos", num_products=200)
    hard = ritz.logdet(chain(5000, 1e-6)[0], method="lanczos", num_products=200)
    assert len(easy.samples) >= 25
    assert len(hard.samples) <= 20


@pytest.mark.parametrize("kernel", ["squared_exponential", "matern32"])
def test_the_mean_is_differentiable_in_the_parameters_of_a_kernel(kernel, rng):
    points = torch.randn(150, 3, generator=rng, dtype=torch.float64)
    lengthscale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    op = KernelOperator(points, kernel=kernel, lengthscale=lengthscale, noise=noise)
    ritz.logdet(op).mean.backward()
    step = 1e-5

    def exact(shift, extra):
        moved = KernelOperator(points, kernel=kernel, lengthscale=0.8 + shift, noise=0.1 + extra)
        return float(torch.logdet(moved.dense()))

    slope = (exact(step, 0) - exact(-step, 0)) / (2 * step)
    assert float(lengthscale.grad) == pytest.approx(slope, rel=1e-5)
    slope = (exact(0, step) - exact(0, -step)) / (2 * step)
    assert float(noise.grad) == pytest.approx(slope, rel=1e-5)


def test_a_block_krylov_space_refuses_products_that_are_not_symmetric(rng):
    values = torch.linspace(1, 3, 120, dtype=torch.float64)
    matrix = with_spectrum(values, generator=rng).matrix
    skew = torch.randn(120, 120, generator=rng, dtype=torch.float64).triu() * 1e-3
    calls = []

    def drifting(block):
        calls.append(0)
        return matrix @ block + 1e-3 * len(calls) * torch.roll(block, 1, 0)

    for product in (lambda block: (matrix + skew) @ block, drifting):
        op = FunctionOperator(product, n=120, dtype=torch.float64)
        with pytest.raises(ValueError, match="op must be symmetric and the same in every call"):
            ritz.logdet(op, method="krylov", num_products=60)


def band(n, width):
    offsets = list(range(-width, width + 1))
    values = [-1.0 if offset else 2.0 * width + 1 for offset in offsets]
    return sparse.diags_array(values, offsets=offsets, shape=(n, n)).tocsr()


def expander(n, degree, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), degree)
    edges = sparse.coo_array((np.ones(n * degree), (rows, rng.permutation(rows))), shape=(n, n))
    weights = (edges + edges.T).tocsr()
    return sparse.diags_array(weights.sum(1) + 1.0).tocsr() - weights


def test_a_long_matrix_of_a_narrow_graph_is_factored():
    op = SparseOperator(band(30_000, 2))
    assert is_narrow(op)
    assert not is_small(op)
    found = ritz.logdet(op, rtol=1e-6)
    sampled = ritz.logdet(op, method="lanczos", num_products=400)
    assert "factor of a sparse matrix" in found.method
    assert "Lanczos quadrature would not reach rtol" in found.method
    assert float(found.stderr) == 0
    assert abs(float(found) - float(sampled)) < 4 * float(sampled.stderr) + float(
        sampled.truncation
    )


def test_a_matrix_whose_factor_would_fill_is_sampled():
    op = SparseOperator(expander(21_000, 6))
    assert not is_narrow(op)
    assert "Lanczos quadrature" in ritz.logdet(op).method


def test_a_matrix_with_empty_rows_is_not_positive_definite():
    matrix = sparse.coo_array(([1.0], ([0], [0])), shape=(30_000, 30_000)).tocsr()
    assert is_narrow(SparseOperator(matrix))
    with pytest.raises(NotPositiveDefiniteError, match="positive definite"):
        ritz.logdet(matrix, method="cholesky")


def test_a_function_operator_is_never_factored():
    op = FunctionOperator(lambda block: 2 * block, n=5, dtype=torch.float64)
    assert not is_small(op)
    assert not is_narrow(op)
    with pytest.raises(ValueError, match="needs a dense or sparse matrix"):
        logdet_by_factor(op)


def test_cholmod_is_used_if_installed():
    pytest.importorskip("sksparse.cholmod")
    matrix = band(500, 3)
    found = logdet_by_factor(SparseOperator(matrix))
    assert "CHOLMOD" in found.method
    assert float(found) == pytest.approx(np.linalg.slogdet(matrix.toarray())[1], rel=1e-12)
    with pytest.raises(NotPositiveDefiniteError, match="positive definite"):
        logdet_by_factor(SparseOperator(-matrix))


@pytest.mark.parametrize("size", [2, 3, 40])
def test_a_pivot_off_the_diagonal_is_no_factor_of_a_positive_definite_matrix(size):
    # Elimination with rows exchanged gives positive pivots, and a determinant of -1.
    matrix = sparse.eye_array(size).tolil()
    matrix[:2, :2] = [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(NotPositiveDefiniteError, match="zero pivot"):
        ritz.logdet(matrix.tocsr(), method="cholesky")


@pytest.mark.parametrize("dense", [True, False])
def test_an_exact_logdet_of_zero_needs_no_tolerance(dense):
    """The roundoff of log det I = 0 is above any fraction of it."""
    matrix = torch.diag(torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64))
    op = matrix if dense else FunctionOperator(matrix.__matmul__, n=3, dtype=torch.float64)

    assert ritz.logdet(op).status.outcome == "completed"
    assert ritz.logdet(op, rtol=1e-3).status.outcome == "max_steps"
