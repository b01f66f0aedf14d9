"""``python -m ritz`` and the ``ritz`` command."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from ritz.cli._app import run
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print('the command line needs typer: pip install "ritz[cli]"', file=sys.stderr)
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
