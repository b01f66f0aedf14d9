"""Model, data, optimiser, average and schedule of a run, put together and checked."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from ritz import optim
from ritz._core.distributed import world_size
from ritz._core.modes import batch_norms
from ritz._core.params import parameters
from ritz.curvature._shared import Adapter, Forward, check_reduction
from ritz.training._config import (
    Settings,
    average_of,
    create_optimizer,
    create_schedule,
    innermost,
    is_capturable,
)
from ritz.training._data import Feed
from ritz.training._processes import distributed
from ritz.training._step import CapturedStep, Piece, Step

# ------------------------------------------------------------------------------------------
# Model, data, optimiser, average and schedule of a run, put together.

OptimizerChoice = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run works with.

    Attributes:
        model: Without wrappers, on the device.
        feed: Training data.
        optimizer: Moves the model.
        schedule: Sets its rate.
        average: Of its iterates, if any.
        auto: What begins the average by patience, if anything.
        step: Forward, backward and update.
        take: The same, perhaps from a CUDA graph.
        steps_per_epoch: Where it is known.
        device: Where all of it is.
    """

    model: nn.Module
    feed: Feed
    optimizer: Optimizer
    schedule: Any
    average: optim.IterateAverage | None
    auto: optim.AutoAverage | None
    step: Step
    take: Callable[[Sequence[Piece]], None]
    steps_per_epoch: int | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def assemble(
    model: nn.Module,
    feed: Feed,
    settings: Settings,
    *,
    optimizer: OptimizerChoice,
    schedule: Any,
    average: optim.IterateAverage | optim.AutoAverage | None,
    loss_fn: Callable[..., Any] | None,
    forward: Forward | None,
    device: torch.device,
) -> Parts:
    """Return the parts of a run; the model is moved to the device."""
    check_reduction(loss_fn)
    model.to(device)
    length = settings.steps_per_epoch
    if length is None and feed.num_batches is not None:
        length = ceil(feed.num_batches / settings.accumulate)
    wanted = _wants_capture(settings, device)
    plan = _plan(settings, length)
    found = _optimizer(optimizer, model, settings, plan, capturable=wanted)
    _check_moves(found, model)
    kept, auto = _average(found, average, settings, plan)
    if settings.final == "average" and kept is None:
        raise ValueError("final='average' needs an average: give average_from or patience")
    shape = create_schedule(schedule, found, **_time(settings, length, schedule))
    runner = distributed(torch.compile(model) if settings.compile else model, device)  # type: ignore[arg-type]
    captured = wanted and _can_capture(found, settings)
    step = Step(
        Adapter(runner, loss_fn, forward),
        found,
        precision=settings.precision,
        clip_norm=settings.clip_norm,
        device=device,
        cached=not captured,
    )
    take = CapturedStep(step, required=bool(settings.capture)) if captured else step
    return Parts(
        model=model,
        feed=feed,
        optimizer=found,
        schedule=shape,
        average=kept,
        auto=auto,
        step=step,
        take=take,
        steps_per_epoch=length,
        device=device,
    )


def _wants_capture(settings: Settings, device: torch.device) -> bool:
    """Whether to try CUDA graphs; raise where they are asked for and cannot be."""
    reasons = {
        f"a CUDA device, got {device}": device.type != "cuda",
        "a single process": world_size() > 1,
        "another precision than float16, whose scaler waits for the device": (
            settings.precision == "float16"
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None and settings.capture:
        raise ValueError(f"capture=True needs {reason}")
    return reason is None and settings.capture is not False


def _can_capture(optimizer: Optimizer, settings: Settings) -> bool:
    able = is_capturable(optimizer)
    if settings.capture and not able:
        raise ValueError("capture=True needs an optimiser whose step stays on the device, with "
                         "capturable=True (fused=True for SGD) and lr a CUDA tensor, got "
                         f"{type(optimizer).__name__} without")  # fmt: skip
    return able


def _plan(settings: Settings, length: int | None) -> dict[str, int]:
    """When to average, in steps."""
    if settings.average_from is None:
        return {}
    if length is None:
        raise ValueError("steps_per_epoch must be given with average_from, for data of no known "
                         "length")  # fmt: skip
    interval = length if settings.average_every == "epoch" else 1
    return {"start": (settings.average_from - 1) * length + 1, "interval": interval}


def _optimizer(
    choice: OptimizerChoice,
    model: nn.Module,
    settings: Settings,
    plan: dict[str, int],
    *,
    capturable: bool,
) -> Optimizer:
    chosen = dict(settings.optimizer_settings)
    if isinstance(choice, Optimizer):
        found: Any = choice
    elif isinstance(choice, str):
        moved = [p for p in model.parameters() if p.requires_grad]
        return create_optimizer(choice, moved, plan=plan, capturable=capturable, **chosen)
    elif callable(choice):
        found = choice(model.parameters(), **chosen)
    else:
        found = choice
    if not isinstance(found, Optimizer):
        raise TypeError(f"optimizer must be a name, a torch optimiser or a function of the "
                        f"parameters that returns one, got {type(found).__name__}")  # fmt: skip
    return found


def _check_moves(optimizer: Optimizer, model: nn.Module) -> None:
    own = set(model.parameters())
    if not any(p in own for p in parameters(optimizer)):
        raise ValueError(f"optimizer must move parameters of the model, got a "
                         f"{type(optimizer).__name__} with none of them")  # fmt: skip
    if isinstance(optimizer, LBFGS):
        raise ValueError("optimizer must take a step without computing the loss again, got LBFGS")


def _average(
    optimizer: Optimizer,
    given: optim.IterateAverage | optim.AutoAverage | None,
    settings: Settings,
    plan: dict[str, int],
) -> tuple[optim.IterateAverage | None, optim.AutoAverage | None]:
    own = average_of(optimizer)
    if given is not None and (plan or settings.patience):
        raise ValueError("average must not be given with average_from or patience")
    if given is not None:
        held = given.average if isinstance(given, optim.AutoAverage) else given
        if held.optimizer is not optimizer and held.optimizer is not innermost(optimizer):
            raise ValueError("average must be of the optimiser of the run, got one of another")
    if isinstance(given, optim.AutoAverage):
        return given.average, given
    if settings.patience is not None:
        auto = optim.AutoAverage(own or optimizer, patience=settings.patience)
        return auto.average, auto
    if own is not None and plan and own.planned != plan["start"]:
        raise ValueError(f"average_from must be left out for an optimiser with an average of its "
                         f"own, got {settings.average_from}")  # fmt: skip
    if own is None and plan:
        own = optim.IterateAverage(optimizer, start=plan["start"], interval=plan["interval"])
    return given or own, None


def _time(settings: Settings, length: int | None, schedule: Any) -> dict[str, Any]:
    """The time of a run in the unit of its schedule."""
    unit = 1 if settings.schedule_unit == "epoch" else length
    if unit is None:
        if schedule in ("linear", "step"):
            raise ValueError(f"steps_per_epoch must be given with schedule={schedule!r} by step, "
                             "for data of no known length")  # fmt: skip
        unit = 1
    start = settings.average_from
    return {
        "length": settings.num_epochs * unit,
        "average_from": None if start is None else max(1, (start - 1) * unit),
        "warmup_length": settings.warmup,
    }


# ------------------------------------------------------------------------------------------
# Batches of one row, which batch norm in train mode cannot take: seen before they are met.

TORCH = "Expected more than 1 value per channel"  # what torch says of it


def check_last_batch(parts: Parts, settings: Settings) -> None:
    """Raise where the last batch of an epoch leaves a process one row, and the model takes none.

    Maps of several pixels have several values in a row, so the model itself is asked, with its
    buffers and the generators put back; one with lazy layers is not, for it would take their shape.
    """
    rows = parts.feed.last_rows
    if rows is None or rows // world_size() > 1 or not batch_norms(parts.model):
        return
    if _is_unfinished(parts.model):
        return
    parts.model.train()
    kept = [(buffer, buffer.clone()) for buffer in parts.model.buffers()]
    step = parts.step.adapter
    adapter = Adapter(parts.model, step.loss_fn.call, step.custom)  # neither wrapped nor compiled
    cuda = [parts.device] if parts.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            adapter(parts.feed.row())
    except ValueError as error:
        raise explained(error, rows, settings) from error
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


def _is_unfinished(model: nn.Module) -> bool:
    return any(is_lazy(x) for x in (*model.parameters(), *model.buffers()))


def explained(error: ValueError, rows: int, settings: Settings) -> ValueError:
    """An error of a step in words that say what to do, where it is of this kind."""
    if TORCH not in str(error):
        return error
    size, own = settings.batch_size, "give drop_last=True to the loader, or another batch size"
    here = f"give drop_last=True (--drop-last), or another batch_size (--batch-size) than {size}"
    return ValueError(f"batch norm needs two rows or more to train on, got a batch of {rows} in "
                      f"{world_size()} process{'es' * (world_size() > 1)}: "
                      f"{own if size is None else here}")  # fmt: skip
