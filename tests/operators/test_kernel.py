import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ritz.operators import KernelOperator, kernel


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any tensor made inside it had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("name", kernel.KERNELS)
def test_a_product_never_makes_more_than_a_tile_or_a_block(name, monkeypatch, rng):
    monkeypatch.setattr(kernel, "TILE", 16)
    op = KernelOperator(torch.randn(300, 2, generator=rng), kernel=name)
    block = torch.randn(300, 4, generator=rng)
    with LargestTensor() as seen:
        op.matmat(block)
    assert seen.elements == block.numel()


@pytest.mark.parametrize("name", kernel.KERNELS)
def test_the_size_of_a_tile_does_not_matter(name, monkeypatch, rng):
    points = torch.randn(70, 3, generator=rng, dtype=torch.float64)
    whole = KernelOperator(points, kernel=name, noise=0.3).dense()
    for tile in (1, 7, 35, 70):
        monkeypatch.setattr(kernel, "TILE", tile)
        torch.testing.assert_close(KernelOperator(points, kernel=name, noise=0.3).dense(), whole)


def test_close_points_far_from_the_origin_lose_no_digits():
    points = torch.tensor([[1e6], [1e6 + 0.5]], dtype=torch.float64)
    off_diagonal = KernelOperator(points).dense()[0, 1]
    assert float(off_diagonal) == pytest.approx(math.exp(-0.125), rel=1e-12)


def test_the_diagonal_is_the_outputscale_and_the_noise_exactly(rng):
    points = torch.randn(20, 5, generator=rng)
    for name in kernel.KERNELS:
        found = KernelOperator(points, kernel=name, outputscale=2.0, noise=0.25).dense()
        assert torch.equal(found.diagonal(), torch.full((20,), 2.25))
