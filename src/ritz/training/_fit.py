"""``fit``: train a model, with a checkpoint from which a run resumes bit for bit; run folders."""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Unpack, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import optim
from ritz._core.checks import check_device
from ritz._core.distributed import rank
from ritz._core.modes import BatchNormMode, arithmetic, searched_convolutions
from ritz._core.progress import Progress
from ritz._core.signals import noted_signals
from ritz._core.storage import CorruptFileError, to_json
from ritz._core.training_config import TrainingConfig, TrainingOptions, check_same, combine
from ritz.curvature import Risk
from ritz.curvature._shared import Forward
from ritz.data import TextSplit
from ritz.optim._shared import update_settings
from ritz.training._assembly import (
    OptimizerChoice,
    create_optimizer,
    optimizer_names,
)
from ritz.training._data import DataParts, Feed, as_part, as_parts, limited, measurable, sample
from ritz.training._folder import AVERAGE, NAME, WEIGHTS, FilePath, Folder, held_folder, times_path
from ritz.training._monitor import CurvatureMonitor
from ritz.training._result import TrainingResult, TrainingStatus, history_of
from ritz.training._run import Monitor, Run
from ritz.training._step import device_of


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
        schedule: ``constant``; ``linear``: the full learning rate for half of the training, then a
            linear decrease to 1 % (``final_ratio``) until 90 % of the training (with an average: to
            50 % until it starts), then constant; ``linear_held``: that without an average, up to
            the start of the average, then constant; ``step``: divides the learning rate by 10 at
            50 % and again at 75 % of the training (``milestones``); a function of the number of
            epochs or steps done (see ``schedule_unit``) that returns the factor on the rate; or a
            torch scheduler.
        average: An average that you created for the same ``optimizer``. An ``AutoAverage`` is
            given the validation accuracy with ``mode="max"``, otherwise the validation loss.
        monitors: Called as ``monitor(count, model, optimizer)`` with the number of steps done after
            every step, or of epochs after every epoch if ``monitor.unit == "epoch"``. A returned
            dictionary is logged.
        checkpoint: Folder for the files of this run, created if missing. One process at a time may
            write in it.
        log: File of JSON lines, one per epoch; see :func:`read_log`. An existing file is
            overwritten. If the run resumes, lines after the checkpoint are removed.
        progress: Show a progress bar, or a :class:`Progress` to report to.
        **options: Fields of :class:`TrainingConfig`, which replace those of ``config``.

    Returns:
        The result. If the loss is not finite, its ``status`` is ``diverged``; after ctrl-C or
        SIGTERM it is ``interrupted``. Neither raises.

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
    classes = _classes(optimizer, schedule)
    # Processes must have joined before they agree whether the first one could lock the folder.
    # Signals are noted from before that until the lock is released.
    with (
        noted_signals() as signals,
        joined_processes(config.device) as place,
        held_folder(checkpoint) as folder,
    ):
        device = device_of(model) if place is None else check_device(place)
        with arranged(config, device), channels_last(model, config.precision, device):
            feed, held = _feeds(data, validation, test, config, device)
            if folder is not None and rank() == 0:
                _warn_of_workers({"data": feed} | held)
            if not feed.cuts:  # the batches have a size already, so that of the options is unused
                config = replace(config, batch_size=None)
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
    seconds = time.perf_counter() - started
    return _result(run, status, checkpoint=checkpoint, seconds=seconds)


def _classes(optimizer: Any, schedule: Any) -> dict[str, str]:
    """Return the classes of objects that were passed for options; raise for a bad schedule."""
    if not (isinstance(schedule, str | None) or callable(schedule) or hasattr(schedule, "step")):
        raise TypeError(
            "schedule must be one of constant, linear, linear_held, step, a function of the time "
            f"or a torch scheduler, got {type(schedule).__name__}"
        )
    # Objects have no plain form. Their class stands for them in the result and in checkpoints, and
    # a resumed run compares these words.
    classes = {}
    if not isinstance(optimizer, str | None):
        classes["optimizer"] = f"own {getattr(optimizer, '__name__', type(optimizer).__name__)}"
    if not isinstance(schedule, str | None):
        classes["schedule"] = f"own {type(schedule).__name__}"
    return classes


def _warn_of_workers(feeds: Mapping[str, Feed]) -> None:
    lasting = [name for name, feed in feeds.items() if feed.keeps_workers]
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
        # The rest of a record is its place in the run.
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


def _with_preset(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the start of the average that a published setting has."""
    if config.optimizer == "swa" and config.average_from is None and config.patience is None:
        # Izmailov et al. (2018): the last quarter of the run.
        return replace(config, average_from=math.ceil(0.75 * config.num_epochs))
    known = config.optimizer in optimizer_names() or config.optimizer not in optim.preset_names()
    if known or config.average_from is not None or config.patience is not None:
        return config
    # A shorter run than the published one may end before its average would start.
    start = optim.preset(config.optimizer).average_from
    fits = start is not None and start <= config.num_epochs
    return replace(config, average_from=start) if fits else config


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
        # Text has no length. Its batch size is the number of streams, which changes the result.
        # Other batches have 512 samples or more: evaluation needs no memory for gradients.
        large = max(config.batch_size or 1, 512) if isinstance(part, Sized) else None
        return config.evaluation_batch_size or large or config.batch_size

    return feed, {
        name: Feed(part, batch_size=size(part), device=device, shuffled=False, name=name)
        for name, part in parts.items()
        if part is not None
    }


@contextmanager
def joined_processes(device: str | torch.device | None) -> Iterator[str | torch.device | None]:
    """Join the processes that ``torchrun`` has started, for the block; yield this one's device.

    In a single process, or if torch.distributed is in use already, nothing is changed.
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
def arranged(config: TrainingConfig, device: torch.device) -> Iterator[None]:
    """Set precision, determinism and seeds of torch for the block, and restore them."""
    with ExitStack() as stack:
        # Half precisions leave some operations in float32. In tf32 these have no fewer digits.
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
            # manual_seed of torch.cuda seeds the current device only.
            with torch.cuda.device(device):
                torch.cuda.manual_seed(config.seed + rank())
        yield


@contextmanager
def channels_last(model: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Store the kernels of convolutions channels-last for the block; the numbers are the same.

    Tensor cores use this format. With another, each step converts all feature maps and back.
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


# ------------------------------------------------------------------------------------------
# Run folders: train into one, read its ``run.json``, measure the network that it holds.

CONFIG, LOG = "run.json", "log.jsonl"
WATCHED = 1024  # samples, or tokens of a text, on which curvature is watched: seconds per epoch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of a run, as stored in ``run.json``.

    Attributes:
        model: A registered name, or ``module:factory``.
        data: Likewise.
        model_options: Keyword arguments of the model.
        data_options: Keyword arguments of the data set.
        data_dir: Folder of data sets, or ``None``.
        loss: ``cross_entropy``, ``mse``, ``model`` (the model returns its loss) or
            ``module:function``.
        training: Options of training, with batch size and seed.
    """

    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    data_dir: str | None = None
    loss: str = "cross_entropy"
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        for entry in fields(self):
            # A run.json may have been edited: a wrong type is reported before it is used.
            kind = {"model_options": Mapping, "data_options": Mapping, "training": TrainingConfig}
            value, expected = getattr(self, entry.name), kind.get(entry.name, str)
            if not isinstance(value, expected) and (entry.name, value) != ("data_dir", None):
                got = type(value).__name__
                raise TypeError(f"{entry.name} must be a {expected.__name__}, got {got}")

    @property
    def batch_size(self) -> int:
        """The batch size; 1 for data that come in batches."""
        return self.training.batch_size or 1

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration of values of JSON."""
        names = dict(plain)
        training = dict(names.pop("training", {}))
        # Files of earlier versions have these two beside the other options.
        training |= {name: names.pop(name) for name in ("seed", "batch_size") if name in names}
        return cls(**names, training=TrainingConfig(**training))


def train_run(
    config: RunConfig,
    model: nn.Module,
    parts: DataParts,
    folder: FilePath,
    *,
    loss_fn: Callable[..., Any] | None,
    device: torch.device | None = None,
    watch: int | None = None,
    quantities: Sequence[str] | None = None,
    monitor_options: Mapping[str, Any] | None = None,
    progress: bool | Progress = False,
) -> TrainingResult:
    """Train a model according to a configuration, with all files in one folder.

    The folder has ``run.json``, ``log.jsonl``, ``checkpoint.safetensors`` and, at the end,
    ``weights.safetensors`` and ``average.safetensors``. Nothing is written, and no file of an
    earlier run is removed, before the first step.

    Args:
        config: Names and options.
        model: The model that ``config.model`` names.
        parts: The data that ``config.data`` names.
        folder: Created if missing.
        loss_fn: The loss that ``config.loss`` names.
        device: Device, if other than that of ``config``.
        watch: Epochs between measurements. Defaults to no measurements.
        quantities: Quantities to measure; see :class:`CurvatureMonitor`.
        monitor_options: Other arguments of :class:`CurvatureMonitor`, and ``num_samples``, the
            number of watched samples. Defaults to 1024 samples.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    target = Path(folder)
    started = any((target / name).exists() for name in (NAME, WEIGHTS))
    if config.training.resume and started and (target / CONFIG).is_file():
        # As JSON on both sides: there tuples are lists, and paths are text.
        before, now = (json.loads(to_json(each)) for each in (read_run(target), config))
        # `fit` compares the options of training. The folder of the data may have moved.
        fixed = {name: now[name] for name in now if name not in ("training", "data_dir")}
        check_same(before, fixed, target / CONFIG)
    return fit(
        model,
        parts,
        config.training,
        loss_fn=loss_fn,
        device=device or config.training.device,
        log=target / LOG,
        checkpoint=Folder(target, texts={CONFIG: to_json(config, indent=2) + "\n"}),
        monitors=[]
        if watch is None
        else [_monitor(config, parts, loss_fn, watch, quantities, monitor_options or {})],
        progress=progress,
    )


def _monitor(
    config: RunConfig,
    parts: DataParts,
    loss_fn: Any,
    every: int,
    quantities: Sequence[str] | None,
    settings: Mapping[str, Any],
) -> CurvatureMonitor:
    size, seed = config.batch_size, config.training.seed
    settings = dict(settings)
    count = settings.pop("num_samples", None) or WATCHED
    if isinstance(parts.train, TextSplit):
        # Each stream of a text must have at least one whole segment.
        tokens = min(count, len(parts.train.tokens))
        size = max(1, min(size, tokens // (parts.train.length + 1)))
    batches, options = sample(parts.train, count, batch_size=size, seed=seed)
    return CurvatureMonitor(
        batches,
        loss_fn=loss_fn,
        quantities=quantities,
        every=every,
        seed=seed,
        train_batch_size=config.training.batch_size,
        **options | settings,
    )


def read_run(folder: FilePath) -> RunConfig:
    """Return the configuration of a run.

    Args:
        folder: A folder that :func:`train_run` wrote.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: it has no {CONFIG}, which ritz train writes")
    try:
        return RunConfig.from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptFileError(f"{path} does not describe a run of ritz: {error}") from error


def run_weights(folder: FilePath, *, average: bool = False) -> Path:
    """Return the path of the final weights, or of the checkpoint if the run has not finished.

    Args:
        folder: Folder of a run.
        average: Return the file of averaged weights instead.
    """
    names = (AVERAGE,) if average else (WEIGHTS, NAME)
    for name in names:
        if (path := Path(folder) / name).is_file():
            return path
    reason = ", which a run with an average writes at its end" if average else ""
    raise FileNotFoundError(f"no weights in {folder}: it has no {' nor '.join(names)}{reason}")


def run_files(folder: FilePath) -> list[Path]:
    """Return the files that training has written to a folder, without results of measurements."""
    names = {CONFIG, LOG, times_path(LOG).name, NAME, WEIGHTS, AVERAGE}
    paths = sorted(Path(folder).iterdir())
    return [path for path in paths if path.name in names or path.match("epoch-[0-9]*.safetensors")]


def advised_settings(
    config: RunConfig, optimizer: str | None = None, momentum: float | None = None
) -> dict[str, Any]:
    """Return the optimiser of a run as the keywords of :func:`ritz.advise`.

    Args:
        config: Configuration of the run.
        optimizer: Another optimiser to advise on, whose learning rate is not that of the run.
        momentum: Another momentum.
    """
    training = config.training
    # Only the settings are read. Some optimisers take a model in place of parameters.
    layer = nn.Linear(1, 1)
    made = create_optimizer(
        training.optimizer, layer.parameters(), model=layer, **training.optimizer_settings
    )
    name, of_run, rate = update_settings(made, training.optimizer)
    if optimizer not in (None, name):
        return {"optimizer": optimizer, "momentum": momentum}
    # A learning rate is good evidence only with the batch size that it was used with.
    known = (training.batch_size, rate) if training.batch_size and rate > 0 else None
    return {
        "optimizer": name,
        "momentum": of_run if momentum is None else momentum,
        "known": known,
    }


def measured_risk(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    parts: DataParts,
    *,
    split: Literal["train", "validation", "test"] = "train",
    num_samples: int | None = None,
    batch_size: int,
    batch_norm: BatchNormMode = "eval",
    l2: float = 0.0,
    precision: Any = None,
    seed: int = 0,
    progress: bool | Progress = False,
) -> Risk:
    """Return the risk of a model on a part of its data, in an order that depends on the seed only.

    Args:
        model: The model, on the device to compute on.
        loss_fn: Mean loss of outputs and target.
        parts: The data.
        split: Which part; it is not augmented.
        num_samples: Number of samples, drawn without replacement. Defaults to all. For text, the
            first tokens; for a loader, whole batches.
        batch_size: Batch size, on which ``batch_norm="train"`` depends.
        batch_norm: Mode of batch norm.
        l2: Coefficient of the L2 term of the loss.
        precision: Precision of the arithmetic.
        seed: Seed of the draw.
        progress: Show a bar while a loader is read.
    """
    source = getattr(parts, split)
    if source is None:
        have = [
            name for name in ("train", "validation", "test") if getattr(parts, name) is not None
        ]
        raise ValueError(f"split must be a part of the data, {' or '.join(have)}, got {split!r}")
    chosen = source if num_samples is None else limited(source, num_samples, seed=seed)
    data, options = measurable(chosen, batch_size)
    with torch.random.fork_rng(devices=[]):  # a loader may shuffle with the global generator
        torch.default_generator.manual_seed(seed)
        return Risk(
            model,
            loss_fn,
            data,
            batch_norm=batch_norm,
            l2=l2,
            precision=precision,
            freeze=True,
            progress=progress,
            **options,
        )
