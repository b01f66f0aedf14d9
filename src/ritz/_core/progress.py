"""The ``Progress`` protocol, and the one-line bar behind ``progress=True``."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress reports: pass your own as ``progress=`` to a long computation."""

    def start(self, label: str, total: int | None) -> None:
        """Called once at the beginning. ``total`` is the number of steps, if known."""

    def update(self, done: int, note: str = "") -> None:
        """Called after each step. ``note`` is a short text, such as the largest residual."""

    def finish(self) -> None:
        """Called once at the end, also after an error."""


class Bar:
    """Progress bar on one line of the standard error stream.

    In a terminal or a notebook it is redrawn at most ten times per second. Elsewhere only the last
    state is written, so that log files stay short.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        # A notebook is no terminal, but it also redraws a line after \r.
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
        body, spent = str(done), f"{seconds:.1f} s"
        if self._total:
            filled = min(done, self._total) * 24 // self._total
            body = f"[{'#' * filled:.<24}] {done}/{self._total}"
            # Time per step so far, times the steps that remain.
            if 0 < done < self._total:
                spent += f", {seconds / done * (self._total - done):.1f} s left"
        return f"{self._label} {body}  {spent}  {note}".rstrip()

    def _write(self, end: str = "") -> None:
        line = self._line
        if self._live:
            # One column less than the terminal: a full line would wrap and \r could not return.
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
    """Report a loop to ``progress``: ``True`` is a :class:`Bar`, ``False`` reports nothing."""
    if isinstance(progress, bool):
        tracker: Progress = Bar() if progress else _Silent()
    elif isinstance(progress, Progress):
        tracker = progress
    else:
        raise TypeError(
            f"progress must be a bool or have start, update and finish, got {progress!r}"
        )
    # finish() also runs after an error, so that the next output begins on a new line.
    tracker.start(label, total)
    try:
        yield tracker
    finally:
        tracker.finish()
