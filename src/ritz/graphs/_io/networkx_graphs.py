"""Graphs from NetworkX objects, and GML and GraphML files through its readers."""

import io
import re
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ritz.graphs._graph import Array, GraphError
from ritz.graphs._io.assembly import Records
from ritz.graphs._io.source import Source

# ------------------------------------------------------------------------------------------
# Objects of NetworkX.


def from_networkx(x: Any, weight: Any, *, source: str) -> Records:
    """Return the edges of a NetworkX graph.

    Args:
        x: The graph.
        weight: Attribute that is the weight of an edge; an edge without it has weight one.
        source: Name for messages.
    """
    nodes = list(x.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    count = x.number_of_edges()
    ends = np.fromiter(
        (index[node] for edge in x.edges() for node in edge[:2]), np.int64, 2 * count
    )

    def numbers() -> Iterator[float]:
        for u, v, value in x.edges(data=weight, default=1.0):
            try:
                yield float(value)
            except (TypeError, ValueError, OverflowError):
                edge = f"the attribute {weight!r} of the edge {u!r} - {v!r}"
                raise TypeError(f"{edge} must be a number, got {repr(value)[:40]}") from None

    values = np.fromiter(numbers(), np.float64, count)
    check_weights(values, f"the attribute {weight!r}")
    names = None if nodes == list(range(len(nodes))) else integer_names(tuple(map(str, nodes)))
    # A directed graph whose arcs all have their reverse, of the same weight, is undirected.
    kind: Literal["arcs", "edges"] = "arcs" if x.is_directed() else "edges"
    records = Records(source=source, kind=kind, num_nodes=len(nodes), names=names)
    records.add(ends[0::2], ends[1::2], None if (values == 1).all() else values)
    return records


def check_weights(values: Array, name: str) -> None:
    """Raise unless all weights are finite and none is negative."""
    valid = np.isfinite(values) & (values >= 0)
    if not valid.all():
        bad = int(valid.argmin())
        raise GraphError(
            f"{name} must be finite and not negative, got {values[bad]} at entry {bad} of "
            f"{len(values)}"
        )


def integer_names(names: tuple[str, ...]) -> Tensor | tuple[str, ...] | None:
    """Return names as integers if all are, and ``None`` if vertex ``i`` is called ``i``."""
    # 007 and +7 are names that are not the integer 7.
    if not all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", name) for name in names):
        return names
    numbers = [int(name) for name in names]
    return None if numbers == list(range(len(names))) else torch.tensor(numbers)


# ------------------------------------------------------------------------------------------
# GML and GraphML: small files, whose whole text is given to the parsers of NetworkX.

_MAX_BYTES = 2**30  # of a file that is read at once; a decompressed file may be far larger
_WEIGHT_NAMES = ("weight", "value")
# Entities can expand without bound, and only a document type declares them.
_DECLARATION = re.compile(rb"<!(DOCTYPE|ENTITY)", re.IGNORECASE)


def read_markup(
    source: Source, *, kind: Literal["gml", "graphml"], weights: str | bool | None
) -> Records:
    """Return the edges of the graph in a GML or GraphML file.

    Args:
        source: An open file.
        kind: The format.
        weights: Attribute that is the weight of an edge. ``None`` or ``True``: ``weight`` or
            ``value``. ``False``: none.
    """
    try:
        import networkx
    except ImportError as error:
        raise ImportError(f"reading {kind} needs networkx: pip install 'ritz[graphs]'") from error
    data = source.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise GraphError(f"{source.name} has more than {_MAX_BYTES:,} bytes: use an edge list")
    if kind == "graphml" and _DECLARATION.search(data):
        raise GraphError(f"{source.name} declares a document type or an entity, which are refused")
    if kind == "graphml" and _count_tags(data, b"graph") > 1:
        raise GraphError(f"{source.name} holds a second graph; a file must hold one")
    try:
        # Warnings are about types and shapes of attributes that nobody reads here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _parse_gml(data) if kind == "gml" else networkx.read_graphml(io.BytesIO(data))
        _choose_weights(graph, weights)
        records = from_networkx(graph, "weight", source=source.name)
    except Exception as error:  # of whatever kind: the file is at fault, and not the caller
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise GraphError(f"{source.name} cannot be read as {kind}: {reason}") from None
    if kind == "graphml" and graph.number_of_nodes() > _count_tags(data, b"node"):
        raise GraphError(f"{source.name} has an edge whose vertex is not declared")
    if kind == "gml":
        labels = tuple(str(data.get("label", node)) for node, data in graph.nodes(data=True))
        records.names = integer_names(labels)
    records.directed = graph.is_directed()
    return records


def _count_tags(data: bytes, name: bytes) -> int:
    return len(re.findall(rb"<(?:\w+:)?" + name + rb"[\s/>]", data))


def _parse_gml(data: bytes) -> Any:
    import networkx

    text = data.decode("utf-8-sig", "backslashreplace").encode("ascii", "xmlcharrefreplace")
    # NetworkX refuses an edge that is listed twice unless the file says that it may be.
    text = re.sub(rb"(?m)^([ \t]*graph\s*\[)", rb"\1 multigraph 1 ", text, count=1)
    return networkx.parse_gml(text.decode(), label="id")


def _choose_weights(graph: Any, weights: str | bool | None) -> None:
    """Set the attribute ``weight`` of every edge to the chosen attribute, or its default, or 1."""
    names = (weights,) if isinstance(weights, str) else _WEIGHT_NAMES * (weights is not False)
    defaults = graph.graph.get("edge_default", {})
    for u, v, data in graph.edges(data=True):
        values = [table[name] for table in (data, defaults) for name in names if name in table]
        if isinstance(weights, str) and not values:
            raise GraphError(f"the edge {u!r} - {v!r} has no attribute {weights!r}")
        data["weight"] = values[0] if values else 1.0
