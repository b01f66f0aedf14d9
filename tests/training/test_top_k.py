"""Accuracy of the k largest scores."""

import pytest
import torch
from torch import nn

from ritz.training import evaluate, fit

INPUTS = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(12, (200,), generator=torch.Generator().manual_seed(1))


def model():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Linear(8, 12)


def by_hand(scores, targets, k):
    order = scores.argsort(dim=1, descending=True)
    ranks = [row.tolist().index(int(t)) for row, t in zip(order, targets, strict=True)]
    return sum(rank < k for rank in ranks) / len(ranks)


@pytest.mark.parametrize("k", [2, 5, 12, 20])
def test_top_k_accuracy_is_the_share_of_targets_among_the_k_largest_scores(k):
    network = model()
    found = evaluate(network, [(INPUTS[:70], TARGETS[:70]), (INPUTS[70:], TARGETS[70:])], top_k=k)
    assert found[f"top{k}_accuracy"] == pytest.approx(by_hand(network(INPUTS), TARGETS, k))
    assert found["accuracy"] == pytest.approx(by_hand(network(INPUTS), TARGETS, 1))


def test_targets_that_the_loss_ignores_do_not_count():
    network, targets = model(), TARGETS.clone()
    targets[:50] = -100
    found = evaluate(network, [(INPUTS, targets)], top_k=5)
    expected = by_hand(network(INPUTS[50:]), TARGETS[50:], 5)
    assert found["top5_accuracy"] == pytest.approx(expected)


def test_training_logs_it_only_if_it_is_wanted():
    parts = {"validation": (INPUTS, TARGETS), "num_epochs": 2, "batch_size": 50}
    found = fit(model(), (INPUTS, TARGETS), average_from=2, top_k=5, **parts)
    names = {name for name in found.history if "top5" in name}
    wanted = {"train_top5_accuracy", "validation_top5_accuracy"}
    assert names == wanted | {"average_validation_top5_accuracy"}
    assert not any("top" in name for name in fit(model(), (INPUTS, TARGETS), **parts).history)


def test_k_must_be_a_number_above_one():
    with pytest.raises(ValueError, match="top_k"):
        fit(model(), (INPUTS, TARGETS), top_k=1)
