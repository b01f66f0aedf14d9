"""`Registry`: models, optimisers and other things by name, with a hint for unknown names."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownNameError(KeyError, ValueError):
    """Nothing is registered under this name. The message suggests similar names."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError shows its message in quotes


class Registry(Generic[T]):
    """Table of entries by name. Registering a name twice raises; unknown names get suggestions.

    Args:
        kind: What an entry is, for messages.
        listing: Command that lists all names, if they do not fit in a message.
    """

    def __init__(self, kind: str, *, listing: str = "") -> None:
        self._kind, self._listing = kind, listing
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its target under ``name``."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"the {self._kind} {name!r} is registered already")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        hint = suggest(name, self, listing=self._listing)
        raise UnknownNameError(f"no {self._kind} is named {name!r}; {hint}")

    def find(self, name: str) -> T:
        """Return an entry, ignoring case, ``-`` and ``_`` in its name.

        An exact match comes first. A name that matches several entries raises.
        """
        alike = [known for known in self._entries if _fold(known) == _fold(name)]
        return self[alike[0] if len(alike) == 1 and name not in self else name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def suggest(name: str, known: Iterable[str], *, listing: str = "") -> str:
    """Return a hint for an unknown name: similar names, else where all are listed, else all."""
    # difflib compares characters, so "ADAM" would be far from "adam".
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=3)
    # "gadam" is far from "gadam/vgg16/cifar10", which contains it.
    close = close or [each for each in lower if name and str(name).lower() in each][:3]
    if close:
        return f"did you mean {' or '.join(lower[each] for each in close)}?"
    return f"see {listing}" if listing else f"known: {', '.join(lower.values())}"


def _fold(name: str) -> str:
    # "Gadam-X", "gadam_x" and "gadamx" are one name.
    return name.lower().replace("-", "").replace("_", "")
