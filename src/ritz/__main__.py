"""``python -m ritz`` and the ``ritz`` command."""

import contextlib
import os
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from ritz.cli._app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while commands are being imported
        print("ritz: interrupted", file=sys.stderr)
        code = 1
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print('the command line needs typer: pip install "ritz[cli]"', file=sys.stderr)
        code = 2
    sys.exit(code)


def _put_installed_modules_first() -> None:
    """Move the current folder, which ``python -m`` puts in front, to the end of the path.

    Otherwise a ``matplotlib.py`` in a folder that was downloaded would run.
    """
    with contextlib.suppress(FileNotFoundError):  # the current folder is gone
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
            sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    _put_installed_modules_first()
    main()
