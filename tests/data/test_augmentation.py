import pytest
import torch

from ritz import data
from ritz.data import Augmentation
from ritz.data._images import crop_and_flip, draw


def by_loop(images, corners, flips, padding):
    """Crops and flips one image after the other, by slices."""
    n, c, h, w = images.shape
    found = torch.empty_like(images)
    for k in range(n):
        framed = torch.zeros(c, h + 2 * padding, w + 2 * padding, dtype=images.dtype)
        framed[:, padding : padding + h, padding : padding + w] = images[k]
        top, left = corners[k].tolist()
        cut = framed[:, top : top + h, left : left + w]
        found[k] = cut.flip(2) if flips[k] else cut
    return found


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 5, 7)])
@pytest.mark.parametrize("flip", [False, True])
def test_crops_of_a_batch_equal_crops_of_single_images(rng, padding, shape, flip):
    images = torch.randint(0, 256, (40, *shape), generator=rng, dtype=torch.uint8)
    corners, flips = draw(Augmentation(padding=padding, flip=flip), 40, generator=rng)
    found = crop_and_flip(images, corners, flips, padding=padding)
    assert found.dtype == torch.uint8
    assert torch.equal(found, by_loop(images, corners, flips, padding))


def test_corners_are_uniform_and_half_of_the_images_are_flipped(rng):
    count = 20_000
    corners, flips = draw(Augmentation(padding=2), count, generator=rng)
    cells = torch.bincount(corners[:, 0] * 5 + corners[:, 1], minlength=25) / count
    share = 1 / 25
    # Four standard errors of a share of 25 equal ones, and of a half.
    assert (cells - share).abs().max() < 4 * (share * (1 - share) / count) ** 0.5
    assert abs(flips.double().mean() - 0.5) < 4 * (0.25 / count) ** 0.5


def test_flip_false_flips_no_image(rng):
    assert not draw(Augmentation(flip=False), 50, generator=rng)[1].any()


def test_wrong_settings_name_the_argument():
    with pytest.raises(ValueError, match="padding must be at least 0, got -1"):
        Augmentation(padding=-1)
    with pytest.raises(TypeError, match=r"padding must be an integer, got 1.5"):
        Augmentation(padding=1.5)
    with pytest.raises(TypeError, match=r"flip must be True or False, got 0.5"):
        Augmentation(flip=0.5)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 6, 9)])
@pytest.mark.parametrize("padding", [0, 2])
def test_smaller_crops_equal_crops_of_single_images(rng, shape, padding):
    images = torch.randint(0, 256, (60, *shape), generator=rng, dtype=torch.uint8)
    augmentation = Augmentation(padding=padding, crop=5)
    corners, flips = draw(augmentation, 60, generator=rng, sides=shape[1:])

    found = crop_and_flip(images, corners, flips, padding=padding, crop=5)

    framed = torch.nn.functional.pad(images, (padding,) * 4)
    for image, (top, left), flipped, crop in zip(framed, corners, flips, found, strict=True):
        cut = image[:, top : top + 5, left : left + 5]
        assert torch.equal(crop, cut.flip(2) if flipped else cut)
    # Every place is reached, and none beyond the border.
    ends = [side + 2 * padding - 5 for side in shape[1:]]
    assert corners.amin(0).tolist() == [0, 0]
    assert corners.amax(0).tolist() == ends


def test_batches_of_smaller_crops_have_their_size_and_evaluation_has_whole_images():
    images = data.load("digits").train
    settings = {"generator": torch.Generator().manual_seed(0)}
    inputs, _ = images.batches(16, augment=Augmentation(padding=0, crop=6), **settings)[0]
    assert inputs.shape == (16, 1, 6, 6)
    assert images.batches(16)[0][0].shape == (16, 1, 8, 8)


def test_a_crop_larger_than_the_image_is_refused():
    images = data.load("digits").train
    with pytest.raises(ValueError, match=r"crop must be at most .* got 9 for images of 8 x 8"):
        images.batches(4, generator=torch.Generator(), augment=Augmentation(padding=0, crop=9))
    with pytest.raises(ValueError, match="crop must be at least 1"):
        Augmentation(crop=0)
