"""Lanczos runs with a saved state, and the check that a resumed run has the same operator."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.distributed import Group, all_min
from ritz._core.journal import ADVICE, Journal, Vectors
from ritz.operators import LinearOperator
from ritz.spectra._lanczos.recurrence import TUNING, Recurrence
from ritz.spectra._lanczos.steps import start_runs


class SavedRuns:
    """Runs that advance together and are saved in one journal.

    Args:
        op: The operator of the runs.
        starts: Start vectors of the runs, each ``(n,)``.
        capacity: Number of rows of each basis to allocate.
        settings: Settings of the run, among them ``reorthogonalize`` and ``placement``.
        path: File of the state; ``None`` if none is saved.
        interval: Seconds between saves.
        group: The processes of the run.
    """

    def __init__(
        self,
        op: LinearOperator,
        starts: Sequence[Tensor],
        capacity: int,
        settings: dict[str, Any],
        path: str | os.PathLike[str] | None,
        interval: float,
        group: Group | None,
    ) -> None:
        self.op, self.settings = op, settings
        mode, placement = settings["reorthogonalize"], settings["placement"]
        if len(starts) > 1 and placement == "device":
            self.runs = start_runs(starts, capacity=capacity, mode=mode)
        else:
            self.runs = [
                Recurrence(start, capacity=capacity, mode=mode, placement=placement, group=group)
                for start in starts
            ]
        kind = {"n": op.shape[0], "dtype": str(op.dtype), "probes": len(starts)}
        identity = settings | kind | {"start": list(starts)}
        self.journal = Journal(path, identity, interval=interval, group=group)

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of every :class:`LanczosResult` of these runs."""
        return {
            "dimension": self.op.shape[0],
            "operator": repr(self.op),
            "matrix": self.op.origin.get("matrix"),
            "batch_norm": self.op.origin.get("batch_norm"),
            "settings": self.settings,
        }

    def load(self) -> dict[str, int] | None:
        """Restore the newest usable state and return its progress; ``None`` if there is none.

        Cost: one product, to check that the operator is that of the saved state.
        """
        state = self.journal.load(self._restore)
        if state is None:
            return None
        run = next((run for run in self.runs if not run.exhausted), self.runs[0])
        change = difference(self.op, run)
        # All processes raise together; otherwise those that continue would wait forever.
        if not all_min(int(change is None), self.journal.group):
            raise ValueError(
                f"state at {self.journal.path} was made with another operator, of other weights or "
                f"data: {change or 'another process found a difference'}; {ADVICE}"
            )
        progress: dict[str, int] = state["progress"]
        return progress

    def save(self, progress: dict[str, int]) -> None:
        """Save the runs after ``progress["spent"]`` steps, if that is due."""
        if not self.journal.due():
            return
        # A restart changes all rows of the basis. A basis of two rows changes in every step.
        changing = "spent" if self.runs[0].mode == "none" else "restarts"
        self.journal.save(
            {"progress": progress, "runs": [run.memory() for run in self.runs]},
            step=progress["spent"],
            vectors=[run.basis.rows[: run.basis.size] for run in self.runs],
            generation=progress.get(changing, 0),
        )

    def _restore(self, state: Any, vectors: Vectors) -> None:
        for run, memory in zip(self.runs, state["runs"], strict=True):
            run.recall(memory)
        for blocks in vectors:
            for run, rows in zip(self.runs, blocks, strict=True):
                run.basis.extend(rows)


def difference(op: LinearOperator, run: Recurrence) -> str | None:
    r"""Return how the operator differs from that of the run, or ``None`` if it is the same.

    One product with a row of the basis is computed again and compared with

    .. math:: A v_k = \sum_i T_{ik} v_i + c_k v_{m+1}

    Its norm and :math:`v_k^\top A v_k` must agree to the square root of machine precision. Noise in
    the product averages out in these two numbers, so that a matrix scaled by 1.001 is detected even
    in single precision. Noise does not average out in the vector itself, which must agree to the
    tolerance of the symmetry check. This detects other data with a product of the same norm.

    Cost: one product and one read of the basis.
    """
    basis = run.basis
    row, column, outside = _known_product(run)
    vector = basis.whole(basis.rows[row])
    product = basis.local(op.matmat(vector[:, None])[:, 0].contiguous())
    norm, diagonal = basis.norm(product), basis.dot(row, product)
    basis.subtract(product, column.to(product.device))
    size, known = max(run.scale, run.magnitude), math.hypot(float(column.norm()), outside)
    number = run.eps**0.5 * known + TUNING.repeated * run.eps * size
    removed = run.removed[row] if run.mode == "partial" else 0.0
    allowed = (
        (f"a product of norm {known:.9g} now has {norm:.9g}", norm - known, number),
        (f"a quadratic form of {float(column[row]):.9g} is now {diagonal:.9g}",
         diagonal - float(column[row]), number),
        (f"a product of norm {known:.9g} is another vector", basis.norm(product) - outside,
         TUNING.asymmetry * run.eps**0.5 * size + removed),
    )  # fmt: skip
    return next((change for change, gap, limit in allowed if not is_below(abs(gap), limit)), None)


def _known_product(run: Recurrence) -> tuple[int, Tensor, float]:
    """Return a row, its product in terms of the rows, and the norm of the part outside of them."""
    size, basis_size = run.size, run.basis.size
    if run.mode == "none":
        # Two rows are stored. A v_j = beta_{j-1} v_{j-1} + alpha_j v_j + beta_j v_{j+1}: the last
        # known product is that of the older row. Its predecessor v_{j-1} is no longer stored.
        column = torch.zeros(basis_size, dtype=torch.float64)
        before = run.betas[-2] if size > 1 else 0.0
        row = run.newest if run.exhausted else 1 - run.newest
        column[row] = run.alphas[-1]
        if basis_size > 1:
            column[1 - row] = before if run.exhausted else run.betas[-1]
        return row, column, 0.0 if run.exhausted else before
    columns = torch.zeros(basis_size, size, dtype=torch.float64)
    columns[:size] = run.projected()
    if basis_size > size:
        if run.alphas:
            columns[-1, -1] = run.betas[-1]
        else:
            columns[-1] = torch.tensor(run.couplings, dtype=torch.float64)
    # The row with the largest product: roundoff is relative to the whole matrix.
    row = int(columns.norm(dim=0).argmax())
    return row, columns[:, row], 0.0
