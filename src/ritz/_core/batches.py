"""Batches of tensors in any nesting: their rows, devices, inputs and labels.

A batch is a tensor, or a nesting of tuples, lists and dictionaries of tensors and other values. A
tensor with one row per sample is split and joined by rows. Other values belong to the whole batch
and are passed on unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.data import TensorDataset

Batch = Any


def tensors(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch, in order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def known_length(source: Any) -> int | None:
    """Return the length of data, or ``None`` if there is none.

    A loader of an iterable dataset has the method ``__len__``, which raises.
    """
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def num_rows(batch: Batch, name: str = "a batch") -> int:
    """Return the number of samples of a batch: the length of its first tensor."""
    for tensor in tensors(batch):
        if tensor.ndim:
            return len(tensor)
    raise TypeError(f"{name} must contain a tensor whose length is the number of samples, got "
                    f"{type(batch).__name__}: otherwise pass count=")  # fmt: skip


def common_rows(batch: Batch, name: str = "data") -> int:
    """Return the number of rows that all tensors of a batch have. Raise if they differ."""
    lengths = [len(tensor) if tensor.ndim else 0 for tensor in tensors(batch)]
    if len(set(lengths)) > 1:
        raise ValueError(f"{name} must be tensors of the same length, got {lengths}")
    if not lengths or not lengths[0]:
        raise ValueError(f"{name} must have at least one sample, got lengths {lengths}")
    return lengths[0]


def is_rows(leaf: Any, size: int) -> bool:
    """Return whether a leaf of a batch is a tensor with one row for each of ``size`` samples."""
    return isinstance(leaf, Tensor) and bool(leaf.ndim) and len(leaf) == size


def take_rows(batch: Batch, indices: Tensor | slice, size: int) -> Batch:
    """Return some samples of a batch of ``size`` samples, as a batch."""
    return tree_map(lambda leaf: leaf[indices] if is_rows(leaf, size) else leaf, batch)


def split_rows(batch: Batch, batch_size: int, size: int | None = None) -> list[Batch]:
    """Split samples into batches of ``batch_size``. The last one may be smaller.

    All tensors must have one row per sample, unless the number of samples is passed as ``size``.
    """
    size = common_rows(batch) if size is None else size
    starts = range(0, size, batch_size)
    return [take_rows(batch, slice(start, start + batch_size), size) for start in starts]


def split_samples(
    batch: Batch, size: int
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Batch]]:
    """Return the tensors with one row per sample, and a function from one row of each to a batch.

    The function makes a batch of one sample, for use inside ``vmap`` over the tensors.
    """
    leaves, spec = tree_flatten(batch)
    # Other values, such as a mask that all samples share, are the same in every batch of one.
    places = [place for place, leaf in enumerate(leaves) if is_rows(leaf, size)]

    def rebuild(sample: Sequence[Tensor]) -> Batch:
        single = list(leaves)
        for place, row in zip(places, sample, strict=True):
            # vmap has removed the axis of samples, but the model expects a batch of one.
            single[place] = row.unsqueeze(0)
        return tree_unflatten(single, spec)

    return [leaves[place] for place in places], rebuild


def join_rows(batches: Sequence[Batch], sizes: Sequence[int]) -> Batch:
    """Return one batch with the samples of several. Values other than rows must be equal."""
    leaves, spec = tree_flatten(batches[0])
    columns = list(zip(*map(tree_leaves, batches), strict=True))
    # A leaf has rows only if it has the right length in every batch. A vector of class weights may
    # have the length of a single batch by accident.
    by_sample = [all(map(is_rows, column, sizes)) for column in columns]
    if not any(by_sample):
        raise ValueError(f"no tensor of a batch of {sizes[0]} samples has one row per sample")
    for place, column in enumerate(columns):
        shapes = sorted({tuple(leaf.shape) for leaf in column if isinstance(leaf, Tensor)})
        if by_sample[place] and len({shape[1:] for shape in shapes}) == 1:
            leaves[place] = torch.cat(column)
        elif not all(_equal(leaf, column[0]) for leaf in column):
            raise ValueError(f"batches with different shapes or values cannot be joined, got "
                             f"{shapes or set(column)}: pad sequences to one length")  # fmt: skip
    return tree_unflatten(leaves, spec)


def to_device(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return a batch with all its tensors on a device. Other mappings become dictionaries."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf

    return tree_map(move, as_plain(batch))


def as_plain(batch: Batch) -> Batch:
    """Return a mapping of another type, such as the output of a tokenizer, as a dictionary.

    Arrays become tensors. Beside tensors, arrays of strings or objects are other values.
    """
    batch = dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch
    if not tensors(batch):
        return from_arrays(batch)
    return tree_map_only(
        np.ndarray, lambda a: from_arrays(a) if a.dtype.kind in "biufc" else a, batch
    )


def from_arrays(data: Any) -> Any:
    """Return data with tensors in place of NumPy arrays."""

    def convert(array: Any) -> Tensor:
        try:
            # NumPy copies only if necessary: torch refuses negative strides and read-only memory.
            return torch.from_numpy(np.require(array, requirements=["C", "W"]))
        except TypeError as error:
            raise TypeError(
                f"data must have a numeric dtype of torch, got an array of {array.dtype}"
            ) from error

    return tree_map_only(np.ndarray, convert, data)


def as_tensor(array: "Tensor | np.ndarray[Any, Any]") -> Tensor:
    """Return a NumPy array as a tensor, and any other argument as it is."""
    tensor: Tensor = from_arrays(array)
    return tensor


def is_tensors(data: Any) -> bool:
    """Return whether data are a tuple of tensors that hold all samples."""
    return isinstance(data, tuple) and bool(data) and all(isinstance(x, Tensor) for x in data)


def as_one_batch(data: Any) -> Batch | None:
    """Return data that hold all samples as one batch, or ``None`` for other data."""
    if isinstance(data, TensorDataset):
        return data.tensors
    if isinstance(data, Tensor | np.ndarray):
        return (from_arrays(data),)
    if isinstance(data, Mapping):
        return from_arrays(as_plain(data))
    # A list holds batches. A tuple of tensors, perhaps with several targets in a tuple, holds all
    # samples.
    kinds = Tensor | np.ndarray
    inside = isinstance(data, tuple) and any(isinstance(part, kinds) for part in data)
    return from_arrays(data) if inside else None


def split_labels(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return positional inputs, keyword inputs and labels of a batch.

    A batch is ``(*inputs, labels)``, a dictionary of keyword inputs that may contain ``labels``, or
    a single input. Without labels, ``None`` is returned for them.
    """
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return (), inputs, batch.get("labels")
    if not isinstance(batch, tuple | list):
        return (batch,), {}, None
    # A tuple of one tensor is an input without labels.
    return (tuple(batch[:-1]), {}, batch[-1]) if len(batch) > 1 else (tuple(batch), {}, None)


def _equal(left: Any, right: Any) -> bool:
    # Not ==, which is elementwise for tensors and raises for different shapes.
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return bool(left == right)
