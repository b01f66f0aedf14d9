"""``python -m ritz`` and the ``ritz`` command."""

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


if __name__ == "__main__":
    main()
