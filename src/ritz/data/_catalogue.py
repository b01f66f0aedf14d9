"""Data sets by name."""

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

DATASETS = Registry[Callable[..., ImageData | TextData]]("data set")


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> ImageData | TextData:
    """Return a data set by name, held on a device; nothing is downloaded.

    Args:
        name: One of :func:`available`; a wrong one is answered with the nearest.
        data_dir: Folder of data sets, or of the files of this one; ``RITZ_DATA`` of the
            environment by default. ``digits`` needs none.
        device: Where images are held, as bytes, and tokens.
        options: Of the data set. All images: ``validation``, the number of training images held
            out by a fixed choice (5,000 of the 50,000 of CIFAR). ``cifar100``: ``labels``, "fine"
            or "coarse". ``folder``: ``size``, to which images are cut and resampled, ``channels``
            (1 or 3), and ``test_fraction``, held out where there is no folder to test on.
            Texts: ``length`` of a segment; ``text``: ``file``.
    """
    loader = DATASETS[name]
    _check_options(name, loader, options)
    target = check_device(device)
    folder = data_dir if data_dir is not None else os.environ.get("RITZ_DATA") or None
    return loader(None if folder is None else Path(folder).expanduser(), **options).to(target)


def available() -> tuple[str, ...]:
    """Return the names of all data sets."""
    return tuple(DATASETS)


def describe(name: str) -> str:
    """Return one line about a data set."""
    return (inspect.getdoc(DATASETS[name]) or "").partition("\n")[0]


def _check_options(name: str, loader: Callable[..., Any], options: dict[str, Any]) -> None:
    _, *known = inspect.signature(loader).parameters.values()
    names = [option.name for option in known]
    for option in options:
        if option not in names:
            raise TypeError(f"the data set {name!r} has no option {option!r}, but has: "
                            f"{', '.join(names)}")  # fmt: skip
    for needed in known:
        if needed.default is needed.empty and needed.name not in options:
            raise TypeError(f"the data set {name!r} needs the option {needed.name!r}")
