"""Files as streams of whole lines: plain or gzip, in bounded memory."""

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

CHUNK = 2**20  # bytes per block: large enough to hide Python, small enough for the cache
MAX_LINE = 2**20  # bytes of one line of an edge list
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
        # The position in the compressed file; a reader may look beyond the end.
        done = min(self.raw.tell(), os.fstat(self.raw.fileno()).st_size)
        self.tracker.update(done >> self.shift)
        return block

    def lines(self, max_line: int = MAX_LINE) -> Iterator[tuple[bytes, int]]:
        """Yield blocks of whole lines that end in a newline, with the number of the first line."""
        number, rest = 1, b""
        while block := self.read(CHUNK):
            block = rest + (block if number > 1 or rest else block.removeprefix(_BOM))
            # Whole lines now; the beginning of the last line waits for the next block.
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
    """Open a plain or gzip file, recognised by its first bytes."""
    file = Path(path)
    name = file.name
    if not file.exists():
        raise FileNotFoundError(f"no graph file {str(path)!r}")
    if not file.is_file():
        raise GraphError(f"{name} is not a file")
    size = file.stat().st_size
    if not size:
        raise GraphError(f"{name} is empty")
    shift, unit = (10, "KiB") if size >= 2**20 else (0, "bytes")
    label = f"reading {name} ({unit})"
    with file.open("rb") as raw, tracking(progress, label, size >> shift) as tracker:
        head = raw.read(8)
        raw.seek(0)
        for magic, kind in _COMPRESSED.items():
            if head.startswith(magic):
                raise GraphError(f"{name} is compressed by {kind}; unpack it, only gzip is read")
        packed = head.startswith(b"\x1f\x8b")
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            yield Source(name=name, stream=stream, raw=raw, tracker=tracker, shift=shift)
        except EOFError as error:
            raise GraphError(f"{name} is a truncated gzip file") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise GraphError(f"{name} is a damaged gzip file: {error}") from error


def peek(path: str | os.PathLike[str], size: int = 2**16) -> bytes:
    """Return the first bytes of a file, decompressed; raise if they are not text."""
    with open_source(path, progress=False) as source:
        head = source.read(size).removeprefix(_BOM)
        if b"\0" in head:
            raise GraphError(f"{source.name} is a binary file, not a text that describes a graph")
        if not head.strip():
            head += source.read(size)
    return head
