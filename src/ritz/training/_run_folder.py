"""Run folders and ``run.json``: train into one, open one, and make the risk of its network."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

from ritz._core.batch_norm import BatchNormMode
from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.storage import CorruptFileError, to_json
from ritz._core.training_config import TrainingConfig, check_same
from ritz.curvature import Risk
from ritz.data import TextSplit
from ritz.optim._shared import update_settings
from ritz.training._checkpoint import AVERAGE, CHECKPOINT, WEIGHTS, FilePath, Folder
from ritz.training._data import DataParts, limited, measurable, sample, with_own_batch_size
from ritz.training._fit import fit
from ritz.training._log import LOG, times_path
from ritz.training._monitor import CurvatureMonitor
from ritz.training._optimizers import create_optimizer
from ritz.training._result import TrainingResult

CONFIG = "run.json"


@dataclass(frozen=True, slots=True)
class Tuning:
    """Default numbers of samples that a monitor watches; of a text, numbers of tokens."""

    # On one core, 1,024 samples of VGG-16 take 7.1 % of five epochs of 50,000 images, and 512 take
    # 3.6 %, extrapolated from 128 and 1,280 (docs/monitors.md).
    watched: int = 1024
    watched_large: int = 512
    # Parameters of a large network: VGG-16 has 15 million, for which the goal of 5 % was missed.
    # Perceptrons and LeNet on MNIST have less than 100,000, and met it.
    large: int = 1_000_000


TUNING = Tuning()


def num_watched(model: nn.Module) -> int:
    """Return the default number of samples that the monitor of a network watches."""
    size = sum(p.numel() for p in model.parameters())
    return TUNING.watched_large if size > TUNING.large else TUNING.watched


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
        """The batch size; the default if the data come in batches of unknown sizes."""
        return self.training.batch_size or TrainingConfig().batch_size or 1

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RunConfig":
        """Return the configuration of values of JSON."""
        return cls(**{**plain, "training": TrainingConfig(**plain.get("training", {}))})


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
        watch: Epochs between measurements, at most all. Defaults to no measurements.
        quantities: Quantities to measure; see :class:`CurvatureMonitor`.
        monitor_options: Other arguments of :class:`CurvatureMonitor`, and ``num_samples``, the
            number of watched samples. Defaults to :func:`num_watched`.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    target, monitors = Path(folder), list[CurvatureMonitor]()
    # Monitors, run.json and advice on the run need the batch size of the steps.
    config = replace(config, training=with_own_batch_size(config.training, parts.train))
    started = any((target / name).exists() for name in (CHECKPOINT, WEIGHTS))
    if config.training.resume and started and (target / CONFIG).is_file():
        # Both as JSON, in which tuples are lists and paths are text.
        before, now = (json.loads(to_json(each)) for each in (read_run(target), config))
        # `fit` compares the options of training. `data_dir` may differ: data can be moved.
        fixed = {name: now[name] for name in now if name not in ("training", "data_dir")}
        check_same(before, fixed, target / CONFIG)
    if watch is not None:
        # A longer interval would measure nothing.
        check_count("watch", watch, high=config.training.num_epochs)
        options = monitor_options or {}
        monitors = [make_monitor(config, model, parts, loss_fn, watch, quantities, options)]
    return fit(
        model,
        parts,
        config.training,
        loss_fn=loss_fn,
        device=device or config.training.device,
        log=target / LOG,
        checkpoint=Folder(target, texts={CONFIG: to_json(config, indent=2) + "\n"}),
        monitors=monitors,
        progress=progress,
    )


def make_monitor(
    config: RunConfig,
    model: nn.Module,
    parts: DataParts,
    loss_fn: Any,
    every: int,
    quantities: Sequence[str] | None,
    settings: Mapping[str, Any],
) -> CurvatureMonitor:
    """Return the monitor of a run; its arguments are those of :func:`train_run`."""
    size, seed = config.batch_size, config.training.seed
    settings = dict(settings)
    count = settings.pop("num_samples", None) or num_watched(model)
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
    names = (AVERAGE,) if average else (WEIGHTS, CHECKPOINT)
    for name in names:
        if (path := Path(folder) / name).is_file():
            return path
    missing = (
        "no {}, which a run with an average writes at its end" if average else "neither {} nor {}"
    )
    raise FileNotFoundError(f"no weights in {folder}: it has {missing.format(*names)}")


def run_files(folder: FilePath) -> list[Path]:
    """Return the files that training has written to a folder, without results of measurements."""
    names = {CONFIG, LOG, times_path(LOG).name, CHECKPOINT, WEIGHTS, AVERAGE}
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
    # The optimiser is created only to read its settings. Some optimisers take a model.
    layer = nn.Linear(1, 1)
    made = create_optimizer(
        training.optimizer, layer.parameters(), model=layer, **training.optimizer_settings
    )
    name, of_run, rate = update_settings(made, training.optimizer)
    if optimizer not in (None, name):
        return {"optimizer": optimizer, "momentum": momentum}
    # The learning rate is evidence only for the batch size that it was used with.
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
