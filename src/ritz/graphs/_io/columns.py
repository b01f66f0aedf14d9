"""Lines of two ids and perhaps a weight, parsed in blocks without a Python loop over lines."""

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ritz.graphs._graph import GraphError
from ritz.graphs._io.assembly import Float, Int, Records

# ------------------------------------------------------------------------------------------
# Bytes of text to columns of numbers, without a Python loop over lines.

Bool = npt.NDArray[np.bool_]

MAX_DIGITS = 19  # of an integer below 2**63
_PAD = 24  # bytes before the text, so that the words before any token's end exist
_WORD = 8

_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\r\n\v\f,;")] = True
_IS_NUMERIC = np.zeros(256, bool)
_IS_NUMERIC[list(b"0123456789+-.eE")] = True


@dataclass(slots=True)
class Tokens:
    """The words of a block of lines.

    Attributes:
        text: The block, after some bytes of padding.
        starts: Where each word starts in it.
        ends: Where it ends.
        newlines: Where each line ends.
    """

    text: bytes
    starts: Int
    ends: Int
    newlines: Int

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self.newlines)

    def first_of_lines(self) -> Int:
        """Return the first word of each line, and at the end the number of words, ``(n + 1,)``."""
        last = np.searchsorted(self.starts, self.newlines)
        return np.concatenate([[0], last])

    def line(self, index: int) -> bytes:
        """Return a line without its newline."""
        start = int(self.newlines[index - 1]) + 1 if index else _PAD
        return self.text[start : int(self.newlines[index])]

    def first_bytes(self, words: Int) -> npt.NDArray[np.uint8]:
        """Return the first byte of some words."""
        first: npt.NDArray[np.uint8] = np.frombuffer(self.text, np.uint8)[self.starts[words]]
        return first


def scan(block: bytes) -> Tokens:
    """Return the words of a block that ends in a newline; commas and semicolons separate too."""
    text = b"\n" * _PAD + block
    codes = np.frombuffer(text, np.uint8)
    space = _IS_SPACE[codes]
    # The text begins and ends with space, so that starts and ends of words alternate.
    turns = np.flatnonzero(space[1:] != space[:-1]) + 1
    newlines = np.flatnonzero(codes[_PAD:] == ord("\n")) + _PAD
    return Tokens(text=text, starts=turns[0::2], ends=turns[1::2], newlines=newlines)


def integers(tokens: Tokens, words: Int) -> tuple[Int, Bool]:
    """Return some words as integers, and which of them are: digits alone, below 2**63.

    Eight digits are read at once as one 64-bit word and folded by three multiplications.
    """
    return _digits(tokens.text, tokens.starts[words], tokens.ends[words])


def _digits(text: bytes, starts: Int, ends: Int) -> tuple[Int, Bool]:
    lengths = ends - starts
    good = (lengths > 0) & (lengths <= MAX_DIGITS)
    values, fine = _eight_digits(text, ends, np.clip(lengths, 1, _WORD))
    good &= fine
    for read in range(_WORD, MAX_DIGITS, _WORD):
        long = np.flatnonzero(lengths > read)
        if not len(long):
            break
        width = np.minimum(lengths[long] - read, _WORD)
        more, fine = _eight_digits(text, ends[long] - read, width)
        # 19 digits fit into 64 bits without a sign; longer words may wrap, but are not good.
        values[long] += more * np.uint64(10**read)
        good[long] &= fine
    good &= values < 2**63
    return values.astype(np.int64), good


def _eight_digits(text: bytes, ends: Int, lengths: Int) -> tuple[npt.NDArray[np.uint64], Bool]:
    windows = np.ndarray((len(text) - _WORD + 1,), dtype="<u8", buffer=text, strides=(1,))
    word = windows[ends - _WORD]
    shift = ((_WORD - lengths) * 8).astype(np.uint64)
    # The bytes before the word are the low ones: cleared, they count as digits zero.
    word = (word >> shift) << shift
    high = (np.uint64(0x3030303030303030) >> shift) << shift
    nibbles = np.uint64(0xF0F0F0F0F0F0F0F0)
    beyond_nine = (word + (np.uint64(0x0606060606060606) >> shift << shift)) & nibbles
    good = (word & nibbles == high) & (beyond_nine == high)
    word = ((word & np.uint64(0x0F0F0F0F0F0F0F0F)) * np.uint64(2561)) >> np.uint64(8)
    word = ((word & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601)) >> np.uint64(16)
    word = ((word & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001)) >> np.uint64(32)
    return word, good


def floats(tokens: Tokens, words: Int) -> tuple[Float, Bool]:
    """Return some words as floating-point numbers, correctly rounded, and which of them are."""
    values, good = integers(tokens, words)
    good &= values < 2**53
    found = values.astype(np.float64)
    rest = np.flatnonzero(~good)
    if len(rest):
        found[rest], good[rest] = _decimals(tokens, words[rest])
        rest = rest[~good[rest]]
    if not len(rest):
        return found, good
    fields, plain = _fields(tokens, words[rest])
    good[rest] = plain
    try:
        found[rest[plain]] = fields[plain].astype(np.float64)
    except ValueError:  # some word has the letters of a number but is none
        good[rest] = False
    return found, good


def _decimals(tokens: Tokens, words: Int) -> tuple[Float, Bool]:
    """Digits, a point and digits, at most 15 in all: one rounded division of exact numbers."""
    starts, ends = tokens.starts[words], tokens.ends[words]
    points = np.flatnonzero(np.frombuffer(tokens.text, np.uint8) == ord("."))
    points = np.append(points, len(tokens.text))
    point = np.minimum(points[np.searchsorted(points, starts)], ends - 1)
    places = ends - point - 1
    whole, good = _digits(tokens.text, starts, point)
    fraction, fine = _digits(tokens.text, point + 1, ends)
    good &= fine & (ends - starts <= 16)
    scale = 10.0 ** np.minimum(places, 15)
    return (whole * scale + fraction) / scale, good


def _fields(tokens: Tokens, words: Int, width: int = 32) -> tuple[npt.NDArray[np.bytes_], Bool]:
    """Some words as byte strings of one width, and which fit and have the letters of a number."""
    starts, ends = tokens.starts[words], tokens.ends[words]
    longest = int(min((ends - starts).max(), width))
    place = starts[:, None] + np.arange(longest)
    inside = place < ends[:, None]
    codes = np.frombuffer(tokens.text, np.uint8)
    letters = codes[np.minimum(place, len(codes) - 1)]
    plain = (_IS_NUMERIC[letters] | ~inside).all(1) & (ends - starts <= longest)
    fields = np.ascontiguousarray(np.where(inside, letters, 0).astype(np.uint8))
    return fields.view(f"S{longest}")[:, 0], plain


# ------------------------------------------------------------------------------------------
# Lines of two ids and perhaps a weight, read in blocks; odd lines alone are looked at singly.

MAX_ID = 2**63 - 1
_SPACES = re.compile(rb"[\s,;]+")
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_COMMENT = re.compile(rb"[#%].*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a line of data must look like.

    Attributes:
        columns: Number of words; ``None`` while no line has told.
        weights: Whether the third is a weight; ``None``: if it is there.
        low: The least id.
        high: The largest id.
    """

    columns: int | None = None
    weights: bool | None = None
    low: int = 0
    high: int = MAX_ID

    @property
    def weighted(self) -> bool:
        """Whether a weight is read."""
        return self.weights is not False and (self.columns or 0) > 2

    def settled(self, tokens: Tokens) -> "Layout":
        """Return the layout with the columns of the first good line, if there is one."""
        for index in range(tokens.num_lines):
            words = split(tokens.line(index))
            if words and not isinstance(parse(words, self), str):
                return replace(self, columns=len(words))
        return self


class LineReader:
    """Takes blocks of lines and adds what they say to records.

    Args:
        records: Where edges and rejects go.
        layout: What a line must look like.
        strict: Raise at the first line that cannot be read, rather than count it.
    """

    def __init__(self, records: Records, layout: Layout, *, strict: bool) -> None:
        self.records, self.layout, self.strict = records, layout, strict

    def feed(self, block: bytes, number: int) -> None:
        """Read a block of whole lines, the first of them line ``number`` of the file."""
        tokens = scan(block)
        if self.layout.columns is None:
            self.layout = self.layout.settled(tokens)
        lines, first = _lines_of(tokens, self.layout.columns)
        good, u, v, weights = self._columns(tokens, first)
        good &= ~_commented(tokens, lines)
        self._add(u[good], v[good], weights[good])
        self._look_at(tokens, _others(tokens, lines[good]), number)

    def _columns(self, tokens: Tokens, first: Int) -> tuple[Bool, Int, Int, Float]:
        layout = self.layout
        u, good = integers(tokens, first)
        v, fine = integers(tokens, first + 1)
        good &= fine
        for ids in (u, v):
            good &= (ids >= layout.low) & (ids <= layout.high)
        if not layout.weighted:
            return good, u, v, np.ones(len(u))
        weights, fine = floats(tokens, first + 2)
        return good & fine & (weights >= 0) & np.isfinite(weights), u, v, weights

    def _add(self, u: Int, v: Int, weights: Float) -> None:
        low = self.layout.low
        self.records.add(u - low, v - low, weights if self.layout.weighted else None)

    def _look_at(self, tokens: Tokens, lines: Int, number: int) -> None:
        edges = []
        for index in lines.tolist():
            words = split(tokens.line(index))
            if not words:
                continue
            found = parse(words, self.layout)
            if not isinstance(found, str):
                edges.append(found)
            elif self.strict:
                raise GraphError(f"{self.records.source}, line {number + index}: {found}")
            else:
                self.records.reject(f"line {number + index}: {found}")
        if edges:
            u, v, weights = zip(*edges, strict=True)
            self._add(np.array(u), np.array(v), np.array(weights))


def split(line: bytes) -> list[bytes]:
    """Return the words of a line, without a comment at its end."""
    return [word for word in _SPACES.split(_COMMENT.sub(b"", line)) if word]


def parse(words: list[bytes], layout: Layout) -> tuple[int, int, float] | str:
    """Return both ends and the weight that the words of a line say, or why they say nothing."""
    wrong = _wrong_count(len(words), layout)
    if wrong:
        return wrong
    layout = replace(layout, columns=len(words))
    for word in words[:2]:
        wrong = _wrong_id(word, layout)
        if wrong:
            return wrong
    u, v = int(words[0]), int(words[1])
    if not layout.weighted:
        return u, v, 1.0
    weight = _weight(words[2])
    return weight if isinstance(weight, str) else (u, v, weight)


def _wrong_count(count: int, layout: Layout) -> str | None:
    if layout.columns is not None and count != layout.columns:
        return f"has {count} columns, expected {layout.columns}"
    if count < 2 or (layout.weights and count < 3):
        return f"has {count} columns, expected two vertices{' and a weight' * (count > 1)}"
    if count > 3 and layout.weights is None:
        return (
            f"has {count} columns, expected two vertices and perhaps a weight; say whether the "
            "third column is a weight by weights=True or weights=False (--weights or --no-weights)"
        )
    return None


def _wrong_id(word: bytes, layout: Layout) -> str | None:
    shown = quoted(word)
    if not word.isdigit():
        kind = "is negative" if re.fullmatch(rb"-\d+", word) else "is not a whole number"
        return f"the vertex id {shown} {kind}"
    # The length first: converting very long digits is refused by Python itself.
    if len(word.lstrip(b"0")) > 19 or int(word) > MAX_ID:
        return f"the vertex id {shown} is beyond 64 bits"
    if not layout.low <= int(word) <= layout.high:
        return f"the vertex id {shown} is not between {layout.low} and {layout.high}"
    return None


def _weight(word: bytes) -> float | str:
    if _NUMBER.fullmatch(word):
        value = float(word)
        if math.isinf(value):
            return f"the weight {quoted(word)} is beyond float64"
        return f"the weight {quoted(word)} is negative" if value < 0 else abs(value)
    if word.lower().lstrip(b"+-") in (b"nan", b"inf", b"infinity"):
        return f"the weight is {quoted(word)}, not a finite number"
    return f"the weight {quoted(word)} is not a number"


def quoted(word: bytes) -> str:
    """Return a word as a message may show it: short, and in ASCII."""
    text = word[:40].decode("utf-8", "backslashreplace") + ("..." if len(word) > 40 else "")
    return ascii(text)


def _lines_of(tokens: Tokens, columns: int | None) -> tuple[Int, Int]:
    """Lines that have so many words, and the first word of each."""
    if columns is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if _is_regular(tokens, columns):
        return np.arange(tokens.num_lines), np.arange(0, len(tokens.starts), columns)
    first = tokens.first_of_lines()
    lines = np.flatnonzero(np.diff(first) == columns)
    return lines, first[lines]


def _is_regular(tokens: Tokens, columns: int) -> bool:
    """Whether every line has so many words: the usual case, told without a search."""
    if len(tokens.starts) != columns * tokens.num_lines:
        return False
    begins, ends = tokens.starts[::columns], tokens.ends[columns - 1 :: columns]
    return bool((begins[1:] > tokens.newlines[:-1]).all() and (ends <= tokens.newlines).all())


def _commented(tokens: Tokens, lines: Int) -> Bool:
    """Which of some lines have a comment in them; it may stand where no number is read."""
    if b"#" not in tokens.text and b"%" not in tokens.text:
        return np.zeros(len(lines), bool)
    marks = np.flatnonzero(np.isin(np.frombuffer(tokens.text, np.uint8), list(b"#%")))
    return np.isin(lines, np.searchsorted(tokens.newlines, marks))


def _others(tokens: Tokens, good: Int) -> Int:
    """Lines with words that are neither among the good nor wholly a comment."""
    if len(good) == tokens.num_lines:
        return np.empty(0, np.int64)
    first = tokens.first_of_lines()
    wanted = np.diff(first) > 0
    wanted[good] = False
    lines = np.flatnonzero(wanted)
    return lines[~np.isin(tokens.first_bytes(first[lines]), list(b"#%"))]
