"""Graphs in Matrix Market and METIS files."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ritz.graphs._graph import GraphError
from ritz.graphs._io.assembly import MAX_NODES, Float, Int, Records, check_size
from ritz.graphs._io.columns import (
    Bool,
    Layout,
    LineReader,
    Tokens,
    floats,
    integers,
    quoted,
    scan,
    split,
)
from ritz.graphs._io.source import Source

# ------------------------------------------------------------------------------------------
# Graphs in Matrix Market files: coordinate, pattern, real or integer, symmetric or general.

BANNER = b"%%MatrixMarket"


def read_matrix_market(
    source: Source, *, weights: bool | None, num_nodes: int | None, strict: bool
) -> Records:
    """Return the entries of a square matrix as arcs (general) or edges (symmetric).

    Args:
        source: An open file.
        weights: ``False`` ignores the values, ``True`` asks for some.
        num_nodes: What the header must say; ``None``: what it does, unless that is out of all
            proportion.
        strict: Raise at the first entry that cannot be read, rather than count it.
    """
    blocks = source.lines()
    block, number = next(blocks, (b"\n", 1))
    columns, symmetric = _banner(source.name, block, weights)
    n, num_entries, block, number = _size(source.name, block, number, blocks)
    check_size(source.name, n, num_entries, num_nodes)
    records = Records(
        source=source.name,
        kind="edges" if symmetric else "arcs",
        num_nodes=n,
    )
    keep = None if columns == 3 and weights is not False else False
    reader = LineReader(
        records, Layout(columns=columns, weights=keep, low=1, high=n), strict=strict
    )
    reader.feed(block, number)
    for block, number in blocks:
        reader.feed(block, number)
    found = records.num_accepted + records.num_rejected
    if found != num_entries:
        raise GraphError(
            f"{source.name} holds {found} entries, its header says {num_entries}: truncated?"
        )
    records.names = torch.arange(1, n + 1)
    return records


def _banner(name: str, block: bytes, weights: bool | None) -> tuple[int, bool]:
    words = block[: block.index(b"\n")].lower().split()
    expected = "%%MatrixMarket matrix coordinate pattern|real|integer symmetric|general"
    good = len(words) == 5 and words[:3] == [BANNER.lower(), b"matrix", b"coordinate"]
    if not (
        good
        and words[3] in (b"pattern", b"real", b"integer")
        and words[4] in (b"symmetric", b"general")
    ):
        raise GraphError(f"{name}, line 1: expected {expected}, got {quoted(b' '.join(words))}")
    if words[3] == b"pattern" and weights:
        raise GraphError(f"{name} is a pattern: it has no weights")
    return 2 if words[3] == b"pattern" else 3, words[4] == b"symmetric"


def _size(
    name: str, block: bytes, number: int, blocks: Iterator[tuple[bytes, int]]
) -> tuple[int, int, bytes, int]:
    """Rows, entries, and what follows the line that says so, with the number of its first line."""
    while True:
        start = 0
        while start < len(block):
            stop = block.index(b"\n", start)
            words = split(block[start:stop])
            start = stop + 1
            if words:
                n, num_entries = _size_counts(name, words, number)
                return n, num_entries, block[start:] or b"\n", number + 1
            number += 1
        block, number = next(blocks, (b"", 0))
        if not block:
            raise GraphError(f"{name} ends before the line with the size of its matrix")


def _size_counts(name: str, words: list[bytes], number: int) -> tuple[int, int]:
    place = f"{name}, line {number}"
    if len(words) != 3 or not all(word.isdigit() and len(word) < 19 for word in words):
        raise GraphError(f"{place}: expected rows, columns and entries")
    rows, columns, num_entries = (int(word) for word in words)
    if rows != columns:
        raise GraphError(f"{place}: the matrix of a graph is square, got {rows} x {columns}")
    if rows > MAX_NODES:
        raise GraphError(f"{place}: {rows} vertices, {MAX_NODES} are possible")
    return rows, num_entries


# ------------------------------------------------------------------------------------------
# Graphs in the format of METIS: a header, then the neighbours of one vertex a line.

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
            return _header_counts(f"{name}, line {number - 1}", words), block[start:] or b"", number
    return None, b"", number


def _header_counts(place: str, words: list[bytes]) -> _Header:
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
