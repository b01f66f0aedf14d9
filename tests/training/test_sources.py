import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ritz import data, training
from ritz.training._data import IndexedData, as_parts, first_batch, limited, measurable, sample
from ritz.training._run_folder import RunConfig, measured_risk, read_run, run_weights, train_run

X = torch.arange(24.0).reshape(12, 2)
Y = torch.arange(12) % 3
SAMPLES = (X, Y)


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.array([index, index**2], dtype=np.float32), index % 3


@pytest.mark.parametrize(
    "found",
    [
        (SAMPLES, SAMPLES),
        {"train": SAMPLES, "test": SAMPLES},
        (TensorDataset(*SAMPLES), list(SAMPLES)),
    ],
)
def test_pairs_and_dictionaries_are_parts(found):
    parts = as_parts(found)
    for part in (parts.train, parts.test):
        torch.testing.assert_close(part, SAMPLES)
    assert parts.validation is None
    assert (parts.shape, parts.num_classes) == ((2,), 3)


def test_tensors_alone_are_training_data():
    assert as_parts(SAMPLES).test is None
    assert as_parts((X, X)).num_classes is None


def test_a_data_set_keeps_its_shape_and_classes():
    parts = as_parts(data.load("digits"))
    assert (parts.shape, parts.num_classes, len(parts.test)) == ((1, 8, 8), 10, 517)


def test_a_loader_knows_shape_and_classes_and_comes_in_batches():
    parts = as_parts(DataLoader(TensorDataset(*SAMPLES), batch_size=5))
    assert (parts.shape, parts.num_classes) == ((2,), 3)


def test_wrong_parts_are_named():
    with pytest.raises(ValueError, match="parts train and perhaps validation and test, got trian"):
        as_parts({"trian": SAMPLES})
    with pytest.raises(TypeError, match=r"train data must be .* or have batches\(\), got int"):
        as_parts(3)


def test_arrays_are_tensors():
    arrays = (X.numpy()[::-1], Y.numpy())
    for found in (arrays, {"train": arrays, "test": arrays}, ([arrays], arrays)):
        parts = as_parts(found)
        inputs, targets = parts.train[0] if isinstance(parts.train, list) else parts.train
        torch.testing.assert_close(inputs, X.flip(0))
        torch.testing.assert_close(targets, Y)
        assert (parts.test is None) == (found is arrays)
    with pytest.raises(TypeError, match="numeric dtype of torch, got an array of object"):
        as_parts((np.array([None]), Y.numpy()))


@pytest.mark.parametrize("wrong", [(X, Y[:5]), TensorDataset(X[:0], Y[:0]), [], (X, [1, 2]), X])
def test_parts_without_samples_or_pairs_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=r"train data must"):
        as_parts({"train": wrong, "test": SAMPLES})


def test_the_first_batch_is_read_without_using_generators():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    loader = DataLoader(TensorDataset(*SAMPLES), batch_size=5, shuffle=True, generator=generator)
    for source in (SAMPLES, IndexedData(TensorDataset(*SAMPLES)), loader, [(X[:2], Y[:2])]):
        inputs, targets = first_batch(source)
        torch.testing.assert_close(inputs, X[:2])
        torch.testing.assert_close(targets, Y[:2])
    assert torch.equal(generator.get_state(), before)
    text = data.TextSplit(tokens=torch.arange(50), length=7)
    torch.testing.assert_close(first_batch(text)[0], torch.arange(7)[None])
    assert first_batch(iter([SAMPLES])) is None
    assert first_batch(DataLoader(Squares(), batch_size=None)) is None


def test_a_dataset_is_batched_shuffled_and_sampled():
    found = as_parts(Squares()).train
    assert isinstance(found, IndexedData)
    batches = found.batches(5)
    assert [len(y) for _, y in batches] == [5, 5, 2]
    torch.testing.assert_close(batches[2][0], torch.tensor([[10.0, 100.0], [11.0, 121.0]]))
    torch.testing.assert_close(batches[1:][1][1], batches[2][1])
    shuffled = found.batches(12, generator=torch.Generator().manual_seed(0))[0][0][:, 0]
    assert not torch.equal(shuffled, torch.arange(12.0))
    torch.testing.assert_close(shuffled.sort().values, torch.arange(12.0))
    taken = limited(found, 4, seed=1)
    assert len(taken) == 4
    assert len({float(x) for x in taken.batches(4)[0][0][:, 0]}) == 4


def test_samples_are_drawn_by_the_seed_without_replacement():
    first, again, other = (limited(SAMPLES, 6, seed=seed)[0][:, 0] for seed in (0, 0, 1))
    torch.testing.assert_close(first, again)
    assert not torch.equal(first, other)
    assert len(set(first.tolist())) == 6
    for source in (SAMPLES, IndexedData(Squares())):
        with pytest.raises(ValueError, match="num_samples must be between 1 and 12, got 13"):
            limited(source, 13, seed=0)


@pytest.mark.parametrize("kind", ["loader", "list"])
def test_exactly_as_many_random_samples_of_a_loader_or_list_are_measured(kind):
    loader = DataLoader(
        TensorDataset(torch.arange(300.0)[:, None], torch.zeros(300)), batch_size=32
    )
    source = loader if kind == "loader" else list(loader)

    chosen = torch.cat([x for x, _ in limited(source, 100, seed=0)]).flatten()
    again = torch.cat([x for x, _ in limited(source, 100, seed=0)]).flatten()
    other = torch.cat([x for x, _ in limited(source, 100, seed=1)]).flatten()

    assert len(chosen.unique()) == 100
    assert chosen.max() > 150  # not the first ones
    assert torch.equal(chosen, again)
    assert set(chosen.tolist()) != set(other.tolist())
    with pytest.raises(ValueError, match="num_samples must be between 1 and 300, got 301"):
        limited(source, 301, seed=0)


def test_a_stream_and_a_text_give_their_first_samples():
    stream = ((x, x) for x in torch.arange(12.0).split(5))
    assert torch.cat([y for _, y in limited(stream, 6, seed=0)]).tolist() == [0, 1, 2, 3, 4, 5]
    text = data.TextSplit(tokens=torch.arange(50), length=7)
    short = limited(text, 20, seed=0)
    assert len(short.tokens) == 20
    batches, options = measurable(short, 2)
    # Two streams of ten tokens: nine predictions each, in segments of seven and two.
    assert [options["count"](batch) for batch in batches] == [14, 4]


def test_a_sample_has_at_most_all_samples():
    held, options = sample(SAMPLES, 100, batch_size=4, seed=0)
    assert len(held[0]) == 12
    assert options == {"batch_size": 4}
    assert [len(y) for _, y in sample(IndexedData(Squares()), 100, batch_size=8, seed=0)[0]] == [
        8,
        4,
    ]


def model():
    torch.manual_seed(0)
    return nn.Linear(2, 3)


CONFIG = RunConfig(
    model="linear",
    data="own",
    training=training.TrainingConfig(num_epochs=1, batch_size=4, optimizer="adam"),
)


def test_a_run_folder_is_read_as_it_was_written(tmp_path):
    result = train_run(CONFIG, model(), as_parts(SAMPLES), tmp_path, loss_fn=cross_entropy)
    assert result.num_steps == 3
    assert read_run(tmp_path) == CONFIG
    assert run_weights(tmp_path).name == "weights.safetensors"
    (tmp_path / "weights.safetensors").unlink()
    assert run_weights(tmp_path).name == "checkpoint.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no average.safetensors, which a run with an"):
        run_weights(tmp_path, average=True)
    with pytest.raises(FileNotFoundError, match=r"it has no run.json"):
        read_run(tmp_path / "elsewhere")


def test_the_risk_of_a_part_of_the_data():
    network = model()
    parts = as_parts((SAMPLES, (X[:5], Y[:5])))
    whole = measured_risk(network, cross_entropy, parts, batch_size=4)
    assert whole.num_samples == 12
    test = measured_risk(network, cross_entropy, parts, split="test", batch_size=4)
    expected = training.evaluate(network, [(X[:5], Y[:5])])["loss"]
    assert test.loss() == pytest.approx(expected, rel=1e-6)  # float32, another order of sums
    assert (
        measured_risk(network, cross_entropy, parts, num_samples=7, batch_size=4).num_samples == 7
    )
    with pytest.raises(ValueError, match="a part of the data, train or test, got 'validation'"):
        measured_risk(network, cross_entropy, parts, split="validation", batch_size=4)


def test_a_configuration_is_checked():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        RunConfig.from_plain({"model": "m", "data": "d", "training": {"batch_size": 0}})
