"""Find the commands, run one, and turn an exception into one line and an exit code."""

import importlib
import os
import pkgutil
import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from ritz import cli
from ritz._version import __version__
from ritz.cli._options import flatten_options

# Errors of the input, which the user can correct, have exit code 2; all others have 1.
BAD_INPUT = (ValueError, TypeError, OSError)
BY_KEYBOARD = 130  # exit code with which the parser reports ctrl-C
# Seconds that other processes wait before they print an error: long enough for the first process
# to print it and for the launcher to end the others.
PATIENCE = 2.0


# The panels of ritz --help, in the order of their use. A command that is in none comes last.
PANELS = {
    "Train": ("demo", "train", "sweep"),
    "Measure a trained network": ("spectrum", "sharpness", "landscape", "advise"),
    "Matrices and graphs": ("logdet", "graph"),
    "Figures, lists and studies": ("plot", "list", "study"),
}


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A command was stopped by ctrl-C or SIGTERM; the message says whether it can be resumed."""


def build() -> typer.Typer:
    """Return the application: every module of this package without an underscore is a command."""
    start = "Start with: ritz demo, or ritz train --help"
    # Without arguments, show the help instead of an error.
    app = typer.Typer(name="ritz", no_args_is_help=True, epilog=start)
    app.callback()(_options)
    # Nothing is registered by hand: a new file is a new command.
    commands = [info.name for info in pkgutil.iter_modules(cli.__path__) if info.name[0] != "_"]
    panels = {name: panel for panel, names in PANELS.items() for name in names if name in commands}
    for name in dict.fromkeys([*panels, *commands]):
        module, panel = importlib.import_module(f"{cli.__name__}.{name}"), panels.get(name)
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, rich_help_panel=panel)
        else:
            describe = app.command(name=name, epilog=module.EPILOG, rich_help_panel=panel)
            describe(flatten_options(module.command))
    return app


def run(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code: 0 success, 1 the work failed, 2 bad input."""
    # Typer is built anew for every call, so that two calls in one process are independent.
    command = _simplify_help(typer.main.get_command(build()))
    plain = [argument for argument in arguments if argument != "--debug"]  # at any position
    try:
        # standalone_mode=False: errors are raised, so that all of them end in one line here.
        code = command.main(plain, prog_name="ritz", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", 1)
    except Interrupted as stop:
        return _complain(str(stop), 1)
    except Exception as error:
        # With --debug the exception itself is shown.
        if len(plain) < len(arguments):
            raise
        if hasattr(error, "format_message"):  # usage errors of the parser
            line = _usage_error(" ".join(error.format_message().split()), plain)
            return _complain(line or "no command given: try ritz --help", 2)
        return _complain(_line(error, command, plain), 2 if isinstance(error, BAD_INPUT) else 1)
    if code == BY_KEYBOARD:
        return _complain("interrupted", 1)
    # Typer returns the code of typer.Exit, and otherwise what the command returns: None.
    return code if isinstance(code, int) else 0


def _simplify_help(command: Any) -> Any:
    """Remove ``<bool>`` after options that take no value, and ``<list[Path]>`` after FILE."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
    for inner in getattr(command, "commands", {}).values():
        _simplify_help(inner)
    return command


def _show_version(version: bool) -> None:
    if version:
        typer.echo(f"ritz {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _options(version: Version = False, debug: Debug = False) -> None:
    """Spectra of matrices that are too large to store: networks, kernels and graphs."""


def _line(error: Exception, command: Any, arguments: Sequence[str]) -> str:
    """Return an error as one line that names options of the command, not arguments of Python."""
    # The innermost command knows its options: `graph density`, not `graph`.
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    lines = str(error).strip().splitlines() or [""]
    # An error in a worker of a DataLoader contains a traceback: keep its first and last line.
    worker = any("Original Traceback" in line for line in lines)
    text = " ".join(" ".join([lines[0], lines[-1]] if worker else lines).split())
    # A list of known names is left as it is: names of settings are no options.
    text, *names = re.split(r"(?=; (?:known:|it has) )", text, maxsplit=1)
    # A setting such as max_steps of --set max_steps=0 may have the name of another option.
    words = [word.partition("=")[2] if word.startswith("--") else word for word in arguments]
    settings = {word.partition("=")[0] for word in words}
    for parameter in command.params:
        if parameter.name in settings:
            continue
        name, flag = f"(num_)?{parameter.name}", parameter.opts[0]
        if flag.startswith("--"):
            # "weights=False (--no-weights)", "num_steps must be ...", "give seed=1", "average_from"
            text = re.sub(rf"\b{name}(=\S+)? \((?P<flag>--[^)]+)\)", r"\g<flag>", text)
            text = re.sub(rf"^{name}(?= )|\b{name}=True\b", flag, text)
            # noise='full' is --noise full
            text = re.sub(rf"(?<![/,])\b{name}='(?P<word>[\w.-]+)'", rf"{flag} \g<word>", text)
            # After a slash or a comma it is part of the folder of a run: sweep/lr=0.1,seed=0.
            text = re.sub(rf"(?<![/,])\b{name}=(?=\S)", f"{flag} ", text)
            if "_" in parameter.name:  # others may be words of the sentence
                text = re.sub(rf"(?<!['\w/,]){name}\b", flag, text)
    text = "".join([text, *names])
    return text if isinstance(error, BAD_INPUT) and text else f"{type(error).__name__}: {text}"


def _usage_error(message: str, arguments: Sequence[str]) -> str:
    """Return an error of the parser as one of ritz: the option, what it must be, the value."""
    match = re.fullmatch(r"Invalid value for '(?P<name>.+?)': (?P<reason>.*)", message, re.DOTALL)
    if match is None:
        return message
    # "Value error, " is of the library that checks choices.
    name, reason = match["name"], match["reason"].removeprefix("Value error, ")
    if choice := re.fullmatch(r"(?P<value>'.*') is not one of (?P<names>'.*')\.?", reason):
        return (
            f"{name} must be one of {choice['names'].replace(chr(39), '')}; got {choice['value']}"
        )
    kinds = {"valid integer": "a whole number", "valid number": "a number"}
    kind = next((kind for words, kind in kinds.items() if words in reason), None)
    # The parser does not quote the value: it follows the option, after a space or "=".
    equals = (argument.split("=", 1) for argument in arguments if "=" in argument)
    pairs = [*pairwise(arguments), *equals]
    value = next((value for flag, value in pairs if flag == name), None)
    return message if kind is None or value is None else f"{name} must be {kind}, got {value!r}"


def _complain(line: str, code: int) -> int:
    """Print an error as one line, and return the exit code.

    All processes of a distributed run see the same input. The first one prints at once, and the
    launcher ends the others before they print the same.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(PATIENCE)
    # torchrun mixes the output of all processes, so others name their rank.
    sys.stderr.write(f"ritz: {f'rank {rank}: ' if rank else ''}{line}\n")
    sys.stderr.flush()
    return code
