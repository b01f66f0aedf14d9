"""Data in any form as a list of batches that is the same in every pass."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, RandomSampler

from ritz._core.batches import Batch, as_one_batch, as_plain, num_rows, split_rows, tensors
from ritz._core.checks import check_count
from ritz._core.distributed import Group, rank, world_size
from ritz._core.modes import differentiable

FREEZE = "pass freeze=True to hold the batches of one pass, or turn it off in the loader"


@final
class Batches:
    """A list of batches that is the same in every pass. Each process iterates over its share.

    Args:
        data: A loader or another iterable of batches that can be iterated more than once, or all
            samples at once as a tuple or dictionary of tensors.
        batch_size: Samples per batch if all samples come at once. Defaults to 512.
        freeze: Hold the batches of the first pass in memory, however many there are. Accepts
            loaders that shuffle or augment.
        memory: Bytes of batches held in memory; others are loaded again in every pass.
        count: Number of samples in a batch. Defaults to the length of its first tensor.
        device: Device of the batches.
        dtype: Dtype of floating-point tensors. Defaults to the dtype they come in.
        group: Processes that share the data.
        shared: Split the batches: process ``k`` of ``n`` takes those whose number is ``k`` modulo
            ``n``. Otherwise each process was given its own part of the data.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None,
        freeze: bool,
        memory: int,
        count: Callable[[Batch], int] | None,
        device: torch.device,
        dtype: torch.dtype | None,
        group: Group | None,
        shared: bool,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._rank, self._world = (rank(group), world_size(group)) if shared else (0, 1)
        whole = as_one_batch(data)
        self.defaulted = whole is not None and batch_size is None
        if whole is None and batch_size is not None:
            raise ValueError(
                f"batch_size must not be given for data that come in batches, got {batch_size}"
            )
        if whole is not None:
            batch_size = 512 if batch_size is None else batch_size
            check_count("batch_size", batch_size)
            data = split_rows(whole, batch_size)
        if not isinstance(data, Iterable):
            raise TypeError(
                f"data must be a loader, a list of batches, or tensors, got {type(data).__name__}"
            )
        streams = not isinstance(data, Sequence)
        self._source, self._compared = data, streams and not freeze
        if self._compared and isinstance(data, Iterator):
            raise TypeError(
                "data must be iterable more than once, got an iterator: pass a list, a "
                "DataLoader, or freeze=True"
            )
        if self._compared and isinstance(getattr(data, "sampler", None), RandomSampler):
            raise ValueError(
                f"data must come in a fixed order, got a loader that shuffles; {FREEZE}"
            )
        self._read(count, room=float("inf") if freeze or not streams else memory)

    def _read(self, count: Callable[[Batch], int] | None, room: float) -> None:
        """Go through the data once: sizes, checksums, and batches in memory while they fit."""
        self.sizes, self._checksums = list[int](), list[int]()
        batches: list[Batch] | None = []
        # A user-defined iterable may write every batch into the same memory.
        reused = not isinstance(self._source, Sequence | DataLoader)
        with _generators_restored(self._source):
            for index, batch in enumerate(map(as_plain, self._source)):
                self.sizes.append(_size(batch, index, count))
                if index % self._world != self._rank:
                    continue
                if self._compared:
                    self._checksums.append(_checksum(batch))
                room -= sum(tensor.nbytes for tensor in tensors(batch))
                if batches is None or room < 0:
                    batches = None
                else:
                    batches.append(
                        self._move(tree_map_only(Tensor, Tensor.clone, batch) if reused else batch)
                    )
            if not self.sizes:
                raise ValueError("data must hold at least one batch, got none")
            self._in_memory = batches
            if self._compared and self._checksums:
                self._compare_first()

    @classmethod
    def fixed(cls, batches: Sequence[Batch], sizes: Sequence[int]) -> "Batches":
        """Return batches that are on their device already, all for this process."""
        self = cls.__new__(cls)
        self._in_memory, self.sizes, self._rank, self._world = list(batches), list(sizes), 0, 1
        self.defaulted = False
        return self

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def held(self) -> bool:
        """Whether the batches are in memory."""
        return self._in_memory is not None

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield this process's batches with their numbers, always in the same order."""
        numbers = range(self._rank, len(self.sizes), self._world)
        if self._in_memory is not None:
            yield from zip(numbers, self._in_memory, strict=True)
            return
        done = 0
        with _generators_restored(self._source):
            iterator = iter(self._source)
        for index, batch in enumerate(map(as_plain, iterator)):
            if index % self._world != self._rank:
                continue
            if done >= len(numbers) or _checksum(batch) != self._checksums[done]:
                raise ValueError(
                    f"data must be the same in every pass: batch {index} has changed; " + FREEZE
                )
            done += 1
            yield index, self._move(batch)
        if done != len(numbers):
            raise ValueError(
                f"data must be the same in every pass: {len(numbers)} batches, then {done}"
            )

    def _move(self, batch: Batch) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            dtype = self._dtype if tensor.is_floating_point() else None
            return differentiable(tensor.detach().to(device=self._device, dtype=dtype))

        return tree_map_only(Tensor, move, batch)

    def _compare_first(self) -> None:
        again = next(islice(map(as_plain, self._source), self._rank, None))
        if _checksum(again) != self._checksums[0]:
            raise ValueError(
                f"data must be the same in every pass: batch {self._rank} came differently the "
                f"second time, as shuffling or random augmentation would; {FREEZE}"
            )


def _size(batch: Batch, index: int, count: Callable[[Batch], int] | None) -> int:
    size = num_rows(batch, f"batch {index}") if count is None else count(batch)
    check_count(f"number of samples in batch {index}", size)
    return size


@contextmanager
def _generators_restored(source: Any) -> Iterator[None]:
    """Restore the generators that a loader draws from: measuring must not change training."""
    loader = source if isinstance(source, DataLoader) else None
    drawn = [
        getattr(each, "generator", None) for each in (loader, getattr(loader, "sampler", None))
    ]
    generators = [torch.default_generator, *(g for g in drawn if isinstance(g, torch.Generator))]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _checksum(batch: Batch) -> int:
    checksum = 0
    for tensor in tensors(batch):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy().data, checksum)
    return checksum
