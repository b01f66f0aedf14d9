"""Graphs in GML and GraphML files."""

import re
from array import array
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat

import numpy as np
import torch
from torch import Tensor

from ritz.graphs._graph import GraphError
from ritz.graphs._io.assembly import Records
from ritz.graphs._io.source import CHUNK, MAX_LINE, Source

# ------------------------------------------------------------------------------------------
# Edges that come one at a time with names and attributes, gathered without keeping objects.

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


# ------------------------------------------------------------------------------------------
# Graphs in GML, read word by word: a Python step a word, but nothing of the text is kept.

_WORD = re.compile(rb'"[^"]*"?|[\[\]]|#[^\n]*|[^\s\[\]"#][^\s\[\]"]*')
_INTEGER = re.compile(r"[+-]?\d{1,18}")


def read_gml(source: Source, *, weights: str | bool | None) -> Records:
    """Return the edges of the first ``graph [...]`` of a file.

    Args:
        source: An open file.
        weights: The attribute of an edge that is its weight; ``None`` or ``True``: ``weight`` or
            ``value``; ``False``: none.
    """
    parser = _Parser(source.name, weights)
    for word, number in _words(source):
        parser.feed(word, number)
    return parser.finished()


def _words(source: Source) -> Iterator[tuple[str, int]]:
    """The words of a file with their lines; a string in quotes may go over several lines."""
    rest, begun = b"", 1
    for block, number in source.lines():
        text, line = rest + block, begun if rest else number
        rest, seen = b"", 0
        for match in _WORD.finditer(text):
            word, start = match.group(), match.start()
            line += text.count(b"\n", seen, start)
            seen = start
            if word[:1] == b'"' and (len(word) == 1 or word[-1:] != b'"'):
                rest, begun = text[start:], line
                break
            if word[:1] != b"#":
                yield word.decode("utf-8", "backslashreplace"), line
        if len(rest) > MAX_LINE:
            break
    if rest:
        raise GraphError(f"{source.name}, line {begun}: a string without its closing quote")


class _Parser:
    def __init__(self, name: str, weights: str | bool | None) -> None:
        self._name = name
        self._gatherer = EdgeGatherer(name)
        self._weight_names: tuple[str, ...] = ()
        if weights is not False:
            self._weight_names = (weights,) if isinstance(weights, str) else WEIGHT_NAMES
        self._asked = weights if isinstance(weights, str) else None
        self._path: list[str] = []
        self._key: str | None = None
        self._fields: dict[str, str] = {}
        self._graphs = 0
        self._place = name

    def feed(self, word: str, number: int) -> None:
        """Take the next word."""
        self._place = f"{self._name}, line {number}"
        if word == "]":
            self._close()
        elif self._key is None:
            if word in "[" or word[0] == '"':
                raise GraphError(f"{self._place}: expected a key, got {word[:40]!r}")
            self._key = word
        elif word == "[":
            self._open(self._key)
            self._key = None
        else:
            self._value(self._key, word)
            self._key = None

    def _open(self, key: str) -> None:
        self._path.append(key)
        if self._path == ["graph"]:
            self._graphs += 1
            if self._graphs > 1:
                raise GraphError(f"{self._place}: a second graph; a file must hold one")
        if len(self._path) == 2:
            self._fields = {}
        if len(self._path) > 100:
            raise GraphError(f"{self._place}: lists are nested more than 100 deep")

    def _close(self) -> None:
        if self._key is not None or not self._path:
            raise GraphError(f"{self._place}: a closing bracket without a list or a value")
        if self._path == ["graph", "node"]:
            self._node()
        elif self._path == ["graph", "edge"]:
            self._edge()
        self._path.pop()

    def _value(self, key: str, word: str) -> None:
        if self._path == ["graph"] and key == "directed":
            self._gatherer.directed = word == "1"
        elif len(self._path) == 2:
            self._fields.setdefault(key, word.strip('"'))

    def _node(self) -> None:
        index = self._gatherer.node(self._id("id"), self._place)
        if "label" in self._fields:
            self._gatherer.label(index, self._fields["label"])

    def _edge(self) -> None:
        found = next((n for n in self._weight_names if n in self._fields), None)
        weight = None if found is None else weight_of(self._place, self._fields[found])
        if found is None and self._asked is not None:
            raise GraphError(f"{self._place}: an edge without {self._asked!r}")
        self._gatherer.edge(self._id("source"), self._id("target"), weight)

    def _id(self, key: str) -> str:
        text = self._fields.get(key)
        if text is None:
            raise GraphError(f"{self._place}: {self._path[-1]} without {key}")
        if not _INTEGER.fullmatch(text):
            raise GraphError(f"{self._place}: {key} must be a whole number, got {text[:40]!r}")
        return str(int(text))

    def finished(self) -> Records:
        """Return the records once all words were taken."""
        if self._path or self._key is not None:
            raise GraphError(f"{self._name} ends within a list: truncated?")
        if not self._graphs:
            raise GraphError(f"{self._name} holds no graph [ ... ]")
        return self._gatherer.records()


# ------------------------------------------------------------------------------------------
# Graphs in GraphML, read by events: a Python step an element, and no tree is built.


def read_graphml(source: Source, *, weights: str | bool | None) -> Records:
    """Return the edges of the graph of a file; a document type or an entity is refused.

    Args:
        source: An open file.
        weights: The attribute of an edge that is its weight; ``None`` or ``True``: ``weight`` or
            ``value``; ``False``: none.
    """
    handler = _Handler(source.name, weights)
    try:
        while block := source.read(CHUNK):
            handler.parser.Parse(block, False)
        handler.parser.Parse(b"", True)
    except expat.ExpatError as error:
        reason = expat.errors.messages[error.code]
        raise GraphError(f"{source.name}, line {error.lineno}: XML: {reason}") from None
    return handler.finished()


class _Handler:
    def __init__(self, name: str, weights: str | bool | None) -> None:
        self._name = name
        self._gatherer = EdgeGatherer(name)
        self._asked = weights if isinstance(weights, str) else None
        self._wanted: tuple[str, ...] = ()
        if weights is not False:
            self._wanted = (self._asked,) if self._asked else WEIGHT_NAMES
        self._keys: dict[str, tuple[int, float | None]] = {}
        self._graphs = 0
        self._edge: dict[str, str] | None = None
        self._weight: tuple[int, float] | None = None
        self._text: list[str] | None = None
        self._data = ""
        self.parser = _safe_parser(name)
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters

    @property
    def _place(self) -> str:
        return f"{self._name}, line {self.parser.CurrentLineNumber}"

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        tag = tag.rpartition(":")[2]
        if tag == "node":
            self._gatherer.node(self._attribute(attributes, tag, "id"), self._place)
        elif tag == "edge":
            self._edge, self._weight = attributes, None
        elif tag == "data" and self._edge is not None and attributes.get("key") in self._keys:
            self._data, self._text = attributes["key"], []
        elif tag == "key" and attributes.get("for") in ("edge", "all"):
            self._declare(attributes)
        elif tag == "default" and self._data:
            self._text = []
        elif tag == "graph":
            self._graph(attributes)
        elif tag == "hyperedge":
            raise GraphError(f"{self._place}: a hyperedge is not an edge of a graph")

    def _declare(self, attributes: dict[str, str]) -> None:
        name = attributes.get("attr.name", "")
        if name in self._wanted:
            self._data = self._attribute(attributes, "key", "id")
            self._keys[self._data] = (self._wanted.index(name), None)

    def _graph(self, attributes: dict[str, str]) -> None:
        self._graphs += 1
        if self._graphs > 1:
            raise GraphError(f"{self._place}: a second graph; a file must hold one")
        self._gatherer.directed = attributes.get("edgedefault") == "directed"

    def _end(self, tag: str) -> None:
        tag = tag.rpartition(":")[2]
        if tag == "edge" and self._edge is not None:
            self._finish_edge(self._edge)
            self._edge = None
        elif tag in ("data", "default") and self._text is not None:
            rank = self._keys[self._data][0]
            value = weight_of(self._place, "".join(self._text).strip())
            if tag == "default":
                self._keys[self._data] = (rank, value)
            elif self._weight is None or rank < self._weight[0]:
                self._weight = (rank, value)
            self._text = None
        elif tag == "key":
            self._data = ""

    def _finish_edge(self, edge: dict[str, str]) -> None:
        if edge.get("directed") == "true":
            self._gatherer.directed = True
        weight = None if self._weight is None else self._weight[1]
        if weight is None:
            defaults = sorted(key for key in self._keys.values() if key[1] is not None)
            weight = defaults[0][1] if defaults else None
        if weight is None and self._asked is not None:
            raise GraphError(f"{self._place}: an edge without {self._asked!r}")
        source = self._attribute(edge, "edge", "source")
        self._gatherer.edge(source, self._attribute(edge, "edge", "target"), weight)

    def _attribute(self, attributes: dict[str, str], tag: str, name: str) -> str:
        if name not in attributes:
            raise GraphError(f"{self._place}: {tag} without {name}")
        return attributes[name]

    def _characters(self, text: str) -> None:
        if self._text is not None:
            self._text.append(text)
            if sum(map(len, self._text)) > MAX_LINE:
                raise GraphError(f"{self._place}: a weight longer than {MAX_LINE} characters")

    def finished(self) -> Records:
        """Return the records once the file was read."""
        if not self._graphs:
            raise GraphError(f"{self._name} holds no <graph>")
        return self._gatherer.records()


def _safe_parser(name: str) -> expat.XMLParserType:
    """A parser that refuses declarations, and with them entities that expand without bound."""
    parser = expat.ParserCreate()

    def refuse(*_: Any) -> None:
        line = parser.CurrentLineNumber
        raise GraphError(f"{name}, line {line}: a document type or an entity is declared")

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    return parser
