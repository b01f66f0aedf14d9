"""The saved state of a Lanczos run: written, read back, and checked against the operator."""

import contextlib
import math
import os
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ritz._core.distributed import Group, all_max, all_min, rank, world_size
from ritz._core.storage import CorruptFileError, read_tensors, write_tensors
from ritz.operators import LinearOperator
from ritz.spectra._lanczos.recurrence import ASYMMETRY, Recurrence

# ------------------------------------------------------------------------------------------
# Whether a run that goes on still has the operator it began with.

# Units of roundoff in the norm of the matrix that a number found again may be off by, however
# small it is: sums over many entries come in another order.
REPEATED = 100.0


def difference(op: LinearOperator, run: Recurrence) -> str | None:
    r"""Return how the operator differs from the one the run was made with, ``None`` if it does not.

    One product with a row of the basis, :math:`A v_k`, which the run knows:

    .. math:: A v_k = \sum_i T_{ik} v_i + c_k v_{m+1}

    Its norm and :math:`v_k^\top A v_k` must come out to the root of roundoff, which a matrix scaled
    by 1.001 fails in single precision too; noise in the product enters the first squared and the
    second as an average. The vector itself, in which noise is as large as it is, must come out as
    well as products must be symmetric: other data that happen to have the same norm fail there.

    Cost: one product and one read of the basis.

    Args:
        op: What multiplies now.
        run: A run that has made a step at least.
    """
    basis = run.basis
    row, column, gone = _known(run)
    vector = basis.whole(basis.rows[row])
    product = basis.local(op.matmat(vector[:, None])[:, 0].contiguous())
    norm, diagonal = basis.norm(product), basis.dot(row, product)
    basis.subtract(product, column.to(product.device))
    size, known = max(run.scale, run.magnitude), math.hypot(float(column.norm()), gone)
    number = run.eps**0.5 * known + REPEATED * run.eps * size
    beside = run.removed[row] if run.mode == "partial" else 0.0
    allowed = (
        (f"a product of norm {known:.9g} now has {norm:.9g}", norm - known, number),
        (f"a quadratic form of {float(column[row]):.9g} is now {diagonal:.9g}",
         diagonal - float(column[row]), number),
        (f"a product of norm {known:.9g} is another vector", basis.norm(product) - gone,
         ASYMMETRY * run.eps**0.5 * size + beside),
    )  # fmt: skip
    # Not "gap > most": NaN is a difference too.
    return next((what for what, gap, most in allowed if not abs(gap) <= most), None)


def _known(run: Recurrence) -> tuple[int, Tensor, float]:
    """A row, its product in terms of the rows ``(basis.size,)``, and the norm of what is gone.

    The row with the largest product, where there is a choice: roundoff is that of the whole matrix.
    """
    if run.mode == "none":
        return _newest(run)
    columns = torch.zeros(run.basis.size, run.size, dtype=torch.float64)
    columns[: run.size] = run.projected()
    if run.basis.size > run.size:
        if run.alphas:
            columns[-1, -1] = run.betas[-1]
        else:
            columns[-1] = torch.from_numpy(run.couplings)
    row = int(columns.norm(dim=0).argmax())
    return row, columns[:, row], 0.0


def _newest(run: Recurrence) -> tuple[int, Tensor, float]:
    """The same for the last row whose product is known, of the two that "none" keeps."""
    column = torch.zeros(run.basis.size, dtype=torch.float64)
    before = run.betas[-2] if run.size > 1 else 0.0
    row = run.newest if run.exhausted else 1 - run.newest
    column[row] = run.alphas[-1]
    if run.basis.size > 1:
        column[1 - row] = before if run.exhausted else run.betas[-1]
    return row, column, 0.0 if run.exhausted else before


# ------------------------------------------------------------------------------------------
# Where a long Lanczos run writes how far it is, so that it can go on from there.


@dataclass(slots=True)
class Journal:
    """The files of one resumable run.

    ``path`` says how far the run is; ``path.previous`` is the one before it; the basis lies beside
    them in parts that are written once, since its vectors do not change until a restart. So a save
    costs what is new, and a crash at any moment leaves the old state or the new one. Recurrences
    that advance side by side have one state. With several processes each writes its own files, and
    all of them go on from a step that all of them have.

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

    def save(self, runs: Sequence[Recurrence], progress: dict[str, int]) -> None:
        """Write the state after ``progress["spent"]`` steps."""
        generation = progress["spent"] if runs[0].mode == "none" else progress["restarts"]
        if self.parts is None or generation != self.generation:
            self.generation, self.parts, self.saved_rows = generation, [], 0
        size = max(run.basis.size for run in runs)
        if size > self.saved_rows:
            name = f"{self.path.name}.{generation}.{self.saved_rows}-{size}"
            # A run whose space has closed has no new rows.
            rows = [run.basis.rows[self.saved_rows : run.basis.size] for run in runs]
            write_tensors(self.path.with_name(name), _numbered(rows), {})
            self.parts = [*self.parts, name]
            self.saved_rows = size
        header = {"settings": self.settings, "parts": self.parts, "progress": progress}
        pending = self.path.with_name(self.path.name + ".next")
        memory = {f"{k}.{name}": tensor for k, run in enumerate(runs)
                  for name, tensor in run.memory().items()}  # fmt: skip
        write_tensors(pending, memory, header | {"generation": generation})
        if self.path.exists():
            os.replace(self.path, self.previous)
        os.replace(pending, self.path)
        self._remove_unused()
        self.saved_at = time.monotonic()

    def load(self, runs: Sequence[Recurrence], op: LinearOperator) -> dict[str, int] | None:
        """Put ``runs`` where the newest usable state was; ``None`` where there is no state.

        One product, to see that the operator is the one that the state was made with.
        """
        progress = self._newest(runs)
        if progress is not None:
            self._compare(runs, op)
        return progress

    def _newest(self, runs: Sequence[Recurrence]) -> dict[str, int] | None:
        progress = self._restore(runs, self.path) or self._restore(runs, self.previous)
        common = all_min(progress["spent"] if progress else -1, self.group)
        if common < 0:
            if self.path.exists() or self.previous.exists():
                raise CorruptFileError(
                    f"no usable state at {self.path}: use another path, or remove what is there"
                )
            return None
        if progress and progress["spent"] > common:
            progress = self._restore(runs, self.previous)
        if not progress or progress["spent"] != common:
            raise CorruptFileError(
                f"{self.path}: no state at step {common}, where another process is"
            )
        return progress

    def begin(self, runs: Sequence[Recurrence], op: LinearOperator) -> int:
        """Put runs of a fixed number of steps where they were; return how many they had made."""
        return (self.load(runs, op) or {"spent": 0})["spent"]

    def keep(self, runs: Sequence[Recurrence], spent: int) -> None:
        """Save such runs between two steps, where it is time to."""
        if self.due():
            self.save(runs, {"spent": spent, "restarts": 0})

    def _restore(self, runs: Sequence[Recurrence], path: Path) -> dict[str, int] | None:
        """Put ``runs`` where one state was, if it can be used; return how far they are."""
        try:
            memory, header = read_tensors(path)
            self._check(path, header)
            for k, run in enumerate(runs):
                own = {name: tensor for name, tensor in memory.items() if name.startswith(f"{k}.")}
                run.recall({name.partition(".")[2]: tensor for name, tensor in own.items()})
            # One part after the other: there is no room for the basis twice.
            for name in header["parts"]:
                self._fill(runs, path, name)
        except FileNotFoundError:
            return None
        except CorruptFileError as error:
            self._refuse(path, error)
            return None
        self.generation, self.parts = header["generation"], header["parts"]
        self.saved_rows = max(run.basis.size for run in runs)
        progress: dict[str, int] = header["progress"]
        return progress

    def _compare(self, runs: Sequence[Recurrence], op: LinearOperator) -> None:
        found = difference(op, next((run for run in runs if not run.exhausted), runs[0]))
        # Together: a process that went on alone would wait for the others' products for ever.
        if not all_min(int(found is None), self.group):
            raise ValueError(
                f"state at {self.path} was made with another operator, of other weights or data: "
                f"{found or 'another process found a difference'}; use another path, or remove "
                "what is there"
            )

    def _check(self, path: Path, header: Any) -> None:
        settings = header.get("settings") if isinstance(header, dict) else None
        if settings is None or "parts" not in header:
            raise ValueError(f"state must be a path of its own, got {path}, which holds something "
                             "else than the state of a run")  # fmt: skip
        for key, value in self.settings.items():
            if settings.get(key) != value:
                raise ValueError(
                    f"state at {path} was made with {key}={settings.get(key)}, "
                    f"this run has {key}={value}: use another path or delete it"
                )

    def _fill(self, runs: Sequence[Recurrence], path: Path, name: str) -> None:
        try:
            rows, _ = read_tensors(self.path.with_name(name))
        except FileNotFoundError as error:
            raise CorruptFileError(f"{path} needs {name}, which is missing") from error
        for k, run in enumerate(runs):
            run.basis.extend(rows[str(k)])

    def _refuse(self, path: Path, error: CorruptFileError) -> None:
        warnings.warn(f"state refused, looking for the previous one: {error}", RuntimeWarning, 2)

    def _remove_unused(self) -> None:
        used = set(self.parts or [])
        # Nothing need be spared for a state that cannot be used.
        with contextlib.suppress(FileNotFoundError, CorruptFileError):
            used |= set(read_tensors(self.previous)[1]["parts"])
        own = re.compile(re.escape(self.path.name) + r"\.\d+\.\d+-\d+")
        for part in self.path.parent.iterdir():
            if own.fullmatch(part.name) and part.name not in used:
                part.unlink()


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(k): tensor for k, tensor in enumerate(tensors)}
