"""Where a command that was stopped goes on from: hidden files in the folder of its results."""

import hashlib
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, final

from ritz.cli._runs import Opened
from ritz.measures.resume import digest
from ritz.training.weights import tensor_state

# Vectors of a state, and one that was being written: no use without the file that names them.
PARTS = re.compile(r".*(\.\d+\.\d+-\d+|\.next)")


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A user, or the system, stopped a command; the message says what there is of it."""


@final
class States:
    """The states of one command, named after all that its numbers depend on.

    So the same command finds them when it is given again, and no other one does. For the block,
    the signal to terminate is as good as ctrl-C, and either ends in :class:`Interrupted`.

    Args:
        folder: Of the results.
        opened: The model, its weights and data.
        save_interval: Seconds between saves, which the numbers do not depend on.
        settings: What else was asked for.
    """

    def __init__(
        self, folder: Path, opened: Opened, *, save_interval: float, **settings: Any
    ) -> None:
        # The weights stand for the place that they came from.
        asked = replace(opened.choice, source=Path(opened.weights.name))
        weights = digest(tensor_state(opened.model).values())
        text = f"{weights} {asked} {opened.config.batch_size} {sorted(settings.items())}"
        self._folder, self._key = folder, hashlib.sha256(text.encode()).hexdigest()[:16]
        self._used: list[Path] = []
        self._interval = save_interval
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> "States":
        self._before = signal.getsignal(signal.SIGTERM)
        if self._handles_signals():
            signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles_signals():
            signal.signal(signal.SIGTERM, self._before)
        if isinstance(error, KeyboardInterrupt):
            every = f"--save-interval is {self._interval:g} s"
            raise Interrupted(
                f"interrupted; the same command goes on from the last save ({every})"
                if self._any_saved()
                else f"interrupted before the first save ({every}): the same command begins anew"
            ) from error

    def path(self, name: str) -> Path:
        """The state of one part of the work."""
        self._used.append(self._folder / f".{name}-{self._key}.state")
        return self._used[-1]

    def remove(self) -> None:
        """All results are written: remove what they were resumed from."""
        for path in self._used:
            # A file that a kill left half written has a point more before its name.
            for spent in self._folder.glob(f"*{path.name}*"):
                spent.unlink(missing_ok=True)

    def _handles_signals(self) -> bool:
        # Python lets nobody else; and what was started to ignore the signal goes on ignoring it.
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and self._before is not signal.SIG_IGN

    def _any_saved(self) -> bool:
        names = [path.name for used in self._used for path in self._folder.glob(f"{used.name}*")]
        return any(PARTS.fullmatch(name) is None for name in names)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
