"""Batches: rows, devices, labels."""

from collections import UserDict

import pytest
import torch
from torch.utils.data import TensorDataset

from ritz._core import batches

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
NESTED = {"inputs": [X, (Y, "name")], "scale": torch.tensor(2.0), "labels": Y}


def test_tensors_of_nested_batches_come_in_order():
    found = batches.tensors(NESTED)
    assert [tuple(tensor.shape) for tensor in found] == [(6, 2), (6,), (), (6,)]


@pytest.mark.parametrize("batch", [X, (X, Y), [X, Y], {"x": X}, (torch.tensor(1.0), X), NESTED])
def test_the_number_of_rows_is_that_of_the_first_tensor_with_rows(batch):
    assert batches.num_rows(batch) == 6


@pytest.mark.parametrize("batch", ["name", (), (torch.tensor(1.0), 3), {"name": "x"}])
def test_a_batch_without_rows_is_refused_by_name(batch):
    match = "batch 3 must contain a tensor whose length is the number of samples, got .*pass count="
    with pytest.raises(TypeError, match=match):
        batches.num_rows(batch, "batch 3")


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((X, Y[:4]), r"train data must be tensors of the same length, got \[6, 4\]"),
        ((X, torch.tensor(1.0)), r"of the same length, got \[6, 0\]"),
        ((X[:0], Y[:0]), "train data must have at least one sample"),
        ({"name": "x"}, "must have at least one sample"),
    ],
)
def test_samples_that_come_at_once_must_agree_in_length(batch, match):
    assert batches.common_rows((X, Y)) == 6
    with pytest.raises(ValueError, match=match):
        batches.common_rows(batch, "train data")


def test_rows_are_taken_only_from_tensors_with_a_row_per_sample():
    part = batches.take_rows(NESTED, torch.tensor([4, 1]), 6)

    assert torch.equal(part["inputs"][0], X[[4, 1]])
    assert part["inputs"][1][1] == "name"
    assert float(part["scale"]) == 2.0
    assert part["labels"].tolist() == [4, 1]


@pytest.mark.parametrize("batch_size", [1, 4, 6, 10])
def test_joining_the_parts_of_a_split_restores_the_whole(batch_size):
    parts = batches.split_rows((X, Y), batch_size)
    whole = batches.join_rows(parts, [batches.num_rows(part) for part in parts])

    assert [len(part[0]) for part in parts[:-1]] == [batch_size] * (len(parts) - 1)
    assert torch.equal(whole[0], X)
    assert torch.equal(whole[1], Y)


def test_values_that_belong_to_no_sample_are_joined_only_if_equal():
    scale = torch.tensor(2.0)
    assert batches.join_rows([(X, scale), (X, scale)], [6, 6])[1] is scale
    with pytest.raises(ValueError, match="shapes or values cannot be joined"):
        batches.join_rows([(X, scale), (X, scale + 1)], [6, 6])
    with pytest.raises(ValueError, match="cannot be joined"):
        batches.join_rows([X, X[:, :1]], [6, 6])
    with pytest.raises(ValueError, match="no tensor of a batch of 3 samples"):
        batches.join_rows([X, X], [3, 3])


def test_moving_a_batch_keeps_its_nesting_and_unpacks_mappings():
    meta = torch.device("meta")
    moved = batches.to_device(NESTED, meta)
    assert {tensor.device for tensor in batches.tensors(moved)} == {meta}
    assert moved["inputs"][1][1] == "name"
    assert type(batches.to_device(UserDict(x=X), meta)) is dict


def test_data_in_one_piece_are_distinguished_from_batches():
    assert batches.as_one_batch((X, Y)) == (X, Y)
    assert batches.as_one_batch(TensorDataset(X, Y)) == (X, Y)
    assert batches.as_one_batch(X) == (X,)
    assert type(batches.as_one_batch(UserDict(x=X))) is dict
    assert batches.as_one_batch([(X, Y)]) is None
    assert batches.is_tensors((X, Y))
    assert not any(map(batches.is_tensors, [(), [X], X, (X, 3)]))


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "labels"),
    [
        ((1, 2, 3), (1, 2), {}, 3),
        ([1, 3], (1,), {}, 3),
        ((1,), (1,), {}, None),
        ({"x": 1, "labels": 3}, (), {"x": 1}, 3),
        ({"x": 1}, (), {"x": 1}, None),
        (1, (1,), {}, None),
    ],
)
def test_labels_are_separated_from_the_inputs_of_the_model(batch, args, kwargs, labels):
    assert batches.split_labels(batch) == (args, kwargs, labels)
