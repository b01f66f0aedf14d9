"""Labelled images held as bytes on a device: augmentation, batches, splits."""

from collections.abc import Sequence
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
    """What is done at random to an image before it is trained on.

    Attributes:
        padding: Black pixels put around an image, from which one of the old size is cut.
        flip: Whether half of the images are mirrored left to right.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_count("padding", self.padding, low=0)
        if not isinstance(self.flip, bool):
            raise TypeError(f"flip must be True or False, got {self.flip!r}")


def draw(
    augmentation: Augmentation, count: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return corners ``(count, 2)`` of crops and flips ``(count,)``, on the generator's device."""
    where = {"generator": generator, "device": generator.device}
    corners = torch.randint(0, 2 * augmentation.padding + 1, (count, 2), **where)  # type: ignore[call-overload]
    flips = torch.randint(0, 2, (count,), **where).bool()  # type: ignore[call-overload]
    return corners, flips & augmentation.flip


def crop_and_flip(images: Tensor, corners: Tensor, flips: Tensor, *, padding: int) -> Tensor:
    r"""Return images cut at ``corners`` from padded ones, some mirrored; one gather for all.

    .. math::
        y_{nkij} = \bar x_{nk,\, a_n + i,\, b_n + j'}, \qquad
        j' = w - 1 - j \text{ where flipped, else } j

    Args:
        images: :math:`x`, of shape ``(n, c, h, w)``; :math:`\bar x` has a black border.
        corners: :math:`(a_n, b_n)` in :math:`[0, 2p]`, of shape ``(n, 2)``.
        flips: Which to mirror, of shape ``(n,)``.
        padding: :math:`p`.
    """
    n, c, h, w = images.shape
    padded = pad(images, (padding,) * 4).flatten(2)
    rows = corners[:, :1] + torch.arange(h, device=images.device)
    columns = torch.arange(w, device=images.device).expand(n, w)
    columns = corners[:, 1:] + torch.where(flips[:, None], w - 1 - columns, columns)
    pixels = rows[:, :, None] * (w + 2 * padding) + columns[:, None, :]
    return padded.gather(2, pixels.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)


# ------------------------------------------------------------------------------------------
# One epoch of batches, all that is random about it drawn beforehand.

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Which samples each batch of an epoch has, and what is done to them.

    Attributes:
        bounds: First and one past the last place in the epoch of each batch.
        order: Sample in each place, of shape ``(n,)``; ``None``: that of the files.
        corners: Of the crop in each place, of shape ``(n, 2)``; ``None``: no augmentation.
        flips: Whether the image in each place is mirrored, of shape ``(n,)``.
        padding: Of the images before they are cut.
    """

    bounds: tuple[tuple[int, int], ...]
    order: Tensor | None
    corners: Tensor | None
    flips: Tensor | None
    padding: int


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batches(Sequence[Batch]):
    """A sequence of batches ``(inputs, targets)``, each made on the device when it is asked for.

    Attributes:
        inputs: Bytes ``(n, c, h, w)`` of all samples.
        targets: Classes ``(n,)`` of all samples.
        plan: What each batch is made of.
        scale: Factor of every channel, of shape ``(c, 1, 1)``.
        shift: Added to every channel, of shape ``(c, 1, 1)``.
    """

    inputs: Tensor
    targets: Tensor
    plan: Plan
    scale: Tensor
    shift: Tensor

    def __len__(self) -> int:
        return len(self.plan.bounds)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> "Batches": ...
    def __getitem__(self, index: int | slice) -> "Batch | Batches":
        if isinstance(index, slice):
            return replace(self, plan=replace(self.plan, bounds=self.plan.bounds[index]))
        return self._made(*self.plan.bounds[index])

    def _made(self, start: int, stop: int) -> Batch:
        plan = self.plan
        places = slice(start, stop)
        chosen = places if plan.order is None else plan.order[places]
        images, targets = self.inputs[chosen], self.targets[chosen]
        if plan.corners is not None and plan.flips is not None:
            corners, flips = plan.corners[places], plan.flips[places]
            images = crop_and_flip(images, corners, flips, padding=plan.padding)
        return images * self.scale + self.shift, targets


def epoch_plan(
    count: int,
    batch_size: int,
    *,
    generator: torch.Generator | None,
    augment: Augmentation | None,
    drop_last: bool,
    device: torch.device,
) -> Plan:
    """Return the plan of one epoch over ``count`` samples; see :meth:`ritz.data.Split.batches`.

    All is drawn on the generator's device and then moved, so that a generator on the CPU gives
    the same epoch on every device.
    """
    _check(count, batch_size, generator=generator, augment=augment)
    stops = range(batch_size, count + (1 if drop_last else batch_size), batch_size)
    bounds = tuple((stop - batch_size, min(stop, count)) for stop in stops)
    if not bounds:
        raise ValueError(f"batch_size must be at most {count} with drop_last, got {batch_size}")
    order = corners = flips = None
    if generator is not None:
        order = torch.randperm(count, generator=generator, device=generator.device).to(device)
        if augment is not None:
            drawn = draw(augment, count, generator=generator)
            corners, flips = (tensor.to(device) for tensor in drawn)
    padding = 0 if augment is None else augment.padding
    return Plan(bounds=bounds, order=order, corners=corners, flips=flips, padding=padding)


def _check(
    count: int,
    batch_size: int,
    *,
    generator: torch.Generator | None,
    augment: Augmentation | None,
) -> None:
    check_count("batch_size", batch_size)
    if not count:
        raise ValueError("the split must hold samples to be cut into batches, got none")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
    if augment is None:
        return
    if not isinstance(augment, Augmentation):
        raise TypeError(f"augment must be an Augmentation or None, got {augment!r}")
    if generator is None:
        raise ValueError("augment needs a generator to draw crops and flips from, got None")


# ------------------------------------------------------------------------------------------
# Parts of a data set that never change, and epochs that can be gone back to.

SPLIT_SEED = 0  # of every part that is held out; recorded in the result


def held_out(total: int, count: int, *, seed: int = SPLIT_SEED) -> tuple[Tensor, Tensor]:
    """Return the indices that stay and the ``count`` that are held out, both ascending.

    The choice depends on the three numbers alone: on no device, and on no version, as the stream
    of ``numpy.random.RandomState`` is frozen. Of the 50,000 images of CIFAR, ``count=5000`` gives
    the 45,000 and 5,000 that are meant by train and validation here.
    """
    check_count("total", total)
    check_count("count", count, low=0, high=total - 1)
    order = np.random.RandomState(seed).permutation(total)
    return torch.from_numpy(np.sort(order[count:])), torch.from_numpy(np.sort(order[:count]))


# ------------------------------------------------------------------------------------------
# Labelled images held as bytes on a device, and what is known about them.

LEVELS = 256
Samples = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    r"""Images and classes, held as they are on file; batches are normalised as they are made.

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

    @property
    def device(self) -> torch.device:
        """Where the images are held."""
        return self.inputs.device

    def to(self, device: torch.device | str) -> "Split":
        """Return the split held on a device."""
        return self._with(self.inputs.to(device), self.targets.to(device))

    def take(self, count: int, *, generator: torch.Generator | None = None) -> "Split":
        """Return the first ``count`` samples, or as many drawn without replacement."""
        check_count("count", count, high=len(self))
        if generator is None:
            return self._with(self.inputs[:count], self.targets[:count])
        order = torch.randperm(len(self), generator=generator, device=generator.device)
        chosen = order[:count].to(self.device)
        return self._with(self.inputs[chosen], self.targets[chosen])

    def tensors(self, *, dtype: torch.dtype = torch.float32) -> Samples:
        """Return all images, normalised, and their classes: what ``ritz.Risk`` takes."""
        return self.normalized(self.inputs, dtype=dtype), self.targets

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        augment: Augmentation | None = None,
        drop_last: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Batches:
        """Return one epoch as a sequence of batches ``(inputs, targets)``, made when asked for.

        All that is random is drawn here: batch ``k`` is the same whenever it is asked for, and
        ``epoch[k:]`` is the rest of an interrupted epoch. Call again for the next epoch, with the
        same generator or with that of ``epoch_generator``.

        Args:
            batch_size: Samples a batch; the last one may have fewer.
            generator: Draws the order and the augmentation; ``None``: the order of the files,
                always the same, as ``ritz.Risk`` needs it.
            augment: What is done to the images; needs a generator.
            drop_last: Whether a last batch of fewer samples is left out.
            dtype: Of the inputs.
        """
        plan = epoch_plan(
            len(self),
            batch_size,
            generator=generator,
            augment=augment,
            drop_last=drop_last,
            device=self.device,
        )
        scale, shift = self._affine(dtype)
        return Batches(
            inputs=self.inputs, targets=self.targets, plan=plan, scale=scale, shift=shift
        )

    def normalized(self, inputs: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return bytes ``(n, c, h, w)`` as numbers of about mean 0 and variance 1."""
        scale, shift = self._affine(dtype)
        return inputs * scale + shift

    def _affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        check_real_floating("dtype", dtype)
        # A channel that never varies is only centred.
        std = torch.where(self.std > 0, self.std, torch.ones_like(self.std))
        factors = (1 / ((LEVELS - 1) * std), -self.mean / std)
        scale, shift = (f.view(-1, 1, 1).to(dtype).to(self.device) for f in factors)
        return scale, shift

    def _with(self, inputs: Tensor, targets: Tensor) -> "Split":
        return Split(inputs=inputs, targets=targets, mean=self.mean, std=self.std)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageData:
    """A set of labelled images.

    Attributes:
        name: The name it is loaded by.
        train: What to train on.
        test: What to test on.
        validation: What was held out of the training images, or ``None``.
        classes: Name of each class.
        augmentation: What is customary in training, or ``None``.
        split_seed: Seed of the fixed choice of what was held out here; ``None`` where all parts
            are those of the files.
    """

    name: str
    train: Split
    test: Split
    validation: Split | None
    classes: tuple[str, ...]
    augmentation: Augmentation | None
    split_seed: int | None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        c, h, w = self.train.inputs.shape[1:]
        return c, h, w

    @property
    def mean(self) -> Tensor:
        """Mean of each channel over all training images, in [0, 1], of shape ``(c,)``."""
        return self.train.mean

    @property
    def std(self) -> Tensor:
        """Standard deviation of each channel over all training images, of shape ``(c,)``."""
        return self.train.std

    def to(self, device: torch.device | str) -> "ImageData":
        """Return the data held on a device."""
        return ImageData(
            name=self.name,
            train=self.train.to(device),
            test=self.test.to(device),
            validation=None if self.validation is None else self.validation.to(device),
            classes=self.classes,
            augmentation=self.augmentation,
            split_seed=self.split_seed,
        )


def channel_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of bytes ``(n, c, h, w)`` by channel, in [0, 1].

    From counts of the 256 levels, so that they are exact whatever the order of the images.
    """
    counts = torch.zeros(inputs.shape[1], LEVELS, dtype=torch.int64)
    for chunk in inputs.split(2**14):
        for channel, row in enumerate(counts):
            row += torch.bincount(chunk[:, channel].reshape(-1), minlength=LEVELS)
    levels = torch.linspace(0, 1, LEVELS, dtype=torch.float64)
    shares = counts / counts.sum(1, keepdim=True).double()
    mean = shares @ levels
    variance = (shares * (levels - mean[:, None]) ** 2).sum(1)
    return mean, variance.sqrt()


def image_data(
    name: str,
    *,
    train: Samples,
    test: Samples,
    held: Samples | None = None,
    classes: tuple[str, ...],
    validation: int = 0,
    augmentation: Augmentation | None = None,
    seeded: bool = False,
) -> ImageData:
    """Return the data of a set, ``validation`` training images held out by a fixed choice.

    Args:
        name: Of the set.
        train: Training images and classes.
        test: Test images and classes.
        held: Validation images and classes, where the files have them.
        classes: Names.
        validation: How many training images to hold out; the mean is that of all of them.
        augmentation: What is customary.
        seeded: Whether the test images, too, were held out by the fixed choice.
    """
    mean, std = channel_statistics(train[0])
    check_count("validation", validation, low=0, high=len(train[1]) - 1)
    if validation and held is not None:
        raise ValueError(
            f"validation must be 0 for {name!r}, whose files have a validation part, "
            f"got {validation}"
        )
    if validation:
        stay, out = held_out(len(train[1]), validation)
        held, train = (train[0][out], train[1][out]), (train[0][stay], train[1][stay])

    def split(samples: Samples) -> Split:
        return Split(inputs=samples[0], targets=samples[1], mean=mean, std=std)

    return ImageData(
        name=name,
        train=split(train),
        test=split(test),
        validation=None if held is None else split(held),
        classes=classes,
        augmentation=augmentation,
        split_seed=SPLIT_SEED if validation or seeded else None,
    )


def check_classes(path: Path, targets: Tensor, num_classes: int) -> None:
    """Raise unless there are classes, all in ``[0, num_classes)``, naming the first that is not."""
    if not len(targets):
        raise DataError(f"{path} holds no samples")
    wrong = (targets < 0) | (targets >= num_classes)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"{path} has the label {int(targets[first])} at place {first}, which is not between "
            f"0 and {num_classes - 1}"
        )
