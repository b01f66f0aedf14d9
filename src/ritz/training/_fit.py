"""``fit``: train any model on any data with any optimiser, resumed bit for bit."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ritz import optim
from ritz._core.checks import check_device
from ritz._core.progress import Progress
from ritz._core.signals import noted_signals
from ritz.curvature._shared import Forward
from ritz.training._assembly import OptimizerChoice, assemble
from ritz.training._config import (
    Settings,
    TrainingPrecision,
    Unit,
    optimizer_names,
    plain_settings,
    schedule_name,
)
from ritz.training._data import Feed, is_writer, splits
from ritz.training._evaluate import TrainingResult, history_of, last_metrics
from ritz.training._folder import held_folder
from ritz.training._processes import arranged, channels_last, joined_processes
from ritz.training._run import Judge, Monitor, Run

EVALUATED = 512  # samples a batch of evaluation, at least


def fit(
    model: nn.Module,
    data: Any,
    *,
    num_epochs: int,
    batch_size: int | None = None,
    drop_last: bool = False,
    optimizer: OptimizerChoice = "sgd",
    optimizer_settings: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = cross_entropy,
    forward: Forward | None = None,
    validation: Any = None,
    test: Any = None,
    augment: Any = "auto",
    schedule: Any = None,
    schedule_unit: Unit = "epoch",
    warmup: int = 0,
    average_from: int | None = None,
    average_every: Unit = "epoch",
    average: optim.IterateAverage | optim.AutoAverage | None = None,
    statistics_fraction: float = 0.1,
    patience: int | None = None,
    final: Literal["last", "average"] = "last",
    precision: TrainingPrecision = "float32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    evaluate_every: int = 1,
    evaluation_batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    monitors: Sequence[Monitor] = (),
    log: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = True,
    save_interval: float = 60.0,
    keep: Sequence[int] = (),
    seed: int = 0,
    device: str | torch.device | None = None,
    compile: bool = False,
    capture: bool | None = None,
    deterministic: bool = False,
    progress: bool | Progress = False,
) -> TrainingResult:
    r"""Train a model in place, and return how it went.

    .. math:: w \leftarrow w - \alpha_t\, P_t \nabla \frac1B \sum_{i \in \text{batch}} \ell_i(w)

    with :math:`P_t` the optimiser's. A run with a ``checkpoint`` folder that is killed, or
    interrupted by ctrl-C or the signal to terminate (which save first, between two steps), goes on
    when the same call is made again, and ends with the same files bit for bit: on the CPU, and on
    CUDA with ``deterministic=True``. A loader with ``persistent_workers`` draws once for all its
    epochs: with one, a resumed run goes on in another order, and a warning says so. Order and
    augmentation of an epoch depend on ``seed`` and its number alone; dropout draws from
    the global generators, which are seeded for the run and then put back. A model with
    ``initial_state`` carries its state, without gradient, from batch to batch of an epoch and of an
    evaluation where ``data.consecutive``, as that of a text is; see
    ``CarriedState``. Under ``torchrun`` the processes share every batch
    by rows: gradients are those of one process, to roundoff, whether or not the rows divide evenly,
    but for batch norm, which takes the statistics of the rows that a process has; the first process
    writes. Labels that ``loss_fn`` ignores, and weights of classes, count in no mean but as they do
    in the loss.

    Cost beyond forward, backward and step: the loss is added up on the device and read once an
    epoch, so no step waits for it. Files: ``checkpoint/checkpoint.safetensors`` and, at the end,
    ``weights.safetensors`` and ``average.safetensors``. The first is written, and what another run
    has left is removed, after the first step: a call that fails before changes nothing.

    Args:
        model: Any module; moved to ``device``.
        data: Samples as a tuple of tensors; or with ``train``, ``validation`` and ``test`` as
            ``ritz.data.load`` returns them; or with ``batches(batch_size, generator=...)``; or a
            loader or list of batches; or a function of the number of the epoch, from one, that
            returns one.
        num_epochs: Epochs in all, those before a resumption counted.
        batch_size: Samples a batch, over all processes, for the first three kinds of data.
        drop_last: Whether a last batch of fewer is left out of every epoch: batch norm takes no
            batch of one row.
        optimizer: A name (:func:`optimizer_names`, or a published setting of
            ``ritz.optim.preset_names()``), a torch optimiser, or a function of the parameters.
        optimizer_settings: Keywords of the optimiser: ``lr``, ``weight_decay`` and so on.
        loss_fn: Mean loss of outputs and target; ``None`` where the model returns its own.
        forward: Takes the model and a batch, returns ``(outputs, target)``; for other batches than
            ``(*inputs, target)`` and dictionaries with ``labels``.
        validation: Evaluated in the course of the run; that of ``data`` by default.
        test: Evaluated at the end, or in the course of it where there is no ``validation``.
        augment: Given to ``data.train.batches``: ``auto`` is what is customary for ``data``.
        schedule: ``constant``, ``linear`` or ``step``; a function of the time that returns a factor
            on the learning rate; or a torch scheduler.
        schedule_unit: Whether time is counted by ``epoch`` or ``step``.
        warmup: Length of a linear growth of the rate at the beginning, in that unit.
        average_from: Epoch, from one, in which the average begins, with the weights before it.
        average_every: Whether an iterate is averaged every ``epoch`` or every ``step``.
        average: A user-defined average instead, attached to ``optimizer``.
        statistics_fraction: Part of the training batches on which batch norm is recomputed when
            averaged weights are evaluated; at the end it is all.
        patience: Averaging begins after so many evaluations without a better loss, and training
            ends after as many on the average (``AutoAverage``).
        final: Whether the model is left with its ``last`` weights or with their ``average``.
        precision: ``float32``, ``tf32``, or mixed: ``bfloat16``, or ``float16`` with scaled
            gradients.
        accumulate: Batches a step: the gradient is that of their union.
        clip_norm: Largest norm of the gradient.
        evaluate_every: Epochs between evaluations; the last is always evaluated.
        evaluation_batch_size: Samples a batch there; ``batch_size`` or 512 if that is more, and
            for a text ``batch_size``.
        steps_per_epoch: Needed for averages and schedules where data have no length.
        monitors: Called as ``monitor(count, model, optimizer)`` after every step, or after every
            epoch where ``monitor.unit == "epoch"``; a dictionary that one returns is logged.
        log: File of JSON lines, one an epoch; see :func:`read_log`. One that is there is replaced,
            or cut to where the run is resumed.
        checkpoint: Folder, made where it is missing; of one run, and of one process at a time.
        resume: Whether to go on from a checkpoint that is there, or to begin anew.
        save_interval: Seconds between checkpoints; with several processes at every 50th step or at
            the end of an epoch after that time.
        keep: Epochs after which the weights are kept, as ``epoch-0007.safetensors``.
        seed: Of order, augmentation and dropout.
        device: Where to train; where the model is by default.
        compile: Whether the forward and backward passes are compiled.
        capture: Whether steps are replayed from a CUDA graph: ``None`` where it is possible (a CUDA
            device, one process, not ``float16``, an optimiser by name), ``True`` or an error.
        deterministic: Whether torch is held to algorithms that give the same bits every time.
        progress: Show a progress bar, or a :class:`Progress` to report to.

    Raises:
        CheckpointError: A checkpoint cannot be written: the disk is full, the folder read-only, or
            another process writes in it. The last good one stays. Or weights of a run are there
            without its checkpoint, and ``resume``.

    Example:
        >>> import torch, ritz.training
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Linear(3, 2)
        >>> result = ritz.training.fit(model, (x, (x[:, 0] > 0).long()), num_epochs=20,
        ...                            batch_size=8, optimizer_settings={"lr": 0.5})
        >>> result.metrics["train_accuracy"] > 0.9, result.status.outcome
        (True, 'completed')
    """
    begun = time.perf_counter()
    given = {name: value for name, value in locals().items() if name in Settings.__slots__}
    given |= {"optimizer": _name(optimizer), "schedule": schedule_name(schedule)}
    given |= {"optimizer_settings": optimizer_settings or {}, "keep": tuple(keep)}
    settings = _published(Settings(**given))
    with (
        noted_signals() as signals,
        joined_processes(device) as place,
        held_folder(checkpoint) as folder,
    ):
        where = _device(model) if place is None else check_device(place)
        with (
            arranged(precision=precision, deterministic=deterministic, seed=seed, device=where),
            channels_last(model, precision, where),
        ):
            feed, held = _feeds(data, validation, test, augment, settings, where)
            if folder is not None and is_writer():
                _warn_of_kept_workers({"data": feed} | held)
            parts = assemble(
                model,
                feed,
                settings,
                optimizer=optimizer,
                schedule=schedule,
                average=average,
                loss_fn=loss_fn,
                forward=forward,
                device=where,
            )
            run = Run(
                parts,
                settings,
                judge=Judge(parts, settings, held, loss_fn=loss_fn, forward=forward),
                monitors=monitors,
                signals=signals,
                log=log,
                folder=folder,
                resume=resume,
            )
            status = run.train(progress)
    return TrainingResult(
        history=history_of(run.records),
        metrics=last_metrics(run.records),
        num_epochs=run.epoch,
        num_steps=run.step,
        log=None if log is None else os.fspath(log),
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        seconds=time.perf_counter() - begun,
        seed=seed,
        settings=plain_settings(settings),
        status=status,
    )


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _name(optimizer: OptimizerChoice) -> str:
    if isinstance(optimizer, str):
        return optimizer
    kind = type(optimizer) if isinstance(optimizer, Optimizer) else optimizer
    return f"own {getattr(kind, '__name__', type(kind).__name__)}"


def _published(settings: Settings) -> Settings:
    """The settings with the beginning of the average where a preset has one."""
    known = settings.optimizer in optimizer_names() or settings.average_from is not None
    if known or settings.optimizer not in optim.preset_names():
        return settings
    start = optim.preset(settings.optimizer).average_from
    if start is None or start > settings.num_epochs or settings.patience is not None:
        return settings
    return replace(settings, average_from=start)


def _feeds(
    data: Any, validation: Any, test: Any, augment: Any, settings: Settings, device: torch.device
) -> tuple[Feed, dict[str, Feed]]:
    size = settings.batch_size
    train, held = splits(data, validation, test)
    if isinstance(augment, str):
        if augment != "auto":
            raise ValueError(f"augment must be auto, None or an Augmentation, got {augment!r}")
        augment = getattr(data, "augmentation", None)
    feed = Feed(
        train,
        batch_size=size,
        device=device,
        shuffled=True,
        augment=augment,
        drop_last=settings.drop_last,
    )
    sizes = {name: settings.evaluation_batch_size or _evaluated(part, size)
             for name, part in held.items()}  # fmt: skip
    return feed, {
        name: Feed(part, batch_size=sizes[name], device=device, shuffled=False, name=name)
        for name, part in held.items()
    }


def _warn_of_kept_workers(feeds: Mapping[str, Feed]) -> None:
    names = [name for name, feed in feeds.items() if feed.keeps_workers]
    if names:
        warnings.warn(f"a run with this loader is not resumed bit for bit ({', '.join(names)}): "
                      "one that keeps its workers draws their seed in its first epoch alone; give "
                      "it persistent_workers=False", UserWarning, stacklevel=3)  # fmt: skip


def _evaluated(part: Any, size: int | None) -> int | None:
    """Samples a batch of evaluation: many, but for texts, which are cut into streams."""
    return max(size or 1, EVALUATED) if isinstance(part, Sized) else size
