"""Sums of squares of per-sample gradients of a module equal those of the gradients."""

from dataclasses import replace

import pytest
import torch

from ritz.curvature import _module_gradients as rules


@pytest.mark.parametrize("positions", [1, 2, 4, 5, 9])
@pytest.mark.parametrize(("groups", "count", "batch"), [(1, 1, 700), (2, 3, 40)])
@pytest.mark.parametrize("products", [1, 2**18])
def test_squares_of_products_are_those_of_the_gradients(
    positions, groups, count, batch, products, monkeypatch
):
    monkeypatch.setattr(rules, "TUNING", replace(rules.TUNING, products=products))
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    a = torch.randn(batch, groups, 3, positions, **options)
    delta = torch.randn(count, batch, groups, 2, positions, **options)

    squares = rules.weight_squares(a, delta)

    gradients = torch.einsum("cbgot,bgit->cbgoi", delta, a)
    torch.testing.assert_close(squares, gradients.square().sum((0, 1)))


def test_patches_of_few_samples_at_a_time_give_the_same_squares(monkeypatch):
    layer = torch.nn.Conv2d(2, 4, 3, padding=1, groups=2).double()
    x = torch.randn(7, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    output = layer(x).detach()
    state = {key: value.detach() for key, value in layer.named_parameters()}
    call = rules.Call(args=(x,), kwargs={}, output=output, state=state, chosen=("weight", "bias"))
    deltas = output.unsqueeze(0)
    whole = rules.squared_gradients(layer, call, deltas), rules.squared_norm(layer, call, deltas)

    monkeypatch.setattr(rules, "TUNING", replace(rules.TUNING, gradients=1000, products=1))
    parts = rules.squared_gradients(layer, call, deltas), rules.squared_norm(layer, call, deltas)

    torch.testing.assert_close(parts, whole)
    gradients = rules.sample_gradients(layer, call, deltas)
    expected = {name: gradient.square().sum((0, 1)) for name, gradient in gradients.items()}
    torch.testing.assert_close(whole[0], expected)
