"""What a study is, and how it is found, configured from text and written to a folder.

A study is a module of this package with a frozen ``Config`` that has a ``seed``, a function
``run(config, *, progress=False)`` and the ``Result`` it returns, both storable. It may have
``figure(result)``. A module in this folder is found by its name; nothing is registered by hand.
"""

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import platform
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import scipy
import torch
from torch import Tensor

from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.registry import Registry
from ritz._core.storage import save, storable
from ritz._version import __version__
from ritz.plots import save_figure

C = TypeVar("C")
T = TypeVar("T")


class Study(Protocol):
    """A module that reproduces one published table or figure."""

    __doc__: str | None
    Config: type[Any]

    def run(self, config: Any, *, progress: bool = False) -> Any:
        """Return the result of the study."""


def available() -> tuple[str, ...]:
    """Return the names of all studies."""
    return tuple(_registry())


def find(name: str) -> Study:
    """Return the study of that name; an unknown name raises and suggests similar ones."""
    # Names of modules have underscores; people type hyphens.
    module = _registry()[name.replace("-", "_")]
    return typing.cast(Study, importlib.import_module(f"{__package__}.{module}"))


def configure(config_class: type[C], overrides: Mapping[str, str]) -> C:
    """Return a configuration with some fields read from text, each by its type.

    Args:
        config_class: A dataclass whose fields are numbers, booleans, text, choices, or tuples
            of these (separated by commas). ``none`` is ``None``, where a field may be that.
        overrides: Field names and values; a name that is not a field raises.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     size: int = 100
        ...     steps: tuple[int, ...] = (5,)
        >>> configure(Config, {"size": "2_000", "steps": "5,15,30"})
        Config(size=2000, steps=(5, 15, 30))
    """
    kinds = typing.get_type_hints(config_class)
    fields = Registry[Any]("field of the configuration")
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        fields.register(field.name)(kinds[field.name])
    return config_class(
        **{name: _parse(name, text, fields[name]) for name, text in overrides.items()}
    )


def write(study: Study, result: Any, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the result, and its picture if Matplotlib is installed; return the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The numbers first: a figure that fails must not lose hours of work.
    save(result, folder / "result.safetensors")
    figure = getattr(study, "figure", None)
    if figure is None or importlib.util.find_spec("matplotlib") is None:
        return (folder / "result.safetensors",)
    from matplotlib import pyplot

    drawing = figure(result)
    picture = save_figure(drawing, folder / "figure.png", dpi=150)
    pyplot.close(drawing)  # pyplot holds every open figure, and a session may run many studies
    return folder / "result.safetensors", picture


# ------------------------------------------------------------------------------------------
# What studies share.


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "ritz": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult(Generic[C]):
    """What the result of every study has.

    Attributes:
        config: The configuration.
        versions: Versions of the libraries.
    """

    config: C
    versions: dict[str, str] = dataclasses.field(default_factory=versions)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[C]) -> type[C]:
    """Class decorator: a frozen dataclass with keywords only, which :func:`ritz.save` can store."""
    return storable(dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(cls))


def check_minimums(config: Any, **lows: float) -> None:
    """Raise unless each field of a configuration, or each of its entries, reaches its minimum."""
    for name, low in lows.items():
        value = getattr(config, name)
        # Tuples are checked entry by entry.
        for entry in value if isinstance(value, tuple) else (value,):
            check: Any = check_count if isinstance(low, int) else check_range
            check(name, entry, low=low)


def track(items: Collection[T], label: str, progress: bool | Progress) -> Iterator[T]:
    """Yield items, and report each of them to ``progress`` when it is done."""
    with tracking(progress, label, len(items)) as bar:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done)


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
    registry = Registry[str]("study")
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
        raise ValueError(f"{name} must be of type {kind.__name__}, got {text!r}") from error
