"""ImageNet of 32 x 32 pixels, from its npz files, in which no object is ever unpickled."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from ritz.data._catalogue import DATASETS
from ritz.data._files import CHUNK, INFLATION, DataError, locate
from ritz.data._images import Augmentation, ImageData, Samples, check_classes, image_data

NUM_CLASSES = 1000
_PIXELS = (3, 32, 32)
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)


@DATASETS.register("imagenet32")
def imagenet32(root: Path | None, *, validation: int = 0) -> ImageData:
    """ImageNet-32: 1,281,167 + 50,000 colour images of 32 x 32 pixels in 1,000 classes."""
    files = [*(f"train_data_batch_{number}.npz" for number in range(1, 11)), "val_data.npz"]
    folders = ("imagenet32", "Imagenet32_train_npz", "imagenet-32", ".")
    hint = (
        "get the npz files of 32 x 32 pixels of https://image-net.org/download-images.php "
        "(an account is needed), training and validation into one folder"
    )
    paths = locate("imagenet32", files, root=root, folders=folders, hint=hint, endings=("",))
    return image_data(
        "imagenet32",
        train=_samples(paths[:-1]),
        test=_samples(paths[-1:]),
        classes=tuple(map(str, range(1, NUM_CLASSES + 1))),
        validation=validation,
        augmentation=Augmentation(),
    )


def _samples(paths: list[Path]) -> Samples:
    """Images and classes of some files, which are read into one block, one after the other."""
    labels = [_labels(path) for path in paths]
    images = torch.empty(sum(map(len, labels)), *_PIXELS, dtype=torch.uint8)
    for path, part in zip(paths, images.split([len(part) for part in labels]), strict=True):
        read_member(path, "data", out=part.view(len(part), -1).numpy())
    return images, torch.cat(labels)


def _labels(path: Path) -> torch.Tensor:
    found = read_member(path, "labels")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"{path} must have integers (n,) under 'labels', got {found.dtype} "
                        f"{found.shape}")  # fmt: skip
    targets = torch.from_numpy(found.astype(np.int64)) - 1  # the files count from 1
    check_classes(path, targets, NUM_CLASSES)
    return targets


def read_member(path: Path, key: str, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return one array of an npz file, read into ``out`` if that is given.

    Arrays of objects are refused, and so is one that declares more than the file can hold,
    before memory is taken for it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{key}.npy" not in archive.namelist():
                raise DataError(f"{path} has no array {key!r}")
            info = archive.getinfo(f"{key}.npy")
            with archive.open(info) as stream:
                most = min(info.file_size, INFLATION * path.stat().st_size)
                return _array(stream, most, f"{path}, array {key!r}", out)
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{path} is truncated or not an npz file: {error}") from error


def _array(stream: IO[bytes], most: int, name: str, out: NDArray[Any] | None) -> NDArray[Any]:
    version = npy.read_magic(stream)
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if dtype.hasobject:
        raise DataError(f"{name}: an array of objects is refused, and nothing in it was executed")
    size = math.prod(shape) * dtype.itemsize
    if fortran or size > most:
        raise DataError(f"{name} declares {size} bytes {shape}, more than the file can hold, or "
                        "is not in row-major order")  # fmt: skip
    if out is None:
        out = np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype:
        raise DataError(f"{name} must be {out.dtype} {out.shape}, got {dtype} {shape}")
    flat, at = out.reshape(-1).view(np.uint8), 0
    while at < size:
        chunk = stream.read(min(CHUNK, size - at))
        if not chunk:
            raise DataError(f"{name} is truncated")
        flat[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    if stream.read(1):  # the end is read too, where the checksum is compared
        raise DataError(f"{name} has more bytes than its shape {shape}")
    return out
