r"""The log of a run: JSON lines, whole whenever the process ends, cut back when it is resumed.

Every line is one record with a ``kind``: ``epoch``, ``curvature`` (of a monitor) or ``final``. No
record holds a time, so that a run that was interrupted and resumed has the log of one that was not,
byte for byte; times go to a second file beside it, whose name ends in ``.times.jsonl``.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, final

from ritz.training.links import check_no_link, open_own

Record = dict[str, Any]


class LogError(OSError):
    """The log cannot be written; the message says why and what is left of it."""


@final
class Log:
    """Appends records to a file of JSON lines, each in one write.

    A kill leaves whole lines. A line that cannot be written whole (disk full) is taken out again.

    Args:
        path: The file, made where it is missing, and no link; its folder must exist.
        size: Bytes to keep of a file that is there; what follows them is cut.
    """

    def __init__(self, path: str | os.PathLike[str], *, size: int = 0) -> None:
        self.path = Path(path)
        check_no_link(self.path)
        present = self.path.stat().st_size if self.path.exists() else 0
        if present < size:
            raise ValueError(f"log must be that of the run that is resumed, with {size} bytes or "
                             f"more; {self.path} has {present}")  # fmt: skip
        try:
            self._file = open_own(self.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._file, size)
        except OSError as error:
            raise LogError(f"cannot write the log {self.path}: {error.strerror}") from error
        self._size = size

    def write(self, record: Record) -> None:
        """Append one record."""
        line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise LogError(f"cannot write the log {self.path}: {error.strerror}; the {self._size} "
                           "bytes before are whole") from error  # fmt: skip
        self._size += len(line)

    def flush(self) -> int:
        """Have the lines on the disk; return their bytes."""
        os.fsync(self._file)
        return self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_log(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a log, in their order; half a line at the end is left out.

    Args:
        path: A file of JSON lines.
    """
    whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def size_without_final(path: str | os.PathLike[str], size: int) -> int:
    """Bytes of a log of ``size`` bytes without a record of the end of the run, if it has one."""
    if not Path(path).is_file():
        return size
    with open(path, "rb") as file:
        lines = file.read(size).splitlines(keepends=True)
    last = json.loads(lines[-1]) if lines and lines[-1].endswith(b"\n") else {}
    return size - len(lines[-1]) if last.get("kind") == "final" else size


def times_path(path: str | os.PathLike[str]) -> Path:
    """Where the times beside a log are."""
    return Path(path).with_suffix(".times.jsonl")


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
