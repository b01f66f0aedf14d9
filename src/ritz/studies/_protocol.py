"""Find, configure and run a study, and write its result to a folder; what studies share.

A study is a module of this package with a frozen ``Config`` that has a ``seed``, a function
``run(config, *, progress=False)`` and the ``Result`` it returns, both storable. It may have

* ``SIZES``, configurations by name: ``smoke`` takes seconds, ``gpu`` minutes on a GPU, and
  ``paper`` is as published. The default ``Config()`` is ``small``: minutes on two cores.
* a keyword ``state`` of ``run``, a path from which an interrupted run resumes; see
  :func:`compute_cells`.
* a field ``max_seconds`` of ``Config``, after which ``run`` begins no further cell, and a field
  ``missing`` of ``Result`` with the names of the cells that were left out; see :class:`TimeLimit`.
* ``figure(result)``.
* ``evidence(result)``, which compares the result with what was published, and ``setting(result)``,
  one line on its network and data; see ``_evidence.py``.

A module in this folder is found by its name; nothing is registered by hand.
"""

import dataclasses
import datetime
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import pkgutil
import platform
import time
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, final

import numpy as np
import scipy
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.journal import Journal, Parts, remove_state
from ritz._core.progress import Progress, tracking
from ritz._core.registry import Registry
from ritz._core.storage import save, storable
from ritz._version import __version__
from ritz.plots import save_figure

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")
StatePath = str | os.PathLike[str] | None
STATE = "state"  # name of the file with the finished parts


class Study(Protocol):
    """A module that reproduces one published table or figure."""

    __doc__: str | None
    Config: type[Any]

    def run(self, config: Any, *, progress: bool | Progress = False, **state: Any) -> Any:
        """Return the result of the study."""


def available() -> tuple[str, ...]:
    """Return the names of all studies."""
    return tuple(_registry())


def find(name: str) -> Study:
    """Return the study of that name; an unknown name raises and suggests similar ones."""
    # Names of modules have underscores; people type hyphens.
    module = _registry()[name.replace("-", "_")]
    return typing.cast(Study, importlib.import_module(f"{__package__}.{module}"))


def configure(config: C | type[C], overrides: Mapping[str, str]) -> C:
    """Return a configuration with some fields read from text, each by its type.

    Args:
        config: A dataclass, or its class for the defaults. Its fields are numbers, booleans, text,
            choices, or tuples of these (separated by commas). ``none`` is ``None``, where a field
            may be that.
        overrides: Field names and values; a name that is not a field raises.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     size: int = 100
        ...     steps: tuple[int, ...] = (5,)
        >>> configure(Config, {"size": "2_000", "steps": "5,15,30"})
        Config(size=2000, steps=(5, 15, 30))
    """
    # The class stands for its defaults.
    base = config() if isinstance(config, type) else config
    kinds = typing.get_type_hints(type(base))
    # A registry suggests similar names for an unknown one.
    fields = Registry[Any]("option of the study")
    for field in dataclasses.fields(base):  # type: ignore[arg-type]
        fields.register(field.name)(kinds[field.name])
    values = {name: _parse(name, text, fields[name]) for name, text in overrides.items()}
    changed: C = dataclasses.replace(base, **values)  # type: ignore[type-var]
    return changed


def sized(study: Study, size: str) -> Any:
    """Return the configuration for a size: ``smoke``, ``small``, ``gpu`` or ``paper``."""
    sizes = {"small": study.Config()} | dict(getattr(study, "SIZES", {}))
    check_choice("size", size, sizes)
    return sizes[size]


def run(
    study: Study,
    config: Any,
    folder: str | os.PathLike[str],
    *,
    progress: bool | Progress = False,
) -> Any:
    """Return the result of a study. Finished parts are saved in ``folder`` until :func:`write`."""
    # Studies that take seconds do not resume.
    if "state" not in inspect.signature(study.run).parameters:
        return study.run(config, progress=progress)
    Path(folder).mkdir(parents=True, exist_ok=True)
    return study.run(config, progress=progress, state=Path(folder) / STATE)


def write(study: Study, result: Any, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the result, and its picture if Matplotlib is installed; return the files.

    The state of the run in the folder is removed, unless the result has missing cells: the same
    configuration with more time then computes these cells only.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Save the numbers first, so that a figure that fails does not lose hours of work.
    save(result, folder / "result.safetensors")
    if not getattr(result, "missing", ()):
        remove_state(folder / STATE)
    figure = getattr(study, "figure", None)
    if figure is None or importlib.util.find_spec("matplotlib") is None:
        return (folder / "result.safetensors",)
    from matplotlib import pyplot

    drawing = figure(result)
    picture = save_figure(drawing, folder / "figure.png", dpi=150)
    pyplot.close(
        drawing
    )  # pyplot keeps every open figure in memory, and a session may run many studies
    return folder / "result.safetensors", picture


# ------------------------------------------------------------------------------------------
# What studies share.


def versions() -> dict[str, str]:
    """Return the versions and the machine that a result depends on, and the date."""
    cuda = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores"
    return {
        "ritz": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": machine,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult(Generic[C]):
    """What the result of every study has.

    Attributes:
        config: The configuration.
        versions: Versions of the libraries, the machine and the date.
    """

    config: C
    versions: dict[str, str] = dataclasses.field(default_factory=versions)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[C]) -> type[C]:
    """Class decorator: a frozen dataclass with keywords only, which :func:`ritz.save` can store."""
    return storable(dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls))


def check_minimums(config: Any, **lows: float) -> None:
    """Raise unless each field of a configuration, or each of its entries, reaches its minimum.

    A field of several entries must have one. ``None``, for a value that is found later, passes.
    """
    for name, low in lows.items():
        value = getattr(config, name)
        if value == ():
            raise ValueError(f"{name} must have at least one entry, got none")
        # Tuples are checked entry by entry.
        for entry in value if isinstance(value, tuple) else (value,):
            check: Any = check_count if isinstance(low, int) else check_range
            if entry is not None:
                check(name, entry, low=low)


def check_entries(config: Any, **choices: Collection[str]) -> None:
    """Raise unless each field of a configuration has entries, all of them among its choices."""
    for name, known in choices.items():
        entries = getattr(config, name)
        if not entries:
            raise ValueError(f"{name} must not be empty; choices are {', '.join(known)}")
        for entry in entries:
            check_choice(name, entry, known)


def track(items: Collection[T], label: str, progress: bool | Progress) -> Iterator[T]:
    """Yield items, and report each of them to ``progress`` when it is done."""
    with tracking(progress, label, len(items)) as bar:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done)


@final
class TimeLimit:
    """Wall-clock limit of a study, which begins no cell that would probably end after it.

    A cell is assumed to take as long as the longest one so far.

    Args:
        seconds: Seconds from now. ``None`` is no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._began, self._longest = 0.0, 0.0

    def begin(self) -> bool:
        """Return whether there is time for another cell, which begins now."""
        self._began = time.monotonic()
        return self._began + self._longest <= self._end

    def end(self) -> None:
        """Note that the cell has ended."""
        self._longest = max(self._longest, time.monotonic() - self._began)


def compute_cells(
    compute: Callable[[T], R] | Callable[[T, StatePath], R],
    cells: Mapping[str, T],
    label: str,
    *,
    config: Any,
    state: StatePath = None,
    limit: TimeLimit | None = None,
    progress: bool | Progress = False,
) -> dict[str, R]:
    """Return ``compute(cell)`` for each named cell of a table.

    Cells for which no time is left are missing in the result.

    Args:
        compute: Returns the result of a cell, which must be storable: tensors, plain values and
            results of ritz. A second parameter called ``state`` takes a path for its own state.
        cells: Arguments of ``compute`` by the names of the cells.
        label: Label of the progress bar.
        config: The configuration. A saved state of another one is refused, unless only its
            ``max_seconds`` differs.
        state: Path where finished cells are saved, and read when the study is run again.
        limit: Limit of the time of all cells.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    finished = Parts(Journal(state, {"config": timeless(config)}))
    saves = "state" in inspect.signature(compute).parameters

    def one(cell: T, *, state: StatePath) -> R:
        call: Callable[..., R] = compute
        return call(cell, state) if saves else call(cell)

    results: dict[str, R] = {}
    for name, cell in track(cells.items(), label, progress):
        # Finished cells cost no time.
        if name in finished or limit is None:
            results[name] = finished.get(name, functools.partial(one, cell))
        elif limit.begin():
            results[name] = finished.get(name, functools.partial(one, cell))
            limit.end()
    return results


def timeless(config: Any) -> str:
    """Return a configuration as text, without the limit of its time, which changes no cell."""
    if getattr(config, "max_seconds", None) is not None:
        config = dataclasses.replace(config, max_seconds=None)
    return repr(config)


def compute_by_seed(
    compute: Callable[[str, int], Tensor],
    names: Iterable[str],
    *,
    config: Any,
    state: StatePath = None,
    progress: bool | Progress = False,
) -> Tensor:
    """Return ``compute(name, seed)`` for every seed and name, ``(num_seeds, names, ...)``.

    Args:
        compute: Returns the numbers of one run.
        names: Names of the runs of every seed.
        config: The configuration, with ``seed`` and ``num_seeds``.
        state: Path where finished runs are saved; see :func:`compute_cells`.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    seeds = range(config.seed, config.seed + config.num_seeds)
    # All runs of one seed first, so that an unfinished table compares runs.
    cells = {f"{name} {seed}": (name, seed) for seed, name in itertools.product(seeds, names)}
    runs = compute_cells(
        lambda cell: compute(*cell), cells, "runs", config=config, state=state, progress=progress
    )
    table: Tensor = torch.stack(list(runs.values())).unflatten(0, (len(seeds), -1))
    return table


def seeded(seed: int) -> torch.Generator:
    """Return a new generator."""
    return torch.Generator().manual_seed(seed)


def column(values: Iterable[float]) -> Tensor:
    """Return numbers as a tensor in float64."""
    return torch.tensor(list(values), dtype=torch.float64)


def row(title: str, values: Iterable[Any], spec: str, *, width: int = 20) -> str:
    """Return a line of a table: a title of some width, and the values in one format."""
    # A format applies to numbers, not to tensors.
    numbers = values.tolist() if isinstance(values, Tensor) else values
    return f"{title:{width}}" + "".join(f"{value:{spec}}" for value in numbers)


def data_file(name: str, folder: str | None, *, fields: str) -> Path:
    """Return the path of a data file, or say where it was looked for.

    Args:
        name: Path of the file below the folder.
        folder: Folder of the configuration; defaults to the environment variable ``RITZ_DATA``.
        fields: Fields of the configuration that choose other files.
    """
    folder = folder or os.environ.get("RITZ_DATA")
    if folder is None:
        raise FileNotFoundError(
            f"no folder for {name!r}: give data= (--set data=FOLDER), or set RITZ_DATA"
        )
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {name!r} in {folder!r}: give data= (--set data=FOLDER) or set RITZ_DATA, or "
            f"choose other files with {fields}"
        )
    return path


def _registry() -> Registry[str]:
    package = importlib.import_module(__package__ or "ritz.studies")
    registry = Registry[str]("study", listing="ritz list studies")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            registry.register(module.name)(module.name)
    return registry


def _parse(name: str, text: str, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_parse(name, item, arguments[0]) for item in text.split(","))
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in arguments:
            return None
        # Of "int | None" the other type.
        return _parse(name, text, next(kind for kind in arguments if kind is not type(None)))
    # bool("false") is True, so booleans are choices too.
    if origin is Literal or kind is bool:
        choices = {str(value).lower(): value for value in arguments or (False, True)}
        if text.lower() not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {text!r}")
        return choices[text.lower()]
    try:
        return kind(text)
    except ValueError as error:
        number = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {number}, got {text!r}") from error
