"""The checkpoint of a run: what it contains, the folder it is in, and the lock on this folder."""

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ritz._core import storage
from ritz._core.distributed import all_max, gather_by_process, rank, world_size
from ritz._core.params import parameters

try:
    import fcntl
except ImportError:  # not a POSIX system: folders are not locked
    fcntl = None  # type: ignore[assignment]

FilePath = str | os.PathLike[str]


class CheckpointError(OSError):
    """A file of a run cannot be written. The message says why, and which files are intact."""


@contextmanager
def explain_errors(action: str, left: str = "") -> Iterator[None]:
    """Raise errors of the system again, with the failed action and a note on what is ``left``."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        # safetensors has no strerror, but quotes the message of the system.
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot {action}: {reason}{left}") from error


# ------------------------------------------------------------------------------------------
# One process at a time writes in a folder. The lock belongs to an open file, so the system
# releases it when the process ends, however it ends.

_locks: set[int] = set()  # descriptors of this process


def check_no_link(path: Path) -> None:
    """Raise if a file to be written is a symbolic link, which would redirect what is written."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link: remove it, or choose another path")


def open_file(path: Path, flags: int) -> int:
    """Return a descriptor of a file, created if missing, that is not a link."""
    check_no_link(path)
    # O_NOFOLLOW closes the gap between the check and opening.
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a folder for the block; raise if another process has locked it.

    The lock is on a file ``.lock``, which exists only during the block. If a killed process has
    left this file, it does not lock the folder. On a file system without locks nothing is locked.
    """
    path = folder / ".lock"
    file = _lock(path)
    _locks.add(file)
    try:
        yield
    finally:
        _locks.discard(file)
        with contextlib.suppress(OSError):
            path.unlink()  # before the lock is released: see _lock
        os.close(file)


def _lock(path: Path) -> int:
    """Return a locked descriptor of the file that has the name ``path``."""
    while True:
        file = open_file(path, os.O_RDWR)
        try:
            _acquire(file, path.parent)
            # The previous owner may have removed the name between opening and locking.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.lstat()):
                    os.ftruncate(file, 0)
                    os.write(file, f"{os.getpid()}".encode())
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _acquire(file: int, folder: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return  # the file system has no locks
        owner = os.read(file, 20).decode(errors="replace").strip()
        pid = f" (pid {owner})" if owner.isdigit() else ""
        message = f"another process{pid} is writing in {folder}: wait, or choose another folder"
        raise CheckpointError(message) from error


def _release_in_child() -> None:
    # A lock lasts while any process has the file open: workers of a loader must not inherit it.
    for file in _locks:
        os.close(file)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)

# ------------------------------------------------------------------------------------------
# The checkpoint: all that a run needs to resume bit for bit, in one file.

# Names of the files in a run folder.
CHECKPOINT = "checkpoint.safetensors"
WEIGHTS, AVERAGE = "weights.safetensors", "average.safetensors"


@storage.storable
@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """The state of a run between two steps.

    ``Run`` keeps its counters and records in a checkpoint. When it writes the file, it adds the
    tensors of the model and the states of the other objects.

    Attributes:
        model: Parameters and buffers by name.
        optimizer: State of the optimiser, with its average and Lookahead.
        schedule: State of the schedule.
        scaler: State of the gradient scaler.
        patience: State of ``AutoAverage``, or ``None``.
        generators: Present states of the global generators, by device, one row per process.
        beginning: These states at the beginning of the epoch, when loaders draw their order.
        epoch: Completed epochs.
        batch: Completed batches of the next epoch.
        step: Completed steps.
        totals: Sums of losses and correct answers of the epoch so far, one row per process.
        records: Logged records of all epochs.
        log_bytes: Length of the log.
        settings: Options that a resumed run must share.
        finished: Whether the run has ended.
        carried: State of a recurrent model, one row per process.
        monitors: States of the monitors, by their number.
    """

    settings: dict[str, Any]
    beginning: dict[str, Tensor]
    epoch: int = 0
    batch: int = 0
    step: int = 0
    finished: bool = False
    records: list[dict[str, Any]] = field(default_factory=list)
    log_bytes: int = 0
    model: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    patience: dict[str, Any] | None = None
    generators: dict[str, Tensor] = field(default_factory=dict)
    totals: Any = None
    carried: dict[str, Tensor] = field(default_factory=dict)
    monitors: dict[str, Any] = field(default_factory=dict)


@final
class Folder(os.PathLike[str]):
    """A folder with the last checkpoint of a run, and with files of weights of the same run.

    A new checkpoint replaces the old one after it has been written completely, so one of the two
    always exists. Final weights exist only beside the checkpoint of a finished run. If the run is
    continued, they are removed before the next checkpoint is written.

    Args:
        path: Created if missing.
        texts: Files to write when a run has started, by name.
    """

    def __init__(self, path: FilePath, *, texts: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.file = self.path / CHECKPOINT
        self._texts, self._good = dict(texts or {}), ", if there is one,"
        with explain_errors(f"make the checkpoint folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)

    def __fspath__(self) -> str:
        return str(self.path)

    def clear(self) -> None:
        """Remove the files of another run."""
        with self.writing(f"begin a run in {self.path}"):
            # The checkpoint first: after a crash, no run can resume from the files that are left.
            _remove([self.file, *self._weights()])

    def write_texts(self) -> None:
        """Write the texts, which describe the run."""
        with self.writing(f"begin a run in {self.path}"):
            for name, text in self._texts.items():
                storage.write_text(self.path / name, text)

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        with self.writing(f"write the checkpoint {self.file}"):
            if not checkpoint.finished:
                _remove([self.path / WEIGHTS, self.path / AVERAGE])
            storage.save(checkpoint, self.file)
        self._good = f" ({checkpoint.epoch} epochs, {checkpoint.step} steps)"

    def read(self) -> Checkpoint | None:
        """Return the checkpoint or ``None``; raise if the folder has weights but no checkpoint."""
        if not self.file.exists():
            left = next((path for path in self._weights() if storage.is_ritz_file(path)), None)
            if left is not None:
                raise CheckpointError(
                    f"{self.path} has {left.name} but no checkpoint to resume from: start again "
                    f"with resume=False (--restart), which deletes {left.name}, or choose another "
                    "folder"
                )
            return None
        try:
            checkpoint = storage.load(self.file)
        except storage.CorruptFileError as error:
            advice = "start again with resume=False (--restart), or choose another folder"
            raise storage.CorruptFileError(f"{error}: {advice}") from error
        if not isinstance(checkpoint, Checkpoint):
            kind = type(checkpoint).__name__
            raise ValueError(f"{self.file} must hold the checkpoint of a training run, got {kind}")
        self._good = f" ({checkpoint.epoch} epochs, {checkpoint.step} steps)"
        return checkpoint

    def remove_temporary_files(self) -> None:
        """Remove temporary files of killed processes; the folder must be locked."""
        for name in (CHECKPOINT, WEIGHTS, AVERAGE):
            _unlink(self.path.glob(f".{name}.*"))
        # safetensors chooses these names. New ones may belong to another process that is writing.
        old = time.time() - storage.UNTOUCHED
        _unlink(x for x in self.path.glob(".tmp??????") if x.stat().st_mtime < old)

    def writing(self, action: str) -> AbstractContextManager[None]:
        """Raise errors of the system again, with a note that the last checkpoint is intact."""
        return explain_errors(action, f"; the previous checkpoint{self._good} is intact")

    def _weights(self) -> list[Path]:
        copies = sorted(self.path.glob("epoch-[0-9]*.safetensors"))
        paths = [self.path / WEIGHTS, self.path / AVERAGE, *copies]
        return [path for path in paths if path.exists()]


@contextmanager
def locked_folder(place: FilePath | None) -> Iterator[Folder | None]:
    """Lock the folder of a run for the block and yield it; if that fails, all processes raise."""
    if place is None:
        yield None
        return
    folder = place if isinstance(place, Folder) else Folder(place)
    with ExitStack() as stack:
        refusal: CheckpointError | None = None
        try:
            with folder.writing(f"write to {folder.path}"):
                if rank() == 0:
                    stack.enter_context(sole_writer(folder.path))
                    folder.remove_temporary_files()
        except CheckpointError as error:
            refusal = error
        # All processes raise together: otherwise the others would wait for the first one forever.
        if all_max(int(refusal is not None)):
            raise refusal or CheckpointError(f"the first process cannot write in {folder.path}")
        yield folder


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove(paths: Iterable[Path]) -> None:
    """Remove files of an earlier run; raise, and remove none, if one was not written by ritz."""
    present = [path for path in paths if path.exists()]
    for path in present:
        if not storage.is_ritz_file(path):
            raise CheckpointError(
                f"{path} was not written by ritz and would be deleted: move it, or choose another "
                "folder"
            )
    _unlink(present)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimiser with string keys, which JSON needs."""
    state = optimizer.state_dict()
    return state | {"state": {str(key): entry for key, entry in state["state"].items()}}


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any], device: torch.device) -> None:
    """Load the state of :func:`optimizer_state`; tensors of parameter groups go to ``device``."""
    params = list(parameters(optimizer))
    entries = {
        int(key): {name: _like(value, params[int(key)]) for name, value in entry.items()}
        for key, entry in state["state"].items()
    }
    groups = tree_map_only(Tensor, lambda value: value.to(device), state["param_groups"])
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _like(value: Any, param: Tensor) -> Any:
    # Tensors in files are contiguous, but fused kernels need the memory format of the parameter.
    if not isinstance(value, Tensor) or value.ndim != 4 or value.shape != param.shape:
        return value
    return torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)


# ------------------------------------------------------------------------------------------
# States of random generators in a checkpoint.

LOADER = "loader."  # names of the generators of loaders begin with it


@final
@dataclass(frozen=True, eq=False)
class Generators:
    """The random generators that a run depends on.

    Attributes:
        device: Device whose global generator counts, besides that of the CPU.
        loaders: Generators that loaders and their samplers were given.
    """

    device: torch.device
    loaders: Sequence[torch.Generator] = ()

    def states(self) -> dict[str, Tensor]:
        """Return the states of all generators by name, one row per process."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        for number, loader in enumerate(self.loaders):
            states[f"{LOADER}{number}"] = loader.get_state()
        # NCCL gathers tensors on the GPU only.
        return {name: gather_by_process(state.to(self.device)) for name, state in states.items()}

    def restore(self, states: dict[str, Tensor]) -> None:
        """Restore the states that :meth:`states` returned."""
        count = sum(name.startswith(LOADER) for name in states)
        if count != len(self.loaders):
            raise ValueError(
                f"the loaders of the run had {count} generators at its start, got "
                f"{len(self.loaders)}: pass the same loaders, or start again with resume=False "
                "(--restart)"
            )
        for name, rows in states.items():
            if len(rows) != world_size():
                raise ValueError(
                    f"the run was started with {len(rows)} processes, got {world_size()}: start "
                    f"{len(rows)}, or start again with resume=False (--restart)"
                )
            state = rows[rank()].cpu().clone()  # torch reads a state from the start of its storage
            if name == "cpu":
                torch.set_rng_state(state)
            elif name.startswith(LOADER):
                self.loaders[int(name.removeprefix(LOADER))].set_state(state)
            elif self.device.type == "cuda":
                torch.cuda.set_rng_state(state, self.device)
