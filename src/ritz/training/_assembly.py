"""Optimiser, average and schedule of a run, created from the options and checked."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ritz import optim
from ritz._core.distributed import world_size
from ritz._core.modes import batch_norms
from ritz._core.params import parameters
from ritz._core.registry import Registry
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import Adapter
from ritz.training._data import Feed
from ritz.training._step import nested

# ------------------------------------------------------------------------------------------
# Optimisers by name.

OptimizerFactory = Callable[..., Optimizer]
OptimizerChoice = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
_OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer")


def register_optimizer(name: str) -> Callable[[OptimizerFactory], OptimizerFactory]:
    """Return a decorator that registers an optimiser under a name.

    The decorated function takes parameters and keyword arguments and returns an optimiser. An
    optimiser with a built-in average takes ``start`` and ``interval``, in steps, and exposes the
    average as ``.average``.

    Args:
        name: A new name.
    """
    return _OPTIMIZERS.register(name)


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimisers; ``optim.preset_names()`` lists published settings."""
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
        params: Parameters to train.
        plan: ``start`` and ``interval`` of a built-in average, in steps.
        capturable: Create an optimiser whose steps can be captured in a CUDA graph, if possible.
        **settings: Keyword arguments of the optimiser: ``lr``, ``weight_decay`` and so on.
    """
    if name not in _OPTIMIZERS and name in optim.preset_names():
        preset = optim.preset(name)
        make: OptimizerFactory = preset.optimizer
        settings = dict(preset.settings) | settings
    else:
        make = _OPTIMIZERS[name]
    known = inspect.signature(make).parameters
    if plan and "start" in known:
        settings = dict(plan) | settings
    params = list(params)
    sgd = make is SGD or getattr(make, "inner", None) is SGD
    if sgd:
        # A fused step is one kernel, and the only step of SGD that a CUDA graph can capture.
        other = any(settings.get(way) is not None for way in ("foreach", "differentiable"))
        fused = not other and settings.get("fused") is not False
        fused = fused and bool(params) and all(p.is_cuda for p in params)
        capturable = capturable and fused
        settings |= {"fused": True} if fused else {}
    rate = settings.get("lr", known["lr"].default if "lr" in known else None)
    if capturable and rate is not None and params:
        # A graph reads the learning rate from memory, where the schedule writes it.
        settings["lr"] = torch.tensor(float(rate), device=params[0].device)
        settings |= {} if sgd else {"capturable": True}
    return make(params, **settings)


def _lookahead(inner: OptimizerFactory, rate: float, **fixed: Any) -> OptimizerFactory:
    def make(
        params: Any, lr: Any = rate, *, k: int = 5, alpha: float = 0.5, **settings: Any
    ) -> Optimizer:
        return optim.Lookahead(inner(params, lr=lr, **(fixed | settings)), k=k, alpha=alpha)

    make.inner = inner  # type: ignore[attr-defined]
    return make


def _sgd(params: Any, lr: Any = 0.1, *, momentum: float = 0.9, **settings: Any) -> Optimizer:
    return SGD(params, lr=lr, momentum=momentum, **settings)


_sgd.inner = SGD  # type: ignore[attr-defined]
_BUILT_IN: dict[str, OptimizerFactory] = {
    "sgd": _sgd,
    "adam": Adam,
    "adamw": AdamW,
    "damped_adamw": optim.DampedAdamW,
    "padam": optim.Padam,
    "padamw": optim.PadamW,
    "gadam": optim.Gadam,
    "gadamx": optim.GadamX,
    "lookahead_sgd": _lookahead(SGD, 0.1, momentum=0.9),
    "lookahead_adamw": _lookahead(AdamW, 1e-3),
}
for _name, _factory in _BUILT_IN.items():
    _OPTIMIZERS.register(_name)(_factory)

# ------------------------------------------------------------------------------------------
# The parts of a run.


def make_optimizer(
    choice: OptimizerChoice | None,
    model: nn.Module,
    config: TrainingConfig,
    plan: dict[str, int],
    device: torch.device,
) -> Optimizer:
    """Return the optimiser that was chosen, or that of the options; see :func:`average_plan`."""
    optimizer: Any = choice
    if choice is None or isinstance(choice, str):
        single = device.type == "cuda" and world_size() == 1
        capturable = single and config.precision != "float16" and config.capture is not False
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = create_optimizer(config.optimizer, trainable, plan=plan, capturable=capturable,
                                     **config.optimizer_settings)  # fmt: skip
    elif callable(choice) and not isinstance(choice, Optimizer):
        optimizer = choice(model.parameters(), **config.optimizer_settings)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a name, a torch optimiser or a function of the "
                        f"parameters that returns one, got {type(optimizer).__name__}")  # fmt: skip
    if not set(model.parameters()) & set(parameters(optimizer)):
        raise ValueError(f"optimizer must move parameters of the model, got a "
                         f"{type(optimizer).__name__} with none of them")  # fmt: skip
    if isinstance(optimizer, LBFGS):
        raise ValueError("optimizer must take a step without computing the loss again, got LBFGS")
    return optimizer


def is_captured(optimizer: Optimizer, config: TrainingConfig, device: torch.device) -> bool:
    """Return whether to capture steps in a CUDA graph; raise if that is required but impossible."""
    inner = nested(optimizer)[-1]
    # All that changes between two steps must be on the device.
    stays = all(p.is_cuda for p in parameters(inner)) and all(
        isinstance(rate := group.get("lr"), Tensor)
        and rate.is_cuda
        and (group.get("capturable") or (isinstance(inner, SGD) and group["fused"]))
        for group in inner.param_groups
    )
    conditions = {
        f"a CUDA device, got {device}": device.type == "cuda",
        "a single process": world_size() == 1,
        # The gradient scaler reads from the device whether to skip the step.
        "a precision other than float16": config.precision != "float16",
        "an optimiser whose step stays on the device, with capturable=True (fused=True for SGD) "
        f"and lr a CUDA tensor, got {type(optimizer).__name__} without": stays,
    }
    missing = next((need for need, met in conditions.items() if not met), None)
    if missing is not None and config.capture:
        raise ValueError(f"capture=True needs {missing}")
    return missing is None and config.capture is not False


def average_plan(config: TrainingConfig, length: int | None) -> dict[str, int]:
    """Return the first step and the interval of the average, in steps."""
    if config.average_from is None:
        return {}
    if length is None:
        raise ValueError("steps_per_epoch must be given with average_from, for data of no known "
                         "length")  # fmt: skip
    interval = length if config.average_every == "epoch" else 1
    # Epoch e begins at step (e - 1) * length + 1.
    return {"start": (config.average_from - 1) * length + 1, "interval": interval}


def make_average(
    choice: optim.IterateAverage | optim.AutoAverage | None,
    optimizer: Optimizer,
    config: TrainingConfig,
    plan: dict[str, int],
) -> tuple[optim.IterateAverage | None, optim.AutoAverage | None]:
    """Return the average of a run, and the rule that starts it if patience does."""
    if choice is not None:
        if plan or config.patience:
            raise ValueError("average must not be given with average_from or patience")
        auto = choice if isinstance(choice, optim.AutoAverage) else None
        average = choice.average if isinstance(choice, optim.AutoAverage) else choice
        if average.optimizer not in nested(optimizer):
            raise ValueError("average must be of the optimiser of the run, got one of another")
        return average, auto
    built_in = getattr(optimizer, "average", None)
    if not isinstance(built_in, optim.IterateAverage):
        built_in = None
    if config.patience is not None:
        auto = optim.AutoAverage(built_in or optimizer, patience=config.patience)
        return auto.average, auto
    if built_in is None and plan:
        return optim.IterateAverage(optimizer, start=plan["start"], interval=plan["interval"]), None
    if built_in is not None and plan and built_in.planned != plan["start"]:
        raise ValueError(f"average_from must be left out for an optimiser with a built-in average, "
                         f"got {config.average_from}")  # fmt: skip
    return built_in, None


def make_schedule(
    choice: Any, optimizer: Optimizer, config: TrainingConfig, length: int | None
) -> Any:
    """Return a scheduler with ``step``, ``state_dict`` and ``load_state_dict``."""
    if isinstance(choice, ReduceLROnPlateau):
        raise ValueError("schedule must be a function of the time, got ReduceLROnPlateau, which "
                         "needs a loss: see patience")  # fmt: skip
    if hasattr(choice, "step") and hasattr(choice, "load_state_dict"):
        return choice
    name = config.schedule if choice is None or isinstance(choice, str) else ""
    unit = 1 if config.schedule_unit == "epoch" else length
    if unit is None and name in ("linear", "step"):
        raise ValueError(f"steps_per_epoch must be given with schedule={name!r} by step, for data "
                         "of no known length")  # fmt: skip
    whole = config.num_epochs * (unit or 1)
    if name == "linear" and config.average_from is not None:
        # GADAM, equations 12 and 13: the rate falls up to the start of the average.
        shape = optim.averaging_decay(max(1, (config.average_from - 1) * (unit or 1)))
    elif name == "linear":
        shape = optim.linear_decay(whole)
    elif name == "step":
        shape = optim.step_decay(sorted({whole // 2, whole * 3 // 4}))
    else:
        shape = choice if callable(choice) else lambda time: 1.0
    shape = optim.warmup(config.warmup, then=shape) if config.warmup else shape
    return optim.Schedule(optimizer, shape)


# ------------------------------------------------------------------------------------------
# Batches of one row, which batch norm in train mode cannot take.


def check_last_batch(
    adapter: Adapter, model: nn.Module, feed: Feed, config: TrainingConfig, device: torch.device
) -> None:
    """Raise if the last batch of an epoch leaves a process one row and batch norm cannot take it.

    Convolutions have several values per channel in one row, so only a forward pass of one row can
    tell. It is made before the first step: the error would otherwise end the first epoch.
    """
    rows = feed.last_rows
    if rows is None or rows // world_size() > 1 or not batch_norms(model):
        return
    if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
        return  # the pass would give lazy layers their shape
    plain = Adapter(model.train(), adapter.loss_fn.call, adapter.custom)  # not wrapped or compiled
    copies = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            functional_call(plain, copies, (feed.row(),))
    except ValueError as error:
        raise explain_one_row(error, rows, config) from error


def explain_one_row(error: ValueError, rows: int, config: TrainingConfig) -> ValueError:
    """Return an error that says what to do about a batch of one row, or the error itself."""
    if "Expected more than 1 value per channel" not in str(error):  # torch
        return error
    advice = "give drop_last=True to the loader, or another batch size"
    if config.batch_size is not None:
        advice = ("give drop_last=True (--drop-last), or another batch_size (--batch-size) than "
                  f"{config.batch_size}")  # fmt: skip
    return ValueError(f"batch norm needs two rows or more to train on, got a batch of {rows} in "
                      f"{world_size()} process{'es' * (world_size() > 1)}: {advice}")  # fmt: skip
