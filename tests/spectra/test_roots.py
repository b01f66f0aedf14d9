import pytest
import torch

from ritz.spectra import NotPositiveDefiniteError
from ritz.spectra._lanczos import TUNING
from ritz.spectra._logdet_gradient import inverse_roots
from ritz.testing import with_spectrum


def system(n=150, smallest=1e-3, dtype=torch.float64):
    eigenvalues = torch.linspace(smallest, 2.0, n)
    op = with_spectrum(eigenvalues.to(dtype), generator=torch.Generator().manual_seed(0))
    block = torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return op, block


def exact(op, block):
    values, vectors = torch.linalg.eigh(op.matrix.double())
    return vectors @ (values**-0.5 * vectors).T @ block.double()


@pytest.mark.parametrize("rtol", [0.3, 1e-2, 1e-6])
def test_the_residual_bounds_the_error(rtol):
    op, block = system()
    found = inverse_roots(op, block, rtol=rtol, max_steps=150)
    gap = found.vectors - exact(op, block)
    error = (gap * (op.matrix @ gap)).sum(0).sqrt() / block.norm(dim=0)
    assert bool((error <= found.residuals).all())
    assert bool((error > found.residuals / 1000).all())  # a bound that means something
    assert bool((found.residuals <= rtol).all())
    assert found.status.outcome == "converged"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_preconditioned_root_has_the_same_form(dtype):
    op, block = system(dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    scales = with_spectrum(torch.linspace(0.5, 3.0, 150).to(dtype), generator=generator).matrix
    found = inverse_roots(op, block, rtol=1e-5, max_steps=150, root=lambda x: scales @ x)
    # u u' has the mean A^{-1} since U = R (R A R)^{-1/2} has U U' = A^{-1}: u'Au is |z|^2.
    forms = (found.vectors * (op.matrix @ found.vectors)).sum(0)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-8
    torch.testing.assert_close(forms, block.square().sum(0), rtol=tolerance, atol=0)
    inner = scales @ op.matrix @ scales
    values, vectors = torch.linalg.eigh(inner.double())
    expected = scales.double() @ vectors @ (values**-0.5 * vectors).T @ block.double()
    gap = float((found.vectors - expected).norm() / expected.norm())
    assert gap < (1e-2 if dtype == torch.float32 else 1e-3)


def test_a_basis_grows_beyond_its_capacity():
    op, block = system(n=300, smallest=1e-4)
    found = inverse_roots(op, block, rtol=1e-9, max_steps=300)
    assert found.num_products > 3 * (TUNING.growth + 1)
    torch.testing.assert_close(found.vectors, exact(op, block), rtol=1e-6, atol=1e-6)


def test_an_invariant_space_ends_the_run():
    op = with_spectrum(torch.ones(20).double(), generator=torch.Generator().manual_seed(0))
    block = torch.ones(20, 1, dtype=torch.float64)
    found = inverse_roots(op, block, rtol=1e-12, max_steps=20)
    assert found.num_products == 1
    torch.testing.assert_close(found.vectors, block)


def test_too_few_steps_are_reported():
    op, block = system()
    found = inverse_roots(op, block, rtol=1e-6, max_steps=4)
    assert found.status.outcome == "max_steps"
    assert "3 of 3 roots not found after 4 steps" in found.status.message


def test_an_indefinite_matrix_is_refused_with_its_ritz_value():
    op, block = system(smallest=-1.0)
    with pytest.raises(NotPositiveDefiniteError, match="got a Ritz value of -"):
        inverse_roots(op, block, rtol=1e-6, max_steps=150)
