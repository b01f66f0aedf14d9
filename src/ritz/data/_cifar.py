"""CIFAR-10 and CIFAR-100, from the pickles of their Python version, which are never executed."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeGuard, final

import numpy as np
import torch
from numpy.typing import NDArray

from ritz._core.checks import check_choice
from ritz.data._catalogue import DATASETS
from ritz.data._files import DataError, existing, locate, read_whole
from ritz.data._images import Augmentation, ImageData, Samples, check_classes, image_data

# ------------------------------------------------------------------------------------------
# Pickles of plain data and byte arrays, read as a format: nothing in them is ever executed.
#
# A pickle is a program for a small stack machine. This is that machine without the
# instructions that import or call: of the names a file may mention, the four that describe an
# array or a byte string are read as descriptions, and every other one is refused, as is every
# other instruction.

_RECONSTRUCT, _NDARRAY, _DTYPE, _ENCODE = "array of type", "ndarray", "dtype", "encoded text"
_NAMES = {
    (b"numpy.core.multiarray", b"_reconstruct"): _RECONSTRUCT,
    (b"numpy._core.multiarray", b"_reconstruct"): _RECONSTRUCT,
    (b"numpy", b"ndarray"): _NDARRAY,
    (b"numpy", b"dtype"): _DTYPE,
    (b"_codecs", b"encode"): _ENCODE,
}
_BYTE = (3, "|", None, None, None, -1, -1, 0)  # what numpy says about the type of a byte
_MALFORMED = (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error)
_KEYS = (bytes, str, int)  # tuples as keys could nest deeper than the hash of one can follow


def read_pickle(data: bytes | bytearray, *, name: str) -> dict[str, Any]:
    """Return the dictionary in a pickle of protocol 2, as Python 2 and 3 write it.

    Args:
        data: The pickle; text of Python 2 comes out as bytes, and so do arrays' contents.
        name: Of the file, for messages.

    Returns:
        Keys as text; values as lists, numbers, text, bytes, and arrays of bytes. Memory is at
        most a fixed multiple of ``len(data)``.
    """
    machine = _Machine(data, name)
    try:
        return {str(_text(key)): _settled(value) for key, value in machine.run().items()}
    except DataError:
        raise
    except _MALFORMED as error:
        raise DataError(
            f"{name} is truncated or not a pickle of a dictionary (byte {machine.at}): {error}"
        ) from error


class _Name(str):
    """One of the names that a file may mention."""

    __slots__ = ()


@final
class _Byte:
    """The type of an array of bytes."""

    def build(self, state: Any) -> None:
        if tuple(map(_text, state)) != _BYTE:
            raise ValueError("an unusual description of the type of a byte")


@final
class _Array:
    """An array that is being described."""

    value: NDArray[np.uint8] | None = None

    def build(self, state: Any) -> None:
        version, shape, kind, fortran, content = state
        if version != 1 or not isinstance(kind, _Byte) or fortran not in (False, 0):
            raise ValueError("only arrays of bytes in row-major order are read")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("the shape of an array must be a tuple of counts")
        self.value = np.frombuffer(content, np.uint8).reshape(shape)


class _Machine:
    def __init__(self, data: bytes | bytearray, name: str) -> None:
        self.data, self.view, self.name, self.at = data, memoryview(data), name, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.spare = len(data)  # bytes that may yet be made of text: each once, at most

    def run(self) -> dict[Any, Any]:
        data, steps = self.data, _STEPS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self._only()
            step = steps.get(code)
            if step is None:
                self._refuse(f"the instruction {bytes([code])!r}")
            step(self)

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if count < 0 or self.at > len(self.data):
            raise IndexError("it ends too early")
        return bytes(self.view[start : self.at])

    def integer(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items, self.stack[mark:] = self.stack[mark:], []
        return items

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at, self.at + 256)
        return self.take(end + 1 - self.at)[:-1]

    def name_of(self) -> None:
        module, name = self.line(), self.line()
        if (module, name) not in _NAMES:
            self._refuse(f"the name {_text(module)}.{_text(name)}")
        self.stack.append(_Name(_NAMES[module, name]))

    def reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if not isinstance(function, _Name):
            self._refuse("a call of something else than an array, its type, or encoded text")
        self.stack.append(self._described(function, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Array | _Byte):
            self._refuse(f"a state for {type(self.stack[-1]).__name__}")
        self.stack[-1].build(state)

    def extend(self) -> None:
        items = self.since_mark()
        self.top(list).extend(items)

    def update(self) -> None:
        items = self.since_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.assign(key, value)

    def assign(self, key: Any, value: Any) -> None:
        if not isinstance(key, _KEYS):
            raise TypeError(f"{type(key).__name__} as a key")
        self.top(dict)[key] = value

    def _described(self, function: _Name, arguments: Any) -> Any:
        if function == _ENCODE:
            text, encoding = arguments
            self.spare -= len(text)
            if encoding != "latin1" or self.spare < 0:
                self._refuse("text encoded in another way than latin1, or again and again")
            return text.encode("latin1")
        if function == _DTYPE:
            code = _text(arguments[0])
            if code not in ("u1", "|u1"):
                shown = repr(code[:8]) if isinstance(code, str) else type(code).__name__
                self._refuse(f"an array of type {shown} rather than bytes")
            return _Byte()
        if function != _RECONSTRUCT or arguments[0] != _Name(_NDARRAY):
            self._refuse(f"a call of {function}")
        return _Array()

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"{type(self.stack[-1]).__name__} where a {kind.__name__} must be")
        return self.stack[-1]

    def _only(self) -> dict[Any, Any]:
        (found,) = self.stack
        if type(found) is not dict or self.at != len(self.data):
            raise TypeError("it must be one dictionary and nothing behind it")
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise DataError(
            f"{self.name} is refused, and nothing in it was executed: it has {what} at byte "
            f"{self.at}, which no file of plain images needs"
        )


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _settled(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


def _string(form: str) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.integer(form)))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        items = tuple(machine.stack[-count:])
        if len(items) < count:
            raise IndexError("it takes more than there is")
        machine.stack[-count:] = [items]

    return step


def _put(form: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.memo.__setitem__(machine.integer(form), machine.stack[-1])


def _get(form: str) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.memo[machine.integer(form)])


def _protocol(machine: _Machine) -> None:
    if (version := machine.integer("B")) != 2:
        raise ValueError(f"it is of protocol {version}, and only 2 is read")


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    machine.top(list).append(item)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.assign(key, value)


_STOP = ord(".")
_STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in {
        b"\x80": _protocol,
        b"(": lambda machine: machine.marks.append(len(machine.stack)),
        b"N": _push(lambda machine: None),
        b"\x88": _push(lambda machine: True),
        b"\x89": _push(lambda machine: False),
        b"K": _push(lambda machine: machine.integer("B")),
        b"M": _push(lambda machine: machine.integer("<H")),
        b"J": _push(lambda machine: machine.integer("<i")),
        b"U": _string("B"),
        b"T": _string("<i"),
        b"X": _push(lambda machine: machine.take(machine.integer("<I")).decode("utf-8")),
        b"]": _push(lambda machine: []),
        b"}": _push(lambda machine: {}),
        b")": _push(lambda machine: ()),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": _push(lambda machine: tuple(machine.since_mark())),
        b"a": _append,
        b"e": _Machine.extend,
        b"s": _set_item,
        b"u": _Machine.update,
        b"q": _put("B"),
        b"r": _put("<I"),
        b"h": _get("B"),
        b"j": _get("<I"),
        b"c": _Machine.name_of,
        b"R": _Machine.reduce,
        b"b": _Machine.build,
    }.items()
}

# ------------------------------------------------------------------------------------------
# CIFAR-10 and CIFAR-100, from the pickles of their python version.

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
