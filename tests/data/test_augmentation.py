import pytest
import torch

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
