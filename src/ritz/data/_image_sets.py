"""Readers of image sets: digits, MNIST, Fashion-MNIST, ImageNet-32, folders of image files."""

import math
import zipfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import read_array
from numpy.typing import NDArray
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz.data._catalogue import DATASETS
from ritz.data._files import (
    FORMATS,
    LIMIT,
    DataError,
    locate,
    open_file,
    read_image,
    read_up_to,
)
from ritz.data._images import (
    Augmentation,
    ImageData,
    Samples,
    check_classes,
    hold_out,
    image_data,
)

# ------------------------------------------------------------------------------------------
# The handwritten digits that scikit-learn includes.


@DATASETS.register("digits")
def digits(root: Path | None, *, validation: int = 0) -> ImageData:
    """Digits: 1,280 training and 517 test images of 8 x 8 grey pixels, part of scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits need scikit-learn: pip install scikit-learn") from error
    table = load_digits()
    # Levels 0 to 16 become 0 to 240: integers, in about the range of other images.
    images = (15 * torch.from_numpy(table.images)).to(torch.uint8).unsqueeze(1)
    samples = images, torch.from_numpy(table.target).to(torch.int64)
    # 517 test images leave 1280, which are five batches of 256.
    train, test = hold_out(samples, 517)
    return image_data("digits", train, test, "0123456789", validation=validation, seeded=True)


# ------------------------------------------------------------------------------------------
# MNIST and Fashion-MNIST, from idx files, compressed or not.

IDX_FOLDERS = {
    "mnist": ("mnist", "MNIST", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST", "FashionMNIST/raw"),
}


@DATASETS.register("mnist")
def mnist(root: Path | None, *, validation: int = 0) -> ImageData:
    """MNIST: 60,000 training and 10,000 test images of digits, 28 x 28 grey pixels."""
    page = "https://yann.lecun.com/exdb/mnist"
    return _idx_data("mnist", root, "0123456789", validation, page)


@DATASETS.register("fashion-mnist")
def fashion_mnist(root: Path | None, *, validation: int = 0) -> ImageData:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28 grey pixels."""
    classes = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
    page = "https://github.com/zalandoresearch/fashion-mnist"
    return _idx_data("fashion-mnist", root, classes.split(","), validation, page)


def _idx_data(
    name: str, root: Path | None, classes: Sequence[str], validation: int, page: str
) -> ImageData:
    folders = [*IDX_FOLDERS[name], "."]
    # The files of both sets have the same names: those in a folder of the other set are ignored.
    if root is not None and any(
        root.name in places for other, places in IDX_FOLDERS.items() if other != name
    ):
        folders.remove(".")
    kinds = ("images-idx3", "labels-idx1")
    files = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in kinds]
    hint = f"get the four files of {page}"
    paths = locate(name, files, root=root, folders=folders, hint=hint)
    train, test = (_idx_samples(paths[i], paths[i + 1], len(classes)) for i in (0, 2))
    return image_data(name, train, test, classes, validation=validation)


def _idx_samples(images_path: Path, labels_path: Path, num_classes: int) -> Samples:
    images, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} images, but {labels_path} {len(labels)} labels"
        )
    return images.unsqueeze(1), check_classes(labels_path, labels, num_classes)


def read_idx(path: Path, *, ndim: int) -> Tensor:
    """Return the bytes of an idx file with ``ndim`` dimensions, in its shape."""
    magic = bytes([0, 0, 0x08, ndim])  # 0x08 is the code of unsigned bytes
    with open_file(path) as stream:
        head = bytes(read_up_to(stream, 4 * (1 + ndim)))
        if head[:4] != magic:
            raise DataError(
                f"{path} is not an idx file of bytes with {ndim} dimensions: it must begin with "
                f"{magic.hex()}, got {head[:4].hex() or 'nothing'}"
            )
        if len(head) < 4 * (1 + ndim):
            raise DataError(f"{path} is truncated: it ends in its header")
        # Sizes are big-endian. As Python integers, their product cannot overflow.
        shape = np.frombuffer(head, ">u4", offset=4).tolist()
        size = math.prod(shape)
        if size > LIMIT:
            raise DataError(f"{path} declares {size} bytes; at most {LIMIT} are read")
        # Memory is allocated as bytes arrive, whatever the header declares. One byte more than that
        # is requested, to notice a longer file.
        body = read_up_to(stream, size + 1)
    if len(body) != size:
        relation = "fewer" if len(body) < size else "more"
        raise DataError(f"{path} declares {size} bytes {shape}, but has {relation}")
    return torch.from_numpy(np.frombuffer(body, np.uint8).reshape(shape))


# ------------------------------------------------------------------------------------------
# ImageNet-32, from npz files.


@DATASETS.register("imagenet32")
def imagenet32(root: Path | None, *, validation: int = 0) -> ImageData:
    """ImageNet-32: 1,281,167 training and 50,000 test images, 32 x 32 pixels, 1,000 classes."""
    files = [*(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz"]
    folders = ("imagenet32", "Imagenet32_train_npz", "imagenet-32", ".")
    hint = (
        "get the npz files of 32 x 32 pixels of https://image-net.org/download-images.php "
        "(an account is needed), training and validation into one folder"
    )
    paths = locate("imagenet32", files, root=root, folders=folders, hint=hint)
    train, test = _npz_samples(paths[:-1]), _npz_samples(paths[-1:])
    classes, usual = [str(number) for number in range(1, 1001)], Augmentation()
    return image_data("imagenet32", train, test, classes, usual, validation=validation)


def _npz_samples(paths: list[Path]) -> Samples:
    # One block for the images of all files, which are read one after the other.
    labels = [_npz_labels(path) for path in paths]
    images = torch.empty(sum(map(len, labels)), 3, 32, 32, dtype=torch.uint8)
    for path, part in zip(paths, images.split([len(part) for part in labels]), strict=True):
        pixels = read_member(path, "data")
        if pixels.shape != (len(part), 3072) or pixels.dtype != np.uint8:
            kind = f"{pixels.dtype} {pixels.shape}"
            raise DataError(f"{path}: 'data' must be uint8 ({len(part)}, 3072), got {kind}")
        part.copy_(torch.from_numpy(pixels).view(part.shape))
    return images, torch.cat(labels)


def _npz_labels(path: Path) -> Tensor:
    labels = read_member(path, "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        kind = f"{labels.dtype} {labels.shape}"
        raise DataError(f"{path} must have integers (n,) under 'labels', got {kind}")
    # The files count classes from 1.
    return check_classes(path, torch.from_numpy(labels.astype(np.int64)) - 1, 1000)


def read_member(path: Path, key: str) -> NDArray[Any]:
    """Return one array of an npz file; arrays of objects raise, and nothing in them is executed."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as stream:
            # No more bytes are decompressed than the archive declares.
            if (size := archive.getinfo(f"{key}.npy").file_size) > LIMIT:
                raise ValueError(f"{key!r} has {size} bytes; at most {LIMIT} are read")
            array: NDArray[Any] = read_array(stream, allow_pickle=False)
            return array
    except KeyError as error:
        raise DataError(f"{path} has no array {key!r}") from error
    except Exception as error:  # a damaged archive can raise anything
        raise DataError(f"{path} is truncated or not an npz file of numbers: {error}") from error


# ------------------------------------------------------------------------------------------
# Folders of images with one sub-folder per class, read with Pillow.


@DATASETS.register("folder")
def folder(
    root: Path | None,
    *,
    validation: int = 0,
    size: int | None = None,
    channels: int = 3,
    test_fraction: float = 0.1,
) -> ImageData:
    """Your images: data_dir/CLASS/FILE, or data_dir/train/CLASS/FILE and data_dir/test (or val)."""
    check_choice("channels", str(channels), ("1", "3"))
    if size is not None:
        size = check_count("size", size)
    if root is None or not root.is_dir():
        raise FileNotFoundError(
            f"data_dir must be a folder of images, got {str(root or '')!r}: it must have a folder "
            "for each class, or folders train and test with a folder for each class"
        )
    check_range("test_fraction", test_fraction, low=0, high=0.9)
    names = ["."]
    if separate := (root / "train").is_dir():
        parts = ("train", "test", "val", "valid", "validation")
        names = [name for name in parts if (root / name).is_dir()]
        if len(names) == 1:
            raise FileNotFoundError(f"{root} has a folder train, but no test or val beside it")
    classes = _folder_classes(root / names[0])
    files = [_folder_files(root / name, classes) for name in names]
    samples, lengths = _folder_samples([*chain(*files)], size, channels), list(map(len, files))
    train, *others = zip(*(tensor.split(lengths) for tensor in samples), strict=True)
    if not separate:
        train, *others = hold_out(samples, max(1, round(test_fraction * lengths[0])))
    # Without a test folder the validation images are the test images, as for ImageNet.
    test, held = others[0], others[1] if len(others) > 1 else None
    return image_data(
        "folder", train, test, classes, held=held, validation=validation, seeded=not separate
    )


def _folder_classes(root: Path) -> list[str]:
    names = sorted(path.name for path in root.glob("[!.]*") if path.is_dir())
    if not names:
        raise DataError(f"{root} must contain a folder for each class, got none")
    return names


def _folder_files(root: Path, classes: list[str]) -> list[tuple[Path, int]]:
    unknown = sorted(set(_folder_classes(root)) - set(classes))
    if unknown:
        raise DataError(f"{root} has a class {unknown[0]!r} that the training images do not have")
    files: list[tuple[Path, int]] = []
    for number, place in enumerate(root / name for name in classes):
        # Hidden files and files with other endings are skipped.
        paths = sorted(place.glob("[!.]*"))
        images = [path for path in paths if path.suffix.lower() in FORMATS]
        if not images:
            raise DataError(f"{place} has no images ({', '.join(FORMATS)})")
        files += [(path, number) for path in images]
    return files


def _folder_samples(files: list[tuple[Path, int]], size: int | None, channels: int) -> Samples:
    mode = "L" if channels == 1 else "RGB"
    first = read_image(files[0][0], size, mode)
    # One block for all images, which are read one after the other.
    images = torch.empty(len(files), *first.shape, dtype=torch.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        pixels = read_image(path, size, mode)
        if pixels.shape != first.shape:
            (_, height, width), (_, rows, columns) = first.shape, pixels.shape
            raise DataError(
                f"images must be of one size, got {width} x {height} in {files[0][0]} and "
                f"{columns} x {rows} in {path}: give size= (--set-data size=64) to resize them"
            )
        image.copy_(pixels)
    return images, torch.tensor([target for _, target in files], dtype=torch.int64)
