import hashlib

import pytest
import torch

from ritz._core.random import epoch_generator
from ritz.data._images import SPLIT_SEED, held_out


def test_what_is_held_out_never_changes():
    # Results of different versions are compared: another choice would make that meaningless.
    assert held_out(100, 10)[1].tolist() == [2, 16, 26, 54, 55, 73, 75, 86, 93, 95]
    stay, out = held_out(50_000, 5000)
    digest = hashlib.sha256(out.numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == "7580bdab922dd44949b89bd23b51092367b5e9cce34f9b3d89181ffc99c6000b"
    assert (len(stay), len(out), SPLIT_SEED) == (45_000, 5000, 0)


def test_the_two_parts_are_all_of_it():
    stay, out = held_out(1000, 77, seed=3)
    assert sorted([*stay.tolist(), *out.tolist()]) == list(range(1000))
    assert stay.tolist() == sorted(stay.tolist())
    assert out.tolist() != held_out(1000, 77, seed=4)[1].tolist()


def test_nothing_held_out():
    stay, out = held_out(5, 0)
    assert stay.tolist() == [0, 1, 2, 3, 4]
    assert not len(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 10), "count must be between 0 and 9, got 10"),
        ((10, -1), "count must be between 0 and 9, got -1"),
        ((0, 0), "total must be at least 1, got 0"),
    ],
)
def test_counts_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        held_out(*arguments)


def test_epochs_have_generators_of_their_own():
    drawn = {
        (seed, epoch): tuple(torch.randperm(20, generator=epoch_generator(seed, epoch)).tolist())
        for seed in (0, 1, 11)
        for epoch in (0, 1, 11)
    }
    assert len(set(drawn.values())) == 9
    assert tuple(torch.randperm(20, generator=epoch_generator(1, 11)).tolist()) == drawn[1, 11]
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        epoch_generator(0, -1)
