"""``fit``: train a model, with a checkpoint from which a run resumes bit for bit."""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import optim
from ritz._core.checks import check_device, check_type
from ritz._core.distributed import rank
from ritz._core.modes import arithmetic, searched_convolutions
from ritz._core.progress import Progress
from ritz._core.signals import noted_signals
from ritz._core.training_config import TrainingConfig, TrainingOptions, combine
from ritz.curvature._shared import Forward
from ritz.training._checkpoint import FilePath, locked_folder
from ritz.training._data import DataParts, Feed, as_part, as_parts, with_own_batch_size
from ritz.training._evaluate import device_of
from ritz.training._loop import Monitor, Run
from ritz.training._optimizers import OptimizerChoice, with_preset
from ritz.training._result import TrainingResult, TrainingStatus, history_of
from ritz.training._writers import Writer, check_writer


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
    checkpoint: FilePath | None = None,
    log: FilePath | None = None,
    writer: Writer | None = None,
    progress: bool | Progress = False,
    **options: Unpack[TrainingOptions],
) -> TrainingResult:
    r"""Train a model in place.

    .. math:: w \leftarrow w - \alpha_t\, P_t \nabla \frac1B \sum_{i \in \text{batch}} \ell_i(w)

    with learning rate :math:`\alpha_t`, batch size :math:`B` and the preconditioner :math:`P_t` of
    the optimiser, which is the identity for SGD.

    **Resuming.** If a run with a ``checkpoint`` folder is killed, or interrupted by ctrl-C or
    SIGTERM, the same call resumes it. The final files equal those of an uninterrupted run bit for
    bit: on the CPU always, on CUDA with ``deterministic=True``. The order and augmentation of an
    epoch depend only on ``seed`` and the number of the epoch. Dropout draws from the global
    generators, which are seeded for the run and restored afterwards. A loader with
    ``persistent_workers`` cannot be resumed bit for bit, and a warning says so.

    **Files.** ``checkpoint/checkpoint.safetensors`` and, at the end, ``weights.safetensors`` and
    ``average.safetensors``. Nothing is written or removed before the first step has succeeded. Then
    a run that does not resume removes the files of an earlier run from this folder.

    **Several processes.** Under ``torchrun``, the processes share each batch by rows. Gradients
    equal those of one process up to roundoff, even if the rows do not divide evenly, except
    that batch norm uses the statistics of the local rows only. Only rank 0 writes files.

    **Recurrent models.** A model with ``initial_state`` passes its state, without gradient, from
    batch to batch if ``data.consecutive`` is true, as for text; see ``CarriedState``.

    No step waits for the device: losses are summed there and read once per epoch. Mean losses
    exclude labels that ``loss_fn`` ignores and use its class weights.

    Args:
        model: Any module; it is moved to ``device``.
        data: Training data: all samples as a tuple of tensors or arrays; a torch dataset or loader;
            a list of batches; an object with ``batches(batch_size, generator=...)``; or a function
            ``epoch -> batches``, with epochs counted from one. Or several parts: a tuple
            ``(train, test)`` or ``(train, validation, test)``, a dictionary of these names, or an
            object with these attributes, such as ``ritz.data.load`` returns.
        config: Options; see :class:`TrainingConfig` for all of them and their defaults.
        loss_fn: Mean loss of outputs and target; ``None`` if the model returns its loss.
        forward: Takes the model and a batch and returns ``(outputs, target)``. Needed for batches
            other than ``(*inputs, target)`` and dictionaries with ``labels``.
        validation: Data to evaluate on during training. Defaults to ``data.validation``.
        test: Data to evaluate on at the end, or during training if there is no ``validation``.
            Defaults to ``data.test``.
        optimizer: A name (:func:`optimizer_names`, or a published setting of
            ``ritz.optim.preset_names()``), a torch optimiser, or a function of the parameters.
        schedule: ``constant``, ``linear``, ``linear_held`` or ``step``, which ``ritz train --help``
            describes; a function of the number of epochs or steps done (see ``schedule_unit``) that
            returns the factor on the learning rate; or a torch scheduler.
        average: An average that you created for the same ``optimizer``. An ``AutoAverage`` is
            given the validation accuracy with ``mode="max"``, otherwise the validation loss.
        monitors: Called as ``monitor(count, model, optimizer)`` with the number of steps done after
            every step, or of epochs after every epoch if ``monitor.unit == "epoch"``. A returned
            dictionary is logged.
        checkpoint: Folder for the files of this run, created if missing. One process at a time may
            write in it.
        log: File of JSON lines, one per epoch; see :func:`read_log`. An existing file is
            overwritten. If the run resumes, lines after the checkpoint are removed.
        writer: A TensorBoard ``SummaryWriter``, or another object with a method ``add_scalar``. It
            receives the numbers of the log (``train/loss``, ``test/accuracy``, ``learning_rate``)
            and of monitors (``curvature/lambda_max``) over the number of steps. A run that resumes
            writes from its checkpoint on.
        progress: Show a progress bar, or a :class:`Progress` to report to.
        **options: Fields of :class:`TrainingConfig`, which replace those of ``config``.

    Returns:
        The result. If the loss is not finite, its ``status`` is ``diverged``; after ctrl-C or
        SIGTERM it is ``interrupted``. Neither raises.

    Raises:
        CheckpointError: A checkpoint cannot be written: the disk is full, the folder is read-only,
            or another process writes in it. The last checkpoint remains intact. Also raised if
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
    check_type("model", model, nn.Module, "a torch.nn.Module")
    monitors = _check_monitors(monitors)
    check_writer(writer)
    named = {"optimizer": optimizer, "schedule": schedule}
    texts = {name: choice for name, choice in named.items() if isinstance(choice, str)}
    config = with_preset(combine(config, options | texts))
    classes = _classes(optimizer, schedule)
    # The order matters. Processes join before the folder is locked, because they must agree whether
    # the first one could lock it. Signals are noted until the lock has been released.
    with (
        noted_signals() as signals,
        process_group(config.device) as place,
        locked_folder(checkpoint) as folder,
    ):
        device = device_of(model) if place is None else check_device(place)
        with torch_settings(config, device), channels_last(model, config.precision, device):
            feed, evaluation = _feeds(data, validation, test, config, device)
            if folder is not None and rank() == 0:
                _warn_of_workers({"data": feed} | evaluation)
            if not feed.cuts:  # the data come in batches, so batch_size has no effect
                with_own_batch_size(config, feed.source, chosen="batch_size" in options)
                config = replace(config, batch_size=None)
            run = Run(
                model=model,
                feed=feed,
                evaluation=evaluation,
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
                writer=writer,
                classes=classes,
            )
            status = run.train(progress)
    seconds = time.perf_counter() - started
    return _result(run, status, checkpoint=checkpoint, seconds=seconds)


def _check_monitors(monitors: Any) -> list[Monitor]:
    """Return the monitors as a list; raise if one of them cannot be called."""
    check_type("monitors", monitors, Iterable, "a list of monitors")
    entries: list[Any] = [monitors] if isinstance(monitors, str) else list(monitors)
    for monitor in entries:
        # A class can be called too, but not as a monitor.
        if isinstance(monitor, type) or not callable(monitor):
            kind = f"the class {monitor.__name__}" if isinstance(monitor, type) else repr(monitor)
            raise TypeError(f"monitors must be callable as (count, model, optimizer), got {kind}")
    return entries


def _classes(optimizer: Any, schedule: Any) -> dict[str, str]:
    """Return the classes of objects that were passed for options; raise for a bad schedule."""
    if not (isinstance(schedule, str | None) or callable(schedule) or hasattr(schedule, "step")):
        raise TypeError(
            "schedule must be one of constant, linear, linear_held, step, a function of the time "
            f"or a torch scheduler, got {type(schedule).__name__}"
        )
    # Objects cannot be stored. Results and checkpoints store the names of their classes, and a
    # resumed run compares these names.
    classes = {}
    if not isinstance(optimizer, str | None):
        classes["optimizer"] = f"own {getattr(optimizer, '__name__', type(optimizer).__name__)}"
    if not isinstance(schedule, str | None):
        classes["schedule"] = f"own {type(schedule).__name__}"
    return classes


def _warn_of_workers(feeds: Mapping[str, Feed]) -> None:
    lasting = [name for name, feed in feeds.items() if feed.has_persistent_workers]
    if lasting:
        warnings.warn(
            "a resumed run is not identical bit for bit with persistent_workers=True in "
            f"the DataLoader ({', '.join(lasting)})",
            stacklevel=3,  # the call of fit
        )


def _result(
    run: Run, status: TrainingStatus, *, checkpoint: FilePath | None, seconds: float
) -> TrainingResult:
    records, config = run.state.records, run.config
    # Later records replace earlier ones, so each name keeps its last value.
    metrics = {name: value for record in records for name, value in record.items()}
    return TrainingResult(
        history=history_of(records),
        # The other entries of a record say where in the run it was made.
        metrics={k: float(x) for k, x in metrics.items() if k not in ("kind", "epoch", "step")},
        num_epochs=run.state.epoch,
        num_steps=run.state.step,
        log=None if run.log is None else os.fspath(run.log),
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        seconds=seconds,
        seed=config.seed,
        settings=config.to_plain() | run.classes,
        status=status,
    )


def _feeds(
    data: Any, validation: Any, test: Any, config: TrainingConfig, device: torch.device
) -> tuple[Feed, dict[str, Feed]]:
    known = data if isinstance(data, DataParts) else as_parts(data)
    # Parts that are passed by name replace those of the data.
    usual, parts = known.augmentation, {"validation": validation, "test": test}
    for name, part in parts.items():
        parts[name] = getattr(known, name) if part is None else as_part(part, name)
    feed = Feed(
        known.train,
        batch_size=config.batch_size,
        device=device,
        shuffled=True,
        # True is the usual augmentation of these data, False is none.
        augment=usual if config.augment is True else config.augment or None,
        drop_last=config.drop_last,
        sizes=config.batch_sizes,
        lengths_seed=config.seed if config.random_segments else None,
    )

    def size(part: Any) -> int | None:
        # For text (without a length) the batch size is the number of streams, which changes the
        # result. Otherwise batches have at least 512 samples: evaluation stores no gradients.
        large = max(config.batch_size or 1, 512) if isinstance(part, Sized) else None
        return config.evaluation_batch_size or large or config.batch_size

    return feed, {
        name: Feed(part, batch_size=size(part), device=device, shuffled=False, name=name)
        for name, part in parts.items()
        if part is not None
    }


@contextmanager
def process_group(device: str | torch.device | None) -> Iterator[str | torch.device | None]:
    """Join the processes that ``torchrun`` started, for the block; yield the device of this one.

    Nothing changes in a single process, or if torch.distributed is initialised already.
    """
    # torchrun sets both; WORLD_SIZE alone may come from elsewhere.
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if not launched or not dist.is_available() or dist.is_initialized():
        yield device
        return
    cuda = device is not None and torch.device(device).type == "cuda"
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # NCCL exchanges tensors on GPUs only, gloo on the CPU.
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def torch_settings(config: TrainingConfig, device: torch.device) -> Iterator[None]:
    """Set precision, determinism and seeds of torch for the block, and restore them."""
    with ExitStack() as stack:
        # Autocast leaves some operations in float32. They run in tf32, which has as many digits as
        # half precision.
        stack.enter_context(arithmetic("float32" if config.precision == "float32" else "tf32"))
        if config.deterministic:
            workspace = "CUBLAS_WORKSPACE_CONFIG"
            if workspace not in os.environ:  # cuBLAS is deterministic with fixed workspaces
                os.environ[workspace] = ":4096:8"
                stack.callback(os.environ.pop, workspace)
            before = torch.are_deterministic_algorithms_enabled()
            stack.callback(torch.use_deterministic_algorithms, before)
            torch.use_deterministic_algorithms(True)
            cudnn: Any = torch.backends.cudnn
            stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
            cudnn.deterministic = True
        stack.enter_context(searched_convolutions(device.type == "cuda"))
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        # Processes draw different dropout masks for their different rows.
        torch.default_generator.manual_seed(config.seed + rank())
        if cuda:
            # torch.cuda.manual_seed seeds only the current device.
            with torch.cuda.device(device):
                torch.cuda.manual_seed(config.seed + rank())
        yield


@contextmanager
def channels_last(model: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Store the kernels of convolutions channels-last for the block; the numbers are the same.

    Tensor cores use this format. With another format, each step would convert all feature maps to
    it and back.
    """
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    kernels = [p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 4]
    if device.type != "cuda" or precision == "float32":
        kernels = []
    changed = [p for p in kernels if not p.is_contiguous(memory_format=torch.channels_last)]
    # Through .data, so that the optimiser keeps its parameters.
    for p in changed:
        p.data = p.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for p in changed:
            p.data = p.data.contiguous()
