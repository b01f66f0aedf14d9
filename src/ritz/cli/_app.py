"""Finds the commands, runs one, and turns what it raises into one line and an exit code."""

import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ritz import cli
from ritz._core.registry import UnknownNameError
from ritz._version import __version__

# What a user can put right: everything else is a failure of the work itself.
BAD_INPUT = (ValueError, TypeError, UnknownNameError, OSError)
BY_KEYBOARD = 130  # what the parser makes of ctrl-C
PATIENCE = 2.0  # seconds that a process of several leaves to the first to speak


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A user, or the system, stopped a command; the message says what there is of it."""


def build() -> typer.Typer:
    """Return the application with every command that is there."""
    app = typer.Typer(name="ritz", no_args_is_help=True)
    app.callback()(_options)
    for found in pkgutil.iter_modules(cli.__path__):
        if found.name.startswith("_"):
            continue
        module = importlib.import_module(f"{cli.__name__}.{found.name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=found.name)
        else:
            app.command(name=found.name, epilog=getattr(module, "EPILOG", None))(module.command)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code: 0 well, 1 the work failed, 2 bad input."""
    command = _with_plain_flags(typer.main.get_command(build()))
    plain = [argument for argument in arguments if argument != "--debug"]  # wherever it stands
    try:
        code = command.main(plain, prog_name="ritz", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", 1)
    except Interrupted as stop:
        return _complain(str(stop), 1)
    except Exception as error:
        if len(plain) < len(arguments):
            raise
        if hasattr(error, "format_message"):  # a usage error of the parser
            return _complain(error.format_message() or "no command given: try ritz --help", 2)
        return _complain(_line(error), 2 if isinstance(error, BAD_INPUT) else 1)
    if code == BY_KEYBOARD:
        return _complain("interrupted", 1)
    return code if isinstance(code, int) else 0


def _with_plain_flags(command: Any) -> Any:
    """The same without ``<bool>`` after options that take no value."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _with_plain_flags(inner)
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ritz {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _options(version: Version = False, debug: Debug = False) -> None:
    """Spectra of matrices too large to write down."""


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, BAD_INPUT) and text else f"{type(error).__name__}: {text}"


def _complain(line: str, code: int) -> int:
    """Print the line; of several processes, whose input is the same, the first does so at once.

    The launcher ends the others when the first has failed, before they have said the same.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(PATIENCE)
    sys.stderr.write(f"ritz: {f'rank {rank}: ' if rank else ''}{line}\n")  # at once
    sys.stderr.flush()
    return code
