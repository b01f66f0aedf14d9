"""Graphs in text files: edge lists, Matrix Market and METIS, plain or compressed."""

import bz2
import gzip
import io
import lzma
import math
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy.io
import torch

from ritz._core.progress import Progress, tracking
from ritz.graphs._graph import Array, GraphError
from ritz.graphs._io.assembly import Float, Int, Records, check_size, check_weights

# ------------------------------------------------------------------------------------------
# Files as streams of whole lines, in bounded memory.

CHUNK = 2**17  # bytes per block: few calls of Python, and small enough for the cache
MAX_LINE = 2**20  # maximum length of a line of an edge list, in bytes
MAX_BYTES = 2**30  # maximum size of a file that is read as a whole, after decompression
_BOM = b"\xef\xbb\xbf"
# Compressed files by their first bytes, and how to open them.
_COMPRESSED: dict[bytes, tuple[str, Any]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ": ("xz", lzma.open),
    b"PK\x03\x04": ("zip", None),
    b"\x28\xb5\x2f\xfd": ("zstandard", None),
}


@dataclass(slots=True)
class Source:
    """An open file of a graph.

    Attributes:
        name: File name for messages.
        stream: Decompressed bytes.
        raw: The file itself, whose position is the progress.
        tracker: Receives the progress.
        shift: Progress is in units of ``2**shift`` bytes.
    """

    name: str
    stream: IO[bytes]
    raw: IO[bytes]
    tracker: Progress
    shift: int

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer than ``size`` only at the end."""
        block = self.stream.read(size)
        # The position in the compressed file. A decompressor may read beyond its end.
        done = min(self.raw.tell(), os.fstat(self.raw.fileno()).st_size)
        self.tracker.update(done >> self.shift)
        return block

    def whole(self, blocks: Iterable[bytes]) -> bytes:
        """Return the whole text of a file that must be small."""
        parts, size = [], 0
        for block in blocks:
            parts.append(block)
            size += len(block)
            if size > MAX_BYTES:
                raise GraphError(f"{self.name} has more than {MAX_BYTES:,} bytes: use an edge list")
        return b"".join(parts)

    def lines(self, max_line: int = MAX_LINE) -> Iterator[tuple[bytes, int]]:
        """Yield blocks of whole lines that end in a newline, with the number of the first line."""
        number, rest = 1, b""
        while block := self.read(CHUNK):
            # End the last line with a newline here, so that a small file is one block.
            end = b"\n" if len(block) < CHUNK and not block.endswith(b"\n") else b""
            block = rest + (block if number > 1 or rest else block.removeprefix(_BOM)) + end
            # Yield whole lines. The rest is the beginning of the first line of the next block.
            cut = block.rfind(b"\n") + 1
            rest = block[cut:]
            if len(rest) > max_line:
                line = number + block.count(b"\n")
                raise GraphError(f"{self.name}, line {line}: longer than {max_line} bytes")
            if cut:
                yield block[:cut], number
                number += block.count(b"\n", 0, cut)
        if rest:
            yield rest + b"\n", number


@contextmanager
def open_source(path: str | os.PathLike[str], progress: bool | Progress) -> Iterator[Source]:
    """Open a plain or compressed file, recognised by its first bytes."""
    file = Path(path)
    name = file.name
    if not file.exists():
        raise FileNotFoundError(f"no graph file {str(path)!r}")
    if not file.is_file():
        raise GraphError(f"{path} is not a file")
    size = file.stat().st_size
    if not size:
        raise GraphError(f"{name} is empty")
    shift, unit = (10, "KiB") if size >= 2**20 else (0, "bytes")
    label = f"reading {name} ({unit})"
    with file.open("rb") as raw, tracking(progress, label, size >> shift) as tracker:
        head = raw.read(8)
        raw.seek(0)
        stream: IO[bytes] = raw
        for magic, (kind, opener) in _COMPRESSED.items():
            if head.startswith(magic) and opener is None:
                raise GraphError(
                    f"{name} is a {kind} file: unpack it first, only gzip, bzip2 and xz are read"
                    + " (pass scipy.sparse.load_npz(path) for a matrix)" * name.endswith(".npz")
                )
            if head.startswith(magic):
                stream = opener(raw)
                break
        try:
            yield Source(name=name, stream=stream, raw=raw, tracker=tracker, shift=shift)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if stream is raw:
                raise
            state = "truncated" if isinstance(error, EOFError) else "damaged"
            raise GraphError(f"{name} is a {state} {kind} file: {error}") from error


def peek(path: str | os.PathLike[str]) -> bytes:
    """Return the first bytes of a file, decompressed; raise if they are not text."""
    with open_source(path, progress=False) as source:
        head = source.read(CHUNK // 2).removeprefix(_BOM)
        if b"\0" in head:
            raise GraphError(f"{source.name} is a binary file, not a text that describes a graph")
        if not head.strip():
            head += source.read(CHUNK // 2)
    return head


# ------------------------------------------------------------------------------------------
# Edge lists: lines of two ids and perhaps a weight. NumPy parses blocks of lines. If it rejects a
# block, a regular expression skips the lines that are surely valid, and Python checks the others.

MAX_ID = 2**63 - 1
# ASCII characters 28 to 31 are spaces to NumPy but not to anybody else.
_SEPARATORS = bytes.maketrans(b"\t\r\v\f,;\x1c\x1d\x1e\x1f", b"      ????")
_COMMENT = re.compile(rb"[#%][^\n]*")
_LETTER = re.compile(rb"[A-Za-z\x80-\xff]")
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_Blocks = Iterator[tuple[bytes, int]]
_Edges = tuple[Int, Int, Float | None]
# Usual titles of the columns of edge tables. If vertices have names, a line of titles would
# otherwise be an edge.
_TITLES = frozenset(
    b"source target src dst from to u v node1 node2 id1 id2 node_1 node_2 head tail".split()
)


@dataclass(slots=True, kw_only=True)
class LineReader:
    """Parse blocks of lines and add their edges to records.

    Attributes:
        records: Receives edges and rejected lines.
        strict: Raise at the first invalid line instead of counting it as rejected.
        columns: Number of words per line; ``None`` until the first valid line.
        weights: Whether the third word is a weight. ``None``: if there is a third word.
        low: Smallest valid id.
        high: Largest valid id.
        names: Vertices by name, in the order in which they occur; ``None`` if ids are numbers.
    """

    records: Records
    strict: bool
    columns: int | None = None
    weights: bool | None = None
    low: int = 0
    high: int = MAX_ID
    names: dict[bytes, int] | None = None

    @property
    def weighted(self) -> bool:
        """Whether the third word of a line is read as a weight."""
        return self.weights is not False and (self.columns or 0) > 2

    def read(self, blocks: _Blocks) -> None:
        """Add the edges of blocks of whole lines, each with the number of its first line."""
        for block, number in blocks:
            text = block.translate(_SEPARATORS)
            if b"#" in text or b"%" in text:
                text = _COMMENT.sub(b"", text)
            if self.names is not None:
                self._add_named(text, number, self.names)
                continue
            try:
                self._add(text)
            except ValueError:
                self._add_valid(text, number)

    def _add_named(self, text: bytes, number: int, names: dict[bytes, int]) -> None:
        """Add the edges of lines whose vertices have names, which are numbered as they occur."""
        edges = []
        for place, line in enumerate(text.split(b"\n")):
            words = line.split()
            if self._is_edge(words, number + place):
                u, v = (names.setdefault(word, len(names)) for word in words[:2])
                edges.append((u, v, abs(float(words[2])) if self.weighted else 1.0))
        if edges:
            ends, weights = np.array(edges).T[:2].astype(np.int64), np.array(edges)[:, 2]
            self.records.add(ends[0], ends[1], weights if self.weighted else None)

    def _add(self, text: bytes) -> None:
        """Add the edges of lines; ``ValueError`` if one of them is invalid."""
        if not text.strip():
            return
        if self.columns is None:
            raise ValueError("no valid line has set the number of columns")
        try:
            u, v, weights = _parse_digits(text, self.columns, weighted=self.weighted)
        except ValueError:
            u, v, weights = _parse_numbers(text, self.columns, weighted=self.weighted)
        if min(u.min(), v.min()) < self.low or max(u.max(), v.max()) > self.high:
            raise ValueError("an id is out of range")
        if weights is not None and not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("a weight is negative or not finite")
        self.records.add(u - self.low, v - self.low, weights)

    def _add_valid(self, text: bytes, number: int) -> None:
        """Add the edges of the valid lines, and reject the others or raise."""
        valid, start = [], 0
        while start < len(text):
            run = re.compile(self._surely_valid()).match(text, start)[0]  # type: ignore[index]
            start, number = start + len(run), number + run.count(b"\n")
            stop = text.find(b"\n", start) + 1 or len(text)
            line = text[start:stop]
            valid += [run, line if self._is_edge(line.split(), number) else b""]
            start, number = stop, number + 1
        self._add(b"".join(valid))

    def _surely_valid(self) -> bytes:
        """Return a pattern of lines that are blank or valid. It does not match all valid lines."""
        # All numbers with fewer digits than high + 1 are at most high.
        most = len(str(self.high + 1)) - 1
        if self.columns is None or not most:
            return b""
        first = b"[1-9]" if self.low else rb"\d"
        word = b" *%b\\d{0,%d} +%b\\d{0,%d}" % (first, most - 1, first, most - 1)
        weight = rb" +\d{1,15}(?:\.\d{0,15})?(?:[eE][+-]?\d{1,2})?" if self.weighted else b""
        unused = rb" +[^ \n]+" * (self.columns - 2 - self.weighted)
        # *+ does not backtrack, so that a long run takes no memory.
        return b"(?:(?:%b)? *\n)*+" % (word + weight + unused)

    def _is_edge(self, words: list[bytes], number: int) -> bool:
        """Return whether a line is an edge. Reject an invalid line, and ignore a blank one."""
        fault = self._fault(words) if words else None
        if fault and self.strict:
            raise GraphError(f"{self.records.source}, line {number}: {fault}")
        if fault:
            self.records.reject(f"line {number}: {fault}")
        elif words:
            # The first valid line sets the number of columns.
            self.columns = len(words)
        return bool(words and not fault)

    def _fault(self, words: list[bytes]) -> str | None:
        """Return the reason why a line is invalid, or ``None``."""
        count = len(words)
        if any(word.startswith(b"{") for word in words[2:]):
            return (
                "has attributes in braces, as networkx.write_edgelist writes them: write the graph "
                "with data=False or networkx.write_weighted_edgelist, or pass the graph itself"
            )
        if self.columns is not None and count != self.columns:
            return f"has {count} columns, expected {self.columns}"
        if count < 2 or (self.weights and count < 3):
            return f"has {count} columns, expected two vertices{' and a weight' * (count > 1)}"
        if count > 3 and self.weights is None:
            return (
                f"has {count} columns, expected two vertices and perhaps a weight; pass "
                "weights=True (--weights) if the third column is a weight, weights=False "
                "(--no-weights) to ignore it"
            )
        if self.columns is None and self.names is not None:
            titles = {word.lower() for word in words[:2]}
            if titles <= _TITLES:
                return "is the title of columns, not an edge: delete it, or begin it with #"
        for word in words[:2] if self.names is None else ():
            if not re.fullmatch(rb"\+?\d+", word):
                kind = "is negative" if re.fullmatch(rb"-\d+", word) else "is not a whole number"
                return f"the vertex id {_quoted(word)} {kind}"
            # The length first: Python refuses to convert very long integers.
            if len(word.lstrip(b"+0")) > 19 or int(word) > MAX_ID:
                return f"the vertex id {_quoted(word)} is beyond 64 bits"
            if not self.low <= int(word) <= self.high:
                return f"the vertex id {_quoted(word)} is not between {self.low} and {self.high}"
        if count == 2 or self.weights is False:
            return None
        shown = _quoted(words[2])
        if not _NUMBER.fullmatch(words[2]):
            return f"the weight {shown} is not a finite number"
        weight = float(words[2])
        if math.isinf(weight) or weight < 0:
            return f"the weight {shown} is {'negative' if weight < 0 else 'beyond float64'}"
        return None


def _parse_digits(text: bytes, width: int, *, weighted: bool) -> _Edges:
    """Parse lines of numbers without sign and exponent, twice as fast as :func:`_parse_numbers`.

    ``numpy.fromstring`` is fast for integers but ignores ends of lines. So the end of a line is
    replaced by the number -2, and a decimal point by -1 before the decimals: ``3 4 0.05`` becomes
    ``3 4 0 -105 -2``. If negative numbers are at the same places in all lines, all lines have the
    same form.
    """
    point = b"." in text
    if b"-" in text or (point and b" ." in text):
        raise ValueError("a number has a sign or begins with its decimal point")
    marked = text.replace(b"\n", b" -2 ")
    marked = marked.replace(b".", b" -1") if point else marked
    table = _whole_numbers(marked).reshape(-1, width + point + 1)
    negative = np.zeros(table.shape[1], bool)
    negative[[3, -1] if point else [-1]] = True
    if not (((table < 0) == negative).all() and (table[:, -1] == -2).all()):
        raise ValueError("lines differ in form")
    weights = table[:, 2].astype(np.float64) if weighted else None
    if weights is not None and point:
        decimals = -table[:, 3]
        # 1ddd lies between 10^3 and 2 * 10^3: the power of ten below it is the number of digits.
        power = _POWERS[np.searchsorted(_POWERS, decimals, side="right") - 1]
        weights = weights * power + (decimals - power)
        # Integers below 2^53 and powers of ten up to 10^15 are exact, so only the division rounds.
        if (table[:, 3] == -2).any() or weights.max() >= 2**53 or decimals.max() >= 2 * _POWERS[-1]:
            raise ValueError("a weight has too many digits")
        weights /= power
    return table[:, 0], table[:, 1], weights


_POWERS = 10.0 ** np.arange(16)


def _parse_numbers(text: bytes, width: int, *, weighted: bool) -> _Edges:
    """Parse lines of any numbers. Columns after the second, or the weight, may be any words."""
    columns: list[tuple[str, Any]] = [("u", np.int64), ("v", np.int64)]
    columns += [("weight", np.float64)] * weighted
    # Columns that are not used are strings, cut to one character.
    columns += [(f"unused{i}", "S1") for i in range(len(columns), width)]
    # NumPy checks the number of words of every line and rounds as Python does.
    plain = text.decode("ascii", "replace").replace("\ufffd", "?")
    table = np.loadtxt(io.StringIO(plain), columns, comments=None, ndmin=1)
    return table["u"], table["v"], table["weight"] + 0.0 if weighted else None  # no -0.0


def _whole_numbers(text: bytes) -> Int:
    """Return the integers of a text; ``ValueError`` if a word is not an integer of 64 bits."""
    with warnings.catch_warnings():
        # NumPy before 2.3 warns that it stopped at a word, and returns the numbers before it.
        warnings.simplefilter("error")
        try:
            numbers = np.fromstring(text, np.int64, sep=" ")
        except DeprecationWarning as warning:
            raise ValueError(str(warning)) from None
    if len(numbers) and numbers.max() == MAX_ID:  # NumPy replaces larger numbers by this one
        raise ValueError("a number may be beyond 64 bits")
    return numbers


def _quoted(word: bytes) -> str:
    """Return a word for a message, shortened and in ASCII."""
    return ascii(word[:40].decode("utf-8", "backslashreplace") + "..." * (len(word) > 40))


def read_edge_list(
    source: Source, *, weights: bool | None, num_nodes: int | None, strict: bool
) -> Records:
    """Return the edges of a list; arguments as for :func:`ritz.graphs.read`."""
    records = Records(source=source.name, kind="list", num_nodes=num_nodes)
    high = MAX_ID if num_nodes is None else num_nodes - 1
    reader = LineReader(records=records, strict=strict, weights=weights, high=high)
    blocks = source.lines()
    first, number = next(blocks, (b"", 1))
    if num_nodes is None and _has_names(first):
        reader.names = {}
    reader.read(chain([(first, number)], blocks))
    if not records.num_accepted:
        raise GraphError(f"{source.name} has no edge ({records.num_rejected} lines rejected)")
    if reader.names is not None:
        records.num_nodes = len(reader.names)
        records.names = tuple(name.decode("utf-8", "backslashreplace") for name in reader.names)
    return records


def _has_names(text: bytes) -> bool:
    """Return whether most lines have a vertex that is a word and not a number.

    If fewer have, the ids are numbers and these lines are invalid.
    """
    text = _COMMENT.sub(b"", text.translate(_SEPARATORS))
    lines = [words[:2] for line in text.split(b"\n") if (words := line.split())]
    named = sum(any(map(_is_name, words)) for words in lines)
    return 2 * named > len(lines)


def _is_name(word: bytes) -> bool:
    """Return whether a word has a letter and is not a number such as ``1e5`` or ``nan``."""
    if not _LETTER.search(word):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


# ------------------------------------------------------------------------------------------
# Matrix Market: SciPy parses the header. The entries are read as an edge list with ids from 1,
# which reports invalid lines and takes at most 83 MB for three million entries. scipy.io.mmread
# takes 168 MB for the matrix alone, because it expands a symmetric matrix.

BANNER = b"%%MatrixMarket"
_MAX_HEADER = 2**24  # bytes of comments before the sizes
# Comments and blank lines, and the first line after them.
_HEADER = re.compile(rb"(?:[ \t\r]*(?:%[^\n]*)?\n)*[ \t\r]*[^%\s][^\n]*\n")


def read_matrix_market(
    source: Source, *, weights: bool | None, num_nodes: int | None, strict: bool
) -> Records:
    """Return the entries of a square matrix as arcs (general) or edges (symmetric).

    Args:
        source: An open file.
        weights: ``False`` ignores the values; ``True`` requires them.
        num_nodes: Number of vertices that the header must declare; ``None`` accepts any plausible
            number.
        strict: Raise at the first invalid entry instead of counting it as rejected.
    """
    name = source.name
    header, blocks = _split_header(source.lines())
    try:
        rows, columns, num_entries, *kind = scipy.io.mminfo(io.BytesIO(header))
    except (ValueError, OverflowError) as error:
        raise GraphError(f"{name} has no valid Matrix Market header: {error}") from None
    layout, field, symmetry = kind
    if field not in ("pattern", "real", "integer"):
        raise GraphError(f"{name} must be pattern, real or integer, got {field}")
    if symmetry not in ("symmetric", "general"):
        raise GraphError(f"{name} must be symmetric or general, got {symmetry}")
    if rows != columns:
        raise GraphError(f"{name} must be a square matrix, got {rows} x {columns}")
    if field == "pattern" and weights:
        raise GraphError(f"{name} is a pattern: it has no weights")
    if layout == "array":
        text = source.whole(chain([header], (block for block, _ in blocks)))
        return _read_array(name, text, rows, weights)
    check_size(name, rows, num_entries, num_nodes)
    records = Records(
        source=name, kind="edges" if symmetry == "symmetric" else "arcs", num_nodes=rows
    )
    width = 2 if field == "pattern" else 3
    LineReader(
        records=records, strict=strict, columns=width, weights=weights, low=1, high=rows
    ).read(blocks)
    num_read = records.num_accepted + records.num_rejected
    if num_read != num_entries:
        raise GraphError(f"{name} holds {num_read} entries, its header says {num_entries}")
    records.names = torch.arange(1, rows + 1)
    return records


def _read_array(name: str, text: bytes, n: int, weights: bool | None) -> Records:
    """Return the arcs of a dense matrix, which SciPy reads."""
    # A symmetric matrix has n (n + 1) / 2 numbers of two bytes each, or more.
    if n * (n + 1) > len(text):
        raise GraphError(f"{name} holds fewer numbers than its header says")
    try:
        matrix = np.asarray(scipy.io.mmread(io.BytesIO(text)), np.float64)
    except (ValueError, OverflowError) as error:
        raise GraphError(f"{name} cannot be read: {error}") from None
    u, v = np.nonzero(matrix)
    values = matrix[u, v]
    check_weights(values, f"{name}: the entries")
    records = Records(source=name, kind="arcs", num_nodes=n)
    records.names = torch.arange(1, n + 1)
    records.add(u, v, None if weights is False or (values == 1).all() else values)
    return records


def _split_header(blocks: _Blocks) -> tuple[bytes, _Blocks]:
    """Return the comments with the first line after them, and the blocks of all other lines."""
    head = b""
    for block, _ in blocks:
        head += block
        if match := _HEADER.match(head):
            head, rest = head[: match.end()], head[match.end() :]
            return head, chain([(rest, 1 + head.count(b"\n"))] if rest else [], blocks)
        if len(head) > _MAX_HEADER:
            break
    return head, iter(())


# ------------------------------------------------------------------------------------------
# METIS: a header, then one line per vertex with its neighbours.

_MAX_METIS_LINE = 2**28  # bytes: a vertex may have tens of millions of neighbours


@dataclass(frozen=True, slots=True)
class _MetisHeader:
    num_nodes: int
    num_edges: int
    lead: int  # words of a line before the first neighbour: size and weights of the vertex
    weighted: bool


def read_metis(source: Source, *, weights: bool | None, num_nodes: int | None) -> Records:
    """Return the arcs of a METIS graph file; sizes and weights of vertices are ignored.

    Args:
        source: An open file.
        weights: ``False`` ignores the weights of edges; ``True`` requires them.
        num_nodes: Number of vertices that the header must declare; ``None`` accepts any plausible
            number.
    """
    name = source.name
    head, blocks = _split_header(source.lines(_MAX_METIS_LINE))
    number = head.count(b"\n")
    header = _metis_header(f"{name}, line {number}", head.rstrip(b"\n").rpartition(b"\n")[2])
    check_size(name, header.num_nodes, header.num_edges, num_nodes)
    if weights and not header.weighted:
        raise GraphError(f"{name} has no weights of edges")
    records = Records(source=name, kind="arcs", num_nodes=header.num_nodes)
    vertex = 0
    for block, number in blocks:
        vertex = _add_neighbours(records, header, block, number, vertex, weights is not False)
    if vertex < header.num_nodes:
        raise GraphError(f"{name} lists {vertex} vertices, its header says {header.num_nodes}")
    if records.num_accepted != 2 * header.num_edges:
        raise GraphError(
            f"{name} lists {records.num_accepted} neighbours, its header says "
            f"{header.num_edges} edges, each to be listed at both ends"
        )
    records.names = torch.arange(1, header.num_nodes + 1)
    return records


def _metis_header(place: str, line: bytes) -> _MetisHeader:
    words = line.split()
    if not 2 <= len(words) <= 4 or not all(w.isdigit() and len(w) < 19 for w in words):
        raise GraphError(f"{place}: expected vertices, edges, and perhaps fmt and ncon")
    code = words[2].decode().zfill(3) if len(words) > 2 else "000"
    if len(code) > 3 or set(code) - {"0", "1"}:
        raise GraphError(f"{place}: fmt must be three digits 0 or 1, got {_quoted(words[2])}")
    num_weights = int(words[3]) if len(words) > 3 else 1
    lead = int(code[0]) + int(code[1]) * num_weights
    return _MetisHeader(int(words[0]), int(words[1]), lead, code[2] == "1")


def _add_neighbours(
    records: Records, header: _MetisHeader, block: bytes, number: int, vertex: int, keep: bool
) -> int:
    """Add the arcs of a block whose first line is that of ``vertex``; return the next vertex."""

    def check(lines: Array, wrong: Array, reason: str) -> None:
        if wrong.any():
            line = number + int(lines[wrong.argmax()])
            raise GraphError(f"{records.source}, line {line}: {reason}")

    lines = block.translate(_SEPARATORS).split(b"\n")[:-1]
    is_vertex = np.array([not line.lstrip().startswith(b"%") for line in lines], bool)
    lines = [line if used else b"" for line, used in zip(lines, is_vertex, strict=True)]
    counts = np.array([len(line.split()) for line in lines], np.int64)
    every = np.arange(len(lines))
    vertices = vertex + np.cumsum(is_vertex) - 1
    beyond = is_vertex & (vertices >= header.num_nodes) & (counts > 0)
    check(every, beyond, f"more lines than the {header.num_nodes} vertices of the header")
    # Word i of the block is in line line[i], at place[i] after the size and weights of the vertex.
    line = np.repeat(every, counts)
    place = np.arange(len(line)) - (np.cumsum(counts) - counts)[line] - header.lead
    values = _numbers(b"\n".join(lines))
    if len(values) != len(line):
        wrong = [any(not _NUMBER.fullmatch(word) for word in text.split()) for text in lines]
        check(every, np.array(wrong), "not all words are numbers")
    weights = None
    ends = place >= 0
    if header.weighted:
        odd = (counts > header.lead) & ((counts - header.lead) % 2 == 1)
        check(every, odd, "a neighbour without its weight")
        ends, pairs = ends & (place % 2 == 0), ends & (place % 2 == 1)
        weights = values[pairs].astype(np.float64)
        check(line[pairs], ~((weights >= 0) & np.isfinite(weights)), "a weight is negative")
    others, n = values[ends], header.num_nodes
    valid = (others >= 1) & (others <= n) & (others == np.floor(others))
    check(line[ends], ~valid, f"a neighbour is not a vertex between 1 and {n}")
    records.add(vertices[line[ends]], others.astype(np.int64) - 1, weights if keep else None)
    return vertex + int(np.count_nonzero(is_vertex))


def _numbers(text: bytes) -> Array:
    """Return all numbers of a text; an empty array if a word is not a number."""
    try:
        # The format requires integers, which are parsed ten times as fast as other numbers.
        return _whole_numbers(text)
    except ValueError:
        pass
    try:
        return np.array(text.split(), np.float64)
    except ValueError:
        return np.empty(0)
