"""Graphs from files of the usual formats."""

import os
import re
from pathlib import Path
from typing import Literal

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io.assembly import MAX_NODES, Records, Rules, assemble
from ritz.graphs._io.columns import Layout, LineReader
from ritz.graphs._io.markup_formats import read_gml, read_graphml
from ritz.graphs._io.matrix_formats import BANNER, read_matrix_market, read_metis
from ritz.graphs._io.source import Source, open_source, peek

Format = Literal["edges", "mtx", "gml", "graphml", "metis"]
FORMATS = ("edges", "mtx", "gml", "graphml", "metis")
_SUFFIXES: dict[str, Format] = {
    ".gml": "gml",
    ".graphml": "graphml",
    ".xml": "graphml",
    ".metis": "metis",
    ".graph": "metis",
    ".mtx": "mtx",
}
# Written so that no text makes it look at a byte more than twice.
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
    r"""Return the undirected graph of a file, plain or gzip.

    Args:
        path: An edge list (two ids of at most 64 bits and perhaps a weight a line, separated by
            spaces, tabs or commas; ``#`` and ``%`` begin comments), Matrix Market (coordinate),
            GML, GraphML or METIS.
        format: ``edges``, ``mtx``, ``gml``, ``graphml`` or ``metis``; ``None``: told from the
            first bytes and the name.
        directed: What to do with a directed graph: ``drop`` the directions (an arc and its
            reverse are one edge, of the larger weight), or ``refuse`` it. A file is directed if
            it says so, if its matrix is not symmetric, or if a list names some edges in both
            orders and others in one.
        weights: Of an edge list: ``None``, a third column is the weight; ``True``, there must be
            one; ``False``, columns after the second are passed over (a list with times needs
            it). Of GML and GraphML: the name of the attribute, else ``weight`` or ``value``; an
            edge without it has weight one. Weights are finite and not negative; an edge of weight
            zero is no edge.
        self_loops: ``drop``, ``keep`` (one entry :math:`W_{ii}`, once in the degree) or
            ``refuse``.
        multi_edges: An edge named more than once, in a list in either order: ``merge`` makes it
            one, of the largest weight; ``sum`` adds the weights (unweighted: it counts);
            ``refuse`` raises (in a list: when named twice in one order).
        num_nodes: Of an edge list: vertices are ``0 .. num_nodes - 1``, those without an edge
            isolated. ``None``: vertices are the ids that occur, in ascending order. Of Matrix
            Market and METIS, whose vertices are called ``1 .. n`` and are counted in the header:
            the same number, for files that declare millions of vertices for next to no edges and
            are refused otherwise.
        errors: ``raise`` at the first line that cannot be read, with its number, or skip, count
            and ``report`` such lines in ``graph.intake`` (edge lists and Matrix Market).
        largest_component: Return the largest connected component alone.
        progress: Show a bar, or report to an object.

    Raises:
        GraphError: The file is not such a graph; the message has its name, the line and why.
        FileNotFoundError: There is no such file.

    Cost: lists, Matrix Market and METIS are read by arrays; GML and GraphML by a Python step a
    word. Memory: two to three times that of the graph (8 bytes an edge, 24 with weights).
    """
    check_choice("errors", errors, ("raise", "report"))
    rules = Rules(directed=directed, self_loops=self_loops, multi_edges=multi_edges)
    head = peek(path)
    kind = _guess(Path(path), head) if format is None else format
    check_choice("format", kind, FORMATS)
    _check_options(kind, weights, num_nodes, errors)
    with open_source(path, progress) as source:
        records = _read(source, kind, weights, num_nodes, strict=errors == "raise")
    graph = assemble(records, rules)
    return graph.largest_component() if largest_component else graph


def _check_options(
    kind: Format, weights: bool | str | None, num_nodes: int | None, errors: str
) -> None:
    if isinstance(weights, str) and kind not in ("gml", "graphml"):
        raise ValueError(f"weights may name an attribute in GML and GraphML, got {weights!r}")
    if num_nodes is not None:
        check_count("num_nodes", num_nodes, high=MAX_NODES)
        if kind in ("gml", "graphml"):
            raise ValueError(f"num_nodes is not for {kind}: each vertex is declared by itself")
    if errors == "report" and kind not in ("edges", "mtx"):
        raise ValueError(f'errors must be "raise" for {kind}: its lines depend on each other')


def _guess(path: Path, head: bytes) -> Format:
    """The format by content where that tells, else by the last part of the name."""
    start = head.lstrip()
    if start[: len(BANNER)].lower() == BANNER.lower():
        return "mtx"
    if start.startswith(b"<"):
        return "graphml"
    if _GML.search(head):
        return "gml"
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return _SUFFIXES.get(suffixes[-1], "edges") if suffixes else "edges"


def _read(
    source: Source, kind: Format, weights: bool | str | None, num_nodes: int | None, *, strict: bool
) -> Records:
    if kind == "gml":
        return read_gml(source, weights=weights)
    if kind == "graphml":
        return read_graphml(source, weights=weights)
    flag = weights if isinstance(weights, bool) else None
    if kind == "mtx":
        return read_matrix_market(source, weights=flag, num_nodes=num_nodes, strict=strict)
    if kind == "metis":
        return read_metis(source, weights=flag, num_nodes=num_nodes)
    return _read_edges(source, flag, num_nodes, strict=strict)


def _read_edges(
    source: Source, weights: bool | None, num_nodes: int | None, *, strict: bool
) -> Records:
    records = Records(source=source.name, kind="list", num_nodes=num_nodes)
    layout = Layout(weights=weights)
    if num_nodes is not None:
        layout = Layout(weights=weights, high=num_nodes - 1)
    reader = LineReader(records, layout, strict=strict)
    for block, number in source.lines():
        reader.feed(block, number)
    if not records.num_accepted:
        raise GraphError(f"{source.name} holds no edge ({records.num_rejected} lines rejected)")
    return records
