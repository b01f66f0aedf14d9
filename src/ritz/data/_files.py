"""Files of data sets: where they are, and how they are opened and read, within limits."""

import gzip
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

LIMIT = 2**29  # bytes of one decompressed file: the largest, of ImageNet-32, has 394 million
CHUNK = 2**24  # bytes read at a time, so that a short file with a large header costs no more


class DataError(ValueError):
    """A file of a data set has the wrong content; the message names the file."""


def locate(
    name: str,
    files: Sequence[str],
    *,
    root: Path | None,
    folders: Sequence[str],
    hint: str,
    others: Sequence[Path] = (),
) -> list[Path]:
    """Return the paths of all ``files``, from the first folder that has every one of them.

    A file may be compressed, with the ending ``.gz``.

    Args:
        name: Name of the data set, for messages.
        files: Standard file names.
        root: Folder of the user, or ``None``.
        folders: Searched in this order, below ``root``; ``"."`` is ``root`` itself.
        hint: How to get the files.
        others: Folders to search after these, even without a ``root``.
    """
    if root is None and not others:
        raise FileNotFoundError(
            f"data_dir (or the environment variable RITZ_DATA) must be given for {name!r}: the "
            f"folder that holds {files[0]}; {hint}"
        )
    if root is not None and not root.is_dir():
        raise FileNotFoundError(f"data_dir must be an existing folder, got {str(root)!r}; {hint}")
    places = [*(root / folder for folder in folders), *others] if root else list(others)
    candidates = [[existing(place, file) for file in files] for place in places]
    for paths in candidates:
        if all(paths):
            return [path for path in paths if path]
    # The message names the first missing file of the folder that has most of them.
    fullest = max(candidates, key=lambda paths: sum(map(bool, paths)))
    missing = [file for file, path in zip(files, fullest, strict=True) if not path]
    more = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
    raise FileNotFoundError(
        f"{name!r} needs {missing[0]} (or .gz){more}, not found in "
        f"{', '.join(map(str, places))}; {hint}"
    )


def existing(place: Path, file: str) -> Path | None:
    """Return the path of ``file`` or ``file.gz`` in a folder, or ``None``."""
    paths = (place / f"{file}{ending}" for ending in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


@contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain or gzip file, recognised by its first bytes; damaged ones raise DataError."""
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not compressed:
            yield raw
            return
        try:
            with gzip.open(raw) as stream:
                yield cast(IO[bytes], stream)
        except EOFError as error:
            raise DataError(f"{path} is a truncated gzip file") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is a damaged gzip file: {error}") from error


def read_up_to(stream: IO[bytes], size: int) -> bytearray:
    """Return the next ``size`` bytes of a stream, or fewer at its end."""
    content = bytearray()
    while len(content) < size and (chunk := stream.read(min(CHUNK, size - len(content)))):
        content += chunk
    return content


def read_whole(path: Path, *, limit: int) -> bytearray:
    """Return the decompressed content of a file; raise if it has more than ``limit`` bytes."""
    with open_file(path) as stream:
        content = read_up_to(stream, limit + 1)
    if len(content) > limit:
        raise DataError(f"{path} is too large for a file of this data set: more than {limit} bytes")
    return content


# Formats that hold pixels only. Others can refer to programs or files.
FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF",
    ".webp": "WEBP", ".ppm": "PPM", ".pgm": "PPM", ".tif": "TIFF", ".tiff": "TIFF",
}  # fmt: skip


def read_image(path: Path, size: int | None, mode: str) -> Tensor:
    """Return the bytes ``(c, h, w)`` of an image file, cropped and resized to ``size``."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading files of images needs Pillow: pip install Pillow") from error
    bombs = (Image.DecompressionBombWarning, Image.DecompressionBombError)
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 million pixels, and raises above twice as many.
            warnings.simplefilter("error", bombs[0])
            with Image.open(path, formats=[FORMATS[path.suffix.lower()]]) as image:
                pixels = image.convert(mode)
    except (OSError, SyntaxError, ValueError, *bombs) as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error
    if size is not None:
        pixels = ImageOps.fit(pixels, (size, size))  # the central square, resampled
    array = np.array(pixels, dtype=np.uint8)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)
