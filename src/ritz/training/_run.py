"""A training run: its position, one epoch of it, evaluation on the way, saving and resuming."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz._core.distributed import all_max, rank, world_size
from ritz._core.progress import Progress, tracking
from ritz.curvature._shared import check_labels
from ritz.training._assembly import Parts, check_last_batch, explained
from ritz.training._config import Settings, TrainingStatus, check_same
from ritz.training._data import Feed, is_writer, num_rows, own_rows
from ritz.training._evaluate import evaluate, with_perplexity
from ritz.training._folder import (
    AVERAGE,
    WEIGHTS,
    Checkpoint,
    Folder,
    Log,
    Record,
    check_matches,
    check_no_link,
    load_optimizer_state,
    optimizer_state,
    save_weights,
    size_without_final,
    tensor_state,
    times_path,
)
from ritz.training._processes import gathered, generator_states, set_generator_states
from ritz.training._step import Piece, batch_mass, carried_state

# ------------------------------------------------------------------------------------------
# Evaluation in the course of a run, of the weights and of their average.


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


# ------------------------------------------------------------------------------------------
# A run of training: where it is, an epoch of it, and how it is saved and resumed.

AGREEMENT = 50  # steps after which several processes agree whether to save or to stop
Monitor = Callable[[int, nn.Module, Any], Record | None]


@final
class Run:
    """A run of training, from the start or from where its checkpoint is.

    Args:
        parts: Model, data, optimiser and the rest, ready for use.
        settings: What is asked for.
        judge: Evaluates.
        monitors: Called after every step, or after every epoch where their ``unit`` is so.
        signals: Names of the signals received so far: a reason to stop.
        log: Path of the log, if any.
        folder: Where checkpoints are, if anywhere.
        resume: Whether to go on from a checkpoint that is there.
    """

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        *,
        judge: Judge,
        monitors: Sequence[Monitor],
        signals: Sequence[str],
        log: Any,
        folder: Folder | None,
        resume: bool,
    ) -> None:
        self._parts, self._settings, self._judge = parts, settings, judge
        self._monitors, self._signals, self._folder = monitors, signals, folder
        self.epoch, self.batch, self.step, self.finished = 0, 0, 0, False
        self.records: list[Record] = []
        # In the order of first use, each once: loaders may share one.
        self._own = list(dict.fromkeys([*parts.feed.generators, *judge.generators]))
        self._beginning = generator_states(parts.device, self._own)
        self._carried = carried_state(parts.step.adapter, wanted=parts.feed.consecutive)
        self._saved, self._checked = time.monotonic(), False
        self._work = 0, 0, time.perf_counter()  # steps and samples of the epoch, and its beginning
        self._log_path, self._log_bytes = log, 0
        self._log: Log | None = None
        self._times: Log | None = None
        for path in () if log is None else (Path(log), times_path(log)):
            check_no_link(path)  # before anything of the run before is removed
        found = folder.read() if folder is not None and resume else None
        self._anew, self._longer, self._begun = found is None, False, False
        if found is not None:
            self._load(found, folder.file)  # type: ignore[union-attr]
        all_max(0)  # nobody writes before everybody has read
        self._first = self.step

    def train(self, progress: bool | Progress) -> TrainingStatus:
        """Go through the epochs that are left; return how that ended."""
        settings, length = self._settings, self._parts.steps_per_epoch
        left = None if length is None else settings.num_epochs * length - self.step
        status = None
        if not self.finished:
            check_last_batch(self._parts, settings)
        try:
            with tracking(progress if is_writer() else False, "training", left) as bar:
                while status is None and not self.finished and self.epoch < settings.num_epochs:
                    status = self._epoch(bar) or self._close_epoch()
            if status is None or status.ok:
                self._finish()
                self._judge.put_in_average()
        finally:
            for file in (self._log, self._times):
                if file is not None:
                    file.close()
        return status or TrainingStatus(
            outcome="completed", message=f"{self.epoch} epochs, {self.step} steps"
        )

    def _begin(self) -> None:
        """Take over folder and log, after the first step.

        Where model and data do not fit, that step fails: what was there is left as it was, and
        nothing is in the way of the right ones.
        """
        if self._begun:
            return
        self._begun = True
        if self._folder is not None:
            self._parts.step.totals.sums.tolist()  # waits, once: a device tells of failures late
            if self._anew and is_writer():
                self._folder.clear()
        if self._longer and self._log_path is not None:
            # Saved before it is cut: a log that is too short is refused.
            whole, self._log_bytes = self._log_bytes, size_without_final(
                self._log_path, self._log_bytes)  # fmt: skip
            if not self._save():
                self._log_bytes = whole
        if self._log_path is not None and is_writer():
            self._log = Log(self._log_path, size=self._log_bytes)
            self._times = _times(self._log_path, anew=self._anew)
        if self._folder is not None and is_writer():
            self._folder.write_texts()  # when no file of another run is left
        if self._anew:
            self._save()

    def _epoch(self, bar: Progress) -> TrainingStatus | None:
        """The steps that are left of an epoch; how the run ends, if it does."""
        number, first, seen = self.epoch + 1, self.step, 0
        begun, note = time.perf_counter(), self._note(number)
        self._parts.model.train()
        if self._carried is not None and not self.batch:
            self._carried.reset()
        for group in self._groups(number):
            pieces = self._pieces(group)
            try:
                self._parts.take(pieces)
            except ValueError as error:
                rows = min(num_rows(batch) for batch in group)
                raise explained(error, rows, self._settings) from error
            self.step += 1
            self.batch += len(group)
            if self._settings.schedule_unit == "step":
                self._parts.schedule.step()
            self._begin()
            self._watch("step", self.step)
            seen += sum(num_rows(batch) for batch in group)
            bar.update(self.step - self._first, note(seen / (time.perf_counter() - begun)))
            status = self._poll()
            if status is not None:
                return status
        self._work = self.step - first, seen, begun
        return None

    def _groups(self, number: int) -> Iterator[list[Any]]:
        """The batches that are left of an epoch, by step."""
        feed, device, seed = self._parts.feed, self._parts.device, self._settings.seed
        now = generator_states(device, self._own)
        if self.batch:
            # A loader draws its order when it begins, from its own generator or the global ones:
            # let it again.
            set_generator_states(self._beginning, device, self._own)
            batches = feed.epoch(number, seed, skip=self.batch, look=self._check)
            set_generator_states(now, device, self._own)
        else:
            self._beginning = now
            batches = feed.epoch(number, seed, look=self._check)
        while group := list(islice(batches, self._settings.accumulate)):
            yield group
        if not self.batch:
            raise ValueError("data must hold at least one batch an epoch, got none")

    def _pieces(self, group: list[Any]) -> list[Piece]:
        """This process's rows of the batches of a step, with their share of its gradient."""
        alone = len(group) == 1 and world_size() == 1
        whole = 1 if alone else sum(self._mass(batch) for batch in group)
        pieces = []
        for batch in group:
            own, count, real = own_rows(batch)
            share = 1.0 if alone else _share(self._mass(own), whole) if real else 0.0
            state = None if self._carried is None else self._carried.of(count)
            pieces.append(Piece(own, share, real, state))
        return pieces

    def _mass(self, batch: Any) -> Any:
        adapter = self._parts.step.adapter
        return batch_mass(adapter, batch, adapter.target(batch))

    def _check(self, batch: Any) -> None:
        """Raise for a label that no output stands for: on CUDA torch would end the process.

        The first batch is checked when it meets the model, all that lie ready before the second,
        others one by one in the first epoch.
        """
        step = self._parts.step
        if self._checked or self.epoch or step.num_classes is None:
            return
        ready = self._parts.feed.ready
        first, found = (self.batch + 1, [batch]) if ready is None else (1, ready)
        for number, each in enumerate(found, start=first):
            target = step.adapter.target(each)
            if step.num_classes and isinstance(target, Tensor):
                outputs = target.new_empty(0, step.num_classes)
                check_labels(step.adapter.loss_fn.call, outputs, target,
                             f"batch {number}", some=False)  # fmt: skip
        self._checked = ready is not None

    def _close_epoch(self) -> TrainingStatus | None:
        """What follows the last step of an epoch."""
        self._begin()
        parts, settings, number = self._parts, self._settings, self.epoch + 1
        means = parts.step.totals.means()  # waits for the device
        means = with_perplexity(means, parts.feed, parts.step.adapter.loss_fn.call)
        done, samples, begun = self._work
        spent = time.perf_counter() - begun
        if not math.isfinite(means["loss"]):
            return _diverged(number)
        record: Record = {"kind": "epoch", "epoch": number, "step": self.step}
        record |= {"rate": float(parts.optimizer.param_groups[0]["lr"])}
        record |= {f"train_{name}": value for name, value in means.items()}
        if settings.schedule_unit == "epoch":
            parts.schedule.step()
        last = number == settings.num_epochs
        stop = False
        if last or number % settings.evaluate_every == 0:
            record |= self._judge.measure(last=last)
            stop = self._judge.wants_to_stop(record)
        parts.step.totals.reset()
        self.epoch, self.batch = number, 0
        self.records.append(record)
        self._write(record)
        self._watch("epoch", number)
        self._write_times(number, done, samples, spent)
        if self._folder is not None and number in settings.keep and is_writer():
            save_weights(parts.model, self._folder.path / f"epoch-{number:04d}.safetensors",
                         epoch=number)  # fmt: skip
        if stop:
            return TrainingStatus(outcome="stopped", message=f"patience ran out in epoch {number}")
        return self._poll(agreed=True)

    def _finish(self) -> None:
        if self.finished:
            return
        self._begin()
        record = self._judge.close()
        if record:
            self.records.append({"kind": "final", "epoch": self.epoch, "step": self.step, **record})
            self._write(self.records[-1])
        if self._folder is not None:
            self._judge.write_weights(self._folder.path)
        self.finished = True
        self._save()

    def _watch(self, unit: str, count: int) -> None:
        for monitor in self._monitors if is_writer() else ():
            if getattr(monitor, "unit", "step") != unit:
                continue
            record = monitor(count, self._parts.model, self._parts.optimizer)
            if record is not None:
                # A step is one of the epoch that is not over.
                number = self.epoch + 1 if unit == "step" else self.epoch
                self._write({**record, "epoch": number, "step": self.step})

    def _poll(self, *, agreed: bool = False) -> TrainingStatus | None:
        """Save where it is time, or where a signal came; how the run ends, if it does."""
        due = time.monotonic() - self._saved >= self._settings.save_interval
        code = 2 if self._signals else int(due and self._folder is not None)
        if world_size() > 1:
            if not agreed and self.step % AGREEMENT:
                return None
            code = all_max(code)
        if code and not self._save():
            return _diverged(self.epoch + 1)
        return self._interrupted() if code == 2 else None

    def _interrupted(self) -> TrainingStatus:
        kept = "" if self._folder is None else f", saved in {self._folder.path}"
        advice = "run the same again to go on" if kept else "give a checkpoint folder to go on from"
        return TrainingStatus(
            outcome="interrupted",
            message=f"{next(iter(self._signals), 'a signal')} after {self.step} steps{kept}",
            advice=advice,
        )

    def _save(self) -> bool:
        """Write a checkpoint; False, and nothing written, where the loss is not finite."""
        parts = self._parts
        if self._folder is None:
            return True
        if not bool(torch.isfinite(parts.step.totals.sums).all()):
            return False
        states = generator_states(parts.device, self._own)
        totals = gathered(parts.step.totals.sums)
        carried = {} if self._carried is None else self._carried.rows()
        if is_writer():
            self._folder.write(Checkpoint(
                model=tensor_state(parts.model),
                optimizer=optimizer_state(parts.optimizer),
                schedule=dict(parts.schedule.state_dict()),
                scaler=parts.step.scaler.state_dict(),
                patience=self._judge.state(),
                generators=states,
                beginning=self._beginning,
                epoch=self.epoch,
                batch=self.batch,
                step=self.step,
                totals=totals,
                records=self.records,
                log_bytes=self._log_bytes if self._log is None else self._log.flush(),
                settings=self._settings.description(),
                finished=self.finished,
                carried=carried,
            ))  # fmt: skip
        all_max(0)  # nobody goes on, and perhaps reads it, before it is there
        self._saved = time.monotonic()
        return True

    def _load(self, found: Checkpoint, path: Path) -> None:
        """Go on from a checkpoint."""
        parts = self._parts
        check_same(found.settings, self._settings.description(), path)
        done = found.epoch + (found.batch > 0)
        if done > self._settings.num_epochs:
            raise ValueError(f"num_epochs must be at least {done}, for so many epochs are begun in "
                             f"{path.parent}, got {self._settings.num_epochs}: nothing is left to "
                             "do; begin anew with resume=False (--restart)")  # fmt: skip
        check_matches(tensor_state(parts.model), found.model, path)
        with torch.no_grad():
            for name, held in tensor_state(parts.model).items():
                held.copy_(found.model[name])
        load_optimizer_state(parts.optimizer, found.optimizer, parts.device)
        parts.schedule.load_state_dict(found.schedule)
        parts.step.scaler.load_state_dict(found.scaler)
        self._judge.load_state(found.patience)
        self._load_carried(found, path)
        set_generator_states(found.generators, parts.device, self._own)
        parts.step.totals.sums.copy_(found.totals[rank()])
        self.epoch, self.batch, self.step = found.epoch, found.batch, found.step
        self.records, self._beginning = list(found.records), found.beginning
        over = found.epoch >= self._settings.num_epochs or self._judge.stopped
        self.finished, self._longer = found.finished and over, found.finished and not over
        if self._log_path is not None:
            self._log_bytes = found.log_bytes
        if self._longer:  # without the record of an end that was none
            self.records = [record for record in self.records if record["kind"] != "final"]
        if self.step:  # lest the schedule warn that it is stepped before the optimiser
            parts.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _load_carried(self, found: Checkpoint, path: Path) -> None:
        if found.step and bool(found.carried) != (self._carried is not None):
            made = "with" if found.carried else "without"
            raise ValueError(f"{path} was made {made} a state carried from batch to batch, "
                             "unlike this run: give the same, or another folder")  # fmt: skip
        if self._carried is not None:
            self._carried.load(found.carried)

    def _write(self, record: Record) -> None:
        if self._log is not None:
            self._log.write(record)

    def _write_times(self, number: int, steps: int, samples: int, seconds: float) -> None:
        if self._times is not None:
            speed = {"steps": steps, "seconds": seconds, "samples_per_second": samples / seconds}
            rest = time.perf_counter() - self._work[2] - seconds
            self._times.write({"epoch": number, **speed, "evaluation_seconds": rest})

    def _note(self, number: int) -> Callable[[float], str]:
        """What the bar says beside the steps, given the samples a second."""
        loss = self.records[-1].get("train_loss") if self.records else None
        head = f"epoch {number}/{self._settings.num_epochs}, "
        tail = " samples/s" if loss is None else f" samples/s, loss {loss:.4g}"
        return lambda rate: f"{head}{rate:,.0f}{tail}"


def _share(mass: Any, whole: Any) -> Any:
    """Part of the mean over all rows; processes average their gradients, hence their number."""
    if isinstance(whole, Tensor):
        # Where all labels are ignored it is nothing over anything.
        whole = whole.double().masked_fill(whole == 0, 1.0)
    return mass * world_size() / whole


def _times(log: Any, *, anew: bool) -> Log:
    path = times_path(log)
    return Log(path, size=0 if anew or not path.exists() else path.stat().st_size)


def _diverged(number: int) -> TrainingStatus:
    return TrainingStatus(
        outcome="diverged",
        message=f"the loss of epoch {number} is not finite",
        advice="lower the rate, warm it up, clip the gradient, or look for NaN in the data",
    )
