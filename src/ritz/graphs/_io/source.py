"""Files as streams of whole lines: plain or gzip, bounded in memory, every failure one line."""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ritz._core.progress import Progress, tracking
from ritz.graphs._graph import GraphError

CHUNK = 2**20  # bytes: enough to hide Python, and temporaries stay in the cache
MAX_LINE = 2**20  # bytes of one line of an edge list
LARGE = 2**20  # bytes of files that are counted in KiB
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstandard",
}


@dataclass(slots=True)
class Source:
    """An open file of a graph.

    Attributes:
        name: Its name, for messages.
        stream: Its bytes, decompressed.
        raw: The file itself, whose position is the progress.
        tracker: Told of it.
        shift: It is told in units of two to this power of bytes.
    """

    name: str
    stream: IO[bytes]
    raw: IO[bytes]
    tracker: Progress
    shift: int

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end only."""
        block = self.stream.read(size)
        done = min(self.raw.tell(), os.fstat(self.raw.fileno()).st_size)
        self.tracker.update(done >> self.shift)
        return block

    def lines(self, max_line: int = MAX_LINE) -> Iterator[tuple[bytes, int]]:
        """Yield blocks of whole lines, each ending in a newline, with the number of its first."""
        number, rest = 1, b""
        while block := self.read(CHUNK):
            block = rest + (block if number > 1 or rest else block.removeprefix(_BOM))
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
    """Open a plain or gzip file, told apart by its first bytes; raise one line where it fails."""
    file = Path(path)
    name = file.name
    if not file.exists():
        raise FileNotFoundError(f"no graph file {str(path)!r}")
    if not file.is_file():
        raise GraphError(f"{name} is not a file")
    size = file.stat().st_size
    if not size:
        raise GraphError(f"{name} is empty")
    shift, unit = (10, "KiB") if size >= LARGE else (0, "bytes")
    label = f"reading {name} ({unit})"
    with file.open("rb") as raw, tracking(progress, label, size >> shift) as tracker:
        try:
            with _decompressed(raw, name) as stream:
                yield Source(name=name, stream=stream, raw=raw, tracker=tracker, shift=shift)
        except EOFError as error:
            raise GraphError(f"{name} is a truncated gzip file") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise GraphError(f"{name} is a damaged gzip file: {error}") from error


@contextmanager
def _decompressed(raw: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    head = raw.read(8)
    raw.seek(0)
    for magic, kind in _COMPRESSED.items():
        if head.startswith(magic):
            raise GraphError(f"{name} is compressed by {kind}; only gzip is read, unpack it first")
    if not head.startswith(b"\x1f\x8b"):
        yield raw
        return
    with gzip.open(raw) as stream:
        yield cast(IO[bytes], stream)


def peek(path: str | os.PathLike[str], size: int = 2**16) -> bytes:
    """Return the first bytes of a file, decompressed; raise if they are not those of a text."""
    with open_source(path, progress=False) as source:
        head = source.read(size).removeprefix(_BOM)
        if b"\0" in head:
            raise GraphError(f"{source.name} is a binary file, not a text that describes a graph")
        if not head.strip():
            head += source.read(size)
    return head
