"""Folders of images, one folder a class, read by Pillow."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ritz._core.checks import check_choice, check_count, check_range
from ritz.data._catalogue import DATASETS
from ritz.data._files import DataError
from ritz.data._images import ImageData, Samples, held_out, image_data

# Formats that are pixels alone: others can name programs or files.
_FORMATS = {
    ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".gif": "GIF",
    ".webp": "WEBP", ".ppm": "PPM", ".pgm": "PPM", ".tif": "TIFF", ".tiff": "TIFF",
}  # fmt: skip
_VALIDATION = ("val", "valid", "validation")
_MODES = {"1": "L", "3": "RGB"}


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
    check_choice("channels", str(channels), _MODES)
    if size is not None:
        check_count("size", size)
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"no folder of images {str(root or '')!r}: data_dir= must hold a folder for each class "
            "with its images, or such folders in train and test"
        )
    if not (root / "train").is_dir():
        return _one_folder(root, validation, size, channels, test_fraction)
    classes = _classes(root / "train")
    parts = {name: root / name for name in ("test", *_VALIDATION) if (root / name).is_dir()}
    if not parts:
        raise FileNotFoundError(f"{root} has a folder train, but no test or val beside it")
    train = _samples(root / "train", classes, size, channels)
    read = {name: _samples(path, classes, size, channels) for name, path in parts.items()}
    for name, part in read.items():
        if part[0].shape[1:] != train[0].shape[1:]:
            raise DataError(f"{root}: {name} images are {_size(part)}, training ones "
                            f"{_size(train)}; give size=")  # fmt: skip
    # A validation folder alone is what tests are made on, as for ImageNet.
    test, *more = read.values()
    held = more[0] if more else None
    return image_data(
        "folder", train=train, test=test, held=held, classes=classes, validation=validation
    )


def _one_folder(
    root: Path, validation: int, size: int | None, channels: int, test_fraction: float
) -> ImageData:
    check_range("test_fraction", test_fraction, low=0, high=0.9)
    classes = _classes(root)
    images, targets = _samples(root, classes, size, channels)
    count = max(1, round(test_fraction * len(targets)))
    train, test = ((images[part], targets[part]) for part in held_out(len(targets), count))
    return image_data(
        "folder", train=train, test=test, classes=classes, validation=validation, seeded=True
    )


def _classes(root: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and _shown(path))
    if not names:
        raise DataError(f"{root} must hold a folder for each class, got none")
    return tuple(names)


def _samples(root: Path, classes: tuple[str, ...], size: int | None, channels: int) -> Samples:
    unknown = sorted(set(_classes(root)) - set(classes))
    if unknown:
        raise DataError(f"{root} has a class {unknown[0]!r} that the training images have not")
    files = [(path, n) for n, name in enumerate(classes) for path in _images(root / name)]
    shape = (size, size) if size else _common_size([path for path, _ in files])
    images = torch.empty(len(files), channels, *shape, dtype=torch.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        image.copy_(_pixels(path, size, _MODES[str(channels)]))
    return images, torch.tensor([target for _, target in files], dtype=torch.int64)


def _images(place: Path) -> list[Path]:
    """Image files of a class; what is hidden or has another ending is passed over."""
    paths = sorted(place.iterdir()) if place.is_dir() else []
    found = [path for path in paths if path.suffix.lower() in _FORMATS and _shown(path)]
    if not found:
        raise DataError(f"{place} holds no images ({', '.join(_FORMATS)})")
    return found


def _common_size(paths: list[Path]) -> tuple[int, int]:
    sizes: dict[tuple[int, int], Path] = {}
    for path in paths:
        with _opened(path) as image:
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
    with _opened(path) as image:
        pixels = image.convert(mode)
        if size is not None:
            from PIL import ImageOps

            pixels = ImageOps.fit(pixels, (size, size))  # the middle square, resampled
        array = np.array(pixels, dtype=np.uint8)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("folders of images are read by Pillow: pip install Pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=[_FORMATS[path.suffix.lower()]]) as image:
                yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} declares more pixels than are read: {error}") from error


def _size(samples: Samples) -> str:
    return f"{samples[0].shape[3]} x {samples[0].shape[2]}"


def _shown(path: Path) -> bool:
    return not path.name.startswith(".")
