"""Where a measurement on its way writes what it has, so that it can go on from there."""

import glob
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from ritz._core.checks import check_range
from ritz._core.distributed import all_min, rank, world_size
from ritz._core.storage import CorruptFileError, load, read_tensors, save, storable, write_tensors
from ritz.curvature import Risk

Row = tuple[float, ...]


@final
class PointJournal:
    """The file of one resumable landscape: its values so far, a row a point, in their order.

    ``path.previous`` is the state before it, for where the newest is damaged. With several
    processes each writes its own, and all of them go on from a point that all of them have.

    Args:
        path: Of the newest state; ``None`` keeps nothing.
        settings: What a state must have been made with to be continued, in plain values.
        interval: Least seconds between saves.
        risk: Whose processes these are.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: dict[str, Any],
        interval: float,
        risk: Risk,
    ) -> None:
        check_range("save_interval", interval, low=0.0)
        self.path = None if path is None else _own(Path(path), risk)
        self._settings, self._interval, self._risk = settings, interval, risk
        self._saved_at = time.monotonic()

    def load(self) -> list[Row]:
        """The rows of the newest usable state, none where there is no state."""
        if self.path is None:
            return []
        found = next((rows for rows in map(self._read, _both(self.path)) if rows is not None), None)
        if found is None and any(path.exists() for path in _both(self.path)):
            raise CorruptFileError(
                f"no usable state at {self.path}: use another path, or remove what is there"
            )
        rows = found or []
        # Rows are in order: the first of one process are those of another.
        shared = self._risk.sharing != "none"
        return rows[: all_min(len(rows), self._risk.group)] if shared else rows

    def save(self, rows: list[Row]) -> None:
        """Write all rows so far, where it is time to."""
        if self.path is None or time.monotonic() - self._saved_at < self._interval:
            return
        pending = self.path.with_name(self.path.name + ".next")
        table = torch.tensor(rows, dtype=torch.float64)
        write_tensors(pending, {"rows": table}, {"settings": self._settings})
        newest, previous = _both(self.path)
        if newest.exists():
            os.replace(newest, previous)
        os.replace(pending, newest)
        self._saved_at = time.monotonic()

    def compare(self, row: Row, saved: Row) -> None:
        """Raise unless the last point of the state comes out as it did: data have no name."""
        # Losses alone: on a GPU a sample may change sides by roundoff.
        if not _agree(row[::2], saved[::2], self._risk):
            raise ValueError(
                f"state at {self.path} was made with other data or another model: its last point "
                f"has a loss of {saved[0]:.9g}, here it has {row[0]:.9g}: use another path or "
                "delete it"
            )

    def _read(self, path: Path) -> list[Row] | None:
        try:
            tensors, header = read_tensors(path)
            if "rows" not in tensors:
                raise CorruptFileError(f"{path} is not the state of a landscape")
        except FileNotFoundError:
            return None
        except CorruptFileError as error:
            message = f"state refused, looking for the previous one: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None
        _check_settings(path, header["settings"], self._settings)
        return [tuple(row) for row in tensors["rows"].tolist()]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPart:
    """A part of a measurement.

    Attributes:
        settings: What it was made with, in plain values.
        result: A result, or a tuple of results.
    """

    settings: dict[str, Any]
    result: Any


@final
class PartJournal:
    """The files of one resumable measurement of several parts, one for each that is finished.

    With several processes each writes its own, and a part is finished where all of them have it.

    Args:
        path: What the names of the files begin with; ``None`` keeps nothing.
        settings: What parts must have been made with to be taken, in plain values.
        risk: Whose processes these are.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, settings: dict[str, Any], risk: Risk
    ) -> None:
        self.path = None if path is None else Path(path)
        self._settings, self._risk = settings, risk

    def part(self, name: str, compute: Callable[..., Any]) -> Any:
        """A part: read where it is finished, else computed and kept.

        Args:
            name: Of the part.
            compute: Returns it; its keyword ``state`` is the path for a state of its own, which is
                removed once the part is finished.
        """
        if self.path is None:
            return compute(state=None)
        file = self.path.with_name(f"{self.path.name}.{name}")
        own, state = _own(file, self._risk), file.with_name(f"{file.name}.run")
        found = self._read(own)
        if self._all(found is not None) and found is not None:
            return found.result
        result = compute(state=state)
        save(FinishedPart(settings=self._settings, result=result), own)
        self._all(True)  # nobody's state is removed while another process may need its own
        for spent in own.parent.glob(f"{glob.escape(_own(state, self._risk).name)}*"):
            spent.unlink(missing_ok=True)
        return result

    def compare(self, loss: float, saved: float) -> None:
        """Raise unless the loss comes out as it did: data have no name."""
        if not _agree((loss,), (saved,), self._risk):
            raise ValueError(
                f"state at {self.path} was made with other data or another model: it has a loss "
                f"of {saved:.9g}, here it is {loss:.9g}: use another path or delete it"
            )

    def _all(self, mine: bool) -> bool:
        shared = self._risk.sharing != "none"
        return bool(all_min(int(mine), self._risk.group)) if shared else mine

    def _read(self, path: Path) -> FinishedPart | None:
        try:
            found = load(path)
            if not isinstance(found, FinishedPart):
                raise CorruptFileError(f"{path} is not a part of a measurement")
        except FileNotFoundError:
            return None
        except CorruptFileError as error:
            message = f"state refused, computing it again: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None
        _check_settings(path, found.settings, self._settings)
        return found


def _own(path: Path, risk: Risk) -> Path:
    """The name of this process's own file."""
    several = world_size(risk.group) > 1
    return path.with_name(f"{path.name}.rank{rank(risk.group)}") if several else path


def _check_settings(path: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    for key, value in asked.items():
        if found.get(key) != value:
            raise ValueError(
                f"state at {path} was made with {key}={found.get(key)}, "
                f"this run has {key}={value}: use another path or delete it"
            )


def _agree(losses: Row, saved: Row, risk: Risk) -> bool:
    kind = torch.finfo(risk.theta.dtype)
    new, old = (torch.tensor(values, dtype=torch.float64) for values in (losses, saved))
    return torch.allclose(new, old, rtol=kind.eps**0.5, atol=kind.tiny, equal_nan=True)


def _both(path: Path) -> tuple[Path, Path]:
    return path, path.with_name(path.name + ".previous")
