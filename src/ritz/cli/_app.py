"""Finds the commands, runs one, and turns what it raises into one line and an exit code."""

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ritz import cli
from ritz._core.registry import UnknownNameError
from ritz.version import __version__

# What a user can put right: everything else is a failure of the work itself.
BAD_INPUT = (ValueError, TypeError, UnknownNameError, OSError)


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
    command = typer.main.get_command(build())
    plain = [argument for argument in arguments if argument != "--debug"]  # wherever it stands
    try:
        code = command.main(plain, prog_name="ritz", standalone_mode=False)
    except typer.Abort:
        return _complain("interrupted", 1)
    except Exception as error:
        if len(plain) < len(arguments):
            raise
        if hasattr(error, "format_message"):  # a usage error of the parser
            return _complain(error.format_message() or "no command given: try ritz --help", 2)
        return _complain(_line(error), 2 if isinstance(error, BAD_INPUT) else 1)
    return code if isinstance(code, int) else 0


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
    print(f"ritz: {line}", file=sys.stderr)
    return code
