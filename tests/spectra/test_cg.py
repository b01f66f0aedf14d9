import pytest
import torch
from matrices import PRECISIONS, hidden, seeded

from ritz import solve
from ritz.operators import DenseOperator, DiagonalOperator, FunctionOperator, KernelOperator
from ritz.spectra import (
    LowRankPreconditioner,
    NotPositiveDefiniteError,
)
from ritz.testing import with_spectrum


def system(dtype=torch.float64, columns=3, eigenvalues=None):
    if eigenvalues is None:
        eigenvalues = torch.linspace(0.5, 8.0, 60, dtype=torch.float64)
    op = with_spectrum(eigenvalues.to(dtype), generator=seeded(0))
    b = torch.randn(len(eigenvalues), columns, generator=seeded(1), dtype=torch.float64)
    return op, b.to(dtype)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_solution_is_that_of_dense(dtype):
    op, b = system(dtype)
    found = solve(op, b)
    exact = torch.linalg.solve(op.matrix, b)
    assert found.x.dtype == dtype
    assert found.status.outcome == "converged"
    tolerance = 20 * torch.finfo(dtype).eps ** 0.5
    torch.testing.assert_close(found.x, exact, rtol=tolerance, atol=tolerance)


def test_right_hand_sides_may_be_arrays_with_any_strides():
    op, b = system()
    assert torch.equal(solve(op, b.numpy()[:, ::-1]).x, solve(op, b.flip(1)).x)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_residuals_are_those_of_the_solution_returned(dtype):
    op, b = system(dtype)
    found = solve(op, b, rtol=1e-4)
    true = (b.double() - op.matrix.double() @ found.x.double()).norm(dim=0)
    torch.testing.assert_close(found.residuals, true, rtol=0.1, atol=1e-12)
    assert bool((found.residuals <= 1e-4 * b.double().norm(dim=0)).all())
    torch.testing.assert_close(found.history[0], b.double().norm(dim=0))


def test_a_vector_gives_a_vector_and_a_block_its_columns():
    op, b = system()
    block = solve(op, b, rtol=1e-12)
    for i in range(3):
        single = solve(op, b[:, i], rtol=1e-12)
        assert single.x.shape == (60,)
        assert single.residuals.shape == (1,)
        torch.testing.assert_close(single.x, block.x[:, i])


def test_a_converged_column_is_not_multiplied_again():
    matrix = torch.diag(torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    calls, b = [], torch.eye(5, dtype=torch.float64)[:, [0, 4]]
    b[1:, 1] = 1.0
    found = solve(hidden(matrix, calls), b)
    assert calls == [2, 1, 1, 1, 2]  # the last is the check
    assert found.num_products == sum(calls)
    assert found.history.shape == (5, 2)


def test_as_many_steps_as_distinct_eigenvalues_suffice():
    eigenvalues = torch.tensor([1.0, 2.0, 5.0]).double().repeat(20)
    op, b = system(eigenvalues=eigenvalues)
    assert len(solve(op, b, rtol=1e-10).history) == 4


def test_a_preconditioner_saves_steps_as_an_operator_a_function_or_a_matrix():
    scales = torch.logspace(0, 6, 60, dtype=torch.float64)
    inner, b = system(columns=2)
    matrix = scales.sqrt()[:, None] * inner.matrix * scales.sqrt()
    plain = solve(matrix, b, max_steps=5000)
    inverse = 1 / matrix.diagonal()
    shapes = [
        DiagonalOperator(inverse),
        lambda block: inverse[:, None] * block,
        torch.diag(inverse),
        FunctionOperator(lambda v: inverse * v, n=60, dtype=torch.float64, columnwise=True),
    ]
    found = [solve(matrix, b, preconditioner=shape) for shape in shapes]
    assert found[0].status.ok
    assert len(found[0].history) < len(plain.history) / 4
    for other in found[1:]:
        torch.testing.assert_close(other.x, found[0].x)


def test_the_exact_inverse_needs_one_step():
    op, b = system()
    inverse = torch.linalg.inv(op.matrix)
    assert len(solve(op, b, preconditioner=lambda block: inverse @ block).history) == 2


@pytest.mark.parametrize("preconditioner", [None, lambda block: block])
def test_a_zero_right_hand_side_costs_only_the_check(preconditioner):
    calls, (op, b) = [], system()
    b[:, 1] = 0
    found = solve(op, b, preconditioner=preconditioner)
    assert not found.x[:, 1].any()
    zero = solve(hidden(op.matrix, calls), 0 * b, preconditioner=preconditioner)
    assert not zero.x.any()
    assert calls == [3]
    assert zero.status.ok
    assert zero.num_products == 3


def test_an_exact_initial_guess_is_returned():
    op, b = system()
    exact = torch.linalg.solve(op.matrix, b)
    found = solve(op, b, initial=exact)
    assert torch.equal(found.x, exact)
    assert len(found.history) == 1
    assert found.num_products == 6
    assert found.x.data_ptr() != exact.data_ptr()


def test_an_initial_guess_is_not_changed():
    op, b = system()
    initial = torch.ones_like(b)
    assert solve(op, b, initial=initial).status.ok
    assert torch.equal(initial, torch.ones_like(b))


def test_too_few_steps_are_reported_and_raise_if_failed_raises():
    op, b = system()
    found = solve(op, b, max_steps=3)
    assert found.status.outcome == "max_steps"
    assert "3 of 3 systems not solved after 3 steps" in found.status.message
    assert bool((found.residuals > 1e-8 * b.norm(dim=0)).all())
    with pytest.raises(RuntimeError, match="raise max_steps or rtol"):
        found.raise_if_failed()


def test_the_absolute_tolerance_suffices():
    op, b = system()
    found = solve(op, b, rtol=0.0, atol=0.01)
    assert found.status.ok
    assert bool((found.residuals <= 0.01).all())


@pytest.mark.parametrize(
    "matrix", [-torch.eye(4), torch.zeros(4, 4), torch.diag(torch.tensor([1.0, 2.0, 3.0, -1.0]))]
)
def test_a_matrix_that_is_not_positive_definite_is_refused(matrix):
    with pytest.raises(NotPositiveDefiniteError, match=r"op must be positive definite: at step \d"):
        solve(matrix, torch.ones(4))


def test_a_preconditioner_that_is_not_positive_definite_is_refused():
    with pytest.raises(NotPositiveDefiniteError, match="preconditioner must be positive definite"):
        solve(torch.eye(4), torch.ones(4), preconditioner=lambda block: -block)


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ill_conditioning_is_not_mistaken_for_asymmetry(dtype, smallest):
    matrix = torch.diag(torch.tensor([1.0, smallest], dtype=dtype))
    found = solve(matrix, torch.ones(2, dtype=dtype))
    assert found.status.ok
    op, b = system(dtype, eigenvalues=torch.logspace(-5, 0, 60, dtype=torch.float64))
    assert solve(op, b, max_steps=5).residuals.isfinite().all()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_an_operator_that_is_not_symmetric_is_refused(dtype):
    matrix = 2 * torch.eye(30, dtype=dtype) + 0.2 * torch.ones(30, 30, dtype=dtype).triu(1)
    op = FunctionOperator(lambda block: matrix @ block, n=30, dtype=dtype)
    with pytest.raises(ValueError, match="op must be symmetric and the same in every call"):
        solve(op, torch.linspace(1, 2, 30, dtype=dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_product_that_is_not_finite_names_its_step(bad):
    calls, (op, b) = [], system()

    def product(block):
        calls.append(1)
        return op.matrix @ block * (bad if len(calls) == 3 else 1.0)

    broken = FunctionOperator(product, n=60, dtype=torch.float64)
    with pytest.raises(ValueError, match="op must give finite products; at step 3"):
        solve(broken, b)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_the_matrix_does_not_matter(dtype, scale):
    op, b = system(dtype)
    plain, found = solve(op, b), solve(scale * op, b)
    assert found.status.ok
    torch.testing.assert_close(found.x * scale, plain.x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_eigenvalues_over_sixty_decades_need_a_preconditioner(dtype):
    matrix = torch.diag(torch.logspace(-30, 30, 61, dtype=torch.float64).to(dtype))
    b = torch.ones(61, dtype=dtype)
    found = solve(matrix, b, max_steps=100)
    assert found.status.outcome == "max_steps"
    exact = 1 / matrix.diagonal().double()
    best = solve(matrix, b, preconditioner=DiagonalOperator(1 / matrix.diagonal()))
    torch.testing.assert_close(best.x.double(), exact, rtol=1e-5, atol=0)


def test_a_recurrence_that_overflows_is_distinguished_from_a_bad_product():
    with pytest.raises(
        ValueError, match=r"at step 1 the recurrence left the range of torch\.float32"
    ):
        solve(2 * torch.eye(3), torch.ones(3), initial=torch.full((3,), 3e38))


def test_a_system_of_one_row_is_solved():
    assert solve(torch.tensor([[4.0]]), torch.tensor([2.0])).x.tolist() == [0.5]


B = torch.ones(4, dtype=torch.float64)
WRONG = {
    "b rows": ({"b": B[:3]}, ValueError, r"b must be \(4,\)"),
    "b dtype": ({"b": B.float()}, TypeError, "b must be torch.float64"),
    "b NaN": ({"b": B * float("nan")}, ValueError, "b must be finite"),
    "rtol": ({"rtol": -1.0}, ValueError, "rtol must be between"),
    "atol": ({"atol": -1.0}, ValueError, "atol must be finite"),
    "steps": ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
    "initial shape": ({"initial": B[:, None]}, ValueError, r"initial must be of shape \(4,\)"),
    "initial dtype": ({"initial": B.float()}, TypeError, "initial must be torch.float64"),
    "initial NaN": ({"initial": B * float("nan")}, ValueError, "initial must be finite"),
    "preconditioner shape": (
        {"preconditioner": lambda block: block[:2]},
        ValueError,
        r"preconditioner must return a tensor \(4, 1\)",
    ),
    "preconditioner kind": ({"preconditioner": 3.0}, TypeError, "got float"),
    "preconditioner order": (
        {"preconditioner": torch.eye(2).double()},
        ValueError,
        "block must be",
    ),
}


@pytest.mark.parametrize(("bad", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_misuse_names_the_argument(bad, kind, match):
    with pytest.raises(kind, match=match):
        solve(DenseOperator(torch.eye(4).double()), **({"b": B} | bad))


def test_a_solution_prints_its_residual_and_status():
    text = str(solve(2 * torch.eye(3), torch.ones(3)))
    assert text == (
        "Solution of shape (3,), largest residual 0, 2 products; converged: 1 systems in 1 steps"
    )


def test_a_stopping_rule_gets_the_quadratic_forms_and_ends_the_run(rng):
    matrix = torch.diag(torch.linspace(1, 50, 30, dtype=torch.float64))
    b = 1e-3 * torch.randn(30, 2, generator=rng, dtype=torch.float64)
    seen = []

    def stop(forms):
        seen.append(forms)
        return len(seen) == 7

    partial = solve(matrix, b, stop=stop)

    # Each value is the quadratic form of the solution after that number of steps.
    for steps, forms in enumerate(seen, start=1):
        x = solve(matrix, b, max_steps=steps).x
        expected = 0.5 * (x * (matrix @ x)).sum(0) - (b * x).sum(0)
        torch.testing.assert_close(forms, expected)
    assert partial.status.outcome == "completed"
    assert partial.status.message == "stopped by the caller after 7 steps"
    torch.testing.assert_close(partial.x, solve(matrix, b, max_steps=7).x)


def test_the_preconditioner_is_the_inverse_of_its_approximation():
    points = torch.randn(60, 2, generator=seeded(8), dtype=torch.float64)
    lengthscale = torch.tensor([0.8, 1.2], dtype=torch.float64)
    op = KernelOperator(points, lengthscale=lengthscale, outputscale=1.3, noise=0.05)
    found = LowRankPreconditioner(op, rank=20)
    eye = torch.eye(60, dtype=torch.float64)
    matrix = torch.linalg.inv(found.inverse(eye))
    pivots = found.pivots
    without = op.dense() - op.noise * eye
    inner = torch.linalg.solve(without[pivots][:, pivots], without[pivots])
    low = without[:, pivots] @ inner
    shift = op.noise + float((without - low).diagonal().mean())
    torch.testing.assert_close(matrix, low + shift * eye, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.inverse_root(found.inverse_root(eye)), found.inverse(eye))


def test_a_preconditioner_stops_where_the_rank_is_reached():
    points = torch.arange(4.0, dtype=torch.float64)[:, None].repeat(10, 1)
    found = LowRankPreconditioner(KernelOperator(points, noise=0.1), rank=20)
    assert sorted(found.pivots) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="noise of the kernel operator must be positive"):
        LowRankPreconditioner(KernelOperator(points), rank=3)
    with pytest.raises(TypeError, match="op must be a KernelOperator, got DenseOperator"):
        LowRankPreconditioner(DenseOperator(torch.eye(3)), rank=3)
