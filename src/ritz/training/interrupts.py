"""Ctrl-C and the signal to terminate: noted at once, acted on between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Interrupts:
    """Notes the first signal for the block; a second one does what it would have done.

    Outside the main thread, where Python lets nobody handle signals, nothing is noted; nor is a
    signal that the process ignores, as SIGINT in the background of a shell.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
