import copy

import pytest
import torch

from ritz.optim import KFAC
from ritz.optim._kfac.inverses import _inverse_by_products, inverses_of, times


def positive(*shape):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 2 * shape[-1], generator=rng, dtype=torch.float64)
    return x @ x.mT


@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (2, 9)], ids=str)
def test_inverse_by_products_is_the_inverse(shape):
    matrix = positive(*shape)

    inverse = _inverse_by_products(torch.linalg.cholesky(matrix))

    torch.testing.assert_close(inverse @ matrix, torch.eye(shape[-1]).double().expand_as(matrix))
    assert torch.equal(inverse, inverse.mT)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inverses_of_many_matrices_of_which_one_is_not_positive(device):
    matrices = [positive(*shape).to(device) for shape in [(40,), (3,), (7,), (2, 9), (1,), (30,)]]
    negative = torch.diag(torch.tensor([2.0, 1.0, -1e-18], dtype=torch.float64)).to(device)

    *inverses, last = inverses_of(
        [lambda each=each: each for each in [*matrices, negative]], negative.device, largest=12800
    )

    for matrix, inverse in zip(matrices, inverses, strict=True):
        eye = torch.eye(matrix.shape[-1], dtype=torch.float64, device=device).expand_as(matrix)
        torch.testing.assert_close(inverse @ matrix, eye)
    # Eigenvalues that are negative by roundoff are replaced by eps times the largest one.
    floor = 2 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(last.diagonal().cpu(), torch.tensor([0.5, 1, 1 / floor]).double())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_with_zeros_behind_the_rows_is_the_product(transposed):
    wide = torch.zeros(8, 8, dtype=torch.float64)
    matrix = wide[:5, :5].copy_(torch.triu(positive(5)))
    rows = positive(5)[:3]

    expected = rows @ (matrix.T if transposed else matrix)

    torch.testing.assert_close(times(rows, matrix, transposed=transposed), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"damping": "exact"}, {"kind": "ekfac"}], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_steps_on_a_gpu_are_those_on_the_cpu(options, bias):
    torch.manual_seed(0)
    # No factor is singular, because eigenvectors of zero differ from one device to the other.
    layers = [torch.nn.Conv2d(3, 16, 3, bias=bias), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
              torch.nn.Flatten(), torch.nn.Linear(16, 4, bias=bias)]  # fmt: skip
    here = torch.nn.Sequential(*layers).double()
    there = copy.deepcopy(here).cuda()
    x, y = torch.randn(32, 3, 8, 8).double(), torch.randint(4, (32,))
    every = {"factor_every": 2, "inverse_every": 6}
    optimizers = [KFAC(model, lr=0.1, delta=0.1, **every, **options) for model in (here, there)]
    for _ in range(15):
        for optimizer, model in zip(optimizers, (here, there), strict=True):
            device = next(model.parameters()).device
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()

    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-6, atol=1e-9)
