"""Edges that come one at a time with names and attributes, gathered without keeping objects."""

from array import array

import numpy as np
import torch
from torch import Tensor

from ritz.graphs.assembling import Records
from ritz.graphs.structures import GraphError

WEIGHT_NAMES = ("weight", "value")


class EdgeGatherer:
    """Vertices and edges of formats that declare both: 24 bytes an edge until assembled.

    Args:
        source: For messages.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.directed = False
        self._index: dict[str, int] = {}
        self._labels: dict[int, str] = {}
        self._ends = array("q")
        self._weights = array("d")

    def node(self, name: str, place: str) -> int:
        """Declare a vertex; return its index."""
        known = len(self._index)
        index = self._index.setdefault(name, known)
        if index < known and index in self._labels:
            raise GraphError(f"{place}: the vertex {name!r} is declared twice")
        self._labels[index] = name
        return index

    def label(self, index: int, text: str) -> None:
        """Name a vertex otherwise than by its id."""
        self._labels[index] = text

    def edge(self, u: str, v: str, weight: float | None) -> None:
        """Take an edge; its ends may be declared later."""
        for name in (u, v):
            self._ends.append(self._index.setdefault(name, len(self._index)))
        self._weights.append(1.0 if weight is None else weight)

    def records(self) -> Records:
        """Return what was gathered; an end that was never declared is an error."""
        if len(self._labels) < len(self._index):
            name = next(name for name, i in self._index.items() if i not in self._labels)
            raise GraphError(f"{self.source}: the vertex {name!r} has an edge but is not declared")
        n = len(self._index)
        names = tuple(self._labels[i] for i in range(n))
        records = Records(
            source=self.source,
            kind="arcs" if self.directed else "edges",
            num_nodes=n,
            names=simplified(names),
            directed=self.directed,
        )
        u, v = np.array(self._ends, dtype=np.int64).reshape(-1, 2).T
        records.add(u, v, np.array(self._weights))
        return records


def simplified(names: tuple[str, ...]) -> Tensor | tuple[str, ...] | None:
    """Return names as integers where all are, and nothing where vertex ``i`` is called ``i``."""
    if not all(_is_integer(name) for name in names):
        return names
    numbers = [int(name) for name in names]
    return None if numbers == list(range(len(names))) else torch.tensor(numbers)


def _is_integer(name: str) -> bool:
    # Written back it must be the same name: neither 007 nor +7 is 7.
    digits = name.removeprefix("-")
    plain = digits.isascii() and digits.isdigit() and len(digits) < 19
    return plain and str(int(name)) == name


def weight_of(place: str, text: str) -> float:
    """Return a weight, a finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        raise GraphError(f"{place}: the weight {text[:40]!r} is not a number") from None
    if not 0 <= value < float("inf"):
        kind = "negative" if value < 0 else "not a finite number"
        raise GraphError(f"{place}: the weight {text[:40]!r} is {kind}")
    return value
