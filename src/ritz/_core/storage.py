"""`save` and `load`: results as safetensors with a JSON header, checked and written atomically."""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ritz._core.checks import as_plain
from ritz._version import __version__

T = TypeVar("T")

FORMAT = 1
# JSON shows a tensor with more entries by its shape: a table of numbers would fill the screen.
LISTED = 256
# A temporary file that has not changed for this many seconds is abandoned. Writing a block of a
# checkpoint takes only seconds, even on a slow network disk.
UNTOUCHED = 3600.0
# The one metadata entry of a file: JSON with format, versions, header and sha256.
_KEY = "ritz"
_STORABLE: dict[str, type] = {}
_MALFORMED = (SafetensorError, ValueError, TypeError, AttributeError, OSError, RecursionError)


class CorruptFileError(ValueError):
    """The file is truncated, was altered, or was not written by ritz."""


def storable(cls: type[T]) -> type[T]:
    """Register a dataclass (as a decorator), so that :func:`save` and :func:`load` handle it.

    If the class has a ``__str__``, ``repr`` returns the same summary. The ``repr`` of a dataclass
    would show all entries of all tensors.
    """
    if "__str__" in vars(cls):
        cls.__repr__ = cls.__str__  # type: ignore[method-assign]
    key = _class_key(cls)
    if key in _STORABLE:
        raise ValueError(f"{key} is registered for storage already")
    _STORABLE[key] = cls
    return cls


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path. On success, flush the file and rename it to ``path``.

    Temporary files of ``path`` that killed processes left behind are removed first.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: no folder {target.parent}")
    owner = f"{_machine()}.{os.getpid()}"
    temporary = target.with_name(f".{target.name}.{owner}.{secrets.token_hex(4)}")
    _remove_abandoned(target)
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors sets mode 600, whatever the umask
        _flush(temporary)
        os.replace(temporary, target)
        _flush(target.parent)  # makes the rename itself durable
    finally:
        temporary.unlink(missing_ok=True)


def _machine() -> str:
    # Machines that share a disk may use the same process id.
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _remove_abandoned(target: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.([0-9a-f]{{8}})\.(\d+)\.[0-9a-f]{{8}}")
    # Ignore errors: a file that cannot be removed does no harm beyond the space that it takes.
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if match := pattern.fullmatch(entry.name):
                local = match[1] == _machine() and os.name == "posix"
                # Age counts too, because process ids are reused, and containers on one machine may
                # have the same ids.
                old = time.time() - entry.stat().st_mtime > UNTOUCHED
                if old or (local and not _is_running(int(match[2]))):
                    os.unlink(entry)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it exists, but belongs to another user
    return True


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON text, in the form of ``--json``, logs and ``run.json``.

    NaN and infinities become ``null``, because JSON has no number for them. A tensor becomes
    nested lists, or its shape if it has more than 256 entries. A dataclass becomes an object of
    its fields, without those declared with ``repr=False``, which are internal.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    value = as_plain(value)
    if isinstance(value, Tensor):
        return _plain(value.tolist()) if value.numel() <= LISTED else {"shape": list(value.shape)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return {name: _plain(getattr(value, name)) for name in shown}
    return str(value) if isinstance(value, Path) else value


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` atomically: a crash leaves the old file or the new one."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Any) -> None:
    """Write named tensors and a header of JSON values atomically, with a checksum over both."""
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().contiguous().cpu()
        # safetensors does not save tensors that share memory, such as tied weights.
        place = copy.untyped_storage().data_ptr()
        plain[name] = copy.clone() if place in storages else copy
        storages.add(place)
    body = {"format": FORMAT, "ritz": __version__, "torch": torch.__version__, "header": header}
    body["sha256"] = _digest(plain, body)
    with atomic_path(path) as temporary:
        save_file(plain, temporary, metadata={_KEY: json.dumps(body, sort_keys=True)})


def is_ritz_file(path: str | os.PathLike[str]) -> bool:
    """Return whether :func:`write_tensors` wrote a file. Only the header is read."""
    try:
        with safe_open(path, framework="pt") as file:
            return _KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Any]:
    """Read a file of :func:`write_tensors`. Raise :class:`CorruptFileError` if it was altered."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            body = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = body.pop("sha256")
    except KeyError as error:
        raise CorruptFileError(f"{path} was not written by ritz.save") from error
    except _MALFORMED as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file: {error}") from error
    if body.get("format") != FORMAT:
        raise CorruptFileError(f"{path} has format {body.get('format')}, this ritz reads {FORMAT}")
    if _digest(tensors, body) != digest:
        raise CorruptFileError(f"{path} is corrupted: its checksum does not match its contents")
    return tensors, body.get("header")


def save(result: Any, path: str | os.PathLike[str]) -> None:
    """Save a result (``Spectrum``, ``Estimate``, ``Density``, ...) as one safetensors file.

    Tensors are stored unchanged and everything else as JSON. Nothing is pickled.
    """
    if not dataclasses.is_dataclass(result) or _class_key(type(result)) not in _STORABLE:
        raise TypeError(f"result must be a result of ritz such as Spectrum or Estimate, got "
                        f"{type(result).__name__}")  # fmt: skip
    tensors: dict[str, Tensor] = {}
    header = _encode(result, "", tensors)
    write_tensors(path, tensors, header)


def load(path: str | os.PathLike[str]) -> Any:
    """Load a result of :func:`save` and verify its checksum. No code in the file is executed."""
    tensors, header = read_tensors(path)
    try:
        result = _decode(header, tensors)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path} does not describe a result of ritz: {error!r}") from error
    if not dataclasses.is_dataclass(result):
        is_weights = isinstance(header, dict) and header.get("kind") == "weights"
        content = "weights of a model" if is_weights else f"a {type(result).__name__}"
        raise CorruptFileError(
            f"{path} must hold a result, such as a Spectrum that ritz.save or a command wrote, "
            f"got {content}"
        )
    return result


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while name in tensors:  # {"a.b": x, "a": {"b": y}} has two tensors of one name
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    value = as_plain(value)
    # JSON has no NaN and no infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        items = [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: _encode(v, f"{name}.{k}", tensors) for k, v in value.items()}}
    if dataclasses.is_dataclass(value) and _class_key(type(value)) in _STORABLE:
        fields = {}
        for field in dataclasses.fields(value):
            label = f"{name}.{field.name}".lstrip(".")
            fields[field.name] = _encode(getattr(value, field.name), label, tensors)
        return {"class": _class_key(type(value)), "fields": fields}
    raise TypeError(f"cannot save {name or 'result'}: {type(value).__name__} is not storable")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"float": text}:
            return float(text)
        case {"tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"list": items}:
            return [_decode(item, tensors) for item in items]
        case {"dict": items}:
            return {k: _decode(v, tensors) for k, v in items.items()}
        case {"class": key, "fields": fields}:
            return _find_class(key)(**{k: _decode(v, tensors) for k, v in fields.items()})
    return value


def _class_key(cls: type) -> str:
    # The public package, without private modules: a class may move inside its package.
    module = cls.__module__
    if module.startswith("ritz."):
        module = module.partition("._")[0]
    return f"{module}:{cls.__qualname__}"


def _find_class(key: str) -> type:
    module = key.partition(":")[0]
    parts = module.split(".")
    # A file may cause the import of modules of ritz only, and not of the command line.
    inside = parts[0] == "ritz" and all(part.isidentifier() for part in parts)
    if key not in _STORABLE and inside and not {"cli", "__main__"} & set(parts):
        try:
            importlib.import_module("ritz._core.results" if module == "ritz" else module)
        except ImportError as error:
            raise TypeError(f"{key} cannot be imported: {error}") from error
    if key not in _STORABLE:
        raise TypeError(f"{key} is not a known class of results")
    return _STORABLE[key]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits that identify the values of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(_bytes(tensor.detach().cpu()))
    return sha.hexdigest()[:16]


def _digest(tensors: Mapping[str, Tensor], body: Any) -> str:
    # Keys in one order: the same content has one checksum.
    sha = hashlib.sha256(json.dumps(body, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(_bytes(tensor))
    return sha.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    # Torch considers a tensor with one element contiguous for any strides, but can view it as bytes
    # only if they are 1.
    whole = tensor.contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
