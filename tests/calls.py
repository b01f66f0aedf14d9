"""How much Python a function executes: the same number on every machine, whatever its load."""

import sys


def num_calls(function):
    """Return how many functions, of Python and of C, are called while ``function()`` runs."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
