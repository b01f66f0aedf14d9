"""Where a long Lanczos run writes how far it is, so that it can go on from there."""

import contextlib
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ritz._core.distributed import Group, all_max, all_min, rank, world_size
from ritz._core.storage import CorruptFileError, read_tensors, write_tensors
from ritz.spectra.recurrence import Recurrence


@dataclass(slots=True)
class Journal:
    """The files of one resumable run.

    ``path`` says how far the run is; ``path.previous`` is the one before it; the basis lies beside
    them in parts that are written once, since its vectors do not change until a restart. So a save
    costs what is new, and a crash at any moment leaves the old state or the new one. With several
    processes each writes its own files, and all of them go on from a step that all of them have.

    Attributes:
        path: Of the newest state.
        settings: What a state must have been made with to be continued.
        interval: Least seconds between saves.
        group: The processes of the run.
    """

    path: Path
    settings: dict[str, Any]
    interval: float
    group: Group | None
    generation: int = 0
    parts: list[str] | None = None
    saved_rows: int = 0
    saved_at: float = 0.0

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        settings: dict[str, Any],
        interval: float,
        group: Group | None,
    ) -> "Journal":
        """Return the journal at ``path``, or at a name of this process's own beside it."""
        target = Path(path)
        if world_size(group) > 1:
            target = target.with_name(f"{target.name}.rank{rank(group)}")
        return cls(target, settings, interval, group, saved_at=time.monotonic())

    @property
    def previous(self) -> Path:
        """Path of the state before the newest."""
        return self.path.with_name(self.path.name + ".previous")

    def due(self) -> bool:
        """Whether it is time to save; all processes agree on it."""
        return bool(all_max(int(time.monotonic() - self.saved_at >= self.interval), self.group))

    def save(self, run: Recurrence, progress: dict[str, int]) -> None:
        """Write the state after ``progress["spent"]`` products."""
        generation = progress["spent"] if run.mode == "none" else progress["restarts"]
        if self.parts is None or generation != self.generation:
            self.generation, self.parts, self.saved_rows = generation, [], 0
        rows = run.basis.rows[self.saved_rows : run.basis.size]
        if len(rows):
            name = f"{self.path.name}.{generation}.{self.saved_rows}-{run.basis.size}"
            write_tensors(self.path.with_name(name), {"rows": rows}, {})
            self.parts = [*self.parts, name]
            self.saved_rows = run.basis.size
        header = {"settings": self.settings, "parts": self.parts, "progress": progress}
        pending = self.path.with_name(self.path.name + ".next")
        write_tensors(pending, run.memory(), header | {"generation": generation})
        if self.path.exists():
            os.replace(self.path, self.previous)
        os.replace(pending, self.path)
        self._remove_unused()
        self.saved_at = time.monotonic()

    def load(self, run: Recurrence) -> dict[str, int] | None:
        """Put ``run`` where the newest usable state was; ``None`` where there is no state."""
        found = {}
        for path in (self.path, self.previous):
            try:
                tensors, header, rows = self._read(path)
            except FileNotFoundError:
                continue
            except CorruptFileError as error:
                self._refuse(path, error)
                continue
            found[header["progress"]["spent"]] = (tensors, header, rows)
        common = all_min(max(found, default=-1), self.group)
        if common < 0:
            if self.path.exists() or self.previous.exists():
                raise CorruptFileError(
                    f"no usable state at {self.path}: delete {self.path.name}* to start afresh"
                )
            return None
        if common not in found:
            raise CorruptFileError(
                f"{self.path}: no state at step {common}, where another process is"
            )
        tensors, header, rows = found[common]
        run.recall(tensors, rows)
        self.generation, self.parts, self.saved_rows = (
            header["generation"],
            header["parts"],
            len(rows),
        )
        progress: dict[str, int] = header["progress"]
        return progress

    def _read(self, path: Path) -> tuple[dict[str, Tensor], Any, Tensor]:
        tensors, header = read_tensors(path)
        for key, value in self.settings.items():
            if header["settings"].get(key) != value:
                raise ValueError(
                    f"state at {path} was made with {key}={header['settings'].get(key)}, "
                    f"this run has {key}={value}: use another path or delete it"
                )
        pieces = []
        for name in header["parts"]:
            try:
                pieces.append(read_tensors(self.path.with_name(name))[0]["rows"])
            except FileNotFoundError as error:
                raise CorruptFileError(f"{path} needs {name}, which is missing") from error
        return tensors, header, torch.cat(pieces)

    def _refuse(self, path: Path, error: CorruptFileError) -> None:
        warnings.warn(f"state refused, looking for the previous one: {error}", RuntimeWarning, 2)

    def _remove_unused(self) -> None:
        used = set(self.parts or [])
        # Nothing need be spared for a state that cannot be used.
        with contextlib.suppress(FileNotFoundError, CorruptFileError):
            used |= set(read_tensors(self.previous)[1]["parts"])
        for part in self.path.parent.glob(f"{self.path.name}.*.*-*"):
            if part.name not in used:
                part.unlink()
