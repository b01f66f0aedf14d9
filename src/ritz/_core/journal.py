"""Resumable state: a long computation saves where it is, and continues from there after a crash."""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from ritz._core import storage
from ritz._core.checks import check_range
from ritz._core.distributed import Group, all_max, all_min, rank, world_size
from ritz._core.storage import CorruptFileError, digest, storable, write_tensors

T = TypeVar("T")
Vectors = Iterator[list[Tensor]]

ADVICE = "delete these files, or pass another state= path"
# Ends of names: files of vectors, by generation and rows, and those that are no use alone.
VECTORS = re.compile(r"\.\d+\.\d+-\d+")
DEPENDENT = re.compile(rf".*({VECTORS.pattern}|\.next)")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """One file of a journal.

    Attributes:
        settings: What the computation was made with, in plain values.
        step: How far it had come.
        state: What it needs to continue: tensors, plain values and results.
        generation: See :meth:`Journal.save`.
        parts: Names of the files that hold the vectors, in order.
    """

    settings: dict[str, Any]
    step: int
    state: Any
    generation: int
    parts: list[str]


@final
class Journal:
    """The files of one resumable computation.

    A computation loads its state once, and saves it between two steps whenever that is due::

        journal = Journal(state, {"num_steps": 100, "start": start}, interval=save_interval)
        rows = journal.load() or []
        for index in range(len(rows), total):
            rows.append(compute(index))
            if journal.due():
                journal.save(rows, step=len(rows))

    The state is any value that :func:`ritz.save` can store as a field: tensors, numbers, strings,
    lists, dictionaries and results. What is read back equals what was saved bit for bit.

    ``path`` holds the newest state and ``path.previous`` the one before it. All files are written
    under another name and renamed, so a crash at any moment leaves one of the two. If the newest is
    damaged, :meth:`load` warns and uses the previous one. Vectors that do not change once they are
    computed, such as a Lanczos basis, lie beside them in files that are written once: a save then
    costs what is new.

    With several processes each one writes its own files, and all continue from a step that all
    have. The files stay until :func:`remove_state`, which the code that saves the final result
    calls.

    Args:
        path: File of the newest state. ``None`` turns the journal off: nothing is due, saved or
            loaded.
        settings: Settings of the computation, in plain values. A state with other settings raises:
            it cannot be continued. A tensor, or a list of tensors, is compared by its digest.
        interval: Seconds between saves.
        group: The processes that compute, by default all.
        together: Whether these processes make the same steps and wait for each other. If not, each
            resumes from its own step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        *,
        interval: float = 30.0,
        group: Group | None = None,
        together: bool = True,
    ) -> None:
        check_range("save_interval", interval, low=0.0)
        # Each process has its own files.
        suffix = process_suffix(group)
        self.path = None if path is None else Path(path).with_name(Path(path).name + suffix)
        self.group = group
        self._settings = {} if path is None else {k: _plain(v) for k, v in settings.items()}
        self._interval, self._together = interval, together
        self._generation, self._parts = 0, list[str]()
        self._saved_at = time.monotonic()

    def due(self) -> bool:
        """Return whether it is time to save; all processes get the same answer."""
        if self.path is None:
            return False
        # Clocks differ, so the processes agree: all save as soon as one of them is late.
        late = time.monotonic() - self._saved_at >= self._interval
        return bool(self._agree(all_max, int(late)))

    def save(
        self, state: Any, *, step: int, vectors: Sequence[Tensor] = (), generation: int = 0
    ) -> None:
        """Write the state after ``step`` steps, and the rows of ``vectors`` that are new.

        Args:
            state: What is needed to continue.
            step: How far the computation is; must grow from save to save.
            vectors: Blocks ``(rows, n)`` that grow by rows, one for each run that is made at the
                same time. A block that has stopped growing has no new rows.
            generation: Change it when rows that were saved before have changed: all are written
                again.
        """
        if self.path is None:
            return
        before = self._parts
        # Rows that have changed: no file of the old generation may serve the new state.
        if generation != self._generation:
            self._generation, self._parts = generation, []
        # The name of a file of vectors ends with its first row and the end of its rows.
        first = int(self._parts[-1].rpartition("-")[2]) if self._parts else 0
        end = max(map(len, vectors), default=0)
        if end > first:
            name = f"{self.path.name}.{generation}.{first}-{end}"
            new = {str(k): block[first:] for k, block in enumerate(vectors)}
            write_tensors(self.path.with_name(name), new, {})
            self._parts = [*self._parts, name]
        pending = _beside(self.path, "next")
        saved = SavedState(settings=self._settings, step=step, state=state,
                           generation=generation, parts=self._parts)  # fmt: skip
        storage.save(saved, pending)
        # A crash between the two renames leaves the previous state, which is complete.
        if self.path.exists():
            os.replace(self.path, _beside(self.path, "previous"))
        os.replace(pending, self.path)
        # The previous state still needs the files that it names.
        for file in state_files(self.path):
            vectors_of_this = VECTORS.fullmatch(file.name.removeprefix(self.path.name))
            if vectors_of_this and file.name not in (*before, *self._parts):
                file.unlink()
        self._saved_at = time.monotonic()

    def load(self, restore: Callable[[Any, Vectors], None] | None = None) -> Any:
        """Return the newest usable state, or ``None`` if there is none.

        Args:
            restore: Called with the state and an iterator over the saved rows, a list of blocks
                for each save in order: there may be no room for all of them twice. It is called
                again with the previous state if the vectors of the newest turn out to be damaged.

        Raises:
            ValueError: The state is of another computation. The message names the setting.
            CorruptFileError: There are files, but no state in them can be used.
        """
        if self.path is None:
            return None
        newest, previous = self.path, _beside(self.path, "previous")
        source, saved = newest, self._read(newest, restore)
        if saved is None:
            source, saved = previous, self._read(previous, restore)
        # A process may have been killed one save earlier than the others: all use the common step.
        step = -1 if saved is None else saved.step
        common, furthest = self._agree(all_min, step), self._agree(all_max, step)
        if saved is not None and step > common >= 0:
            source, saved = previous, self._read(previous, restore)
        if (saved.step if saved else -1) != common or common < 0 <= furthest:
            raise CorruptFileError(f"no state at {newest} can be used by all processes: {ADVICE}")
        if saved is None:
            if newest.exists() or previous.exists():
                raise CorruptFileError(f"no usable state at {newest}: {ADVICE}")
            return None
        if source == previous:  # the next save must not replace it by the damaged one
            os.replace(previous, newest)
        self._generation, self._parts = saved.generation, saved.parts
        return saved.state

    def check_repeats(
        self, name: str, values: Sequence[float], saved: Sequence[float], *, dtype: torch.dtype
    ) -> None:
        """Raise unless numbers that were saved are computed again, to the root of roundoff.

        A digest of all data would cost a pass over them. Instead a computation repeats one of its
        numbers.
        """
        kind = torch.finfo(dtype)
        # Half of the digits: another number of threads changes the order of sums.
        now, then = (torch.tensor(list(each), dtype=torch.float64) for each in (values, saved))
        if not torch.allclose(now, then, rtol=kind.eps**0.5, atol=kind.tiny, equal_nan=True):
            raise ValueError(
                f"state at {self.path} belongs to other data or another model: its {name} is "
                f"{saved[0]:.9g}, here it is {values[0]:.9g}: {ADVICE}"
            )

    def wait(self) -> None:
        """Wait until all processes are here."""
        self._agree(all_min, 0)

    def _agree(self, reduce: Callable[[int, Group | None], int], value: int) -> int:
        return reduce(value, self.group) if self._together else value

    def _read(
        self, path: Path, restore: Callable[[Any, Vectors], None] | None
    ) -> SavedState | None:
        try:
            saved = storage.load(path)
            if not isinstance(saved, SavedState):
                raise ValueError(f"state at {path} is a saved {type(saved).__name__}: pass a path "
                                 "that is used only for the state")  # fmt: skip
            for key, value in self._settings.items():
                if (before := saved.settings.get(key)) != value:
                    raise ValueError(f"state at {path} was made with {key}={before}, this run has "
                                     f"{key}={value}: {ADVICE}")  # fmt: skip
            if restore is not None:
                restore(saved.state, (_read_vectors(path.with_name(name)) for name in saved.parts))
        except FileNotFoundError:
            return None
        except CorruptFileError as error:
            message = f"state cannot be used, looking for the previous one: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return None
        return saved


@final
class Parts:
    """Finished parts of a computation, which are computed once, on top of a journal.

    A part may save its own state while it is computed. This state is removed when the part is
    finished and saved.

    Args:
        journal: Where the results of the parts are saved, all in one state.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._results: dict[str, Any] = journal.load() or {}

    def get(self, name: str, compute: Callable[..., T]) -> T:
        """Return the result of a part, computed unless it is finished.

        Args:
            name: Name of the part, also in the names of its files.
            compute: Called with the keyword ``state``, the path for the state of the part, or
                ``None`` if none is saved.
        """
        if name in self._results:
            finished: T = self._results[name]
            return finished
        path = self.journal.path
        # Without the number of the process, which the journal of the part adds itself.
        suffix = process_suffix(self.journal.group)
        state = path and path.with_name(f"{path.name.removesuffix(suffix)}.{name}.run")
        result = self._results[name] = compute(state=state)
        self.journal.save(self._results, step=len(self._results))
        if state is not None:
            # Another process may have to compute this part again, all of them together.
            self.journal.wait()
            remove_state(state.with_name(state.name + suffix))
        return result


def state_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return all files of the state at ``path``: of parts, vectors, processes, half-done saves."""
    name, folder = Path(path).name, Path(path).parent
    begins = (f"{name}.", f".{name}.")
    files = folder.iterdir() if folder.is_dir() else []
    return [file for file in files if file.name == name or file.name.startswith(begins)]


def has_state(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a state at ``path`` to resume from; it is not read."""
    name = Path(path).name
    files = [file.name for file in state_files(path) if file.name.startswith(name)]
    return not all(DEPENDENT.fullmatch(each) for each in files)


def remove_state(path: str | os.PathLike[str]) -> None:
    """Remove all files of the state at ``path``, of all processes."""
    for file in state_files(path):
        file.unlink(missing_ok=True)


def process_suffix(group: Group | None) -> str:
    """Return what the names of a process's files end with; empty for a single process."""
    return f".rank{rank(group)}" if world_size(group) > 1 else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return digest([value])
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
        return digest(value)
    return value


def _read_vectors(path: Path) -> list[Tensor]:
    try:
        blocks, _ = storage.read_tensors(path)
    except FileNotFoundError as error:
        raise CorruptFileError(f"vectors are missing: {path}") from error
    return [blocks[str(k)] for k in range(len(blocks))]


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.name}.{word}")
