"""`Journal`: the saved state of a long computation, from which it resumes after a crash."""

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
# Endings of file names: files of vectors (generation and rows), and files that are of no use alone.
VECTORS = re.compile(r"\.\d+\.\d+-\d+")
DEPENDENT = re.compile(rf".*({VECTORS.pattern}|\.next)")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """One file of a journal.

    Attributes:
        settings: Settings of the computation, as plain values.
        step: Number of steps that were done.
        state: What the computation needs to continue: tensors, plain values and results.
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

    A computation loads its state once, and saves it between two steps whenever a save is due::

        journal = Journal(state, {"num_steps": 100, "start": start}, interval=save_interval)
        rows = journal.load() or []
        for index in range(len(rows), total):
            rows.append(compute(index))
            if journal.due():
                journal.save(rows, step=len(rows))

    The state is any value that :func:`ritz.save` can store as a field: tensors, numbers, strings,
    lists, dictionaries and results. It is restored bit for bit.

    ``path`` holds the newest state and ``path.previous`` the one before it. All files are written
    under another name and then renamed, so a crash at any moment leaves at least one of the two. If
    the newest is damaged, :meth:`load` warns and uses the previous one. Vectors that do not change
    once they are computed, such as a Lanczos basis, are written once, to separate files. A save
    then writes new vectors only.

    Each process writes its own files. All processes resume from a step that all of them have saved.
    The files remain until the code that saves the final result calls :func:`remove_state`.

    Args:
        path: File of the newest state. ``None`` turns the journal off: nothing is due, saved or
            loaded.
        settings: Settings of the computation, as plain values. Loading a state with other settings
            raises. A tensor, or a list of tensors, is compared by its digest.
        interval: Seconds between saves.
        group: The processes that compute, by default all.
        together: Whether the processes take the same steps and wait for each other. If not, each of
            them resumes from its own last step.
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
        """Return whether it is time to save. All processes get the same answer."""
        if self.path is None:
            return False
        # Clocks differ, so all processes save as soon as one of them is late.
        late = time.monotonic() - self._saved_at >= self._interval
        return bool(self._agree(all_max, int(late)))

    def save(
        self, state: Any, *, step: int, vectors: Sequence[Tensor] = (), generation: int = 0
    ) -> None:
        """Write the state after ``step`` steps, and the rows of ``vectors`` that are new.

        Args:
            state: What is needed to continue.
            step: Number of steps done; must grow from save to save.
            vectors: Blocks ``(rows, n)`` to which each step appends rows, one block per
                simultaneous run. A block that has stopped growing has no new rows.
            generation: Pass a new number if rows that were saved before have changed. All rows are
                then written again.
        """
        if self.path is None:
            return
        before = self._parts
        # If rows have changed, the new state must not use files of the old generation.
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
            restore: Called with the state and an iterator over the saved rows: one list of blocks
                per save, in order, because memory may not hold all rows twice. It is called again
                with the previous state if the vectors of the newest are damaged.

        Raises:
            ValueError: The state belongs to another computation. The message names the setting.
            CorruptFileError: There are files, but none of them holds a usable state.
        """
        if self.path is None:
            return None
        newest, previous = self.path, _beside(self.path, "previous")
        source, saved = newest, self._read(newest, restore)
        if saved is None:
            source, saved = previous, self._read(previous, restore)
        # A process may have been killed one save earlier than the others. All use the common step.
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
        if source == previous:  # otherwise the next save would keep the damaged file instead
            os.replace(previous, newest)
        self._generation, self._parts = saved.generation, saved.parts
        return saved.state

    def check_repeats(
        self, name: str, values: Sequence[float], saved: Sequence[float], *, dtype: torch.dtype
    ) -> None:
        """Raise unless ``values`` agree with ``saved`` to the square root of machine precision.

        A digest of all data would cost a pass over them. Instead, a resumed computation repeats one
        of its results.
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
    """Results of the parts of a computation, saved in a journal so that each is computed once.

    A part may save its own state while it runs. This state is removed when the part is finished and
    its result is saved.

    Args:
        journal: Where the results of the parts are saved, all in one state.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._results: dict[str, Any] = journal.load() or {}

    def __contains__(self, name: str) -> bool:
        """Return whether a part is finished."""
        return name in self._results

    def get(self, name: str, compute: Callable[..., T]) -> T:
        """Return the result of a part, computed unless it is finished.

        Args:
            name: Name of the part, also in the names of its files.
            compute: Called with the keyword ``state``: the path for the state of the part, or
                ``None`` if nothing is saved.
        """
        if name in self._results:
            finished: T = self._results[name]
            return finished
        path = self.journal.path
        # The journal of the part adds the number of the process again.
        suffix = process_suffix(self.journal.group)
        state = path and path.with_name(f"{path.name.removesuffix(suffix)}.{name}.run")
        result = self._results[name] = compute(state=state)
        self.journal.save(self._results, step=len(self._results))
        if state is not None:
            # Until every process has saved the result, a crash makes all compute the part again.
            self.journal.wait()
            remove_state(state.with_name(state.name + suffix))
        return result


def state_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return all files of the state at ``path``, of its parts, vectors and unfinished saves."""
    name, folder = Path(path).name, Path(path).parent
    begins = (f"{name}.", f".{name}.")
    files = folder.iterdir() if folder.is_dir() else []
    return [file for file in files if file.name == name or file.name.startswith(begins)]


def has_state(path: str | os.PathLike[str]) -> bool:
    """Return whether files at ``path`` may contain a state to resume from. They are not read."""
    name = Path(path).name
    files = [file.name for file in state_files(path) if file.name.startswith(name)]
    return not all(DEPENDENT.fullmatch(each) for each in files)


def remove_state(path: str | os.PathLike[str]) -> None:
    """Remove all files of the state at ``path``, of all processes."""
    for file in state_files(path):
        file.unlink(missing_ok=True)


def process_suffix(group: Group | None) -> str:
    """Return the ending of the file names of this process. Empty for a single process."""
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
