"""Progress of long loops: a protocol, and the one-line bar that ``progress=True`` means."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """What a long loop tells whoever watches it."""

    def start(self, label: str, total: int | None) -> None:
        """The loop begins; ``total`` is the number of steps, if known."""

    def update(self, done: int, note: str = "") -> None:
        """``done`` steps are over; ``note`` is a short remark, such as the largest residual."""

    def finish(self) -> None:
        """The loop is over, by whatever way."""


class Bar:
    """A bar on one line of the standard error stream, in a terminal or a notebook.

    Redrawn at most ten times a second; where the stream is neither, only the last state is
    written, so that logs stay short.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty() or "ipykernel" in sys.modules

    def start(self, label: str, total: int | None) -> None:
        self._label, self._total, self._line = label, total, ""
        self._begun = self._drawn = time.monotonic()
        self.update(0)

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        self._line = self._format(done, note, now - self._begun)
        if self._live and (now - self._drawn >= 0.1 or done == self._total):
            self._drawn = now
            self._write()

    def finish(self) -> None:
        self._write(end="\n")

    def _format(self, done: int, note: str, seconds: float) -> str:
        spent = f"{seconds:.1f} s"
        if self._total:
            filled = min(done, self._total) * 24 // self._total
            body = f"[{'#' * filled}{'.' * (24 - filled)}] {done}/{self._total}"
            left = f", {seconds / done * (self._total - done):.1f} s left" if done else ""
            spent += left if done < self._total else ""
        else:
            body = f"{done}"
        return f"{self._label} {body}  {spent}  {note}".rstrip()

    def _write(self, end: str = "") -> None:
        line = self._line
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            line = "\r" + line[:width].ljust(width)
        self._stream.write(line + end)
        self._stream.flush()


class _Silent:
    def start(self, label: str, total: int | None) -> None: ...

    def update(self, done: int, note: str = "") -> None: ...

    def finish(self) -> None: ...


@contextmanager
def tracking(progress: bool | Progress, label: str, total: int | None) -> Iterator[Progress]:
    """Start whatever ``progress`` asks for and finish it when the block ends, by any way."""
    if isinstance(progress, bool):
        tracker: Progress = Bar() if progress else _Silent()
    elif isinstance(progress, Progress):
        tracker = progress
    else:
        raise TypeError(
            f"progress must be a bool or have start, update and finish, got {progress!r}"
        )
    tracker.start(label, total)
    try:
        yield tracker
    finally:
        tracker.finish()
