"""Labelled images stored as bytes on a device: augmentation, batches, splits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ritz._core.checks import check_count, check_real_floating
from ritz.data._files import DataError

# ------------------------------------------------------------------------------------------
# Random crops and flips of a whole batch at once, on the device that holds it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Random crops and flips of training images.

    Attributes:
        padding: Width of the black border around an image, from which a crop is taken.
        crop: Side of the crops. Defaults to the sides of the image. Evaluation has whole images,
            so the network must accept both sizes.
        flip: Whether each image is mirrored left to right with probability 1/2.
    """

    padding: int = 4
    flip: bool = True
    crop: int | None = None

    def __post_init__(self) -> None:
        check_count("padding", self.padding, low=0)
        if self.crop is not None:
            check_count("crop", self.crop)
        if not isinstance(self.flip, bool):
            raise TypeError(f"flip must be True or False, got {self.flip!r}")


def draw(
    augmentation: Augmentation,
    count: int,
    *,
    generator: torch.Generator,
    sides: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """Return corners ``(count, 2)`` of crops and flips ``(count,)``, on the generator's device.

    ``sides`` are those of the images, which crops of another size need.
    """
    where = generator.device
    ends = [side + 2 * augmentation.padding - (augmentation.crop or side) + 1 for side in sides]
    if min(ends) < 1:
        raise ValueError(
            f"crop must be at most the side of the images with their border, got "
            f"{augmentation.crop} for images of {sides[0]} x {sides[1]}"
        )
    if ends[0] == ends[1]:  # one draw for both, as always for square images
        corners = torch.randint(ends[0], (count, 2), generator=generator, device=where)
    else:
        rows = [torch.randint(end, (count,), generator=generator, device=where) for end in ends]
        corners = torch.stack(rows, 1)
    flips = torch.randint(2, (count,), generator=generator, device=where)
    return corners, flips.bool() & augmentation.flip


def crop_and_flip(
    images: Tensor, corners: Tensor, flips: Tensor, *, padding: int, crop: int | None = None
) -> Tensor:
    r"""Return crops of padded images, some of them mirrored, with one gather for the whole batch.

    .. math::
        y_{nkij} = \bar x_{nk,\, a_n + i,\, b_n + j'}, \qquad
        j' = w - 1 - j \text{ where flipped, else } j

    Args:
        images: :math:`x`, ``(n, c, h, w)``; :math:`\bar x` is :math:`x` with a black border.
        corners: :math:`(a_n, b_n)` in :math:`[0, 2p]`, with ``crop`` up to :math:`2p + h - s` and
            :math:`2p + w - s`, ``(n, 2)``.
        flips: Which images to mirror, ``(n,)``.
        padding: :math:`p`.
        crop: Side :math:`s` of the crops, in place of ``h`` and ``w``.
    """
    n, c, h, w = images.shape
    padded = pad(images, (padding,) * 4).flatten(2)
    stride = w + 2 * padding
    h, w = (h, w) if crop is None else (crop, crop)
    rows = corners[:, :1] + torch.arange(h, device=images.device)
    columns = torch.arange(w, device=images.device).expand(n, w)
    columns = corners[:, 1:] + torch.where(flips[:, None], w - 1 - columns, columns)
    # Pixel (a, b) of a padded image is number a (w + 2p) + b of its channel.
    pixels = rows[:, :, None] * stride + columns[:, None, :]
    return padded.gather(2, pixels.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)


# ------------------------------------------------------------------------------------------
# One epoch of batches, with all random numbers drawn beforehand.

Samples = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Epoch(Sequence[Samples]):
    """A sequence of pairs ``(inputs, targets)``, created on access; a slice is an epoch too.

    Attributes:
        bounds: Start and end of each pair in the order of the epoch.
        pair: Returns the inputs and targets at some positions of the epoch.
        consecutive: Whether a recurrent state is passed on from pair to pair.
    """

    bounds: tuple[tuple[int, int], ...]
    pair: Callable[[slice], Samples]
    consecutive: bool = False

    def __len__(self) -> int:
        return len(self.bounds)

    def __repr__(self) -> str:
        return f"Epoch({len(self):,} batches)"

    @overload
    def __getitem__(self, index: int) -> Samples: ...
    @overload
    def __getitem__(self, index: slice) -> "Epoch": ...
    def __getitem__(self, index: int | slice) -> "Samples | Epoch":
        if isinstance(index, slice):
            return replace(self, bounds=self.bounds[index])
        return self.pair(slice(*self.bounds[index]))


# ------------------------------------------------------------------------------------------
# Held-out parts of a data set, which never change.

SPLIT_SEED = 0  # seed of every held-out part, recorded in the result


def hold_out(samples: Samples, count: int) -> tuple[Samples, Samples]:
    """Return the samples that remain and the ``count`` that are held out, each in their order.

    The choice depends on the two numbers only, not on devices or versions, since the stream of
    ``numpy.random.RandomState`` is frozen. For CIFAR, 5,000 of 50,000 are held out.
    """
    order = np.random.RandomState(SPLIT_SEED).permutation(len(samples[1]))
    remain, out = (torch.from_numpy(np.sort(part)) for part in (order[count:], order[:count]))
    return (samples[0][remain], samples[1][remain]), (samples[0][out], samples[1][out])


# ------------------------------------------------------------------------------------------
# Labelled images, stored as bytes on a device.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    r"""Images and classes as they are in the files. Batches are normalised when they are made.

    .. math:: z_{nkij} = (x_{nkij} / 255 - \mu_k) / \sigma_k

    Attributes:
        inputs: :math:`x`, bytes of shape ``(n, c, h, w)``.
        targets: Classes of shape ``(n,)``, int64.
        mean: :math:`\mu` of shape ``(c,)``, float64 on the CPU.
        std: :math:`\sigma` of shape ``(c,)``, float64 on the CPU.
    """

    inputs: Tensor
    targets: Tensor
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        sides = " x ".join(map(str, self.inputs.shape[1:]))
        return f"Split({len(self):,} images of {sides}, {self.device})"

    @property
    def device(self) -> torch.device:
        """Device that stores the images."""
        return self.inputs.device

    def to(self, device: torch.device | str) -> "Split":
        """Return the split on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def take(self, count: int, *, generator: torch.Generator | None = None) -> "Split":
        """Return the first ``count`` samples, or ``count`` samples drawn without replacement."""
        count = check_count("count", count, high=len(self))
        chosen: Tensor | slice = slice(count)
        if generator is not None:
            order = torch.randperm(len(self), generator=generator, device=generator.device)
            chosen = order[:count].to(self.device)
        return replace(self, inputs=self.inputs[chosen], targets=self.targets[chosen])

    def tensors(self, *, dtype: torch.dtype = torch.float32) -> Samples:
        """Return all images, normalised, and their classes, as data for ``ritz.Risk``."""
        scale, shift = self._affine(dtype)
        return self.inputs * scale + shift, self.targets

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        augment: Augmentation | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Epoch:
        """Return one epoch as a sequence of batches ``(inputs, targets)``, created on access.

        All random numbers are drawn here, so that batch ``k`` is always the same and ``epoch[k:]``
        is the rest of an interrupted epoch. Call again for the next epoch. Random numbers are drawn
        on the device of the generator, so that a CPU generator gives the same epoch on any device.

        Args:
            batch_size: Number of samples per batch; the last batch may have fewer.
            generator: Source of the order and the augmentation. ``None``: no shuffling, which
                ``ritz.Risk`` needs.
            augment: Random crops and flips; needs a generator.
            dtype: Data type of the inputs.
        """
        count = len(self)
        batch_size = check_count("batch_size", batch_size)
        if not count:
            raise ValueError("the split must have samples, got none")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
        if augment is not None and not isinstance(augment, Augmentation):
            raise TypeError(f"augment must be an Augmentation or None, got {augment!r}")
        if augment is not None and generator is None:
            raise ValueError("augment needs a generator to draw crops and flips from, got None")
        starts = range(0, count, batch_size)
        bounds = tuple((start, min(start + batch_size, count)) for start in starts)
        order = crops = None
        if generator is not None:
            # Drawn on the device of the generator and then moved, like all randomness of ritz.
            order = torch.randperm(count, generator=generator, device=generator.device)
            order = order.to(self.device)
            if augment is not None:
                sides = (self.inputs.shape[2], self.inputs.shape[3])
                corners, flips = draw(augment, count, generator=generator, sides=sides)
                crops = corners.to(self.device), flips.to(self.device)
        scale, shift = self._affine(dtype)

        def pair(positions: slice) -> Samples:
            chosen = positions if order is None else order[positions]
            images = self.inputs[chosen]
            if augment is not None and crops is not None:
                corners, flips = (tensor[positions] for tensor in crops)
                border, crop = augment.padding, augment.crop
                images = crop_and_flip(images, corners, flips, padding=border, crop=crop)
            return images * scale + shift, self.targets[chosen]

        return Epoch(bounds=bounds, pair=pair)

    def _affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        check_real_floating("dtype", dtype)
        # (x / 255 - mu) / sigma = x / (255 sigma) - mu / sigma. A constant channel has sigma 0
        # and is only centred.
        std = torch.where(self.std > 0, self.std, torch.ones_like(self.std))
        factors = (1 / (255 * std), -self.mean / std)
        scale, shift = (f.view(-1, 1, 1).to(dtype).to(self.device) for f in factors)
        return scale, shift


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageData:
    """A set of labelled images.

    Attributes:
        name: Name of the data set.
        train: Training images.
        test: Test images.
        validation: Images held out of the training images, or ``None``.
        classes: Names of the classes.
        augmentation: The standard augmentation in training (CIFAR: crops with a border of 4 pixels,
            and flips), or ``None``.
        split_seed: Seed of the held-out parts, or ``None`` if the parts are those of the files.
    """

    name: str
    train: Split
    test: Split
    validation: Split | None
    classes: tuple[str, ...]
    augmentation: Augmentation | None
    split_seed: int | None

    def __repr__(self) -> str:
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = [f"{name} {len(split):,}" for name, split in splits.items() if split is not None]
        sides = " x ".join(map(str, self.shape))
        return (
            f"ImageData({self.name}, {self.num_classes} classes, images of {sides}, "
            f"{', '.join(sizes)}, {self.train.device})"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        c, h, w = self.train.inputs.shape[1:]
        return c, h, w

    def to(self, device: torch.device | str) -> "ImageData":
        """Return the data on another device."""
        validation = None if self.validation is None else self.validation.to(device)
        train, test = self.train.to(device), self.test.to(device)
        return replace(self, train=train, test=test, validation=validation)


def channel_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of bytes ``(n, c, h, w)`` by channel, in [0, 1].

    Computed from counts of the 256 levels, so that the result does not depend on the order of the
    images.
    """
    counts = torch.zeros(inputs.shape[1], 256, dtype=torch.int64)
    for chunk in inputs.split(2**14):  # bincount converts to int64, eight bytes per pixel
        for channel, row in enumerate(counts):
            row += torch.bincount(chunk[:, channel].reshape(-1), minlength=256)
    levels = torch.linspace(0, 1, 256, dtype=torch.float64)
    # With p_l the share of pixels at level l: mu = sum_l p_l l, sigma^2 = sum_l p_l (l - mu)^2.
    shares = counts / counts.sum(1, keepdim=True).double()
    mean = shares @ levels
    variance = (shares * (levels - mean[:, None]) ** 2).sum(1)
    return mean, variance.sqrt()


def image_data(
    name: str, train: Samples, test: Samples, classes: Sequence[str],
    augmentation: Augmentation | None = None, *,
    held: Samples | None = None, validation: int = 0, seeded: bool = False,
) -> ImageData:  # fmt: skip
    """Return the parts of a data set, normalised by the mean of all training images.

    Args:
        name: Name of the data set.
        train: Training images and classes.
        test: Test images and classes.
        classes: Names of the classes.
        augmentation: The usual augmentation.
        held: Validation images and classes, if the files have them.
        validation: Number of training images to hold out.
        seeded: Whether the test images were held out too.
    """
    mean, std = channel_statistics(train[0])
    validation = check_count("validation", validation, low=0, high=len(train[1]) - 1)
    if validation and held is not None:
        raise ValueError(
            f"validation must be 0 for {name!r}, whose files have a validation part, "
            f"got {validation}"
        )
    if validation:
        train, held = hold_out(train, validation)

    def split(samples: Samples) -> Split:
        return Split(inputs=samples[0], targets=samples[1], mean=mean, std=std)

    return ImageData(
        name=name,
        train=split(train),
        test=split(test),
        validation=None if held is None else split(held),
        classes=tuple(classes),
        augmentation=augmentation,
        split_seed=SPLIT_SEED if validation or seeded else None,
    )


def check_classes(path: Path, targets: Tensor, num_classes: int) -> Tensor:
    """Return targets as int64; raise unless there are some, all in ``[0, num_classes)``."""
    if not len(targets):
        raise DataError(f"{path} has no samples")
    wrong = (targets < 0) | (targets >= num_classes)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"{path} has the label {int(targets[first])} at place {first}, which is not between "
            f"0 and {num_classes - 1}"
        )
    return targets.to(torch.int64)
