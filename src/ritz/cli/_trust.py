"""Which code the names in a run folder may lead to: a run folder is data, and anybody's."""

import importlib.util
import os
import pkgutil
import sys
import sysconfig
from importlib.machinery import ModuleSpec, SourceFileLoader
from inspect import isclass, isroutine
from pathlib import Path
from types import ModuleType
from typing import Any, final

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
