"""Lanczos against dense answers."""

import networkx
import pytest
import torch
from matrices import PRECISIONS, outliers, seeded

import ritz
from ritz.operators import (
    DiagonalOperator,
    FunctionOperator,
    LaplacianOperator,
    ShiftedOperator,
)
from ritz.spectra import lanczos, lanczos_block
from ritz.spectra._lanczos import advance
from ritz.spectra._lanczos.recurrence import Basis, Recurrence
from ritz.testing import wigner

MODES = ["full", "partial", "none"]


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_full_krylov_space_equals_eigh(rng, dtype):
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
@pytest.mark.parametrize("dtype", PRECISIONS)
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
    assert float(found.values[0]) < float(exact[10])  # they reach both ends of the spectrum
    assert float((found.values - exact[-30:]).abs().max()) > 1.0
    assert int((found.residuals < 0.05).sum()) < 10  # and most are not near any eigenvalue


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("dtype", PRECISIONS)
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
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_an_eigenvalue_lies_within_each_residual(rng, dtype, mode):
    op, exact = outliers(dtype, rng)
    found = lanczos(op, num_steps=300, vectors=True, reorthogonalize=mode)
    distance = (found.values[:, None] - exact).abs().min(1).values
    assert bool((distance <= found.residuals).all())
    vectors = found.vectors.double()
    true = (op.matrix.double() @ vectors - vectors * found.values).norm(dim=0)
    assert bool((true <= 2 * found.residuals).all())
    first_term_dominates = found.residuals > 1e3 * torch.finfo(dtype).eps * float(exact.max())
    assert int(first_term_dominates.sum()) > 100
    assert bool((true >= 0.5 * found.residuals)[first_term_dominates].all())


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
        ({"num_steps": 5, "progress": "yes"}, "progress must be"),
    ],
)
def test_wrong_arguments_are_named(rng, bad, message):
    op = wigner(30, generator=rng)
    with pytest.raises((ValueError, TypeError), match=message):
        lanczos(op, **bad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS)
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


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_a_run_that_ends_early_does_not_stop_those_beside_it(scale):
    op = DiagonalOperator(scale * torch.arange(1.0, 21.0, dtype=torch.float64))
    starts = torch.ones(20, 2, dtype=torch.float64)
    starts[3:, 0] = 0
    short, long = lanczos_block(op, num_steps=8, start=starts, vectors=True)
    assert short.values.tolist() == pytest.approx([scale, 2 * scale, 3 * scale])
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


@pytest.mark.parametrize("dtype", PRECISIONS)
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
    for dtype in PRECISIONS:
        op, _ = outliers(dtype, rng)
        for mode in ("full", "partial"):
            reads.clear()
            lanczos(op, num_steps=300, reorthogonalize=mode)
            cost[mode, dtype] = sum(reads)
    # Two orthogonalisations in every step would cost 2 * 45,150 projections.
    assert cost["full", torch.float32] == pytest.approx(45_150, rel=0.05)
    assert cost["partial", torch.float32] < 2 * 45_150 / 2.9
    assert cost["partial", torch.float64] < cost["full", torch.float64] / 8


# A triangle and an edge: many sign vectors are in the kernel of the normalised Laplacian, where
# every product is roundoff.
SMALL = LaplacianOperator(networkx.Graph([(0, 1), (1, 2), (2, 0), (3, 4)]))


def test_a_density_accepts_starts_in_the_kernel():
    for seed in range(20):
        result = ritz.density(SMALL, num_probes=8, num_steps=5, generator=seeded(seed))
        assert abs(float(result.weights.sum()) - 8) < 1e-9


def test_a_run_that_starts_in_the_kernel_ends_after_one_step():
    result = lanczos(SMALL, num_steps=5, start=torch.ones(5, dtype=torch.float64))
    assert result.status.outcome == "breakdown"
    assert float(result.values.abs().max()) < 1e-15


N = 3000
SPECTRA = {
    "uniform": lambda g: torch.rand(N, generator=g),
    "eight decades": lambda g: 10 ** (-8 * torch.rand(N, generator=g)),
    "outliers": lambda g: torch.cat(
        [torch.rand(N - 10, generator=g), 100 * torch.rand(10, generator=g)]
    ),
    "Gaussian": lambda g: torch.randn(N, generator=g),
    "clusters": lambda g: (
        torch.randint(0, 20, (N,), generator=g) + 1e-4 * torch.rand(N, generator=g)
    ),
    "huge gap": lambda g: torch.cat([torch.rand(N - 1, generator=g), torch.tensor([1e6])]),
    "negative": lambda g: torch.cat([-1e-3 * torch.rand(N - 1, generator=g), torch.tensor([50.0])]),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", SPECTRA)
def test_an_eigenvalue_lies_within_each_residual_of_hard_spectra(name, dtype, mode, seed):
    generator = seeded(seed)
    exact = SPECTRA[name](generator).to(dtype)
    found = lanczos(
        DiagonalOperator(exact),
        num_steps=400,
        reorthogonalize=mode,
        vectors=mode != "none",
        generator=generator,
    )
    distance = (found.values[:, None] - exact.double()).abs().min(1).values
    assert bool((distance <= found.residuals).all())
    if found.vectors is not None:
        vectors = found.vectors.double()
        true = (exact.double()[:, None] * vectors - vectors * found.values).norm(dim=0)
        assert bool((true <= 2 * found.residuals).all())
