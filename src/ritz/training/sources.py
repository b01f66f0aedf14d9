"""Data of any kind as parts to train on and to measure on."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ritz._core.checks import check_count
from ritz.data import TextSplit
from ritz.training.feeds import check_lengths, is_tensors, num_rows

PARTS = ("train", "validation", "test")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataParts:
    """What to train on and what to evaluate on.

    Attributes:
        train: Samples as a tuple of tensors, something with ``batches``, or batches.
        validation: Likewise, or ``None``.
        test: Likewise, or ``None``.
        augmentation: For ``train``, where it knows how; or ``None``.
        num_classes: Where it is known.
        shape: Of one input, where it is known.
        name: What errors call them.
    """

    train: Any
    validation: Any = None
    test: Any = None
    augmentation: Any = None
    num_classes: int | None = None
    shape: tuple[int, ...] | None = None
    name: str = "given"

    @property
    def cuts(self) -> bool:
        """Whether samples are cut into batches here, or come in batches."""
        return hasattr(self.train, "batches") or is_tensors(self.train)


@final
class IndexedData:
    """A dataset of torch, cut into batches by number.

    Args:
        dataset: With a length; it gives samples by number.
        chosen: Numbers of the samples that count; all by default.
    """

    def __init__(self, dataset: Any, chosen: Sequence[int] | None = None) -> None:
        self._dataset = dataset
        self._chosen = range(len(dataset)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, count: int, *, generator: torch.Generator) -> "IndexedData":
        """As many samples, drawn without replacement."""
        order = torch.randperm(len(self), generator=generator)[:count].tolist()
        return IndexedData(self._dataset, [self._chosen[i] for i in order])

    def batches(self, batch_size: int, *, generator: torch.Generator | None = None) -> Any:
        """One epoch, shuffled where a generator is given."""
        order = torch.arange(len(self))
        if generator is not None:
            order = torch.randperm(len(self), generator=generator)
        return _Collated(self, [rows.tolist() for rows in order.split(batch_size)])

    def batch(self, rows: Sequence[int]) -> Any:
        """Some samples as one batch."""
        return default_collate([self._dataset[self._chosen[i]] for i in rows])


@final
class _Collated(Sequence[Any]):
    def __init__(self, data: IndexedData, rows: list[list[int]]) -> None:
        self._data, self._rows = data, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Collated(self._data, self._rows[index])
        return self._data.batch(self._rows[index])


def as_parts(found: Any) -> DataParts:
    """The parts of data, whatever they came as.

    Args:
        found: Something with ``train`` and ``test``, as ``ritz.data.load`` returns; a dictionary
            with ``train`` and perhaps ``validation`` and ``test``; a pair ``(train, test)``; or
            what to train on alone. Each part: a tuple ``(inputs, targets)`` of tensors or arrays of
            NumPy, a dataset or a loader of torch, a list of batches, or something with ``batches``.
    """
    found = _converted(found)
    known: dict[str, Any] = {}
    if hasattr(found, "train") and not isinstance(found, Mapping):
        parts = {name: getattr(found, name, None) for name in PARTS}
        known = {name: getattr(found, name, None)
                 for name in ("augmentation", "num_classes", "shape")}  # fmt: skip
    elif isinstance(found, Mapping):
        parts = _named(found)
    elif isinstance(found, tuple) and len(found) == 2 and not is_tensors(found):
        parts = {"train": found[0], "test": found[1]}
    else:
        parts = {"train": found}
    plain: dict[str, Any] = {
        name: None if part is None and name != "train" else _plain(part, name)
        for name, part in parts.items()
    }
    return DataParts(**plain, **(known or _guessed(plain["train"])))


def limited(source: Any, count: int, *, seed: int) -> Any:
    """A part of data cut down to some samples, drawn; tokens of a text; batches of a loader."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(source, TextSplit):
        check_count("num_samples", count, low=2, high=len(source.tokens))
        return replace(source, tokens=source.tokens[:count])
    if is_tensors(source):
        check_count("num_samples", count, high=len(source[0]))
        rows = torch.randperm(len(source[0]), generator=generator)[:count]
        return tuple(tensor[rows.to(tensor.device)] for tensor in source)
    if hasattr(source, "batches") and hasattr(source, "take"):
        check_count("num_samples", count, high=len(source))
        return source.take(count, generator=generator)
    check_count("num_samples", count)
    return _first(source, count)


def measurable(source: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
    """What ``ritz.Risk`` takes, and its keywords."""
    if is_tensors(source):
        return source, {"batch_size": batch_size}
    if isinstance(source, TextSplit):  # segments differ in length
        return source.batches(batch_size), {"count": _tokens}
    return (source.batches(batch_size) if hasattr(source, "batches") else source), {}


def sample(source: Any, count: int, *, batch_size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """At most so many samples in memory, as ``ritz.Risk`` takes them, and its keywords."""
    whole = source.tokens if isinstance(source, TextSplit) else source
    whole = whole[0] if is_tensors(whole) else whole
    if isinstance(whole, Sized) and not isinstance(whole, DataLoader | list):
        count = min(count, len(whole))
    data, options = measurable(limited(source, count, seed=seed), batch_size)
    return (data if is_tensors(data) else list(data)), options


def first_batch(source: Any, *, count: int = 2) -> Any:
    """A few samples as one batch, by whatever does not go on by being looked at; else ``None``."""
    if is_tensors(source):
        return tuple(tensor[:count] for tensor in source)
    if isinstance(source, TextSplit):  # not all of the segments
        return replace(source, tokens=source.tokens[: source.length + 1]).batches(1)[0]
    if hasattr(source, "batches"):
        return next(iter(source.batches(count)), None)
    if isinstance(source, list):
        return source[0]
    # Iterating would draw from the generator that orders the samples.
    if isinstance(source, DataLoader) and isinstance(source.dataset, Sized):
        numbers = range(min(count, len(source.dataset)))
        alone = source.batch_sampler is None  # its samples are batches
        return None if alone else source.collate_fn([source.dataset[i] for i in numbers])
    return None


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    if "train" not in found or set(found) - set(PARTS):
        raise ValueError(f"data must have the parts train and perhaps validation and test, got "
                         f"{', '.join(map(str, found)) or 'none'}")  # fmt: skip
    return dict(found)


def _converted(found: Any) -> Any:
    """The same with tensors for arrays of NumPy."""
    if isinstance(found, np.ndarray):
        try:
            return torch.from_numpy(np.require(found, requirements=["C", "W"]))
        except TypeError as error:
            raise TypeError(f"data must be numbers that torch knows, got an array of dtype "
                            f"{found.dtype}") from error  # fmt: skip
    if type(found) in (tuple, list):
        return type(found)(map(_converted, found))
    if type(found) is dict:
        return {name: _converted(part) for name, part in found.items()}
    return found


def _plain(part: Any, name: str) -> Any:
    part = _converted(part)
    if isinstance(part, TensorDataset):
        part = part.tensors
    if isinstance(part, list) and part and all(isinstance(x, Tensor) for x in part):
        part = tuple(part)
    if is_tensors(part):
        check_lengths(part, f"{name} data")
        return part
    if isinstance(part, Dataset) and not isinstance(part, IterableDataset):
        part = IndexedData(part)
    if isinstance(part, IndexedData | list | DataLoader) and not _length(part):
        raise ValueError(f"{name} data must hold samples, got none")
    batches = isinstance(part, Iterable) and not isinstance(part, Tensor | str | bytes | Mapping)
    if hasattr(part, "batches") or (batches and _is_of_batches(part)):
        return part
    got = f"{type(part).__name__} of {type(part[0]).__name__}" if batches else type(part).__name__
    raise TypeError(f"{name} data must be (inputs, targets), both tensors or arrays, a dataset, a "
                    f"loader, or have batches(), got {got}")  # fmt: skip


def _is_of_batches(part: Any) -> bool:
    """Whether the first of several is a batch; those that come only once are not looked at."""
    return not isinstance(part, list | tuple) or isinstance(part[0], tuple | list | Mapping)


def _length(part: Any) -> int:
    try:
        return len(part)
    except TypeError:  # a loader of what has no length
        return 1


def _guessed(train: Any) -> dict[str, Any]:
    """Shape and number of classes of tensors."""
    if isinstance(train, DataLoader) and isinstance(train.dataset, TensorDataset):
        train = train.dataset.tensors
    if not is_tensors(train) or len(train) < 2 or train[0].ndim < 2:
        return {}
    classes = not train[-1].is_floating_point() and train[-1].numel()
    return {"shape": tuple(train[0].shape[1:]),
            "num_classes": int(train[-1].max()) + 1 if classes else None}  # fmt: skip


def _first(batches: Iterable[Any], count: int) -> list[Any]:
    """The first batches with so many samples, or all there are."""
    found: list[Any] = []
    for batch in islice(batches, count):
        found.append(batch)
        count -= num_rows(batch)
        if count <= 0:
            break
    return found


def _tokens(batch: Any) -> int:
    return int(batch[-1].numel())
