import pytest
import torch

from ritz import Risk
from ritz._core.random import epoch_generator
from ritz.data import Augmentation, Split
from ritz.data._images import channel_statistics


@pytest.fixture
def split(rng):
    inputs = torch.randint(0, 256, (50, 3, 6, 6), generator=rng, dtype=torch.uint8)
    mean, std = channel_statistics(inputs)
    return Split(inputs=inputs, targets=torch.arange(50), mean=mean, std=std)


def same(left, right):
    assert len(left) == len(right)
    for (x, y), (u, v) in zip(left, right, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    return True


def test_without_a_generator_the_order_is_that_of_the_files(split):
    batches = split.batches(16)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert targets.tolist() == list(range(50))
    assert [len(y) for _, y in batches] == [16, 16, 16, 2]
    assert torch.equal(inputs, split.tensors()[0])
    assert same(batches, split.batches(16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_have_mean_zero_and_variance_one(split, dtype):
    inputs, targets = split.tensors(dtype=dtype)
    assert inputs.dtype == dtype
    assert torch.equal(targets, split.targets)
    expected = (split.inputs.double() / 255 - split.mean.view(3, 1, 1)) / split.std.view(3, 1, 1)
    torch.testing.assert_close(inputs, expected.to(dtype))
    flat = inputs.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(flat.std(1, correction=0), torch.ones(3).double())


def test_a_channel_that_never_varies_is_only_centred():
    inputs = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    mean, std = channel_statistics(inputs)
    assert (mean.tolist(), std.tolist()) == ([0.2], [0.0])
    flat = Split(inputs=inputs, targets=torch.zeros(4).long(), mean=mean, std=std)
    # 51 / 255 and its mean differ by the roundoff of float32.
    torch.testing.assert_close(flat.tensors()[0], torch.zeros(4, 1, 2, 2), atol=1e-7, rtol=0)


def test_shuffled_epochs_hold_every_sample_once_and_differ(split):
    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.cat([y for _, y in split.batches(16, generator=generator)]) for _ in range(2)
    )
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert first.tolist() != second.tolist()


def test_inputs_go_with_their_targets(split):
    inputs, _ = split.tensors()
    for x, y in split.batches(7, generator=epoch_generator(0, 0)):
        assert torch.equal(x, inputs[y])


@pytest.mark.parametrize("augment", [None, Augmentation(padding=2)])
def test_an_epoch_can_be_resumed_at_any_batch(split, augment):
    whole = list(split.batches(8, generator=epoch_generator(3, 5), augment=augment))
    again = split.batches(8, generator=epoch_generator(3, 5), augment=augment)
    for start in range(8):
        assert same(again[start:], whole[start:])
    assert same([again[-1], again[2]], [whole[-1], whole[2]])
    with pytest.raises(IndexError):
        _ = again[7]


def test_augmented_batches_are_crops_and_flips_of_the_samples(split):
    plain = split.batches(50, generator=epoch_generator(0, 1))[0]
    moved = split.batches(50, generator=epoch_generator(0, 1), augment=Augmentation(padding=1))[0]
    assert torch.equal(plain[1], moved[1])  # the order is not touched
    black = (-split.mean / split.std).float().view(1, 3, 1, 1)
    framed = black.expand(50, 3, 8, 8).clone()
    framed[:, :, 1:-1, 1:-1] = plain[0]
    framed = torch.cat([framed, framed.flip(3)])
    for k, image in enumerate(moved[0]):
        cuts = [
            framed[k + side, :, a : a + 6, b : b + 6]
            for side in (0, 50)
            for a in range(3)
            for b in range(3)
        ]
        assert sum(torch.equal(image, cut) for cut in cuts) == 1


def test_augmentation_changes_from_epoch_to_epoch(split):
    settings = {"augment": Augmentation(padding=2)}
    one, two = (
        split.batches(50, generator=epoch_generator(0, epoch), **settings)[0] for epoch in (0, 1)
    )
    assert not torch.equal(one[0][one[1].argsort()], two[0][two[1].argsort()])


def test_take_returns_the_first_or_random_samples(split):
    assert split.take(5).targets.tolist() == [0, 1, 2, 3, 4]
    drawn = split.take(20, generator=torch.Generator().manual_seed(0))
    assert len(set(drawn.targets.tolist())) == 20
    assert drawn.targets.tolist() != list(range(20))
    assert torch.equal(drawn.inputs, split.inputs[drawn.targets])
    with pytest.raises(ValueError, match="count must be between 1 and 50, got 51"):
        split.take(51)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer, got 2.0"),
        ({"augment": Augmentation()}, ValueError, "augment needs a generator"),
        ({"augment": True}, TypeError, "augment must be an Augmentation or None, got True"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator or None, got 3"),
        ({"dtype": torch.int64}, TypeError, "dtype must be of a real floating-point dtype"),
    ],
)
def test_wrong_settings_name_the_argument(split, settings, error, message):
    with pytest.raises(error, match=message):
        split.batches(**{"batch_size": 8} | settings)


def test_a_part_without_samples_is_refused(split):
    empty = Split(
        inputs=split.inputs[:0], targets=split.targets[:0], mean=split.mean, std=split.std
    )
    with pytest.raises(ValueError, match="the split must have samples, got none"):
        empty.batches(8)


def test_batches_and_tensors_can_be_passed_to_a_risk(split):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 50))
    loss = torch.nn.functional.cross_entropy
    whole = Risk(model, loss, split.tensors())
    assert Risk(model, loss, split.batches(16)).loss() == pytest.approx(whole.loss(), rel=1e-6)


def test_the_global_generator_is_not_changed(split):
    before = torch.get_rng_state()
    list(split.batches(8, generator=epoch_generator(0, 0), augment=Augmentation()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
def test_a_generator_on_the_cpu_gives_the_same_epoch_on_cuda(split):
    settings = {"augment": Augmentation(padding=2)}
    here = split.batches(16, generator=epoch_generator(0, 0), **settings)
    there = split.to("cuda").batches(16, generator=epoch_generator(0, 0), **settings)
    for (x, y), (u, v) in zip(here, there, strict=True):
        assert u.device.type == v.device.type == "cuda"
        assert torch.equal(y, v.cpu())
        torch.testing.assert_close(x, u.cpu())


def test_data_move_to_another_device(split):
    moved = split.to("meta")
    x, y = moved.batches(16, generator=epoch_generator(0, 0), augment=Augmentation())[0]
    assert moved.device == x.device == y.device == torch.device("meta")
    assert x.shape == (16, 3, 6, 6)
