"""Run folders: train into one, read its ``run.json``, measure the network that it holds."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

import torch
from torch import nn

from ritz._core.modes import BatchNormMode
from ritz._core.progress import Progress
from ritz._core.storage import CorruptFileError, to_json
from ritz._core.training_config import TrainingConfig, check_same
from ritz.curvature import Risk
from ritz.data import TextSplit
from ritz.training._data import DataParts, limited, measurable, sample
from ritz.training._fit import fit
from ritz.training._folder import AVERAGE, NAME, WEIGHTS, Folder, times_path
from ritz.training._monitor import CurvatureMonitor, Quantity
from ritz.training._run import TrainingResult

CONFIG, LOG = "run.json", "log.jsonl"
WATCHED = 1024  # samples, or tokens of a text, on which curvature is watched: seconds per epoch
# A resumed run must share these with its beginning; `fit` compares the options of training.
FIXED = ("model", "model_options", "data", "data_options", "loss")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Names and options from which a run can be built again; ``run.json`` holds them.

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
        for name in ("model_options", "data_options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

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
    folder: str | os.PathLike[str],
    *,
    loss_fn: Callable[..., Any] | None,
    device: torch.device | None = None,
    watch: int | None = None,
    quantities: Sequence[Quantity] = ("lambda_max", "trace"),
    progress: bool | Progress = False,
) -> TrainingResult:
    """Train as a configuration says, with all files in one folder.

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
        watch: Epochs between measurements of the curvature, on ``WATCHED`` samples. Defaults to
            none.
        quantities: Quantities to measure; see :class:`CurvatureMonitor`.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    target = Path(folder)
    started = any((target / name).exists() for name in (NAME, WEIGHTS))
    if config.training.resume and started and (target / CONFIG).is_file():
        before, now = (json.loads(to_json(each)) for each in (read_run(target), config))
        check_same(before, {name: now[name] for name in FIXED}, target / CONFIG)
    return fit(
        model,
        parts,
        config.training,
        loss_fn=loss_fn,
        device=device or config.training.device,
        log=target / LOG,
        checkpoint=Folder(target, texts={CONFIG: to_json(config, indent=2) + "\n"}),
        monitors=[] if watch is None else [_monitor(config, parts, loss_fn, watch, quantities)],
        progress=progress,
    )


def _monitor(
    config: RunConfig, parts: DataParts, loss_fn: Any, every: int, quantities: Sequence[Quantity]
) -> CurvatureMonitor:
    size, seed = config.batch_size, config.training.seed
    if isinstance(parts.train, TextSplit):
        # Each stream of a text must have at least one whole segment.
        tokens = min(WATCHED, len(parts.train.tokens))
        size = max(1, min(size, tokens // (parts.train.length + 1)))
    batches, options = sample(parts.train, WATCHED, batch_size=size, seed=seed)
    return CurvatureMonitor(
        batches, loss_fn=loss_fn, quantities=quantities, every=every, seed=seed, **options
    )


def read_run(folder: str | os.PathLike[str]) -> RunConfig:
    """Return the configuration of a run.

    Args:
        folder: A folder that :func:`train_run` wrote.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: it has no {CONFIG}, which ritz train writes")
    try:
        return RunConfig.from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CorruptFileError(f"{path} does not describe a run of ritz: {error}") from error


def run_weights(folder: str | os.PathLike[str], *, average: bool = False) -> Path:
    """Return the file of weights of a run: the last ones, or the checkpoint of an unfinished run.

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


def run_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the files that training has written to a folder, without results of measurements."""
    names = {CONFIG, LOG, times_path(LOG).name, NAME, WEIGHTS, AVERAGE}
    paths = sorted(Path(folder).iterdir())
    return [path for path in paths
            if path.name in names or path.match("epoch-[0-9]*.safetensors")]  # fmt: skip


def measured_risk(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    parts: DataParts,
    *,
    split: Literal["train", "validation", "test"] = "train",
    num_samples: int | None = None,
    batch_size: int,
    batch_norm: BatchNormMode = "eval",
    precision: Any = None,
    seed: int = 0,
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
        precision: Precision of the arithmetic.
        seed: Seed of the draw.
    """
    source = getattr(parts, split)
    if source is None:
        raise ValueError(f"split must be one that the data have, got {split!r}, which is not there")
    chosen = source if num_samples is None else limited(source, num_samples, seed=seed)
    data, options = measurable(chosen, batch_size)
    with torch.random.fork_rng(devices=[]):  # a loader may shuffle with the global generator
        torch.default_generator.manual_seed(seed)
        return Risk(
            model, loss_fn, data, batch_norm=batch_norm, precision=precision, freeze=True, **options
        )
