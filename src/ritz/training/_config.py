"""What a run of training is asked to do, checked before anything is moved or written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from ritz._core.checks import check_choice, check_count, check_range

TrainingPrecision = Literal["float32", "tf32", "bfloat16", "float16"]
Unit = Literal["step", "epoch"]
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
UNITS = ("step", "epoch")
# A run may be resumed with other values of these: they do not enter the numbers.
FREE = ("num_epochs", "save_interval", "keep", "capture", "final")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything about a run but the model, the data and the functions it is given.

    The attributes are the keywords of :func:`ritz.training.fit`.
    """

    num_epochs: int
    batch_size: int | None = None
    drop_last: bool = False
    optimizer: str = "sgd"
    optimizer_settings: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "constant"
    schedule_unit: Unit = "epoch"
    warmup: int = 0
    average_from: int | None = None
    average_every: Unit = "epoch"
    statistics_fraction: float = 0.1
    patience: int | None = None
    precision: TrainingPrecision = "float32"
    accumulate: int = 1
    clip_norm: float | None = None
    evaluate_every: int = 1
    evaluation_batch_size: int | None = None
    steps_per_epoch: int | None = None
    save_interval: float = 60.0
    keep: tuple[int, ...] = ()
    seed: int = 0
    compile: bool = False
    capture: bool | None = None
    deterministic: bool = False
    final: Literal["last", "average"] = "last"

    def __post_init__(self) -> None:
        for name in ("num_epochs", "accumulate", "evaluate_every"):
            check_count(name, getattr(self, name))
        for name in ("batch_size", "evaluation_batch_size", "steps_per_epoch", "patience"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("seed", "warmup"):
            check_count(name, getattr(self, name), low=0)
        if self.schedule_unit == "epoch":
            check_count("warmup", self.warmup, low=0, high=self.num_epochs)
        if self.average_from is not None:
            check_count("average_from", self.average_from, high=self.num_epochs)
        if self.clip_norm is not None:
            check_range("clip_norm", self.clip_norm)
            if not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
                raise ValueError(f"clip_norm must be finite and above 0, got {self.clip_norm}")
        for epoch in self.keep:
            check_count("keep", epoch, high=self.num_epochs)
        check_range("save_interval", self.save_interval, low=0.0)
        check_range("statistics_fraction", self.statistics_fraction, low=0.0, high=1.0)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("schedule_unit", self.schedule_unit, UNITS)
        check_choice("average_every", self.average_every, UNITS)
        check_choice("final", self.final, ("last", "average"))
        self._check_patience()
        object.__setattr__(
            self, "optimizer_settings", MappingProxyType(dict(self.optimizer_settings))
        )

    def _check_patience(self) -> None:
        if self.patience is not None and self.average_from is not None:
            raise ValueError(f"average_from must not be given with patience, which finds the "
                             f"beginning itself, got {self.average_from}")  # fmt: skip

    def description(self) -> dict[str, Any]:
        """What the numbers of a run depend on, in plain values, to compare two runs by."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["optimizer_settings"] = {k: repr(v) for k, v in self.optimizer_settings.items()}
        found = {name: value for name, value in plain.items() if name not in FREE}
        # A rate that falls over the length of a run is another one in a longer run; with an average
        # it falls up to that.
        falls = self.schedule == "step" or (self.schedule == "linear" and not self.average_from)
        return found | ({"num_epochs": self.num_epochs} if falls else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """How a run of training ended, and what to do about it.

    Attributes:
        outcome: ``completed`` (all epochs), ``stopped`` (patience ran out, as it should),
            ``interrupted`` (by a signal, after saving), ``diverged`` (the loss is not finite).
        message: What happened, in one sentence.
        advice: What to do, empty where nothing need be.
    """

    outcome: Literal["completed", "stopped", "interrupted", "diverged"]
    message: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether training reached its end."""
        return self.outcome in ("completed", "stopped")

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}" + (f" ({self.advice})" if self.advice else "")


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Raise where a run is resumed with other settings than it was begun with."""
    for name, value in now.items():
        if name in before and before[name] != value:
            raise ValueError(
                f"{path} was made with {name}={before[name]!r}, this run has {value!r}: give the "
                "same, or another folder, or begin anew with resume=False (--restart)"
            )


def resolve_device(device: str | torch.device | None, model: torch.nn.Module) -> torch.device:
    """The device to train on: that of the model unless one is named; it must be there."""
    if device is None:
        first = next(model.parameters(), None)
        return torch.device("cpu") if first is None else first.device
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, got {device!r}") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ValueError(f"device must be one of this machine, got {device!r}: torch finds "
                             f"{count or 'no'} CUDA device{'s' * (count > 1)}")  # fmt: skip
        return torch.device(
            "cuda", torch.cuda.current_device() if found.index is None else found.index
        )
    return found


def plain_settings(settings: Settings) -> dict[str, Any]:
    """All settings in values that JSON knows."""
    return {name: _plain(getattr(settings, name)) for name in settings.__slots__}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
