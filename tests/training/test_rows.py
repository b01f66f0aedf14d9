"""Last batches of fewer samples: left out on request, explained where batch norm takes none."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training.examples import assert_same_bits, network, samples, state
from training.texts import text

from ritz._core.random import epoch_generator
from ritz.training import fit
from ritz.training._data import Feed, IndexedData

CPU = torch.device("cpu")
ADVICE = r"two rows or more.* batch of 1 .*drop_last=True \(--drop-last\).*than 8"


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


@pytest.mark.parametrize("source", [samples, indexed])
def test_a_batch_of_one_row_is_explained_before_the_first_step(tmp_path, source):
    model = network(norm=True)
    with pytest.raises(ValueError, match=ADVICE):
        fit(model, source(57), num_epochs=2, batch_size=8, checkpoint=tmp_path)
    assert_same_bits(state(model), state(network(norm=True)))
    assert list(tmp_path.iterdir()) == []


def test_a_batch_of_one_row_of_a_loader_is_explained_in_its_step():
    loader = DataLoader(TensorDataset(*samples(25)), 8)
    with pytest.raises(ValueError, match=r"batch of 1 .*give drop_last=True to the loader"):
        fit(network(norm=True), loader, num_epochs=1)


def test_convolutions_train_on_one_row_and_the_check_changes_nothing():
    def model():
        found = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2),
                              nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 3))  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in found.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        return found

    data = samples(25)
    fit(found := model(), data, num_epochs=2, batch_size=8)
    # Batches that are cut elsewhere are not asked about.
    cut = lambda epoch: Feed(data, batch_size=8, device=CPU, shuffled=True).epoch(epoch, 0)  # noqa: E731
    fit(expected := model(), cut, num_epochs=2, steps_per_epoch=4)
    assert_same_bits(state(found), state(expected))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (samples(7), "batch_size must be at most 7, the number of samples, with drop_last, got 8"),
        (DataLoader(TensorDataset(*samples()), 8), "drop_last needs samples that batch_size cuts"),
        (text(), "drop_last needs samples that batch_size cuts"),
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
    with pytest.raises(ValueError, match="steps_per_epoch must be given with average_from"):
        fit(network(), DataLoader(Stream(), 8), num_epochs=2, average_from=1)


def test_lazy_layers_get_their_shapes_from_the_first_step():
    def model():
        return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.LazyBatchNorm1d(),
                             nn.Flatten(), nn.LazyLinear(3))  # fmt: skip

    assert fit(model(), samples(25), num_epochs=1, batch_size=8).num_steps == 4
    flat = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=ADVICE):
        fit(flat, samples(25), num_epochs=1, batch_size=8)
