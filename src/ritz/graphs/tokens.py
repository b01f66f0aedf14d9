"""Bytes of text to columns of numbers, without a Python loop over lines."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ritz.graphs.compressing import Float, Int

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
