"""Lanczos against dense answers."""

import networkx
import pytest
import torch
from scipy.sparse.linalg import eigsh

import ritz
from ritz.operators import (
    DenseOperator,
    DiagonalOperator,
    FunctionOperator,
    LaplacianOperator,
    ShiftedOperator,
)
from ritz.spectra import eigenpairs, lanczos, lanczos_block
from ritz.spectra._lanczos.recurrence import Basis, Recurrence
from ritz.spectra._lanczos.steps import advance
from ritz.testing import wigner, with_spectrum

DTYPES = [torch.float32, torch.float64]
MODES = ["full", "partial", "none"]


def outliers(dtype, generator, n=1000):
    """A bulk on [0, 1] and five well separated eigenvalues."""
    values = torch.linspace(0, 1, n, dtype=torch.float64)
    values[-5:] = torch.tensor([5.0, 7.0, 10.0, 13.0, 20.0])
    return with_spectrum(values.to(dtype), generator=generator), values


@pytest.mark.parametrize("dtype", DTYPES)
def test_full_krylov_space_equals_eigh(rng, dtype):
    op = wigner(40, dtype=dtype, generator=rng)
    found = lanczos(op, num_steps=40, vectors=True, generator=rng)
    values, vectors = torch.linalg.eigh(op.matrix.double())
    tolerance = 200 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.values, values, rtol=0, atol=tolerance)
    overlaps = (found.vectors.double() * vectors).sum(0).abs()
    torch.testing.assert_close(overlaps, torch.ones_like(overlaps), rtol=0, atol=100 * tolerance)
    assert found.vectors.dtype == dtype


def test_gauss_weights_match_the_moments_of_the_start_vector(rng):
    op = wigner(200, generator=rng)
    start = torch.randn(200, generator=rng, dtype=torch.float64)
    found = lanczos(op, num_steps=6, start=start)
    power = start / start.norm()
    for degree in range(12):  # 2 m - 1 = 11
        exact = float(start @ power / start.norm())
        assert float(found.weights @ found.values**degree) == pytest.approx(exact, abs=1e-12)
        power = op @ power
    assert found.seed is None


def test_values_are_the_eigenvalues_of_the_tridiagonal_matrix(rng):
    found = lanczos(wigner(100, generator=rng), num_steps=20)
    beside = torch.diag(found.off_diagonal, 1)
    matrix = torch.diag(found.diagonal) + beside + beside.T
    torch.testing.assert_close(torch.linalg.eigvalsh(matrix), found.values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shift_and_negation_only_shift_and_negate_the_ritz_values(rng, dtype, mode):
    op = wigner(300, dtype=dtype, generator=rng)
    start = torch.randn(300, generator=rng, dtype=dtype)
    plain = lanczos(op, num_steps=15, start=start, reorthogonalize=mode)
    moved = lanczos(ShiftedOperator(-op, 7.0), num_steps=15, start=start, reorthogonalize=mode)
    tolerance = 500 * torch.finfo(dtype).eps
    torch.testing.assert_close(moved.values, 7.0 - plain.values.flip(0), rtol=0, atol=tolerance)
    torch.testing.assert_close(moved.weights, plain.weights.flip(0), rtol=0, atol=tolerance)


def test_m_ritz_values_are_not_the_m_largest_eigenvalues(rng):
    op = wigner(500, generator=rng)
    found = lanczos(op, num_steps=30)
    exact = torch.linalg.eigvalsh(op.matrix)
    assert float(found.values[0]) < float(exact[10])  # both ends are met, not one
    assert float((found.values - exact[-30:]).abs().max()) > 1.0
    assert int((found.residuals < 0.05).sum()) < 10  # and most are not eigenvalues at all


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_outlier_is_returned_once(rng, dtype, mode):
    op, exact = outliers(dtype, rng)
    found = lanczos(op, num_steps=300, reorthogonalize=mode)
    top = found.values[found.values > 2]
    torch.testing.assert_close(top, exact[-5:], rtol=20 * torch.finfo(dtype).eps, atol=0)


def test_without_reorthogonalisation_outliers_return_as_ghosts_that_share_their_weight(rng):
    op, _ = outliers(torch.float32, rng)
    full = lanczos(op, num_steps=300)
    ghosts = lanczos(op, num_steps=300, reorthogonalize="none")
    assert int((ghosts.values > 15).sum()) > 1
    shared = float(ghosts.weights[ghosts.values > 15].sum())
    assert shared == pytest.approx(float(full.weights[full.values > 15].sum()), rel=1e-3)


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residuals_are_honest(rng, dtype, mode):
    op, exact = outliers(dtype, rng)
    found = lanczos(op, num_steps=300, vectors=True, reorthogonalize=mode)
    vectors = found.vectors.double()
    true = (op.matrix.double() @ vectors - vectors * found.values).norm(dim=0)
    assert bool((true <= 2 * found.residuals).all())
    first_term_dominates = found.residuals > 1e3 * torch.finfo(dtype).eps * float(exact.max())
    assert int(first_term_dominates.sum()) > 100
    assert bool((true >= 0.5 * found.residuals)[first_term_dominates].all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_eigenvalue_lies_within_each_residual(rng, dtype):
    op, exact = outliers(dtype, rng, n=300)
    found = lanczos(op, num_steps=60)
    distance = (found.values[:, None] - exact).abs().min(1).values
    assert bool((distance <= found.residuals).all())


@pytest.mark.parametrize("max_vectors", [None, 12, 25, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wanted_pairs_converge_with_and_without_restarts(rng, dtype, max_vectors):
    op, exact = outliers(dtype, rng, n=300)
    found = eigenpairs(op, largest=5, smallest=2, max_vectors=max_vectors)
    assert found.status.outcome == "converged"
    wanted = torch.cat([exact[:2], exact[-5:]])
    eps = torch.finfo(dtype).eps
    assert bool(((found.values - wanted).abs() <= found.residuals).all())
    vectors = found.vectors.double()
    true = (op.matrix.double() @ vectors - vectors * found.values).norm(dim=0)
    assert bool((true <= 2 * found.residuals).all())
    assert bool((found.residuals <= 4 * eps**0.5 * 20).all())
    assert found.vectors.shape == (300, 7)


def test_pairs_are_printed_from_the_largest_with_their_residuals(rng):
    op, exact = outliers(torch.float64, rng, n=300)
    found = eigenpairs(op, largest=3, max_vectors=8, rtol=1e-12, vectors=False)
    assert found.vectors is None
    assert found.status.ok
    assert "3 extreme eigenvalues of" in str(found)
    assert float(str(found).splitlines()[3].split()[0]) == pytest.approx(float(exact[-1]))


def test_pairs_are_those_of_scipy(rng):
    op = wigner(300, generator=rng)
    found = eigenpairs(op, largest=3, smallest=2, rtol=1e-10)
    for which, count, values in (("LA", 3, found.values[2:]), ("SA", 2, found.values[:2])):
        exact = eigsh(op.matrix.numpy(), k=count, which=which, return_eigenvectors=False)
        assert sorted(values.tolist()) == pytest.approx(sorted(exact), abs=1e-9)


def test_pairs_are_saved_with_the_name_of_their_matrix(tmp_path):
    op = LaplacianOperator(networkx.path_graph(30), matrix="laplacian")
    ritz.save(eigenpairs(op, largest=2), tmp_path / "pairs")
    assert ritz.load(tmp_path / "pairs").matrix == "laplacian"


def test_a_large_kernel_space_does_not_delay_convergence():
    entries = torch.zeros(100_000)
    entries[:3] = torch.tensor([3.0, 2.0, -1.0])
    found = eigenpairs(DiagonalOperator(entries), largest=2, smallest=1, max_vectors=8)
    assert found.values.tolist() == pytest.approx([-1.0, 2.0, 3.0], abs=1e-5)
    assert found.status.outcome == "converged"
    assert found.num_products < 30


def test_a_budget_too_small_is_reported_with_advice(rng):
    op = wigner(300, generator=rng)
    found = eigenpairs(op, largest=4, max_steps=10)
    assert found.status.outcome == "max_steps"
    assert "max_steps" in found.status.advice
    with pytest.raises(ritz.NotConvergedError, match="of 4 pairs"):
        found.raise_if_failed()


def test_stopping_early_spends_fewer_products(rng):
    op, _ = outliers(torch.float64, rng)
    calls = []
    counted = FunctionOperator(
        lambda x: calls.append(x.shape[1]) or op @ x, n=1000, dtype=torch.float64
    )
    found = eigenpairs(counted, largest=2, max_steps=500)
    assert sum(calls) == found.num_products < 40


def test_seed_and_start_vector_make_it_repeatable(rng):
    op = wigner(100, generator=rng)
    first = lanczos(op, num_steps=10)
    again = lanczos(op, num_steps=10, generator=torch.Generator().manual_seed(0))
    other = lanczos(op, num_steps=10, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)
    assert (first.seed, other.seed) == (0, 1)


def test_the_host_basis_gives_the_same_numbers(rng):
    op = wigner(100, generator=rng)
    device, host = (lanczos(op, num_steps=20, placement=place) for place in ("device", "host"))
    assert torch.equal(device.values, host.values)


def test_printing_a_spectrum_shows_residuals_norms_and_status(rng):
    op, _ = outliers(torch.float64, rng)
    text = str(lanczos(op, num_steps=50))
    for word in (
        "DenseOperator",
        "20",
        "residual",
        "trace",
        "Frobenius",
        "negative mass",
        "completed",
    ):
        assert word in text


def test_save_and_load_keep_every_bit(rng, tmp_path):
    found = lanczos(wigner(50, generator=rng), num_steps=10, vectors=True)
    ritz.save(found, tmp_path / "spectrum.safetensors")
    back = ritz.load(tmp_path / "spectrum.safetensors")
    for name in ("values", "weights", "residuals", "vectors", "diagonal", "off_diagonal"):
        assert torch.equal(getattr(found, name), getattr(back, name))
    assert (found.settings, found.status, found.seed) == (back.settings, back.status, back.seed)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_steps": 0}, "num_steps must be between 1 and 30"),
        ({"num_steps": 31}, "num_steps must be between 1 and 30"),
        ({"num_steps": 2.5}, "num_steps must be an integer"),
        ({}, "num_steps"),
        ({"num_steps": 5, "reorthogonalize": "twice"}, "reorthogonalize must be one of"),
        ({"num_steps": 5, "placement": "disk"}, "placement must be one of"),
        ({"num_steps": 5, "reorthogonalize": "none", "vectors": True}, "vectors need a basis"),
        ({"num_steps": 5, "start": torch.ones(30)}, "start must be torch.float64"),
        ({"num_steps": 5, "start": torch.ones(29, dtype=torch.float64)}, "start must be"),
        ({"num_steps": 5, "start": torch.zeros(30, dtype=torch.float64)}, "start must not be zero"),
        ({"num_steps": 5, "start": torch.full((30,), torch.nan).double()}, "start must be finite"),
        ({"num_steps": 5, "generator": 3}, "generator must be"),
        ({"num_steps": 5, "progress": "yes"}, "progress must be"),
    ],
)
def test_wrong_arguments_are_named(rng, bad, message):
    op = wigner(30, generator=rng)
    with pytest.raises((ValueError, TypeError), match=message):
        lanczos(op, **bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "largest or smallest must be at least 1"),
        ({"largest": 31}, "largest"),
        ({"largest": 20, "smallest": 20}, "smallest"),
        ({"largest": 2, "rtol": 1e-20}, "rtol"),
        ({"largest": 2, "max_steps": 0}, "max_steps"),
        ({"largest": 4, "max_vectors": 4}, "max_vectors"),
        ({"largest": 4, "reorthogonalize": "none"}, "reorthogonalize must be one of full, partial"),
        (
            {"max_steps": 40, "largest": 2, "max_vectors": 9, "reorthogonalize": "partial"},
            "restart",
        ),
        ({"largest": 1, "placement": "disk"}, "placement must be one of"),
        ({"largest": 1, "start": torch.zeros(30, dtype=torch.float64)}, "start must not be zero"),
    ],
)
def test_wrong_arguments_for_pairs_are_named(rng, bad, message):
    op = wigner(30, generator=rng)
    with pytest.raises((ValueError, TypeError), match=message):
        eigenpairs(op, **bad)


def test_an_object_that_is_not_a_matrix_is_refused():
    with pytest.raises(TypeError, match="op must be a symmetric matrix"):
        lanczos([[1.0]], num_steps=1)


def test_dense_and_diagonal_operators_agree(rng):
    entries = torch.randn(60, generator=rng, dtype=torch.float64)
    dense = lanczos(DenseOperator(torch.diag(entries)), num_steps=30)
    diagonal = lanczos(DiagonalOperator(entries), num_steps=30)
    torch.testing.assert_close(dense.values, diagonal.values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_side_by_side_have_the_numbers_they_would_have_alone(rng, dtype, mode):
    op = wigner(120, dtype=dtype, generator=rng)
    starts = torch.randn(120, 3, generator=rng, dtype=dtype)
    together = lanczos_block(op, num_steps=15, start=starts, reorthogonalize=mode)
    for found, start in zip(together, starts.T, strict=True):
        alone = lanczos(op, num_steps=15, start=start.contiguous(), reorthogonalize=mode)
        tolerance = 200 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.values, alone.values, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.weights, alone.weights, rtol=0, atol=tolerance)
        assert found.settings == alone.settings


def test_a_run_that_ends_early_does_not_stop_those_beside_it():
    op = DiagonalOperator(torch.arange(1.0, 21.0))
    starts = torch.ones(20, 2)
    starts[3:, 0] = 0
    short, long = lanczos_block(op, num_steps=8, start=starts, vectors=True)
    assert short.values.tolist() == pytest.approx([1.0, 2.0, 3.0], rel=1e-5)
    assert short.status.outcome == "breakdown"
    assert long.status.outcome == "completed"
    assert (short.num_products, long.num_products) == (3, 8)
    assert short.vectors.shape == (20, 3)


def test_a_block_run_needs_one_block_product_per_step(rng):
    widths = []
    op = FunctionOperator(lambda x: widths.append(x.shape[1]) or 2 * x + x.flip(0), n=30)
    lanczos_block(op, num_steps=2, num_probes=5, generator=rng)
    assert widths == [5, 5]
    with pytest.raises(ValueError, match=r"start must be \(30, k\)"):
        lanczos_block(op, num_steps=2, start=torch.ones(30))


@pytest.mark.parametrize("mode", MODES)
def test_a_million_rows_in_single_precision_are_still_symmetric(mode):
    entries = torch.linspace(0, 1, 1_000_000)
    entries[-5:] = torch.tensor([3.0, 4.0, 5.0, 6.0, 8.0])
    found = lanczos(DiagonalOperator(entries), num_steps=25, reorthogonalize=mode)
    distance = (found.values[:, None] - entries[-5:].double()).abs().min(0).values
    assert float(distance.max()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_basis_is_orthogonal_to_the_precision_promised(rng, dtype):
    eps = torch.finfo(dtype).eps
    op, _ = outliers(dtype, rng)
    for mode, allowed in (("full", 20 * eps), ("partial", 10 * eps**0.5)):
        run = Recurrence(torch.randn(1000, generator=rng, dtype=dtype), capacity=200, mode=mode)
        advance(op, [run], 200)
        rows = run.basis.rows[: run.size].double()
        assert float((rows @ rows.T - torch.eye(run.size)).abs().max()) < allowed


def test_partial_reorthogonalisation_reads_far_less_of_the_basis(rng, monkeypatch):
    reads = []
    project = Basis.project

    def counted(self, vector, *, first=0, last=None):
        reads.append((self.size if last is None else last) - first)
        return project(self, vector, first=first, last=last)

    monkeypatch.setattr(Basis, "project", counted)
    cost = {}
    for dtype in DTYPES:
        op, _ = outliers(dtype, rng)
        for mode in ("full", "partial"):
            reads.clear()
            lanczos(op, num_steps=300, reorthogonalize=mode)
            cost[mode, dtype] = sum(reads)
    # Subtracting the basis twice in every step, the textbook's way, costs 2 * 45,150 projections.
    assert cost["full", torch.float32] == pytest.approx(45_150, rel=0.05)
    assert cost["partial", torch.float32] < 2 * 45_150 / 2.9
    assert cost["partial", torch.float64] < cost["full", torch.float64] / 8
