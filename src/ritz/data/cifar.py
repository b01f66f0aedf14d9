"""CIFAR-10 and CIFAR-100, from the pickles of their python version."""

from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import torch

from ritz._core.checks import check_choice
from ritz.data.augmentation import Augmentation
from ritz.data.catalogue import DATASETS
from ritz.data.images import ImageData, Samples, check_classes, image_data
from ritz.data.pickles import read_pickle
from ritz.data.sources import DataError, existing, locate, read_whole

LIMIT = 2**29  # bytes of one file: the largest has 155 million
_SHAPE = (3, 32, 32)
_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_AIRPLANE = "airplane automobile bird cat deer dog frog horse ship truck"


@DATASETS.register("cifar10")
def cifar10(root: Path | None, *, validation: int = 0) -> ImageData:
    """CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels in 10 classes."""
    files = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    folders = ("cifar-10-batches-py", "cifar10", "cifar-10", "cifar10/cifar-10-batches-py", ".")
    hint = f"unpack cifar-10-python.tar.gz of {_PAGE} there"
    paths = locate("cifar10", files, root=root, folders=folders, hint=hint)
    parts = [_samples(path, "labels", 10) for path in paths]
    train = tuple(torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    return image_data(
        "cifar10",
        train=(train[0], train[1]),
        test=parts[-1],
        classes=_classes(paths[0].parent, "batches.meta", "label_names", 10)
        or tuple(_AIRPLANE.split()),
        validation=validation,
        augmentation=Augmentation(),
    )


@DATASETS.register("cifar100")
def cifar100(
    root: Path | None, *, validation: int = 0, labels: Literal["fine", "coarse"] = "fine"
) -> ImageData:
    """CIFAR-100: 50,000 + 10,000 colour images of 32 x 32 pixels in 100 classes, or 20 coarse."""
    check_choice("labels", labels, ("fine", "coarse"))
    count = 100 if labels == "fine" else 20
    folders = ("cifar-100-python", "cifar100", "cifar-100", "cifar100/cifar-100-python", ".")
    hint = f"unpack cifar-100-python.tar.gz of {_PAGE} there"
    paths = locate("cifar100", ["train", "test"], root=root, folders=folders, hint=hint)
    train, test = (_samples(path, f"{labels}_labels", count) for path in paths)
    return image_data(
        "cifar100",
        train=train,
        test=test,
        classes=_classes(paths[0].parent, "meta", f"{labels}_label_names", count)
        or tuple(map(str, range(count))),
        validation=validation,
        augmentation=Augmentation(),
    )


def _samples(path: Path, key: str, num_classes: int) -> Samples:
    contents = read_pickle(read_whole(path, limit=LIMIT), name=str(path))
    images, labels = contents.get("data"), contents.get(key)
    if not isinstance(images, np.ndarray) or images.shape[1:] != (3 * 32 * 32,):
        found = getattr(images, "shape", type(images).__name__)
        raise DataError(f"{path} must have images (n, 3072) under 'data', got {found}")
    if not (_is_list_of(labels, int) and len(labels) == len(images)):
        raise DataError(f"{path} must have a list of {len(images)} integers under {key!r}")
    targets = torch.tensor(labels, dtype=torch.int64)
    check_classes(path, targets, num_classes)
    # The array is a view of the file's bytes, which must not be written to: hence the copy.
    return torch.from_numpy(images.copy()).view(-1, *_SHAPE), targets


def _classes(folder: Path, file: str, key: str, count: int) -> tuple[str, ...] | None:
    path = existing(folder, file)
    if path is None:
        return None
    names = read_pickle(read_whole(path, limit=2**20), name=str(path)).get(key)
    if not (_is_list_of(names, bytes | str) and len(names) == count):
        raise DataError(f"{path} must have a list of {count} names under {key!r}")
    return tuple(name if isinstance(name, str) else name.decode("latin1") for name in names)


def _is_list_of(value: Any, kind: Any) -> TypeGuard[list[Any]]:
    return type(value) is list and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
