"""A training run: its epochs, evaluation, saving and resuming."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ritz._core.batches import num_rows
from ritz._core.checks import check_type
from ritz._core.distributed import all_max, gather_by_process, rank, world_size
from ritz._core.progress import Progress, tracking
from ritz._core.training_config import TrainingConfig, check_same
from ritz.curvature._shared import Adapter, Forward, check_labels, check_reduction, known_loss
from ritz.data import TextSplit
from ritz.optim import CovarianceNoise, Lookahead
from ritz.optim._shared import learning_rate
from ritz.training import _weights
from ritz.training._checkpoint import (
    AVERAGE,
    WEIGHTS,
    Checkpoint,
    Folder,
    Generators,
    check_no_link,
    load_optimizer_state,
    optimizer_state,
)
from ritz.training._cuda_graph import CapturedStep, is_captured
from ritz.training._data import Feed, loader_generators, own_rows
from ritz.training._evaluate import evaluate
from ritz.training._log import Log, Record, times_path
from ritz.training._optimizers import (
    average_plan,
    check_final,
    check_patience,
    make_average,
    make_noise,
    make_optimizer,
    make_schedule,
    nested,
)
from ritz.training._recurrent import carried_state, make_penalty
from ritz.training._result import TrainingStatus, diverged
from ritz.training._step import (
    Piece,
    Step,
    batch_mass,
    explain_step,
    scaled_learning_rates,
    use_ghosts,
)
from ritz.training._step_curvature import DivergedError, StepCurvature
from ritz.training._writers import Writer, write_scalars

AGREEMENT = 50  # steps between two times at which processes agree whether to save or stop
Monitor = Callable[[int, nn.Module, Any], Record | None]


@final
@dataclass(kw_only=True, eq=False)
class Run:
    """A training run, from its start or from its checkpoint.

    Attributes:
        model: Any module; it is moved to the device.
        feed: Training data.
        evaluation: Data to evaluate on, by name. If both are given, ``validation`` is evaluated
            during the run and ``test`` at its end.
        config: Options.
        device: Device of model and data.
        loss_fn: Mean loss of outputs and target.
        forward: Calls the model on a batch.
        optimizer: An optimiser, or a function that returns one. Defaults to that of ``config``.
        schedule: A scheduler, or a function of the time. Defaults to that of ``config``.
        average: User-defined average of the weights.
        monitors: Called after every step, or after every epoch if their ``unit`` is ``epoch``.
        signals: Names of the signals received so far: a reason to stop.
        log: Path of the log, or ``None``.
        folder: Folder of the checkpoint, or ``None``.
        writer: Receives the numbers of the log, or ``None``.
        classes: Classes of user-defined objects, which a resumed run must share.
    """

    model: nn.Module
    feed: Feed
    evaluation: Mapping[str, Feed]
    config: TrainingConfig
    device: torch.device
    loss_fn: Callable[..., Any] | None
    forward: Forward | None
    optimizer: Any
    schedule: Any
    average: Any
    monitors: Sequence[Monitor]
    signals: Sequence[str]
    log: Any
    folder: Folder | None
    writer: Writer | None
    classes: dict[str, str]

    def __post_init__(self) -> None:
        self._assemble()
        # Generators of loaders, in the order of first use, each once: loaders may share one.
        feeds = (self.feed, *self.evaluation.values())
        loaders = dict.fromkeys(each for feed in feeds for each in loader_generators(feed.source))
        self._generators = Generators(self.device, list(loaders))
        self.state = Checkpoint(
            settings=self.config.fingerprint() | self.classes, beginning=self._generators.states()
        )
        self._saved, self._labels_checked = time.monotonic(), False
        self._work = 0, 0, time.perf_counter()  # steps, samples and start of the current epoch
        self._log: Log | None = None
        self._times: Log | None = None
        if self.log is not None:  # before files of an earlier run are removed
            check_no_link(Path(self.log))
            check_no_link(times_path(self.log))
        checkpoint = self.folder.read() if self.folder and self.config.resume else None
        self._new, self._begun = checkpoint is None, False
        if self.folder is not None and checkpoint is not None:
            self._load(checkpoint, self.folder.file)
        all_max(0)  # a barrier: no process writes before all have read
        self._first_step = self.state.step
        # The initial weights are copied now, because files are written after the first step.
        is_kept = self._new and 0 in self.config.keep and rank() == 0
        self._initial = copy.deepcopy(_weights.tensor_state(self.model)) if is_kept else None

    def _assemble(self) -> None:
        """Create optimiser, average, schedule and step from the options, and check them."""
        config, model, device = self.config, self.model.to(self.device), self.device
        check_reduction(self.loss_fn)
        use_ghosts(model, config, self.feed.largest_batch)
        self.steps_per_epoch = config.steps_per_epoch  # None if unknown
        if self.steps_per_epoch is None and self.feed.num_batches is not None:
            # Rounded up: the last step of an epoch may accumulate fewer batches.
            self.steps_per_epoch = math.ceil(self.feed.num_batches / config.accumulate)
        plan = average_plan(config, self.steps_per_epoch, self._steps_before)
        optimizer = make_optimizer(self.optimizer, model, config, plan, device)
        self.average, self._auto = make_average(self.average, optimizer, config, plan)
        check_final(config, self.average)
        if self._auto is not None:
            check_patience(self.evaluation)
        self.schedule = make_schedule(self.schedule, optimizer, config, self.steps_per_epoch)
        noise = make_noise(
            optimizer, Adapter(model, self.loss_fn, self.forward), config, self._num_steps(),
            samples_per_step=self.feed.smallest_batch,
        )  # fmt: skip
        self.optimizer = optimizer
        self._attach_monitors()
        self._make_step(optimizer, noise)
        self._curvature = StepCurvature(
            model,
            self.feed,
            config,
            optimizer,
            loss_fn=self.loss_fn,
            forward=self.forward,
            length=self.steps_per_epoch,
        )

    def _make_step(self, optimizer: Optimizer, noise: CovarianceNoise | None) -> None:
        """Create the training step: compiled, distributed or captured, as the options say."""
        config, model, device = self.config, self.model, self.device
        compiled: Any = torch.compile(model) if config.compile else model
        if world_size() > 1:
            ids = [device.index] if device.type == "cuda" else None
            compiled = DistributedDataParallel(compiled, device_ids=ids)
        self._adapter = Adapter(compiled, self.loss_fn, self.forward)
        captured = is_captured(optimizer, config, device, noise)
        self._step = Step(
            self._adapter,
            optimizer,
            config,
            device,
            cached=not captured,
            noise=noise,
            penalty=make_penalty(model, config),
        )
        # The same step, perhaps replayed from a CUDA graph.
        self._take: Callable[[Sequence[Piece]], None] = self._step
        if captured:
            self._take = CapturedStep(self._step, required=bool(config.capture))
        self._carried = carried_state(self._adapter, wanted=self.feed.consecutive)

    def _attach_monitors(self) -> None:
        for monitor in self.monitors:
            if hasattr(monitor, "attach"):
                monitor.attach(self.optimizer)
            # Before the first step, rather than after the epochs up to the first measurement.
            if hasattr(monitor, "check") and rank() == 0:
                monitor.check(self.model)

    def train(self, progress: bool | Progress) -> TrainingStatus:
        """Train for the remaining epochs and return how the run ended."""
        config, state, total = self.config, self.state, self._num_steps()
        # Total of the progress bar; unknown for data without a length.
        left = None if total is None else total - state.step
        status = None
        try:
            with tracking(progress if rank() == 0 else False, "training", left) as bar:
                while status is None and not state.finished and not self._is_over(state):
                    status = self._epoch(bar) or self._close_epoch()
                    bar.update(state.step - self._first_step, self._last_scores())
            if status is None or status.ok:
                self._finish()
                if config.final == "average" and self.average.count:
                    self.average.copy_to(self.model, **self._statistics())
        finally:
            for file in (self._log, self._times):
                if file is not None:
                    file.close()
        message = f"{state.epoch} epochs, {state.step} steps"
        return status or TrainingStatus(outcome="completed", message=message)

    def _steps_before(self, epoch: int) -> int | None:
        """Return the number of steps before an epoch of segments of random lengths."""
        if not self.config.random_segments:
            return None
        counts = [self.feed.num_batches_in(number) or 0 for number in range(1, epoch)]
        return sum(math.ceil(count / self.config.accumulate) for count in counts)

    def _num_steps(self) -> int | None:
        """Return the number of steps of the whole run, if it is known."""
        config = self.config
        if config.steps_per_epoch is not None:
            total = config.num_epochs * config.steps_per_epoch
        else:
            counts = [self.feed.num_batches_in(e + 1) for e in range(config.num_epochs)]
            if any(count is None for count in counts):
                return None
            total = sum(math.ceil((count or 0) / config.accumulate) for count in counts)
        return total if config.max_steps is None else min(total, config.max_steps)

    # --------------------------------------------------------------------------------------
    # Steps and epochs.

    def _begin(self) -> None:
        """Write the first files of the run, once, after the first step.

        If model and data do not fit, the first step fails, and files of an earlier run are intact.
        """
        if self._begun:
            return
        self._begun = True
        if self._metric == "accuracy" and self._step.num_classes == 0:
            raise ValueError(
                "patience_metric must be loss, got accuracy, which needs integer targets: the "
                "outputs are not scores of classes"
            )
        if self.folder is not None:
            self._step.totals.sums.tolist()  # CUDA reports failures when it is waited for
            if self._new and rank() == 0:
                self.folder.clear()
        if self.log is not None and rank() == 0:
            self._log = Log(self.log, size=self.state.log_bytes)
            self._times = Log(times_path(self.log), size=0 if self._new else None)
        if self.folder is not None and rank() == 0:
            self.folder.write_texts()  # after all files of another run are gone
        if self._new:
            self._save()
        if self.folder is not None and self._initial is not None:
            _weights.save_tensors(
                self._initial, self.folder.path / _weights.epoch_file_name(0), epoch=0
            )
            self._initial = None

    def _epoch(self, bar: Progress) -> TrainingStatus | None:
        """Take the remaining steps of an epoch; return how the run ends, if it does."""
        state, first, seen = self.state, self.state.step, 0
        started, head = time.perf_counter(), f"epoch {state.epoch + 1}/{self.config.num_epochs}"
        scores = "".join(f"{text}; " for text in (self._last_scores(),) if text)
        self.model.train()
        # A text is read from its beginning in each epoch; a resumed epoch continues.
        if self._carried is not None and not state.batch:
            self._carried.reset()
        for group in self._groups():
            try:
                with (
                    self._segment_learning_rate(group),
                    self._curvature.around(group, state.step, epoch=state.epoch + 1),
                ):
                    self._take(self._pieces(group))
            except DivergedError:
                return diverged(state.epoch + 1)
            except ValueError as error:
                rows = min(num_rows(batch) for batch in group)
                raise explain_step(error, rows, self.config) from error
            self._check_evaluation_labels()
            state.step += 1
            state.batch += len(group)
            if self.config.schedule_unit == "step":
                self.schedule.step()
            self._begin()
            self._watch("step", state.step)
            # Counted from shapes: no step may wait for the device.
            seen += sum(num_rows(batch) for batch in group)
            rate = f"{seen / (time.perf_counter() - started):,.0f} samples/s"
            bar.update(state.step - self._first_step, f"{scores}{head}, {rate}")
            if (status := self._poll()) is not None:
                return status
        self._work = state.step - first, seen, started
        return None

    def _last_scores(self) -> str:
        """Return the loss of the last complete epoch, and its score on data to evaluate on."""
        record = next((r for r in reversed(self.state.records) if r["kind"] == "epoch"), None)
        if record is None:
            return ""
        parts = [f"loss {record['train_loss']:.4g}"]
        names = product(("validation", "test"), ("perplexity", "accuracy", "loss"))
        scores = {f"{part} {name}": record.get(f"{part}_{name}") for part, name in names}
        if shown := next(((name, x) for name, x in scores.items() if x is not None), None):
            name, value = shown
            parts.append(f"{name} {value:.2%}" if "accuracy" in name else f"{name} {value:.4g}")
        return f"epoch {record['epoch']}: {', '.join(parts)}"

    def _segment_learning_rate(self, group: Sequence[Any]) -> AbstractContextManager[None]:
        """Make the learning rate of a step proportional to the random length of its segments."""
        if not self.config.random_segments:
            return nullcontext()
        # As in AWD-LSTM: a shorter segment takes a proportionally smaller step.
        lengths = [batch[0].shape[1] / self.feed.source.length for batch in group]
        return scaled_learning_rates(nested(self.optimizer)[-1], sum(lengths) / len(lengths))

    def _groups(self) -> Iterator[list[Any]]:
        """Yield the remaining batches of an epoch, as one list per step."""
        state, now = self.state, self._generators.states()
        if state.batch:
            # A loader draws its order when an epoch starts, from its own generator or a global one.
            # With the states of that time it draws the same order again.
            self._generators.restore(state.beginning)
        else:
            state.beginning = now
        batches = self.feed.epoch(
            state.epoch + 1, self.config.seed, skip=state.batch, inspect=self._check_labels
        )
        if state.batch:
            self._generators.restore(now)
        accumulate, last = self.config.accumulate, self.config.max_steps
        while state.step != last and (group := list(islice(batches, accumulate))):
            yield group
        if not state.batch:
            raise ValueError(
                f"data yielded no batch in epoch {state.epoch + 1}: every epoch must have at "
                "least one; an iterator can be read only once"
            )

    def _pieces(self, group: list[Any]) -> list[Piece]:
        """Return the rows of this process, each batch with its share of the gradient."""
        alone = len(group) == 1 and world_size() == 1
        whole = 1 if alone else sum(self._mass(batch) for batch in group)
        if isinstance(whole, Tensor):
            # If all labels are ignored, the shares are zero and not 0/0.
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
        return batch_mass(self._adapter, batch, self._adapter.target(batch))

    def _check_labels(self, batch: Any) -> Any:
        """Return the batch; raise if a label has no output, which on CUDA would end the process.

        The first step checks its own batch, and finds the number of classes. Then data in memory
        are checked at once, and other data batch by batch during the first epoch.
        """
        ready = self.feed.ready
        if self._labels_checked or self.state.epoch or not self._step.num_classes:
            return batch
        first, batches = (self.state.batch + 1, [batch]) if ready is None else (1, ready)
        for number, each in enumerate(batches, start=first):
            self._check_target(each, f"batch {number}")
        self._labels_checked = ready is not None
        return batch

    def _check_evaluation_labels(self) -> None:
        """Check the labels of data to evaluate on, if in memory, before anything is written."""
        if self._begun or not self._step.num_classes:
            return
        for name, feed in self.evaluation.items():
            for batch in feed.ready or ():
                self._check_target(batch, f"the {name} data")

    def _check_target(self, batch: Any, where: str) -> None:
        target = self._adapter.target(batch)
        if isinstance(target, Tensor):
            outputs = target.new_empty(0, self._step.num_classes or 0)
            check_labels(self.loss_fn, outputs, target, where, some=False)

    def _close_epoch(self) -> TrainingStatus | None:
        """Step the schedule, evaluate, log and save after the last step of an epoch."""
        self._begin()
        config, state, number = self.config, self.state, self.state.epoch + 1
        means = self._with_perplexity(self._step.totals.means(), self.feed, "train_")
        steps, samples, started = self._work
        spent = time.perf_counter() - started  # after `means`, which waits for the device
        if not math.isfinite(means["train_loss"]):
            return diverged(number)
        rate = learning_rate(self.optimizer.param_groups[0])
        record: Record = {"kind": "epoch", "epoch": number, "step": state.step}
        record |= {"learning_rate": rate} | means
        if config.damping != "constant":
            record["damping"] = self._curvature.damping.values()[0]
        if config.schedule_unit == "epoch":
            self.schedule.step()
        # Whether this is the last epoch.
        last, stop = self._is_over(replace(state, epoch=number, batch=0)), False
        if last or number % config.evaluate_every == 0:
            record |= self._evaluate(1.0 if last else config.statistics_fraction)
            stop = self._is_out_of_patience(record)
        self._step.totals.sums.zero_()
        state.epoch, state.batch = number, 0
        self._record(record)
        self._watch("epoch", number)
        if self._times is not None:
            rest = time.perf_counter() - started - spent
            times = {"epoch": number, "steps": steps, "seconds": spent}
            times |= {"samples_per_second": samples / spent, "evaluation_seconds": rest}
            self._times.write(times)
        if self.folder is not None and number in config.keep:
            self._save_weights(_weights.epoch_file_name(number), epoch=number)
        if stop:
            return TrainingStatus(outcome="stopped", message=f"patience ran out in epoch {number}")
        return self._poll(agreed=True)

    def _is_over(self, state: Checkpoint) -> bool:
        """Return whether training has ended, after all epochs or after ``max_steps``."""
        # After the last step, the epoch still has to be evaluated and logged: `batch` is not 0.
        cut = state.step == self.config.max_steps and not state.batch
        return cut or state.epoch >= self.config.num_epochs

    def _finish(self) -> None:
        """Evaluate at the end of the run, and write final weights and the last checkpoint."""
        state = self.state
        if state.finished:
            return
        self._begin()
        record = self._evaluate(at_end=True)
        if self._log is not None:
            state.log_bytes = self._log.flush()
        if record:
            self._record({"kind": "final", "epoch": state.epoch, "step": state.step, **record})
        if self.folder is not None:
            self._save_weights(WEIGHTS)
            if self.average is not None and self.average.count:
                with self.average.applied(self.model, **self._statistics()):
                    self._save_weights(AVERAGE)
        state.finished = True
        self._save()

    def _watch(self, unit: str, count: int) -> None:
        for monitor in self.monitors if rank() == 0 else ():
            if getattr(monitor, "unit", "step") != unit:
                continue
            record = monitor(count, self.model, self.optimizer)
            if record is not None:
                check_type("the result of a monitor", record, Mapping, "a dictionary or None")
                # A step belongs to the current epoch, which is not yet counted.
                number = self.state.epoch + (unit == "step")
                # A monitor with a writer has already written the record there.
                has_writer = getattr(monitor, "writer", None) is not None
                place = {"epoch": number, "step": self.state.step}
                self._publish({"kind": "curvature", **record, **place}, written=has_writer)

    def _record(self, record: Record) -> None:
        self.state.records.append(record)
        self._publish(record)

    def _publish(self, record: Record, *, written: bool = False) -> None:
        """Pass a record to the log and, unless it is written already, to the writer."""
        if self._log is not None:
            self._log.write(record)
        if self.writer is not None and not written and rank() == 0:
            # All numbers over steps: some tools refuse a count that decreases.
            write_scalars(self.writer, record, self.state.step)

    # --------------------------------------------------------------------------------------
    # Evaluation of the weights and of their average.

    def _statistics(self, fraction: float = 1.0) -> dict[str, Any]:
        # The running statistics of batch norm belong to the last weights; the average needs others.
        return {"data": self.feed.part(fraction), "forward": self.forward}

    def _evaluate(self, fraction: float = 1.0, *, at_end: bool = False) -> Record:
        """Return loss and accuracy on the data of an epoch, or on those for the end of the run."""
        # If there are validation data, test data are evaluated only at the end of the run.
        later = "test" if "validation" in self.evaluation else None
        feeds = {name: feed for name, feed in self.evaluation.items() if (name == later) == at_end}
        record = self._scores(feeds, "")
        if feeds and self.average is not None and self.average.count:
            with self.average.applied(self.model, **self._statistics(fraction)):
                record |= self._scores(feeds, "average_")
        return record

    def _scores(self, feeds: Mapping[str, Feed], prefix: str) -> Record:
        record: Record = {}
        for name, feed in feeds.items():
            means = evaluate(
                self.model,
                feed.epoch(0, 0),
                loss_fn=self.loss_fn,
                forward=self.forward,
                precision=self.config.precision,
                carry_state=feed.consecutive,
                top_k=self.config.top_k,
            )
            record |= self._with_perplexity(means, feed, f"{prefix}{name}_")
        return record

    def _with_perplexity(self, means: dict[str, float], feed: Feed, prefix: str) -> Record:
        """Return means by name, with the perplexity if the loss is the cross-entropy of a text."""
        known = known_loss(self.loss_fn)
        entropy = known is not None and known.kind == "cross_entropy" and not known.smoothing
        if entropy and isinstance(feed.source, TextSplit):
            # As a tensor, exp(loss) of a huge loss is infinite, where math.exp would raise.
            loss = torch.tensor(means["loss"], dtype=torch.float64)
            means = means | {"perplexity": float(loss.exp())}
        return {f"{prefix}{name}": value for name, value in means.items()}

    def _is_out_of_patience(self, record: Record) -> bool:
        auto = self._auto
        if auto is None:
            return False
        averaging, metric = auto.averaging, self._metric
        # Once averaging has started, the average is judged.
        part = "average_validation" if averaging else "validation"
        if metric == "auto":
            # Granziol et al., Iterate averaging, A.2, judge the accuracy of images. A text is
            # judged by its perplexity, that is, by its loss.
            classes = f"{part}_accuracy" in record and f"{part}_perplexity" not in record
            metric = "accuracy" if classes else "loss"
        value = record[f"{part}_{metric}"]
        # A rule with the mode "min" takes the negative accuracy.
        out = auto.update(-value if metric == "accuracy" and auto.mode == "min" else value)
        if auto.averaging and not averaging and "optimizer" not in self.classes:
            # Lookahead hands over to the average, unless its end was chosen.
            for each in nested(self.optimizer):
                if isinstance(each, Lookahead) and each.until is None:
                    each.stop()
        return out

    @property
    def _metric(self) -> str:
        """The metric of patience; the mode of a user-defined AutoAverage says which it expects."""
        if self._auto is None or self.config.patience is not None:
            return self.config.patience_metric
        return "accuracy" if self._auto.mode == "max" else "loss"

    # --------------------------------------------------------------------------------------
    # Saving and resuming.

    def _poll(self, *, agreed: bool = False) -> TrainingStatus | None:
        """Save if it is time or a signal was received; return how the run ends, if it does."""
        due = time.monotonic() - self._saved >= self.config.save_interval
        code = 2 if self.signals else int(due and self.folder is not None)
        if world_size() > 1:
            # Agreement waits for all processes, so it does not take place after every step.
            if not agreed and self.state.step % AGREEMENT:
                return None
            code = all_max(code)
        if code and not self._save():
            return diverged(self.state.epoch + 1)
        if code < 2:
            return None
        saved, advice = "; nothing was saved", "pass checkpoint= to be able to resume"
        if self.folder is not None:
            saved, advice = f", saved in {self.folder.path}", "repeat the call to resume"
        message = f"{next(iter(self.signals), 'a signal')} after {self.state.step} steps{saved}"
        return TrainingStatus(outcome="interrupted", message=message, advice=advice)

    def _save_weights(self, name: str, **header: Any) -> None:
        if self.folder is not None and rank() == 0:
            _weights.save_weights(self.model, self.folder.path / name, **header)

    def _save(self) -> bool:
        """Write a checkpoint; return False, and write nothing, if the loss is not finite."""
        if self.folder is None:
            return True
        # A checkpoint with NaN would replace the last good one.
        if not bool(torch.isfinite(self._step.totals.sums).all()):
            return False
        if self._log is not None:
            size = self._log.flush()
            # The checkpoint of a finished run does not count the record of its end. If the run is
            # made longer, that record is cut from the log.
            self.state.log_bytes = self.state.log_bytes if self.state.finished else size
        checkpoint = replace(
            self.state,
            model=_weights.tensor_state(self.model),
            optimizer=optimizer_state(self.optimizer),
            schedule=dict(self.schedule.state_dict()),
            scaler=self._step.scaler.state_dict(),
            patience=None if self._auto is None else self._auto.state_dict(),
            # All processes take part in these three.
            generators=self._generators.states(),
            totals=gather_by_process(self._step.totals.sums),
            carried={} if self._carried is None else self._carried.rows(),
            monitors={
                str(number): monitor.state_dict()
                for number, monitor in enumerate(self.monitors)
                if hasattr(monitor, "state_dict")
            },
        )
        if rank() == 0:
            self.folder.write(checkpoint)
        all_max(0)  # a barrier: no process continues, and perhaps reads, before the file is there
        self._saved = time.monotonic()
        return True

    def _load(self, saved: Checkpoint, path: Path) -> None:
        """Continue from a checkpoint."""
        num_epochs = self.config.num_epochs
        check_same(saved.settings, self.state.settings, path)
        # Epochs that have begun, of which the last may be incomplete.
        started = saved.epoch + (saved.batch > 0)
        if started > num_epochs:
            raise ValueError(
                f"num_epochs must be at least {started}, the epoch that {path.parent} has reached, "
                f"got {num_epochs}: pass a larger number, or start again with resume=False "
                "(--restart)"
            )
        if saved.step and bool(saved.carried) != (self._carried is not None):
            made = "with" if saved.carried else "without"
            raise ValueError(
                f"{path} was trained {made} a recurrent state carried across batches, unlike this "
                "run: use the same data and forward, or another folder"
            )
        _weights.copy_weights(self.model, saved.model, path)
        load_optimizer_state(self.optimizer, saved.optimizer, self.device)
        self.schedule.load_state_dict(saved.schedule)
        self._step.scaler.load_state_dict(saved.scaler)
        if saved.patience is not None and self._auto is not None:
            self._auto.load_state_dict(saved.patience)
        if self._carried is not None:
            self._carried.load(saved.carried)
        for number, monitor in enumerate(self.monitors):
            if str(number) in saved.monitors and hasattr(monitor, "load_state_dict"):
                monitor.load_state_dict(saved.monitors[str(number)])
        self._generators.restore(saved.generators)
        self._step.totals.sums.copy_(saved.totals[rank()])
        over = self._is_over(saved) or (self._auto is not None and self._auto.finished)
        # The model and the optimiser hold the tensors now. If the run is made longer, the record of
        # its former end is dropped.
        self.state = replace(
            saved,
            model={},
            optimizer={},
            monitors={},
            settings=self.state.settings,
            finished=saved.finished and over,
            log_bytes=0 if self.log is None else saved.log_bytes,
            records=[r for r in saved.records if over or r["kind"] != "final"],
        )
        if saved.step:  # otherwise torch warns that the schedule is stepped before the optimiser
            self.optimizer._opt_called = True
