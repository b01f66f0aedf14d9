"""Training data: parts to train and measure on, and epochs of batches for every process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ritz._core.checks import check_count
from ritz._core.distributed import rank, shard, world_size
from ritz._core.random import epoch_generator
from ritz.data import Split, TextSplit

# ------------------------------------------------------------------------------------------
# Data as epochs of batches, whatever they came as; every process sees its rows of each batch.

Batch = Any  # a tensor, or tuples, lists and dictionaries of them


@final
class Feed:
    """Epochs of batches on a device.

    Args:
        source: All samples as a tuple of tensors; or an object whose ``batches(batch_size,
            generator=...)`` yields batches; or a loader or list of batches; or a function of the
            number of the epoch that returns one.
        batch_size: Samples a batch, for the first two.
        device: Where batches are moved.
        shuffled: Whether tensors are shuffled and an object is given ``generator``: in training,
            not in evaluation.
        augment: Given to the object too, unless ``None``.
        drop_last: Whether a last batch of fewer samples is left out, of the first two.
        name: What errors call the source.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None,
        device: torch.device,
        shuffled: bool,
        augment: Any = None,
        drop_last: bool = False,
        name: str = "data",
    ) -> None:
        self._source, self._batch_size, self._device = source, batch_size, device
        self._shuffled, self._augment = shuffled, augment
        self._cuts = is_tensors(source) or hasattr(source, "batches")
        if self._cuts and batch_size is None:
            raise ValueError(f"batch_size must be given for {name} that do not come in batches")
        if is_tensors(source):
            _check_tensors(source, name)
        if not (self._cuts or callable(source) or isinstance(source, Iterable)):
            raise TypeError(f"{name} must be tensors, have batches(), be a loader or a function of "
                            f"the epoch, got {type(source).__name__}")  # fmt: skip
        self._whole = self._whole_batches() if drop_last else None

    def _whole_batches(self) -> int:
        """Batches in an epoch that have all their samples."""
        size, count = self._batch_size or 1, self.num_samples
        if count is None:
            raise ValueError("drop_last needs samples that batch_size cuts, got data whose batches "
                             "are their own")  # fmt: skip
        if count < size:
            raise ValueError(f"batch_size must be at most {count}, the number of samples, with "
                             f"drop_last, got {size}")  # fmt: skip
        return count // size

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch, where they are cut into batches here."""
        source, size = self._source, self._batch_size or 1
        if is_tensors(source):
            return len(source[0])
        count = _length(source) if self._cuts else None
        if count is None:
            return None
        # What is counted is samples where as many batches come of it.
        return count if _length(source.batches(size)) == ceil(count / size) else None

    @property
    def last_rows(self) -> int | None:
        """Rows of the last batch of an epoch, where samples are cut into batches here."""
        count, size = self.num_samples, self._batch_size or 1
        if count is None:
            return None
        return size if self._whole is not None else count % size or min(count, size)

    def row(self) -> Batch:
        """A batch of one row on the device, of samples that are cut into batches here."""
        source = self._source
        first = tuple(x[:1] for x in source) if is_tensors(source) else next(
            iter(source.batches(1)))  # fmt: skip
        return tree_map(self._moved, first)

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, where that can be known without going through one."""
        source: Any = self._source
        if self._whole is not None:
            return self._whole
        if is_tensors(source):
            return ceil(len(source[0]) / (self._batch_size or 1))
        if self._cuts:
            source = source.batches(self._batch_size)
        return _length(source)

    @property
    def consecutive(self) -> bool:
        """Whether the rows of a batch go on where those of the one before stopped, as it says."""
        return bool(getattr(self._source, "consecutive", False))

    @property
    def generators(self) -> list[torch.Generator]:
        """What a loader and its samplers draw from, where they were given a generator."""
        batches = getattr(self._source, "batch_sampler", None)
        places = (self._source, getattr(self._source, "sampler", None), batches,
                  getattr(batches, "sampler", None))  # fmt: skip
        found = [getattr(place, "generator", None) for place in places]
        return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))

    @property
    def keeps_workers(self) -> bool:
        """Whether a loader keeps its workers, and draws their seed in its first epoch alone."""
        return bool(getattr(self._source, "persistent_workers", False))

    @property
    def is_text(self) -> bool:
        """Whether the data are a text, whose loss is read as a perplexity."""
        return isinstance(self._source, TextSplit)

    @property
    def ready(self) -> Sequence[Batch] | None:
        """All samples in some batches, where they lie there before an epoch begins."""
        source: Any = self._source
        if isinstance(source, Split):
            return [(source.inputs, source.targets)]
        if isinstance(source, TextSplit):
            return [(source.tokens, source.tokens)]
        if is_tensors(source):
            return [source]
        return source if isinstance(source, list | tuple) else None

    def epoch(
        self,
        number: int,
        seed: int,
        *,
        skip: int = 0,
        look: Callable[[Batch], None] = lambda batch: None,
    ) -> Iterator[Batch]:
        """The whole batches of an epoch, on the device; the same for the same seed and number.

        ``skip`` leaves out the first ones, before this returns, and without making them where the
        source is a sequence. ``look`` sees each where it came from: on the CPU nobody waits.
        """
        found = self._batches(number, epoch_generator(seed, number))
        if self._whole is not None:
            found = found[: self._whole] if isinstance(found, Sequence) else islice(
                found, self._whole)  # fmt: skip
        if skip and isinstance(found, Sequence):
            found, skip = found[skip:], 0
        rest = iter(found)
        for _ in islice(rest, skip):
            pass
        return (self._placed(batch, look) for batch in rest)

    def part(self, fraction: float) -> Iterator[Batch]:
        """This process's rows of the first batches of an epoch of their own, that share of them."""
        count = self.num_batches
        if fraction < 1 and count is None:
            count = sum(1 for _ in self.epoch(0, 0))
        stop = None if fraction == 1 or count is None else max(1, ceil(fraction * count))
        for batch in islice(self.epoch(0, 0), stop):
            own, _, real = own_rows(batch)
            if real:
                yield own

    def _batches(self, number: int, generator: torch.Generator) -> Iterable[Batch]:
        source: Any = self._source
        if is_tensors(source):
            return self._cut(generator)
        if hasattr(source, "batches"):
            chosen = {"generator": generator} if self._shuffled else {}
            if self._augment is not None:
                chosen["augment"] = self._augment
            return source.batches(self._batch_size, **chosen)  # type: ignore[no-any-return]
        if not isinstance(source, Iterable):
            found: Iterable[Batch] = source(number)
            return found
        sampler: Any = getattr(source, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        return source

    def _cut(self, generator: torch.Generator) -> Iterator[Batch]:
        size = len(self._source[0])
        order = torch.randperm(size, generator=generator) if self._shuffled else torch.arange(size)
        order = order.to(self._source[0].device)  # at once: every such copy waits for the device
        for rows in order.split(self._batch_size or size):
            yield tuple(tensor[rows.to(tensor.device)] for tensor in self._source)

    def _placed(self, batch: Batch, look: Callable[[Batch], None]) -> Batch:
        look(batch)
        return tree_map(self._moved, batch)

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


def own_rows(batch: Batch) -> tuple[Batch, int, bool]:
    """This process's rows of a batch, the number of rows of the whole, and whether it has any.

    Where a batch has fewer rows than there are processes, one without gets a row all the same, to
    keep step with the others; it is to count for nothing.
    """
    count = num_rows(batch)
    if world_size() == 1:
        return batch, count, True
    mine = shard(count)
    real = mine.stop > mine.start
    if not real:
        mine = slice(0, 1)
    return tree_map(lambda leaf: _rows(leaf, mine, count), batch), count, real


def num_rows(batch: Batch) -> int:
    """Length of the first tensor of a batch."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise TypeError(f"a batch must hold a tensor whose length is the number of samples, got "
                    f"{type(batch).__name__}")  # fmt: skip


def is_writer() -> bool:
    """Whether this is the process that writes files."""
    return rank() == 0


def _rows(leaf: Any, mine: slice, count: int) -> Any:
    return leaf[mine] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count else leaf


def _length(source: Any) -> int | None:
    """What ``len`` says; a loader has one that raises where its data have none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def is_tensors(source: Any) -> bool:
    """Whether these are samples as a tuple of tensors."""
    return (isinstance(source, tuple) and len(source) > 0
            and all(isinstance(part, Tensor) for part in source))  # fmt: skip


def check_lengths(source: tuple[Tensor, ...], name: str) -> None:
    """Raise unless tensors are of one length, which is not zero."""
    sizes = [len(part) if part.ndim else 0 for part in source]
    if len(set(sizes)) > 1:
        raise ValueError(f"{name} must be tensors of one length, got {sizes}")
    if not sizes[0]:
        raise ValueError(f"{name} must hold samples, got none")


def _check_tensors(source: tuple[Tensor, ...], name: str) -> None:
    check_lengths(source, name)
    for index, part in enumerate(source):
        if part.is_floating_point() and not bool(part.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or Inf in tensor {index}")


def splits(data: Any, validation: Any, test: Any) -> tuple[Any, dict[str, Any]]:
    """Training data, and what to evaluate on by name, of data that may have splits of their own."""
    held = {"validation": validation, "test": test}
    if hasattr(data, "train") and hasattr(data, "test"):
        held = {name: getattr(data, name, None) if part is None else part
                for name, part in held.items()}  # fmt: skip
        data = data.train
    return data, {name: part for name, part in held.items() if part is not None}


# ------------------------------------------------------------------------------------------
# Data of any kind as parts to train on and to measure on.

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
    if isinstance(part, IndexedData | list | DataLoader) and not _num_samples(part):
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


def _num_samples(part: Any) -> int:
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
