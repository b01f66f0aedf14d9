"""Dropout with fixed masks, and precision on a GPU."""

import pytest
import torch
from torch import nn

from ritz._core.modes import arithmetic, dropout_shapes, masked_dropout, uses_tf32


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


def precisions():
    backends = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return [place.fp32_precision for place in places]


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("wanted", ["tf32", "ieee", None])
def test_arithmetic_restores_either_setting_of_precision(precision, wanted):
    before = precisions()
    try:
        if wanted is not None:  # in the newer way, after which the older setting cannot be read
            torch.backends.cuda.matmul.fp32_precision = wanted
        outside = precisions()
        with arithmetic(precision):
            assert uses_tf32() == (precision == "tf32",) * 2
            assert torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
        assert precisions() == outside
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]
