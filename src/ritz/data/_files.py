"""Files of data sets: where they are looked for, and reading no more than they can hold."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

CHUNK = 2**24  # bytes asked for at a time: a short file that declares much costs only this
INFLATION = 1032  # bytes that one byte of a deflate stream can stand for, at most
ENDINGS = ("", ".gz")
_GZIP = b"\x1f\x8b"


class DataError(ValueError):
    """A file of a data set is not what it should be; the message names it."""


def locate(
    name: str,
    files: Sequence[str],
    *,
    root: Path | None,
    folders: Sequence[str],
    hint: str,
    endings: Sequence[str] = ENDINGS,
    others: Sequence[Path] = (),
) -> list[Path]:
    """Return the paths of all ``files``, from the first folder that has every one of them.

    Args:
        name: The data set, for messages.
        files: Standard file names.
        root: Folder of the user; ``None`` if there is none.
        folders: Looked into in this order, below ``root``; ``"."`` is ``root`` itself.
        hint: How to get the files.
        endings: Any of which may stand behind a file name.
        others: Folders looked into after those, whether there is a ``root`` or not.
    """
    if root is None and not others:
        raise FileNotFoundError(
            f"no folder for {name!r}: give data_dir=, or set RITZ_DATA, to the folder that holds "
            f"{files[0]}; {hint}"
        )
    if root is not None and not root.is_dir():
        raise FileNotFoundError(f"data_dir must be a folder, got {str(root)!r}; {hint}")
    places = [] if root is None else [root / folder for folder in folders]
    places += others
    found = [[existing(place, file, endings) for file in files] for place in places]
    for paths in found:
        if all(paths):
            return [path for path in paths if path]
    fullest = max(found, key=lambda paths: sum(map(bool, paths)))
    missing = [file for file, path in zip(files, fullest, strict=True) if not path]
    other = "".join(f" (or {ending})" for ending in endings if ending)
    more = f", nor {len(missing) - 1} other files" if len(missing) > 1 else ""
    raise FileNotFoundError(
        f"no {missing[0]}{other}{more} for {name!r}, looked for in "
        f"{', '.join(map(str, places))}; {hint}"
    )


def existing(place: Path, file: str, endings: Sequence[str] = ENDINGS) -> Path | None:
    """Return the path of ``file`` in a folder, with the first ending that is there, or None."""
    paths = (place / f"{file}{ending}" for ending in endings)
    return next((path for path in paths if path.is_file()), None)


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a plain or gzip file, told apart by its first bytes: a stream, and a bound on its bytes.

    Every way in which decompression fails is raised as one line.
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        if not packed:
            yield raw, size
            return
        try:
            with gzip.open(raw) as stream:
                yield cast(IO[bytes], stream), INFLATION * size
        except EOFError as error:
            raise DataError(f"{path} is a truncated gzip file") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is a damaged gzip file: {error}") from error


def read_up_to(stream: IO[bytes], size: int) -> bytearray:
    """Return the next ``size`` bytes of a stream, or all that there are."""
    found = bytearray()
    while len(found) < size and (chunk := stream.read(min(CHUNK, size - len(found)))):
        found += chunk
    return found


def read_whole(path: Path, *, limit: int) -> bytearray:
    """Return what a file holds, decompressed; raise if that is more than ``limit`` bytes."""
    with opened(path) as (stream, _):
        found = read_up_to(stream, limit + 1)
    if len(found) > limit:
        raise DataError(f"{path} holds more than the {limit} bytes that are read of such a file")
    return found
