"""A training run: its epochs, evaluation on the way, saving and resuming."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ritz import optim
from ritz._core.batches import num_rows
from ritz._core.distributed import all_max, rank, world_size
from ritz._core.progress import Progress, tracking
from ritz._core.training_config import TrainingConfig, check_same
from ritz.curvature._shared import check_labels
from ritz.training._assembly import Parts, check_last_batch, explain_one_row
from ritz.training._data import Feed, own_rows
from ritz.training._evaluate import TrainingStatus, evaluate, with_perplexity
from ritz.training._folder import (
    AVERAGE,
    WEIGHTS,
    Checkpoint,
    Folder,
    Log,
    Record,
    check_no_link,
    copy_weights,
    load_optimizer_state,
    optimizer_state,
    save_weights,
    tensor_state,
    times_path,
)
from ritz.training._processes import gathered, generator_states, is_writer, set_generator_states
from ritz.training._step import Piece, batch_mass, carried_state

# ------------------------------------------------------------------------------------------
# Evaluation of the weights and of their average.


@final
class Judge:
    """Evaluates the model of a run and says when patience has run out.

    Args:
        parts: Parts of the run.
        config: Options of the run.
        held: Data to evaluate on, by name. If both are given, ``validation`` is evaluated during
            the run and ``test`` at its end.
    """

    def __init__(self, parts: Parts, config: TrainingConfig, held: Mapping[str, Feed]) -> None:
        self._parts, self._config = parts, config
        later = "test" if "validation" in held else None
        self._now = {name: feed for name, feed in held.items() if name != later}
        self._later = {name: feed for name, feed in held.items() if name == later}
        # The generators that loaders of these data draw from.
        self.generators = [each for feed in held.values() for each in feed.generators]
        if parts.auto is not None and not held:
            raise ValueError("validation must be given with patience, got none")

    def measure(self, *, last: bool) -> Record:
        """Return loss and accuracy on the data that are evaluated during the run."""
        return self._scores(self._now, 1.0 if last else self._config.statistics_fraction)

    def measure_at_end(self) -> Record:
        """Return loss and accuracy on the data that are evaluated at the end of the run."""
        return self._scores(self._later, 1.0)

    def wants_to_stop(self, record: Record) -> bool:
        """Return whether patience has run out, given one more evaluation."""
        if self._parts.auto is None:
            return False
        name = f"{next(iter(self._now))}_loss"
        value = record[f"average_{name}" if f"average_{name}" in record else name]
        return self._parts.auto.update(value)

    def write_weights(self, folder: Path) -> None:
        """Write the last weights and, if there is one, their average; called by all processes."""
        model = self._parts.model
        if is_writer():
            save_weights(model, folder / WEIGHTS)
        if self._average is not None:
            with self._average.applied(model, **self._statistics(1.0)):
                if is_writer():
                    save_weights(model, folder / AVERAGE)

    def load_final_weights(self) -> None:
        """Load the averaged weights into the model if the options say so."""
        if self._config.final == "average" and self._average is not None:
            self._average.copy_to(self._parts.model, **self._statistics(1.0))

    @property
    def _average(self) -> optim.IterateAverage | None:
        average = self._parts.average
        return average if average is not None and average.count else None

    def _statistics(self, fraction: float) -> dict[str, Any]:
        # Running statistics belong to the last weights: batch norm needs those of the average.
        return {"data": self._parts.feed.part(fraction), "forward": self._parts.step.adapter.custom}

    def _scores(self, feeds: Mapping[str, Feed], fraction: float) -> Record:
        record = self._evaluated(feeds, "")
        if feeds and self._average is not None:
            with self._average.applied(self._parts.model, **self._statistics(fraction)):
                record |= self._evaluated(feeds, "average_")
        return record

    def _evaluated(self, feeds: Mapping[str, Feed], prefix: str) -> Record:
        record: Record = {}
        adapter = self._parts.step.adapter
        for name, feed in feeds.items():
            means = evaluate(
                self._parts.model,
                feed.epoch(0, 0),
                loss_fn=adapter.loss_fn.call,
                forward=adapter.custom,
                precision=self._config.precision,
                carry_state=feed.consecutive,
            )
            means = with_perplexity(means, feed, adapter.loss_fn.call)
            record |= {f"{prefix}{name}_{key}": value for key, value in means.items()}
        return record


# ------------------------------------------------------------------------------------------
# The run.

# Steps between two agreements of several processes whether to save or to stop. Each agreement
# waits for all processes; a signal waits for 50 steps at most.
AGREEMENT = 50
Monitor = Callable[[int, nn.Module, Any], Record | None]


@final
class Run:
    """A training run, from its start or from its checkpoint.

    Args:
        parts: Model, data, optimiser and the rest.
        config: Options.
        fingerprint: Options that a resumed run must share with its beginning.
        judge: Evaluates.
        monitors: Called after every step, or after every epoch if their ``unit`` is ``epoch``.
        signals: Names of the signals received so far: a reason to stop.
        log: Path of the log, or ``None``.
        folder: Folder of the checkpoint, or ``None``.
    """

    def __init__(
        self,
        parts: Parts,
        config: TrainingConfig,
        *,
        fingerprint: dict[str, Any],
        judge: Judge,
        monitors: Sequence[Monitor],
        signals: Sequence[str],
        log: Any,
        folder: Folder | None,
    ) -> None:
        self._parts, self._config, self._fingerprint = parts, config, fingerprint
        self._judge, self._monitors = judge, monitors
        self._signals, self._folder, self._log_path = signals, folder, log
        self.epoch, self.batch, self.step, self.finished = 0, 0, 0, False
        self.records: list[Record] = []
        # Generators of loaders, in the order of first use, each once: loaders may share one.
        self._generators = list(dict.fromkeys([*parts.feed.generators, *judge.generators]))
        self._epoch_start = generator_states(parts.device, self._generators)
        self._carried = carried_state(parts.step.adapter, wanted=parts.feed.consecutive)
        self._saved, self._labels_checked = time.monotonic(), False
        self._work = 0, 0, time.perf_counter()  # steps, samples and start of the present epoch
        self._log_bytes = 0
        self._log: Log | None = None
        self._times: Log | None = None
        for path in () if log is None else (Path(log), times_path(log)):
            check_no_link(path)  # before files of an earlier run are removed
        checkpoint = folder.read() if folder is not None and config.resume else None
        self._new, self._begun = checkpoint is None, False
        if folder is not None and checkpoint is not None:
            self._load(checkpoint, folder.file)
        all_max(0)  # a barrier: no process writes before all have read
        self._first_step = self.step

    def train(self, progress: bool | Progress) -> TrainingStatus:
        """Train for the remaining epochs and return how the run ended."""
        config, length = self._config, self._parts.steps_per_epoch
        left = None if length is None else config.num_epochs * length - self.step
        status = None
        if not self.finished:
            check_last_batch(self._parts, config)
        try:
            with tracking(progress if is_writer() else False, "training", left) as bar:
                while status is None and not self.finished and self.epoch < config.num_epochs:
                    status = self._epoch(bar) or self._close_epoch()
            if status is None or status.ok:
                self._finish()
                self._judge.load_final_weights()
        finally:
            for file in (self._log, self._times):
                if file is not None:
                    file.close()
        message = f"{self.epoch} epochs, {self.step} steps"
        return status or TrainingStatus(outcome="completed", message=message)

    def _begin(self) -> None:
        """Take over folder and log, after the first step.

        If model and data do not fit, the first step fails, and the files of an earlier run stay.
        """
        if self._begun:
            return
        self._begun = True
        if self._folder is not None:
            self._parts.step.totals.sums.tolist()  # CUDA reports failures when it is waited for
            if self._new and is_writer():
                self._folder.clear()
        if self._log_path is not None and is_writer():
            self._log = Log(self._log_path, size=self._log_bytes)
            times = times_path(self._log_path)
            old = 0 if self._new or not times.exists() else times.stat().st_size
            self._times = Log(times, size=old)
        if self._folder is not None and is_writer():
            self._folder.write_texts()  # after all files of another run are gone
        if self._new:
            self._save()

    def _epoch(self, bar: Progress) -> TrainingStatus | None:
        """Take the remaining steps of an epoch; return how the run ends, if it does."""
        number, first, seen = self.epoch + 1, self.step, 0
        started, note = time.perf_counter(), self._note(number)
        self._parts.model.train()
        if self._carried is not None and not self.batch:
            self._carried.reset()
        for group in self._groups(number):
            try:
                self._parts.take(self._pieces(group))
            except ValueError as error:
                rows = min(num_rows(batch) for batch in group)
                raise explain_one_row(error, rows, self._config) from error
            self.step += 1
            self.batch += len(group)
            if self._config.schedule_unit == "step":
                self._parts.schedule.step()
            self._begin()
            self._watch("step", self.step)
            seen += sum(num_rows(batch) for batch in group)
            bar.update(self.step - self._first_step, note(seen / (time.perf_counter() - started)))
            status = self._poll()
            if status is not None:
                return status
        self._work = self.step - first, seen, started
        return None

    def _groups(self, number: int) -> Iterator[list[Any]]:
        """Yield the remaining batches of an epoch, grouped by step."""
        feed, device, seed = self._parts.feed, self._parts.device, self._config.seed
        now = generator_states(device, self._generators)
        if self.batch:
            # A loader draws its order when an epoch starts, from its generator or the global ones.
            # Let it draw the same order again.
            set_generator_states(self._epoch_start, device, self._generators)
            batches = feed.epoch(number, seed, skip=self.batch, look=self._check_labels)
            set_generator_states(now, device, self._generators)
        else:
            self._epoch_start = now
            batches = feed.epoch(number, seed, look=self._check_labels)
        while group := list(islice(batches, self._config.accumulate)):
            yield group
        if not self.batch:
            raise ValueError("data must hold at least one batch an epoch, got none")

    def _pieces(self, group: list[Any]) -> list[Piece]:
        """Return the rows of this process, each batch with its share of the gradient."""
        alone = len(group) == 1 and world_size() == 1
        whole = 1 if alone else sum(self._mass(batch) for batch in group)
        if isinstance(whole, Tensor):
            # If all labels are ignored, each share is zero instead of 0/0.
            whole = whole.double().masked_fill(whole == 0, 1.0)
        pieces = []
        for batch in group:
            rows, count, real = own_rows(batch)
            # The mean over all rows is the sum over batches of (mass / whole) * batch mean.
            # DistributedDataParallel divides the sum over processes by their number.
            share = 1.0 if alone else self._mass(rows) * world_size() / whole if real else 0.0
            state = None if self._carried is None else self._carried.of(count)
            pieces.append(Piece(rows, share, real, state))
        return pieces

    def _mass(self, batch: Any) -> Any:
        adapter = self._parts.step.adapter
        return batch_mass(adapter, batch, adapter.target(batch))

    def _check_labels(self, batch: Any) -> None:
        """Raise for a label without an output: on CUDA, torch would end the process.

        The first step checks its own batch and finds the number of classes. Data in memory are then
        checked at once, other batches one by one during the first epoch.
        """
        step = self._parts.step
        if self._labels_checked or self.epoch or not step.num_classes:
            return
        ready = self._parts.feed.ready
        first, batches = (self.batch + 1, [batch]) if ready is None else (1, ready)
        for number, each in enumerate(batches, start=first):
            target = step.adapter.target(each)
            if isinstance(target, Tensor):
                outputs = target.new_empty(0, step.num_classes)
                check_labels(step.adapter.loss_fn.call, outputs, target,
                             f"batch {number}", some=False)  # fmt: skip
        self._labels_checked = ready is not None

    def _close_epoch(self) -> TrainingStatus | None:
        """Step the schedule, evaluate, log and save after the last step of an epoch."""
        self._begin()
        parts, config, number = self._parts, self._config, self.epoch + 1
        means = parts.step.totals.means()  # waits for the device
        means = with_perplexity(means, parts.feed, parts.step.adapter.loss_fn.call)
        steps, samples, started = self._work
        spent = time.perf_counter() - started
        if not math.isfinite(means["loss"]):
            return _diverged(number)
        record: Record = {"kind": "epoch", "epoch": number, "step": self.step}
        record |= {"rate": float(parts.optimizer.param_groups[0]["lr"])}
        record |= {f"train_{name}": value for name, value in means.items()}
        if config.schedule_unit == "epoch":
            parts.schedule.step()
        last = number == config.num_epochs
        stop = False
        if last or number % config.evaluate_every == 0:
            record |= self._judge.measure(last=last)
            stop = self._judge.wants_to_stop(record)
        parts.step.totals.reset()
        self.epoch, self.batch = number, 0
        self.records.append(record)
        self._write(record)
        self._watch("epoch", number)
        if self._times is not None:
            rest = time.perf_counter() - started - spent
            self._times.write({"epoch": number, "steps": steps, "seconds": spent,
                               "samples_per_second": samples / spent,
                               "evaluation_seconds": rest})  # fmt: skip
        if self._folder is not None and number in config.keep and is_writer():
            save_weights(parts.model, self._folder.path / f"epoch-{number:04d}.safetensors",
                         epoch=number)  # fmt: skip
        if stop:
            return TrainingStatus(outcome="stopped", message=f"patience ran out in epoch {number}")
        return self._poll(agreed=True)

    def _finish(self) -> None:
        if self.finished:
            return
        self._begin()
        record = self._judge.measure_at_end()
        if self._log is not None:
            self._log_bytes = self._log.flush()
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
                # A step belongs to the epoch that is not yet complete.
                number = self.epoch + 1 if unit == "step" else self.epoch
                self._write({**record, "epoch": number, "step": self.step})

    def _write(self, record: Record) -> None:
        if self._log is not None:
            self._log.write(record)

    def _poll(self, *, agreed: bool = False) -> TrainingStatus | None:
        """Save if it is time or a signal was received; return how the run ends, if it does."""
        due = time.monotonic() - self._saved >= self._config.save_interval
        code = 2 if self._signals else int(due and self._folder is not None)
        if world_size() > 1:
            if not agreed and self.step % AGREEMENT:
                return None
            code = all_max(code)
        if code and not self._save():
            return _diverged(self.epoch + 1)
        if code < 2:
            return None
        saved = "" if self._folder is None else f", saved in {self._folder.path}"
        return TrainingStatus(
            outcome="interrupted",
            message=f"{next(iter(self._signals), 'a signal')} after {self.step} steps{saved}",
            advice="repeat the call to resume"
            if saved
            else "give a checkpoint folder to resume from",
        )

    def _save(self) -> bool:
        """Write a checkpoint; return False, and write nothing, if the loss is not finite."""
        parts = self._parts
        if self._folder is None:
            return True
        if not bool(torch.isfinite(parts.step.totals.sums).all()):
            return False
        # All processes take part in these three.
        states = generator_states(parts.device, self._generators)
        totals = gathered(parts.step.totals.sums)
        carried = {} if self._carried is None else self._carried.rows()
        if is_writer():
            if self._log is not None:
                size = self._log.flush()
                # The checkpoint of a finished run excludes the record of its end: a longer run
                # resumes the log before that record.
                self._log_bytes = self._log_bytes if self.finished else size
            self._folder.write(Checkpoint(
                model=tensor_state(parts.model),
                optimizer=optimizer_state(parts.optimizer),
                schedule=dict(parts.schedule.state_dict()),
                scaler=parts.step.scaler.state_dict(),
                patience=None if parts.auto is None else parts.auto.state_dict(),
                generators=states,
                beginning=self._epoch_start,
                epoch=self.epoch,
                batch=self.batch,
                step=self.step,
                totals=totals,
                records=self.records,
                log_bytes=self._log_bytes,
                settings=self._fingerprint,
                finished=self.finished,
                carried=carried,
            ))  # fmt: skip
        all_max(0)  # a barrier: no process continues, and perhaps reads, before the file is there
        self._saved = time.monotonic()
        return True

    def _load(self, saved: Checkpoint, path: Path) -> None:
        """Continue from a checkpoint."""
        parts, num_epochs = self._parts, self._config.num_epochs
        check_same(saved.settings, self._fingerprint, path)
        started = saved.epoch + (saved.batch > 0)
        if started > num_epochs:
            raise ValueError(f"num_epochs must be at least {started}, the epochs that are started "
                             f"in {path.parent}, got {num_epochs}: nothing is left to do; start "
                             "again with resume=False (--restart)")  # fmt: skip
        if saved.step and bool(saved.carried) != (self._carried is not None):
            made = "with" if saved.carried else "without"
            raise ValueError(f"{path} was made {made} a state carried from batch to batch, "
                             "unlike this run: give the same, or another folder")  # fmt: skip
        copy_weights(parts.model, saved.model, path)
        load_optimizer_state(parts.optimizer, saved.optimizer, parts.device)
        parts.schedule.load_state_dict(saved.schedule)
        parts.step.scaler.load_state_dict(saved.scaler)
        if saved.patience is not None and parts.auto is not None:
            parts.auto.load_state_dict(saved.patience)
        if self._carried is not None:
            self._carried.load(saved.carried)
        set_generator_states(saved.generators, parts.device, self._generators)
        parts.step.totals.sums.copy_(saved.totals[rank()])
        self.epoch, self.batch, self.step = saved.epoch, saved.batch, saved.step
        self.records, self._epoch_start = list(saved.records), saved.beginning
        stopped = parts.auto is not None and parts.auto.finished
        over = saved.epoch >= num_epochs or stopped
        self.finished = saved.finished and over
        if self._log_path is not None:
            self._log_bytes = saved.log_bytes
        if not over:  # the end that was recorded is no longer the end
            self.records = [record for record in self.records if record["kind"] != "final"]
        if self.step:  # prevents the warning that the schedule is stepped before the optimiser
            parts.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _note(self, number: int) -> Callable[[float], str]:
        """Return the text of the progress bar as a function of the samples per second."""
        loss = self.records[-1].get("train_loss") if self.records else None
        head = f"epoch {number}/{self._config.num_epochs}, "
        tail = " samples/s" if loss is None else f" samples/s, loss {loss:.4g}"
        return lambda rate: f"{head}{rate:,.0f}{tail}"


def _diverged(number: int) -> TrainingStatus:
    return TrainingStatus(
        outcome="diverged",
        message=f"the loss of epoch {number} is not finite",
        advice="lower the learning rate, warm it up, clip the gradient, or find NaN in the data",
    )
