"""Data in any form as a list of batches that is the same in every pass."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, RandomSampler

from ritz._core.batches import Batch, as_one_batch, as_plain, num_rows, split_rows, tensors
from ritz._core.checks import check_count, check_type
from ritz._core.modes import differentiable

FREEZE = (
    "pass freeze=True to keep the batches of the first pass, or disable shuffling and random "
    "augmentation in the loader"
)


@final
class Batches:
    """A list of batches that is the same in every pass. Each process iterates over its share.

    Args:
        data: A loader or another iterable of batches that can be iterated more than once, or all
            samples at once as a tuple or dictionary of tensors.
        batch_size: Samples per batch if all samples come at once. Defaults to 512.
        freeze: Keep the batches of the first pass in memory, however many there are. Accepts
            loaders that shuffle or augment.
        memory: Bytes of batches in memory. Data beyond that are loaded again in every pass.
        count: Takes a batch, returns its number of samples. Defaults to the length of its first
            tensor.
        device: Device of the batches.
        dtype: Dtype of floating-point tensors. Defaults to the dtype of the data.
        share: ``(k, n)``: this process takes the batches whose number is ``k`` modulo ``n``.

    Attributes:
        sizes: Number of samples in each batch of the data, by ``count``.
        rows: Number of rows of the tensors with one row per sample, in each batch.
        held: Whether the batches are in memory.
        defaulted: Whether ``batch_size`` is the default.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        freeze: bool = False,
        memory: int = 0,
        count: Callable[[Batch], int] | None = None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._device, self._dtype, (self._rank, self._world) = device, dtype, share
        self.count = count
        whole = as_one_batch(data)
        self.defaulted = whole is not None and batch_size is None
        if whole is not None:
            batch_size = 512 if batch_size is None else batch_size
            check_count("batch_size", batch_size)
            data = split_rows(whole, batch_size)
        elif batch_size is not None:
            raise ValueError(f"batch_size must not be passed for data in batches, got {batch_size}")
        check_type("data", data, Iterable, "a loader, a list of batches, or tensors")
        streams = not isinstance(data, Sequence)
        self._source, self._compared = data, streams and not freeze
        if self._compared and isinstance(data, Iterator):
            raise TypeError("data must be iterable twice, got an iterator: pass freeze=True")
        if self._compared and isinstance(getattr(data, "sampler", None), RandomSampler):
            raise ValueError(f"data must have a fixed order, got a loader that shuffles: {FREEZE}")
        self._read(room=memory if self._compared else float("inf"))

    def _read(self, room: float) -> None:
        """Read the data once: sizes, checksums, and batches in memory while they fit."""
        self.sizes, self.rows, self._checksums = list[int](), list[int](), list[int]()
        batches: list[Batch] | None = []
        # A user-defined iterable may write every batch into the same memory.
        reused = not isinstance(self._source, Sequence | DataLoader)
        with _generators_restored(self._source):
            for index, batch in enumerate(map(as_plain, self._source)):
                count = self.count or partial(num_rows, name=f"batch {index}")
                size = count(batch)
                check_count(f"number of samples in batch {index}", size)
                self.sizes.append(size)
                # If tokens are counted, samples are the rows of the first tensor.
                lengths = [len(tensor) for tensor in tensors(batch) if tensor.ndim]
                self.rows.append(size if size in lengths else (lengths or [size])[0])
                if index % self._world != self._rank:
                    continue
                if self._compared:
                    self._checksums.append(_checksum(batch))
                room -= sum(tensor.nbytes for tensor in tensors(batch))
                if batches is None or room < 0:
                    batches = None
                else:
                    copy = tree_map_only(Tensor, Tensor.clone, batch) if reused else batch
                    batches.append(self._move(copy))
            if not self.sizes:
                raise ValueError("data must contain at least one batch, got none")
            self._in_memory, self.held = batches, batches is not None
            if self._checksums:
                # One batch of a second pass shows shuffling, even if all batches are in memory.
                again = next(islice(map(as_plain, self._source), self._rank, None))
                self._compare(self._rank, again, self._checksums[0])

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield this process's batches with their numbers, always in the same order."""
        # Process k of n has the batches k, k + n, k + 2 n, ...
        numbers = range(self._rank, len(self.sizes), self._world)
        if self._in_memory is not None:
            yield from zip(numbers, self._in_memory, strict=True)
            return
        with _generators_restored(self._source):
            iterator = iter(self._source)
        done = 0
        for index, batch in enumerate(map(as_plain, iterator)):
            if index % self._world != self._rank:
                continue
            self._compare(index, batch, self._checksums[done] if done < len(numbers) else None)
            done += 1
            yield index, self._move(batch)
        if done != len(numbers):
            raise ValueError(
                f"data must be the same in every pass, got {len(numbers)} batches, then {done}"
            )

    def _move(self, batch: Batch) -> Batch:
        return move_batch(batch, self._device, self._dtype)

    def _compare(self, index: int, batch: Batch, checksum: int | None) -> None:
        if _checksum(batch) != checksum:
            raise ValueError(
                f"data must be the same in every pass, but batch {index} has changed: {FREEZE}"
            )


@contextmanager
def _generators_restored(source: Any) -> Iterator[None]:
    """Restore the generators that a loader draws from: measuring must not change training."""
    drawn = [
        getattr(each, "generator", None) for each in (source, getattr(source, "sampler", None))
    ]
    generators = [torch.default_generator, *(g for g in drawn if isinstance(g, torch.Generator))]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _checksum(batch: Batch) -> int:
    # crc32 of all bytes. It misses a change with probability 2^-32, and reads 1 GB in 1.4 s.
    checksum = 0
    for tensor in tensors(batch):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy().data, checksum)
    return checksum


def move_batch(batch: Batch, device: torch.device | None, dtype: torch.dtype | None) -> Batch:
    """Return a batch on a device, its floating-point tensors in a dtype if there is one."""

    def move(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else None
        return differentiable(tensor.detach().to(device=device, dtype=kind))

    return tree_map_only(Tensor, move, batch)
