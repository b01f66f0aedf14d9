"""The command line, one module per command; commands are found by the names of the modules.

A module defines a function ``command`` that takes a dataclass of options, and ``EPILOG``, its
examples; or ``app``, a ``typer.Typer`` with several commands.
"""
