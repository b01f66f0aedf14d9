"""Data as a fixed list of batches, whatever form they came in."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ritz._core.checks import check_count
from ritz._core.distributed import Group, rank, world_size

# ------------------------------------------------------------------------------------------
# Tensors that have derivatives, also where a user's code runs in inference mode.


@contextmanager
def recorded() -> Iterator[None]:
    """Record operations for a backward pass, whatever the mode outside the block."""
    with outside_inference(), torch.enable_grad():
        yield


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode for the block: what is made in it cannot be differentiated, ever."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def differentiable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it was made in inference mode."""
    with outside_inference():
        return tensor.clone() if tensor.is_inference() else tensor


# ------------------------------------------------------------------------------------------
# Data as a fixed list of batches, whatever it came as.

Batch = Any  # a tensor, or tuples, lists and dictionaries of them
HELD = 4 * 2**30  # bytes of batches that are kept rather than loaded again for every product
FREEZE = "pass freeze=True to hold the batches of one pass, or turn it off in the loader"


@final
class Batches:
    """A list of batches that is the same in every pass, of which this process sees its share.

    Args:
        data: A loader or any other iterable of batches that can be gone through again, or all
            samples at once as a tuple or dictionary of tensors.
        batch_size: Samples a batch where all came at once (512 by default).
        freeze: Whether to hold the batches of the first pass, however many, so that a loader that
            shuffles or augments is taken as it came.
        count: Number of samples in a batch; the length of its first tensor by default.
        device: Where batches are moved.
        dtype: Of their floating-point tensors; as they are by default.
        group: Processes that share the data; each then goes through the batches whose number
            leaves its own rank when divided by the number of processes. ``None``: all are its.
        shared: Whether every process was given all the data, or its own part of them.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        freeze: bool = False,
        count: Callable[[Batch], int] | None = None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        group: Group | None = None,
        shared: bool = True,
    ) -> None:
        self._device, self._dtype = device, dtype
        parts = world_size(group) if shared else 1
        self._mine = (rank(group) if shared else 0, parts)
        whole = _all_at_once(data)
        if whole is None and batch_size is not None:
            raise ValueError(
                f"batch_size must not be given for data that come in batches, got {batch_size}"
            )
        source = data if whole is None else _cut(whole, 512 if batch_size is None else batch_size)
        if not isinstance(source, Iterable):
            raise TypeError(
                f"data must be a loader, a list of batches, or tensors, got {type(data).__name__}"
            )
        loads = whole is None and not isinstance(source, Sequence)
        if loads and not freeze:
            _refuse_shuffling(source)
        self._source, self.sizes, self._marks = source, list[int](), list[int]()
        held: list[Batch] | None = []
        self.defaulted = whole is not None and batch_size is None
        room = float("inf") if freeze or not loads else HELD
        with _undrawn(source):
            for index, batch in enumerate(map(_plain, source)):
                self.sizes.append(_size(batch, index, count))
                if not self._is_mine(index):
                    continue
                if loads and not freeze:
                    self._marks.append(_fingerprint(batch))
                room -= _bytes(batch)
                if held is not None and room >= 0:
                    # A user-defined iterable may write every batch into the same memory.
                    fresh = not loads or isinstance(source, DataLoader)
                    held.append(self._placed(batch if fresh else tree_map(_copied, batch)))
                else:
                    held = None
            if not self.sizes:
                raise ValueError("data must hold at least one batch, got none")
            self._held = held
            if loads and not freeze:
                self._compare_first()

    @classmethod
    def fixed(cls, batches: Sequence[Batch], sizes: Sequence[int]) -> "Batches":
        """Batches already in place, all of them this process's."""
        self = cls.__new__(cls)
        self._held, self.sizes, self._mine = list(batches), list(sizes), (0, 1)
        self.defaulted = False
        return self

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def held(self) -> bool:
        """Whether the batches are in memory."""
        return self._held is not None

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """This process's batches with their numbers, always the same ones in the same order."""
        if self._held is not None:
            mine = [index for index in range(len(self.sizes)) if self._is_mine(index)]
            yield from zip(mine, self._held, strict=True)
            return
        done = 0
        with _undrawn(self._source):
            iterator = iter(self._source)
        for index, batch in enumerate(map(_plain, iterator)):
            if not self._is_mine(index):
                continue
            if done >= len(self._marks) or _fingerprint(batch) != self._marks[done]:
                raise ValueError(f"data must be the same in every pass: batch {index} has changed; "
                                 + FREEZE)  # fmt: skip
            done += 1
            yield index, self._placed(batch)
        if done != len(self._marks):
            raise ValueError(
                f"data must be the same in every pass: {len(self._marks)} batches, then {done}"
            )

    def _is_mine(self, index: int) -> bool:
        own, parts = self._mine
        return index % parts == own

    def _placed(self, batch: Batch) -> Batch:
        return tree_map(lambda leaf: placed(leaf, self._device, self._dtype), batch)

    def _compare_first(self) -> None:
        for index, batch in enumerate(map(_plain, self._source)):
            if self._is_mine(index):
                if _fingerprint(batch) != self._marks[0]:
                    raise ValueError(
                        f"data must be the same in every pass: batch {index} came differently the "
                        f"second time, as shuffling or random augmentation would; {FREEZE}"
                    )
                return


def placed(leaf: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A leaf of a batch on a device, and of a dtype if it is a floating-point tensor."""
    if not isinstance(leaf, Tensor):
        return leaf
    wanted = dtype if leaf.is_floating_point() else None
    return differentiable(leaf.detach().to(device=device, dtype=wanted))


def is_rows(leaf: Any, size: int) -> bool:
    """Whether a leaf of a batch has a row for each of ``size`` samples."""
    return isinstance(leaf, Tensor) and bool(leaf.ndim) and len(leaf) == size


def rows(batch: Batch, indices: Tensor | slice, size: int) -> Batch:
    """The samples of a batch with these indices: rows of every tensor of ``size`` rows."""
    return tree_map(lambda leaf: leaf[indices] if is_rows(leaf, size) else leaf, batch)


def joined(batches: Sequence[Batch], sizes: Sequence[int]) -> Batch:
    """One batch of the samples of several."""
    leaves, spec = tree_flatten(batches[0])
    columns = list(zip(*map(tree_leaves, batches), strict=True))
    split = [all(map(is_rows, column, sizes)) for column in columns]
    if not any(split):
        raise ValueError(f"data must hold tensors of as many rows as samples to tell these apart, "
                         f"got none of {sizes[0]} rows in a batch")  # fmt: skip
    for place, column in enumerate(columns):
        shapes = sorted({tuple(leaf.shape) for leaf in column if isinstance(leaf, Tensor)})
        if split[place] and len({shape[1:] for shape in shapes}) == 1:
            leaves[place] = torch.cat(column)
        elif not all(_same(leaf, column[0]) for leaf in column):
            raise ValueError(f"batches must be rows of one shape, or the same in all of them, to "
                             f"be joined, got {shapes or set(column)}")  # fmt: skip
    return tree_unflatten(leaves, spec)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _all_at_once(data: Any) -> Batch | None:
    """All samples as one batch, if that is what ``data`` is."""
    if isinstance(data, TensorDataset):
        return data.tensors
    if isinstance(data, tuple) and data and all(isinstance(leaf, Tensor) for leaf in data):
        return data
    if isinstance(data, Mapping):
        return _plain(data)
    if isinstance(data, Tensor):
        return (data,)
    return None


def _cut(batch: Batch, batch_size: int) -> list[Batch]:
    check_count("batch_size", batch_size)
    size = _size(batch, 0, None)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and (not leaf.ndim or len(leaf) != size):
            raise ValueError(f"data must be tensors of as many rows, got {size} and "
                             f"{tuple(leaf.shape)}")  # fmt: skip
    starts = range(0, size, batch_size)
    return [rows(batch, slice(start, start + batch_size), size) for start in starts]


def _size(batch: Batch, index: int, count: Callable[[Batch], int] | None) -> int:
    if count is not None:
        size = count(batch)
        check_count(f"count of batch {index}", size)
        return size
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            if not len(leaf):
                raise ValueError(f"data must hold samples, got an empty batch {index}")
            return len(leaf)
    raise ValueError(f"data must be batches of tensors, got {type(batch).__name__} in batch {index}"
                     ": pass count= to say how many samples it holds")  # fmt: skip


def _refuse_shuffling(source: Any) -> None:
    if isinstance(source, Iterator):
        raise TypeError("data must be iterable more than once, got an iterator: pass a list, a "
                        "DataLoader, or freeze=True")  # fmt: skip
    if isinstance(source, DataLoader) and isinstance(source.sampler, RandomSampler):
        raise ValueError(f"data must come in a fixed order, got a loader that shuffles; {FREEZE}")


def _plain(batch: Batch) -> Batch:
    """Mappings of other kinds, such as what tokenizers return, as dictionaries."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


@contextmanager
def _undrawn(source: Any) -> Iterator[None]:
    """Put the generators that a loader draws from back: a pass over it must leave no trace."""
    loader = source if isinstance(source, DataLoader) else None
    own = [getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None),
                                                       "generator", None)]  # fmt: skip
    generators = [torch.default_generator, *(g for g in own if isinstance(g, torch.Generator))]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _fingerprint(batch: Batch) -> int:
    mark = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            mark = zlib.crc32(data.numpy().data, mark)
    return mark


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _bytes(batch: Batch) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
