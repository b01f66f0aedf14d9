"""`Batches`: data in any form as a list that is the same in every pass; random subsets."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ritz._core.batches import (
    Batch,
    as_one_batch,
    as_plain,
    is_rows,
    join_rows,
    known_length,
    num_rows,
    split_labels,
    split_rows,
    take_rows,
    tensors,
)
from ritz._core.checks import check_callable, check_count, check_type
from ritz._core.modes import differentiable
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator


@dataclass(frozen=True, slots=True)
class Tuning:
    """How much of the data is kept in memory."""

    # Bytes of batches in memory. Batches beyond that are loaded again in every pass.
    memory: int = 4 * 2**30


TUNING = Tuning()

FREEZE = (
    "pass freeze=True to keep the batches of the first pass, max_samples= to draw a subset, or "
    "disable shuffling and random augmentation in the loader"
)


@final
class Batches:
    """A list of batches that is the same in every pass. Each process iterates over its share.

    Args:
        data: A loader or another iterable of batches that can be iterated more than once; or all
            samples as a tuple or dictionary of tensors or arrays, or as a dataset.
        batch_size: Samples per batch if ``data`` holds all samples. Defaults to 512.
        freeze: Keep the batches of the first pass in memory, however many there are. Accepts
            loaders that shuffle or augment.
        count: Takes a batch, returns its number of samples. Defaults to the length of its first
            tensor.
        mass: Takes a batch, returns its weight in the mean over batches, or ``None`` for its number
            of samples, the default.
        device: Device of the batches.
        dtype: Dtype of floating-point tensors. Defaults to the dtype of the data.
        share: ``(k, n)``: this process takes the batches whose index is ``k`` modulo ``n``.
        max_samples: Keep a random subset of this many rows in memory. Accepts loaders that shuffle.
        seed: Seed of the subset.
        progress: Show a bar while a loader is read.

    Attributes:
        sizes: Number of samples in each batch of the data, by ``count``.
        masses: Weight of each batch in the mean over batches, by ``mass``.
        rows: Number of rows of the tensors with one row per sample, in each batch.
        held: Whether the batches are in memory.
        first: Index and content of the first batch of this process. ``None`` if it has no batch.
        defaulted: Whether ``batch_size`` is the default.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        freeze: bool = False,
        count: Callable[[Batch], int] | None = None,
        mass: Callable[[Batch], float | None] | None = None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        share: tuple[int, int] = (0, 1),
        max_samples: int | None = None,
        seed: int = 0,
        progress: bool | Progress = False,
    ) -> None:
        self._device, self._dtype, (self._rank, self._world) = device, dtype, share
        check_callable("count", count)
        self._count, self._mass = count, mass
        whole = as_one_batch(data)
        indexed = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
        self.defaulted = (whole is not None or indexed) and batch_size is None
        if whole is None and indexed:
            # Samples by index: a loader that does not shuffle makes the batches.
            size = check_count("batch_size", 512 if batch_size is None else batch_size)
            data, batch_size = DataLoader(data, batch_size=size), None
        if whole is None and batch_size is not None:
            raise ValueError(f"batch_size must not be passed for data in batches, got {batch_size}")
        if whole is not None:
            batch_size = 512 if batch_size is None else batch_size
            batch_size = check_count("batch_size", batch_size)
            if max_samples is not None:
                whole = next(iter(draw_rows([whole], max_samples, seed)))
            data = split_rows(whole, batch_size)
        elif max_samples is not None:
            data, freeze = draw_samples(data, max_samples, seed, progress), True
        check_type("data", data, Iterable, "a loader, a list of batches, tensors, or a dataset")
        streams = not isinstance(data, Sequence)
        self._source, self._compared = data, streams and not freeze
        if self._compared and isinstance(data, Iterator):
            raise TypeError("data must be iterable twice, got an iterator: pass freeze=True")
        if self._compared and _shuffles(data):
            raise ValueError(f"data must have a fixed order, got a loader that shuffles: {FREEZE}")
        drawn = None if max_samples is None else seed
        batches = _with_progress(data, progress)
        self._read(batches, drawn, room=TUNING.memory if self._compared else float("inf"))

    def _read(self, source: Iterable[Any], seed: int | None, room: float) -> None:
        """Read the data once. Store sizes and checksums, and the batches while they fit."""
        self.sizes, self.rows, self._checksums = list[int](), list[int](), list[int]()
        self.masses = list[float]()
        batches: list[Batch] | None = []
        self.first: tuple[int, Batch] | None = None
        # A user-defined iterable may reuse the memory of a batch for the next one.
        reused = not isinstance(self._source, Sequence | DataLoader)
        with _generators_restored(self._source):
            if seed is not None:  # augmentation draws from the global generator
                torch.default_generator.manual_seed(seed)
            for index, batch in enumerate(map(as_plain, source)):
                count = self._count or partial(num_rows, name=f"batch {index}")
                size = count(batch)
                check_count(f"number of samples in batch {index}", size)
                self.sizes.append(size)
                mass = None if self._mass is None else self._mass(batch)
                self.masses.append(size if mass is None else mass)
                # If ``count`` counts something else, such as tokens, the first tensor has the rows.
                lengths = [len(tensor) for tensor in tensors(batch) if tensor.ndim]
                self.rows.append(size if size in lengths else (lengths or [size])[0])
                if index % self._world != self._rank:
                    continue
                if self._compared:
                    self._checksums.append(_checksum(batch))
                room -= sum(tensor.nbytes for tensor in tensors(batch))
                batches = None if room < 0 else batches
                if batches is None and self.first is not None:
                    continue
                copy = tree_map_only(Tensor, Tensor.clone, batch) if reused else batch
                moved = self._move(copy)
                self.first = self.first or (index, moved)
                if batches is not None:
                    batches.append(moved)
        if not self.sizes:
            raise ValueError("data must contain at least one batch, got none")
        self._in_memory, self.held = batches, batches is not None

    @property
    def even(self) -> bool:
        """Whether all samples have the same weight in the mean over batches."""
        ratio = sum(self.masses) / sum(self.sizes)
        pairs = zip(self.masses, self.sizes, strict=True)
        return all(math.isclose(mass, ratio * size) for mass, size in pairs)

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield index and content of the batches of this process, always in the same order."""
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


def _shuffles(data: Any) -> bool:
    """Return whether the sampler of a loader is known to change the order in every pass."""
    inside = getattr(data, "batch_sampler", None)
    samplers = (getattr(data, "sampler", None), getattr(inside, "sampler", None))
    kinds = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return any(isinstance(sampler, kinds) for sampler in samplers)


# ------------------------------------------------------------------------------------------
# A random subset of the samples.


def draw_samples(
    data: Any, count: int, seed: int, progress: bool | Progress = False
) -> Iterable[Batch]:
    """Return a random subset of the samples of data in batches, as batches.

    Every subset of ``count`` samples is equally likely. A loader that can load single samples loads
    only those of the subset. Other data are read once. Memory: at most twice the subset.

    Args:
        data: A loader, a list or another iterable of batches.
        count: Number of samples; all of them if the data have fewer.
        seed: Seed of the subset, and of random augmentation in a loader.
        progress: Show a bar while data are read.
    """
    check_count("max_samples", count)
    check_type("data", data, Iterable, "a loader, a list of batches, or tensors")
    if (subset := _subset_loader(data, count, seed)) is not None:
        return subset
    with _generators_restored(data):
        if not isinstance(data, Sequence):
            torch.default_generator.manual_seed(seed)
        return draw_rows(map(as_plain, _with_progress(data, progress)), count, seed)


def _subset_loader(data: Any, count: int, seed: int) -> Iterable[Batch] | None:
    """Return a loader of a random subset. ``None`` if the loader cannot load single samples."""
    sampler = getattr(data, "sampler", None)
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    plain = isinstance(sampler, SequentialSampler) or shuffled
    if (
        not isinstance(data, DataLoader)
        or not plain
        or type(data.batch_sampler) is not BatchSampler
    ):
        return None
    size, dataset = len(sampler), data.dataset  # type: ignore[arg-type]
    if size != len(dataset) or data.drop_last:  # type: ignore[arg-type]
        return None  # the loader leaves out some samples
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator)[:count].sort().values
    return DataLoader(
        Subset(dataset, order.tolist()),
        batch_size=data.batch_size,
        collate_fn=data.collate_fn,
        num_workers=data.num_workers,
        worker_init_fn=data.worker_init_fn,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context=data.multiprocessing_context,
    )


@dataclass(slots=True)
class _Piece:
    """The rows of one batch that are in the subset so far, with the random key of each row."""

    batch: Batch
    keys: Tensor

    def below(self, bound: float) -> "_Piece":
        """Return the rows whose keys are at most the bound."""
        keep = self.keys <= bound
        return (
            self
            if bool(keep.all())
            else _Piece(take_rows(self.batch, keep.nonzero()[:, 0], len(keep)), self.keys[keep])
        )


def draw_rows(batches: Iterable[Batch], count: int, seed: int) -> list[Batch]:
    """Return the rows of a random subset, joined into batches as long as the first one."""
    check_count("max_samples", count)
    # Each row gets a random key. The rows with the ``count`` smallest keys are a uniform subset.
    # The total number of rows need not be known, so one pass is enough.
    generator = torch.Generator().manual_seed(seed)
    pieces, longest, bound = list[_Piece](), 0, float("inf")
    for index, batch in enumerate(batches):
        size = num_rows(batch, name=f"batch {index}")
        _require_rows(batch, size, index)
        longest = longest or size
        keys = torch.rand(size, generator=generator, dtype=torch.float64)
        # Indexing copies the rows, because the next batch may overwrite the memory of this one.
        rows = (keys <= bound).nonzero()[:, 0]
        if len(rows):
            pieces.append(_Piece(take_rows(batch, rows, size), keys[rows]))
        if sum(len(piece.keys) for piece in pieces) > 2 * count:
            pieces, bound = _smallest(pieces, count)
    return _join([piece.batch for piece in _smallest(pieces, count)[0]], longest)


def _smallest(pieces: list[_Piece], count: int) -> tuple[list[_Piece], float]:
    """Return the rows with the ``count`` smallest keys, and the largest of these keys."""
    keys = torch.cat([piece.keys for piece in pieces]) if pieces else torch.empty(0)
    if len(keys) <= count:
        return pieces, float("inf")
    bound = float(keys.kthvalue(count).values)
    # Pieces without any remaining row are dropped.
    return [piece.below(bound) for piece in pieces if float(piece.keys.min()) <= bound], bound


def _require_rows(batch: Batch, size: int, index: int) -> None:
    """Raise unless the labels of a batch have a row for each of its samples."""
    labels = split_labels(batch)[2]
    if isinstance(labels, Tensor) and labels.ndim and len(labels) != size:
        raise ValueError(
            f"max_samples needs batches with one row per sample, got {size} rows and "
            f"{len(labels)} labels in batch {index}"
        )


def _join(parts: list[Batch], longest: int) -> list[Batch]:
    """Join batches of equal shapes into batches of at most ``longest`` rows.

    Values without one row per sample must be equal in the batches that are joined.
    """
    groups: dict[Any, list[Batch]] = {}
    for part in parts:
        leaves, spec = tree_flatten(part)
        size = num_rows(part)
        key = tuple(
            (leaf.shape[1:], leaf.dtype)
            if is_rows(leaf, size)
            # Other values belong to all samples of their batch, so they must be equal.
            else (leaf.shape, _checksum(leaf)) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in leaves
        )  # fmt: skip
        groups.setdefault((str(spec), key), []).append(part)
    joined = (join_rows(group, list(map(num_rows, group))) for group in groups.values())
    return [batch for whole in joined for batch in split_rows(whole, longest, num_rows(whole))]


def _with_progress(data: Iterable[Any], progress: bool | Progress) -> Iterator[Any]:
    """Yield the batches, with a progress bar if they come from a loader."""
    shown = False if isinstance(data, Sequence) else progress
    with tracking(shown, "batches of data", known_length(data)) as bar:
        for done, batch in enumerate(data, start=1):
            yield batch
            bar.update(done)


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
    """Return a batch on a device, with its floating-point tensors converted to a dtype if given."""

    def move(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else None
        return differentiable(tensor.detach().to(device=device, dtype=kind))

    return tree_map_only(Tensor, move, batch)


def batch_seeds(num_batches: int, generator: torch.Generator | None) -> list[int]:
    """Draw a seed for each batch, so that draws do not depend on the number of processes."""
    rng = resolve_generator(generator)
    seeds: list[int] = torch.randint(0, 2**62, (num_batches,), generator=rng).tolist()
    return seeds
