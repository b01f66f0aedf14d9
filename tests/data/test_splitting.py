import hashlib

import pytest
import torch

from ritz._core.random import epoch_generator
from ritz.data._images import SPLIT_SEED, hold_out


def indices(total, count):
    """Return the indices that remain and those that are held out, as lists."""
    places = torch.arange(total)
    return [inputs.tolist() for inputs, _ in hold_out((places, places), count)]


def test_the_held_out_samples_never_change():
    # Results of different versions are compared: another choice would make that meaningless.
    assert indices(100, 10)[1] == [2, 16, 26, 54, 55, 73, 75, 86, 93, 95]
    remain, out = indices(50_000, 5000)
    digest = hashlib.sha256(torch.tensor(out).numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == "7580bdab922dd44949b89bd23b51092367b5e9cce34f9b3d89181ffc99c6000b"
    assert (len(remain), len(out), SPLIT_SEED) == (45_000, 5000, 0)


@pytest.mark.parametrize("count", [0, 77])
def test_every_sample_is_in_one_of_the_two_parts(count):
    remain, out = indices(1000, count)

    assert sorted([*remain, *out]) == list(range(1000))
    assert remain == sorted(remain)
    assert len(out) == count


def test_each_epoch_has_a_different_generator():
    drawn = {
        (seed, epoch): tuple(torch.randperm(20, generator=epoch_generator(seed, epoch)).tolist())
        for seed in (0, 1, 11)
        for epoch in (0, 1, 11)
    }
    assert len(set(drawn.values())) == 9
    assert tuple(torch.randperm(20, generator=epoch_generator(1, 11)).tolist()) == drawn[1, 11]
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        epoch_generator(0, -1)
