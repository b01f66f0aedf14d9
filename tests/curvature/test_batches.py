"""Data as a fixed list of batches."""

from functools import partial

import numpy as np
import pytest
import torch
from curvature.networks import labels, mlp, noise, seeded, vectors
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from ritz.curvature import Risk, hessian
from ritz.curvature import _batches as batches

CE = functional.cross_entropy
X, Y = noise(10, 3), labels(3, 10)
PAIRS = TensorDataset(X, Y)


class Augmented(Dataset):
    """Samples with noise that is new in every pass."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.randn(3, dtype=torch.float64), Y[index]


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return zip(X, Y, strict=True)


class Counted:
    """Batches that can be gone through again, of which the second may change in some pass."""

    def __init__(self, change=None, drop=None):
        self.passes, self.change, self.drop = 0, change, drop

    def __iter__(self):
        self.passes += 1
        yield X[:4], Y[:4]
        if self.drop is not None and self.passes > self.drop:
            return
        moved = self.change is not None and self.passes > self.change
        yield X[4:] + moved, Y[4:]


@pytest.fixture
def model():
    return mlp().double()


@pytest.fixture
def streamed(monkeypatch):
    monkeypatch.setattr(batches, "TUNING", batches.Tuning(memory=0))


def shuffling(**options):
    return DataLoader(PAIRS, batch_size=4, sampler=RandomSampler(PAIRS), **options)


SOURCES = {
    "loader": lambda: DataLoader(PAIRS, batch_size=4),
    "list": lambda: [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    "lists": lambda: [[X[:4], Y[:4]], [X[4:], Y[4:]]],
    "iterable": Counted,
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "batches of arrays": lambda: [(X[:4].numpy(), Y[:4].numpy()), (X[4:].numpy(), Y[4:].numpy())],
    "tensors and arrays": lambda: [(X[:4], Y[:4].numpy()), (X[4:].numpy(), Y[4:])],
    "dataset": lambda: PAIRS,
    "samples by index": lambda: Subset(PAIRS, range(10)),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("freeze", [False, True])
def test_loaders_lists_tuples_and_dictionaries_give_the_same_risk(model, kind, freeze):
    expected = Risk(model, CE, (X, Y), batch_size=10)
    found = Risk(model, CE, SOURCES[kind](), freeze=freeze)
    assert found.num_samples == 10
    assert found.loss() == pytest.approx(expected.loss(), rel=1e-14)
    torch.testing.assert_close(found.gradient(), expected.gradient())


def test_arrays_of_names_beside_tensors_are_passed_on(model):
    names = np.array(["a"] * 10)
    data = [{"input": X, "names": names, "labels": Y}]

    def forward(model, batch):
        assert batch["names"] is names
        return model(batch["input"]), batch["labels"]

    assert Risk(model, CE, data, forward=forward).loss() == Risk(model, CE, (X, Y)).loss()


def test_a_dataset_and_several_targets_are_cut_into_batches(model):
    def loss_fn(outputs, target):
        return CE(outputs, target[0]) + outputs[:, 0].mul(target[1]).mean()

    risk = Risk(model, CE, Subset(PAIRS, range(10)), batch_size=4)
    several = Risk(model, loss_fn, (X, (Y, X[:, 0])), batch_size=4)

    assert risk.batch_sizes == several.batch_sizes == [4, 4, 2]
    expected = loss_fn(model(X), (Y, X[:, 0])).item()
    assert several.loss() == pytest.approx(expected, rel=1e-14)


@pytest.mark.usefixtures("streamed")
def test_batches_loaded_again_equal_batches_in_memory(model):
    risk = Risk(model, CE, DataLoader(PAIRS, batch_size=4))
    held = Risk(model, CE, SOURCES["list"]())
    assert not risk._batches.held
    assert held._batches.held
    vector = noise(len(risk.theta))
    assert torch.equal(hessian(risk) @ vector, hessian(held) @ vector)
    assert risk.loss() == held.loss()
    assert risk.batch(2).loss() == held.batch(2).loss()
    with pytest.raises(
        ValueError, match="data must be in memory to select samples: pass freeze=True"
    ):
        risk.samples(torch.tensor([0]))
    assert Risk(model, CE, DataLoader(PAIRS, batch_size=4), freeze=True)._batches.held


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(
    ("source", "match"),
    [
        (partial(Counted, change=3), "batch 1 has changed"),
        (partial(Counted, drop=3), "2 batches, then 1"),
    ],
)
def test_data_that_change_in_a_later_pass_raise(model, source, match):
    risk = Risk(model, CE, source())
    with pytest.raises(ValueError, match=match):
        [risk.loss() for _ in range(3)]


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        (lambda: DataLoader(PAIRS, shuffle=True), ValueError, "shuffles: pass freeze"),
        (shuffling, ValueError, "a loader that shuffles"),
        (
            lambda: DataLoader(PAIRS, batch_sampler=torch.utils.data.BatchSampler(
                torch.utils.data.SubsetRandomSampler(range(10)), 5, False)),
            ValueError,
            "a loader that shuffles",
        ),
        (lambda: iter(SOURCES["list"]()), TypeError, "got an iterator: pass freeze"),
        (lambda: (pair for pair in SOURCES["list"]()), TypeError, "got an iterator"),
    ],
)  # fmt: skip
def test_shuffling_and_augmentation_raise_without_freeze(model, source, error, match):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with pytest.raises(error, match=match):
            Risk(model, CE, source())
        risk = Risk(model, CE, source(), freeze=True)
    assert risk.num_samples == 10
    assert risk.loss() == risk.loss()


@pytest.mark.usefixtures("streamed")
def test_augmentation_beyond_the_memory_raises_without_freeze(model):
    risk = Risk(model, CE, DataLoader(Augmented(), batch_size=4))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        with pytest.raises(ValueError, match="batch 0 has changed"):
            risk.loss()


@pytest.mark.parametrize("memory", [2**30, 0])
def test_a_loader_is_read_once_to_make_a_risk(model, memory, monkeypatch):
    monkeypatch.setattr(batches, "TUNING", batches.Tuning(memory=memory))
    source = Counted()

    risk = Risk(model, CE, source)

    assert source.passes == 1
    assert risk.loss() == pytest.approx(Risk(model, CE, (X, Y)).loss(), rel=1e-14)
    assert source.passes == (1 if memory else 2)


def rows_of(risk):
    """Return the inputs of a risk, sorted by their first entry."""
    inputs = torch.cat([batch[0] for _, batch in risk._batches])
    return inputs[inputs[:, 0].argsort()]


FURTHER = {
    "shuffling": lambda: DataLoader(PAIRS, batch_size=4, shuffle=True),
    "sampler": lambda: DataLoader(PAIRS, batch_size=4, sampler=range(10)),
    "iterator": lambda: iter(SOURCES["list"]()),
    "overwriting": lambda: Overwriting([(X[:5], Y[:5]), (X[5:], Y[5:])]),
}


@pytest.mark.parametrize("kind", [*SOURCES, *FURTHER])
def test_a_subset_has_whole_samples_of_the_data_and_is_the_same_again(model, kind):
    make = (SOURCES | FURTHER)[kind]
    options = {"max_samples": 7, "seed": 3}

    first, second = (Risk(model, CE, make(), **options) for _ in range(2))
    other = Risk(model, CE, make(), max_samples=7, seed=4)

    assert first.num_samples == 7
    assert torch.equal(first.theta, second.theta)
    assert torch.equal(rows_of(first), rows_of(second))
    assert not torch.equal(rows_of(first), rows_of(other))
    for _, (x, y) in first._batches:  # every row with its own label
        places = (x[:, None] == X).all(2).nonzero()
        assert len(places) == len(x)
        assert torch.equal(Y[places[:, 1]], y)
    assert len({tuple(row) for row in rows_of(first).tolist()}) == 7


@pytest.mark.parametrize("kind", ["tensors", "loader", "iterable"])
def test_every_sample_is_as_likely_to_be_drawn(model, kind):
    counts = torch.zeros(10)
    for seed in range(200):
        risk = Risk(model, CE, SOURCES[kind](), max_samples=3, seed=seed)
        counts += (rows_of(risk)[:, None] == X).all(2).sum(0)
    # 200 draws with probability 0.3: 60, with a standard deviation of 6.5.
    assert float((counts - 60).abs().max()) < 4 * 6.5


def test_a_subset_of_more_samples_than_there_are_is_all_of_them(model):
    for kind in ("tensors", "loader", "list"):
        risk = Risk(model, CE, SOURCES[kind](), max_samples=100)
        assert risk.num_samples == 10
        assert risk.loss() == pytest.approx(Risk(model, CE, (X, Y)).loss(), rel=1e-14)


def test_a_loader_of_samples_by_number_fetches_those_of_the_subset_alone(model):
    fetched = []

    class Noting(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            fetched.append(index)
            return X[index], Y[index]

    Risk(model, CE, DataLoader(Noting(), batch_size=4, shuffle=True), max_samples=3)

    assert len(fetched) == 3


def test_a_subset_of_batches_of_other_shapes_keeps_them_apart(model):
    padded = [(noise(4, length, 3), labels(3, 4)) for length in (2, 5, 2)]

    def forward(model, batch):
        return model(batch[0]).mean(1), batch[1]

    risk = Risk(model, CE, padded, forward=forward, max_samples=9)

    assert risk.num_samples == 9
    assert {batch[0].shape[1] for _, batch in risk._batches} == {2, 5}


def test_a_subset_of_labels_without_rows_raises(model):
    wrong = [(noise(6, 3), labels(3, 4))]
    with pytest.raises(ValueError, match="one row per sample, got 6 rows and 4 labels"):
        Risk(model, CE, wrong, max_samples=2)
    with pytest.raises(ValueError, match="max_samples must be at least 1, got 0"):
        Risk(model, CE, (X, Y), max_samples=0)


def test_a_bar_is_shown_while_a_loader_is_read(model):
    class Noting:
        calls = ()

        def start(self, label, total):
            self.calls += ((label, total),)

        def update(self, done, note=""):
            self.calls += (done,)

        def finish(self):
            self.calls += ("finish",)

    shown = Noting()
    Risk(model, CE, DataLoader(PAIRS, batch_size=4), progress=shown)
    assert shown.calls == (("batches of data", 3), 1, 2, 3, "finish")


def test_a_loader_of_an_iterable_dataset_needs_no_length(model):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(PAIRS)

    stream = DataLoader(Stream(), batch_size=4)

    risks = [Risk(model, CE, data) for data in (stream, DataLoader(PAIRS, batch_size=4))]

    assert risks[0].loss() == risks[1].loss()


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("memory", [2**30, 0])
def test_a_pass_over_a_loader_leaves_every_generator_as_it_was(model, freeze, memory, monkeypatch):
    monkeypatch.setattr(batches, "TUNING", batches.Tuning(memory=memory))
    own = seeded(3)
    loaders = [
        DataLoader(PAIRS, batch_size=4),
        DataLoader(PAIRS, batch_size=4, generator=own),
    ]
    if freeze:
        loaders += [shuffling(), DataLoader(PAIRS, shuffle=True, generator=own)]
        loaders += [DataLoader(Augmented(), batch_size=4)]
    for loader in loaders:
        before, mine = torch.get_rng_state(), own.get_state()
        risk = Risk(model, CE, loader, freeze=freeze)
        risk.loss()
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(own.get_state(), mine)


def test_count_sets_the_weight_of_a_batch(model):
    data = vectors(4, 2)
    risk = Risk(model, CE, data, count=lambda batch: 1)
    assert risk.num_samples == 2
    with torch.no_grad():
        expected = sum(float(CE(model(x), y)) for x, y in data) / 2
    assert risk.loss() == pytest.approx(expected, rel=1e-14)


@pytest.mark.filterwarnings("ignore:.* cannot be traced on some batches")
def test_products_are_right_for_more_shapes_of_batches_than_traces(model):
    sizes = range(1, 12)
    risk = Risk(model, CE, vectors(*sizes), params="2")
    vector = noise(len(risk.theta))
    op = hessian(risk, engine="linearized")
    first = op @ vector
    torch.testing.assert_close(first, hessian(risk, engine="eager") @ vector)
    assert torch.equal(op @ vector, first)


def test_values_without_a_row_per_sample_are_not_split(model):
    data = [(x, torch.tensor(2.0, dtype=torch.float64), y) for x, y in vectors(4, 3)]

    def forward(model, batch):
        return model(batch[0]) * batch[1], batch[2]

    risk = Risk(model, CE, data, forward=forward)
    assert risk.batch_sizes == [4, 3]
    assert risk.samples(torch.arange(7)).loss() == pytest.approx(risk.loss(), rel=1e-14)


class Overwriting:
    """Batches that are all written into the same memory."""

    def __init__(self, data):
        self.data, self.memory = data, torch.empty_like(data[0][0])

    def __iter__(self):
        for x, y in self.data:
            yield self.memory.copy_(x), y


def test_batches_written_into_the_same_memory_are_copied(model):
    data = vectors(4, 4)
    assert Risk(model, CE, Overwriting(data)).loss() == Risk(model, CE, data).loss()


def test_samples_raises_if_batches_cannot_be_joined(model):
    scaled = [(x, torch.tensor(float(k)), y) for k, (x, y) in enumerate(vectors(4, 3))]
    risk = Risk(model, CE, scaled, forward=lambda model, b: (model(b[0]) * b[1], b[2]))
    with pytest.raises(ValueError, match="values cannot be joined"):
        risk.samples(torch.arange(3))
    padded = [
        (noise(4, length, 3), y) for length, (_, y) in zip((2, 5), vectors(4, 4), strict=True)
    ]
    risk = Risk(model, CE, padded, forward=lambda model, b: (model(b[0]).mean(1), b[1]))
    with pytest.raises(ValueError, match="cannot be joined"):
        risk.samples(torch.arange(3))
