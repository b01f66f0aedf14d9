"""Batch norm: modes and recomputed statistics."""

import copy

import pytest
import torch
from matrices import seeded
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from ritz._core.batch_norm import batch_norms, evaluating, recomputed_statistics


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def deep():
    return nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 2, 2),
        nn.Sequential(nn.BatchNorm1d(2, momentum=0.3), nn.Flatten(), nn.Linear(6, 2)),
    ).double()  # fmt: skip


def recomputed(model, batches, weights=None, **options):
    sizes = [len(batch) for batch in batches]
    weights = [size / sum(sizes) for size in sizes] if weights is None else weights
    with evaluating(model, batch_statistics=True):
        pairs = zip(batches, weights, strict=True)
        return recomputed_statistics(model, model, pairs, **options)


def statistics(model):
    return {k: v for k, v in model.state_dict().items() if "running" in k}


def test_recomputed_statistics_equal_those_of_torch_update_bn():
    model, batches = deep(), [noise(4, 2, 5, seed=s) for s in range(3)]
    found = recomputed(model, batches)
    theirs = copy.deepcopy(model)
    update_bn(batches, theirs)
    assert found.keys() == statistics(theirs).keys()
    for name, value in statistics(theirs).items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-15)


def test_batches_of_different_sizes_are_weighted_by_their_samples():
    model, batches = nn.BatchNorm1d(3).double(), [noise(5, 3), noise(2, 3, seed=1)]
    found = recomputed(model, batches)
    for name, of in (("running_mean", torch.mean), ("running_var", torch.var)):
        expected = sum(len(b) / 7 * of(b, 0) for b in batches)
        torch.testing.assert_close(found[name], expected)


def test_statistics_of_one_batch_nearly_reproduce_its_train_mode_output():
    model, batch = deep(), noise(6, 2, 5)
    with evaluating(model, batch_statistics=True):
        expected = model(batch).detach()
    found = recomputed(model, [batch])
    model.load_state_dict(model.state_dict() | found)
    # The running variance is unbiased, and the variance of a batch is not.
    gap = (model.eval()(batch).detach() - expected).abs().max()
    assert 0 < float(gap) < 0.1 * float(expected.abs().max())


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.unused = nn.BatchNorm1d(2)
        self.bare = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x):
        return self.bare(self.norm(torch.tanh(self.norm(self.first(x)))))


def test_a_layer_called_twice_is_averaged_and_an_unused_layer_left_out():
    model, batches = Shared().double(), [noise(4, 3), noise(4, 3, seed=1)]
    found = recomputed(model, batches)
    assert set(found) == {"norm.running_mean", "norm.running_var"}
    theirs = copy.deepcopy(model)
    update_bn(batches, theirs)
    for name, value in found.items():
        torch.testing.assert_close(value, statistics(theirs)[name])


def test_weights_may_sum_to_one_over_processes():
    model, batches = deep(), [noise(4, 2, 5, seed=s) for s in range(2)]
    whole = recomputed(model, batches)
    others = []
    recomputed(model, batches[1:], weights=[0.5], reduce=lambda own: others.append(own) or own)
    remaining = iter(others)
    found = recomputed(model, batches[:1], weights=[0.5], reduce=lambda own: own + next(remaining))
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value)


def test_one_value_per_channel_raises_with_the_name_of_the_layer():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    with pytest.raises(ValueError, match="batch norm 1 needs more than one value per channel"):
        recomputed(model, [noise(1, 2)])
    assert not model[1]._forward_pre_hooks


@pytest.mark.parametrize("batch_statistics", [True, False])
def test_modes_are_restored_after_the_block_and_after_an_error(batch_statistics):
    model = nn.Sequential(deep(), nn.Dropout()).double()
    model[0][2].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]

    def fail():
        for module in model.modules():
            assert module.training == (batch_statistics and isinstance(module, _BatchNorm))
        model(noise(4, 2, 5))
        raise KeyError

    with pytest.raises(KeyError), evaluating(model, batch_statistics=batch_statistics):
        fail()
    assert [module.training for module in model.modules()] == modes
    assert all(layer.track_running_stats for layer in batch_norms(model).values())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_batch_statistics_give_the_output_of_train_mode():
    model, x = deep(), noise(4, 2, 5)
    with evaluating(model, batch_statistics=True):
        found = model(x)
    torch.testing.assert_close(found, copy.deepcopy(model).train()(x))
