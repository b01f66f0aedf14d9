"""Evaluation in the course of a run, of the weights and of their average."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from ritz.training.assembling import Parts
from ritz.training.checkpoints import AVERAGE, WEIGHTS
from ritz.training.evaluation import evaluate
from ritz.training.feeds import Feed, is_writer
from ritz.training.logs import Record
from ritz.training.results import with_perplexity
from ritz.training.settings import Settings
from ritz.training.weights import save_weights


@final
class Judge:
    """Evaluates the model of a run, and says when patience has run out.

    Args:
        parts: Model, average and training data, on which batch norm is recomputed.
        settings: How.
        held: Data to evaluate on, by name. Where there are both, ``validation`` in the course of
            the run and ``test`` at its end.
        loss_fn: Mean loss of outputs and target.
        forward: How a batch meets the model.
    """

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        held: Mapping[str, Feed],
        *,
        loss_fn: Callable[..., Any] | None,
        forward: Callable[[nn.Module, Any], Any] | None,
    ) -> None:
        self._parts, self._settings = parts, settings
        self._loss_fn, self._forward = loss_fn, forward
        later = "test" if "validation" in held else None
        self._now = {name: feed for name, feed in held.items() if name != later}
        self._later = {name: feed for name, feed in held.items() if name == later}
        if parts.auto is not None and not held:
            raise ValueError("validation must be given with patience, got none")

    def measure(self, *, last: bool) -> Record:
        """Loss and accuracy on what is evaluated in the course of a run.

        Batch norm is recomputed for averaged weights on a part of the data, at the end on all.
        """
        return self._measured(self._now, 1.0 if last else self._settings.statistics_fraction)

    def close(self) -> Record:
        """The same on what is evaluated at the end."""
        return self._measured(self._later, 1.0)

    def wants_to_stop(self, record: Record) -> bool:
        """Take in an evaluation; whether patience has run out."""
        auto = self._parts.auto
        if auto is None:
            return False
        name = f"{next(iter(self._now))}_loss"
        value: float = record[f"average_{name}" if f"average_{name}" in record else name]
        return auto.update(value)

    @property
    def generators(self) -> list[torch.Generator]:
        """What loaders of held-out data draw from."""
        feeds = [*self._now.values(), *self._later.values()]
        return [each for feed in feeds for each in feed.generators]

    @property
    def stopped(self) -> bool:
        """Whether patience has run out before."""
        return self._parts.auto is not None and self._parts.auto.finished

    def state(self) -> dict[str, Any] | None:
        """Where patience is."""
        return None if self._parts.auto is None else self._parts.auto.state_dict()

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on from there."""
        if state is not None and self._parts.auto is not None:
            self._parts.auto.load_state_dict(state)

    def write_weights(self, folder: Path) -> None:
        """Write the last weights and, where there is one, their average, by every process."""
        parts = self._parts
        if is_writer():
            save_weights(parts.model, folder / WEIGHTS)
        if self._averaged:
            with self._applied(1.0):
                if is_writer():
                    save_weights(parts.model, folder / AVERAGE)

    def put_in_average(self) -> None:
        """Leave the model with the averaged weights, where that is asked for."""
        average = self._parts.average
        if self._settings.final == "average" and self._averaged and average is not None:
            average.copy_to(self._parts.model, **self._statistics(1.0))

    @property
    def _averaged(self) -> bool:
        return self._parts.average is not None and self._parts.average.count > 0

    def _measured(self, feeds: Mapping[str, Feed], fraction: float) -> Record:
        found = self._scores(feeds, "")
        if self._averaged and feeds:
            with self._applied(fraction):
                found |= self._scores(feeds, "average_")
        return found

    def _applied(self, fraction: float) -> Any:
        average = self._parts.average
        if average is None:
            raise RuntimeError("there is no average")
        return average.applied(self._parts.model, **self._statistics(fraction))

    def _statistics(self, fraction: float) -> dict[str, Any]:
        return {"data": self._parts.feed.part(fraction), "forward": self._forward}

    def _scores(self, feeds: Mapping[str, Feed], prefix: str) -> Record:
        return {
            f"{prefix}{name}_{key}": value
            for name, feed in feeds.items()
            for key, value in self._score(feed).items()
        }

    def _score(self, feed: Feed) -> dict[str, float]:
        found = evaluate(
            self._parts.model,
            feed.epoch(0, 0),
            loss_fn=self._loss_fn,
            forward=self._forward,
            precision=self._settings.precision,
            carry_state=feed.consecutive,
        )
        return with_perplexity(found, feed, self._loss_fn)
