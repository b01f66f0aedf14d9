"""Labelled images held as bytes on a device, and what is known about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_count, check_real_floating
from ritz.data.augmentation import Augmentation
from ritz.data.batching import Batches, epoch_plan
from ritz.data.sources import DataError
from ritz.data.splitting import SPLIT_SEED, held_out

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
        same generator or with that of :func:`ritz.data.epoch_generator`.

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
