"""The ``Progress`` protocol, and the one-line bar behind ``progress=True``."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO, final, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Interface of objects that receive progress reports, to pass as ``progress=``."""

    def start(self, label: str, total: int | None) -> None:
        """Called once at the beginning. ``total`` is the number of steps, if known."""

    def update(self, done: int, note: str = "") -> None:
        """Called after each step. ``note`` is a short text, such as the largest residual."""

    def finish(self) -> None:
        """Called once at the end, also after an error."""


# In a log file, work that takes longer than this number of seconds prints its expected time once.
# For shorter work this line would be longer than the result.
LONG = 10.0


class Bar:
    """Progress bar on one line of the standard error stream.

    In a terminal or a notebook it is redrawn at most ten times per second. A log file gets the last
    state only. Long work also writes one line after its first steps, with the number of steps and
    the expected time.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        # A notebook is not a terminal, but it also redraws a line after \r.
        self._live = self._stream.isatty() or "ipykernel" in sys.modules

    def start(self, label: str, total: int | None) -> None:
        self._label, self._total, self._line = label, total, ""
        self._begun = self._drawn = time.monotonic()
        self._first: tuple[int, float] | None = None  # state and time after the first step
        self._forecast = self._live
        self.update(0)

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        self._line = self._format(done, note, now - self._begun)
        left = self._left(done, now)
        if left is not None and not self._forecast and self._first != (done, now):
            self._forecast = True
            if (whole := now - self._begun + left) > LONG:
                text = f"{self._label}: {self._total:,} in all, about {duration(whole)}\n"
                self._stream.write(text)
                self._stream.flush()
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
            if (left := self._left(done, self._begun + seconds)) is not None:
                spent += f", {duration(left)} left"
        return f"{self._label} {body}  {spent}  {note}".rstrip()

    def _left(self, done: int, now: float) -> float | None:
        """Return the seconds left, or ``None`` if they are not known."""
        if not self._total or not 0 < done < self._total:
            return None
        # The first step is slower, because models are traced in it. Therefore use the mean time of
        # the steps after it, if there are any. A resumed run begins with more than one step done.
        self._first = self._first or (done, now)
        before, since = self._first
        seconds = (now - since) / (done - before) if done > before else (now - self._begun) / done
        return seconds * (self._total - done)

    def _write(self, end: str = "") -> None:
        line = self._line
        if self._live:
            # One column less than the terminal, because a full line would wrap, and \r would not
            # work.
            width = shutil.get_terminal_size().columns - 1
            line = "\r" + line[:width].ljust(width)
        self._stream.write(line + end)
        self._stream.flush()


def duration(seconds: float) -> str:
    """Return a duration as text in seconds, minutes or hours, with up to three digits."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Silent:
    def start(self, label: str, total: int | None) -> None: ...

    def update(self, done: int, note: str = "") -> None: ...

    def finish(self) -> None: ...


@final
class Stages:
    """One progress bar for several computations whose steps differ in length.

    Args:
        whole: Receives the progress of all computations together.
    """

    def __init__(self, whole: Progress) -> None:
        self._whole, self._before, self._weight, self._size = whole, 0, 1, 0

    def stage(self, *, size: int, weight: int = 1) -> Progress:
        """Begin the next stage, of ``size`` units in all and ``weight`` units per step.

        The stage before it counts as done, even if it reported nothing because its result was read
        from a saved state.
        """
        self._before += self._size
        self._size, self._weight = size, weight
        return self

    def start(self, label: str, total: int | None) -> None:
        """Do nothing, because the bar of all stages has begun already."""

    def update(self, done: int, note: str = "") -> None:
        self._whole.update(self._before + min(done * self._weight, self._size), note)

    def finish(self) -> None:
        """Do nothing, because further stages may follow."""


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
