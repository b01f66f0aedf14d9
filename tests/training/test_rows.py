"""Last batches of fewer samples: left out on request, explained where batch norm takes none."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training.examples import network, samples
from training.texts import text

from ritz._core.random import epoch_generator
from ritz.training import fit
from ritz.training._data import Feed, IndexedData

CPU = torch.device("cpu")


def indexed(count):
    return IndexedData(TensorDataset(*samples(count)))


@pytest.mark.parametrize("source", [samples, indexed])
def test_drop_last_leaves_out_a_smaller_last_batch(source):
    feed = Feed(source(57), batch_size=8, device=CPU, shuffled=True, drop_last=True)
    batches = list(feed.epoch(1, 3))
    assert [len(batch[0]) for batch in batches] == [8] * 7
    assert feed.num_batches == 7
    order = torch.randperm(57, generator=epoch_generator(3, 1))[:56]
    assert torch.equal(torch.cat([batch[0] for batch in batches]), samples(57)[0][order])
    rest = list(feed.epoch(1, 3, skip=5))
    assert torch.equal(rest[0][0], batches[5][0])
    assert len(rest) == 2


def test_drop_last_changes_the_steps_and_must_match_on_resume(tmp_path):
    result = fit(network(norm=True), samples(57), num_epochs=2, batch_size=8, drop_last=True,
                 checkpoint=tmp_path)  # fmt: skip
    assert result.num_steps == 14
    with pytest.raises(ValueError, match="made with drop_last=True, this run has False"):
        fit(network(), samples(57), num_epochs=2, batch_size=8, checkpoint=tmp_path)


def loader(count):
    return DataLoader(TensorDataset(*samples(count)), 8)


@pytest.mark.parametrize("source", [samples, indexed, loader])
def test_error_of_a_batch_of_one_row_suggests_drop_last(source):
    with pytest.raises(ValueError, match=r"batch of 1 in 1 process: use drop_last=True"):
        fit(network(norm=True), source(25), num_epochs=1, batch_size=8)


def test_batch_norm_after_a_convolution_trains_on_a_batch_of_one_row():
    layers = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8, 3))

    result = fit(model, samples(25), num_epochs=2, batch_size=8)

    assert result.num_steps == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (samples(7), "batch_size must be at most 7 with drop_last, got 8"),
        (DataLoader(TensorDataset(*samples()), 8), "drop_last needs tensors or a dataset"),
        (text(), "drop_last needs tensors or a dataset"),
    ],
)
def test_drop_last_is_refused_for_data_that_come_in_batches(data, message):
    with pytest.raises(ValueError, match=message):
        fit(network(), data, num_epochs=1, batch_size=8, drop_last=True)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*samples(24), strict=True)


def test_a_loader_of_data_without_a_length_is_accepted():
    assert Feed(DataLoader(Stream(), 8), batch_size=None, device=CPU,
                shuffled=True).num_batches is None  # fmt: skip
    assert fit(network(), DataLoader(Stream(), 8), num_epochs=2).num_steps == 6
    with pytest.raises(ValueError, match="steps_per_epoch is required for average_from"):
        fit(network(), DataLoader(Stream(), 8), num_epochs=2, average_from=1)


def test_lazy_layers_get_their_shapes_from_the_first_step():
    def model():
        return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.LazyBatchNorm1d(),
                             nn.Flatten(), nn.LazyLinear(3))  # fmt: skip

    assert fit(model(), samples(25), num_epochs=1, batch_size=8).num_steps == 4
    flat = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="batch of 1 in 1 process"):
        fit(flat, samples(25), num_epochs=1, batch_size=8)
