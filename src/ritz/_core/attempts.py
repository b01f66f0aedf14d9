"""Run a call that may fail, and return its result or the first line of its error."""

from collections.abc import Callable
from typing import Any

import torch

# Errors that a model, module or loss raises if it cannot be computed in the way that is attempted.
UNSUITABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)


def attempt(call: Callable[[], Any], *kinds: type[Exception]) -> tuple[Any, str]:
    """Return the result of a call and ``""``, or ``None`` and the message of an error of ``kinds``.

    Out-of-memory errors are always raised, because another way would not help.
    """
    try:
        return call(), ""
    except torch.OutOfMemoryError:
        raise
    except kinds as error:
        return None, first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of the error if it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
