"""Output of commands: printing of results, and the folder that results are written to."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer


def print_result(
    result: Any, files: Iterable[Path] = (), *, as_json: bool, text: str | None = None
) -> None:
    """Print a result and the names of its files, as text or as ``{"result": ..., "files": ...}``.

    Args:
        result: Any result, or several by name.
        files: Files that were written.
        as_json: Print JSON.
        text: Text to print instead of ``str(result)``.
    """
    from ritz._core.storage import to_json

    # JSON has no paths.
    names = [str(file) for file in files]
    if as_json:
        typer.echo(to_json({"result": result, "files": names}, indent=2))
        return
    # One result needs no title.
    if text is None and isinstance(result, Mapping):
        one = len(result) == 1
        text = "\n\n".join(f"{part}" if one else f"{name}\n{part}" for name, part in result.items())
    text = str(result) if text is None else text
    written = f"written: {', '.join(names)}" if names else ""
    typer.echo("\n\n".join(filter(None, (text, written))))


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Make a folder for results, and name it in errors of the disk.

    Whether it can be written to is tested before the block, which may take hours.
    """
    from safetensors import SafetensorError

    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The process number keeps two commands in one folder apart.
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise OSError(f"cannot write to {folder}: {reason}") from error
    try:
        yield folder
    except (OSError, SafetensorError) as error:
        # An error of safetensors has no error number, only the text of the system.
        reason = getattr(error, "strerror", str(error))
        file = getattr(error, "filename", None)
        if reason is None or (file is not None and not Path(file).is_relative_to(folder)):
            raise
        raise OSError(f"cannot write to {folder}: {reason}; files written before are intact, and "
                      "the same command resumes from there") from error  # fmt: skip
    finally:
        if made:
            with suppress(OSError):  # a folder with files stays
                folder.rmdir()
