"""One epoch of batches, all that is random about it drawn beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final, overload

import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz.data.augmentation import Augmentation, crop_and_flip, draw

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
