"""A small text and a small recurrent model, of fixed seeds."""

import torch
from torch.nn.functional import cross_entropy

from ritz import models
from ritz.data import TextSplit

WORDS = 7
PLACES = ("dropout", "input_dropout", "hidden_dropout", "embedding_dropout", "weight_drop")


def text(count=150, length=6, seed=0, **changes):
    tokens = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed))
    return TextSplit(tokens=tokens, length=length, **changes)


def recurrent(chance=0.0, dtype=torch.float64, **changes):
    """An LSTM of large weights, whose outputs depend on what it has read long before."""
    options = {"num_classes": WORDS, "width": 5, "hidden": 6, "depth": 2, "dtype": dtype}
    model = models.create("lstm", **options, **dict.fromkeys(PLACES, chance), **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def unbroken_loss(model, split, rows):
    """The mean loss of whole streams, each read in one forward pass."""
    [(inputs, targets)] = split.batches(rows, length=len(split.tokens))
    with torch.no_grad():
        return float(cross_entropy(model(inputs), targets))


def broken_loss(model, split, rows):
    """The mean loss of segments that each begin anew."""
    with torch.no_grad():
        sums = [cross_entropy(model(x), y, reduction="sum") for x, y in split.batches(rows)]
    return float(sum(sums)) / sum(y.numel() for _, y in split.batches(rows))
