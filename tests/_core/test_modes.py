"""Dropout with fixed masks."""

import torch
from torch import nn

from ritz._core.modes import dropout_shapes, masked_dropout


def test_dropout_masks_are_used_in_the_order_of_calls():
    drop = nn.Dropout(0.3)
    model = nn.Sequential(drop, nn.Dropout1d(0.6), drop).eval()
    x = torch.ones(2, 3, 4)
    shapes = dropout_shapes(model, lambda: model(x))
    assert shapes == [((2, 3, 4), 0.3), ((2, 3, 1), 0.6), ((2, 3, 4), 0.3)]
    masks = [torch.full(shape, 2.0 + i) for i, (shape, _) in enumerate(shapes)]
    with masked_dropout(model, masks):
        assert torch.equal(model(x), torch.full((2, 3, 4), 24.0))
    assert torch.equal(model(x), x)
    with masked_dropout(model, None):
        assert torch.equal(model(x), x)
