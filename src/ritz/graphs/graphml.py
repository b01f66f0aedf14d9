"""Graphs in GraphML, read by events: a Python step an element, and no tree is built."""

from typing import Any
from xml.parsers import expat

from ritz.graphs.assembling import Records
from ritz.graphs.attributed import WEIGHT_NAMES, EdgeGatherer, weight_of
from ritz.graphs.sources import CHUNK, MAX_LINE, Source
from ritz.graphs.structures import GraphError


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
