"""Graphs in the format of METIS: a header, then the neighbours of one vertex a line."""

from dataclasses import dataclass

import numpy as np
import torch

from ritz.graphs.assembling import MAX_NODES, Records, check_size
from ritz.graphs.columns import quoted, split
from ritz.graphs.compressing import Float, Int
from ritz.graphs.sources import Source
from ritz.graphs.structures import GraphError
from ritz.graphs.tokens import Bool, Tokens, floats, integers, scan

MAX_LINE = 2**28  # bytes: a vertex may have tens of millions of neighbours


@dataclass(slots=True)
class _Header:
    num_nodes: int
    num_edges: int
    lead: int  # words of a line before the first neighbour: size and weights of the vertex
    weighted: bool


def read_metis(source: Source, *, weights: bool | None, num_nodes: int | None) -> Records:
    """Return the arcs of a METIS graph file; sizes and weights of vertices are passed over.

    Args:
        source: An open file.
        weights: ``False`` ignores the weights of edges, ``True`` asks for some.
        num_nodes: What the header must say; ``None``: what it does, unless that is out of all
            proportion.
    """
    header: _Header | None = None
    records, vertex = Records(source=source.name, kind="arcs"), 0
    for block, number in source.lines(MAX_LINE):
        if header is None:
            header, block, number = _header(source.name, block, number)
            if header is None:
                continue
            check_size(source.name, header.num_nodes, header.num_edges, num_nodes)
            records.num_nodes = header.num_nodes
            _check_weights(source.name, header, weights)
        vertex = _neighbours(records, header, block, number, vertex, weights is not False)
    if header is None:
        raise GraphError(f"{source.name} ends before its header")
    if vertex < header.num_nodes:
        raise GraphError(
            f"{source.name} lists {vertex} vertices, its header says {header.num_nodes}: truncated?"
        )
    if records.num_accepted != 2 * header.num_edges:
        raise GraphError(
            f"{source.name} lists {records.num_accepted} neighbours, its header says "
            f"{header.num_edges} edges, each to be listed at both ends"
        )
    records.names = torch.arange(1, header.num_nodes + 1)
    return records


def _check_weights(name: str, header: _Header, weights: bool | None) -> None:
    if weights and not header.weighted:
        raise GraphError(f"{name} has no weights of edges")


def _header(name: str, block: bytes, number: int) -> tuple[_Header | None, bytes, int]:
    start = 0
    while start < len(block):
        stop = block.index(b"\n", start)
        words = split(block[start:stop])
        start, number = stop + 1, number + 1
        if words:
            return _counts(f"{name}, line {number - 1}", words), block[start:] or b"", number
    return None, b"", number


def _counts(place: str, words: list[bytes]) -> _Header:
    if not 2 <= len(words) <= 4 or not all(w.isdigit() and len(w) < 19 for w in words):
        raise GraphError(f"{place}: expected vertices, edges, and perhaps fmt and ncon")
    n, num_edges = int(words[0]), int(words[1])
    code = words[2].decode().zfill(3) if len(words) > 2 else "000"
    if len(code) > 3 or set(code) - {"0", "1"}:
        raise GraphError(f"{place}: fmt must be three digits 0 or 1, got {quoted(words[2])}")
    if n > MAX_NODES:
        raise GraphError(f"{place}: {n} vertices, {MAX_NODES} are possible")
    num_weights = int(words[3]) if len(words) > 3 else 1
    lead = int(code[0]) + int(code[1]) * num_weights
    return _Header(num_nodes=n, num_edges=num_edges, lead=lead, weighted=code[2] == "1")


def _neighbours(
    records: Records, header: _Header, block: bytes, number: int, vertex: int, keep: bool
) -> int:
    """Add the arcs of a block whose first line is that of ``vertex``; return the next vertex."""
    if not block:
        return vertex
    tokens = scan(block)
    first = tokens.first_of_lines()
    counts = np.diff(first)
    told = _not_comments(tokens, first, counts)
    vertices = vertex + np.cumsum(told) - 1
    beyond = np.flatnonzero(told & (vertices >= header.num_nodes) & (counts > 0))
    if len(beyond):
        raise GraphError(
            f"{records.source}, line {number + int(beyond[0])}: more lines than the "
            f"{header.num_nodes} vertices of the header"
        )
    line = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(line)) - first[:-1][line] - header.lead
    words = np.flatnonzero(told[line] & (place >= 0))
    weights = None
    if header.weighted:
        _check_pairs(records, counts - header.lead, told, number)
        words = words[place[words] % 2 == 0]
        weights = _weights(records, tokens, words + 1, line, number)
    ends = _ends(records, tokens, words, line, number, header.num_nodes)
    records.add(vertices[line[words]], ends, weights if keep else None)
    return vertex + int(np.count_nonzero(told))


def _not_comments(tokens: Tokens, first: Int, counts: Int) -> Bool:
    told = np.ones(len(counts), bool)
    lines = np.flatnonzero(counts)
    told[lines[tokens.first_bytes(first[lines]) == ord("%")]] = False
    return told


def _check_pairs(records: Records, counts: Int, told: Bool, number: int) -> None:
    odd = np.flatnonzero(told & (counts > 0) & (counts % 2 == 1))
    if len(odd):
        raise GraphError(
            f"{records.source}, line {number + int(odd[0])}: a neighbour without its weight"
        )


def _ends(records: Records, tokens: Tokens, words: Int, line: Int, number: int, n: int) -> Int:
    ends, good = integers(tokens, words)
    good &= (ends >= 1) & (ends <= n)
    _refuse(records, tokens, words[~good], line, number, f"is not a vertex between 1 and {n}")
    return ends - 1


def _weights(records: Records, tokens: Tokens, words: Int, line: Int, number: int) -> Float:
    weights, good = floats(tokens, words)
    good &= (weights >= 0) & np.isfinite(weights)
    _refuse(records, tokens, words[~good], line, number, "is not a weight, a number not negative")
    return weights


def _refuse(
    records: Records, tokens: Tokens, words: Int, line: Int, number: int, reason: str
) -> None:
    if len(words):
        word = int(words[0])
        text = tokens.text[int(tokens.starts[word]) : int(tokens.ends[word])]
        place = f"{records.source}, line {number + int(line[word])}"
        raise GraphError(f"{place}: {quoted(text)} {reason}")
