"""Names that users give: registered models, data and losses, or their own as ``module:factory``."""

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from inspect import isclass, isroutine
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz import data, models
from ritz._core.registry import Registry
from ritz.training._shared import DataParts, as_parts

# ------------------------------------------------------------------------------------------
# Which code the names in a run folder may lead to: a run folder is data, and anybody's.

# What is installed is not the user's own, even where it lies below the current folder.
INSTALLED = [
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
]
OURS = Path(__file__).resolve().parents[1]
PACKAGES = {"site-packages", "dist-packages"}


@final
class Trust:
    """What a user who names a run folder trusts: his own Python files below the current folder.

    Not those that came with the run: what lies in its folder, or with it in one folder of the
    current one. Nothing is imported before its place, and those of all packages around it, are
    known; and what is called must have been written there, not have been imported.

    That is all that is promised. A run may name any file, function, class or object of the user's
    own, and give it any arguments: importing a script runs it, and a function that removes a folder
    removes what the run says. Do not measure runs of strangers in a folder with scripts.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._here = Path.cwd().resolve()
        places = {Path(os.path.abspath(run)), run.resolve()}
        self._foreign = [self._brought_along(place) for place in places]

    @property
    def any_own(self) -> bool:
        """Whether the current folder may hold such files: not where it is, or is in, the run."""
        return not any(self._here.is_relative_to(place) for place in self._foreign)

    def check_module(self, name: str, target: str) -> None:
        """Raise unless importing a module, by its dotted name, runs the user's own files alone.

        One that nobody has is let pass: Python finds nothing to run, and says so.
        """
        top = name.split(".")[0]
        there = _is_there(top) or _spec_in(self._here, top) is not None
        if there and not self._is_own(name):
            raise ValueError(
                f"the run names {target!r}, which is not a Python file of your own in {self._here} "
                "outside the run: where you trust it, name it yourself (--model, --data, --loss)"
            )

    def check_callable(self, module: ModuleType, attribute: str, target: str) -> None:
        """Raise unless what is to be called was written in such a file, the module's or another.

        Functions and classes say where that was. An instance, such as a loss with its settings or
        a partial function, is the work of the module that holds it.
        """
        found = getattr(module, attribute)
        if attribute in vars(module) and not (isroutine(found) or isclass(found)):
            return
        name = getattr(found, "__module__", None)
        if not (isinstance(name, str) and self._is_own(name)):
            raise ValueError(
                f"the run names {target!r}, which was not written there but comes from {name}: "
                "where you trust it, name it yourself (--model, --data, --loss)"
            )

    def _brought_along(self, place: Path) -> Path:
        """The folder of the current one that a run came in; the current one if it is the run."""
        if not place.is_relative_to(self._here):
            return place
        parts = place.relative_to(self._here).parts
        return self._here / parts[0] if parts else self._here

    def _is_own(self, name: str) -> bool:
        parts, folder = name.split("."), self._here
        if not all(part.isidentifier() for part in parts):
            return False
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            # Not by the whole name, for which Python would import the packages around it.
            spec = _spec_in(folder, full)
            folder = folder / parts[depth - 1]
            file = None if spec is None else _source(spec)
            if spec is None or not self._may_run(file or folder):
                return False
            if file is None and not _is_bare_folder(spec, folder):
                return False
            if depth == 1 and not _comes_first(full, file, folder):
                return False
            if full in sys.modules and not _loaded_from(sys.modules[full], file, folder):
                return False
        return file is not None

    def _may_run(self, path: Path) -> bool:
        return all(self._is_within(place) for place in (path, path.resolve()))

    def _is_within(self, path: Path) -> bool:
        if not path.is_relative_to(self._here) or PACKAGES & set(path.parts):
            return False
        return not any(path.is_relative_to(place) for place in (*self._foreign, *INSTALLED, OURS))


def _is_there(top: str) -> bool:
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _spec_in(folder: Path, full: str) -> ModuleSpec | None:
    """What one folder has under the last part of a name; nothing is imported."""
    finder = pkgutil.get_importer(str(folder))
    if finder is None or not folder.is_dir():
        return None
    if hasattr(finder, "invalidate_caches"):
        finder.invalidate_caches()  # the file may be newer
    return finder.find_spec(full)


def _source(spec: ModuleSpec) -> Path | None:
    """The Python file of a module: not for compiled, built-in, frozen or zipped ones."""
    plain = type(spec.loader) is SourceFileLoader and spec.has_location and spec.origin
    return Path(spec.origin) if plain and spec.origin else None


def _is_bare_folder(spec: ModuleSpec, folder: Path) -> bool:
    """Whether it is a package without a file of its own: that folder, and no other with it."""
    return spec.loader is None and list(spec.submodule_search_locations or ()) == [str(folder)]


def _comes_first(top: str, file: Path | None, folder: Path) -> bool:
    """Whether Python, told to import the name, takes what is in the current folder."""
    if top in sys.modules:
        return True  # which is looked at itself
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    if file is None:
        return list(spec.submodule_search_locations or ()) == [str(folder)] and not spec.origin
    return _source(spec) == file


def _loaded_from(module: Any, file: Path | None, folder: Path) -> bool:
    origin = getattr(module, "__file__", None)
    if file is not None:
        return origin is not None and Path(origin) == file
    return origin is None and list(getattr(module, "__path__", ())) == [str(folder)]


# ------------------------------------------------------------------------------------------
# What users name: registered models, data and losses, or their own as ``module:factory``.

DATA, FROM_HERE = "--set-data", ("./", "../", "~/")
LOSSES: Registry[Callable[..., Any] | None] = Registry("loss")
for _name, _loss in (("cross_entropy", cross_entropy), ("mse", mse_loss), ("model", None)):
    LOSSES.register(_name)(_loss)  # "model": it returns its own


def make_model(
    target: str,
    *,
    parts: DataParts,
    options: Mapping[str, Any],
    seed: int = 0,
    written_in: Path | None = None,
) -> nn.Module:
    """Return a new model for some data, on the CPU.

    Args:
        target: A registered name, or ``module:factory``; the factory may take ``num_classes`` and
            ``input_shape``, and the options.
        parts: The data, which know these two.
        options: Keywords.
        seed: Of the first weights.
        written_in: The run folder that the name was read from, if it was.
    """
    known = {"num_classes": parts.num_classes, "input_shape": parts.shape}
    known = {name: value for name, value in known.items() if value is not None}
    if ":" in target:
        return _own_model(target, known, options, seed=seed, written_in=written_in)
    accepted = models.options(target)
    given = {name: value for name, value in known.items() if name in accepted} | dict(options)
    return models.create(target, generator=torch.Generator().manual_seed(seed), **given)


def _own_model(
    target: str,
    known: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    seed: int,
    written_in: Path | None,
) -> nn.Module:
    factory = own(target, written_in=written_in)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _called(target, factory, known, options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{target} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def make_data(
    target: str,
    *,
    data_dir: Path | None,
    options: Mapping[str, Any],
    written_in: Path | None = None,
) -> DataParts:
    """Return data, on the CPU.

    Args:
        target: A registered name, or ``module:factory``; the factory may take ``data_dir``, and
            the options. See ``ritz.training._data.as_parts`` for what it may return.
        data_dir: Folder of data sets.
        options: Keywords.
        written_in: The run folder that the name was read from, if it was.
    """
    if ":" not in target:
        return replace(as_parts(data.load(target, data_dir=data_dir, **options)), name=target)
    known = {} if data_dir is None else {"data_dir": data_dir}
    found = _called(target, own(target, written_in=written_in), known, options)
    try:
        return replace(as_parts(found), name=target)
    except (TypeError, ValueError) as error:
        raise type(error)(f"data {target}: {error}") from error


def loss_function(target: str, *, written_in: Path | None = None) -> Callable[..., Any] | None:
    """Return a loss by name, or as ``module:function``."""
    return own(target, written_in=written_in) if ":" in target else LOSSES[target]


def own(target: str, *, written_in: Path | None = None) -> Callable[..., Any]:
    """Return what ``module:factory`` names; modules of the current folder come first.

    A name that was ``written_in`` a run folder is followed as far as :class:`Trust` goes: to the
    user's own files alone, but to any function in them, with any arguments. So runs of strangers
    are not to be measured in a folder with scripts.
    """
    name, _, attribute = target.partition(":")
    if not (name and attribute and all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"{target!r} must be of the form module:factory")
    trust = None if written_in is None else Trust(written_in)
    with _current_folder_first() if trust is None or trust.any_own else nullcontext():
        if trust is not None:
            trust.check_module(name, target)
        module = _imported(name, target)
    found = getattr(module, attribute, None)
    if not callable(found) or isinstance(found, ModuleType):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ValueError(
            f"{target!r}: {name} has no function {attribute!r}{_near(attribute, public)}"
        )
    if trust is not None:
        trust.check_callable(module, attribute, target)
    return found  # type: ignore[no-any-return]


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Look in the current folder first, and afterwards last.

    Last for what a module imports when it is called: what is installed comes before files that
    happen to bear its name.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module took it out
            sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def parse_settings(option: str, settings: Iterable[str] | None) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs: as JSON, numbers separated by commas as a list, else as text."""
    found = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{option} takes KEY=VALUE, got {setting!r}")
        found[key.strip()] = _value(value.strip())
    return {key: _placed(value) for key, value in found.items()} if option == DATA else found


def _placed(value: Any) -> Any:
    """A path from here as one from the root: a run is measured from other folders too."""
    if not (isinstance(value, str) and value.startswith(FROM_HERE)):
        return value  # data sets look for bare names in folders of their own first
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() else value


def _value(text: str) -> Any:
    plain = text.replace("True", "true").replace("False", "false")
    with suppress(json.JSONDecodeError):
        return json.loads(plain)
    bracketed = plain.startswith("(") and plain.endswith(")")  # as Python writes several
    inner = plain[1:-1] if bracketed else plain
    with suppress(json.JSONDecodeError):
        several = json.loads(f"[{inner.strip().removesuffix(',')}]")
        if all(type(item) in (int, float) for item in several) and (several or bracketed):
            return several
    return text


def _imported(name: str, target: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
            raise ValueError(
                f"{target!r}: {name} needs a module that is not there: {error}"
            ) from error
        files = [path.stem for path in Path.cwd().glob("*.py")]
        raise ValueError(f"{target!r}: no module {name!r} in {Path.cwd()} or on the Python path"
                         f"{_near(name, files)}") from error  # fmt: skip
    except Exception as error:
        raise ValueError(f"{target!r}: importing {name} raised {_summary(error)}") from error


def _called(
    target: str, factory: Callable[..., Any], known: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    """What a factory returns, given of what is known what it has a name for, and all options."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        parameters = {}  # type: ignore[assignment]
    given = {name: value for name, value in known.items() if name in parameters} | dict(options)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in parameters and not takes_any:
            raise ValueError(f"{target!r} takes no option {name!r}{_near(name, parameters)}")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)  # fmt: skip
        if needed and name not in given:
            raise ValueError(f"{target!r} needs {name!r}, which is not known: give --set-model or "
                             f"--set-data {name}=VALUE")  # fmt: skip
    try:
        return factory(**given)
    except Exception as error:
        raise ValueError(f"{target!r} raised {_summary(error)}") from error


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
