"""Data sets by name: ``load``, and the registry of the functions that read them."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ritz._core.checks import check_device
from ritz._core.registry import Registry
from ritz.data._images import ImageData
from ritz.data._texts import TextData

DATASETS = Registry[Callable[..., Any]]("data set", listing="ritz list datasets")


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
        data_dir: Folder that contains the data sets, or the files of this data set. Defaults to the
            environment variable ``RITZ_DATA``. ``digits`` needs none.
        device: Device that stores the images, as bytes, or the tokens.
        options: Options of the data set:

            =================  ==========  ========  ============================================
            option             data sets   default   meaning
            =================  ==========  ========  ============================================
            ``validation``     images      0         number of training images held out for
                                                     validation, always the same ones
            ``crop``           CIFAR       None      side of random crops of the images themselves,
                                                     such as 28, in place of crops with a border
            ``labels``         cifar100    "fine"    "fine" (100 classes) or "coarse" (20)
            ``size``           folder      None      crop and resize images to this side
            ``channels``       folder      3         1 (grey) or 3 (colour)
            ``test_fraction``  folder      0.1       fraction held out without a test folder
            ``length``         texts       70        tokens per segment
            ``file``           text        required  path of a text file in UTF-8
            =================  ==========  ========  ============================================
    """
    reader = DATASETS[name]
    # The first parameter of a reader is the folder; the others are its options.
    signature = inspect.signature(reader)
    try:
        signature.bind(None, **options)
    except TypeError as error:
        known = ", ".join([*signature.parameters][1:])
        raise TypeError(f"data set {name}: {error}; its options are {known}") from error
    target = check_device(device)
    folder = data_dir if data_dir is not None else os.environ.get("RITZ_DATA") or None
    root = Path(folder).expanduser() if folder else None
    try:
        data: ImageData | TextData = reader(root, **options)
    except FileNotFoundError as error:
        # Readers do not know that the folder is that of the environment.
        if data_dir is not None or root is None or root.is_dir():
            raise
        raise FileNotFoundError(
            f"the environment variable RITZ_DATA must name an existing folder, got {folder!r}; "
            "correct it, or pass data_dir"
        ) from error
    return data.to(target)


def available() -> tuple[str, ...]:
    """Return the names of all data sets."""
    return tuple(DATASETS)


def describe(name: str) -> str:
    """Return one line about a data set."""
    return (inspect.getdoc(DATASETS[name]) or "").partition("\n")[0]
