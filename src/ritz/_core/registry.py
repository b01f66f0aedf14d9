"""Things chosen by name: models, data sets, optimisers, losses and studies."""

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownNameError(KeyError):
    """A name nothing is registered under; the message suggests the nearest ones."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show its message quoted


class Registry(Generic[T]):
    """Names to things. Registering a name twice raises; asking for a wrong one suggests others."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files its target under ``name``."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"the {self._kind} {name!r} is registered already")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        small = {known.lower(): known for known in self._entries}
        close = [small[match] for match in difflib.get_close_matches(name.lower(), small, n=3)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(self)}"
        raise UnknownNameError(f"no {self._kind} is named {name!r}; {hint}")

    def find(self, name: str) -> T:
        """What a name stands for in any hand: capitals, ``-`` and ``_`` tell no two apart.

        A name that is spelt right comes first; where several others read alike, none is chosen.
        """
        alike = [known for known in self._entries if _folded(known) == _folded(name)]
        return self[alike[0] if len(alike) == 1 and name not in self else name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
