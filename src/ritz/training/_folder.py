"""The files of a run: its lock, log, checkpoint and weights."""

import contextlib
import errno
import json
import os
import pickle
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from ritz._core.distributed import all_max
from ritz._core.params import parameters
from ritz._core.storage import (
    UNTOUCHED,
    CorruptFileError,
    is_own,
    load,
    read_tensors,
    save,
    storable,
    to_json,
    write_tensors,
    write_text,
)
from ritz.training._data import is_writer

# ------------------------------------------------------------------------------------------
# Files of a run are no links: what is written goes to the file that has the name, or nowhere.


class LinkError(OSError):
    """A file that is to be written is a link to another."""


def check_no_link(path: Path) -> None:
    """Raise where a file that is to be written is a link, whether or not it leads anywhere."""
    if path.is_symlink():
        raise LinkError(f"{path} is a link, and what it leads to would be overwritten: remove it, "
                        "or give another path")  # fmt: skip


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that is no link, made where it is missing."""
    check_no_link(path)
    never = getattr(os, "O_NOFOLLOW", 0)  # not even one that was made just now
    return os.open(path, flags | os.O_CREAT | never, 0o666)


# ------------------------------------------------------------------------------------------
# One process at a time writes in a folder: the kernel has the lock, and ends it with its
# owner.

try:
    import fcntl
except ImportError:  # not a POSIX system: nobody is kept out
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_held: set[int] = set()  # of this process, which the workers of a loader must not inherit


class FolderInUseError(OSError):
    """Another process is writing in the folder."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Be the one process that writes in a folder, for the block.

    A file ``.lock`` is there meanwhile. One that a killed process left is no lock: that ended when
    the process did. Where the file system knows no locks, nobody is kept out.
    """
    path = folder / LOCK
    file = _locked(path)
    _held.add(file)
    try:
        yield
    finally:
        _held.discard(file)
        with contextlib.suppress(OSError):
            path.unlink()  # before it is open to others: see _locked
        os.close(file)


def _locked(path: Path) -> int:
    """A descriptor of the file that has the name ``path`` and is locked by it."""
    while True:
        file = open_own(path, os.O_RDWR)
        try:
            _lock(file, path)
            # The owner before may have removed the name between opening and locking.
            if _is_at(file, path):
                os.ftruncate(file, 0)
                os.write(file, f"{os.getpid()}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _lock(file: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in TAKEN:
            return
        owner = os.read(file, 20).decode(errors="replace").strip()
        whose = f" (pid {owner})" if owner.isdigit() else ""
        raise FolderInUseError(f"another process is writing in {path.parent}{whose}: wait until it "
                               "is done, or give another folder") from error  # fmt: skip


def _let_go() -> None:
    """Close what a fork has inherited: a lock lasts as long as anybody has it open."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

# ------------------------------------------------------------------------------------------
# The log of a run: JSON lines, whole whenever the process ends, cut back when it is resumed.
#
# Every line is one record with a ``kind``: ``epoch``, ``curvature`` (of a monitor) or
# ``final``. No record holds a time, so that a run that was interrupted and resumed has the
# log of one that was not, byte for byte; times go to a second file beside it, whose name ends
# in ``.times.jsonl``.

Record = dict[str, Any]


class LogError(OSError):
    """The log cannot be written; the message says why and what is left of it."""


@final
class Log:
    """Appends records to a file of JSON lines, each in one write.

    A kill leaves whole lines. A line that cannot be written whole (disk full) is taken out again.

    Args:
        path: The file, made where it is missing, and no link; its folder must exist.
        size: Bytes to keep of a file that is there; what follows them is cut.
    """

    def __init__(self, path: str | os.PathLike[str], *, size: int = 0) -> None:
        self.path = Path(path)
        check_no_link(self.path)
        present = self.path.stat().st_size if self.path.exists() else 0
        if present < size:
            raise ValueError(f"log must be that of the run that is resumed, with {size} bytes or "
                             f"more; {self.path} has {present}")  # fmt: skip
        try:
            self._file = open_own(self.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._file, size)
        except OSError as error:
            raise LogError(f"cannot write the log {self.path}: {error.strerror}") from error
        self._size = size

    def write(self, record: Record) -> None:
        """Append one record."""
        line = (to_json(record) + "\n").encode()
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise LogError(f"cannot write the log {self.path}: {error.strerror}; the {self._size} "
                           "bytes before are whole") from error  # fmt: skip
        self._size += len(line)

    def flush(self) -> int:
        """Have the lines on the disk; return their bytes."""
        os.fsync(self._file)
        return self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_log(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a log, in their order; half a line at the end is left out.

    Args:
        path: A file of JSON lines.
    """
    whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.split(b"\n") if line]


def size_without_final(path: str | os.PathLike[str], size: int) -> int:
    """Bytes of a log of ``size`` bytes without a record of the end of the run, if it has one."""
    if not Path(path).is_file():
        return size
    with open(path, "rb") as file:
        lines = file.read(size).splitlines(keepends=True)
    last = json.loads(lines[-1]) if lines and lines[-1].endswith(b"\n") else {}
    return size - len(lines[-1]) if last.get("kind") == "final" else size


def times_path(path: str | os.PathLike[str]) -> Path:
    """Where the times beside a log are."""
    return Path(path).with_suffix(".times.jsonl")


# ------------------------------------------------------------------------------------------
# Where a run is: all that it needs to go on bit for bit, in one file.

NAME = "checkpoint.safetensors"
WEIGHTS, AVERAGE = "weights.safetensors", "average.safetensors"


class CheckpointError(OSError):
    """A checkpoint cannot be written; the message says why and what is left."""


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a run between two steps.

    Attributes:
        model: Parameters and buffers by name.
        optimizer: The state of the optimiser, with its average and Lookahead.
        schedule: That of the schedule.
        scaler: That of the scaler of gradients.
        patience: That of what waits for averaging to begin, or ``None``.
        generators: States of the global generators now, by device, a row for each process.
        beginning: The same at the beginning of the epoch, which data may have drawn from.
        epoch: Whole epochs done.
        batch: Batches done of the next one.
        step: Steps done.
        totals: Sums of loss and right answers of the epoch so far, by process.
        records: What was logged of every epoch.
        log_bytes: Length of the log.
        settings: What the run was asked to do.
        finished: Whether it has ended.
        carried: State of a recurrent model within the epoch, a row for each process.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    patience: dict[str, Any] | None
    generators: dict[str, Tensor]
    beginning: dict[str, Tensor]
    epoch: int
    batch: int
    step: int
    totals: Tensor
    records: list[dict[str, Any]]
    log_bytes: int
    settings: dict[str, Any]
    finished: bool
    carried: dict[str, Tensor] = field(default_factory=dict)


@final
class Folder(os.PathLike[str]):
    """A folder with the last good checkpoint of a run, and files of weights of the same run.

    A new checkpoint replaces the old when it is whole on the disk: whatever happens in between, one
    of the two is there. Weights and average are there at the end of a run alone: they are gone
    before there is a checkpoint of more steps.

    Args:
        path: Made where it is missing.
        texts: Files to write once a run has begun, by name.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, texts: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        self._texts, self._good = dict(texts or {}), ""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the checkpoint folder {self.path}: "
                                  f"{error.strerror}") from error  # fmt: skip

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.path / NAME

    def clear(self) -> None:
        """Remove what another run has left."""
        with self._writing("begin a run in", self.path):
            # The checkpoint first: without it nothing goes on from what is left.
            _remove([self.file, *self._weights()])
        self._good = ""

    def write_texts(self) -> None:
        """Say whose the folder is now."""
        with self._writing("begin a run in", self.path):
            for name, text in self._texts.items():
                write_text(self.path / name, text)

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        with self._writing("write the checkpoint", self.file):
            if not checkpoint.finished:
                _remove([self.path / WEIGHTS, self.path / AVERAGE])
            save(checkpoint, self.file)
        self._good = _place(checkpoint)

    def read(self) -> Checkpoint | None:
        """The checkpoint, if there is one; raise where weights of a run are there without it."""
        if not self.file.exists():
            left = next((path for path in self._weights() if is_own(path)), None)
            if left is not None:
                raise CheckpointError(f"{left} is of a run whose checkpoint is gone: begin anew "
                                      "with resume=False (--restart), which removes it, or give "
                                      "another folder")  # fmt: skip
            return None
        found = load(self.file)
        if not isinstance(found, Checkpoint):
            raise ValueError(f"{self.file} must be a checkpoint of training, got "
                             f"{type(found).__name__}")  # fmt: skip
        self._good = _place(found)
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the one process that writes in it, for the block; what was left half is removed."""
        with ExitStack() as stack:
            with self._writing("write to", self.path):
                stack.enter_context(sole_writer(self.path))
                self._remove_unfinished()
            yield

    @contextmanager
    def _writing(self, what: str, path: Path) -> Iterator[None]:
        """Say what is left where the system refuses."""
        try:
            yield
        except CheckpointError:
            raise
        except (FolderInUseError, LinkError) as error:
            raise CheckpointError(str(error)) from error
        except (OSError, SafetensorError) as error:
            # safetensors reports what the system said in words of its own
            reason = getattr(error, "strerror", None) or str(error)
            left = "what is there is whole" if self.file.exists() else "none is there"
            if self._good:
                left = f"the last good one, {self._good}, is whole"
            raise CheckpointError(f"cannot {what} {path}: {reason}; {left}") from error

    def _weights(self) -> list[Path]:
        """The files of weights that are there."""
        kept = sorted(self.path.glob("epoch-[0-9]*.safetensors"))
        found = [self.path / WEIGHTS, self.path / AVERAGE, *kept]
        return [path for path in found if path.exists()]

    def _remove_unfinished(self) -> None:
        """Remove what a run that was killed while it wrote has left: as large as a checkpoint."""
        for name in (NAME, WEIGHTS, AVERAGE):
            for path in self.path.glob(f".{name}.*"):
                path.unlink(missing_ok=True)
        # Names that safetensors gives do not tell whose they are: a new one may be in use.
        for path in self.path.glob(".tmp??????"):
            if time.time() - path.stat().st_mtime > UNTOUCHED:
                path.unlink(missing_ok=True)


@contextmanager
def held_folder(place: str | os.PathLike[str] | None) -> Iterator[Folder | None]:
    """The folder of a run, held by the process that writes; raise in all where it cannot be."""
    if place is None:
        yield None
        return
    folder = place if isinstance(place, Folder) else Folder(place)
    with ExitStack() as stack:
        refused: CheckpointError | None = None
        if is_writer():
            try:
                stack.enter_context(folder.held())
            except CheckpointError as error:
                refused = error
        if all_max(int(refused is not None)):
            raise refused or CheckpointError(f"the first process cannot write in {folder.path}")
        yield folder


def _remove(paths: Iterable[Path]) -> None:
    """Remove files of an earlier run; where one is another's, all stay."""
    found = [path for path in paths if path.exists()]
    for path in found:
        if not is_own(path):
            raise CheckpointError(f"{path} is not of a run: move it, or give another folder")
    for path in found:
        path.unlink(missing_ok=True)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimiser with keys that a file may have."""
    found = optimizer.state_dict()
    return {"state": {str(key): entry for key, entry in found["state"].items()},
            "param_groups": found["param_groups"]}  # fmt: skip


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any], device: torch.device) -> None:
    """Put a state from a file into an optimiser, with rates that are tensors on the device."""
    params = list(parameters(optimizer))
    entries = {int(key): {name: _arranged(value, params[int(key)]) for name, value in entry.items()}
               for key, entry in state["state"].items()}  # fmt: skip
    groups = [{name: value.to(device) if isinstance(value, Tensor) else value
               for name, value in group.items()} for group in state["param_groups"]]  # fmt: skip
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _arranged(value: Any, param: Tensor) -> Any:
    """A tensor of a state in the order of its parameter, which fused kernels want."""
    if not isinstance(value, Tensor) or value.ndim != 4 or value.shape != param.shape:
        return value
    return torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)


def _place(checkpoint: Checkpoint) -> str:
    return f"of {checkpoint.epoch} epochs and {checkpoint.step} steps"


# ------------------------------------------------------------------------------------------
# Weights of models in files: our own, safetensors, and ``.pt`` without what could run.

PREFIX = "model."  # of the weights in a checkpoint of training
COMPILED = "_orig_mod"  # the part that torch.compile puts into names
NESTED = ("state_dict", "model_state_dict", "model")  # where others put them in a .pt file


def save_weights(model: nn.Module, path: str | os.PathLike[str], **header: Any) -> None:
    """Write the parameters and buffers of a model as one safetensors file, atomically.

    Args:
        model: Any module.
        path: The file.
        **header: What else to say, in plain values.
    """
    write_tensors(path, tensor_state(model), {"kind": "weights"} | header)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put the weights and buffers of a file into a model, in place.

    Args:
        model: Of the architecture that the file was made from; the first tensor that differs is
            named otherwise, and the model left as it was. Weights that it ties stay tied: the file
            may have them under all their names, which must agree, or under one.
        path: A checkpoint or weights of ritz, any other safetensors file of named tensors, or a
            ``.pt`` file, which is read with ``weights_only=True``: nothing in it runs.
    """
    held = tensor_state(model)
    found = _with_tied(held, read_weights(path), path)
    check_matches(held, found, path)
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(found[name])


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The named tensors of a file, on the CPU; see :func:`load_weights` for which files."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    found = _plain_names(_read_pickle(path) if _is_pickle(path) else _read_safetensors(path))
    wrapped = all(name.startswith("module.") for name in found)  # by DistributedDataParallel
    return {name.removeprefix("module."): x for name, x in found.items()} if wrapped else found


def tensor_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name."""
    found = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return _plain_names(found)


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names that they have where neither model nor part of it is compiled."""
    if not any(COMPILED in name.split(".") for name in tensors):
        return tensors
    return {".".join(part for part in name.split(".") if part != COMPILED): x
            for name, x in tensors.items()}  # fmt: skip


def _with_tied(
    held: Mapping[str, Tensor], found: dict[str, Tensor], path: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """The tensors of a file with those that the model ties under all their names."""
    groups: dict[Any, list[str]] = {}
    for name, x in held.items():
        # Alike in all this, two are one; an empty tensor lies nowhere.
        place = (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.numel() else name
        groups.setdefault(place, []).append(name)
    for names in groups.values():
        for name in names:
            first = next((each for each in names if each in found), name)
            if first in found and not _equal(found.setdefault(name, found[first]), found[first]):
                raise ValueError(f"{path} is of another architecture: {first} and {name} differ "
                                 "there, and are one in the model")  # fmt: skip
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other or one.shape != other.shape:
        return one is other
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_matches(
    held: Mapping[str, Tensor], found: Mapping[str, Tensor], path: str | os.PathLike[str]
) -> None:
    """Raise unless a file has the tensors of a model, naming the first that differs."""
    for name, tensor in held.items():
        if name not in found:
            raise ValueError(f"{path} is of another architecture: it has no {name}, which the "
                             f"model has")  # fmt: skip
        if found[name].shape != tensor.shape:
            raise ValueError(f"{path} is of another architecture: {name} has shape "
                             f"{tuple(found[name].shape)} there, {tuple(tensor.shape)} in the "
                             f"model")  # fmt: skip
    extra = next((name for name in found if name not in held), None)
    if extra is not None:
        raise ValueError(f"{path} is of another architecture: it has {extra}, which the model has "
                         f"not")  # fmt: skip


def _is_pickle(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        start = file.read(2)
    # Zip archives are torch's format; a lone pickle begins with its protocol.
    return start == b"PK" or start[:1] == b"\x80"


def _read_pickle(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        # Open, for torch goes by the names of files, and this one may be called .safetensors.
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an unknown protocol: then it raises
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptFileError(f"{path} is refused: it holds more than tensors and plain values, "
                               "and reading that could run anything, or has another protocol of "
                               "pickle than torch's own, 2") from error  # fmt: skip
    except (RuntimeError, EOFError, OSError) as error:
        raise CorruptFileError(f"{path} is damaged or not a file of torch: {error}") from error
    for key in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise CorruptFileError(f"{path} must hold named tensors, got {type(found).__name__}")
    return dict(found)


def _read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if is_own(path):
        tensors, header = read_tensors(path)
        if isinstance(header, Mapping) and header.get("kind") == "weights":
            return tensors
        return {name.removeprefix(PREFIX): x
                for name, x in tensors.items() if name.startswith(PREFIX)}  # fmt: skip
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file: {error}") from error
