"""Graphs in Matrix Market files: coordinate, pattern, real or integer, symmetric or general."""

from collections.abc import Iterator

import torch

from ritz.graphs.assembling import MAX_NODES, Records, check_size
from ritz.graphs.columns import Layout, LineReader, quoted, split
from ritz.graphs.sources import Source
from ritz.graphs.structures import GraphError

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
                n, num_entries = _counts(name, words, number)
                return n, num_entries, block[start:] or b"\n", number + 1
            number += 1
        block, number = next(blocks, (b"", 0))
        if not block:
            raise GraphError(f"{name} ends before the line with the size of its matrix")


def _counts(name: str, words: list[bytes], number: int) -> tuple[int, int]:
    place = f"{name}, line {number}"
    if len(words) != 3 or not all(word.isdigit() and len(word) < 19 for word in words):
        raise GraphError(f"{place}: expected rows, columns and entries")
    rows, columns, num_entries = (int(word) for word in words)
    if rows != columns:
        raise GraphError(f"{place}: the matrix of a graph is square, got {rows} x {columns}")
    if rows > MAX_NODES:
        raise GraphError(f"{place}: {rows} vertices, {MAX_NODES} are possible")
    return rows, num_entries
