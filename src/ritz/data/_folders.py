"""Folders of images with one sub-folder per class, read with Pillow."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ritz._core.checks import check_choice, check_count, check_range
from ritz.data._files import DATASETS, DataError
from ritz.data._images import ImageData, Samples, held_out, image_data, select

# Formats that hold pixels only. Others can refer to programs or files.
FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF",
    ".webp": "WEBP", ".ppm": "PPM", ".pgm": "PPM", ".tif": "TIFF", ".tiff": "TIFF",
}  # fmt: skip


@DATASETS.register("folder")
def folder(
    root: Path | None,
    *,
    validation: int = 0,
    size: int | None = None,
    channels: int = 3,
    test_fraction: float = 0.1,
) -> ImageData:
    """Any images in folders CLASS/FILE, or train/CLASS/FILE with test or val beside train."""
    check_choice("channels", str(channels), ("1", "3"))
    if size is not None:
        check_count("size", size)
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"no folder of images {str(root or '')!r}: data_dir= must hold a folder for each class "
            "with its images, or such folders in train and test"
        )
    if not (root / "train").is_dir():
        check_range("test_fraction", test_fraction, low=0, high=0.9)
        classes = _classes(root)
        samples = _samples(root, classes, size, channels)
        count = max(1, round(test_fraction * len(samples[1])))
        train, test = (select(samples, part) for part in held_out(len(samples[1]), count))
        return image_data(
            "folder", train=train, test=test, classes=classes, validation=validation, seeded=True
        )
    classes = _classes(root / "train")
    names = [name for name in ("test", "val", "valid", "validation") if (root / name).is_dir()]
    if not names:
        raise FileNotFoundError(f"{root} has a folder train, but no test or val beside it")
    train, *parts = (_samples(root / name, classes, size, channels) for name in ("train", *names))
    for name, part in zip(names, parts, strict=True):
        if part[0].shape[1:] != train[0].shape[1:]:
            sizes = f"{_size(part)}, training ones {_size(train)}"
            raise DataError(f"{root}: {name} images are {sizes}; give size=")
    # Without a test folder the validation images are the test images, as for ImageNet.
    held = parts[1] if len(parts) > 1 else None
    return image_data(
        "folder", train=train, test=parts[0], held=held, classes=classes, validation=validation
    )


def _classes(root: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and _visible(path))
    if not names:
        raise DataError(f"{root} must hold a folder for each class, got none")
    return tuple(names)


def _samples(root: Path, classes: tuple[str, ...], size: int | None, channels: int) -> Samples:
    unknown = sorted(set(_classes(root)) - set(classes))
    if unknown:
        raise DataError(f"{root} has a class {unknown[0]!r} that the training images do not have")
    files = [(path, n) for n, name in enumerate(classes) for path in _images(root / name)]
    shape = (size, size) if size else _common_size([path for path, _ in files])
    images = torch.empty(len(files), channels, *shape, dtype=torch.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        image.copy_(_pixels(path, size, "L" if channels == 1 else "RGB"))
    return images, torch.tensor([target for _, target in files], dtype=torch.int64)


def _images(place: Path) -> list[Path]:
    # Hidden files and files with other endings are skipped.
    paths = sorted(place.iterdir()) if place.is_dir() else []
    images = [path for path in paths if path.suffix.lower() in FORMATS and _visible(path)]
    if not images:
        raise DataError(f"{place} holds no images ({', '.join(FORMATS)})")
    return images


def _common_size(paths: list[Path]) -> tuple[int, int]:
    sizes: dict[tuple[int, int], Path] = {}
    for path in paths:
        with _open_image(path) as image:
            sizes.setdefault(image.size, path)
    if len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise DataError(
            f"images must be of one size, got {first[0]} x {first[1]} in {one} and "
            f"{second[0]} x {second[1]} in {other}; give size="
        )
    width, height = next(iter(sizes))
    return height, width


def _pixels(path: Path, size: int | None, mode: str) -> torch.Tensor:
    with _open_image(path) as image:
        pixels = image.convert(mode)
        if size is not None:
            from PIL import ImageOps

            pixels = ImageOps.fit(pixels, (size, size))  # the central square, resampled
        array = np.array(pixels, dtype=np.uint8)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)


@contextmanager
def _open_image(path: Path) -> Iterator[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("folders of images are read by Pillow: pip install Pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=[FORMATS[path.suffix.lower()]]) as image:
                yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} declares more pixels than are read: {error}") from error


def _size(samples: Samples) -> str:
    return f"{samples[0].shape[3]} x {samples[0].shape[2]}"


def _visible(path: Path) -> bool:
    return not path.name.startswith(".")
