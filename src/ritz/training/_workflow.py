"""Run folders: what was trained on what, so that it can be measured later by its name alone."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

import torch
from torch import nn

from ritz._core.checks import check_count
from ritz._core.modes import BatchNormMode
from ritz._core.progress import Progress
from ritz._core.storage import CorruptFileError, to_json
from ritz.curvature import Risk
from ritz.training._config import check_same
from ritz.training._data import DataParts, limited, measurable
from ritz.training._evaluate import TrainingResult
from ritz.training._fit import fit
from ritz.training._folder import AVERAGE, NAME, WEIGHTS, Folder

CONFIG, LOG = "run.json", "log.jsonl"
# What a run that goes on must have in common with its beginning; `fit` compares the rest.
FIXED = ("model", "model_options", "data", "data_options", "loss", "seed", "batch_size")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run is made of, by name: enough to build its model and data again.

    Attributes:
        model: A registered name, or ``module:factory``.
        data: Likewise.
        model_options: Keywords of the model.
        data_options: Keywords of the data set.
        data_dir: Folder of data sets, or ``None``.
        loss: ``cross_entropy``, ``mse``, ``model`` (the model returns its own) or
            ``module:function``.
        seed: Of the first weights, of order, augmentation and dropout.
        batch_size: Samples a batch.
        training: Other keywords of :func:`ritz.training.fit`, in plain values; ``augment`` says
            whether data are augmented that usually are.
    """

    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    data_dir: str | None = None
    loss: str = "cross_entropy"
    seed: int = 0
    batch_size: int = 128
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_count("seed", self.seed, low=0)
        for name in ("model_options", "data_options", "training"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value
                for name, value in found.items()}  # fmt: skip


def train_run(
    config: RunConfig,
    model: nn.Module,
    parts: DataParts,
    folder: str | os.PathLike[str],
    *,
    loss_fn: Callable[..., Any] | None,
    device: str | torch.device | None = None,
    resume: bool = True,
    monitors: Sequence[Any] = (),
    progress: bool | Progress = False,
) -> TrainingResult:
    """Train as a configuration says, in a folder that holds all of the run.

    The folder has ``run.json``, ``log.jsonl``, ``checkpoint.safetensors`` and, at the end,
    ``weights.safetensors`` and ``average.safetensors``. Nothing is written, and nothing of an
    earlier run removed, before the first step was taken.

    Args:
        config: What to do.
        model: What ``config.model`` names.
        parts: What ``config.data`` names.
        folder: Made where it is missing.
        loss_fn: What ``config.loss`` names.
        device: Where to train.
        resume: Whether to go on from what is there, which must be of the same run.
        monitors: As for :func:`ritz.training.fit`.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    target = Path(folder)
    begun = any((target / name).exists() for name in (NAME, WEIGHTS))
    if resume and begun and (target / CONFIG).is_file():
        before, now = read_run(target).plain(), config.plain()
        same = {name: now[name] for name in FIXED}
        before["augment"], same["augment"] = _augments(before), _augments(now)
        check_same(before, same, target / CONFIG)
    training = {name: value for name, value in config.training.items() if name != "augment"}
    text = to_json(config.plain(), indent=2) + "\n"
    return fit(
        model,
        parts.train,
        validation=parts.validation,
        test=parts.test,
        augment=parts.augmentation if _augments(config.plain()) else None,
        loss_fn=loss_fn,
        batch_size=config.batch_size if parts.cuts else None,
        seed=config.seed,
        device=device,
        log=target / LOG,
        checkpoint=Folder(target, texts={CONFIG: text}),
        resume=resume,
        monitors=monitors,
        progress=progress,
        **training,
    )


def _augments(plain: Mapping[str, Any]) -> bool:
    return bool(plain["training"].get("augment", True))


def read_run(folder: str | os.PathLike[str]) -> RunConfig:
    """The configuration of a run.

    Args:
        folder: As :func:`train_run` wrote it.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"no run in {folder}: it has no {CONFIG}, which ritz train writes")
    try:
        return RunConfig(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CorruptFileError(f"{path} does not describe a run of ritz: {error}") from error


def run_weights(folder: str | os.PathLike[str], *, average: bool = False) -> Path:
    """The file of weights of a run: the last, or those of its checkpoint while it is not over.

    Args:
        folder: Of a run.
        average: The averaged weights instead.
    """
    place = Path(folder)
    names = (AVERAGE,) if average else (WEIGHTS, NAME)
    found = next((place / name for name in names if (place / name).is_file()), None)
    if found is None:
        why = ", which a run with an average writes at its end" if average else ""
        raise FileNotFoundError(f"no weights in {place}: it has no {' nor '.join(names)}{why}")
    return found


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
    """Return the risk of a model on a part of its data, in an order that is always the same.

    Args:
        model: On the device to compute on.
        loss_fn: Mean loss of outputs and target.
        parts: The data.
        split: Which of them; not augmented.
        num_samples: How many, drawn without replacement; all by default. Tokens, the first ones,
            for a text; whole batches of a loader.
        batch_size: Part of what ``batch_norm="train"`` measures.
        batch_norm: Mode of batch norm.
        precision: Of the arithmetic.
        seed: Of the draw.
    """
    source = getattr(parts, split)
    if source is None:
        raise ValueError(f"split must be one that the data have, got {split!r}, which is not there")
    chosen = source if num_samples is None else limited(source, num_samples, seed=seed)
    data, options = measurable(chosen, batch_size)
    with torch.random.fork_rng(devices=[]):  # a loader may shuffle by the global generator
        torch.default_generator.manual_seed(seed)
        return Risk(
            model, loss_fn, data, batch_norm=batch_norm, precision=precision, freeze=True, **options
        )
