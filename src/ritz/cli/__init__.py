"""The ``ritz`` command, one module per command; commands are found by their file names.

A module defines a function ``command`` that takes a dataclass of options, and ``EPILOG``, its
examples; or ``app``, a ``typer.Typer`` with several commands.
"""
