"""Data sets by name."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from ritz._core.checks import check_device
from ritz.data._files import DATASETS
from ritz.data._images import ImageData
from ritz.data._texts import TextData


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> ImageData | TextData:
    """Return a data set by name, stored on a device; nothing is downloaded.

    Args:
        name: One of :func:`available`. An unknown name raises and suggests the nearest.
        data_dir: Folder of data sets, or folder of the files of this one. Defaults to the
            environment variable ``RITZ_DATA``. ``digits`` needs none.
        device: Device that stores the images, as bytes, or the tokens.
        options: Options of the data set. All images: ``validation``, the number of training images
            to hold out, always the same ones (5,000 of the 50,000 of CIFAR). ``cifar100``:
            ``labels``, "fine" or "coarse". ``folder``: ``size``, the side to which images are
            cropped and resampled; ``channels``, 1 or 3; ``test_fraction``, the share to hold out if
            there is no test folder. Texts: ``length`` of a segment; ``text``: ``file``.
    """
    reader = DATASETS[name]
    # The first parameter of a reader is the folder; the others are its options.
    signature = inspect.signature(reader)
    try:
        signature.bind(None, **options)
    except TypeError as error:
        known = ", ".join([*signature.parameters][1:])
        raise TypeError(f"the data set {name!r} has the options {known}: {error}") from error
    target = check_device(device)
    folder = data_dir if data_dir is not None else os.environ.get("RITZ_DATA") or None
    data: ImageData | TextData = reader(folder and Path(folder).expanduser(), **options)
    return data.to(target)


def available() -> tuple[str, ...]:
    """Return the names of all data sets."""
    return tuple(DATASETS)


def describe(name: str) -> str:
    """Return one line about a data set."""
    return (inspect.getdoc(DATASETS[name]) or "").partition("\n")[0]
