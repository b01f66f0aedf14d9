"""``read``: graphs from files of the usual formats."""

import os
import re
from pathlib import Path
from typing import Literal

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz.graphs._graph import Graph
from ritz.graphs._io.assembly import MAX_NODES, Records, Rules, assemble
from ritz.graphs._io.lines import BANNER, read_edge_list, read_matrix_market, read_metis
from ritz.graphs._io.networkx_graphs import read_markup
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
# No text makes this look at a byte more than twice.
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
        path: An edge list, Matrix Market (coordinate), GML, GraphML or METIS. A line of an edge
            list has two ids below :math:`2^{63}` and perhaps a weight, separated by spaces, tabs,
            commas or semicolons; ``#`` and ``%`` begin comments.
        format: ``edges``, ``mtx``, ``gml``, ``graphml`` or ``metis``. By default the first bytes
            and the name of the file decide.
        directed: What to do with a directed graph: ``drop`` the directions (an arc and its reverse
            become one edge with the larger weight), or ``refuse`` it. A file is directed if it
            says so, if its matrix is not symmetric, or if an edge list has some edges in both
            orders and others in one.
        weights: In an edge list: ``None``, a third column is the weight; ``True``, a third column
            is required; ``False``, columns after the second are ignored (for lists with times).
            In GML and GraphML: the name of the attribute, by default ``weight`` or ``value``; an
            edge without it has weight one. Weights must be finite and not negative. An edge of
            weight zero is no edge.
        self_loops: ``drop``; ``keep`` as one entry :math:`W_{ii}`, which counts once in the
            degree; or ``refuse``.
        multi_edges: What to do with an edge that is listed more than once: ``merge`` into one with
            the largest weight; ``sum`` the weights (without weights, this counts); or ``refuse``.
            In an edge list either order is the same edge, and ``refuse`` raises if an edge is
            listed twice in one order.
        num_nodes: In an edge list: vertices are ``0 .. num_nodes - 1``, and those without an edge
            are isolated. By default the vertices are the ids that occur, in ascending order. In
            Matrix Market and METIS, whose headers declare vertices ``1 .. n``: the same ``n``.
            Pass it for files that declare millions of vertices for few edges, which are refused
            otherwise.
        errors: ``raise`` at the first invalid line and name it, or ``report``: skip such lines and
            count them in ``graph.intake`` (edge lists and Matrix Market).
        largest_component: Return the largest connected component only.
        progress: Show a progress bar, or a :class:`Progress` to report to.

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
            raise ValueError(f"num_nodes is not for {kind}, which declares each vertex")
    if errors == "report" and kind not in ("edges", "mtx"):
        raise ValueError(f'errors must be "raise" for {kind}: its lines depend on each other')


def _guess(path: Path, head: bytes) -> Format:
    """The format by the first bytes if these are distinctive, otherwise by the suffix."""
    # XML and the banner of Matrix Market cannot begin an edge list, nor can "graph [".
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
    if kind == "gml" or kind == "graphml":
        return read_markup(source, kind=kind, weights=weights)
    flag = weights if isinstance(weights, bool) else None
    if kind == "metis":
        return read_metis(source, weights=flag, num_nodes=num_nodes)
    reader = read_matrix_market if kind == "mtx" else read_edge_list
    return reader(source, weights=flag, num_nodes=num_nodes, strict=strict)
