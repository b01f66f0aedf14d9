"""Training data: parts for training and evaluation, and epochs of batches for each process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from ritz._core.batches import (
    Batch,
    common_rows,
    from_arrays,
    is_tensors,
    known_length,
    num_rows,
    take_rows,
    tensors,
    to_device,
)
from ritz._core.checks import check_count
from ritz._core.distributed import shard, world_size
from ritz._core.random import epoch_generator
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import draw_samples
from ritz.data import Split, TextSplit

# ------------------------------------------------------------------------------------------
# Samples by index.


@final
class IndexedData:
    """A torch dataset, or a tuple of tensors, cut into batches by index.

    Args:
        dataset: A dataset with a length, or all samples as a tuple of tensors.
        chosen: Indices of the samples to use. Defaults to all.
    """

    def __init__(self, dataset: Any, chosen: Tensor | None = None) -> None:
        self._dataset, self._tensors = dataset, is_tensors(dataset)
        size = len(dataset[0]) if self._tensors else len(dataset)
        self._chosen = torch.arange(size) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, count: int, *, generator: torch.Generator) -> "IndexedData":
        """Return some samples, drawn without replacement."""
        order = torch.randperm(len(self), generator=generator)[:count]
        return IndexedData(self._dataset, self._chosen[order])

    def batches(self, batch_size: int, *, generator: torch.Generator | None = None) -> Any:
        """Return the batches of an epoch, shuffled if a generator is given."""
        order = self._chosen
        if generator is not None:
            # Drawn on the CPU, so that the order is the same on every device.
            order = order[torch.randperm(len(self), generator=generator)]
        if self._tensors:
            order = order.to(self._dataset[0].device)  # once: each copy waits for the device
        return _IndexedBatches(self, order.split(batch_size))

    def batch(self, rows: Tensor) -> Batch:
        """Return the samples of some indices as one batch."""
        if self._tensors:
            return tuple(tensor[rows.to(tensor.device)] for tensor in self._dataset)
        return default_collate([self._dataset[index] for index in rows.tolist()])


@final
class _IndexedBatches(Sequence[Any]):
    """Batches that are created on access, so that a resumed run skips the first ones at no cost."""

    def __init__(self, data: IndexedData, rows: Sequence[Tensor]) -> None:
        self._data, self._rows = data, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _IndexedBatches(self._data, self._rows[index])
        return self._data.batch(self._rows[index])


# ------------------------------------------------------------------------------------------
# Epochs of batches from data of any kind.


@final
@dataclass(kw_only=True, eq=False)
class Feed:
    """Epochs of batches on a device.

    Attributes:
        source: All samples as a tuple of tensors; an object whose ``batches(batch_size,
            generator=...)`` returns batches; a loader or list of batches; or a function that takes
            the number of the epoch and returns batches.
        batch_size: Batch size for the first two kinds.
        device: Device of the batches.
        shuffled: Shuffle the first two kinds: for training, not for evaluation.
        augment: Passed to ``batches`` unless ``None``.
        drop_last: Leave out a smaller last batch of the first two kinds.
        name: Name of the data in errors.
        sizes: Pairs of a number of epochs and the batch size after them; replaces ``batch_size``.
        lengths_seed: Seed of the run if the segments of a text have random lengths.
    """

    source: Any = field(kw_only=False)
    batch_size: int | None
    device: torch.device
    shuffled: bool
    augment: Any = None
    drop_last: bool = False
    name: str = "data"
    sizes: Sequence[tuple[int, int]] = ()
    lengths_seed: int | None = None

    def __post_init__(self) -> None:
        source, name = self.source, self.name
        self.ready = _in_memory(source)
        # Whether the rows of a batch continue those of the batch before, as in a text.
        self.consecutive = bool(getattr(source, "consecutive", False))
        # Persistent workers of a loader draw their seeds in the first epoch only.
        self.has_persistent_workers = bool(getattr(source, "persistent_workers", False))
        if is_tensors(source):
            common_rows(source, name)
            for index, part in enumerate(source):
                if part.is_floating_point() and not bool(part.isfinite().all()):
                    raise ValueError(f"{name} must be finite, got NaN or Inf in tensor {index}")
            self.source = IndexedData(source)
        # Whether batch_size applies. Loaders and lists yield finished batches.
        self.cuts = hasattr(self.source, "batches")
        if self.cuts and self.batch_size is None:
            raise ValueError(f"batch_size is required for {name} of tensors or datasets")
        if not (self.cuts or callable(source) or isinstance(source, Iterable)):
            raise TypeError(
                f"{name} must be tensors, a DataLoader, a list of batches, an object with "
                f"batches(), or a function epoch -> batches, got {type(source).__name__}"
            )
        if self.sizes and not self.cuts:
            raise ValueError(
                "batch_schedule needs tensors or a dataset: a loader has its own batch size"
            )
        if self.lengths_seed is not None and not isinstance(source, TextSplit):
            raise ValueError(
                f"random_segments needs a text, such as data.load returns, got {name} of "
                f"{type(source).__name__}"
            )
        # Numbers of batches, by batch size and epoch.
        self._counts: dict[tuple[int, int], int | None] = {}
        # Numbers of full batches per epoch, by batch size; empty without drop_last.
        self._full_batches = {
            n: self._num_whole_batches(n) for n in self._all_sizes() if self.drop_last
        }

    def _all_sizes(self) -> list[int]:
        return [size for _, size in self.sizes] or [self.batch_size or 1]

    def _size_in(self, number: int) -> int:
        """Return the batch size of an epoch, counted from one."""
        # A size applies to all epochs after `start`. Epoch 0 stands for an evaluation.
        past = [size for start, size in self.sizes if start < max(1, number)]
        return past[-1] if past else self._all_sizes()[0]

    def batch_size_in(self, number: int) -> int | None:
        """Return the batch size of an epoch, counted from one, or ``None`` if it is not known."""
        if self.cuts:
            return self._size_in(number)
        return size_of_batches(self.source)

    def _num_whole_batches(self, size: int) -> int:
        count = known_length(self.source) if self.cuts else None
        # Texts are refused: their length is a number of tokens, not of samples.
        if not count or known_length(self.source.batches(size)) != ceil(count / size):
            raise ValueError(
                "drop_last needs tensors or a dataset: for other data set it in the DataLoader"
            )
        if count < size:
            raise ValueError(f"batch_size must be at most {count} with drop_last, got {size}")
        return count // size

    @property
    def num_batches(self) -> int | None:
        """The number of batches of the first epoch, or ``None`` if the data have no length."""
        return self.num_batches_in(1)

    def num_batches_in(self, number: int) -> int | None:
        """Return the number of batches of an epoch, counted from one, if it is known."""
        if not self.cuts:
            return known_length(self.source)
        size = self._size_in(number)
        seed = self.lengths_seed
        # Only random lengths make the number differ between epochs of one batch size.
        key = size, 0 if seed is None else number
        if key not in self._counts:
            batches = (
                self.source.batches(size)
                if seed is None
                else self._batches(number, epoch_generator(seed, number))
            )
            self._counts[key] = self._full_batches.get(size) or known_length(batches)
        return self._counts[key]

    @property
    def smallest_batch(self) -> int | None:
        """The smallest batch size of the run, or ``None`` if the data come in batches."""
        return min(self._all_sizes()) if self.cuts else None

    @property
    def largest_batch(self) -> int | None:
        """The largest batch size of the run, or ``None`` if it is not known."""
        if self.cuts:
            size, count = max(self._all_sizes()), known_length(self.source)
            return min(size, count) if count else size
        if isinstance(self.source, list):
            return max(map(num_rows, self.source), default=None)
        return size_of_batches(self.source)

    def epoch(
        self,
        number: int,
        seed: int,
        *,
        skip: int = 0,
        inspect: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> Iterator[Batch]:
        """Return the batches of an epoch on the device; they depend on seed and number only.

        Args:
            number: Number of the epoch, counted from one; 0 is an evaluation.
            seed: Seed of the run.
            skip: Number of batches to leave out at the start. Those of a sequence are not created.
            inspect: Takes and returns each batch before it is moved to the device.
        """
        batches = self._batches(number, epoch_generator(seed, number))
        whole = self._full_batches.get(self._size_in(number))
        if isinstance(batches, Sequence) and (skip or whole is not None):
            batches, skip = batches[skip:whole], 0
        # A loader draws its order when iteration starts. Start now: the caller restores the state
        # of the generators before and after this call.
        remaining = islice(batches, whole)
        for _ in islice(remaining, skip):
            pass
        return (to_device(inspect(batch), self.device, non_blocking=True) for batch in remaining)

    def part(self, fraction: float) -> Iterator[Batch]:
        """Yield the rows of this process, of a fraction of the batches of an epoch."""
        count = self.num_batches
        if fraction < 1 and count is None:
            # The number of batches is unknown, so the data are read once to count them.
            count = sum(1 for _ in self.epoch(0, 0))
        stop = None if fraction == 1 or count is None else max(1, ceil(fraction * count))
        for batch in islice(self.epoch(0, 0), stop):
            rows, _, real = own_rows(batch)
            if real:
                yield rows

    def _batches(self, number: int, generator: torch.Generator) -> Iterable[Batch]:
        source = self.source
        if self.cuts:
            options: dict[str, Any] = {"generator": generator} if self.shuffled else {}
            if self.augment is not None:
                options["augment"] = self.augment
            if self.lengths_seed is not None:
                options["variable"] = True
            return source.batches(self._size_in(number), **options)  # type: ignore[no-any-return]
        if not isinstance(source, Iterable):
            return source(number)  # type: ignore[no-any-return]
        # DistributedSampler shuffles by the number of the epoch, which it must be told.
        sampler: Any = getattr(source, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        return source


def loader_generators(source: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given."""
    loaders = (source, getattr(source, "batch_sampler", None))
    places = [place for each in loaders for place in (each, getattr(each, "sampler", None))]
    generators = dict.fromkeys(getattr(place, "generator", None) for place in places)
    return [each for each in generators if isinstance(each, torch.Generator)]


def own_rows(batch: Batch) -> tuple[Batch, int, bool]:
    """Return the rows of this process, the number of rows of the batch, and whether rows are real.

    All processes must call the model equally often. If a batch has fewer rows than there are
    processes, a process without rows gets the first row of the batch. This row is not real: it has
    no weight in the loss.
    """
    count = num_rows(batch)
    if world_size() == 1:
        return batch, count, True
    rows = shard(count)
    real = rows.stop > rows.start
    return take_rows(batch, rows if real else slice(0, 1), count), count, real


def _in_memory(source: Any) -> Sequence[Batch] | None:
    """Return batches with all samples if these are in memory, otherwise ``None``."""
    if isinstance(source, Split):
        return [(source.inputs, source.targets)]
    if isinstance(source, TextSplit):
        return [(source.tokens, source.tokens)]
    if is_tensors(source):
        return [source]
    return source if isinstance(source, list | tuple) else None


# ------------------------------------------------------------------------------------------
# Data of any kind, sorted into training, validation and test data.

PARTS = ("train", "validation", "test")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataParts:
    """Data to train on and to evaluate on.

    Attributes:
        train: Samples as a tuple of tensors, an object with ``batches``, or batches.
        validation: Likewise, or ``None``.
        test: Likewise, or ``None``.
        augmentation: Usual augmentation of ``train``, or ``None``.
        num_classes: ``None`` if unknown.
        shape: Shape of one input; ``None`` if unknown.
        name: Name of the data in errors.
    """

    train: Any
    validation: Any = None
    test: Any = None
    augmentation: Any = None
    num_classes: int | None = None
    shape: tuple[int, ...] | None = None
    name: str = "given"


def as_parts(data: Any) -> DataParts:
    """Return the parts of data of any kind.

    Args:
        data: An object with ``train`` and ``test``, such as ``ritz.data.load`` returns; a
            dictionary with the key ``train`` and the optional keys ``validation`` and ``test``; a
            tuple ``(train, test)`` or ``(train, validation, test)``; or training data alone. Each
            part is a tuple ``(inputs, targets)`` of tensors or NumPy arrays, a torch dataset or
            loader, a list of batches, an object with ``batches``, or a function
            ``epoch -> batches``. A tuple of tensors or arrays is always ``(inputs, targets)``.
    """
    data = from_arrays(data)
    known: dict[str, Any] = {}
    if hasattr(data, "train") and not isinstance(data, Mapping):
        parts = {name: getattr(data, name, None) for name in PARTS}
        known = {
            name: getattr(data, name, None) for name in ("augmentation", "num_classes", "shape")
        }
    elif isinstance(data, Mapping):
        if "train" not in data or set(data) - set(PARTS):
            raise ValueError(
                f"data must have the parts train and perhaps validation and test, got "
                f"{', '.join(map(str, data)) or 'none'}"
            )
        parts = dict(data)
    elif isinstance(data, tuple) and len(data) in (2, 3) and not is_tensors(data):
        parts = dict(zip(PARTS if len(data) == 3 else ("train", "test"), data, strict=True))
    else:
        parts = {"train": data}
    plain: dict[str, Any] = {
        name: None if part is None and name != "train" else as_part(part, name)
        for name, part in parts.items()
    }
    return DataParts(**plain, **(known or _guess_shape(plain["train"])))


def takes_batch_size(source: Any) -> bool:
    """Return whether ``batch_size`` applies to data: loaders and lists yield finished batches."""
    return is_tensors(source) or hasattr(source, "batches")


def size_of_batches(source: Any) -> int | None:
    """Return the batch size of data that come in batches, or ``None`` if it is not known."""
    if isinstance(source, list):
        return num_rows(source[0]) if source else None
    size = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def with_own_batch_size(
    config: TrainingConfig, source: Any, *, chosen: bool = False
) -> TrainingConfig:
    """Return the options with the batch size of data that come in batches, ``None`` if not known.

    Args:
        config: Options of training.
        source: Training data.
        chosen: Whether the user passed ``batch_size``. So did they if it is not the default.
    """
    if takes_batch_size(source):
        return config
    size, wanted = size_of_batches(source), config.batch_size
    if chosen or wanted != TrainingConfig().batch_size:
        check_batch_size(wanted, source)
    return replace(config, batch_size=size)


def check_batch_size(wanted: Any, source: Any) -> None:
    """Raise if data come in batches of another size than the one that the user passed."""
    size = wanted if takes_batch_size(source) else size_of_batches(source)
    if wanted is not None and size not in (wanted, None):
        refuse_batch_size(wanted)


def refuse_batch_size(value: Any) -> NoReturn:
    """Raise because data that come in batches have their own batch size."""
    raise ValueError(
        f"batch_size must not be passed for data in batches, such as a DataLoader, got {value}: "
        "set it where the batches are made, or pass tensors or a dataset"
    )


def as_part(part: Any, name: str) -> Any:
    """Return a part as a tuple of tensors, an object with ``batches``, or batches."""
    part = from_arrays(part)
    if isinstance(part, TensorDataset):
        part = part.tensors
    # A list of batches holds tuples or dictionaries, so a list of tensors is (inputs, targets).
    if isinstance(part, list) and part and all(isinstance(x, Tensor) for x in part):
        part = tuple(part)
    if is_tensors(part):
        common_rows(part, f"{name} data")
        return part
    if isinstance(part, Dataset) and not isinstance(part, IterableDataset):
        part = IndexedData(part)
    if isinstance(part, IndexedData | list | DataLoader) and known_length(part) == 0:
        raise ValueError(f"{name} data must not be empty")
    if isinstance(part, Iterator):
        raise TypeError(
            f"{name} data must be readable once per epoch, got {type(part).__name__}, which can be "
            "read once only: use a list of batches, or a function of the epoch that returns batches"
        )
    if isinstance(part, tuple):
        raise TypeError(f"{name} data must be (inputs, targets), both tensors or arrays, got a "
                        f"tuple of {len(part)}: batches must be a list")  # fmt: skip
    # Texts and dictionaries can be iterated over, but are no batches.
    several = isinstance(part, Iterable) and not isinstance(part, Tensor | str | bytes | Mapping)
    # The first entry of a list must be a batch. Other iterables are not read here, because reading
    # might consume them.
    first = part[0] if isinstance(part, list) else ()
    batched = isinstance(first, tuple | list | Mapping) and (first == () or tensors(first))
    usable = hasattr(part, "batches") or (callable(part) and not isinstance(part, type))
    if usable or (several and batched):
        return part
    kind = f"{type(part).__name__} of {type(first).__name__}" if several else type(part).__name__
    raise TypeError(
        f"{name} data must be (inputs, targets), both tensors or arrays, a dataset, a "
        f"loader, or have batches(), got {kind}"
    )


def _guess_shape(train: Any) -> dict[str, Any]:
    """Return the shape of an input and the number of classes, if the data are tensors."""
    if isinstance(train, DataLoader) and isinstance(train.dataset, TensorDataset):
        train = train.dataset.tensors
    if not is_tensors(train) or len(train) < 2 or train[0].ndim < 2:
        return {}
    # Targets that are whole numbers are classes, counted from zero.
    classes = not train[-1].is_floating_point() and train[-1].numel()
    return {
        "shape": tuple(train[0].shape[1:]),
        "num_classes": int(train[-1].max()) + 1 if classes else None,
    }


# ------------------------------------------------------------------------------------------
# Subsets of the data for measurements.


def num_samples(source: Any) -> int | None:
    """Return the number of samples of data, or ``None`` if it is not known."""
    if isinstance(source, DataLoader):  # without a sampler the dataset yields batches
        return None if source.batch_sampler is None else known_length(source.dataset)
    if isinstance(source, list):
        return sum(num_rows(batch) for batch in source)
    return known_length(source[0] if is_tensors(source) else source)


def limited(source: Any, count: int, *, seed: int) -> Any:
    """Return ``count`` random samples; of a text, and of data without a length, the first ones."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(source, TextSplit):
        # A token needs a successor, which is its target.
        check_count("num_samples", count, low=2, high=len(source.tokens))
        return replace(source, tokens=source.tokens[:count])
    if (total := num_samples(source)) is not None:
        check_count("num_samples", count, high=total)
    pool = IndexedData(source) if is_tensors(source) else source
    if hasattr(pool, "batches") and hasattr(pool, "take"):
        taken = pool.take(count, generator=generator)
        return taken.batches(count)[0] if is_tensors(source) else taken
    if total is not None and isinstance(source, DataLoader | list):
        return draw_samples(source, count, seed)
    check_count("num_samples", count)
    batches: list[Any] = []
    for batch in source:  # of data without a length, the first samples
        size = num_rows(batch)
        batches.append(take_rows(batch, slice(count), size) if size > count else batch)
        count -= size
        if count <= 0:
            break
    return batches


def measurable(source: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
    """Return data in a form for ``ritz.Risk``, and keyword arguments of ``ritz.Risk``."""
    if is_tensors(source):
        return source, {"batch_size": batch_size}
    if isinstance(source, TextSplit):  # segments differ in length, so tokens are counted
        return source.batches(batch_size), {"count": lambda batch: batch[-1].numel()}
    return (source.batches(batch_size) if hasattr(source, "batches") else source), {}


def sample(source: Any, count: int, *, batch_size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return at most ``count`` samples, and keyword arguments, both for ``ritz.Risk``."""
    total = len(source.tokens) if isinstance(source, TextSplit) else num_samples(source)
    count = count if total is None else min(count, total)
    data, options = measurable(limited(source, count, seed=seed), batch_size)
    return (data if is_tensors(data) else list(data)), options


def first_batch(source: Any, *, count: int = 2) -> Any:
    """Return a few samples as one batch, or ``None`` if reading them would consume them."""
    if isinstance(source, TextSplit):  # without making all segments
        return replace(source, tokens=source.tokens[: source.length + 1]).batches(1)[0]
    if is_tensors(source):
        return tuple(tensor[:count] for tensor in source)
    if hasattr(source, "batches"):
        return next(iter(source.batches(count)), None)
    if isinstance(source, list):
        return source[0]
    # Iterating over a loader would draw from the generator that orders the samples.
    if isinstance(source, DataLoader) and isinstance(source.dataset, Sized):
        # The loader itself is not iterated: its samples are collated as it would collate them.
        indices = range(min(count, len(source.dataset)))
        batched = source.batch_sampler is None  # the dataset yields batches
        return None if batched else source.collate_fn([source.dataset[i] for i in indices])
    return None
