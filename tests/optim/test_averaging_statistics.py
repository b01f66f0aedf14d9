"""Statistics of batch norm for averaged weights: by sample, of any data, only when asked for."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from optim.walks import assert_near, assert_same, copies, inputs, trained
from torch import nn
from torch.optim.swa_utils import update_bn


def normed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4),
        nn.Linear(4, 2), nn.Dropout(0.5),
    ).double()  # fmt: skip


def batches(*sizes):
    return [inputs(50 + i, size, dtype=torch.float64) for i, size in enumerate(sizes)]


def buffers(model):
    return [b.clone() for name, b in model.named_buffers() if "running" in name]


def test_applied_recomputes_batch_norm_statistics_and_restores_them():
    model, _, average, _ = trained(normed())
    before, modes = copies(model), [m.training for m in model.modules()]
    theirs = average.to_averaged_model(model)
    update_bn(batches(6, 6, 6), theirs)
    with average.applied(model, data=batches(6, 6, 6)):
        assert_near(buffers(model), buffers(theirs), rtol=1e-12, atol=1e-12)
        assert [m.training for m in model.modules()] == modes
    assert_same(copies(model), before)


def test_applied_without_data_does_not_change_batch_norm_statistics():
    model, _, average, _ = trained(normed())
    before = buffers(model)
    with average.applied(model):
        assert_same(buffers(model), before)
    assert_same(buffers(average.to_averaged_model(model)), before)


def by_hand(model, parts):
    """Means of the first layer: those of a batch, weighted by its samples."""
    rows = [model[0](part).detach() for part in parts]
    total = sum(map(len, rows))
    mean = sum(len(r) * r.mean(0) for r in rows) / total
    return mean, sum(len(r) * r.var(0) for r in rows) / total


@pytest.mark.parametrize(("fraction", "used"), [(1.0, 4), (0.5, 2), (0.3, 2), (0.01, 1)])
def test_statistics_weight_batches_by_samples_and_use_a_fraction_of_the_data(fraction, used):
    model, _, average, _ = trained(normed())
    data = batches(9, 2, 5, 3)
    found = average.to_averaged_model(model, data=data, fraction=fraction)
    mean, variance = by_hand(found, data[:used])
    torch.testing.assert_close(found[1].running_mean, mean)
    torch.testing.assert_close(found[1].running_var, variance)


@pytest.mark.parametrize("kind", ["tensor", "pair", "single", "dict", "mapping", "own"])
def test_statistics_accept_tensors_lists_and_dictionaries_as_batches(kind):
    model, _, average, _ = trained(normed())
    data = batches(5, 4)
    expected = by_hand(average.to_averaged_model(model), data)
    shaped = {
        "tensor": data,
        "pair": [(x, torch.zeros(len(x))) for x in data],
        "single": [[x] for x in data],
        "dict": [{"input": x, "labels": torch.zeros(len(x))} for x in data],
        "mapping": [UserDict(input=x, labels=torch.zeros(len(x))) for x in data],
        "own": iter([{"deep": {"x": x}} for x in data]),
    }[kind]
    forward = (lambda net, batch: net(batch["deep"]["x"])) if kind == "own" else None
    average.copy_to(model, data=shaped, forward=forward)
    torch.testing.assert_close(model[1].running_mean, expected[0])
    torch.testing.assert_close(model[1].running_var, expected[1])


def test_count_gives_the_samples_of_user_defined_batches():
    model, _, average, _ = trained(normed())
    data = batches(5, 2)
    expected = by_hand(average.to_averaged_model(model), data)
    shaped = [SimpleNamespace(x=x) for x in data]
    average.copy_to(model, data=shaped, forward=lambda f, b: f(b.x), count=lambda b: len(b.x))
    torch.testing.assert_close(model[1].running_mean, expected[0])
    torch.testing.assert_close(model[1].running_var, expected[1])


def test_weights_and_statistics_are_restored_after_an_error_in_the_data():
    model, _, average, _ = trained(normed())
    before = copies(model)

    def broken():
        yield from batches(4)
        raise KeyError

    with pytest.raises(KeyError), average.applied(model, data=broken()):
        pass
    assert_same(copies(model), before)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"fraction": 1.5}, ValueError, "fraction must be between 0"),
        ({"fraction": 0.5, "data": iter([])}, TypeError, "data must have a length if fraction"),
        ({"sharing": "all"}, ValueError, "sharing must be one of own, none"),
        ({"data": [{"name": "x"}]}, TypeError, "a batch must contain a tensor whose length"),
        ({"data": []}, ValueError, "data must have at least one batch"),
    ],
)
def test_error_names_wrong_data_and_leaves_the_model_unchanged(options, error, match):
    model, _, average, _ = trained(normed())
    before = copies(model)
    with (
        pytest.raises(error, match=match),
        average.applied(model, **({"data": batches(4)} | options)),
    ):
        pass
    assert_same(copies(model), before)


def test_data_are_not_iterated_for_a_model_without_batch_norm():
    model, _, average, _ = trained()

    def never():
        raise KeyError
        yield

    with average.applied(model, data=never()):
        pass
