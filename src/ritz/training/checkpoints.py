"""Where a run is: all that it needs to go on bit for bit, in one file."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.distributed import all_max
from ritz._core.storage import UNTOUCHED, is_own, load, save, storable, write_text
from ritz.optim.companions import parameters
from ritz.training.feeds import is_writer
from ritz.training.links import LinkError
from ritz.training.locks import FolderInUseError, sole_writer

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
