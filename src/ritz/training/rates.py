"""The schedule of a run, by name, shape or as it is given."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ritz._core.checks import check_choice
from ritz.optim.schedules import Schedule, averaging_decay, linear_decay, step_decay, warmup

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
