"""``read``: graphs from files. NetworkX parses GML and GraphML."""

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io.assembly import MAX_NODES, Records, Rules, assemble, check_weights
from ritz.graphs._io.lines import (
    BANNER,
    CHUNK,
    Source,
    open_source,
    peek,
    read_edge_list,
    read_matrix_market,
    read_metis,
)

# ------------------------------------------------------------------------------------------
# Objects of NetworkX.


def from_networkx(x: Any, weight: Any, *, source: str) -> Records:
    """Return the edges of a NetworkX graph.

    Args:
        x: The graph.
        weight: Attribute that is the weight of an edge; an edge without it has weight one. With
            ``False`` all edges have weight one.
        source: Name for messages.
    """
    nodes = list(x.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    count = x.number_of_edges()
    ends = np.fromiter(
        (index[node] for edge in x.edges() for node in edge[:2]), np.int64, 2 * count
    )

    def numbers() -> Iterator[float]:
        for u, v, value in x.edges(data=weight, default=1.0) if weight is not False else ():
            try:
                yield float(value)
            except (TypeError, ValueError, OverflowError):
                edge = f"the attribute {weight!r} of the edge {u!r} - {v!r}"
                raise TypeError(f"{edge} must be a number, got {repr(value)[:40]}") from None

    values = np.fromiter(numbers(), np.float64)
    check_weights(values, f"the attribute {weight!r}")
    names = None if nodes == list(range(len(nodes))) else integer_names(tuple(map(str, nodes)))
    # A directed graph whose arcs all have their reverse, of the same weight, is undirected.
    kind: Literal["arcs", "edges"] = "arcs" if x.is_directed() else "edges"
    records = Records(source=source, kind=kind, num_nodes=len(nodes), names=names)
    records.add(ends[0::2], ends[1::2], None if (values == 1).all() else values)
    return records


def integer_names(names: tuple[str, ...]) -> Tensor | tuple[str, ...] | None:
    """Return names as integers if all are, and ``None`` if vertex ``i`` is called ``i``."""
    # 007 and +7 are names that are not the integer 7.
    if not all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", name) for name in names):
        return names
    numbers = [int(name) for name in names]
    return None if numbers == list(range(len(names))) else torch.tensor(numbers)


# ------------------------------------------------------------------------------------------
# GML and GraphML: small files, whose whole text is passed to the parsers of NetworkX.

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
    data = source.whole(iter(lambda: source.read(CHUNK), b""))
    if kind == "graphml" and _DECLARATION.search(data):
        raise GraphError(f"{source.name} has a DOCTYPE or ENTITY declaration, which is not safe")
    if kind == "graphml" and _count_tags(data, b"graph") > 1:
        raise GraphError(f"{source.name} contains more than one graph")
    try:
        # Ignore warnings about attributes, which are not read.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _parse_gml(data) if kind == "gml" else networkx.read_graphml(io.BytesIO(data))
        _choose_weights(graph, weights)
        records = from_networkx(graph, "weight", source=source.name)
    except Exception as error:  # parsers raise many kinds of errors for invalid files
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


# ------------------------------------------------------------------------------------------
# Files of all formats.

Format = Literal["edges", "mtx", "gml", "graphml", "metis"]
_READERS: dict[Format, Callable[..., Records]] = {
    "edges": read_edge_list,
    "mtx": read_matrix_market,
    "gml": read_markup,
    "graphml": read_markup,
    "metis": read_metis,
}
_SUFFIXES: dict[str, Format] = {
    ".gml": "gml",
    ".graphml": "graphml",
    ".xml": "graphml",
    ".metis": "metis",
    ".graph": "metis",
    ".mtx": "mtx",
}
# This pattern looks at each byte at most twice, whatever the text.
_GML = re.compile(rb"(?m)^[ \t]*graph\s*\[")


def read(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    directed: Literal["drop", "refuse"] = "drop",
    weights: bool | str | None = None,
    self_loops: Literal["drop", "keep", "refuse"] = "drop",
    multi_edges: Literal["merge", "sum", "refuse"] = "merge",
    num_nodes: int | None = None,
    errors: Literal["raise", "report"] = "raise",
    largest_component: bool = False,
    progress: bool | Progress = False,
) -> Graph:
    r"""Return the undirected graph of a file, plain or compressed by gzip, bzip2 or xz.

    Args:
        path: An edge list, Matrix Market, GML, GraphML or METIS. A line of an edge list has two
            vertices and perhaps a weight, separated by spaces, tabs, commas or semicolons; ``#``
            and ``%`` begin comments. Vertices are numbers below :math:`2^{63}`. If most lines have
            words with letters instead, these are names: vertices are numbered as they occur, and
            ``graph.names`` has the names.
        format: ``edges``, ``mtx``, ``gml``, ``graphml`` or ``metis``. By default it is detected
            from the content and the file name.
        directed: What to do with a directed graph: ``drop`` the directions (an arc and its reverse
            become one edge with the larger weight), or ``refuse`` it. A file is directed if it
            says so, if its matrix is not symmetric, or if an edge list has some edges in both
            orders and others in one.
        weights: In an edge list: ``None`` uses a third column as the weight if there is one,
            ``True`` requires it, ``False`` ignores it (such as time stamps). In GML and GraphML:
            the name of the attribute, by default ``weight`` or ``value``; an edge without it has
            weight one. Weights must be finite and not negative. An edge of weight zero is no edge.
        self_loops: ``drop``; ``keep`` as one entry :math:`W_{ii}`, which counts once in the
            degree; or ``refuse``.
        multi_edges: What to do with an edge that is listed more than once: ``merge`` into one with
            the largest weight; ``sum`` the weights (without weights, the weight becomes the number
            of repetitions); or ``refuse``. In an edge list, ``u v`` and ``v u`` are the same edge,
            and ``refuse`` accepts one of each, but not two of either.
        num_nodes: In an edge list: vertices are ``0 .. num_nodes - 1``, and those without an edge
            are isolated. By default the vertices are the ids that occur, in ascending order. In
            Matrix Market and METIS it must equal the number in the header. There it is only needed
            for files with millions of vertices and few edges, which are refused otherwise.
        errors: ``raise`` at the first invalid line and name it, or ``report``: skip such lines and
            count them in ``graph.intake`` (edge lists and Matrix Market coordinates).
        largest_component: Return the largest connected component only.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Raises:
        GraphError: The file does not hold such a graph; the message has its name and the reason.
        FileNotFoundError: There is no such file.
        ImportError: The file is GML or GraphML, and NetworkX is not installed.

    Cost: edge lists, Matrix Market and METIS are read in blocks by NumPy, at about three times the
    memory of the graph (8 bytes per edge, 24 with weights). NetworkX reads GML and GraphML, at
    about a kilobyte per edge.
    """
    check_choice("errors", errors, ("raise", "report"))
    rules = Rules(directed=directed, self_loops=self_loops, multi_edges=multi_edges)
    head = peek(path)
    kind = _guess(Path(path), head) if format is None else format
    check_choice("format", kind, _READERS)
    markup = kind in ("gml", "graphml")
    if isinstance(weights, str) and not markup:
        raise ValueError(f"weights may name an attribute in GML and GraphML, got {weights!r}")
    if num_nodes is not None:
        num_nodes = check_count("num_nodes", num_nodes, high=MAX_NODES)
    if num_nodes is not None and markup:
        raise ValueError(f"num_nodes cannot be used with {kind}, which declares each vertex")
    if errors == "report" and kind not in ("edges", "mtx"):
        raise ValueError(f'errors must be "raise" for {kind}, got "report"')
    options: Any = {"kind": kind} if markup else {"num_nodes": num_nodes}
    if kind in ("edges", "mtx"):
        options["strict"] = errors == "raise"
    with open_source(path, progress) as source:
        records = _READERS[kind](source, weights=weights, **options)
    graph = assemble(records, rules)
    return graph.largest_component() if largest_component else graph


def _guess(path: Path, head: bytes) -> Format:
    """Return the format by the first bytes if they are distinctive, otherwise by the suffix."""
    # XML and the banner of Matrix Market cannot begin an edge list, nor can "graph [".
    start = head.lstrip()
    if start[: len(BANNER)].lower() == BANNER.lower():
        return "mtx"
    if start.startswith(b"<"):
        return "graphml"
    if _GML.search(head):
        return "gml"
    packed = (".gz", ".bz2", ".xz")
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in packed]
    return _SUFFIXES.get(suffixes[-1], "edges") if suffixes else "edges"
