"""Context managers that note ctrl-C and SIGTERM, or turn SIGTERM into an interrupt."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


@contextmanager
def noted_signals() -> Iterator[list[str]]:
    """Record ctrl-C or SIGTERM instead of ending the process.

    The list that is yielded receives the name of the signal, and the code inside the ``with``
    statement decides when to stop. A second signal acts as usual.
    """
    names: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)
        restore()

    with _handled((signal.SIGINT, signal.SIGTERM), note) as restore:
        yield names


def terminate_as_interrupt() -> AbstractContextManager[Any]:
    """Let SIGTERM raise ``KeyboardInterrupt``, as ctrl-C does."""
    return _handled((signal.SIGTERM,), signal.default_int_handler)


@contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[Callable[[], None]]:
    """Install a handler. Yield a function that restores the previous handlers early."""
    previous: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while previous:
            signal.signal(*previous.popitem())

    # Python allows handlers in the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            # Shells start background jobs with SIGINT ignored, and it must stay ignored. None means
            # a handler that was not installed from Python, which could not be restored.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()
