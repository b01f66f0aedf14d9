"""Handwritten digits of scikit-learn, MNIST and Fashion-MNIST."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ritz.data._catalogue import DATASETS
from ritz.data._files import DataError, locate, opened, read_up_to
from ritz.data._images import ImageData, Samples, check_classes, held_out, image_data

# ------------------------------------------------------------------------------------------
# The handwritten digits that ship inside scikit-learn.

TEST = 517  # of the 1797 images: 1280 are left, five batches of 256


@DATASETS.register("digits")
def digits(root: Path | None, *, validation: int = 0) -> ImageData:
    """Digits: 1,280 + 517 grey images of 8 x 8 pixels, embedded in scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits ship inside scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    # Levels 0 to 16 become 0 to 240: whole numbers, and near the range of other images.
    images = (15 * torch.from_numpy(found.images)).to(torch.uint8).unsqueeze(1)
    targets = torch.from_numpy(found.target).to(torch.int64)
    train, test = ((images[part], targets[part]) for part in held_out(len(targets), TEST))
    return image_data(
        "digits",
        train=train,
        test=test,
        classes=tuple("0123456789"),
        validation=validation,
        seeded=True,
    )


# ------------------------------------------------------------------------------------------
# MNIST and Fashion-MNIST, from idx files, packed by gzip or not.

_FOLDERS = {
    "mnist": ("mnist", "MNIST", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
}
_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_BYTES = 0x08  # the code of unsigned bytes in the magic number


@DATASETS.register("mnist")
def mnist(root: Path | None, *, validation: int = 0) -> ImageData:
    """MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels of the ten digits."""
    hint = "get the four files of https://yann.lecun.com/exdb/mnist"
    return _load("mnist", root, tuple("0123456789"), validation, hint)


@DATASETS.register("fashion-mnist")
def fashion_mnist(root: Path | None, *, validation: int = 0) -> ImageData:
    """Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels of ten kinds of clothes."""
    hint = "get the four files of https://github.com/zalandoresearch/fashion-mnist"
    return _load("fashion-mnist", root, _CLOTHES, validation, hint)


def _load(
    name: str, root: Path | None, classes: tuple[str, ...], validation: int, hint: str
) -> ImageData:
    folders = [*_FOLDERS[name], "."]
    # The files of both sets have the same names: those in a folder of the other are not meant.
    others = {folder for key, found in _FOLDERS.items() if key != name for folder in found}
    if root is not None and root.name in others:
        folders.remove(".")
    paths = locate(name, _FILES, root=root, folders=folders, hint=hint)
    train = _samples(paths[0], paths[1], len(classes))
    test = _samples(paths[2], paths[3], len(classes))
    return image_data(name, train=train, test=test, classes=classes, validation=validation)


def _samples(images_path: Path, labels_path: Path, num_classes: int) -> Samples:
    images, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} images, but {labels_path} {len(labels)} labels"
        )
    targets = labels.to(torch.int64)
    check_classes(labels_path, targets, num_classes)
    return images.unsqueeze(1), targets


def read_idx(path: Path, *, ndim: int) -> Tensor:
    """Return the bytes of an idx file in its shape of ``ndim`` sizes.

    A file that declares more than it can hold is refused before memory is taken for it.
    """
    with opened(path) as (stream, most):
        head = bytes(read_up_to(stream, 4 * (1 + ndim)))
        if head[:4] != bytes([0, 0, _BYTES, ndim]):
            raise DataError(
                f"{path} is not an idx file of bytes with {ndim} sizes: it must begin with "
                f"{bytes([0, 0, _BYTES, ndim]).hex()}, got {head[:4].hex() or 'nothing'}"
            )
        if len(head) < 4 * (1 + ndim):
            raise DataError(f"{path} is truncated: it ends in its header")
        shape = np.frombuffer(head, ">u4", offset=4).tolist()
        size = math.prod(shape)
        if len(head) + size > most:
            raise DataError(f"{path} declares {size} bytes {shape}, more than the file can hold")
        body = read_up_to(stream, size + 1)
    if len(body) != size:
        relation = "fewer" if len(body) < size else "more"
        raise DataError(f"{path} declares {size} bytes {shape}, but has {relation}")
    if not size:  # of which torch makes no buffer
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(body, dtype=torch.uint8).view(shape)
