"""Where a landscape on its way writes the points it has, so that it can go on from there."""

import hashlib
import os
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.checks import check_range
from ritz._core.distributed import all_min, rank, world_size
from ritz._core.storage import CorruptFileError, read_tensors, write_tensors
from ritz.curvature.risk import Risk

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
        self.path = None if path is None else Path(path)
        if self.path is not None and world_size(risk.group) > 1:
            self.path = self.path.with_name(f"{self.path.name}.rank{rank(risk.group)}")
        self._settings, self._interval, self._risk = settings, interval, risk
        self._saved_at = time.monotonic()

    def load(self) -> list[Row]:
        """The rows of the newest usable state, none where there is no state."""
        if self.path is None:
            return []
        found = next((rows for rows in map(self._read, _both(self.path)) if rows is not None), None)
        if found is None and any(path.exists() for path in _both(self.path)):
            raise CorruptFileError(
                f"no usable state at {self.path}: delete {self.path.name}* to start afresh"
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
        kind = torch.finfo(self._risk.theta.dtype)
        # Losses alone: on a GPU a sample may change sides by roundoff.
        new, old = (torch.tensor(values[::2], dtype=torch.float64) for values in (row, saved))
        if not torch.allclose(new, old, rtol=kind.eps**0.5, atol=kind.tiny, equal_nan=True):
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
        for key, value in self._settings.items():
            if header["settings"].get(key) != value:
                raise ValueError(
                    f"state at {path} was made with {key}={header['settings'].get(key)}, "
                    f"this run has {key}={value}: use another path or delete it"
                )
        return [tuple(row) for row in tensors["rows"].tolist()]


def digest(tensors: Iterable[Tensor]) -> str:
    """A name for the values of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()[:16]


def _both(path: Path) -> tuple[Path, Path]:
    return path, path.with_name(path.name + ".previous")
