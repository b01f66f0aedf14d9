"""The command line: one module a command, found by being there.

A command module defines ``command``, a function with a docstring, or ``app``, a
``typer.Typer`` of several; modules whose names begin with an underscore are what they share.
"""
