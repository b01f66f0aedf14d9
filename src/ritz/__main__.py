"""Entry point of ``python -m ritz`` and of the ``ritz`` command."""

import contextlib
import os
import sys


def main() -> None:
    """Run the command line and exit with its exit code."""
    try:
        from ritz.cli._app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the import of the commands
        print("ritz: interrupted", file=sys.stderr)
        code = 1
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print('the command line needs typer: pip install "ritz[cli]"', file=sys.stderr)
        code = 2
    sys.exit(code)


def _put_installed_modules_first() -> None:
    """Move the current folder, which ``python -m`` puts first in ``sys.path``, to the end.

    Otherwise a file ``matplotlib.py`` in a downloaded folder would be executed.
    """
    with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
            sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    _put_installed_modules_first()
    main()
