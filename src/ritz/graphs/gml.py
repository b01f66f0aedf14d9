"""Graphs in GML, read word by word: a Python step a word, but nothing of the text is kept."""

import re
from collections.abc import Iterator

from ritz.graphs.assembling import Records
from ritz.graphs.attributed import WEIGHT_NAMES, EdgeGatherer, weight_of
from ritz.graphs.sources import MAX_LINE, Source
from ritz.graphs.structures import GraphError

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
