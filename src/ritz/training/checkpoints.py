"""Where a run is: all that it needs to go on bit for bit, in one file."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.storage import load, save, storable
from ritz.optim.companions import parameters

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
class Folder:
    """A folder with the last good checkpoint of a run.

    A new one replaces the old when it is whole on the disk: whatever happens in between, one of the
    two is there.

    Args:
        path: Made where it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._good: str | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the checkpoint folder {self.path}: "
                                  f"{error.strerror}") from error  # fmt: skip

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.path / NAME

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        try:
            save(checkpoint, self.file)
        except (OSError, SafetensorError) as error:
            # safetensors reports what the system said in words of its own
            reason = getattr(error, "strerror", None) or str(error)
            left = f"the last good one, {self._good}, is whole" if self._good else "none is there"
            raise CheckpointError(f"cannot write the checkpoint {self.file}: {reason}; "
                                  f"{left}") from error  # fmt: skip
        self._good = _place(checkpoint)

    def read(self) -> Checkpoint | None:
        """The checkpoint, if there is one."""
        if not self.file.exists():
            return None
        found = load(self.file)
        if not isinstance(found, Checkpoint):
            raise ValueError(f"{self.file} must be a checkpoint of training, got "
                             f"{type(found).__name__}")  # fmt: skip
        self._good = _place(found)
        return found


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
