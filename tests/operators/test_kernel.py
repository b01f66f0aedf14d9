import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ritz.operators import KernelOperator, _kernel


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that was created inside the block."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("name", _kernel.KERNELS)
def test_a_product_allocates_no_more_than_a_tile_or_a_block(name, monkeypatch, rng):
    monkeypatch.setattr(_kernel, "TILE", 16)
    op = KernelOperator(torch.randn(300, 2, generator=rng), kernel=name)
    block = torch.randn(300, 4, generator=rng)
    with LargestTensor() as seen:
        op.matmat(block)
    assert seen.elements == block.numel()


@pytest.mark.parametrize("name", _kernel.KERNELS)
def test_products_do_not_depend_on_the_size_of_a_tile(name, monkeypatch, rng):
    points = torch.randn(70, 3, generator=rng, dtype=torch.float64)
    whole = KernelOperator(points, kernel=name, noise=0.3).dense()
    for tile in (1, 7, 35, 70):
        monkeypatch.setattr(_kernel, "TILE", tile)
        torch.testing.assert_close(KernelOperator(points, kernel=name, noise=0.3).dense(), whole)


def test_close_points_far_from_the_origin_lose_no_digits():
    points = torch.tensor([[1e6], [1e6 + 0.5]], dtype=torch.float64)
    off_diagonal = KernelOperator(points).dense()[0, 1]
    assert float(off_diagonal) == pytest.approx(math.exp(-0.125), rel=1e-12)


def test_quotients_by_the_length_scale_far_from_the_origin_lose_no_digits():
    points = torch.linspace(2000, 2020, 30)[:, None]
    op = KernelOperator(points, lengthscale=0.3)
    truth = KernelOperator(points.double(), lengthscale=0.3).matrix()

    torch.testing.assert_close(op.matrix().double(), truth, rtol=0, atol=3e-6)
    torch.testing.assert_close(op.dense().double(), truth, rtol=0, atol=3e-6)
    assert op.double().dtype == torch.float64
    torch.testing.assert_close(op.double().matrix(), truth)


def test_distances_by_axes_equal_those_of_cdist(rng):
    x, y = (torch.randn(n, 4, generator=rng, dtype=torch.float64) for n in (9, 13))
    torch.testing.assert_close(_kernel._distances_by_axes(x, y), _kernel._distances(x, y))
    assert not _kernel._distances_by_axes(x, x).diagonal().any()


def test_the_diagonal_is_exactly_outputscale_plus_noise(rng):
    points = torch.randn(20, 5, generator=rng)
    for name in _kernel.KERNELS:
        found = KernelOperator(points, kernel=name, outputscale=2.0, noise=0.25).dense()
        assert torch.equal(found.diagonal(), torch.full((20,), 2.25))


def parameters(dtype=torch.float64, axes=3):
    given = {
        "lengthscale": torch.linspace(0.5, 2.0, axes, dtype=dtype) if axes else torch.tensor(0.8),
        "outputscale": torch.tensor(1.7, dtype=dtype),
        "noise": torch.tensor(0.3, dtype=dtype),
    }
    return {name: value.to(dtype).requires_grad_() for name, value in given.items()}


@pytest.mark.parametrize("name", _kernel.KERNELS)
@pytest.mark.parametrize("axes", [3, 0])
@pytest.mark.parametrize("tile", [7, 100])
def test_slopes_equal_the_autograd_gradients_of_the_matrix(name, axes, tile, monkeypatch, rng):
    monkeypatch.setattr(_kernel, "TILE", tile)
    points = torch.randn(30, 3, generator=rng, dtype=torch.float64)
    points[7] = points[3]  # twins have no distance to differentiate
    op = KernelOperator(points, kernel=name, **parameters(axes=axes))
    block = torch.randn(30, 2, generator=rng, dtype=torch.float64)
    slopes = op.slopes(block)
    for column in range(2):
        form = block[:, column] @ op.matrix() @ block[:, column]
        expected = torch.autograd.grad(form, tuple(op.parameters.values()))
        for key, slope in zip(op.parameters, expected, strict=True):
            torch.testing.assert_close(slopes[key][column], slope)


def test_slopes_agree_with_finite_differences(rng):
    points = torch.randn(12, 2, generator=rng, dtype=torch.float64)
    u = torch.randn(12, 1, generator=rng, dtype=torch.float64)
    for name in _kernel.KERNELS:
        given = parameters(axes=2)
        found = KernelOperator(points, kernel=name, **given).slopes(u)
        for key, value in given.items():
            for axis in range(value.numel()):
                forms = []
                for shift in (-1e-5, 1e-5):
                    moved = value.detach().clone()
                    moved.view(-1)[axis] += shift
                    op = KernelOperator(points, kernel=name, **(given | {key: moved}))
                    forms.append(float((u * (op @ u)).sum()))
                slope = float(found[key].reshape(-1)[axis])
                # Central differences: the square of the step, and roundoff over the step.
                assert (forms[1] - forms[0]) / 2e-5 == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_the_differentiable_matrix_equals_the_products(rng):
    points = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    for name in _kernel.KERNELS:
        op = KernelOperator(points, kernel=name, **parameters())
        torch.testing.assert_close(op.matrix().detach(), op.dense())
        assert op.cross(points[:5]).requires_grad
        assert not op.dense().requires_grad


def test_slopes_allocate_no_more_than_a_tile_or_a_block(monkeypatch, rng):
    monkeypatch.setattr(_kernel, "TILE", 16)
    op = KernelOperator(torch.randn(300, 2, generator=rng), **parameters(torch.float32, axes=2))
    block = torch.randn(300, 4, generator=rng)
    with LargestTensor() as seen:
        op.slopes(block)
    assert seen.elements == block.numel()


def test_only_tensors_that_require_gradients_are_parameters(rng):
    points, noise = torch.randn(5, 2, generator=rng), torch.tensor(0.1, requires_grad=True)
    op = KernelOperator(points, lengthscale=torch.ones(2), outputscale=torch.tensor(2.0))
    assert op.parameters == {}
    assert op.slopes(points) == {}
    op = KernelOperator(points, noise=noise)
    assert list(op.parameters) == ["noise"]
    assert op.noise == pytest.approx(0.1)


POINTS = torch.ones(4, 2)
OP = KernelOperator(POINTS)
WRONG = {
    "noise": (lambda: KernelOperator(POINTS, noise=torch.ones(2)), r"noise must be one number"),
    "scale": (lambda: KernelOperator(POINTS, outputscale=torch.tensor(-1.0)), "outputscale must"),
    "rows": (lambda: OP.slopes(POINTS[:3]), r"block must be \(4,\)"),
    "cross": (lambda: OP.cross(POINTS[:, :1]), r"points must be \(m, 2\)"),
}


@pytest.mark.parametrize(("make", "match"), WRONG.values(), ids=WRONG.keys())
def test_misuse_names_the_argument(make, match):
    with pytest.raises(ValueError, match=match):
        make()
