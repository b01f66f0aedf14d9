"""What a Lanczos run is to do, and the loop that does it: judge, restart, begin afresh, save."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.progress import Progress
from ritz._core.random import probes
from ritz._core.results import Status
from ritz.operators.base import LinearOperator
from ritz.spectra.recurrence import (
    REORTHOGONALIZATIONS,
    Recurrence,
    Reorthogonalization,
    step,
)
from ritz.spectra.resume import Journal

# Steps in a fresh direction before a found invariant subspace is believed to hold what is wanted.
FRESH_STEPS = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a run, checked and with its defaults filled in."""

    num_steps: int
    largest: int
    smallest: int
    rtol: float
    max_vectors: int
    vectors: bool
    mode: Reorthogonalization
    restarts: bool

    @classmethod
    def make(
        cls,
        op: LinearOperator,
        num_steps: int | None,
        largest: int,
        smallest: int,
        rtol: float | None,
        max_vectors: int | None,
        vectors: bool,
        mode: Reorthogonalization,
    ) -> "Plan":
        n, eps = op.shape[0], torch.finfo(op.dtype).eps
        check_choice("reorthogonalize", mode, REORTHOGONALIZATIONS)
        check_count("largest", largest, low=0, high=n)
        check_count("smallest", smallest, low=0, high=n - largest)
        wanted = largest + smallest
        if num_steps is None:
            if not wanted:
                raise TypeError("num_steps must be given unless largest or smallest is")
            num_steps = max(1000, 100 * wanted)
        check_count("num_steps", num_steps, high=None if wanted else n)
        rtol = eps**0.5 if rtol is None else rtol
        check_range("rtol", rtol, low=eps, high=1.0)
        if max_vectors is None:
            max_vectors = max(2 * wanted + 4, 20) if wanted and mode == "full" else num_steps
        else:
            check_count("max_vectors", max_vectors, low=wanted + 2)
        max_vectors = min(max_vectors, num_steps, n)
        restarts = bool(wanted) and max_vectors < min(num_steps, n)
        if not wanted and max_vectors < num_steps:
            raise ValueError(
                f"max_vectors={max_vectors} is below num_steps={num_steps}, and a restart keeps "
                "wanted pairs only: ask for some with largest or smallest"
            )
        if restarts and mode != "full":
            raise ValueError(f"a restart needs reorthogonalize='full', got {mode!r}")
        if wanted and mode == "none":
            raise ValueError("wanted pairs would repeat with reorthogonalize='none': use another")
        if vectors and mode == "none":
            raise ValueError("vectors need a basis, which reorthogonalize='none' does not keep")
        return cls(num_steps, largest, smallest, rtol, max_vectors, vectors, mode, restarts)

    @property
    def wanted(self) -> int:
        return self.largest + self.smallest

    @property
    def capacity(self) -> int:
        return self.max_vectors + self.restarts

    def settings(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "largest": self.largest,
            "smallest": self.smallest,
            "rtol": self.rtol,
            "max_vectors": self.max_vectors,
            "reorthogonalize": self.mode,
        }

    def extremes(self, size: int, count_low: int, count_high: int) -> Tensor:
        """Indices of that many values at either end of ``size`` ascending ones."""
        low, high = min(count_low, size), min(count_high, size)
        if low + high >= size:
            return torch.arange(size)
        return torch.cat([torch.arange(low), torch.arange(size - high, size)])


class Driver:
    """One run on its way: the recurrence, what it is to do, and how far it is."""

    def __init__(
        self, op: LinearOperator, plan: Plan, run: Recurrence, journal: Journal | None, seed: int
    ) -> None:
        self.op, self.plan, self.run, self.journal, self.seed = op, plan, run, journal, seed
        # Two or three steps meet the bulk alone: an outlier needs some more to show.
        first = plan.wanted + FRESH_STEPS
        self.progress = {"spent": 0, "restarts": 0, "closed": 0, "next_check": first}

    def advance(self, bar: Progress) -> Status:
        if self.journal is not None:
            self.progress = self.journal.load([self.run], self.op) or self.progress
        status = None
        while status is None:
            self._step()
            bar.update(self.progress["spent"])
            status = self._judge()
            if status is None:
                self._make_ready()
        return status

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, eigenvectors of the projected matrix, and residuals without roundoff."""
        values, coefficients = torch.linalg.eigh(self.run.projected())
        return values, coefficients, self.run.residuals(coefficients)

    def _step(self) -> None:
        last = self.run.size + 1 == self.plan.max_vectors and not self.plan.restarts
        step(self.op, [self.run], last=last)
        self.progress["spent"] += 1

    def _make_ready(self) -> None:
        """Make room for the next step, find it a vector, and save, where these are due."""
        run, closed = self.run, self.run.exhausted
        if run.size == self.plan.max_vectors:
            self._restart()
        if closed:  # wanted pairs may hide in the complement of the space found so far
            fresh = torch.Generator().manual_seed((self.seed + self.progress["spent"]) % 2**63)
            run.begin(random_start(self.op, fresh))
            self.progress["closed"] = self.progress["closed"] or self.progress["spent"]
        if self.journal is not None and self.journal.due():
            self.journal.save([run], self.progress)

    def _judge(self) -> Status | None:
        """The status if the run is over, ``None`` if it goes on."""
        run, plan, spent = self.run, self.plan, self.progress["spent"]
        if not plan.wanted:
            if run.exhausted:
                return closing(run.size, self.op.shape[0])
            done = Status(outcome="completed", message=f"{spent} steps")
            return done if spent == plan.num_steps else None
        if run.size == self.op.shape[0]:
            return closing(run.size, run.size)
        full = spent == plan.num_steps or run.size == plan.max_vectors
        if not (full or run.size >= self.progress["next_check"]):
            return None
        self.progress["next_check"] = run.size + max(5, run.size // 10)
        return self._convergence(final=spent == plan.num_steps)

    def _convergence(self, *, final: bool) -> Status | None:
        plan, run, spent = self.plan, self.run, self.progress["spent"]
        _, _, residuals = self.ritz()
        chosen = residuals[plan.extremes(len(residuals), plan.smallest, plan.largest)]
        goal = plan.rtol * run.scale
        met = int((chosen <= goal).sum())
        closed = self.progress["closed"] or (spent if run.exhausted else 0)
        settled = not closed or spent >= closed + FRESH_STEPS
        if met == plan.wanted and settled:
            return Status(
                outcome="converged",
                message=f"{met} pairs to rtol {plan.rtol:.1g} in {spent} products",
            )
        if not final:
            return None
        return Status(
            outcome="max_steps",
            message=f"{met} of {plan.wanted} pairs reached rtol {plan.rtol:.1g} in {spent} "
            f"products; the largest residual is {float(chosen.max()):.1g}, the goal {goal:.1g}",
            advice="raise num_steps, max_vectors or rtol",
        )

    def _restart(self) -> None:
        """Keep the wanted pairs and half of what room is left, nearest to them."""
        plan, run = self.plan, self.run
        values, coefficients, _ = self.ritz()
        extra = (plan.max_vectors - plan.wanted) // 2
        low = round(extra * plan.smallest / plan.wanted)
        keep = plan.extremes(len(values), plan.smallest + low, plan.largest + extra - low)
        run.restart(values[keep], coefficients[:, keep])
        self.progress["restarts"] += 1
        self.progress["next_check"] = plan.max_vectors


def random_start(op: LinearOperator, generator: torch.Generator) -> Tensor:
    """A Gaussian start vector ``(n,)``."""
    shape = (op.shape[0], 1)
    return probes(shape, kind="gaussian", generator=generator, dtype=op.dtype, device=op.device)[
        :, 0
    ]


def closing(size: int, n: int) -> Status:
    """The status of a run whose space of that dimension is invariant."""
    what = "the whole space" if size == n else "an invariant subspace"
    message = f"{what} of dimension {size} was found: its values are exact to roundoff"
    return Status(outcome="breakdown", message=message)
