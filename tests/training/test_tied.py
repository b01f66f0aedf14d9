"""Weights that have two names: saved under both, loaded from files that have one of them."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from training.examples import assert_same_bits, samples, state

from ritz._core.storage import CorruptFileError
from ritz.training import fit, load_weights, read_weights, save_weights

RUN = {"num_epochs": 2, "batch_size": 12}


class Tied(nn.Module):
    """Two layers with one matrix, as a language model has for words in and out."""

    def __init__(self, seed=0, tied=True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


NAMES = ["first.weight", "first.bias", "second.weight", "second.bias"]


def test_a_run_with_tied_weights_is_saved_and_resumed(tmp_path):
    data = samples(classes=6)
    common = {"batch_size": 12, "average_from": 1, "seed": 1}
    fit(Tied(), data, num_epochs=1, checkpoint=tmp_path, keep=[1], **common)
    fit(found := Tied(), data, num_epochs=2, checkpoint=tmp_path, **common)
    fit(whole := Tied(), data, num_epochs=2, **common)
    assert_same_bits(state(found), state(whole))
    for name in ("weights", "average", "epoch-0001", "checkpoint"):
        assert sorted(read_weights(tmp_path / f"{name}.safetensors")) == sorted(NAMES)
    load_weights(other := Tied(seed=1), tmp_path / "weights.safetensors")
    assert_same_bits(state(other), state(whole))
    assert other.first.weight is other.second.weight


def test_views_of_one_memory_are_saved(tmp_path):
    both = torch.arange(12.0)
    model = nn.Module()
    model.register_buffer("low", both[:6])
    model.register_buffer("high", both[6:].view(2, 3))
    save_weights(model, tmp_path / "weights.safetensors")
    assert_same_bits(read_weights(tmp_path / "weights.safetensors"), state(model))


def test_a_file_with_one_of_the_names_is_loaded(tmp_path):
    model = Tied()
    save_model(model, tmp_path / "one.safetensors")
    assert len(read_weights(tmp_path / "one.safetensors")) == 3
    load_weights(other := Tied(seed=1), tmp_path / "one.safetensors")
    assert_same_bits(state(other), state(model))
    with pytest.raises(ValueError, match=r"(first|second)\.weight is missing in the file"):
        load_weights(Tied(tied=False), tmp_path / "one.safetensors")


def test_different_values_for_tied_weights_are_refused(tmp_path):
    save_weights(Tied(tied=False), tmp_path / "two.safetensors")
    model = Tied(seed=1)
    with pytest.raises(ValueError, match=r"ties first\.weight and second\.weight, which differ"):
        load_weights(model, tmp_path / "two.safetensors")
    assert_same_bits(state(model), state(Tied(seed=1)))


def test_names_of_compiled_models_are_those_of_the_model(tmp_path):
    model = Tied(tied=False)
    names = {"whole": "_orig_mod.", "spread": "module._orig_mod.", "turned": "_orig_mod.module."}
    for name, prefix in names.items():
        torch.save({prefix + key: x for key, x in state(model).items()}, tmp_path / f"{name}.pt")
        load_weights(other := Tied(seed=1, tied=False), tmp_path / f"{name}.pt")
        assert_same_bits(state(other), state(model))
    inner = {key.replace("first.", "first._orig_mod."): x for key, x in state(model).items()}
    save_file(inner, tmp_path / "inner.safetensors")
    other = Tied(seed=1, tied=False)
    other.first = torch.compile(other.first, backend="eager")
    load_weights(other, tmp_path / "inner.safetensors")
    save_weights(other, tmp_path / "own.safetensors")
    assert_same_bits(read_weights(tmp_path / "own.safetensors"), state(model))


def test_pickles_named_safetensors_are_recognised(tmp_path):
    path = tmp_path / "weights.safetensors"
    torch.save(state(Tied()), path)
    assert_same_bits(read_weights(path), state(Tied()))
    torch.save(Tied(), path)
    with pytest.raises(CorruptFileError, match=r"weights\.safetensors is refused"):
        load_weights(Tied(), path)
