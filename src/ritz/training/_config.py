"""What a run is asked to do: its settings, and its optimiser and schedule by name."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ritz import optim
from ritz._core.checks import check_choice, check_count, check_range
from ritz._core.params import parameters
from ritz._core.registry import Registry
from ritz.optim import Schedule, averaging_decay, linear_decay, step_decay, warmup

# ------------------------------------------------------------------------------------------
# What a run of training is asked to do, checked before anything is moved or written.

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


def plain_settings(settings: Settings) -> dict[str, Any]:
    """All settings in values that JSON knows."""
    return {name: _plain(getattr(settings, name)) for name in settings.__slots__}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


# ------------------------------------------------------------------------------------------
# Optimisers by name, with the average that belongs to them.

OptimizerFactory = Callable[..., Optimizer]
_OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer")


def register_optimizer(name: str) -> Callable[[OptimizerFactory], OptimizerFactory]:
    """Decorator that files a factory under a name.

    The factory takes parameters and keywords and returns an optimiser; one that keeps an average
    of its own takes ``start`` and ``interval``, in steps, and has it as ``.average``.

    Args:
        name: New.
    """
    return _OPTIMIZERS.register(name)


def optimizer_names() -> tuple[str, ...]:
    """The names of all optimisers; those of published settings are in ``optim.preset_names()``."""
    return tuple(_OPTIMIZERS)


def create_optimizer(
    name: str,
    params: Iterable[nn.Parameter],
    *,
    plan: Mapping[str, int] | None = None,
    capturable: bool = False,
    **settings: Any,
) -> Optimizer:
    """Return an optimiser by name.

    Args:
        name: One of :func:`optimizer_names` or of ``ritz.optim.preset_names()``.
        params: What it moves.
        plan: ``start`` and ``interval`` of its average, in steps; given to those that keep one.
        capturable: Whether its steps are to be captured in CUDA graphs.
        **settings: Its keywords: ``lr``, ``weight_decay`` and so on.
    """
    if name not in tuple(_OPTIMIZERS) and name in optim.preset_names():
        found = optim.preset(name)
        make: OptimizerFactory = found.optimizer
        settings = dict(found.settings) | settings
    else:
        make = _OPTIMIZERS[name]
    if plan and "start" in inspect.signature(make).parameters:
        settings = dict(plan) | settings
    params = list(params)
    if _is_sgd(make) and not _may_fuse(params, settings):
        capturable = False  # it is captured fused alone
    elif _is_sgd(make):
        settings |= {"fused": True}  # one launch, and the arithmetic of captured steps
    if capturable:
        settings |= _capturable(make, params, settings)
    return make(params, **settings)


def average_of(optimizer: Optimizer) -> optim.IterateAverage | None:
    """The average that an optimiser brings, if it does."""
    found = getattr(optimizer, "average", None)
    return found if isinstance(found, optim.IterateAverage) else None


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimiser that takes the step, inside those that wrap it."""
    while isinstance(optimizer, optim.Lookahead):
        optimizer = optimizer.optimizer
    return optimizer


def is_capturable(optimizer: Optimizer) -> bool:
    """Whether steps may be captured: all that changes between them is on the device."""
    inner = innermost(optimizer)
    fixed = all(isinstance(group["lr"], Tensor) and group["lr"].is_cuda
                and (group.get("capturable") or (isinstance(inner, SGD) and group["fused"]))
                for group in inner.param_groups)  # fmt: skip
    return fixed and all(p.is_cuda for p in parameters(inner))


def _capturable(
    make: OptimizerFactory, params: list[nn.Parameter], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords that keep a step on the device; the rate as a tensor that a schedule fills."""
    known = inspect.signature(make).parameters
    rate = settings.get("lr", known["lr"].default if "lr" in known else None)
    if rate is None or not params:
        return {}
    found: dict[str, Any] = {"lr": torch.tensor(float(rate), device=params[0].device)}
    return found | ({} if _is_sgd(make) else {"capturable": True})


def _may_fuse(params: list[nn.Parameter], settings: Mapping[str, Any]) -> bool:
    """Whether all of it is on CUDA, and no other way of stepping was asked for."""
    other = any(settings.get(name) is not None for name in ("foreach", "differentiable"))
    free = not other and settings.get("fused") is not False
    return free and bool(params) and all(p.is_cuda for p in params)


def _is_sgd(make: OptimizerFactory) -> bool:
    return make is SGD or getattr(make, "inner", None) is SGD


def _lookahead(inner: OptimizerFactory, rate: float, **fixed: Any) -> OptimizerFactory:
    def make(
        params: Any, lr: Any = rate, *, k: int = 5, alpha: float = 0.5, **settings: Any
    ) -> Optimizer:
        return optim.Lookahead(inner(params, lr=lr, **(fixed | settings)), k=k, alpha=alpha)

    make.inner = inner  # type: ignore[attr-defined]
    return make


@register_optimizer("sgd")
def _sgd(params: Any, lr: Any = 0.1, *, momentum: float = 0.9, **settings: Any) -> Optimizer:
    return SGD(params, lr=lr, momentum=momentum, **settings)


_sgd.inner = SGD  # type: ignore[attr-defined]
_OPTIMIZERS.register("adam")(Adam)
_OPTIMIZERS.register("adamw")(torch.optim.AdamW)
_OPTIMIZERS.register("damped_adamw")(optim.DampedAdamW)
_OPTIMIZERS.register("padam")(optim.Padam)
_OPTIMIZERS.register("padamw")(optim.PadamW)
_OPTIMIZERS.register("gadam")(optim.Gadam)
_OPTIMIZERS.register("gadamx")(optim.GadamX)
_OPTIMIZERS.register("lookahead_sgd")(_lookahead(SGD, 0.1, momentum=0.9))
_OPTIMIZERS.register("lookahead_adamw")(_lookahead(torch.optim.AdamW, 1e-3))

# ------------------------------------------------------------------------------------------
# The schedule of a run, by name, shape or as it is given.

SCHEDULES = ("constant", "linear", "step")


def schedule_name(schedule: Any) -> str:
    """What settings call a schedule."""
    if schedule is None:
        return "constant"
    if isinstance(schedule, str):
        check_choice("schedule", schedule, SCHEDULES)
        return schedule
    if callable(schedule) or hasattr(schedule, "step"):
        return f"own {type(schedule).__name__}"
    raise TypeError(f"schedule must be one of {', '.join(SCHEDULES)}, a function of the time or a "
                    f"torch scheduler, got {type(schedule).__name__}")  # fmt: skip


def create_schedule(
    schedule: Any,
    optimizer: Optimizer,
    *,
    length: int,
    average_from: int | None,
    warmup_length: int,
) -> Any:
    r"""Return a scheduler with ``step``, ``state_dict`` and ``load_state_dict``.

    Args:
        schedule: ``constant``; ``linear``: flat, falling from half of the time to 0.9 of it, flat,
            over all of it or, where there is an average, up to its beginning (GADAM, equations 12
            and 13); ``step``: a tenth from a half of the time on and again from three quarters; a
            function of the time that returns a factor; or a scheduler of the optimiser.
        optimizer: Whose rate it sets.
        length: The whole time, in the unit the schedule is stepped by.
        average_from: The time at which averaging begins.
        warmup_length: Time over which the rate grows to its whole value.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError("schedule must be a function of the time, got ReduceLROnPlateau, which "
                         "asks for a loss: see patience")  # fmt: skip
    if hasattr(schedule, "step") and hasattr(schedule, "load_state_dict"):
        return schedule
    shape = _shape(schedule, length, average_from)
    return Schedule(optimizer, warmup(warmup_length, then=shape) if warmup_length else shape)


def _shape(schedule: Any, length: int, average_from: int | None) -> Any:
    if schedule == "linear":
        return averaging_decay(average_from) if average_from else linear_decay(length)
    if schedule == "step":
        return step_decay(sorted({length // 2, length * 3 // 4}))
    return _constant if schedule in (None, "constant") else schedule


def _constant(time: int) -> float:
    return 1.0
