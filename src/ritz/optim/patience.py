"""When to begin averaging and when to stop training, by patience (GadamAuto)."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, final

from torch import Tensor, nn
from torch.optim import Optimizer

from ritz._core.checks import check_choice, check_count, check_range
from ritz.optim.averaging import IterateAverage, attached_to


@final
class AutoAverage:
    """Begins an average, and ends training, after so many evaluations without improvement.

    First the metric is that of the weights; after ``patience`` evaluations in a row that do not
    improve on the best, averaging begins with the weights as they are. From then on the metric is
    that of the averaged weights, with a best of its own, and after another such run
    :attr:`finished` is true. The rate is meant to stay constant throughout::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        auto = AutoAverage(optimizer)
        while not auto.finished:
            train_one_epoch()
            with auto.applied(model, data=loader):
                auto.update(validation_loss(model))

    With several processes the metric must be the same in all of them.

    Reference: Granziol et al., Iterate averaging in the quest for best test error, A.2.

    Args:
        average: An average made with ``start=None``, or an optimiser: the average that it has (as
            Gadam with ``start=None``), or else a tail average of every iterate, attached to it.
        patience: Evaluations without improvement that end each of the two parts.
        mode: Whether the metric is better when smaller (``min``) or larger (``max``).
        min_delta: How much better than the best counts as an improvement: more than this.
    """

    def __init__(
        self,
        average: IterateAverage | Optimizer,
        *,
        patience: int = 10,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        check_count("patience", patience)
        check_choice("mode", mode, ("min", "max"))
        check_range("min_delta", min_delta, low=0.0)
        self.average = _average_of(average)
        self.patience, self.mode, self.min_delta = patience, mode, min_delta
        self.averaging, self.finished = False, False
        self.best: float | None = None  # of the weights, or of their average once averaging
        self.best_before: float | None = None  # of the weights, once averaging
        self.waited = 0  # evaluations since the best one

    def __repr__(self) -> str:
        part = "finished" if self.finished else "averaging" if self.averaging else "waiting"
        return (
            f"AutoAverage(patience={self.patience}, mode={self.mode!r}: {part}, best {self.best}, "
            f"{self.waited} evaluations without improvement)"
        )

    def applied(self, model: nn.Module, **statistics: Any) -> AbstractContextManager[nn.Module]:
        """Put the weights to be judged into a model for the block: averaged ones, once there are.

        Args:
            model: As in :meth:`IterateAverage.applied`.
            **statistics: ``data``, ``fraction``, ``forward``, ``count``, ``sharing`` and
                ``group``, as there.
        """
        if self.averaging:
            return self.average.applied(model, **statistics)
        return nullcontext(model)

    def update(self, metric: float | Tensor) -> bool:
        """Take in the metric of one more evaluation; return whether to stop training."""
        value = float(metric)
        if math.isnan(value):
            raise ValueError("metric must be a number, got nan")
        if self.finished:
            return True
        if self._improves(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            self._end_part()
        return self.finished

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, in plain numbers; the average itself is in the optimiser's state."""
        names = ("averaging", "finished", "best", "best_before", "waited", "mode")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        missing = sorted(set(self.state_dict()) - set(state_dict))
        if missing:
            raise ValueError(f"state_dict must be one of AutoAverage, got one without {missing}")
        if state_dict["mode"] != self.mode:
            raise ValueError(f"state_dict was made with mode={state_dict['mode']!r}, this is "
                             f"{self.mode!r}")  # fmt: skip
        for name in self.state_dict():
            setattr(self, name, state_dict[name])

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _end_part(self) -> None:
        if self.averaging:
            self.finished = True
            return
        self.average.restart()
        self.averaging, self.waited = True, 0
        self.best_before, self.best = self.best, None


def _average_of(average: IterateAverage | Optimizer) -> IterateAverage:
    found = average
    if isinstance(found, Optimizer):
        found = attached_to(found) or IterateAverage(found, start=None)
    if not isinstance(found, IterateAverage):
        raise TypeError(f"average must be an IterateAverage or an optimiser, got "
                        f"{type(average).__name__}")  # fmt: skip
    if found.planned is not None:
        raise ValueError(f"average must be made with start=None, so that it begins when the "
                         f"metric says so, got start={found.planned}")  # fmt: skip
    return found
