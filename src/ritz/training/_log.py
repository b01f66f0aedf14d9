"""The log of a run: a file of JSON lines, its reader, and the file of times beside it.

Each line is one record with a ``kind``: ``epoch``, ``curvature`` (from a monitor) or ``final``. The
lines are complete whenever the process ends. A run that resumes cuts the lines that were written
after its checkpoint.

No record contains a time, so that a run that was interrupted and resumed has the same log, byte for
byte, as one that was not. Times go to a second file, whose name ends in ``.times.jsonl``.
"""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

from ritz._core import storage
from ritz.training._checkpoint import FilePath, explain_errors, open_file

Record = dict[str, Any]
LOG = "log.jsonl"  # name of the log in a run folder


@final
class Log:
    """Appends records to a file of JSON lines, each in one write.

    If the process is killed, the file has complete lines only. If a line cannot be written
    completely, as on a full disk, its first part is removed again.

    Args:
        path: The file, created if missing; its folder must exist.
        size: Bytes of an existing file to keep; the rest is cut. ``None`` keeps all.
    """

    def __init__(self, path: FilePath, *, size: int | None = 0) -> None:
        self.path = Path(path)
        present = self.path.stat().st_size if self.path.exists() else 0
        self._size = size = present if size is None else size
        if present < size:
            raise ValueError(
                f"the log {self.path} has {present} bytes, fewer than the {size} at the time of "
                "the checkpoint: pass the log of this run, or start again with resume=False "
                "(--restart)"
            )
        with self._writing():
            self._file = open_file(self.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._file, size)

    def write(self, record: Record) -> None:
        """Append one record."""
        line = (storage.to_json(record) + "\n").encode()
        with self._writing():
            try:
                written = os.write(self._file, line)
                while written < len(line):
                    written += os.write(self._file, line[written:])
            except OSError:
                # Otherwise the next line would be appended to a part of this one.
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(line)

    def flush(self) -> int:
        """Write all lines to the disk; return their number of bytes."""
        os.fsync(self._file)
        return self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _writing(self) -> AbstractContextManager[None]:
        return explain_errors(f"write the log {self.path}", "; the lines written before are intact")


def read_log(path: FilePath) -> list[Record]:
    """Return the records of a log in order, without an incomplete line at the end.

    Args:
        path: A file of JSON lines.
    """
    whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def times_path(path: FilePath) -> Path:
    """Return the file of times beside a log."""
    return Path(path).with_suffix(".times.jsonl")
