"""``fit``: train a model, with a checkpoint from which a run resumes bit for bit."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import optim
from ritz._core.checks import check_device
from ritz._core.progress import Progress
from ritz._core.signals import noted_signals
from ritz._core.training_config import TrainingConfig, TrainingOptions, combine
from ritz.curvature._shared import Forward
from ritz.training._assembly import OptimizerChoice, optimizer_names
from ritz.training._data import Feed, splits
from ritz.training._folder import held_folder
from ritz.training._processes import arranged, channels_last, is_writer, joined_processes
from ritz.training._run import Monitor, Run, TrainingResult, history_of
from ritz.training._step import device_of

EVALUATED = 512  # smallest default batch size of evaluations, which need no memory for gradients
PLACES = ("kind", "epoch", "step")  # entries of records that are not measured


def fit(
    model: nn.Module,
    data: Any,
    config: TrainingConfig | None = None,
    *,
    loss_fn: Callable[..., Any] | None = cross_entropy,
    forward: Forward | None = None,
    validation: Any = None,
    test: Any = None,
    optimizer: OptimizerChoice | None = None,
    schedule: Any = None,
    average: optim.IterateAverage | optim.AutoAverage | None = None,
    monitors: Sequence[Monitor] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    progress: bool | Progress = False,
    **options: Unpack[TrainingOptions],
) -> TrainingResult:
    r"""Train a model in place.

    .. math:: w \leftarrow w - \alpha_t\, P_t \nabla \frac1B \sum_{i \in \text{batch}} \ell_i(w)

    with the preconditioner :math:`P_t` of the optimiser.

    **Resuming.** If a run with a ``checkpoint`` folder is killed, or interrupted by ctrl-C or
    SIGTERM, the same call resumes it. The files at the end are the same bit for bit: on the CPU
    always, on CUDA with ``deterministic=True``. The order and augmentation of an epoch depend only
    on ``seed`` and the number of the epoch. Dropout draws from the global generators, which are
    seeded for the run and restored afterwards. A loader with ``persistent_workers`` cannot be
    resumed bit for bit, and a warning says so.

    **Files.** ``checkpoint/checkpoint.safetensors`` and, at the end, ``weights.safetensors`` and
    ``average.safetensors``. The first file is written, and files of an earlier run are removed,
    after the first step: a call that fails before changes nothing.

    **Several processes.** Under ``torchrun``, the processes share each batch by rows. Gradients
    equal those of one process up to roundoff, even if the rows do not divide evenly. Batch norm is
    the exception: it uses the statistics of the rows of its process. The first process writes.

    **Recurrent models.** A model with ``initial_state`` passes its state, without gradient, from
    batch to batch if ``data.consecutive`` is true, as for text; see ``CarriedState``.

    Cost beyond forward pass, backward pass and update: losses are summed on the device and read
    once per epoch, so no step waits for them. Means leave out labels that ``loss_fn`` ignores, and
    weigh classes as it does.

    Args:
        model: Any module; it is moved to ``device``.
        data: One of: all samples as a tuple of tensors; an object with ``train``, ``validation``
            and ``test``, such as ``ritz.data.load`` returns; an object with
            ``batches(batch_size, generator=...)``; a loader or list of batches; a function that
            takes the number of the epoch, from one, and returns batches.
        config: Options; see :class:`TrainingConfig` for all of them and their defaults.
        loss_fn: Mean loss of outputs and target; ``None`` if the model returns its loss.
        forward: Takes the model and a batch and returns ``(outputs, target)``. Needed for batches
            other than ``(*inputs, target)`` and dictionaries with ``labels``.
        validation: Data to evaluate on during training. Defaults to ``data.validation``.
        test: Data to evaluate on at the end, or during training if there is no ``validation``.
        optimizer: A name (:func:`optimizer_names`, or a published setting of
            ``ritz.optim.preset_names()``), a torch optimiser, or a function of the parameters.
        schedule: ``constant``; ``linear``: constant, falling from half to 0.9 of the time (with an
            average: up to its start), constant; ``step``: a tenth after half of the time and again
            after three quarters; a function of the time that returns a factor of the learning
            rate; or a torch scheduler.
        average: User-defined average, attached to ``optimizer``.
        monitors: Called as ``monitor(count, model, optimizer)`` after every step, or after every
            epoch if ``monitor.unit == "epoch"``. A returned dictionary is logged.
        checkpoint: Folder for the files of this run, created if missing. One process at a time may
            write in it.
        log: File of JSON lines, one per epoch; see :func:`read_log`. An existing file is replaced,
            or cut to where the run resumes.
        progress: Show a progress bar, or a :class:`Progress` to report to.
        **options: Fields of :class:`TrainingConfig`, which replace those of ``config``.

    Raises:
        CheckpointError: A checkpoint cannot be written: the disk is full, the folder is read-only,
            or another process writes in it. The last good checkpoint stays. Also raised if
            ``resume`` is true and the folder has weights of a run but no checkpoint.

    Example:
        >>> import torch, ritz.training
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Linear(3, 2)
        >>> result = ritz.training.fit(model, (x, (x[:, 0] > 0).long()), num_epochs=20,
        ...                            batch_size=8, optimizer_settings={"lr": 0.5})
        >>> result.metrics["train_accuracy"] > 0.9, result.status.outcome
        (True, 'completed')
    """
    started = time.perf_counter()
    named = {"optimizer": optimizer, "schedule": schedule}
    texts = {name: choice for name, choice in named.items() if isinstance(choice, str)}
    config = _with_preset(combine(config, options | texts))
    if not (isinstance(schedule, str | None) or callable(schedule) or hasattr(schedule, "step")):
        raise TypeError("schedule must be one of constant, linear, step, a function of the time or "
                        f"a torch scheduler, got {type(schedule).__name__}")  # fmt: skip
    # Objects have no plain form. Their class stands for them in the result and in checkpoints.
    classes = {}
    if not isinstance(optimizer, str | None):
        classes["optimizer"] = f"own {getattr(optimizer, '__name__', type(optimizer).__name__)}"
    if not isinstance(schedule, str | None):
        classes["schedule"] = f"own {type(schedule).__name__}"
    with (
        noted_signals() as signals,
        joined_processes(config.device) as place,
        held_folder(checkpoint) as folder,
    ):
        device = device_of(model) if place is None else check_device(place)
        with arranged(config, device), channels_last(model, config.precision, device):
            feed, held = _feeds(data, validation, test, config, device)
            if not feed.cuts:
                config = replace(config, batch_size=None)
            if folder is not None and is_writer():
                _warn_of_persistent_workers({"data": feed} | held)
            run = Run(
                model=model,
                feed=feed,
                held=held,
                config=config,
                device=device,
                loss_fn=loss_fn,
                forward=forward,
                optimizer=optimizer,
                schedule=schedule,
                average=average,
                monitors=monitors,
                signals=signals,
                log=log,
                folder=folder,
                classes=classes,
            )
            status = run.train(progress)
    records = run.state.records
    metrics = {name: value for record in records for name, value in record.items()}
    return TrainingResult(
        history=history_of(records),
        metrics={name: float(x) for name, x in metrics.items() if name not in PLACES},
        num_epochs=run.state.epoch,
        num_steps=run.state.step,
        log=None if log is None else os.fspath(log),
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        seconds=time.perf_counter() - started,
        seed=config.seed,
        settings=config.to_plain() | classes,
        status=status,
    )


def _with_preset(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the start of the average that a published setting has."""
    known = config.optimizer in optimizer_names() or config.optimizer not in optim.preset_names()
    if known or config.average_from is not None or config.patience is not None:
        return config
    start = optim.preset(config.optimizer).average_from
    fits = start is not None and start <= config.num_epochs
    return replace(config, average_from=start) if fits else config


def _feeds(
    data: Any, validation: Any, test: Any, config: TrainingConfig, device: torch.device
) -> tuple[Feed, dict[str, Feed]]:
    train, held = splits(data, validation, test)
    usual = getattr(data, "augmentation", None)
    feed = Feed(
        train,
        batch_size=config.batch_size,
        device=device,
        shuffled=True,
        augment=usual if config.augment is True else config.augment or None,
        drop_last=config.drop_last,
    )

    def size(part: Any) -> int | None:
        # Text has no length. Its batch size is the number of streams, which changes the result.
        large = max(config.batch_size or 1, EVALUATED) if isinstance(part, Sized) else None
        return config.evaluation_batch_size or large or config.batch_size

    return feed, {
        name: Feed(part, batch_size=size(part), device=device, shuffled=False, name=name)
        for name, part in held.items()
    }


def _warn_of_persistent_workers(feeds: Mapping[str, Feed]) -> None:
    names = [name for name, feed in feeds.items() if feed.keeps_workers]
    if names:
        warnings.warn(f"a run with this loader is not resumed bit for bit ({', '.join(names)}): "
                      "persistent workers draw their seed in the first epoch only; give it "
                      "persistent_workers=False", UserWarning, stacklevel=3)  # fmt: skip
