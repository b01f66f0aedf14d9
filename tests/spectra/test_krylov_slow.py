"""Every way of re-orthogonalising over many spectra: no false alarm, no dishonest residual."""

import pytest
import torch

from ritz.operators import DiagonalOperator
from ritz.spectra import lanczos

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["full", "partial", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
def test_values_lie_within_their_residuals_of_eigenvalues(name, dtype, mode, seed):
    generator = torch.Generator().manual_seed(seed)
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
